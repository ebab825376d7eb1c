"""What spans must look like: what the records declare of their fields, and by hand what else a span holds, and how
values of several fields hang together.

Whatever comes from a file or from the network is checked here, in codec.py and while unspan.py reads it, and nowhere
else: a span that passes can be trusted. `read` gives a span's attributes as one of the Structs below, or raises
DamagedError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

import specscope
from specscope.trace.record.aggregate import Aggregate, LeftOut, RequestFigures, Sampled
from specscope.trace.record.declared import (
    DIMENSIONS,
    Count,
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
    WireForm,
)
from specscope.trace.record.notes import ParentNotes
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
from specscope.trace.wire.codec import DamagedError, check_times, checks, plain_error, read, wired
from specscope.tree_shape import MAX_NODES

# A request's own span is in the words of OpenTelemetry's GenAI conventions (semantic-conventions-genai 0.1.0), for any
# viewer of model calls; `gen_ai.latency.*` is of vLLM and SGLang
CHAT, TEXT_COMPLETION = OPERATIONS = ("chat", "text_completion")
# The sampling parameters that the conventions name; others that were given are JSON in an attribute of ours
PARAMS = ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed")
OTHER_PARAMS = "specscope.request.other_params"
UNTOLD = tuple(sorted(PARAM_NAMES - {*PARAMS, "stop"}))  # where a span lacks that attribute

Phases = Annotated[tuple[Name, ...], Meta(max_length=4096)]
Times = Annotated[tuple[Time, ...], Meta(max_length=8192)]
Likeliest = Annotated[list[Piece], Meta(max_length=2 * DIMENSIONS["t"].most * (MAX_NODES + 1))]

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
AGGREGATE, MAX_AVERAGES = "specscope.aggregate.", 256  # how attributes of counts begin
# A decode step without any of these came without its evidence, at level `steps`
OF_EVIDENCE = {f"specscope.{name}" for name in ("tree.parent", "tree.token", "verdict.path", "final.token", "final.p")}


OURS = "specscope."  # how the attributes of our own resources begin


def is_ours(resource: Mapping[str, Any]) -> bool:
    """Whether spans of this resource are of a specscope run, whole or damaged."""
    by_name = resource.get("service.name") in ("specscope", "specscope engine")
    return by_name or any(key.startswith(OURS) for key in resource)


class Declared(Struct, frozen=True, kw_only=True):
    """What `checks` gives the attributes that records declare, under their names without `specscope.`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401


class OfStep(Declared, frozen=True, kw_only=True):
    """Every span that we read belongs to an engine step."""

    step: Step = field(name="specscope.step")
    branch: Count = field(name="specscope.branch", default=0)


class OfRequestStep(OfStep, frozen=True, kw_only=True):
    """A request's part in a step, which says of the engine what its trace needs to stand by itself."""

    engine: Short = field(name=ENGINE, default="")  # "" in captures of before


@checks(RequestInfo)
class Queue(OfStep, frozen=True, kw_only=True):
    """A request's admission."""

    admitted: bool = field(name="specscope.request.admitted", default=True)  # False: it ended before it was
    length: TokenCount = field(name="specscope.request.prompt_length", default=0)


@checks(RequestStep, only=IN_PREFILL)
class Prefill(OfRequestStep, frozen=True, kw_only=True):
    """A request's part in a step in which prompt tokens were fed."""


class DecodeStep(OfRequestStep, frozen=True, kw_only=True):
    """A request's part in a step that ended in a verdict, without its evidence: wire/decode_step.py reads that."""

    request_id: Name = field(name="specscope.request.id")
    drafted: Count = field(name="specscope.drafted")
    accepted: Count = field(name="specscope.accepted")
    dropped: Count | UnsetType = field(name="specscope.draft.dropped", default=UNSET)  # where there are notes
    # What the tokens of tree and verdict stand for
    text: Annotated[list[Piece], Meta(max_length=MAX_NODES + 1)] = field(
        name="specscope.tree.text", default_factory=list
    )
    special: Annotated[list[Token], Meta(max_length=MAX_NODES + 1)] = field(
        name="specscope.tree.special", default_factory=list
    )


