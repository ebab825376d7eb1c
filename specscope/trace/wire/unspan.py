"""Spans to records: the reading half of the codec. Exact where every span of a step is there; else what is there."""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from specscope.errors import UserError
from specscope.trace.history.interval import NOTHING
from specscope.trace.history.wording import Faults, plural
from specscope.trace.record.aggregate import Aggregate, LeftOut, RequestFigures, Sampled
from specscope.trace.record.declared import made
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, completed, digest, draft_tokens
from specscope.trace.record.params import SamplingParams, withheld_at
from specscope.trace.record.privacy import Privacy, no_tokens
from specscope.trace.record.records import (
    Absent,
    Flight,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
)
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary, printable, unescape
from specscope.trace.wire import schema
from specscope.trace.wire.codec import DamagedError, check_times, read_json, unescaped
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.schema import (
    CHAT,
    NO_TIMES,
    OTHER_PARAMS,
    PARAMS,
    UNTOLD,
    StepEvidence,
    newer,
    read_engine,
    read_spans,
)
from specscope.trace.wire.tables import read_each

T = TypeVar("T")
Attributes = Mapping[str, Any]

STEPS_BEHIND = 64  # with so many later steps known, one that is still incomplete has lost a span
HELD = 64 * 2**20  # bytes of incomplete steps, roughly: with more, the first counts as lost
HELD_OF_FILE = 2**30  # likewise, of a file that is read to its end
SENT = 20_000  # numbers of steps that are remembered, so that a branch can be told where it begins
INFOS = 64 * 2**20  # bytes of what requests were, roughly: with more, the oldest are forgotten, those that ended first
PIECES = 2**19  # tokens in the vocabulary, at most; more than any model has
TEXT = 32 * 2**20  # bytes of their texts
# Parameters that are not set: a resource may leave them out
DEFAULTS = SamplingParams().to_dict()
UNSET_PARAMS = {name: value for name, value in DEFAULTS.items() if not value}
OWN = "engine step's own span"
MISSING = {  # what may be, as one and as several
    "whole engine step": "",
    "part of a request in a step": "parts of requests in steps",
    "request's beginning or end": "beginnings and ends of requests",
    OWN: "engine steps' own spans",
}
UNDRAFTED: Mapping[str, Any] = {"drafter": "none", "tree": DraftTree.empty(), "verdict": None, "emitted": 0}


def run_info(resource: Attributes) -> RunInfo:
    """What `spans.resource_attributes` wrote. Raises UserError for the resource of another program."""
    if "specscope.run.id" not in resource:
        service = printable(str(resource.get("service.name", "an unnamed service")))[:100]
        raise UserError(f"these spans come from another program ({service})")
    try:
        [told] = schema.RESOURCE.read([schema.whole_objects(resource)[0]])
    except DamagedError as error:
        why = newer(resource) or "their run cannot be read or is of another version"
        raise UserError(f"{why}: {error}") from None
    kept = told[schema.OfRun]
    run: RunInfo = replace(told[RunInfo], privacy=Privacy.of(no_text=not kept.text, no_tokens=not kept.tokens))
    try:
        draft_tokens(run)
    except ValueError:  # with_vocabulary names it
        run = replace(run, draft_tokens=digest(run.draft_tokens))
    params = {**UNSET_PARAMS, **run.params} if run.params else {}
    return replace(run, params={name: params[name] for name in (*DEFAULTS, *params) if name in params})


