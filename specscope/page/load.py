"""A capture for scripts and notebooks: its tables in memory, its records, and how it shows itself.

    run = specscope.load("run.jsonl")
    run.nodes.to_pandas().groupby("depth").outcome.value_counts()
    run.requests["r0"].steps[2].verdict.coin
    run["r0@2"]

The tables are Arrow's, with the columns that `specscope export` writes; they need pip install 'specscope[export]'.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console

from specscope.analyze.report import Report, build_report
from specscope.analyze.tables import request_facts
from specscope.analyze.why import why_part
from specscope.errors import UserError
from specscope.page import notebook
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import printable, shell_word
from specscope.trace.wire.reading import read_capture
from specscope.trace.words import draw_tree

if TYPE_CHECKING:
    import pyarrow as pa

WIDTH = 120  # of text


@dataclass(frozen=True, repr=False)
class Shown:
    """Something of a run: text in a terminal, HTML in a notebook."""

    text: str
    html: str

    def __repr__(self) -> str:
        return printable(self.text, "\n\t")

    def _repr_html_(self) -> str:
        return self.html


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        info, acceptance = self.info, self.history.acceptance
        ran = printable(f"{self.source}: {info.target}, {info.drafter}{f', tree {info.tree}' if info.tree else ''}")
        length = "nothing was drafted" if acceptance.tau is None else f"acceptance length {acceptance.tau:.2f}"
        counts = f"{plural(len(self.requests), 'request')}, {plural(len(self.history.steps), 'engine step')}"
        return f"{ran}; {counts}, {length}"

    def _repr_html_(self) -> str:
        return notebook.of_run(self.report)

    @cached_property
    def report(self) -> Report:
        """What `specscope report` tells."""
        return build_report(self.history, source=self.source, warnings=self.warnings)

    def __getitem__(self, reference: str) -> Shown:
        """A request "r3", its step "r3@17" or a node of that, "r3@17/4". Raises UserError where there is none."""
        request, place = self.history.find(reference)
        if place.index is None:
            told = next(one for one in self.report.requests if one.id == request.id)
            return Shown(f"{request.id}: {request_facts(told)}\n{told.output or ''}", notebook.of_request(told))
        answer, part = why_part(self.history, request, place.index, place.node), request.step(place.index)
        said, vocabulary = [*answer.sentences, *answer.typical], self.history.vocabulary
        shown = (
            notebook.heading(str(answer.reference))
            + notebook.of_tree(part, vocabulary, place.node)
            + notebook.lines(said)
        )
        return Shown("\n".join([str(answer.reference), draw_tree(part, vocabulary), *said]), shown)

    def compare(self, other: LoadedRun) -> Shown:
        """This run as A beside another as B: what `specscope compare` tells."""
        from specscope.analyze.compare.comparison import compare
        from specscope.analyze.compare.side import from_history
        from specscope.analyze.compare.tables import render_text

        a, b = (from_history(run.history, run.source, run.warnings) for run in (self, other))
        found = compare(a, b)
        console = Console(file=StringIO(), width=WIDTH)
        with console.capture() as printed:
            render_text(found, console)
        return Shown(printed.get(), notebook.of_comparison(found))

    def page(self, *others: LoadedRun, height: int = 800) -> Shown:
        """The whole page of `specscope export run.jsonl -o run.html` in a frame; of two runs their comparison."""
        from specscope.page.write import PageRun, page

        parts = list(page([PageRun(run.source, run.history, run.warnings) for run in (self, *others)]))
        how = f"specscope export {shell_word(self.source)} -o run.html writes it"
        return Shown(f"a page of {sum(map(len, parts)):,} bytes, for notebooks; {how}", notebook.framed(parts, height))

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
