"""The tables: their columns, what each one is, and when it is null.

The descriptions travel in the files: `pyarrow.parquet.read_schema(path).field(name).metadata[b"description"]`.

Not exported: nodes that re-ranking left out, the rows that fed a drafter, the numbers of KV blocks, and the lists of
likeliest tokens. A capture has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from specscope.trace.history.totals import Undrafted
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import PHASES

MARK = b"specscope.table"  # in each file's metadata, with the table's name: such a file may be replaced

NAME = pa.dictionary(pa.int32(), pa.string())  # text that repeats
TEXT, BOOL, INT, LONG = pa.string(), pa.bool_(), pa.int32(), pa.int64()
FLOAT, DOUBLE = pa.float32(), pa.float64()
LONGS, INTS, TEXTS, FLOATS = map(pa.list_, (LONG, INT, TEXT, FLOAT))
MAP = pa.map_(TEXT, TEXT)


class Null(NamedTuple):
    """When a column is null, in words, and which values of the rows are known."""

    words: str
    known: Callable[[Any, Any], NDArray[np.bool_]] | None = None  # of rows.py's Chunk and the values
    empty: bool = True  # and text that is not there


class Column(NamedTuple):
    """A column of a table."""

    name: str
    kind: pa.DataType
    about: str
    null: Null | None = None  # None: it never is

    @property
    def field(self) -> pa.Field:
        """As the files declare it."""
        about = self.about if self.null is None else f"{self.about}; null {self.null.words}"
        return pa.field(self.name, self.kind, nullable=self.null is not None, metadata={"description": about})

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


def _columns(*rows: tuple[Any, ...]) -> tuple[Column, ...]:
    return tuple(
        Column(name, kind, about, *(Null(n) if isinstance(n, str) else n for n in null))
        for name, kind, about, *null in rows
    )


PIECE = r"its text; bytes that are not UTF-8 as \xNN"
NO_END = "where the request did not end in the capture"
NO_INFO = "where its admission is missing"
NO_PROMPT = "where they were not recorded"
PREFILL = "for a prefill chunk"
UNTOLD = "where the source does not report it"
UNKNOWN = "where it is unknown"
NOT_DRAWN = "0 where the children are deterministic"
# Of rows.py's Chunk: s.c are nodes and decode steps, s.e parents that were tried
NO_IDS = Null("where token ids were left out (--no-tokens)", lambda s, v: v != NO_TOKEN)
NO_P = Null("where p was not recorded", lambda s, v: s.c.tells_p[s.c.step])
UNTRIED = Null("where the node was not tried, and where p was not recorded", lambda s, v: s.judged_nodes)
NOT_REJECTED = Null("where it was not rejected", lambda s, v: s.c.tells_p[s.c.step] & s.c.rejected)
NO_COIN = Null("where no coin was tossed", lambda s, v: v != 0)
NO_MARGIN = Null(  # without a coin it is known only where nothing could change the outcome
    "where it was not tried, or without a coin", lambda s, v: s.judged_nodes & ((s.c.coin != 0) | (s.c.margin == 1))
)
NO_DRAW = Null("where the node was not drawn, and where its coin is not recorded", lambda s, v: s.c.drawn_by_coin)
NO_NOTES = Null("where the drafter is not a model", lambda s, v: s.noted_nodes)
NOT_RANKED = Null(f"{NO_NOTES.words}, and where q is the node's probability", lambda s, v: s.noted_nodes & ~s.c.sampled)
UNSURE = Null("where it makes none", lambda s, v: s.c.tells_confidence)
NO_MODULE = Null("where there are none", lambda s, v: v >= 0)
NO_PARENTS = Null("with lean evidence, and in captures that have none", lambda s, v: s.e.there)
NOT_TRIED = Null(f"where the parent's children were not tried, {NO_PARENTS.words}", lambda s, v: s.e.at_node >= 0)
NO_RANK = Null(f"where it has none, {NOT_TRIED.words}", lambda s, v: (s.e.at_node >= 0) & (v > 0))
NO_MODEL = Null("where no draft model looked", lambda s, v: s.looked)
NO_DRAFTER = Null(NO_NOTES.words, lambda s, v: s.holds("notes"))
NO_METHOD = Null("where the method records nothing", lambda s, v: s.holds("method"))
NO_VERDICT = Null(PREFILL, lambda s, v: s.holds("verdict"))
ELSEWHERE = Null("where the file is an older part of its run", lambda s, v: s.timed)

RUN = _columns(("run", NAME, "id of the run"), ("capture", NAME, "file that it was read from, as given"))
STEP = RUN + _columns(
    ("step", LONG, "number of the engine's step, from 0; unique over all branches"),
    ("branch", INT, "branch of the run; 0 unless a debugger went back and changed something"),
    ("current", BOOL, "whether the step is on the way to the end of the run's last branch"),
    ("request", NAME, "id of the request"),
    ("index", INT, "the request's own step number, from 0; prefill chunks count too"),
)
RUNS = RUN + _columns(
    ("target", TEXT, "the target model"),
    ("revision", TEXT, "hub revision of the target, or hash of its configuration"),
    ("drafter", TEXT, "name of the drafter"),
    ("draft_model", TEXT, "the drafter's model", "where it is no model"),
    ("tree", TEXT, "tree string", "where there is none"),
    ("device", TEXT, "device"),
    ("dtype", TEXT, "dtype of the target"),
    ("backend", TEXT, "attention backend"),
    ("seed", LONG, "default seed"),
    ("eos_tokens", INTS, "end-of-sequence tokens"),
    ("max_context", LONG, "tokens"),
    ("blocks", LONG, "KV blocks in all"),
    ("block_size", LONG, "tokens in a KV block"),
    ("params", TEXT, "default sampling parameters, as JSON"),
    ("versions", MAP, "versions of specscope, torch, ..."),
    ("aux_layers", TEXTS, "layers of the target that feed an EAGLE head"),
    ("draft_vocab", LONG, "tokens that the drafter knows", "where it is no model"),
    ("rule", TEXT, "rule of verification"),
    ("evidence", TEXT, "full or lean", "in old captures"),
    ("speculation", TEXT, "another engine's own configuration of speculation, as JSON"),
    ("text", BOOL, "whether prompts and text were recorded"),
    ("tokens", BOOL, "whether token ids were recorded"),
    ("engine_steps", LONG, "engine steps in the capture, over all branches"),
    ("lost", LONG, "engine steps that are known to be missing"),
    ("warnings", TEXTS, "what is damaged or missing in the capture, a line each"),
)
PLAIN = SamplingParams().to_dict()
PARAMS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "max_tokens", "ignore_eos", "min_tokens"),
)
PARAMS_KINDS = {float: DOUBLE, int: LONG, bool: BOOL, dict: pa.map_(LONG, DOUBLE), list: TEXTS}
REQUESTS = RUN + _columns(
    ("request", NAME, "id of the request"),
    ("branch", INT, "branch where it ended, or of its last step if it did not end"),
    ("current", BOOL, "whether that is on the way to the end of the run's last branch"),
    ("arrival_ns", LONG, "arrival: ns since 1970", NO_INFO),
    ("admitted_ns", LONG, "when it was admitted to the batch: ns since 1970", "where it never was"),
    ("finished_ns", LONG, "when it ended: ns since 1970", NO_END),
    ("reason", NAME, "why it ended: eos, stop, length, cancelled or error", NO_END),
    ("stop", TEXT, "the stop string that matched", "where none did"),
    ("error", TEXT, "what went wrong", "where nothing did"),
    ("title", TEXT, "last chat message", "where the prompt was no chat, and without text"),
    ("prompt", TEXT, "text that was tokenised", "where it came as token ids, and without text"),
    ("prompt_tokens", INTS, "token ids of the prompt", NO_PROMPT),
    ("prompt_length", LONG, "tokens of the prompt", NO_PROMPT),
    ("output", TEXT, "text of the output, as far as its tokens' texts are known", Null(NO_END, empty=False)),
    ("output_tokens", INTS, "token ids of the output", f"{NO_END}, and {NO_IDS.words}"),
    ("output_length", LONG, "tokens of the output", NO_END),
    *((name, PARAMS_KINDS[type(PLAIN[name])], f"sampling parameter {name}", NO_INFO) for name in PARAMS),
    ("stop_strings", TEXTS, "sampling parameter stop", NO_INFO),
    ("logprobs", LONG, "likeliest tokens whose log-probabilities were asked for", "where none were"),
    ("stop_token_ids", INTS, "tokens that end the output, as EOS does", NO_INFO),
    ("structured_outputs", TEXT, "form that the output must have, as JSON", "where it is free"),
    ("left_out", TEXTS, "parameters left out by --no-text or --no-tokens", NO_INFO),
    ("labels", MAP, "other keys of the prompt's line", NO_INFO),
    ("traceparent", TEXT, "the caller's span as W3C trace context", "where there is none"),
    ("sampling", NAME, "why it was kept: ratio, parent, outcome or overflow", "where all requests are kept"),
    ("sampling_ratio", DOUBLE, "share of requests like it that are kept", UNKNOWN),
)
STEPS = STEP + _columns(
    ("start_ns", LONG, "when the engine's step began: ns since 1970"),
    ("step_ns", LONG, "ns that the engine's step took, for its whole batch"),
    *((f"{each}_ns", LONG, f"ns of its phase {each}, for the whole batch", "where it has none") for each in PHASES),
    ("pass_ns", LONGS, "ns of each of the drafter's passes"),
    ("device_ns", LONGS, "ns that the phases of the step BEFORE took on the GPU; empty elsewhere"),
    ("batch", INT, "requests in the engine's step", ELSEWHERE),
    ("running", LONG, "requests in the batch or holding KV", ELSEWHERE),
    ("waiting", LONG, "requests that wait", ELSEWHERE),
    ("blocks_used", LONG, "KV blocks of the target", ELSEWHERE),
    ("blocks_free", LONG, "KV blocks of the target", ELSEWHERE),
    ("speculation", BOOL, "whether drafting was on", ELSEWHERE),
    ("speculation_off", NAME, "why it was not", "where it was on"),
    ("budget", LONG, "largest number of drafts that the step may verify, over all requests", "without a limit"),
    ("context_len", LONG, "tokens whose KV was in the cache when the step began"),
    ("prefill_tokens", LONG, "tokens fed besides the root and the drafts"),
    ("found", LONG, "tokens whose KV it found in the prefix cache in this step"),
    ("output_position", LONG, "output tokens of the request before the step", f"{PREFILL}, and without its prompt"),
    ("preceded", NAME, "what came before: prefill, preemption, full, partial, nothing or no draft", PREFILL),
    ("drafter", NAME, "name of the drafter; none where nothing could be drafted"),
    ("rule", NAME, "rule of verification; lossy:NAME where it is not lossless"),
    ("sizing", NAME, "why the tree has this size", "where it is not adaptive"),
    ("undrafted", NAME, f"why it drafted nothing: {', '.join(Undrafted)}", f"where it did, and {PREFILL}"),
    ("nodes", INT, "drafted nodes"),
    ("depth", INT, "levels of the tree"),
    ("dropped", INT, "nodes that re-ranking left out (EAGLE-2)", NO_DRAFTER),
    ("drafter_cached", LONG, "committed tokens in the drafter's KV cache", NO_DRAFTER),
    ("accepted", INT, "accepted nodes, which is also the depth reached", NO_VERDICT),
    ("emitted", INT, "tokens that became output, after EOS, stop and length truncation"),
    ("kind", NAME, "where the final token came from: bonus, recovered or target", PREFILL),
    ("forced", BOOL, "whether a decision was forced by a debugger; then the run is not lossless", NO_VERDICT),
    ("one_pass", BOOL, "all depths were drafted in one pass", NO_METHOD),
    ("unverified", LONG, "drafts beyond the tree that were not verified", NO_METHOD),
    ("match_length", LONG, "suffix decoding: tokens of the context that were found", NO_METHOD),
    ("match_count", LONG, "suffix decoding: how often", NO_METHOD),
    ("match_source", NAME, "suffix decoding: where", f"{NO_METHOD.words}, and without a match"),
)
PARENTS = STEP + _columns(  # of specscope.load only: in files each node has its parent's
    ("node", INT, "number of the node whose children were tried; -1 is the root"),
    ("depth", INT, "its depth, 0 for the root"),
    ("choice", INT, "token id that was likeliest in p", NO_IDS),
    ("choice_p", FLOAT, "its p"),
    ("entropy", FLOAT, "entropy of p, in nats"),
    ("varentropy", FLOAT, "varentropy of p, in nats squared"),
    ("q_entropy", FLOAT, f"entropy of q, in nats; {NOT_DRAWN}"),
    ("q_varentropy", FLOAT, f"varentropy of q, in nats squared; {NOT_DRAWN}"),
    ("choice_rank", INT, "rank of the target's raw first choice for the drafter; 0 if that does not know it", NO_MODEL),
    ("choice_q", FLOAT, "its raw probability there", NO_MODEL),
    ("outside", FLOAT, "the target's raw mass on tokens that the drafter does not know", NO_MODEL),
    ("top", INTS, "token ids that were likeliest for the target, raw", NO_IDS),
    ("top_p", FLOATS, "their raw probabilities"),
    ("draft_top", INTS, "token ids that were likeliest for the drafter, raw", f"{NO_MODEL.words}, and {NO_IDS.words}"),
    ("draft_top_p", FLOATS, "its probabilities", NO_MODEL),
)


def _of_parent(column: Column) -> tuple[Any, ...]:
    """A column of parents, as each of its nodes has it."""
    drawn = column.name.startswith("q_")
    null = "for deterministic nodes" if drawn else column.null and column.null.words
    about = f"at its parent: {column.about.removesuffix(f'; {NOT_DRAWN}')}"
    return f"parent_{column.name}", column.kind, about, ", ".join(filter(None, (null, NOT_TRIED.words)))


NODES = STEP + _columns(
    ("node", INT, "number of the node in its tree, in draw order, from 0"),
    ("parent", INT, "number of its parent; -1 is the root, the last committed token"),
    ("depth", INT, "depth, 1 for the root's children"),
    ("sibling", INT, "place among its siblings in draw order, from 1"),
    ("token", INT, "drafted token id", NO_IDS),
    ("piece", NAME, PIECE, UNKNOWN),
    ("drawn", NAME, "how it was drawn: deterministic, without_replacement or with_replacement"),
    ("q", FLOAT, "the drafter's probability of drawing it; 1 for deterministic nodes"),
    ("outcome", NAME, "accepted, rejected or untried"),
    ("forced", BOOL, "whether the outcome was forced by a debugger"),
    ("judged", BOOL, "whether its own coin decided; under block and traversal a node below may decide"),
    ("p", FLOAT, "the target's probability of the token at its parent", NO_P),
    ("p_trial", FLOAT, "p when it was tried, after removing rejected siblings", UNTRIED),
    ("q_trial", FLOAT, "q when it was tried, after removing siblings drawn before it", UNTRIED),
    ("accept_prob", DOUBLE, "min(1, p_trial / q_trial); under block and traversal a ratio", UNTRIED),
    ("coin", DOUBLE, "uniform number that decides", NO_COIN),
    ("draft_coin", DOUBLE, "uniform number that drew the token from q", NO_DRAW),
    ("draft_low", DOUBLE, "lower end of the token's interval, which holds that number", NO_DRAW),
    ("residual_mass", DOUBLE, "mass of the residual before it was renormalised", NOT_REJECTED),
    ("margin", DOUBLE, "how far p would have to move to change the outcome; 1 if nothing could", NO_MARGIN),
    ("draft_p", FLOAT, "the drafter's own probability of it at its parent; 0 where the text alone has it", NOT_RANKED),
    ("score", FLOAT, "log of what re-ranking uses: the path's probability, or its expected acceptance", NO_NOTES),
    ("confidence", FLOAT, "the drafter's own estimate of its acceptance", UNSURE),
    ("module", INT, "which MTP module drafted it, from 0", NO_MODULE),
    ("source", NAME, "who drafted it: model, text or both", "where one drafter works alone"),
    ("raw_p", FLOAT, "the target's probability of the token, before temperature and rules", NOT_TRIED),
    ("rank", INT, "rank of the token in p, from 1", NO_RANK),
    ("q_rank", INT, "rank of the token in q, from 1", NO_RANK),
    *map(_of_parent, PARENTS[len(STEP) + 2 :]),
)
FINALS = STEP + _columns(
    ("token", INT, "token id", NO_IDS),
    ("piece", NAME, PIECE, UNKNOWN),
    ("kind", NAME, "bonus, recovered or target"),
    ("emitted", BOOL, "whether it became output: EOS, stop or length may cut it off"),
    ("forced", BOOL, "whether it was forced by a debugger"),
    ("p", DOUBLE, "probability in the distribution that it was drawn from", Null(NO_P.words, lambda s, v: s.c.tells_p)),
    ("coin", DOUBLE, "uniform number that drew it", NO_COIN),
    ("margin", DOUBLE, "how far p would have to move to change the token; 1 if nothing could"),
    ("entropy", DOUBLE, "of the distribution that it was drawn from, in nats", NO_PARENTS),
    ("varentropy", DOUBLE, "of that distribution, in nats squared", NO_PARENTS),
    ("target_p", DOUBLE, "probability in p before any rejection", NO_PARENTS),
)
TOKENS = RUN + _columns(
    ("token", INT, "token id"), ("piece", TEXT, PIECE), ("special", BOOL, "whether it is markup and not text")
)
INTERVALS = RUN + _columns(
    ("step", LONG, "number of the interval"),
    ("start_ns", LONG, "when it began: ns since 1970"),
    ("end_ns", LONG, "when it ended: ns since 1970"),
    ("source", NAME, "where the counts come from"),
    ("engine", NAME, "which engine", UNTOLD),
    ("request", TEXT, "id of its request", "where it covers all requests"),
    ("drafts", LONG, "steps of requests with at least one drafted token", UNTOLD),
    ("drafted", LONG, "tokens", UNTOLD),
    ("accepted", LONG, "tokens", UNTOLD),
    ("emitted", LONG, "output tokens", UNTOLD),
    ("running", LONG, "requests at the end of the interval", UNTOLD),
    ("waiting", LONG, "requests at the end of the interval", UNTOLD),
    ("accepted_at", LONGS, "drafts that accepted a token at depth 1, 2, ..."),
    ("proposed_at", LONGS, "drafts that were that long"),
    ("kv_usage", DOUBLE, "share of the KV cache in use, 0 to 1", UNTOLD),
    ("averages", pa.map_(TEXT, DOUBLE), "averages without counts, by name"),
    ("reset", BOOL, "a counter went back: the engine was restarted"),
    ("rounded", BOOL, "counts were estimated from rounded figures"),
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
    """As the file of a table declares it."""
    return pa.schema([column.field for column in TABLES[table]], metadata={MARK: table})


SCHEMAS = {name: schema_of(name) for name in TABLES if name != "parents"}  # of the files
