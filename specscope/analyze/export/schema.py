"""The tables: their columns, what each one is, and when it is null.

The descriptions travel in the files: `pyarrow.parquet.read_schema(path).field(name).metadata[b"description"]`.

Not exported: nodes that re-ranking left out, the rows that fed a drafter, the numbers of KV blocks, and the lists of
likeliest tokens. A capture has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa

from specscope.trace.history.totals import Undrafted
from specscope.trace.record.records import PHASES

MARK = b"specscope.table"  # in each file's metadata, with the table's name: such a file may be replaced

NAME = pa.dictionary(pa.int32(), pa.string())  # text that repeats
TEXT, BOOL, INT, LONG = pa.string(), pa.bool_(), pa.int32(), pa.int64()
FLOAT, DOUBLE = pa.float32(), pa.float64()
LONGS, INTS, TEXTS = pa.list_(pa.int64()), pa.list_(pa.int32()), pa.list_(pa.string())
FLOATS = pa.list_(pa.float32())


def _column(name: str, kind: pa.DataType, about: str, null: str = "") -> pa.Field:
    """`null`: when the column is null; "" where it never is."""
    description = f"{about}; null {null}" if null else about
    return pa.field(name, kind, nullable=bool(null), metadata={"description": description})


_RUN = [
    _column("run", NAME, "id of the run"),
    _column("capture", NAME, "file that it was read from, as it was given"),
]
_STEP = [
    *_RUN,
    _column("step", LONG, "number of the engine's step, from 0; unique over all branches"),
    _column("branch", INT, "branch of the run; 0 unless a debugger went back and changed something"),
    _column("current", BOOL, "whether the step is on the way to the end of the run's last branch"),
    _column("request", NAME, "id of the request"),
    _column("index", INT, "the request's own step number, from 0; prefill chunks count too"),
]
_NO_END = "where the request did not end in the capture"
_NO_IDS = "where token ids were left out (--no-tokens)"
_NO_INFO = "where its admission is missing"
_NO_DRAW = "where the node is no draw, and where the capture does not tell its coin"
_NO_PARENTS = "with lean evidence, and in captures that have none"
_NOT_TRIED = "where the parent's children were not tried, " + _NO_PARENTS
_UNTRIED = "where the node was not tried, and where p was not recorded"
_ELSEWHERE = "where the file is an older part of its run, whose steps do not tell"
_PREFILL = "for a prefill chunk"
_NO_MODEL = "where no draft model looked"

RUNS = [
    *_RUN,
    _column("target", TEXT, "the target model"),
    _column("revision", TEXT, "hub revision of the target, or hash of its configuration"),
    _column("drafter", TEXT, "name of the drafter"),
    _column("draft_model", TEXT, "the drafter's model", "where it is no model"),
    _column("tree", TEXT, "tree string", "where there is none"),
    _column("device", TEXT, "device"),
    _column("dtype", TEXT, "dtype of the target"),
    _column("backend", TEXT, "attention backend"),
    _column("seed", LONG, "default seed"),
    _column("eos_tokens", INTS, "end-of-sequence tokens"),
    _column("max_context", LONG, "tokens"),
    _column("blocks", LONG, "KV blocks in all"),
    _column("block_size", LONG, "tokens in a KV block"),
    _column("params", TEXT, "default sampling parameters, as JSON"),
    _column("versions", pa.map_(pa.string(), pa.string()), "versions of specscope, torch, ..."),
    _column("aux_layers", TEXTS, "layers of the target that feed an EAGLE head"),
    _column("draft_vocab", LONG, "tokens that the drafter knows", "where it is no model"),
    _column("rule", TEXT, "rule of verification"),
    _column("evidence", TEXT, "full or lean", "in old captures"),
    _column("speculation", TEXT, "another engine's own configuration of speculation, as JSON"),
    _column("text", BOOL, "whether prompts and text were recorded"),
    _column("tokens", BOOL, "whether token ids were recorded"),
    _column("engine_steps", LONG, "engine steps in the capture, over all branches"),
    _column("lost", LONG, "engine steps that are known to be missing"),
    _column("warnings", TEXTS, "what is damaged or missing in the capture, a line each"),
]

REQUESTS = [
    *_RUN,
    _column("request", NAME, "id of the request"),
    _column("branch", INT, "branch on which it ended; where it did not end, the one of its last step"),
    _column("current", BOOL, "whether that is on the way to the end of the run's last branch"),
    _column("arrival_ns", LONG, "when it came in: ns since 1970", _NO_INFO),
    _column("admitted_ns", LONG, "when it was admitted to the batch: ns since 1970", "where it never was"),
    _column("finished_ns", LONG, "when it ended: ns since 1970", _NO_END),
    _column("reason", NAME, "why it ended: eos, stop, length, cancelled or error", _NO_END),
    _column("stop", TEXT, "the stop string that matched", "where none did"),
    _column("error", TEXT, "what went wrong", "where nothing did"),
    _column("title", TEXT, "last chat message", "where the prompt was no chat, and without text"),
    _column("prompt", TEXT, "text that was tokenised", "where it came as token ids, and without text"),
    _column("prompt_tokens", INTS, "token ids of the prompt", "where they were not recorded"),
    _column("prompt_length", LONG, "tokens of the prompt", "where they were not recorded"),
    _column("output", TEXT, "text of the output, as far as its tokens' texts are known", _NO_END),
    _column("output_tokens", INTS, "token ids of the output", f"{_NO_END}, and {_NO_IDS}"),
    _column("output_length", LONG, "tokens of the output", _NO_END),
    *(
        _column(name, kind, f"sampling parameter {name}", _NO_INFO)
        for name, kind in (
            ("temperature", DOUBLE),
            ("top_k", LONG),
            ("top_p", DOUBLE),
            ("min_p", DOUBLE),
            ("repetition_penalty", DOUBLE),
            ("presence_penalty", DOUBLE),
            ("frequency_penalty", DOUBLE),
            ("logit_bias", pa.map_(pa.int64(), pa.float64())),
            ("seed", LONG),
            ("max_tokens", LONG),
            ("stop_strings", TEXTS),
            ("ignore_eos", BOOL),
            ("min_tokens", LONG),
        )
    ),
    _column("logprobs", LONG, "likeliest tokens whose log-probabilities were asked for", "where none were"),
    _column("stop_token_ids", INTS, "tokens that end the output, as EOS does", _NO_INFO),
    _column("structured_outputs", TEXT, "form that the output must have, as JSON", "where it is free"),
    _column("left_out", TEXTS, "parameters that were given and are not told: --no-text, --no-tokens", _NO_INFO),
    _column("labels", pa.map_(pa.string(), pa.string()), "what else the prompt's line held", _NO_INFO),
    _column("traceparent", TEXT, "the caller's span, as W3C trace context has it", "where there is none"),
    _column("sampling", NAME, "why it was kept: ratio, parent, outcome or overflow", "where all requests are kept"),
    _column("sampling_ratio", DOUBLE, "share of requests like it that are kept", "where it is not known"),
]

STEPS = [
    *_STEP,
    _column("start_ns", LONG, "when the engine's step began: ns since 1970"),
    _column("step_ns", LONG, "ns that the engine's step took, for its whole batch"),
    *(
        _column(f"{name}_ns", LONG, f"ns of its phase {name}, for the whole batch", "where it has no such phase")
        for name in PHASES
    ),
    _column("pass_ns", LONGS, "ns of each of the drafter's passes"),
    _column("device_ns", LONGS, "ns that the phases of the step BEFORE took on the GPU; empty elsewhere"),
    _column("batch", INT, "requests in the engine's step", _ELSEWHERE),
    _column("running", LONG, "requests in the batch or holding KV", _ELSEWHERE),
    _column("waiting", LONG, "requests that wait", _ELSEWHERE),
    _column("blocks_used", LONG, "KV blocks of the target", _ELSEWHERE),
    _column("blocks_free", LONG, "KV blocks of the target", _ELSEWHERE),
    _column("speculation", BOOL, "whether drafting was on", _ELSEWHERE),
    _column("speculation_off", NAME, "why it was not", "where it was on"),
    _column("budget", LONG, "drafts that the step might verify at most, over all requests", "without a limit"),
    _column("context_len", LONG, "tokens whose KV was in the cache when the step began"),
    _column("prefill_tokens", LONG, "tokens fed besides the root and the drafts"),
    _column("found", LONG, "tokens whose KV it found in the prefix cache in this step"),
    _column(
        "output_position",
        LONG,
        "output tokens of the request before the step",
        "for a prefill chunk, and where the prompt's tokens were not recorded",
    ),
    _column("preceded", NAME, "what came before: prefill, preemption, full, partial, nothing or no draft", _PREFILL),
    _column("drafter", NAME, "name of the drafter; none where nothing could be drafted"),
    _column("rule", NAME, "rule of verification; lossy:NAME where it is not lossless"),
    _column("sizing", NAME, "why the tree has this size", "where it is not adaptive"),
    _column("undrafted", NAME, f"why it drafted nothing: {', '.join(Undrafted)}", f"where it did, and {_PREFILL}"),
    _column("nodes", INT, "drafted nodes"),
    _column("depth", INT, "levels of the tree"),
    _column("dropped", INT, "nodes that re-ranking left out (EAGLE-2)", "where the drafter is no model"),
    _column("drafter_cached", LONG, "committed tokens in the drafter's KV cache", "where the drafter is no model"),
    _column("accepted", INT, "accepted nodes; the depth that was reached as well", _PREFILL),
    _column("emitted", INT, "tokens that became output, after EOS, stop and length truncation"),
    _column("kind", NAME, "where the final token came from: bonus, recovered or target", _PREFILL),
    _column("forced", BOOL, "whether a decision was forced by a debugger; then the run is not lossless", _PREFILL),
    _column("one_pass", BOOL, "all depths were drafted in one pass", "where the method tells nothing of its own"),
    _column("unverified", LONG, "drafts beyond the tree that were not verified", "likewise"),
    _column("match_length", LONG, "suffix decoding: tokens of the context that were found", "likewise"),
    _column("match_count", LONG, "suffix decoding: how often", "likewise"),
    _column("match_source", NAME, "suffix decoding: where", "likewise, and without a match"),
]

NODES = [
    *_STEP,
    _column("node", INT, "number of the node in its tree, in draw order, from 0"),
    _column("parent", INT, "number of its parent; -1 is the root, the last committed token"),
    _column("depth", INT, "depth, 1 for the root's children"),
    _column("sibling", INT, "place among its siblings in draw order, from 1"),
    _column("token", INT, "drafted token id", _NO_IDS),
    _column("piece", NAME, r"its text; bytes that are no UTF-8 as \xNN", "where it is not known"),
    _column("drawn", NAME, "how it was drawn: deterministic, without_replacement or with_replacement"),
    _column("q", FLOAT, "probability that the drafter drew it with; 1 for deterministic nodes"),
    _column("outcome", NAME, "accepted, rejected or untried"),
    _column("forced", BOOL, "whether the outcome was forced by a debugger"),
    _column("judged", BOOL, "whether its own coin decided; under block and traversal a node below may have"),
    _column("p", FLOAT, "the target's probability of the token at its parent", "where p was not recorded"),
    _column("p_trial", FLOAT, "p when it was tried, after rejected siblings were taken away", _UNTRIED),
    _column("q_trial", FLOAT, "likewise of q", _UNTRIED),
    _column("accept_prob", DOUBLE, "min(1, p_trial / q_trial); under block and traversal a ratio", _UNTRIED),
    _column("coin", DOUBLE, "uniform number that decides", "where the engine tosses none"),
    _column("draft_coin", DOUBLE, "uniform number that drew the token from q", _NO_DRAW),
    _column("draft_low", DOUBLE, "lower end of the token's interval, which holds that number", _NO_DRAW),
    _column("residual_mass", DOUBLE, "mass of the residual before it was renormalised", "where it was not rejected"),
    _column(
        "margin",
        DOUBLE,
        "how far p would have to move for another outcome; 1 where nothing could change it",
        "where it was not tried, or without a coin",
    ),
    _column(
        "draft_p",
        FLOAT,
        "the drafter's own probability of the token at its parent; 0 where the text alone has it",
        "where it is no model, and where the node was drawn: q tells of that",
    ),
    _column(
        "score",
        FLOAT,
        "log of what re-ranking goes by: the drafter's probability of the path, or its expected acceptance",
        "where it is no model",
    ),
    _column("confidence", FLOAT, "the drafter's own estimate that it is accepted", "where it makes none"),
    _column("module", INT, "which MTP module drafted it, from 0", "where there are none"),
    _column("source", NAME, "who drafted it: model, text or both", "where one drafter works alone"),
    _column("raw_p", FLOAT, "the target's probability of the token, before temperature and rules", _NOT_TRIED),
    _column("rank", INT, "rank of the token in p, from 1", "where its p is 0, " + _NOT_TRIED),
    _column("q_rank", INT, "rank of the token in q, from 1", "where the node is deterministic, " + _NOT_TRIED),
    _column("parent_choice", INT, "token id that was likeliest in p at its parent", f"{_NOT_TRIED}, and {_NO_IDS}"),
    _column("parent_choice_p", FLOAT, "its p", _NOT_TRIED),
    _column("parent_entropy", FLOAT, "entropy of p at its parent, in nats", _NOT_TRIED),
    _column("parent_varentropy", FLOAT, "varentropy of p at its parent, in nats squared", _NOT_TRIED),
    _column("parent_q_entropy", FLOAT, "entropy of q there, in nats", "for deterministic nodes, " + _NOT_TRIED),
    _column("parent_q_varentropy", FLOAT, "varentropy of q there", "for deterministic nodes, " + _NOT_TRIED),
    _column(
        "parent_choice_rank",
        INT,
        "rank of the target's raw first choice in the drafter's raw distribution; 0 if it does not know that token",
        "where no draft model looked, " + _NOT_TRIED,
    ),
    _column("parent_choice_q", FLOAT, "its raw probability there", "where no draft model looked, " + _NOT_TRIED),
    _column(
        "parent_outside",
        FLOAT,
        "the target's raw mass on tokens that the drafter does not know",
        "where no draft model looked, " + _NOT_TRIED,
    ),
    _column("parent_top", INTS, "token ids that were likeliest for the target at its parent, raw", _NOT_TRIED),
    _column("parent_top_p", FLOATS, "their raw probabilities", _NOT_TRIED),
    _column("parent_draft_top", INTS, "likewise for the drafter", "where no draft model looked, " + _NOT_TRIED),
    _column("parent_draft_top_p", FLOATS, "its probabilities", "where no draft model looked, " + _NOT_TRIED),
]

FINALS = [
    *_STEP,
    _column("token", INT, "token id", _NO_IDS),
    _column("piece", NAME, r"its text; bytes that are no UTF-8 as \xNN", "where it is not known"),
    _column("kind", NAME, "bonus, recovered or target"),
    _column("emitted", BOOL, "whether it became output: EOS, stop or length may cut it off"),
    _column("forced", BOOL, "whether it was forced by a debugger"),
    _column("p", DOUBLE, "probability in the distribution that it was drawn from", "where p was not recorded"),
    _column("coin", DOUBLE, "uniform number that drew it", "where it was not drawn with one"),
    _column("margin", DOUBLE, "how far p would have to move for another token; 1 where nothing could change it"),
    _column("entropy", DOUBLE, "of the distribution that it was drawn from, in nats", _NO_PARENTS),
    _column("varentropy", DOUBLE, "of that distribution, in nats squared", _NO_PARENTS),
    _column("target_p", DOUBLE, "probability in p before any rejection", _NO_PARENTS),
]

PARENTS = [  # of specscope.load only: in files each node has its parent's
    *_STEP,
    _column("node", INT, "number of the node whose children were tried; -1 is the root"),
    _column("depth", INT, "its depth, 0 for the root"),
    _column("choice", INT, "token id that was likeliest in p", _NO_IDS),
    _column("choice_p", FLOAT, "its p"),
    _column("entropy", FLOAT, "entropy of p, in nats"),
    _column("varentropy", FLOAT, "varentropy of p, in nats squared"),
    _column("q_entropy", FLOAT, "entropy of q, in nats; 0 where the children are deterministic"),
    _column("q_varentropy", FLOAT, "varentropy of q, in nats squared"),
    _column("choice_rank", INT, "rank of the target's raw first choice for the drafter", _NO_MODEL),
    _column("choice_q", FLOAT, "its raw probability there", _NO_MODEL),
    _column("outside", FLOAT, "the target's raw mass on tokens that the drafter does not know", _NO_MODEL),
    _column("top", INTS, "token ids that were likeliest for the target, raw", _NO_IDS),
    _column("top_p", FLOATS, "their raw probabilities"),
    _column("draft_top", INTS, "likewise for the drafter", f"{_NO_MODEL}, and {_NO_IDS}"),
    _column("draft_top_p", FLOATS, "its probabilities", _NO_MODEL),
]

TOKENS = [
    *_RUN,
    _column("token", INT, "token id"),
    _column("piece", TEXT, r"its text; bytes that are no UTF-8 as \xNN"),
    _column("special", BOOL, "whether it is markup and no text"),
]

_UNTOLD = "where the source does not tell"
INTERVALS = [
    *_RUN,
    _column("step", LONG, "number of the interval"),
    _column("start_ns", LONG, "when it began: ns since 1970"),
    _column("end_ns", LONG, "when it ended: ns since 1970"),
    _column("source", NAME, "where the counts come from"),
    _column("engine", NAME, "which engine", _UNTOLD),
    _column("request", TEXT, "id of the one request that it is about", "where it is about all"),
    *(
        _column(name, LONG, about, _UNTOLD)
        for name, about in (
            ("drafts", "steps of requests with at least one drafted token"),
            ("drafted", "tokens"),
            ("accepted", "tokens"),
            ("emitted", "output tokens"),
            ("running", "requests at the end of the interval"),
            ("waiting", "requests at the end of the interval"),
        )
    ),
    _column("accepted_at", LONGS, "drafts that accepted a token at depth 1, 2, ..."),
    _column("proposed_at", LONGS, "drafts that were that long"),
    _column("kv_usage", DOUBLE, "share of the KV cache in use, 0 to 1", _UNTOLD),
    _column("averages", pa.map_(pa.string(), pa.float64()), "what is told as an average only, under its own name"),
    _column("reset", BOOL, "a counter went back: the engine was restarted"),
    _column("rounded", BOOL, "counts were worked out from rounded figures"),
]

SCHEMAS = {
    name: pa.schema(columns, metadata={MARK: name})
    for name, columns in {
        "runs": RUNS,
        "requests": REQUESTS,
        "steps": STEPS,
        "nodes": NODES,
        "finals": FINALS,
        "tokens": TOKENS,
        "intervals": INTERVALS,
    }.items()
}


def own(kind: Any, table: str) -> list[pa.Field]:  # noqa: ANN401
    """The columns of a table that a record has as fields."""
    return [column for column in SCHEMAS[table] if column.name in kind.__dataclass_fields__]


def cells(record: object, columns: Iterable[pa.Field]) -> dict[str, Any]:
    """The values of a record's fields in these columns."""
    return {column.name: cell(getattr(record, column.name), column) for column in columns}


def cell(value: Any, column: pa.Field) -> Any:  # noqa: ANN401
    """A value as the column has it: text that is not there is null where it may be."""
    if isinstance(value, str):
        return clean(value) or (None if column.nullable else "")
    if isinstance(value, Mapping):
        as_text = column.type == TEXT
        return orjson.dumps(dict(value)).decode() if as_text else [(_clean(a), _clean(b)) for a, b in value.items()]
    return list(map(_clean, value)) if isinstance(value, tuple) else value


def _clean(value: Any) -> Any:  # noqa: ANN401
    return clean(value) if isinstance(value, str) else value


def clean(text: str) -> str:
    """The text in valid UTF-8: a lone surrogate becomes its escape."""
    return str(text) if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def columns_of(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> dict[str, list[Any]]:
    """Rows as columns; a row lacks what is null in it."""
    return {name: [row.get(name) for row in rows] for name in schema.names}


def as_batch(schema: pa.Schema, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """Columns by their names, as arrays of the schema's types or as plain values."""
    arrays = [
        column if isinstance(column := columns[field.name], pa.Array) else pa.array(column, type=field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
