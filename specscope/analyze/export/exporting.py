"""Captures to tables, record by record."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specscope.analyze.export.chunk import StepRows
from specscope.analyze.export.requests import MOST, Requests
from specscope.analyze.export.schema import cells, clean, own
from specscope.analyze.export.writer import Tables, check_folder, open_tables
from specscope.errors import UserError
from specscope.trace.files import BROKEN, open_plain, reason
from specscope.trace.history.history import History
from specscope.trace.kinds import CAPTURE, kind_of, start_of
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, RequestEnd, RequestInfo, RunInfo, StepRecord
from specscope.trace.stored import CaptureSource
from specscope.trace.wire.reading import CaptureReader, without_gc

# A capture is read record by record: all that is kept is which steps its last branch goes through.

BEGINS = b"specscope.after"  # the attribute of an engine's step that begins a branch
NOBODY = RequestInfo("", 0, 0, "", np.zeros(0, np.int32), SamplingParams())
ENDED = RequestEnd(NOBODY, 0, FinishReason.STOP, "", np.zeros(0, np.int32))
Progress = Callable[[float], None]


class Streamed(History):
    """A history that passes each record on and keeps none, except the counts that CaptureReader needs at the end."""

    def __init__(self, each: Callable[[StepRecord], None]) -> None:
        super().__init__()
        self._each = each

    def append(self, record: StepRecord) -> None:
        """Take one more step."""
        for info in record.admitted:
            self.request(info.id).end = None
        for part in record.requests:
            self.request(part.request).end = None
            self.acceptance.steps += part.is_judged
        for end in record.finished:
            self.request(end.info.id).end = ENDED
        self._each(record)


class Path:
    """Which steps are on the path to the last one, as in History: back to where a branch begins, and on from there."""

    def __init__(self) -> None:
        self._steps = array("q")  # all of them, ascending
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
        place = bisect_left(self._steps, step)
        return place < len(self._steps) and self._steps[place] == step

    def holds(self, step: int) -> bool:
        """Whether a step is on the path. To be called when all records have been added."""
        if self._spans is None:
            self._spans = self._find()
        return any(first <= step <= last for first, last in self._spans)

    def _find(self) -> list[tuple[int, int]]:
        spans = []
        last = self._steps[-1] if self._steps else -1
        while last >= 0:
            jump = bisect_right(self._jumps, last) - 1
            spans.append((self._jumps[jump] if jump >= 0 else 0, last))
            last = self._after[jump] if jump >= 0 else -1
        return spans


def find_path(name: str, progress: Progress) -> Path | None:
    """Which steps of a capture are on the path to its end; None where all are. It is read only if it has branches."""
    if not _has_branches(name):
        return None
    path = Path()
    stream(CaptureReader(name, Streamed(path.add)), progress)
    return path


def _has_branches(name: str) -> bool:
    """Whether it may have: of a file in another form than a capture's own, only reading it tells."""
    files = CaptureSource.of(name).files
    if len(files) > 1 or kind_of(start_of(files[0])) is not CAPTURE:
        return True
    try:
        with open(files[0], "rb") as raw, open_plain(raw, name) as file:
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
        return max(sum(os.stat(file).st_size for file in CaptureSource.of(name).files), 1)
    except OSError:
        return 1  # reading it reports what is wrong


OF_RUN, OF_INTERVAL = own(RunInfo, "runs"), own(Aggregate, "intervals")


@dataclass
class Exported:
    """What was written."""

    rows: dict[str, int]  # of each table
    warnings: list[str] = field(default_factory=list)  # what is damaged or missing in the captures


def export(captures: Sequence[str], folder: str, progress: Progress | None = None) -> Exported:
    """Write the tables of some captures into a folder. Raises UserError; then nothing is written."""
    progress = progress or (lambda share: None)
    check_folder(folder)
    real = [os.path.realpath(name) for name in captures]
    for index, name in enumerate(captures):
        if real[index] in real[:index]:
            raise UserError(f"{name} is given twice")
        CaptureReader(name)  # a file that is no capture is refused before anything is written
    sizes = [size(name) for name in captures]
    warnings: list[str] = []
    with open_tables(folder) as tables:
        for index, name in enumerate(captures):
            before = sum(sizes[:index])
            written = _Export(name, tables, _part_of(progress, before / sum(sizes), sizes[index] / sum(sizes)))
            warnings += written.warnings
    return Exported(tables.rows, warnings)


def _part_of(progress: Progress, start: float, share: float) -> Progress:
    """The progress of a part of the whole."""
    return lambda done: progress(start + share * done)


class _Export:
    """The export of one capture; the constructor writes its rows."""

    def __init__(self, name: str, tables: Tables, progress: Progress) -> None:
        self._tables = tables
        self._name = clean(os.fsencode(name).decode("utf-8", "backslashreplace"))
        path = find_path(name, _part_of(progress, 0, 0.5))
        self._path = path
        self._steps = 0
        self._intervals: list[dict[str, Any]] = []
        self._history = Streamed(self._take)
        self._begun: tuple[StepRows, Requests] | None = None
        reader = CaptureReader(name, self._history)
        stream(reader, progress if path is None else _part_of(progress, 0.5, 0.5))
        self.warnings = reader.warnings
        self._finish()

    def _parts(self) -> tuple[RunInfo, StepRows, Requests]:
        """The run, and what collects its records; made on the first call, when the run is known."""
        run = self._history.run
        assert run is not None  # CaptureReader ensures it
        if self._begun is None:
            vocabulary = self._history.vocabulary
            requests = Requests(run.run_id, self._name, vocabulary, self._path is not None)
            self._begun = (StepRows(run, self._name, vocabulary, requests.prompt_length), requests)
        return run, *self._begun

    def _take(self, record: StepRecord) -> None:
        run, chunk, requests = self._parts()
        current = self._path is None or self._path.holds(record.step)
        self._steps += 1
        requests.add(record, current)
        chunk.add(record, current)
        if record.aggregate is not None:
            times = {"step": record.step, "start_ns": record.start_ns, "end_ns": record.end_ns}
            self._intervals.append({**self._of(run), **times, **cells(record.aggregate, OF_INTERVAL)})
        if chunk.is_full or requests.is_full or len(self._intervals) >= MOST:
            self._flush()

    def _flush(self) -> None:
        _, chunk, requests = self._parts()
        chunk.flush(self._tables)
        requests.flush(self._tables)
        self._tables.add_rows("intervals", self._intervals)
        self._intervals.clear()

    def _finish(self) -> None:
        run, _, requests = self._parts()
        self._flush()
        requests.finish(self._tables)
        vocabulary, of = self._history.vocabulary, self._of(run)
        words = []
        for token in sorted(vocabulary.pieces):
            piece = vocabulary.pieces[token].decode("utf-8", "backslashreplace")
            words.append({**of, "token": token, "piece": piece, "special": token in vocabulary.special})
        self._tables.add_rows("tokens", words)
        told = {
            "draft_vocab": run.draft_vocab or None,
            "text": run.tells_text,
            "tokens": run.tells_tokens,
            "engine_steps": self._steps,
            "lost": self._history.lost,
            "warnings": [clean(text) for text in self.warnings],
        }
        self._tables.add_rows("runs", [{**of, **cells(run, OF_RUN), **told}])

    def _of(self, run: RunInfo) -> dict[str, Any]:
        """The columns that every table has."""
        return {"run": run.run_id, "capture": self._name}
