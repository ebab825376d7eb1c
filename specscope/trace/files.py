"""Files that the user names: text read line by line within bounds, and outputs that never overwrite another file.

Where a person names the file, an output may replace an older one of its kind, and nothing else. What starts unattended
takes a new name. A file that is being written is locked, and the lock ends with its process.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, BinaryIO

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable, shell_word
from specscope.whole_file import open_device

LONGEST_LINE = 8 * 2**20  # bytes
LARGEST = 256 * 2**20  # bytes of a file of lines
MOST_NAMES = 1000  # names tried for a capture that may replace no file
PRIVATE = 0o600  # the mode of what holds prompts
PATIENCE = 3.0  # seconds that a named pipe may be without a writer

HEAD = 4096  # bytes of a file by which its kind is known


@dataclass(frozen=True)
class Made:
    """A kind of file that specscope writes, as it is known by its head, in lower case."""

    begins: tuple[bytes, ...]
    holds: bytes  # what other programs' files with the same start do not have


CAPTURE = Made((b'{"resourcespans":',), b'"specscope.run.id"')
PAGE = Made((b"<!doctype html>",), b"<title>specscope ")
FIGURES = Made((b"{\n",), b'"specscope')  # indented, which a line of JSON Lines never is


class Existing(Enum):
    """What happens to a capture that already exists."""

    REPLACE = auto()  # a person named it
    REFUSE = auto()  # likewise, with --no-clobber
    NEW_NAME = auto()  # nobody looks: run.jsonl stays, and run.2.jsonl is written


class TakenError(UserError):
    """A file that could be written but must not be."""


def read_lines(path: str, what: str, *, largest: int = LARGEST) -> Iterator[tuple[int, str]]:
    """(number, text) of each line of a text file, one at a time; `-` is standard input. Raises UserError."""
    read = 0
    try:
        with _open(path) as raw, open_plain(raw, path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
                read += len(line)
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{path}, line {number}: the line is longer than {LONGEST_LINE >> 20} MiB")
                if read > largest:
                    raise UserError(f"{path} is larger than {largest >> 20} MiB, the limit")
                try:
                    text = line.decode("utf-8-sig")
                except UnicodeDecodeError:
                    raise UserError(f"{path}, line {number}: this is not UTF-8 text") from None
                if "\0" in text:
                    raise UserError(f"{path}, line {number}: this is not text: it contains NUL bytes")
                yield number, text.rstrip("\r\n")
    except BROKEN as error:
        raise UserError(f"cannot read {what} {path}: {reason(error)}") from error


def _open(path: str) -> BinaryIO:
    """Open a file, standard input, or a named pipe: then with a time limit on the wait for a writer."""
    if path == "-":
        return open(0, "rb", closefd=False)
    if not stat.S_ISFIFO(os.stat(path).st_mode) or not os.access(path, os.R_OK):
        return open(path, "rb")
    opened = Future[BinaryIO]()
    threading.Thread(target=lambda: opened.set_result(open(path, "rb")), daemon=True).start()  # noqa: SIM115
    try:
        return opened.result(PATIENCE)
    except TimeoutError:
        raise UserError(f"{path} is a pipe without a writer") from None


def check_output(
    path: str,
    flag: str,
    inputs: Iterable[str | os.PathLike[str] | None],
    made: Made,
    existing: Existing = Existing.REPLACE,
) -> None:
    """Refuse an output that cannot be written, or that would take the place of anything but an older output.

    `inputs`: what the same command reads; `made`: the kind of the output. Writes nothing.
    """
    if not path:
        raise UserError(f"{flag} needs the name of a file")
    if made is CAPTURE:
        Packer(path)  # raises where nothing compresses as the name says
    try:
        status = os.stat(path)
    except FileNotFoundError:
        _check_new(path, flag)
        return
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise UserError(f"{path} is a folder: {flag} takes the name of a file")
    if not stat.S_ISREG(status.st_mode):
        return  # a device or a pipe holds nothing that could be lost
    if existing is Existing.NEW_NAME:
        _check_new(path, flag)
        return
    for name in inputs:
        if name is not None and _is_same(name, status):
            raise UserError(f"{flag} {path} would overwrite the input {name}: give another name")
    try:
        with open(path, "r+b") as file:  # not truncated, not created
            _refuse_taken(file.fileno(), path, made, existing)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def open_capture(path: Path, existing: Existing) -> tuple[Path, BinaryIO]:
    """An empty, locked and private file, and its name, which may be a new one. Raises TakenError, and OSError."""
    if existing is not Existing.NEW_NAME:
        return path, _open_empty(path, existing)
    for name in (path, *(path.with_stem(f"{path.stem}.{number}") for number in range(2, MOST_NAMES))):
        with suppress(TakenError):
            return name, _open_empty(name, existing)
    raise TakenError(f"{path} exists, and so do {MOST_NAMES - 2} names like it: remove some, or give another name")


def _open_empty(path: Path, existing: Existing) -> BinaryIO:
    if path.exists() and not path.is_file():
        return open_device(path)
    number = os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        _refuse_taken(number, path, CAPTURE, existing)
        if not _is_same(path, os.fstat(number)):  # whoever wrote it removed it before the lock was ours
            raise TakenError(f"{path} was removed by another process: try again")
        os.ftruncate(number, 0)
        with suppress(PermissionError):  # another user's file
            os.fchmod(number, PRIVATE)
    except BaseException:
        os.close(number)
        raise
    return open(number, "wb", buffering=0)


def _refuse_taken(number: int, path: str | Path, made: Made, existing: Existing) -> None:
    """Lock an open file. Raises TakenError where another process writes it or its content may not be replaced."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TakenError(f"{path} is being written by another process: give another name") from None
    except OSError:
        pass  # a file system without locks
    with open(number, "rb", closefd=False) as file:
        head, size = plain_start(file, str(path), HEAD).lower(), os.fstat(number).st_size
    os.lseek(number, 0, os.SEEK_SET)
    if size and not (head.startswith(made.begins) and made.holds in head):
        raise TakenError(f"{path} exists and was not written by this command: remove it, or give another name")
    if size and existing is not Existing.REPLACE:
        raise TakenError(f"{path} exists, and --no-clobber keeps it: remove it, or give another name")