@dataclass
class _Pending:
    engine: schema.Records | None = None  # of the engine step's own span
    parts: dict[str, RequestStep] = field(default_factory=dict)
    infos: dict[str, tuple[RequestInfo, int]] = field(default_factory=dict)  # of `queue` spans, with its bytes
    finished: dict[str, tuple[int, int, schema.Records]] = field(default_factory=dict)  # start, end; read at the end
    notes: str = ""  # what a request's step said of the engine
    times: tuple[int, int] = (0, 0)  # when a request's step began and ended, or when a request came or went
    branch: int = 0
    bare: set[str] = field(default_factory=set)  # requests whose steps came without their evidence
    weight: int = 0  # bytes, roughly
    since: float = field(default_factory=time.monotonic)  # when the first of them came

    @property
    def names(self) -> schema.OfEngineStep:
        return NOBODY if self.engine is None else self.engine[schema.OfEngineStep]

    @property
    def admitted(self) -> dict[str, RequestInfo]:
        """The others of `infos` ended before."""
        return {name: info for name, (info, _) in self.infos.items() if info.admitted_ns}

    @property
    def left_out(self) -> int:
        return self.engine[LeftOut].steps if self.engine is not None and LeftOut in self.engine else 0

    def complete(self) -> bool:
        if self.engine is None or len(self.parts) < len(self.names.requests):
            return False  # the answer for most spans
        asked = ((self.parts, self.names.requests), (self.admitted, self.names.admitted))
        figures = {name: told.get(RequestFigures) for name, (*_, told) in self.finished.items()}
        return all(there.keys() >= {*names} for there, names in (*asked, (figures, self.names.finished))) and all(
            not sums or sums.queue_s is not None or name in self.infos for name, sums in figures.items()
        )

    def own(self, notes: schema.EngineNotes | None) -> dict[str, Any]:
        """The fields of the record that the engine step's span has. `notes`: what a request's step said of them."""
        if self.engine is None:
            bare = {"running": len(self.parts), "phases": (Phase(NO_TIMES, *self.times),)}
            return {**NOTHING, "branch": self.branch, **(bare if notes is None else notes.fields(self.times[0]))}
        aggregate, own = self.engine.get(Aggregate), self.engine.get(schema.OfAggregate)
        averages = {} if own is None else dict(zip(own.averages, own.average_values, strict=True))
        return {
            **vars(self.engine[StepRecord]),
            "phases": _phases(self.names.phase_names, self.names.phase_times),
            "passes": _phases(self.names.pass_names, self.names.pass_times),
            "aggregate": None if aggregate is None else _whole(aggregate, averages=averages),
            "flight": None if self.names.flight is None else Flight(*self.names.flight),
            "left_out": self.engine.get(LeftOut),
        }

    def absent(self, notes: schema.EngineNotes | None, ends: Sequence[RequestEnd], steps: int) -> Absent | None:
        """What of the step is not here. `steps`: engine steps between the one before and this one that are not here."""
        names = tuple(name for name in self.names.requests if name not in self.parts)
        told = None if notes is None else max(notes.batch - len(self.parts), 0)
        others = told if self.engine is None else len(names)
        unseen = len({*self.names.admitted}.difference(self.admitted))  # admissions and ends
        unseen += len({*self.names.finished}.difference(end.info.id for end in ends))
        absent = Absent(others, names, self.engine is None, steps, unseen)
        return None if absent == Absent() else absent


NOBODY = schema.OfEngineStep((), ())


def _whole(part: T, **more: Any) -> T:  # noqa: ANN401
    """A record of which a span told a part."""
    return made(type(part), vars(part) | more)  # type: ignore[no-any-return]