@checks(StepRecord, LeftOut, absent={"specscope.left_out.steps": None})
class EngineStep(OfStep, frozen=True, kw_only=True):
    """An engine step as a whole: who took part, and what it took."""

    phase_names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)] = field(name="specscope.phase.names")
    phase_times: Times = field(name="specscope.phase.times")
    pass_names: Phases = field(name="specscope.pass.names", default=())
    pass_times: Times = field(name="specscope.pass.times", default=())
    requests: Names = field(name="specscope.requests", default=())
    admitted: Names = field(name="specscope.admitted", default=())
    finished: Names = field(name="specscope.finished", default=())
    flight: Annotated[list[Time], Meta(min_length=3, max_length=3)] | None = field(
        name="specscope.flight", default=None
    )

    def __post_init__(self) -> None:
        if self.after is not None and self.after >= self.step:
            raise ValueError(f"`specscope.after` is {self.after}: step {self.step} cannot follow a later one")
        if (self.left_out_steps or 0) > self.step:
            raise ValueError(f"`specscope.left_out.steps` is {self.left_out_steps}, before step {self.step}")
        for name, names, times in (
            ("specscope.phase", self.phase_names, self.phase_times),
            ("specscope.pass", self.pass_names, self.pass_times),
        ):
            if len(times) != 2 * len(names):
                raise ValueError(f"`{name}.times` holds {len(times)} times for {len(names)} names")
            if any(start > end for start, end in zip(times[::2], times[1::2], strict=True)):
                raise ValueError(f"`{name}.times` ends before it starts")
        for name in ("requests", "admitted", "finished"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"`specscope.{name}` names a request twice")


@checks(Aggregate)
class AggregateStep(EngineStep, frozen=True, kw_only=True):
    """An engine step that is an interval, with its counts."""

    averages: Annotated[list[Name], Meta(max_length=MAX_AVERAGES)] = field(
        name=AGGREGATE + "averages", default_factory=list
    )
    average_values: Annotated[list[Value], Meta(max_length=MAX_AVERAGES)] = field(
        name=AGGREGATE + "average_values", default_factory=list
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.averages) != len(self.average_values) or len(set(self.averages)) != len(self.averages):
            raise ValueError(f"`{AGGREGATE}average_values` are not one for each name in `{AGGREGATE}averages`")
        aggregate = self.aggregate
        accepted, proposed = aggregate.accepted_at, aggregate.proposed_at
        if proposed and not accepted:
            raise ValueError(f"`{AGGREGATE}proposed_at` without `{AGGREGATE}accepted_at`")
        if accepted and (aggregate.drafts is None or max(accepted) > aggregate.drafts):
            raise ValueError(f"`{AGGREGATE}accepted_at` counts more than `{AGGREGATE}drafts`")
        if any(after > before for before, after in pairwise(accepted)):
            raise ValueError(f"`{AGGREGATE}accepted_at` rises: a token is accepted only after the one before it")
        if proposed and len(proposed) != len(accepted):
            raise ValueError(f"`{AGGREGATE}proposed_at` holds {len(proposed)} values, not {len(accepted)}")

    @property
    def aggregate(self) -> Aggregate:
        """The interval's counts."""
        averages = dict(zip(self.averages, self.average_values, strict=True))
        return read(self, Aggregate, {"averages": averages})


# What tells that there are figures: captures of before, and runs that went back too far, have none
FIGURES = tuple(field.attribute for field in wired(RequestFigures) if field.default is MISSING)
QUEUED = "gen_ai_latency_time_in_queue"  # where this is told, it ran