def _check_new(path: str, flag: str) -> None:
    if path.endswith(os.sep):
        raise UserError(f"{path} is a folder: {flag} takes the name of a file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise UserError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: Permission denied")


def _is_same(name: str | os.PathLike[str], status: os.stat_result) -> bool:
    """Whether a name leads to this file, by any path, link or redirection; `-` is standard input."""
    try:
        return os.path.samestat(os.fstat(0) if name == "-" else os.stat(name), status)
    except OSError:
        return False


GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BROKEN = (OSError, EOFError)  # what reading raises where compressed data is damaged, or ends early
PIECE = 1024  # bytes that are decompressed at once: of gzip to at most 1 MiB, of zstd to 32
ZSTD_END = b"\x01\x00\x00"  # a last block, empty, of a frame without a checksum


def is_compressed(start: bytes) -> bool:
    return start.startswith((GZIP, ZSTD))


def open_plain(file: BinaryIO, name: str) -> BinaryIO:
    """The decompressed content of an open file. Raises UserError for a compression that cannot be read here."""
    start = file.peek(4)[:4]  # type: ignore[attr-defined]
    if start.startswith(GZIP):
        return io.BufferedReader(_Plain(file, lambda: zlib.decompressobj(31), zlib.error))
    if start != ZSTD:
        return file
    module, zstd = _library("compression.zstd", "zstandard")
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
            self._stream = self._stream or self._new()
            try:
                self._plain, self._packed = memoryview(self._stream.decompress(self._packed)), b""
            except self._error as error:
                raise OSError(str(error)) from None
            if self._stream.eof:
                self._packed, self._stream = self._stream.unused_data, None
        some, self._plain = self._plain[: len(buffer)], self._plain[len(buffer) :]
        buffer[: len(some)] = some
        return len(some)


def is_being_written(path: str | os.PathLike[str]) -> bool:
    """Whether a process writes it now, as captures are written."""
    with open(path, "rb") as file, suppress(OSError):  # a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def reason(error: BaseException) -> str:
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
        self._end = self._tried = b""  # of a stream that lost a part: it goes before the next one; that which went last

    def add(self, data: bytes) -> bytes:
        """A part, such that it can be read as soon as it is written; the end of a stream before it."""
        if self._stream is None:
            return data
        copy = getattr(self._stream, "copy", None)
        self._before = copy and copy()
        self._tried, self._end = self._end, b""
        return b"".join((self._tried, self._stream.compress(data), self._stream.flush(self._part)))

    def lost(self) -> None:
        """The last part was not written: a new stream begins."""
        if self._new is not None:
            self._end = self._tried or (self._before.flush(self._last) if self._before else ZSTD_END)
            self._stream = self._new()

    def close(self) -> bytes:
        return b"" if self._stream is None else self._end + self._stream.flush(self._last)