class Decoder:
    """Takes one run's spans in any order and gives its records in order; what it holds is bounded, whatever comes.

    A span that is not as the schema says is left out and named in `faults`. A step is given when its spans are there,
    or when it is no use to wait for them: where too many others wait, when it is `overdue`, and at the end. What it
    then lacks its record says (`absent`), and `lost` counts. `summaries` counts decode steps that came without their
    evidence (level `steps`). A reader of a file is `patient`: only memory bounds what waits.
    """

    def __init__(self, privacy: Privacy = Privacy.EVERYTHING, *, patient: bool = False) -> None:
        """`privacy`: as the run was recorded; what then lacks is no damage."""
        self.privacy = privacy
        self.vocabulary = Vocabulary()
        self.faults = Faults()
        self.run: RunInfo | None = None  # as its reader knows it; completed where a span tells the draft vocabulary
        self.missing = Counter[str]()  # by MISSING
        self.judged = 0  # decode steps with their evidence
        self.has_figures = False  # whether a request's own span told its figures
        self.has_steps = False  # whether more came than requests' own spans
        self.summaries = 0
        self._most_steps: float = math.inf if patient else STEPS_BEHIND
        self._most_bytes = HELD_OF_FILE if patient else HELD
        self._pending: dict[int, _Pending] = {}
        self._order: list[int] = []  # the steps of those, and some that were given: a heap
        self._held = 0  # bytes of them, roughly
        # With its bytes; first those of requests that ended, which may end again, on another branch
        self._infos: OrderedDict[str, tuple[RequestInfo, int]] = OrderedDict()
        self._infos_held = 0
        self._text = 0  # bytes of the vocabulary
        self._next = 0
        self._sent: deque[int] = deque(maxlen=SENT)  # the numbers of the records that were given

    @property
    def held(self) -> int:
        words = len(self.vocabulary.pieces) + len(self.vocabulary.special)
        return self._held + self._infos_held + self._text + 100 * words

    @property
    def lost(self) -> int:
        return self.missing.total() - self.missing[OWN] if self.has_steps else 0

    @property
    def in_part(self) -> bool:
        """Whether spans of the run are known to be missing: lost, or left out by somebody who chose."""
        return self.has_steps and self.missing.total() > 0

    def missing_text(self) -> str:
        lost = (plural(self.missing[one], one, many) for one, many in MISSING.items() if self.missing[one])
        return f"a part of its run, without {', '.join(lost)}" if self.in_part else ""

    def learn_vocabulary(self, packed: object) -> None:
        """Complete the run with its draft vocabulary, where this is what it lacks. One that is damaged is a fault."""
        try:
            self.run = self.run and completed(self.run, packed)
        except ValueError as error:
            self.faults.add("the draft vocabulary", f"`{DRAFT_TOKENS}` {error}")

    def _is_late(self, attributes: Attributes) -> bool:
        step = attributes.get("specscope.step")
        return isinstance(step, int) and 0 <= step < self._next

    def feed(self, *spans: ReadSpan | DamagedError) -> list[StepRecord]:
        records: list[StepRecord] = []
        opened = [each for each in map(self._opened, spans) if each is not None]
        told: dict[int, schema.Records | DamagedError] = {}  # by the span's place
        for kind in schema.KINDS.values():
            places = [place for place, (_, its) in enumerate(opened) if its is kind]
            read = partial(read_spans, kind, nameless=self.privacy >= Privacy.NO_TOKENS)  # token ids were left out
            told |= zip(places, read_each(read, [opened[place][0].attributes for place in places]), strict=True)
        for place, (span, _) in enumerate(opened):
            try:
                if isinstance(of_span := told[place], DamagedError):
                    raise of_span
                if not self._is_late(span.attributes):
                    self._take_in(span, of_span)
            except DamagedError as error:
                self.faults.add(span.name, str(error))
            step = span.attributes.get("specscope.step")
            is_whole = isinstance(step, int) and step in self._pending and self._pending[step].complete()
            records += self.overdue(-math.inf) if is_whole or self._crowded else []
        return records

    def _opened(self, span: ReadSpan | DamagedError) -> tuple[ReadSpan, schema.SpanKind] | None:
        """A span and its kind; None where it is not taken in."""
        if isinstance(span, DamagedError):
            self.faults.add("a span", str(span))
            return None
        if (packed := span.attributes.get(DRAFT_TOKENS)) is not None:
            self.learn_vocabulary(packed)
        kind = schema.kind_of(span.name, span.attributes)
        if kind is None or self._is_late(span.attributes):
            return None
        name = schema.ROOT_NAME if kind is schema.REQUEST else span.name
        attributes, cut = schema.whole_objects(span.attributes)
        for each in cut:
            self.faults.add(name, f"`{each}` was cut short")
        return ReadSpan(name, span.start_ns, span.end_ns, attributes), kind

    def _take_in(self, span: ReadSpan, told: schema.Records) -> None:
        check_times(span.start_ns, span.end_ns)
        weight, of_step = _weight(span, told), told[schema.OfStep]
        if (pending := self._pending.get(of_step.step)) is None:
            pending = self._pending[of_step.step] = _Pending()
            heappush(self._order, of_step.step)
        self.has_steps |= schema.OfRoot not in told
        if (decode := told.get(schema.OfDecodeStep)) is not None and StepEvidence not in told:
            self.summaries += 1
            pending.bare.add(decode.request)
            return
        if decode is not None or RequestStep in told:
            part = RequestStep(**vars(told[RequestStep]), **UNDRAFTED) if decode is None else told[StepEvidence].step
            if decode is not None:
                self._learn(decode, told[StepEvidence])
                self.judged += 1
            pending.parts[part.request] = part
            pending.notes, pending.times = of_step.engine or pending.notes, (span.start_ns, span.end_ns)
        elif (queue := told.get(schema.OfQueue)) is not None:
            gone = {"prompt_tokens": no_tokens(queue.length)} if self.privacy >= Privacy.NO_TOKENS else {}
            if 0 < len(told[RequestInfo].prompt_tokens) < queue.length:
                self.faults.add(span.name, "`specscope.request.prompt_tokens` was cut short")
                gone = {"prompt_tokens": np.zeros(0, np.int32)}  # as of a request whose own span alone came
            admitted_ns = span.end_ns if queue.admitted else 0
            info = _whole(told[RequestInfo], arrival_ns=span.start_ns, admitted_ns=admitted_ns, **gone)
            pending.infos[info.id] = info, weight
        elif StepRecord in told:
            pending.engine = told
        else:
            pending.finished[told[schema.OfRoot].request] = (span.start_ns, span.end_ns, told)
        pending.weight += weight
        self._held += weight
        pending.branch = of_step.branch
        pending.times = pending.times if pending.parts else (span.end_ns, span.end_ns)

    @property
    def _crowded(self) -> bool:
        """Whether too much is held back by missing spans."""
        return len(self._pending) > self._most_steps or self._held > self._most_bytes

    def overdue(self, since: float) -> list[StepRecord]:
        """The records at the front that need not wait, and those that do since an earlier time (of time.monotonic)."""
        records: list[StepRecord] = []
        while self._order:
            first = self._order[0]
            if (pending := self._pending.get(first)) is not None:
                follows = first - pending.left_out <= self._next  # nothing is missing before it
                if not (self._crowded or pending.since < since or (follows and pending.complete())):
                    break
                self._take(first, records)
            heappop(self._order)
        return records

    def _take(self, step: int, records: list[StepRecord]) -> None:
        pending = self._pending.pop(step)
        self._held -= pending.weight
        if not (pending.engine or pending.parts or pending.infos or pending.finished):
            return  # they were without evidence
        records.append(self._record(step, pending, max(step - pending.left_out - self._next, 0)))
        self._next = max(self._next, step + 1)
        self._sent.append(step)

    def flush(self) -> list[StepRecord]:
        """Every record, past all gaps: call it when no more spans will come."""
        return self.overdue(math.inf)

    def _record(self, step: int, pending: _Pending, steps: int) -> StepRecord:
        """The step's record. `steps`: that are not here."""
        # Not before: a request of a branch that was left ends as it began there
        for info, weight in pending.infos.values():
            self._infos_held += weight - self._infos.pop(info.id, (None, 0))[1]
            self._infos[info.id] = (info, weight)
            while self._infos_held > INFOS:
                self._infos_held -= self._infos.popitem(last=False)[1][1]
        finished = []
        for name in dict.fromkeys((*pending.names.finished, *pending.finished)):
            try:
                finished += [self._end(name, *pending.finished[name])] if name in pending.finished else []
            except DamagedError as error:
                self.faults.add(schema.ROOT_NAME, str(error))
        try:
            notes = read_engine(pending.notes) if pending.engine is None and pending.notes else None
            fields = pending.own(notes)
        except DamagedError as error:
            self.faults.add("decode_step", str(error))
            notes, fields = None, pending.own(None)
        absent = pending.absent(notes, finished, steps)
        if absent is not None:
            parts = (absent.requests or 0) - len(pending.bare.intersection(absent.names))
            counts = absent.steps, parts, absent.others, absent.engine
            self.missing.update(dict(zip(MISSING, counts, strict=True)))
        if (after := fields.get("after")) is not None and after not in self._sent:
            fields["after"] = max((sent for sent in self._sent if sent <= after), default=-1)
        fields |= {"step": step, "finished": tuple(finished), "absent": absent}
        fields["admitted"] = _known(pending.admitted, pending.names.admitted)
        fields["requests"] = _known(pending.parts, pending.names.requests)
        return StepRecord(**fields)

    def _learn(self, span: schema.OfDecodeStep, evidence: StepEvidence) -> None:
        """Learn the texts of tokens: the tree's, the final one, and the likeliest at the parents."""
        step, likeliest = evidence.step, evidence.likeliest
        pieces, shown = self.vocabulary.pieces, [*step.told("tree", "token").tolist(), step.told("verdict", "token")]
        tops = (step.told("parents", name).tolist() for name in ("top", "draft_top")) if likeliest else ()
        named = {*chain(*tops)}.difference(shown)  # as ParentNotes.named
        if len(named) != len(likeliest):
            raise DamagedError(f"`specscope.parents`: {len(likeliest)} texts for {plural(len(named), 'token')}")
        pairs = zip(shown if span.text else (), span.text, strict=True)
        is_new = not pieces.keys() >= named.union(shown)
        for token, text in (*pairs, *zip(sorted(named), likeliest, strict=True)) if is_new else ():
            if text and token not in pieces and len(pieces) < PIECES and self._text < TEXT:
                pieces[token] = piece = unescaped(text, "specscope.tree.text", unescape)
                self._text += len(piece)
        self.vocabulary.special.update(token for token in span.special if token in pieces)  # so it is bounded with them

    def _end(self, name: str, start_ns: int, end_ns: int, told: schema.Records) -> RequestEnd:
        info, _ = self._infos.get(name, (None, 0))
        if info is not None:
            self._infos.move_to_end(name, last=False)
        end: RequestEnd = told[RequestEnd]
        root, figures = told[schema.OfRoot], told.get(RequestFigures)
        self.has_figures |= figures is not None
        if is_cut := 0 < len(end.output) < root.length:
            self.faults.add(schema.ROOT_NAME, "`specscope.output.tokens` was cut short")
        gone = {"output": no_tokens(root.length)} if is_cut or not len(end.output) else {}  # or of level `requests`
        if info is None:
            info = _info_of_root(start_ns, root, figures, self.privacy)
        elif not info.params.is_known:
            info = replace(info, params=_params_of_root(root, figures, self.privacy))
        known = {"info": info, "finished_ns": end_ns, "reason": root.reasons[0]}
        return _whole(end, **known, sampled=told.get(Sampled), figures=figures, **gone)


