"""What spans tell: records, by what these declare, what else a span of a name holds, and how fields hang together.

Whatever comes from a file or from the network is checked here and in tables.py, and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

import specscope
from specscope.trace.record.aggregate import Aggregate, LeftOut, RequestFigures, Sampled
from specscope.trace.record.declared import (
    DIMENSIONS,
    MAX_NOTES,
    Count,
    Counted,
    Int64,
    Name,
    Names,
    Piece,
    Short,
    Step,
    Text,
    Time,
    Token,
    TokenCount,
    Value,
    Wire,
    WireForm,
    Words,
    made,
)
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import (
    EVIDENCE,
    PHASES,
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
)
from specscope.trace.record.vocabulary import printable
from specscope.trace.run.packed import HELD, FieldColumns, Longs, PackedParts
from specscope.trace.wire.codec import DamagedError, check_times, plain_error, read_json, wired
from specscope.trace.wire.tables import Attributes, Lengths, converted, read_table
from specscope.tree_shape import MAX_NODES, ROOT

T = TypeVar("T")

# A request's own span is in the words of OpenTelemetry's GenAI conventions (semantic-conventions-genai 0.1.0), for any
# viewer of model calls; `gen_ai.latency.*` is of vLLM and SGLang
CHAT, TEXT_COMPLETION = OPERATIONS = ("chat", "text_completion")
# The sampling parameters that the conventions name; others that were given are JSON in an attribute of ours
PARAMS = ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
OTHER_PARAMS = "specscope.request.other_params"
UNTOLD = tuple(sorted(PARAM_NAMES - {*PARAMS, "stop"}))  # where a span lacks that attribute

Times = Annotated[tuple[Time, ...], Meta(max_length=8192)]
Timed = Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]  # phases of a step
Passes = Annotated[tuple[Name, ...], Meta(max_length=4096)]
NotesText = Annotated[str, Meta(max_length=MAX_NOTES)]
Likeliest = Annotated[list[Piece], Meta(max_length=2 * DIMENSIONS["t"].most * (MAX_NODES + 1))]
OfTree = Annotated[tuple[T, ...], Meta(max_length=MAX_NODES + 1)]
ThreeTimes = Annotated[tuple[Time, ...], Meta(min_length=3, max_length=3)]
OneReason = Annotated[tuple[FinishReason, ...], Meta(min_length=1, max_length=1)]

# The attributes of a prefill, which a decode step has too; and what that says at level `steps` besides
IN_PREFILL = (
    *("specscope.request.id", "specscope.request.step", "specscope.context_len", "specscope.prefill_tokens"),
    *("specscope.kv.blocks", "specscope.kv.moved", "specscope.kv.found"),
)
SUMMARY = (
    *("specscope.drafter", "specscope.drafted", "specscope.accepted", "specscope.emitted", "specscope.final.kind"),
    *("specscope.draft.dropped", "specscope.forced", "specscope.draft.sizing", "specscope.preceded", "specscope.rule"),
)
ENGINE = "specscope.engine"  # EngineNotes
AGGREGATE = "specscope.aggregate."  # how attributes of counts begin
Averages = Annotated[tuple[T, ...], Meta(max_length=256)]
# A decode step without any of these came without its evidence, at level `steps`
OF_EVIDENCE = {f"specscope.{name}" for name in ("tree.parent", "tree.token", "verdict.path", "final.token", "final.p")}


OURS = "specscope."  # how the attributes of our own resources begin


def is_ours(resource: Mapping[str, Any]) -> bool:
    """Whether spans of this resource are of a specscope run, whole or damaged."""
    by_name = resource.get("service.name") in ("specscope", "specscope engine")
    return by_name or any(key.startswith(OURS) for key in resource)


@dataclass(frozen=True)
class OfStep:
    """Every span that we read belongs to an engine step."""

    PREFIX: ClassVar = "specscope."
    step: Annotated[int, Wire(Step)]
    branch: Counted = 0
    # what a request's part says of the engine, for its trace to stand by itself; "" in captures of before
    engine: Words = ""


@dataclass(frozen=True)
class OfQueue:
    PREFIX: ClassVar = "specscope.request."
    admitted: Annotated[bool, Wire()] = True  # False: it ended before it was
    length: Annotated[int, Wire(TokenCount, name="request.prompt_length")] = 0


@dataclass(frozen=True)
class OfDecodeStep:
    """Of a request's part in a step that ended in a verdict."""

    PREFIX: ClassVar = "specscope."
    request: Annotated[str, Wire(Name, name="request.id")]
    drafted: Counted
    accepted: Counted
    dropped: Annotated[int | None, Wire(Count | None, name="draft.dropped")] = None  # where there are notes
    # What the tokens of tree and verdict stand for
    text: Annotated[tuple[str, ...], Wire(OfTree[Piece], name="tree.text")] = ()
    special: Annotated[tuple[int, ...], Wire(OfTree[Token], name="tree.special")] = ()


