"""A capture record by record: nothing is kept but which steps its last branch goes through."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np

from specscope.errors import UserError
from specscope.trace.compressed import BROKEN, open_plain, reason
from specscope.trace.history.history import History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, StepRecord
from specscope.trace.wire.reading import CaptureReader, without_gc

BEGINS = b"specscope.after"  # the attribute of an engine's step that begins a branch
NOBODY = RequestInfo("", 0, 0, "", np.zeros(0, np.int32), SamplingParams())
ENDED = RequestEnd(NOBODY, 0, FinishReason.STOP, "", np.zeros(0, np.int32))
Progress = Callable[[float], None]


class Streamed(History):
    """A history that hands each record on and keeps none. What CaptureReader asks at the end is counted."""

    def __init__(self, each: Callable[[StepRecord], None]) -> None:
        super().__init__()
        self._each = each

    def append(self, record: StepRecord) -> None:
        """Take one more step."""
        for info in record.admitted:
            self.request(info.id).end = None
        for part in record.requests:
            self.request(part.request).end = None
            self.acceptance.steps += part.verdict is not None
        for end in record.finished:
            self.request(end.info.id).end = ENDED
        self._each(record)


class Path:
    """Which steps lie on the way to the last one, as History goes: back to where a branch begins, and on from there."""

    def __init__(self) -> None:
        self._steps = array("q")  # all of them, rising
        self._jumps: list[int] = []  # steps that do not follow the one before them in the capture
        self._after: list[int] = []  # what each of those follows; -1 for none
        self._spans: list[tuple[int, int]] | None = None

    def add(self, record: StepRecord) -> None:
        """The next record."""
        after = record.after
        if after is not None and self._steps and after != self._steps[-1] and (after < 0 or self._knows(after)):
            self._jumps.append(record.step)
            self._after.append(after)
        self._steps.append(record.step)

    def _knows(self, step: int) -> bool:
        at = bisect_left(self._steps, step)
        return at < len(self._steps) and self._steps[at] == step

    def holds(self, step: int) -> bool:
        """Whether it lies on the way. Ask when all records were added."""
        if self._spans is None:
            self._spans = self._find()
        return any(first <= step <= last for first, last in self._spans)

    def _find(self) -> list[tuple[int, int]]:
        spans = []
        last = self._steps[-1] if self._steps else -1
        while last >= 0:
            at = bisect_right(self._jumps, last) - 1
            spans.append((self._jumps[at] if at >= 0 else 0, last))
            last = self._after[at] if at >= 0 else -1
        return spans


def find_path(name: str, progress: Progress) -> Path | None:
    """Which steps of a capture are on the way to its end; None where all are. It is read only if it has branches."""
    if not _has_branches(name):
        return None
    path = Path()
    stream(CaptureReader(name, Streamed(path.add)), progress)
    return path


def _has_branches(name: str) -> bool:
    try:
        with open(name, "rb") as raw, open_plain(raw, name) as file:
            return any(BEGINS in line for line in file)
    except BROKEN as error:
        raise UserError(f"cannot read {name}: {reason(error)}") from error


def stream(reader: CaptureReader, progress: Progress) -> None:
    """Read a capture to its end."""
    with without_gc():
        while reader.read(0.2):
            progress(reader.progress)


def size(name: str) -> int:
    """Bytes of a file, at least 1."""
    try:
        return max(os.stat(name).st_size, 1)
    except OSError:
        return 1  # reading it says what is wrong
