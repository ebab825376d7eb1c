"""Reading capture files: OTLP JSON Lines to a History, a piece at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from specscope.errors import UserError
from specscope.trace.history import History
from specscope.trace.records import StepRecord
from specscope.trace.schema import whole
from specscope.trace.unspan import Decoder, run_info


def _plain(value: dict[str, Any]) -> Any:  # noqa: ANN401
    """The Python value of an OTLP AnyValue."""
    kind: str = next(iter(value), "")
    content: Any = value.get(kind)
    if kind == "intValue":
        return int(content)
    if kind != "arrayValue":
        return content
    values = content.get("values", ())
    if values and "intValue" in values[0]:
        return [int(v["intValue"]) for v in values]
    if values and "doubleValue" in values[0]:
        return [v["doubleValue"] for v in values]
    return [_plain(v) for v in values]


def plain_attributes(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """OTLP JSON attributes as a dict; the drawing is left out, it can be drawn again."""
    return {pair["key"]: _plain(pair["value"]) for pair in pairs if pair["key"] != "specscope.drawing"}


class CaptureReader:
    """Reads a capture into `history`, a piece at a time, so that a screen can show the beginning at once.

    Raises UserError for a file that is none. A torn last line is skipped; `warnings` says how much is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.warnings: list[str] = []
        self.history = History()
        self.done = False
        self._decoder = Decoder()
        self.history.vocabulary = self._decoder.vocabulary
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115
            self.size = self.path.stat().st_size
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        self._lines = self._records()
        self._append(next(self._lines, []))  # the resource at least: refuses what is no capture

    def read(self, seconds: float | None = None) -> bool:
        """Read for about so long, or to the end; True where there is more."""
        stop = None if seconds is None else time.monotonic() + seconds
        for records in self._lines:
            self._append(records)
            if stop is not None and time.monotonic() > stop:
                return True
        if not self.done:
            self._finish()
        return False

    @property
    def progress(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return 1.0 if self.done else self._file.tell() / max(self.size, 1)

    def _append(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.history.append(record)

    def _records(self) -> Iterator[list[StepRecord]]:
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and not _whole(line):
                lost = f"{len(line):,} of {self.size:,} bytes are lost"
                self.warnings.append(f"{self.path.name} was cut off: its last line is torn, {lost}")
                break
            if line.strip():
                yield self._line(line, number)
        yield self._decoder.flush()

    def _line(self, line: bytes, number: int) -> list[StepRecord]:
        """The records that one line completes."""
        try:
            return [record for part in orjson.loads(line)["resourceSpans"] for record in self._resource_spans(part)]
        except UserError as error:
            raise UserError(f"{self.path}, line {number}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            what = "is not a capture: specscope capture writes them" if number == 1 else f"line {number} is damaged"
            raise UserError(f"{self.path} {what} ({type(error).__name__})") from None

    def _resource_spans(self, part: Mapping[str, Any]) -> list[StepRecord]:
        resource = plain_attributes(part["resource"]["attributes"])
        if self.history.run is None:
            self.history.run = run_info(resource)
        elif resource.get("specscope.run.id") != self.history.run.run_id:
            raise UserError("the file holds more than one run; keep each in a file of its own")
        records: list[StepRecord] = []
        for by_scope in part["scopeSpans"]:
            for span in by_scope.get("spans", ()):
                start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                attributes = plain_attributes(span.get("attributes", ()))
                records += self._decoder.feed(span["name"], start, end, attributes)
        return records

    def _finish(self) -> None:
        self.done = True
        self._file.close()
        lost = self._decoder.lost
        self.history.dropped = lost
        if self.history.run is None:
            raise UserError(f"{self.path} is not a capture: it is empty")
        if self._decoder.summaries:
            raise UserError(f"{self.path} holds spans of level `steps`: replay and report need level `trees`")
        if lost:
            self.warnings.append(f"{lost} steps are incomplete and left out")
        unfinished = sum(request.end is None for request in self.history.requests.values())
        if unfinished:
            self.warnings.append(f"{unfinished} of {len(self.history.requests)} requests have no end in this file")


def _whole(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except ValueError:
        return False
    return True


def read_capture(path: str | os.PathLike[str], progress: Callable[[float], None] | None = None) -> CaptureReader:
    """Read a whole capture; the result has `history` and `warnings`."""
    reader = CaptureReader(path)
    while reader.read(0.2 if progress else None):
        if progress:
            progress(reader.progress)
    return reader


def split_reference(text: str) -> tuple[str, str]:
    """FILE#REQUEST@STEP as (FILE, REQUEST@STEP); a file's name alone gives "" for the second. Raises UserError."""
    file, sign, start = text.rpartition("#")
    if not sign or os.path.exists(text):
        return text, ""
    name, sign, index = start.rpartition("@")
    if not sign or not name or whole(index) is None:
        raise UserError(f"{text}: after # a request and its step are wanted, such as run.jsonl#r3@17")
    return file, start