@dataclass(frozen=True)
class OfEngineStep:
    """Of an engine step as a whole: who took part, and what it took."""

    PREFIX: ClassVar = "specscope."
    phase_names: Annotated[tuple[str, ...], Wire(Timed, name="phase.names")]
    phase_times: Annotated[tuple[int, ...], Wire(Times, name="phase.times")]
    pass_names: Annotated[tuple[str, ...], Wire(Passes, name="pass.names")] = ()
    pass_times: Annotated[tuple[int, ...], Wire(Times, name="pass.times")] = ()
    requests: Annotated[tuple[str, ...], Wire(Names)] = ()
    admitted: Annotated[tuple[str, ...], Wire(Names)] = ()
    finished: Annotated[tuple[str, ...], Wire(Names)] = ()
    flight: Annotated[tuple[int, ...] | None, Wire(ThreeTimes | None)] = None


@dataclass(frozen=True)
class OfAggregate:
    """Of an interval, besides its counts."""

    PREFIX: ClassVar = AGGREGATE
    averages: Annotated[tuple[str, ...], Wire(Averages[Name])] = ()
    average_values: Annotated[tuple[float, ...], Wire(Averages[Value])] = ()


@dataclass(frozen=True)
class OfRoot:
    """Of a request's end: what it asked, as much as any viewer of model calls understands."""

    PREFIX: ClassVar = "gen_ai.request."
    request: Annotated[str, Wire(Name, name="request.id")]
    labels: Annotated[str, Wire(Short, name="request.labels")]
    reasons: Annotated[tuple[FinishReason, ...], Wire(OneReason, name="gen_ai.response.finish_reasons")]
    temperature: Annotated[float, Wire()]
    top_k: Annotated[int, Wire(Int64)]
    top_p: Annotated[float, Wire()]
    frequency_penalty: Annotated[float, Wire()]
    presence_penalty: Annotated[float, Wire()]
    max_tokens: Annotated[int, Wire(Int64)]
    seed: Annotated[int, Wire(Int64)]
    stop: Annotated[tuple[str, ...], Wire(tuple[Short, ...], name="gen_ai.request.stop_sequences")] = ()
    other_params: Annotated[str, Wire(Text, name="request.other_params")] = ""
    operation: Annotated[str, Wire(Short, name="gen_ai.operation.name")] = TEXT_COMPLETION
    length: Annotated[int, Wire(TokenCount, name="gen_ai.usage.output_tokens")] = 0  # of its output


@dataclass(frozen=True)
class OfRun:
    """Of the resource: what was left out."""

    PREFIX: ClassVar = "specscope.run."
    text: Annotated[bool, Wire()]
    tokens: Annotated[bool, Wire()] = True


Records = dict[type, Any]  # by their types, as far as a span tells of each


def _check_engine_step(told: Records) -> None:
    span, step = told[OfEngineStep], told[StepRecord]
    left_out = told[LeftOut].steps if LeftOut in told else 0
    if step.after is not None and step.after >= step.step:
        raise DamagedError(f"`specscope.after` is {step.after}: step {step.step} cannot follow a later one")
    if left_out > step.step:
        raise DamagedError(f"`specscope.left_out.steps` is {left_out}, before step {step.step}")
    for name in ("phase", "pass"):
        names, times = getattr(span, f"{name}_names"), getattr(span, f"{name}_times")
        if len(times) != 2 * len(names):
            raise DamagedError(f"`specscope.{name}.times` holds {len(times)} times for {len(names)} names")
        if any(start > end for start, end in zip(times[::2], times[1::2], strict=True)):
            raise DamagedError(f"`specscope.{name}.times` ends before it starts")
    for name in ("requests", "admitted", "finished"):
        if len(set(getattr(span, name))) != len(getattr(span, name)):
            raise DamagedError(f"`specscope.{name}` names a request twice")
    if Aggregate in told:
        _check_aggregate(told[OfAggregate], told[Aggregate])


