"""Steps, nodes and final tokens of some engine steps, as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.export.nodes import ids, node_columns, parent_columns
from specscope.analyze.export.schema import PARENTS, SCHEMAS, as_batch, cells, clean, columns_of, own
from specscope.trace.history.history import History
from specscope.trace.history.undrafted import why_undrafted
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.records import PHASES, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.vocabulary import Vocabulary

MOST_STEPS, MOST_NODES = 4096, 25_000  # that are held as records before they are written
TABLES = {**{name: SCHEMAS[name] for name in ("steps", "nodes", "finals")}, "parents": pa.schema(PARENTS)}
KEYS = [column for column in SCHEMAS["nodes"] if column.name in ("step", "branch", "current", "request", "index")]
TIMED = ("batch", "running", "waiting", "blocks_used", "blocks_free", "speculation")  # not known of other steps
OF_ENGINE = [column for column in own(StepRecord, "steps") if column.name != "step"]
OF_PART, OF_METHOD = own(RequestStep, "steps"), own(MethodNotes, "steps")


def repeated(text: str, rows: int) -> pa.Array:
    """A column with the same text in every row."""
    return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([text], pa.string()))


class Sink(Protocol):
    """Where rows go: files, or memory."""

    def add(self, name: str, columns: Mapping[str, Any], rows: int) -> None:
        """Rows of a table: its columns by name, as arrays of its types or as plain values."""


class StepRows:
    """Collects engine steps of one run; `flush` writes their rows."""

    def __init__(
        self,
        run: RunInfo,
        capture: str,
        vocabulary: Vocabulary,
        prompt_length: Callable[[str], int | None],
        *,
        with_parents: bool = False,
    ) -> None:
        """`prompt_length`: tokens of a request's prompt, None where they are not known.

        `with_parents`: also the table of parents, which files do not have: there each node has its parent's columns.
        """
        self._info, self._of = run, {"run": run.run_id, "capture": capture}
        self._vocabulary = vocabulary
        self._prompt_length = prompt_length
        self._with_parents = with_parents
        self._begin()

    def _begin(self) -> None:
        self._steps: list[dict[str, Any]] = []  # rows of `steps`, without `depth`
        self._finals: list[dict[str, Any]] = []
        self._judged: list[int] = []  # the row in `steps` of each of `_finals`
        self._parts: list[RequestStep] = []  # those with a verdict
        self._nodes = 0  # of their trees

    @property
    def is_full(self) -> bool:
        """Whether enough is held to be flushed."""
        return len(self._steps) >= MOST_STEPS or self._nodes >= MOST_NODES

    def add(self, record: StepRecord, current: bool) -> None:
        """One engine step. `current`: it is on the path to the end of the run."""
        engine = _of_engine(record) | {"branch": record.branch, "current": current}
        for part in record.requests:
            self._steps.append(engine | self._of_part(record, part))
            if part.verdict is not None:
                self._parts.append(part)
                self._nodes += len(part.tree)
                self._judged.append(len(self._steps) - 1)
                self._finals.append(_final(part, part.verdict))

    def _of_part(self, record: StepRecord, part: RequestStep) -> dict[str, Any]:
        """The columns of a row of `steps` that are the request's own."""
        verdict, notes, method = part.verdict, part.notes, part.method
        row = cells(part, OF_PART) | {"rule": clean(part.rule), "nodes": len(part.tree)}
        row["undrafted"] = why_undrafted(self._info, record, part)
        if verdict is not None:
            length = self._prompt_length(part.request)
            row["output_position"] = None if length is None else part.position + 1 - length
            row |= {"accepted": verdict.accepted, "kind": verdict.kind, "forced": len(verdict.forced) > 0}
        if notes is not None:
            row |= {"dropped": len(notes.dropped_token), "drafter_cached": notes.cached}
        return row if method is None else row | cells(method, OF_METHOD)

    def flush(self, tables: Sink) -> None:
        """Write the rows that were added, and start over."""
        if self._steps:
            c, judged = Columns(self._parts), np.array(self._judged, np.int64)
            steps: dict[str, Any] = columns_of(self._steps, TABLES["steps"])
            steps["depth"] = np.zeros(len(self._steps), np.int32)
            steps["depth"][judged] = c.tree_depth
            keys = {column.name: pa.array(steps[column.name], column.type) for column in KEYS}
            self._add(tables, "steps", {}, np.arange(len(self._steps)), steps)
            self._add(tables, "nodes", keys, judged[c.step], node_columns(c, self._pieces))
            finals: dict[str, Any] = columns_of(self._finals, TABLES["finals"])
            tokens = np.array(finals["token"], np.int32)
            finals |= {"token": ids(tokens), "piece": self._pieces(tokens)}
            self._add(tables, "finals", keys, judged, finals)
            if self._with_parents:
                self._add(tables, "parents", keys, judged[c.parents.step], parent_columns(c))
        self._begin()

    def _add(
        self,
        tables: Sink,
        name: str,
        keys: Mapping[str, pa.Array],
        rows: NDArray[np.int64],
        columns: Mapping[str, Any],
    ) -> None:
        """Columns with the keys of the rows of `steps` that they belong to."""
        run = {name: repeated(text, len(rows)) for name, text in self._of.items()}
        of_step = {name: key.take(pa.array(rows)) for name, key in keys.items()}
        tables.add(name, {**columns, **run, **of_step}, len(rows))

    def _pieces(self, tokens: NDArray[Any]) -> pa.Array:
        """The texts of token ids."""
        known, codes = np.unique(tokens, return_inverse=True)
        pieces = [self._vocabulary.piece(token) for token in known.tolist()]
        lacks = np.array([piece is None for piece in pieces], np.bool_)[codes]
        texts = ["" if piece is None else piece.decode("utf-8", "backslashreplace") for piece in pieces]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32), mask=lacks), pa.array(texts, pa.string())
        )