def _weight(span: ReadSpan, told: schema.Records) -> int:
    if StepEvidence in told:
        columns = told[StepEvidence].step.__dict__["packed"][0]
        return 2000 + columns.nbytes // len(columns)  # type: ignore[no-any-return]
    sizes = sum(len(value) for value in span.attributes.values() if isinstance(value, str | list))
    lengths = sum(told[kind].length for kind in (schema.OfQueue, schema.OfRoot) if kind in told)  # of ids left out
    return 2000 + 12 * sizes + 4 * lengths  # type: ignore[no-any-return]


def _known(spans: Mapping[str, T], names: Sequence[str]) -> tuple[T, ...]:
    """What came: first those of these names, in their order."""
    return tuple(spans[name] for name in dict.fromkeys((*names, *spans)) if name in spans)


def _phases(names: Sequence[str], times: Sequence[int]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in zip(names, times[::2], times[1::2], strict=True))


def _params_of_root(span: schema.OfRoot, figures: RequestFigures | None, privacy: Privacy) -> SamplingParams:
    values = {name: getattr(span, name) for name in (*PARAMS, "stop")}
    values["left_out"] = tuple(sorted(withheld_at(privacy)))  # it may have had these
    if not span.other_params and figures is None:  # and in a capture of before, any others
        values["left_out"] = UNTOLD
    try:
        others = read_json(span.other_params or "{}", SamplingParams, OTHER_PARAMS)
        return replace(others, **values)
    except UserError as error:
        raise DamagedError(f"`gen_ai.request`: {error}") from None


def _info_of_root(start_ns: int, span: schema.OfRoot, figures: RequestFigures | None, privacy: Privacy) -> RequestInfo:
    """What the root span tells of a request whose `queue` span is missing (it never ran, or the span was lost)."""
    params = _params_of_root(span, figures, privacy)
    labels = read_json(span.labels, dict[str, str], "specscope.request.labels")
    queued = None if figures is None else figures.queue_s
    admitted = 0 if queued is None else start_ns + round(queued * 1e9)
    nothing, chat = np.zeros(0, np.int32), span.operation == CHAT
    return RequestInfo(span.request, start_ns, admitted, "", nothing, params, labels, chat=chat)