def _check_aggregate(span: OfAggregate, aggregate: Aggregate) -> None:
    accepted, proposed = aggregate.accepted_at, aggregate.proposed_at
    if len(span.averages) != len(span.average_values) or len(set(span.averages)) != len(span.averages):
        raise DamagedError(f"`{AGGREGATE}average_values` are not one for each name in `{AGGREGATE}averages`")
    if proposed and len(proposed) != len(accepted):
        raise DamagedError(f"`{AGGREGATE}proposed_at` holds {len(proposed)} values, not {len(accepted)}")
    if any(after > before for before, after in pairwise((aggregate.drafts or 0, *accepted))):
        raise DamagedError(f"`{AGGREGATE}accepted_at` rises, or counts more than `{AGGREGATE}drafts`")


class SpanKind(NamedTuple):
    # records, and how an attribute begins without which a span tells nothing of one; those of "" it tells of always
    records: Mapping[type, str]
    check: Callable[[Records], None] = lambda told: None
    only: Sequence[str] = ()  # attributes that are read

    def read(self, attributes: Sequence[Attributes], *, nameless: bool = False) -> Sequence[Records]:
        """What these spans tell. Raises DamagedError where anything in one is damaged."""
        spans: list[Records] = [{} for _ in attributes]
        for record, begins in self.records.items():
            tells = [not begins or any(name.startswith(begins) for name in each) for each in attributes]
            rows = [row for row, told in enumerate(tells) if told]
            table = read_table(record, [attributes[row] for row in rows], nameless=nameless, only=self.only)
            for row, fields in zip(rows, table.each(), strict=True):
                spans[row][record] = made(record, fields)
        for span in spans:
            self.check(span)
        return spans


QUEUE = SpanKind({OfStep: "", OfQueue: "", RequestInfo: ""})
PREFILL = SpanKind({OfStep: "", RequestStep: ""}, only=(*IN_PREFILL, "specscope.step", "specscope.branch", ENGINE))
DECODE_STEP = SpanKind({OfStep: "", OfDecodeStep: ""})  # besides, StepEvidence
OF_ENGINE = {OfStep: "", StepRecord: "", OfEngineStep: "", LeftOut: "specscope.left_out.steps"}
ENGINE_STEP = SpanKind({**OF_ENGINE, OfAggregate: AGGREGATE, Aggregate: AGGREGATE}, _check_engine_step)
# Captures of before have no figures, and requests that were under way when the run went back
OF_END = {RequestEnd: "", Sampled: "specscope.sampling.reason", RequestFigures: "specscope.bonus"}
REQUEST = SpanKind({OfStep: "", OfRoot: "", **OF_END})
RESOURCE = SpanKind({RunInfo: "", OfRun: ""})
ROOT_NAME = TEXT_COMPLETION  # how its name begins, unless it is a chat
KINDS: Mapping[str, SpanKind] = {
    "queue": QUEUE,
    "prefill": PREFILL,
    "decode_step": DECODE_STEP,
    "engine_step": ENGINE_STEP,
    ROOT_NAME: REQUEST,
}


def kind_of(name: str, attributes: Attributes) -> SpanKind | None:
    """None where a span of this name is not read, or another tells all of it."""
    kind = KINDS.get(name) or (REQUEST if name.partition(" ")[0] in OPERATIONS else None)
    return None if kind is PREFILL and attributes.get("specscope.prefill.reaches_root") is True else kind


@dataclass(frozen=True)
class StepEvidence:
    step: RequestStep  # in columns with others
    likeliest: Sequence[str]  # the texts of ParentNotes.named, if there are any


def read_spans(kind: SpanKind, attributes: Sequence[Attributes], *, nameless: bool) -> Sequence[Records]:
    """What spans of a kind tell, and of decode steps the evidence, where it is there. Raises as SpanKind.read."""
    told = kind.read(attributes, nameless=nameless)
    rows = [row for row, each in enumerate(attributes) if kind is DECODE_STEP and OF_EVIDENCE & each.keys()]
    if rows:
        evidence = _evidence([told[row][OfDecodeStep] for row in rows], [attributes[row] for row in rows], nameless)
        for row, found in zip(rows, evidence, strict=True):
            told[row][StepEvidence] = found
    return told


