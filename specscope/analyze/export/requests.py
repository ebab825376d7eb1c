"""Rows of the table `requests`: one for each time that a request ended, and one for each request that did not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specscope.analyze.export.schema import cells, clean, own
from specscope.analyze.export.writer import Tables
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import RequestEnd, RequestInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary

MOST = 1024  # rows that are held as Python objects
OF_PARAMS = [column for column in own(SamplingParams, "requests") if column.name != "stop"]  # the one that matched
OF_INFO = own(RequestInfo, "requests")
OF_END = [column for column in own(RequestEnd, "requests") if column.name != "output"]


@dataclass
class _Known:
    """A request that has not ended, or may not have ended on the run's last branch."""

    info: RequestInfo | None = None
    branch: int = 0  # of its last step
    current: bool = False  # whether some of it is on the path to the run's end
    ended: bool = False
    ended_there: bool = False  # whether it ended on the path to the run's end


class Requests:
    """Collects a run's records in order; `flush` writes the rows of those that ended, `finish` the others' too."""

    def __init__(self, run: str, capture: str, vocabulary: Vocabulary, branched: bool) -> None:
        """`branched`: the run was rewound, so that a request may run and end again."""
        self._of = {"run": run, "capture": capture}
        self._vocabulary = vocabulary
        self._branched = branched
        self._rows: list[dict[str, Any]] = []
        self._known: dict[str, _Known] = {}
        self._lengths: dict[str, int] = {}  # tokens of each prompt

    @property
    def is_full(self) -> bool:
        """Whether enough is held to be flushed."""
        return len(self._rows) >= MOST

    def prompt_length(self, request: str) -> int | None:
        """Tokens of a request's prompt, None where they are not known."""
        return self._lengths.get(request) or None

    def add(self, record: StepRecord, current: bool) -> None:
        """One engine step. `current`: it is on the path to the end of the run."""
        for info in record.admitted:
            self._seen(info.id, record.branch, current).info = info
            self._lengths[info.id] = len(info.prompt_tokens)
        for part in record.requests:
            self._seen(part.request, record.branch, current)
        for end in record.finished:
            name = end.info.id
            self._rows.append(self._row(name, record.branch, current, end.info, end))
            if self._branched:
                known = self._seen(name, record.branch, current)
                known.ended, known.ended_there = True, known.ended_there or current
            else:
                self._known.pop(name, None)

    def _seen(self, name: str, branch: int, current: bool) -> _Known:
        known = self._known.setdefault(name, _Known())
        known.branch, known.current = branch, known.current or current
        return known

    def flush(self, tables: Tables) -> None:
        """Write the rows held so far."""
        tables.add_rows("requests", self._rows)
        self._rows.clear()

    def finish(self, tables: Tables) -> None:
        """Write the rest, and requests that did not end; those that ended on an abandoned branch alone are open."""
        for name, known in self._known.items():
            if not known.ended or (known.current and not known.ended_there):
                self._rows.append(self._row(name, known.branch, known.current, known.info, None))
        self.flush(tables)

    def _row(
        self, name: str, branch: int, current: bool, info: RequestInfo | None, end: RequestEnd | None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {**self._of, "request": clean(name), "branch": branch, "current": current}
        if info is not None:
            form = info.params.structured_outputs
            row |= cells(info.params, OF_PARAMS) | {
                "stop_strings": [clean(text) for text in info.params.stop],
                "structured_outputs": None if form is None else clean(json.dumps(form.to_dict())),
            }
            row |= cells(info, OF_INFO) | {
                "admitted_ns": info.admitted_ns or None,
                "prompt_tokens": told_ids(info.prompt_tokens) or None,
                "prompt_length": len(info.prompt_tokens) or None,
            }
        if end is not None:
            tokens = told_ids(end.output)
            row |= cells(end, OF_END) | {
                "output": None if tokens is None else self._vocabulary.text(tokens),
                "output_tokens": tokens,
                "output_length": len(end.output),
            }
            if end.sampled is not None:
                row |= {"sampling": end.sampled.reason.value, "sampling_ratio": end.sampled.ratio or None}
        return row
