"""Compressed files: gzip, and zstd where a library is installed.

They are read by their content, and written by their name: one stream of which each part can be read as soon as it is
written. Where a part is lost, the stream ends with the part before, and a new one begins.
"""

from __future__ import annotations

import importlib
import io
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable, shell_word

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BROKEN = (OSError, EOFError)  # what reading raises where compressed data is damaged, or ends early
PIECE = 1024  # bytes that are decompressed at once: of gzip to at most 1 MiB, of zstd to 32
ZSTD_END = b"\x01\x00\x00"  # a last block, empty, of a frame without a checksum


def is_compressed(start: bytes) -> bool:
    """Whether a file with this start is compressed in a known format."""
    return start.startswith((GZIP, ZSTD))


def open_plain(file: BinaryIO, name: str) -> BinaryIO:
    """The decompressed content of an open file. Raises UserError for a compression that cannot be read here."""
    start = file.peek(4)[:4]  # type: ignore[attr-defined]
    if start.startswith(GZIP):
        return io.BufferedReader(_Plain(file, lambda: zlib.decompressobj(31), zlib.error))
    if start != ZSTD:
        return file
    module, zstd = _library("compression.zstd", "zstandard", "pyarrow")  # pyarrow is in specscope[export]
    if module == "pyarrow":
        return io.BufferedReader(zstd.CompressedInputStream(file, "zstd"))
    if not module:
        way = f"zstd -d {shell_word(name)}, or pip install zstandard"
        raise UserError(f"{printable(name)} is compressed with zstd: {way}")
    new = zstd.ZstdDecompressor if module != "zstandard" else lambda: zstd.ZstdDecompressor().decompressobj()
    return io.BufferedReader(_Plain(file, new, zstd.ZstdError))


def plain_start(file: BinaryIO, name: str, size: int) -> bytes:
    """The first bytes of the content of an open file, as many as can be read. Raises UserError as `open_plain` does."""
    start = b""
    with suppress(*BROKEN):
        plain = open_plain(file, name)
        while len(start) < size and (piece := plain.read1(size - len(start))):  # type: ignore[attr-defined]
            start += piece
    return start


def _library(*names: str) -> tuple[str, Any]:
    """The first of these modules that is installed, by its name; "" where none is."""
    for name in names:
        with suppress(ImportError):
            return name, importlib.import_module(name)
    return "", None


class _Plain(io.RawIOBase):
    """What one stream after another holds. Gives all that there is of one that ends early."""

    def __init__(self, file: BinaryIO, new: Callable[[], Any], error: type[Exception]) -> None:
        self._file, self._new, self._error = file, new, error
        self._stream: Any = None
        self._packed, self._plain = b"", memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """As RawIOBase has it. Raises OSError, and EOFError at an end that comes early."""
        while not self._plain:
            self._packed = self._packed or self._file.read(PIECE)
            if self._stream is None:
                self._packed = self._packed.lstrip(b"\0")  # what fills up a file of blocks
            if not self._packed and self._stream is not None:
                raise EOFError
            if not self._packed:
                return 0
            self._take()
        some, self._plain = self._plain[: len(buffer)], self._plain[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)

    def _take(self) -> None:
        self._stream = self._stream or self._new()
        try:
            self._plain, self._packed = memoryview(self._stream.decompress(self._packed)), b""
        except self._error as error:
            raise OSError(str(error)) from None
        if self._stream.eof:
            self._packed, self._stream = self._stream.unused_data, None


def reason(error: BaseException) -> str:
    """Why it could not be read, in words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "its compressed data is damaged, or ends early"


class Packer:
    """Compresses what is written to a file, as the end of its name says, or leaves it as it is."""

    def __init__(self, name: str | os.PathLike[str]) -> None:
        """Raises UserError for zstd where nothing is installed that writes it."""
        self._new: Callable[[], Any] | None = None
        kind = os.path.splitext(name)[1]
        if kind == ".gz":
            self._new = lambda: zlib.compressobj(wbits=31)
            self._part, self._last = zlib.Z_SYNC_FLUSH, zlib.Z_FINISH
        elif kind == ".zst":
            module, zstd = _library("compression.zstd", "zstandard")
            if not module:
                raise UserError(
                    f"{name}: zstd needs pip install zstandard, or Python 3.14; a name in .gz needs neither"
                )
            if module == "zstandard":
                self._new = lambda: zstd.ZstdCompressor(3).compressobj()
                self._part, self._last = zstd.COMPRESSOBJ_FLUSH_BLOCK, zstd.COMPRESSOBJ_FLUSH_FINISH
            else:
                self._new = lambda: zstd.ZstdCompressor(3)
                self._part, self._last = zstd.ZstdCompressor.FLUSH_BLOCK, zstd.ZstdCompressor.FLUSH_FRAME
        self._stream = self._new() if self._new else None
        self._before: Any = None  # gzip's stream as it was before the last part
        self._end = b""  # of a stream that lost a part: it goes before the next one

    def add(self, data: bytes) -> bytes:
        """A part, such that it can be read as soon as it is written; the end of a stream before it."""
        if self._stream is None:
            return data
        copy = getattr(self._stream, "copy", None)
        self._before = copy and copy()
        return b"".join((self._end, self._stream.compress(data), self._stream.flush(self._part)))

    def kept(self) -> None:
        """The last part was written."""
        self._end = b""

    def lost(self) -> None:
        """It was not: a new stream begins."""
        if self._new is not None:
            self._end = self._end or (self._before.flush(self._last) if self._before else ZSTD_END)
            self._stream = self._new()

    def close(self) -> bytes:
        """What ends the file."""
        return b"" if self._stream is None else self._end + self._stream.flush(self._last)
