"""Steps, nodes and final tokens of some engine steps, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.export.nodes import ids, node_columns, parent_columns
from specscope.analyze.export.schema import NAME, PARENTS, SCHEMAS, as_batch
from specscope.trace.history.history import History
from specscope.trace.history.undrafted import why_undrafted
from specscope.trace.record.records import PHASES, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.vocabulary import Vocabulary

MOST_STEPS, MOST_NODES = 4096, 25_000  # that are held as records before they are written
TABLES = {**{name: SCHEMAS[name] for name in ("steps", "nodes", "finals")}, "parents": pa.schema(PARENTS)}
DEPTH_AT = SCHEMAS["steps"].get_field_index("depth") - SCHEMAS["steps"].get_field_index("start_ns")


def clean(text: str) -> str:
    """The text in valid UTF-8: a lone surrogate becomes its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def some(text: str) -> str | None:
    """The text, where there is one."""
    return clean(text) if text else None


def repeated(text: str, rows: int) -> pa.Array:
    """A column with the same text in every row."""
    return pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), pa.array([text], pa.string()))


class Sink(Protocol):
    """Where rows go: files, or memory."""

    def add(self, name: str, columns: Iterable[Any], rows: int) -> None:
        """Rows of a table: its columns in order, as arrays of its types or as plain values."""


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
        self._info, self._of = run, (run.run_id, capture)
        self._vocabulary = vocabulary
        self._prompt_length = prompt_length
        self._with_parents = with_parents
        self._begin()

    def _begin(self) -> None:
        self._keys: list[tuple[Any, ...]] = []  # a row of `steps` each: the columns from `step` to `index`
        self._steps: list[tuple[Any, ...]] = []  # and the others, without `depth`
        self._finals: list[tuple[Any, ...]] = []
        self._judged: list[int] = []  # the row in `steps` of each of `_finals`
        self._parts: list[RequestStep] = []  # those with a verdict
        self._nodes = 0  # of their trees

    @property
    def is_full(self) -> bool:
        """Whether enough is held to be flushed."""
        return len(self._keys) >= MOST_STEPS or self._nodes >= MOST_NODES

    def add(self, record: StepRecord, current: bool) -> None:
        """One engine step. `current`: it is on the path to the end of the run."""
        engine = _engine_columns(record)
        for part in record.requests:
            self._keys.append((record.step, record.branch, current, clean(part.request), part.index))
            self._steps.append((*engine, *self._step_columns(record, part)))
            if part.verdict is not None:
                self._parts.append(part)
                self._nodes += len(part.tree)
                self._judged.append(len(self._keys) - 1)
                self._finals.append(self._final_columns(part, part.verdict))

    def _step_columns(self, record: StepRecord, part: RequestStep) -> tuple[Any, ...]:
        """The columns from `context_len` on, in the order of schema.STEPS."""
        verdict, notes, method = part.verdict, part.notes, part.method
        length = None if verdict is None else self._prompt_length(part.request)
        return (
            part.context_len,
            part.prefill_tokens,
            part.found,
            None if length is None else part.position + 1 - length,
            None if part.preceded is None else part.preceded.value,
            clean(part.drafter),
            clean(part.rule),
            some(part.sizing),
            why_undrafted(self._info, record, part),
            len(part.tree),
            None if notes is None else len(notes.dropped_token),
            None if notes is None else notes.cached,
            None if verdict is None else verdict.accepted,
            part.emitted,
            None if verdict is None else verdict.kind.value,
            None if verdict is None else len(verdict.forced) > 0,
            *(
                (None,) * 5
                if method is None
                else (
                    method.one_pass,
                    method.unverified,
                    method.match_length,
                    method.match_count,
                    some(method.match_source),
                )
            ),
        )

    def _final_columns(self, part: RequestStep, verdict: Verdict) -> tuple[Any, ...]:
        """The columns from `token` on, in the order of schema.FINALS; `flush` adds `piece`."""
        parents, nodes = part.parents, len(part.tree)
        return (
            verdict.token,
            verdict.kind.value,
            part.emitted > verdict.accepted,
            nodes in verdict.forced,
            verdict.final_p if verdict.tells_p else None,
            verdict.final_coin or None,
            verdict.final_margin,
            None if parents is None else parents.final_entropy,
            None if parents is None else parents.final_varentropy,
            None if parents is None else parents.final_target_p,
        )

    def flush(self, tables: Sink) -> None:
        """Write the rows that were added, and start over."""
        if self._keys:
            c, judged = Columns(self._parts), np.array(self._judged, np.int64)
            keys = self._key_columns()
            steps = _columns(self._steps)
            depth = np.zeros(len(self._keys), np.int32)
            depth[judged] = c.tree_depth
            steps.insert(DEPTH_AT, depth)
            self._add(tables, "steps", keys, np.arange(len(self._keys)), steps)
            self._add(tables, "nodes", keys, judged[c.step], node_columns(c, self._pieces))
            finals = _columns(self._finals)
            if finals:
                tokens = np.array(finals[0], np.int32)
                finals[:1] = [ids(tokens), self._pieces(tokens)]
            self._add(tables, "finals", keys, judged, finals)
            if self._with_parents:
                self._add(tables, "parents", keys, judged[c.parents.step], parent_columns(c))
        self._begin()

    def _add(
        self, tables: Sink, name: str, keys: Sequence[pa.Array], rows: NDArray[np.int64], columns: Iterable[Any]
    ) -> None:
        """Columns behind the keys of the rows of `steps` that they belong to."""
        run = [repeated(text, len(rows)) for text in self._of]
        tables.add(name, [*run, *(key.take(pa.array(rows)) for key in keys), *columns], len(rows))

    def _key_columns(self) -> list[pa.Array]:
        kinds = (pa.int64(), pa.int32(), pa.bool_(), NAME, pa.int32())
        return [pa.array(column, kind) for column, kind in zip(_columns(self._keys), kinds, strict=True)]

    def _pieces(self, tokens: NDArray[Any]) -> pa.Array:
        """The texts of token ids."""
        known, codes = np.unique(tokens, return_inverse=True)
        pieces = [self._vocabulary.piece(token) for token in known.tolist()]
        lacks = np.array([piece is None for piece in pieces], np.bool_)[codes]
        texts = ["" if piece is None else piece.decode("utf-8", "backslashreplace") for piece in pieces]
        return pa.DictionaryArray.from_arrays(
            pa.array(codes.astype(np.int32), mask=lacks), pa.array(texts, pa.string())
        )


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    return list(zip(*rows, strict=True))


def _engine_columns(record: StepRecord) -> tuple[Any, ...]:
    """The columns from `start_ns` to `budget`, in the order of schema.STEPS."""
    took = {phase.name: phase.end_ns - phase.start_ns for phase in record.phases}
    return (
        record.start_ns,
        record.end_ns - record.start_ns,
        *(took.get(name) for name in PHASES),
        [drafter_pass.end_ns - drafter_pass.start_ns for drafter_pass in record.passes],
        list(record.device_ns),
        *(
            (record.batch, record.running, record.waiting, record.blocks_used, record.blocks_free, record.speculation)
            if record.is_timed
            else (None,) * 6
        ),
        some(record.speculation_off),
        record.budget,
    )


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

    def add(self, name: str, columns: Iterable[Any], rows: int) -> None:
        """Rows of a table: its columns in order."""
        if rows:
            self.by_table[name].append(as_batch(TABLES[name], columns))