def _evidence(spans: Sequence[OfDecodeStep], attributes: Sequence[Attributes], nameless: bool) -> list[StepEvidence]:
    """The steps of these spans in columns, checked. Raises DamagedError where anything in one is damaged."""
    lengths: Lengths = {}
    lengths["d"] = np.array([span.dropped or 0 for span in spans], np.int64)
    held: dict[str, tuple[NDArray[np.bool_], FieldColumns]] = {}
    likeliest: list[Sequence[str]] = [()] * len(spans)
    in_json = {field.name: field.attribute for field in wired(RequestStep) if field.notes is not None}
    for name, kind in HELD.items():
        notes, told = in_json.get(name, ""), attributes
        there = np.array([name != "notes" or span.dropped is not None for span in spans], np.bool_)
        if notes:
            texts = converted([each.get(notes, "") for each in attributes], NotesText, notes)
            there = np.array(list(map(bool, texts)), np.bool_)
            told = [read_json(text, dict[str, Any], notes) if text else {} for text in texts]
        of_these = {letter: each[there] for letter, each in lengths.items()}
        these = [each for each, is_there in zip(told, there, strict=True) if is_there]
        held[name] = there, read_table(kind, these, of_these, nameless=nameless, notes=notes)
        lengths = of_these if there.all() else lengths
        lengths["e"] = held[""][1].numbers["emitted"]
        if name == "parents":
            likeliest = converted([each.get("text", []) for each in told], Likeliest, "text", f"`{notes}`: ")
    packed = PackedParts(held)
    _check(packed, spans, lengths["n"], lengths["a"])
    return [StepEvidence(packed[row], likeliest[row]) for row in range(len(spans))]


def _check(packed: PackedParts, spans: Sequence[OfDecodeStep], n: Longs, accepted: Longs) -> None:
    tree, verdict, notes = (packed.held[name] for name in ("tree", "verdict", "notes"))
    _parents_first("specscope.tree.parent", tree, "parent", np.zeros(len(spans), np.int64))
    _parents_first("specscope.draft.dropped_parent", notes, "dropped_parent", n[packed.rows["notes"] >= 0])
    _check_path(verdict, tree, n)
    for name, holds in (("drafted", n), ("accepted", accepted)):
        says = np.array([getattr(span, name) for span in spans])
        if (wrong := says != holds).any():
            raise DamagedError(f"`specscope.{name}` is {says[wrong][0]}, the arrays hold {holds[wrong][0]}")
    for span, nodes in zip(spans, n.tolist(), strict=True):
        if span.text and len(span.text) != nodes + 1:
            raise DamagedError(f"`specscope.tree.text` holds {len(span.text)} texts for {nodes + 1} tokens")
    _check_nodes("specscope.forced", verdict, "forced", n, n)
    _check_nodes("specscope.kv.moved", packed.held[""], "moved", n, n - 1)
    for name in ("parents", "form"):
        nodes = n[packed.rows[name] >= 0]
        _check_nodes(f"specscope.{name}", packed.held[name], "node", nodes, nodes - 1)


def _inner(table: FieldColumns, name: str) -> tuple[NDArray[Any], Longs, Longs]:
    """An array of all records end to end, the record of each value, and its place in that record's array."""
    ends = table.ends[name]
    counts = np.diff(ends)
    record = np.repeat(np.arange(len(counts)), counts)
    return table.arrays[name], record, np.arange(len(record)) - ends[record]


def _parents_first(name: str, table: FieldColumns, column: str, first: Longs) -> None:
    """Nodes `first` and on of each record: every parent comes before its child."""
    above, record, place = _inner(table, column)
    node = place + first[record]
    if (wrong := above >= node).any():
        at, parent = node[wrong][0], above[wrong][0]
        raise DamagedError(f"`{name}`: node {parent} cannot be the parent of node {at}: parents come first")


def _check_path(verdict: FieldColumns, tree: FieldColumns, n: Longs) -> None:
    """A path goes from the root down; whether each of its nodes was accepted, `verify` judges."""
    path, record, place = _inner(verdict, "path")
    above = np.where(place == 0, ROOT, np.roll(path, 1))
    if (path >= n[record]).any() or (tree.arrays["parent"][tree.ends["parent"][record] + path] != above).any():
        raise DamagedError("`specscope.verdict.path` is not a path of accepted nodes from the root")


def _check_nodes(name: str, table: FieldColumns, column: str, n: Longs, last: Longs) -> None:
    """Nodes are of the tree of n, the `last` included."""
    nodes, record, _ = _inner(table, column)
    if (wrong := nodes > last[record]).any():
        raise DamagedError(f"`{name}` names node {nodes[wrong].max()} of {n[record][wrong][0]}")


# The attributes that hold a JSON object as text, and what stands for one that a store cut short
OBJECTS = {
    field.attribute: "" if field.notes is not None else "{}"
    for kind in (RequestStep, RequestInfo, RunInfo)
    for field in wired(kind)
    if field.notes is not None or field.wire.form is WireForm.JSON
} | {"specscope.request.params": json.dumps({"left_out": sorted(PARAM_NAMES)})}


