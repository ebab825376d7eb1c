"""A capture for scripts and notebooks: its tables in memory, and its records.

    run = specscope.load("run.jsonl")
    run.nodes.to_pandas().groupby("depth").outcome.value_counts()
    run.requests["r0"].steps[2].verdict.coin

The tables are Arrow's, with the columns that `specscope export` writes; they need pip install 'specscope[export]'.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.errors import UserError
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.records import RunInfo
from specscope.trace.wire.reading import read_capture

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class LoadedRun:
    """A run, along the path to its end: what was rewound is not in it."""

    source: str
    history: History
    warnings: list[str] = field(default_factory=list)  # what is damaged or missing in the capture

    @property
    def info(self) -> RunInfo:
        """The run's header."""
        assert self.history.run is not None  # CaptureReader sees to it
        return self.history.run

    @property
    def requests(self) -> dict[str, RequestHistory]:
        """The requests by id; `steps` of each are its records."""
        return self.history.requests

    @property
    def steps(self) -> pa.Table:
        """A row for each request's part in a step."""
        return self._tables["steps"]

    @property
    def nodes(self) -> pa.Table:
        """A row for each drafted node."""
        return self._tables["nodes"]

    @property
    def finals(self) -> pa.Table:
        """A row for each decode step's final token."""
        return self._tables["finals"]

    @cached_property
    def parents(self) -> pa.Table:
        """A row for each node, or root, whose children were tried: what target and drafter gave there."""
        _need_arrow()
        import pyarrow as pa

        from specscope.analyze.export.nodes import parent_columns
        from specscope.analyze.export.schema import PARENTS, as_batch

        places = [(record, part) for record in self.history.steps for part in record.requests if part.verdict]
        c = Columns([part for _, part in places])
        step = c.parents.step.tolist()
        keys = [
            [self.info.run_id] * len(step),
            [self.source] * len(step),
            [places[s][0].step for s in step],
            [places[s][0].branch for s in step],
            np.ones(len(step), np.bool_),
            [places[s][1].request for s in step],
            [places[s][1].index for s in step],
        ]
        return pa.Table.from_batches([as_batch(pa.schema(PARENTS), [*keys, *parent_columns(c)])])

    @cached_property
    def _tables(self) -> dict[str, Any]:
        _need_arrow()
        from specscope.analyze.export.chunk import StepRows

        rows, held = StepRows(self.info, self.source, self.history.vocabulary, self._prompt_length), _Held()
        for record in self.history.steps:
            rows.add(record, True)
            if rows.is_full:
                rows.flush(held)
        rows.flush(held)
        return {name: held.table(name) for name in ("steps", "nodes", "finals")}

    def _prompt_length(self, request: str) -> int | None:
        info = self.requests[request].info
        return None if info is None else len(info.prompt_tokens) or None


class _Held:
    """Rows of tables in memory."""

    def __init__(self) -> None:
        self._batches: dict[str, list[pa.RecordBatch]] = {}

    def add(self, name: str, columns: Any, rows: int) -> None:  # noqa: ANN401
        from specscope.analyze.export.schema import SCHEMAS, as_batch

        if rows:
            self._batches.setdefault(name, []).append(as_batch(SCHEMAS[name], columns))

    def table(self, name: str) -> pa.Table:
        import pyarrow as pa

        from specscope.analyze.export.schema import SCHEMAS

        return pa.Table.from_batches(self._batches.get(name, []), SCHEMAS[name]).unify_dictionaries()


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Read a capture. Raises UserError where it is none."""
    reader = read_capture(path)
    return LoadedRun(os.fspath(path), reader.history, reader.warnings)


def _need_arrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise UserError("tables need pyarrow: pip install 'specscope[export]'") from None
