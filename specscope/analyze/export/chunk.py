"""Steps, nodes and final tokens of some engine steps, as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import holding, lengths, numbers, words
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.export.nodes import final_columns, node_columns, parent_columns
from specscope.analyze.export.schema import PARENTS, SCHEMAS, as_batch, cell, cells, clean, columns_of, own
from specscope.trace.history.history import History
from specscope.trace.history.stats import StepCounts
from specscope.trace.history.totals import why_undrafted
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.records import PHASES, RequestStep, RunInfo, StepRecord
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import Picked

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
        self._rows: list[dict[str, Any]] = []  # of `steps`: what each has of its engine's step
        self._parts: list[RequestStep] = []  # of each of those rows
        self._nodes = 0  # of their trees

    @property
    def is_full(self) -> bool:
        """Whether enough is held to be flushed."""
        return len(self._rows) >= MOST_STEPS or self._nodes >= MOST_NODES

    def add(self, record: StepRecord, current: bool) -> None:
        """One engine step. `current`: it is on the path to the end of the run."""
        engine = _of_engine(record) | {"branch": record.branch, "current": current}
        for part in record.requests:
            counts = StepCounts.of(part)
            self._rows.append(engine | {"undrafted": why_undrafted(self._info, record, part)})
            self._parts.append(part)
            self._nodes += 0 if counts is None else counts.drafted

    def flush(self, tables: Sink) -> None:
        """Write the rows that were added, and start over."""
        if self._rows:
            picked = Picked.of(self._parts)
            judged = np.flatnonzero(holding(picked, "verdict"))
            c = Columns([self._parts[row] for row in judged.tolist()])
            steps = columns_of(self._rows, TABLES["steps"]) | self._of_parts(picked)
            steps["depth"] = np.zeros(len(self._parts), np.int32)
            steps["depth"][judged] = c.tree_depth
            keys = {column.name: pa.array(steps[column.name], column.type) for column in KEYS}
            self._add(tables, "steps", {}, np.arange(len(self._parts)), steps)
            self._add(tables, "nodes", keys, judged[c.step], node_columns(c, self._pieces))
            self._add(tables, "finals", keys, judged, final_columns(c, self._pieces))
            if self._with_parents:
                self._add(tables, "parents", keys, judged[c.parents.step], parent_columns(c))
        self._begin()

    def _of_parts(self, picked: Sequence[Picked]) -> dict[str, Any]:
        """[S] each: the columns of `steps` that are the request's own."""
        noted, judged = holding(picked, "notes"), holding(picked, "verdict")
        position = numbers(picked, "", "context_len") + numbers(picked, "", "prefill_tokens")
        prompts = [self._prompt_length(name) for name in words(picked, "", "request")]
        output = [root + 1 - (prompt or 0) for root, prompt in zip(position.tolist(), prompts, strict=True)]
        return {
            **{column.name: told(picked, "", column) for column in OF_PART},
            **{column.name: told(picked, "method", column) for column in OF_METHOD},
            "rule": [STANDARD if rule is None else clean(rule) for rule in words(picked, "verdict", "rule")],
            "nodes": lengths(picked, "tree", "token"),
            "output_position": pa.array(output, mask=~judged | [prompt is None for prompt in prompts]),
            "accepted": pa.array(lengths(picked, "verdict", "path"), pa.int32(), mask=~judged),
            "kind": words(picked, "verdict", "kind"),
            "forced": pa.array(lengths(picked, "verdict", "forced") > 0, mask=~judged),
            "dropped": pa.array(lengths(picked, "notes", "dropped_token"), pa.int32(), mask=~noted),
            "drafter_cached": pa.array(numbers(picked, "notes", "cached"), mask=~noted),
        }

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
        pieces = [self._vocabulary.pieces.get(token) for token in known.tolist()]
        lacks = np.array([piece is None for piece in pieces], np.bool_)[codes]
        texts = ["" if piece is None else piece.decode("utf-8", "backslashreplace") for piece in pieces]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32), mask=lacks), pa.array(texts, pa.string())
        )


def told(picked: Sequence[Picked], held: str, column: pa.Field) -> pa.Array:
    """[S] a field of steps, or of what they hold; null where they hold none."""
    if column.name in picked[0].table(held).numbers:
        return pa.array(numbers(picked, held, column.name), column.type, mask=~holding(picked, held))
    return pa.array([cell(word, column) for word in words(picked, held, column.name)], column.type)


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
