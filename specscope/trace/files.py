"""Files that people name: text that is read line by line within bounds, and outputs that may not hit anything else."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from specscope.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_LINE = 8 * 2**20  # bytes
LARGEST = 256 * 2**20  # bytes of a file of lines
LARGEST_DATA = 2**30  # of texts to train on
LARGEST_OBJECT = 64 * 2**20  # of a config or another file of one JSON object
PATIENCE = 3.0  # seconds that a named pipe may be without a writer

# How the files begin that specscope writes: only such a file may be replaced.
CAPTURE = (b'{"resourceSpans":',)
PAGE = (b"<!doctype html>",)
FIGURES = (b"{\n",)  # bench --json: indented, which a line of JSON Lines never is
PLOT = (b"<?xml", b"\x89png")
TRAINING = {"data", "training.pt", "training.jsonl"}  # what a folder holds that `train` has written to


def read_lines(path: str, what: str, *, largest: int = LARGEST) -> Iterator[tuple[int, str]]:
    """(number, text) of each line of a text file; `-` is standard input. Holds one line at a time.

    Raises UserError, with the number of the line where there is one.
    """
    read = 0
    try:
        with _open(path) as file:
            for number in count(1):
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                read += len(line)
                if len(line) > LONGEST_LINE:
                    raise UserError(f"{path}, line {number}: the line is longer than {LONGEST_LINE >> 20} MiB")
                if read > largest:
                    raise UserError(f"{path} is larger than {largest >> 20} MiB, the limit")
                yield number, _text(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error


def check_whole(path: str | os.PathLike[str], what: str, largest: int) -> None:
    """Refuse what `read_whole` would, without reading it. Raises UserError, and OSError where there is none."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"cannot read {what} {path}: it is no regular file")
    if found.st_size > largest:
        raise UserError(f"cannot read {what} {path}: it is larger than {largest >> 20} MiB, the limit")


def read_whole(path: str | os.PathLike[str], what: str, largest: int) -> bytes:
    """A regular file of at most `largest` bytes: what has no end, or grows meanwhile, is refused.

    Raises UserError, and OSError as `open` does.
    """
    check_whole(path, what, largest)
    with open(path, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise UserError(f"cannot read {what} {path}: it is larger than {largest >> 20} MiB, the limit")
    return data


def read_object(path: Path, largest: int = LARGEST_OBJECT) -> dict[str, Any]:
    """A file that must hold one JSON object, as transformers writes it: with NaN and Infinity. Raises UserError."""
    try:
        raw = json.loads(read_whole(path, "the file", largest))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError:
        raise UserError(f"{path} is not usable: its JSON is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} is not a JSON object")
    return raw


def _text(line: bytes, where: str) -> str:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where}: this is not UTF-8 text") from None
    if "\0" in text:
        raise UserError(f"{where}: this is not text: it holds NUL bytes")
    return text.rstrip("\r\n")


def _open(path: str) -> BinaryIO:
    if path == "-":
        return open(0, "rb", closefd=False)
    return _open_pipe(path) if stat.S_ISFIFO(os.stat(path).st_mode) else open(path, "rb")


def _open_pipe(path: str) -> BinaryIO:
    """Opening a named pipe waits for a writer: for a while, not for ever."""
    opened: list[BinaryIO | OSError] = []

    def wait() -> None:
        try:
            opened.append(open(path, "rb"))  # noqa: SIM115
        except OSError as error:
            opened.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not opened:
        raise UserError(f"{path} is a pipe without a writer")
    if isinstance(opened[0], OSError):
        raise opened[0]
    return opened[0]


def check_output(
    path: str, flag: str, inputs: Iterable[str | os.PathLike[str] | None], begins: Iterable[bytes]
) -> None:
    """Refuse an output that cannot be written, or that would take the place of anything but an older output.

    `inputs`: what the same command reads; `begins`: how an output of this kind begins. Writes nothing.
    """
    if not path:
        raise UserError(f"{flag} needs the name of a file")
    try:
        found = os.stat(path)
    except FileNotFoundError:
        _check_new(path, flag)
        return
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path} is a folder: {flag} takes the name of a file")
    if not stat.S_ISREG(found.st_mode):
        return  # a device or a pipe holds nothing that could be lost
    for name in inputs:
        if name is not None and _is_same(name, found):
            raise UserError(f"{flag} {path} would overwrite the input {name}: give another name")
    try:
        with open(path, "r+b") as file:  # not truncated, not created
            start = file.read(64)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    if start and not start.lower().startswith(tuple(begin.lower() for begin in begins)):
        raise UserError(f"{path} exists and was not written by this command: remove it, or give another name")


def check_training(folder: str, inputs: Iterable[str | os.PathLike[str] | None]) -> None:
    """Refuse a folder for `train` that holds anything but an older run of it, or what it reads. Writes nothing."""
    if not folder:
        raise UserError("-o needs the name of a folder")
    try:
        held = set(os.listdir(folder))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UserError(f"{folder} is a file: -o takes a folder") from None
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from error
    for name in inputs:
        if name is not None and (
            _is_same(name, os.stat(folder)) or _is_same(os.path.dirname(name) or ".", os.stat(folder))
        ):
            raise UserError(f"-o {folder} would overwrite the input {name}: give another folder")
    if held and not held & TRAINING:
        raise UserError(f"{folder} is not empty and was not made by specscope train: give another folder")


def _check_new(path: str, flag: str) -> None:
    """There is no such file; whether it can be made."""
    if path.endswith(os.sep):
        raise UserError(f"{path} is a folder: {flag} takes the name of a file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise UserError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {path}: Permission denied")


def _is_same(name: str | os.PathLike[str], found: os.stat_result) -> bool:
    """By whatever path, link or redirection; `-` is standard input."""
    try:
        return os.path.samestat(os.fstat(0) if name == "-" else os.stat(name), found)
    except OSError:
        return False


def keep_spaces(svg: str) -> str:
    """The picture, such that every renderer keeps the spaces of its texts: some cut those at the ends."""
    return svg.replace("<text ", '<text xml:space="preserve" ')


def save_figure(figure: Figure, path: str) -> None:
    """A plot as SVG or PNG, by the name's end; the same figure gives the same SVG. Raises UserError."""
    kind = Path(path).suffix.lower().removeprefix(".")
    picture = BytesIO()
    figure.savefig(picture, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    data = picture.getvalue()
    try:
        Path(path).write_bytes(keep_spaces(data.decode()).encode() if kind == "svg" else data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