def _final(part: RequestStep, verdict: Verdict) -> dict[str, Any]:
    """A row of `finals`; `flush` adds its key and `piece`."""
    row = {
        "token": verdict.token,
        "kind": verdict.kind,
        "emitted": part.emitted > verdict.accepted,
        "forced": len(part.tree) in verdict.forced,
        "p": verdict.final_p if verdict.tells_p else None,
        "coin": verdict.final_coin or None,
        "margin": verdict.final_margin,
    }
    if (parents := part.parents) is not None:
        row |= {"entropy": parents.final_entropy, "varentropy": parents.final_varentropy}
        row |= {"target_p": parents.final_target_p}
    return row


def _of_engine(record: StepRecord) -> dict[str, Any]:
    """The columns of a row of `steps` that tell of the engine's step."""
    row = {
        "step": record.step,
        "start_ns": record.start_ns,
        "step_ns": record.end_ns - record.start_ns,
        **{f"{phase.name}_ns": phase.end_ns - phase.start_ns for phase in record.phases if phase.name in PHASES},
        "pass_ns": [drafter_pass.end_ns - drafter_pass.start_ns for drafter_pass in record.passes],
        **cells(record, OF_ENGINE),
        "batch": record.batch,
    }
    return row if record.is_timed else row | dict.fromkeys(TIMED)


def tables_of(history: History, source: str) -> dict[str, pa.Table]:
    """The tables by name, along the path on which the history stands."""
    assert history.run is not None  # CaptureReader sees to it

    def prompt_length(request: str) -> int | None:
        info = history.requests[request].info
        return None if info is None else len(info.prompt_tokens) or None

    batches = _Batches()
    rows = StepRows(history.run, source, history.vocabulary, prompt_length, with_parents=True)
    for record in history.steps:
        rows.add(record, True)
        if rows.is_full:
            rows.flush(batches)
    rows.flush(batches)
    return {
        name: pa.Table.from_batches(batches.by_table[name], schema).unify_dictionaries()
        for name, schema in TABLES.items()
    }


class _Batches:
    """Rows that are kept, where a file would write them."""

    def __init__(self) -> None:
        self.by_table: dict[str, list[pa.RecordBatch]] = {name: [] for name in TABLES}

    def add(self, name: str, columns: Mapping[str, Any], rows: int) -> None:
        """Rows of a table: its columns by name."""
        if rows:
            self.by_table[name].append(as_batch(TABLES[name], columns))
