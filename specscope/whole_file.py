"""JSON from outside, and files that are read whole, within bounds, and written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import msgspec
import orjson

from specscope.errors import UserError

LARGEST_OBJECT = 2**24  # bytes of a model's config.json, its list of shards, or another file of one JSON object
MOST_OBJECTS = 2**21  # of a line or a document: each takes some hundred bytes in memory, however short it is written

T = TypeVar("T")


@overload
def decoded(data: bytes | bytearray | str) -> Any: ...  # noqa: ANN401
@overload
def decoded(data: bytes | bytearray | str, kind: type[T], *, strict: bool = True) -> T: ...
def decoded(data: bytes | bytearray | str, kind: Any = Any, *, strict: bool = True) -> Any:
    """JSON from a socket, a page or a file, as `kind`. Raises ValueError, however deep it is nested or much it holds.

    Where it need not be `strict`, a number may be a text.
    """
    if kind is Any and (data.count("{") if isinstance(data, str) else data.count(b"{")) > MOST_OBJECTS:
        raise ValueError(f"it holds more than {MOST_OBJECTS:,} JSON objects, the limit")
    try:
        return orjson.loads(data) if kind is Any else msgspec.json.decode(data, type=kind, strict=strict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_whole(path: str | os.PathLike[str], what: str, largest: int) -> bytes:
    """The content of a regular file of at most `largest` bytes. A file that grows while it is read is refused.

    Raises UserError, and OSError as `open` does.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UserError(f"cannot read {what} {path}: it is no regular file")
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


def open_device(path: Path) -> BinaryIO:
    """Open a device, or a pipe that somebody reads, for writing. Raises OSError; it does not wait for a reader."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, "nobody reads this pipe") if error.errno == errno.ENXIO else error from None
    os.set_blocking(number, True)
    return open(number, "wb", buffering=0)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically: where there is no room, the older one stays. Raises UserError."""
    write_parts(path, (data,))


def write_parts(path: str | os.PathLike[str], parts: Iterable[bytes]) -> int:
    """The same of parts, which need not be in memory together; returns how many bytes they have."""
    try:
        place = Path(path).resolve()  # a link stays one
        if place.exists() and not place.is_file():
            with BufferedWriter(open_device(place)) as file:
                return sum(map(file.write, parts))
        part = place.with_name(f".{place.name[:100]}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                size = sum(map(file.write, parts))
            if place.exists():
                shutil.copymode(place, part)
            os.replace(part, place)
            return size
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
