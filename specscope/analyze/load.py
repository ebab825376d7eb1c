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
from typing import TYPE_CHECKING

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

    @property
    def parents(self) -> pa.Table:
        """A row for each node, or root, whose children were tried: what target and drafter gave there."""
        return self._tables["parents"]

    @cached_property
    def _tables(self) -> dict[str, pa.Table]:
        try:
            from specscope.analyze.export.rows import tables_of
        except ImportError:
            raise UserError("tables need pyarrow: pip install 'specscope[export]'") from None
        return tables_of(self.history, self.source)


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Read a capture. Raises UserError where it is none."""
    reader = read_capture(path)
    return LoadedRun(os.fspath(path), reader.history, reader.warnings)
