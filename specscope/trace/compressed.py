"""Compressed files, recognised by content and not by name: gzip, and zstd where a reader is installed."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from typing import Any, BinaryIO, cast

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable, shell_word

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BROKEN = (OSError, EOFError, zlib.error)  # what reading raises where compressed data is damaged, or ends early


def is_compressed(start: bytes) -> bool:
    """Whether a file with this start is compressed in a known format."""
    return start.startswith((GZIP, ZSTD))


def open_plain(file: BinaryIO, name: str) -> BinaryIO:
    """The decompressed content of an open file. Raises UserError for a compression that cannot be read here."""
    start = file.peek(4)[:4]  # type: ignore[attr-defined]
    if start.startswith(GZIP):
        return cast("BinaryIO", gzip.GzipFile(fileobj=file))
    return _zstd(file, name) if start == ZSTD else file


def _zstd(file: BinaryIO, name: str) -> BinaryIO:
    """A zstd reader: Python's own module (3.14), the zstandard package, or pyarrow, which `specscope[export]` has."""
    for module in ("compression.zstd", "zstandard", "pyarrow"):
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue
        if module == "pyarrow":
            return io.BufferedReader(library.CompressedInputStream(file, "zstd"))
        if module == "zstandard":
            plain = library.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        else:
            plain = library.open(file, "rb")
        return io.BufferedReader(_Checked(plain, library.ZstdError))
    raise UserError(f"{printable(name)} is compressed with zstd: zstd -d {shell_word(name)}, or pip install zstandard")


class _Checked(io.RawIOBase):
    """A reader whose error is an OSError, as that of the others is."""

    def __init__(self, plain: BinaryIO, error: type[Exception]) -> None:
        self._plain = plain
        self._error = error

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        """As RawIOBase has it. Raises OSError."""
        try:
            data = self._plain.read(len(buffer))
        except self._error as error:
            raise OSError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


def reason(error: BaseException) -> str:
    """Why it could not be read, in words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "its compressed data is damaged, or ends early"