@checks(RequestEnd, Sampled, RequestFigures, absent=dict.fromkeys(("specscope.sampling.reason", *FIGURES)))
class Root(OfStep, frozen=True, kw_only=True):
    """A request's end, and of what it asked as much as any viewer of model calls understands."""

    request: Name = field(name="specscope.request.id")
    labels: Short = field(name="specscope.request.labels")
    reasons: Annotated[list[FinishReason], Meta(min_length=1, max_length=1)] = field(
        name="gen_ai.response.finish_reasons"
    )
    temperature: float = field(name="gen_ai.request.temperature")
    top_k: Int64 = field(name="gen_ai.request.top_k")
    top_p: float = field(name="gen_ai.request.top_p")
    frequency_penalty: float = field(name="gen_ai.request.frequency_penalty")
    presence_penalty: float = field(name="gen_ai.request.presence_penalty")
    max_tokens: Int64 = field(name="gen_ai.request.max_tokens")
    seed: Int64 = field(name="gen_ai.request.seed")
    stop: list[Short] = field(name="gen_ai.request.stop_sequences", default_factory=list)
    other_params: Text = field(name=OTHER_PARAMS, default="")
    operation: Short = field(name="gen_ai.operation.name", default=TEXT_COMPLETION)
    length: TokenCount = field(name="gen_ai.usage.output_tokens", default=0)  # of its output

    @property
    def has_figures(self) -> bool:
        """Whether it tells the request's sums."""
        return all(getattr(self, name.removeprefix("specscope.")) is not None for name in FIGURES)


@checks(ParentNotes)
class Parents(Declared, frozen=True, kw_only=True):
    """The notes on the parents that were tried, as JSON."""

    # What the likeliest tokens stand for that are not in the tree: ParentNotes.named
    text: Likeliest = field(default_factory=list)


ROOT_NAME = TEXT_COMPLETION  # how its name begins, unless it is a chat
AnySpan = Queue | Prefill | DecodeStep | EngineStep | Root
KINDS: Mapping[str, type[AnySpan]] = {
    "queue": Queue,
    "prefill": Prefill,
    "decode_step": DecodeStep,
    "engine_step": EngineStep,
    ROOT_NAME: Root,
}


def kind_of(name: str, attributes: Mapping[str, Any]) -> type[AnySpan] | None:
    """What a span must look like; None where it is none that is read, or another tells all of it."""
    kind = KINDS.get(name) or (Root if name.partition(" ")[0] in OPERATIONS else None)
    if kind is EngineStep and any(key.startswith(AGGREGATE) for key in attributes):
        return AggregateStep
    return None if kind is Prefill and attributes.get("specscope.prefill.reaches_root") is True else kind


@checks(RunInfo)
class Resource(Declared, frozen=True, kw_only=True):
    """The resource: what a capture says of its run."""

    text: bool = field(name="specscope.run.text")
    tokens: bool = field(name="specscope.run.tokens", default=True)


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


def _numbers(version: str) -> tuple[int, ...]:
    """The numeric part of a version: 0.10.0rc1 is (0, 10, 0)."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", re.match(r"[0-9.]*", version)[0]))  # type: ignore[index]


NO_TIMES = "unknown"  # the one phase of a step of which nothing but its start and end is known


class EngineNotes(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request's step says of the engine's step that it was part of, so that its trace stands by itself.

    One attribute of short text, because every step has it: `batch=3 kv=12/1444 ns=73900,2302/12963,1692/32255`. A count
    that is absent is 0, and `running` is the batch. Of each phase it has the length in nanoseconds, before it the gap
    after the phase before, where there is one; the first begins with the span. Phases have names (`ns=load:73900`)
    where they are others than PHASES, in this order. The drafter's passes, an asynchronous step's flight and a device's
    times are told by the engine step's own span alone.
    """

    batch: Count  # requests that took part
    phases: Annotated[tuple[tuple[Name, Int64, Time], ...], Meta(min_length=1, max_length=64)]  # name, gap, length
    running: Count | None = None
    waiting: Count = 0
    blocks_used: Count = field(name="used", default=0)
    blocks_free: Count = field(name="free", default=0)
    blocks_cached: Count = field(name="cached", default=0)
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
    """The text of a step."""
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
    for phase, usual in zip_longest(words.pop("ns", "").split(","), PHASES):
        if phase is None:
            break
        name, _, times = phase.rpartition(":")
        gap, _, length = times.rpartition("/")
        words["phases"].append((unquote(name) or usual, gap or "0", length))
    try:
        return msgspec.convert(words, EngineNotes, strict=False)
    except msgspec.ValidationError as error:
        raise DamagedError(f"`{ENGINE}`: {plain_error(error)}") from None