def whole_objects(attributes: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The attributes, but for JSON objects that were cut short, and the names of these: the others are worth having."""
    texts = {name: attributes[name] for name in OBJECTS.keys() & attributes.keys()}
    cut = [name for name, text in texts.items() if isinstance(text, str) and text[:1] == "{" and text[-1] != "}"]
    return ({**attributes, **{name: OBJECTS[name] for name in cut}} if cut else attributes), cut


def newer(resource: Mapping[str, Any]) -> str:
    """A remark where a newer specscope wrote this resource, or it is of an unknown kind; else ""."""
    version, evidence = (str(resource.get(name, "")) for name in ("service.version", "specscope.run.evidence"))
    if is_ours(resource) and _numbers(version) > _numbers(specscope.__version__):
        wrote = f"specscope {printable(version)[:40]} wrote it; this is {specscope.__version__}"
        return f"{wrote}, which cannot read all of it (update specscope)"
    if evidence and evidence not in EVIDENCE:
        return f"a kind of capture that this version does not know (evidence: {printable(evidence)[:40]})"
    return ""


def _numbers(version: str) -> list[int]:
    """0.10.0rc1 is [0, 10, 0]."""
    return list(map(int, re.findall(r"\d{1,9}", re.sub(r"[^0-9.].*", "", version))))


NO_TIMES = "unknown"  # the one phase of a step of which nothing but its start and end is known


class EngineNotes(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request's step says of the engine's step that it was part of, so that its trace stands by itself.

    One attribute of short text, because every step has it: `batch=3 kv=12/1444 ns=73900,2302/12963,1692/32255`. A count
    that is absent is 0, and `running` is the batch. Of each phase it has the length in nanoseconds, before it the gap
    after the phase before, where there is one, and its name (`ns=load:73900`) where they are not PHASES in their order.
    """

    batch: Count  # requests that took part
    phases: Annotated[tuple[tuple[Name, Int64, Time], ...], Meta(min_length=1, max_length=64)]  # name, gap, length
    running: Count | None = None
    waiting: Count = 0
    blocks_used: Count = msgspec.field(name="used", default=0)
    blocks_free: Count = msgspec.field(name="free", default=0)
    blocks_cached: Count = msgspec.field(name="cached", default=0)
    queried: Count = 0
    budget: Count | None = None
    after: Annotated[int, Meta(ge=-1, lt=2**53)] | None = None
    rewound: bool = False
    off: Short | None = None  # why nothing was drafted; None where drafting was on

    def fields(self, start_ns: int) -> dict[str, Any]:
        """The fields of a StepRecord that began then. Raises DamagedError."""
        phases, begin = [], start_ns
        for name, gap, length in self.phases:
            phases.append(Phase(name, begin + gap, begin + gap + length))
            begin = phases[-1].end_ns
            check_times(phases[-1].start_ns, begin)
        told = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("batch", "off")}
        running = self.batch if self.running is None else self.running
        off = {"speculation": self.off is None, "speculation_off": self.off or ""}
        return {**told, **off, "running": running, "phases": tuple(phases)}


def engine_text(record: StepRecord) -> str:
    counts = {
        "running": record.running if record.running != record.batch else None,
        "waiting": record.waiting or None,
        "kv": f"{record.blocks_used}/{record.blocks_free}",
        "cached": record.blocks_cached or None,
        "queried": record.queried or None,
        "budget": record.budget,
        "after": record.after,
        "rewound": int(record.rewound) or None,
        "off": None if record.speculation else quote(record.speculation_off, errors="replace"),
    }
    words = {"batch": record.batch} | {name: value for name, value in counts.items() if value is not None}
    times, last = [], record.start_ns
    usual = tuple(phase.name for phase in record.phases) == PHASES
    for phase in record.phases:
        name = "" if usual else f"{quote(phase.name, safe='', errors='replace')}:"
        gap = f"{phase.start_ns - last}/" if phase.start_ns != last else ""
        times.append(f"{name}{gap}{phase.end_ns - phase.start_ns}")
        last = phase.end_ns
    return " ".join(f"{name}={value}" for name, value in {**words, "ns": ",".join(times)}.items())


def read_engine(text: str) -> EngineNotes:
    """The text, checked. Raises DamagedError."""
    words: dict[str, Any] = dict(word.partition("=")[::2] for word in text.split(" "))
    words["used"], _, words["free"] = words.pop("kv", "0/0").partition("/")
    if "off" in words:
        words["off"] = unquote(words["off"])
    words["phases"] = []
    for phase, usual in zip(words.pop("ns", "").split(","), chain(PHASES, repeat(None)), strict=False):
        name, _, times = phase.rpartition(":")
        gap, _, length = times.rpartition("/")
        words["phases"].append((unquote(name) or usual, gap or "0", length))
    try:
        return msgspec.convert(words, EngineNotes, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"`{ENGINE}`: {plain_error(error)}") from None
