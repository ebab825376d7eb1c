"""The tables: their columns, the type of each, and when it is null. docs/export.md says what each is.

Not exported: nodes that re-ranking left out, the rows that fed a drafter, and the numbers of KV blocks. A capture has
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import PHASES

MARK = b"specscope.table"  # in each file's metadata, with the table's name: such a file may be replaced

NAME = pa.dictionary(pa.int32(), pa.string())  # text that repeats
TEXT, BOOL, INT, LONG = pa.string(), pa.bool_(), pa.int32(), pa.int64()
FLOAT, DOUBLE = pa.float32(), pa.float64()
LONGS, INTS, TEXTS, FLOATS = map(pa.list_, (LONG, INT, TEXT, FLOAT))
MAP = pa.map_(TEXT, TEXT)


class Null(NamedTuple):
    """When a column is null: where a row does not say it, or where its value is not known."""

    known: Callable[[Any, Any], NDArray[np.bool_]] | None = None  # of rows.py's Chunk and the values
    empty: bool = True  # and text that is not there


class Column(NamedTuple):
    name: str
    kind: pa.DataType
    null: Null | None = None  # None: it never is

    def array(self, values: Any, rows: object = None) -> pa.Array:  # noqa: ANN401
        """The column of these values. `rows`: what tells which of them are known."""
        if isinstance(values, pa.Array):
            return values
        known = None if rows is None or self.null is None or self.null.known is None else self.null.known(rows, values)
        mask = None if known is None else ~known
        if isinstance(values, np.ndarray):
            return pa.array(values.astype(self.kind.to_pandas_dtype()), mask=mask)
        return pa.array([self._cell(value) for value in values], self.kind, mask=mask)

    def _cell(self, value: Any) -> Any:  # noqa: ANN401
        """A value as the column has it: text that is not there is null where it may be."""
        if isinstance(value, str):
            return clean(value) or (None if self.null and self.null.empty else "")
        if isinstance(value, Mapping):
            as_text = self.kind == TEXT
            return orjson.dumps(dict(value)).decode() if as_text else [(clean(a), clean(b)) for a, b in value.items()]
        return list(map(clean, value)) if isinstance(value, tuple) else value


def clean(value: Any) -> Any:  # noqa: ANN401
    """Text in valid UTF-8: a lone surrogate becomes its escape. Anything else as it is."""
    if not isinstance(value, str):
        return value
    return str(value) if value.isascii() else value.encode("utf-8", "backslashreplace").decode()


def _columns(*groups: tuple[Any, ...]) -> tuple[Column, ...]:
    """Columns in their order: names, what type they have, and when they are null."""
    return tuple(Column(name, *kind) for names, *kind in groups for name in names.split())


UNSAID = Null()
# Of rows.py's Chunk: s.c are nodes and decode steps, s.e parents that were tried
NO_IDS = Null(lambda s, v: v != NO_TOKEN)
UNTRIED = Null(lambda s, v: s.judged_nodes)
NO_COIN = Null(lambda s, v: v != 0)
NO_MODEL = Null(lambda s, v: s.looked)
NO_DRAFTER = Null(lambda s, v: s.holds("notes"))
NO_METHOD = Null(lambda s, v: s.holds("method"))
PREFILL = Null(lambda s, v: s.holds("verdict"))
ELSEWHERE = Null(lambda s, v: s.timed)

RUN = _columns(("run capture", NAME))
STEP = RUN + _columns(("step", LONG), ("branch", INT), ("current", BOOL), ("request", NAME), ("index", INT))
RUNS = RUN + _columns(
    ("target revision drafter", TEXT),
    ("draft_model tree", TEXT, UNSAID),
    ("device dtype backend", TEXT),
    ("seed", LONG),
    ("eos_tokens", INTS),
    ("max_context blocks block_size", LONG),
    ("params", TEXT),
    ("versions", MAP),
    ("aux_layers", TEXTS),
    ("draft_vocab", LONG, UNSAID),
    ("rule", TEXT),
    ("evidence", TEXT, UNSAID),
    ("speculation", TEXT),
    ("text tokens", BOOL),
    ("engine_steps lost", LONG),
    ("warnings", TEXTS),
)
REQUESTS = RUN + _columns(
    ("request", NAME),
    ("branch", INT),
    ("current", BOOL),
    ("arrival_ns admitted_ns finished_ns", LONG, UNSAID),
    ("reason", NAME, UNSAID),
    ("stop error title prompt", TEXT, UNSAID),
    ("prompt_tokens", INTS, UNSAID),
    ("prompt_length", LONG, UNSAID),
    ("output", TEXT, Null(empty=False)),
    ("output_tokens", INTS, UNSAID),
    ("output_length", LONG, UNSAID),
    ("temperature", DOUBLE, UNSAID),
    ("top_k", LONG, UNSAID),
    ("top_p min_p repetition_penalty presence_penalty frequency_penalty", DOUBLE, UNSAID),
    ("logit_bias", pa.map_(LONG, DOUBLE), UNSAID),
    ("seed max_tokens", LONG, UNSAID),
    ("ignore_eos", BOOL, UNSAID),
    ("min_tokens", LONG, UNSAID),
    ("stop_strings", TEXTS, UNSAID),
    ("logprobs", LONG, UNSAID),
    ("stop_token_ids", INTS, UNSAID),
    ("structured_outputs", TEXT, UNSAID),
    ("left_out", TEXTS, UNSAID),
    ("labels", MAP, UNSAID),
    ("traceparent", TEXT, UNSAID),
    ("sampling", NAME, UNSAID),
    ("sampling_ratio", DOUBLE, UNSAID),
)
STEPS = STEP + _columns(
    ("start_ns step_ns", LONG),
    (" ".join(f"{phase}_ns" for phase in PHASES), LONG, UNSAID),
    ("pass_ns device_ns", LONGS),
    ("batch", INT, ELSEWHERE),
    ("running waiting blocks_used blocks_free", LONG, ELSEWHERE),
    ("speculation", BOOL, ELSEWHERE),
    ("speculation_off", NAME, UNSAID),
    ("budget", LONG, UNSAID),
    ("context_len prefill_tokens found", LONG),
    ("output_position", LONG, UNSAID),
    ("preceded", NAME, UNSAID),
    ("drafter rule", NAME),
    ("sizing undrafted", NAME, UNSAID),
    ("nodes depth", INT),
    ("dropped", INT, NO_DRAFTER),
    ("drafter_cached", LONG, NO_DRAFTER),
    ("accepted", INT, PREFILL),
    ("emitted", INT),
    ("kind", NAME, UNSAID),
    ("forced", BOOL, PREFILL),
    ("one_pass", BOOL, NO_METHOD),
    ("unverified match_length match_count", LONG, NO_METHOD),
    ("match_source", NAME, NO_METHOD),
)
PARENTS = STEP + _columns(  # of specscope.load only: in files each node has its parent's
    ("node depth", INT),
    ("choice", INT, NO_IDS),
    ("choice_p entropy varentropy q_entropy q_varentropy", FLOAT),
    ("choice_rank", INT, NO_MODEL),
    ("choice_q outside", FLOAT, NO_MODEL),
    ("top", INTS, NO_IDS),
    ("top_p", FLOATS),
    ("draft_top", INTS, NO_MODEL),
    ("draft_top_p", FLOATS, NO_MODEL),
)
NODES = STEP + _columns(
    ("node parent depth sibling", INT),
    ("token", INT, NO_IDS),
    ("piece", NAME, UNSAID),
    ("drawn", NAME),
    ("q", FLOAT),
    ("outcome", NAME),
    ("forced judged", BOOL),
    ("p", FLOAT, Null(lambda s, v: s.c.tells_p[s.c.step])),
    ("p_trial q_trial", FLOAT, UNTRIED),
    ("accept_prob", DOUBLE, UNTRIED),
    ("coin", DOUBLE, NO_COIN),
    ("draft_coin draft_low", DOUBLE, Null(lambda s, v: s.c.drawn_by_coin)),
    ("residual_mass", DOUBLE, Null(lambda s, v: s.c.tells_p[s.c.step] & s.c.rejected)),
    # Without a coin it is known only where nothing could change the outcome
    ("margin", DOUBLE, Null(lambda s, v: s.judged_nodes & ((s.c.coin != 0) | (s.c.margin == 1)))),
    ("draft_p", FLOAT, Null(lambda s, v: s.noted_nodes & ~s.c.sampled)),
    ("score", FLOAT, Null(lambda s, v: s.noted_nodes)),
    ("confidence", FLOAT, Null(lambda s, v: s.c.tells_confidence)),
    ("module", INT, Null(lambda s, v: v >= 0)),
    ("source", NAME, UNSAID),
    ("raw_p", FLOAT, Null(lambda s, v: s.e.at_node >= 0)),
    ("rank q_rank", INT, Null(lambda s, v: (s.e.at_node >= 0) & (v > 0))),
    *((f"parent_{column.name}", column.kind, UNSAID) for column in PARENTS[len(STEP) + 2 :]),
)
FINALS = STEP + _columns(
    ("token", INT, NO_IDS),
    ("piece", NAME, UNSAID),
    ("kind", NAME),
    ("emitted forced", BOOL),
    ("p", DOUBLE, Null(lambda s, v: s.c.tells_p)),
    ("coin", DOUBLE, NO_COIN),
    ("margin", DOUBLE),
    ("entropy varentropy target_p", DOUBLE, Null(lambda s, v: s.e.there)),
)
TOKENS = RUN + _columns(("token", INT), ("piece", TEXT), ("special", BOOL))
INTERVALS = RUN + _columns(
    ("step start_ns end_ns", LONG),
    ("source", NAME),
    ("engine", NAME, UNSAID),
    ("request", TEXT, UNSAID),
    ("drafts drafted accepted emitted running waiting", LONG, UNSAID),
    ("accepted_at proposed_at", LONGS),
    ("kv_usage", DOUBLE, UNSAID),
    ("averages", pa.map_(TEXT, DOUBLE)),
    ("reset rounded", BOOL),
)
TABLES = {
    "runs": RUNS,
    "requests": REQUESTS,
    "steps": STEPS,
    "nodes": NODES,
    "finals": FINALS,
    "tokens": TOKENS,
    "intervals": INTERVALS,
    "parents": PARENTS,
}


def schema_of(table: str) -> pa.Schema:
    fields = [pa.field(column.name, column.kind, nullable=column.null is not None) for column in TABLES[table]]
    return pa.schema(fields, metadata={MARK: table})


SCHEMAS = {name: schema_of(name) for name in TABLES if name != "parents"}  # of the files
