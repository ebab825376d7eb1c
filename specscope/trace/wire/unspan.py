"""Spans to records: the reading half of the codec. Exact where every span of a step is there; else what is there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from specscope.errors import UserError
from specscope.trace.history.interval import NOTHING
from specscope.trace.history.wording import Faults, plural
from specscope.trace.record.aggregate import LeftOut, RequestFigures, Sampled
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
from specscope.trace.wire.codec import (
    DamagedError,
    check_times,
    checked_span,
    read,
    read_json,
    unescaped,
)
from specscope.trace.wire.decode_step import Part, read_parts
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.schema import CHAT, NO_TIMES, OTHER_PARAMS, PARAMS, UNTOLD, Resource, newer, read_engine

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
UNDRAFTED: Mapping[str, Any] = {"drafter": "none", "tree": DraftTree.empty(), "verdict": None, "emitted": 0}


def run_info(resource: Attributes) -> RunInfo:
    """What `spans.resource_attributes` wrote. Raises UserError for the resource of another program."""
    if "specscope.run.id" not in resource:
        service = printable(str(resource.get("service.name", "an unnamed service")))[:100]
        raise UserError(f"these spans come from another program ({service})")
    try:
        checked = checked_span(schema.whole_objects(resource)[0], Resource)
        privacy = Privacy.of(no_text=not checked.text, no_tokens=not checked.tokens)
        run = read(checked, RunInfo, {"privacy": privacy})
    except DamagedError as error:
        why = newer(resource) or "their run cannot be read or is of another version"
        raise UserError(f"{why}: {error}") from None
    try:
        draft_tokens(run)
    except ValueError:  # with_vocabulary names it
        run = replace(run, draft_tokens=digest(run.draft_tokens))
    params = {**UNSET_PARAMS, **run.params} if run.params else {}
    return replace(run, params={name: params[name] for name in (*DEFAULTS, *params) if name in params})


def with_vocabulary(run: RunInfo, packed: object, faults: Faults) -> RunInfo:
    """The run with its draft vocabulary, where this is what it lacks. One that is damaged is named in `faults`."""
    try:
        return completed(run, packed)
    except ValueError as error:
        faults.add("the draft vocabulary", f"`{DRAFT_TOKENS}` {error}")
        return run


@dataclass
class _Pending:
    """The spans of one engine step that have arrived."""

    engine: schema.EngineStep | None = None
    parts: dict[str, RequestStep] = field(default_factory=dict)
    admitted: dict[str, RequestInfo] = field(default_factory=dict)
    finished: dict[str, tuple[int, int, schema.Root]] = field(default_factory=dict)  # start, end; decoded at the end
    waited: set[str] = field(default_factory=set)  # requests that were not admitted: their queue span is of this step
    infos: list[tuple[RequestInfo, int]] = field(default_factory=list)  # of both, with its bytes
    notes: str = ""  # what a request's step said of the engine
    times: tuple[int, int] = (0, 0)  # when a request's step began and ended, or when a request came or went
    branch: int = 0
    bare: set[str] = field(default_factory=set)  # requests whose steps came without their evidence
    weight: int = 0  # bytes, roughly

    @property
    def left_out(self) -> int:
        """Steps before it that sampling left out."""
        return 0 if self.engine is None else self.engine.left_out_steps or 0

    def complete(self) -> bool:
        """Whether every span that the engine step names is there."""
        if self.engine is None or len(self.parts) < len(self.engine.requests):
            return False
        return (
            all(name in self.parts for name in self.engine.requests)
            and all(name in self.admitted for name in self.engine.admitted)
            and all(name in self.finished for name in self.engine.finished)
            and all(
                name in self.waited or not span.has_figures or getattr(span, schema.QUEUED) is not None
                for name, (*_, span) in self.finished.items()
            )
        )

    def own(self, of_engine: Mapping[str, Any] | None) -> dict[str, Any]:
        """The fields of the record that the engine step's span has. `of_engine`: as requests' steps tell them."""
        span = self.engine
        if span is not None:
            flight = None if span.flight is None else Flight(*span.flight)
            return {
                "phases": _phases(span.phase_names, span.phase_times),
                "passes": _phases(span.pass_names, span.pass_times),
                "aggregate": span.aggregate if isinstance(span, schema.AggregateStep) else None,
                "flight": flight,
                "left_out": None if span.left_out_steps is None else read(span, LeftOut),
            }
        told = of_engine or {"running": len(self.parts), "phases": (Phase(NO_TIMES, *self.times),)}
        return {**NOTHING, "branch": self.branch, **told}

    def absent(self, batch: int | None, ends: Sequence[RequestEnd], steps: int) -> Absent | None:
        """What of the step is not here. `batch`: as requests' steps tell it; None where they do not.

        `steps`: engine steps between the one before and this one that are not here.
        """
        names: tuple[str, ...] = ()
        if self.engine is not None:
            names = tuple(name for name in self.engine.requests if name not in self.parts)
            others: int | None = len(names)
        else:
            others = None if batch is None else max(batch - len(self.parts), 0)
        unseen = 0  # admissions and ends
        if self.engine is not None:
            unseen = len({*self.engine.admitted}.difference(self.admitted))
            unseen += len({*self.engine.finished}.difference(end.info.id for end in ends))
        absent = Absent(others, names, self.engine is None, steps, unseen)
        return None if absent == Absent() else absent


def _has_evidence(given: ReadSpan, span: Any) -> bool:  # noqa: ANN401
    return isinstance(span, schema.DecodeStep) and not schema.OF_EVIDENCE.isdisjoint(given.attributes)


class Decoder:
    """Takes one run's spans in any order and gives its records in order.

    The vocabulary fills with the tokens that the spans tell the text of. A span that is not as the schema says is left
    out and named in `faults`. A step is given when its spans are there, or when it is no use to wait for them: where
    too many others wait, and at the end. What it then lacks its record says (`absent`), and `lost` counts. `summaries`
    counts decode steps that came without their evidence (level `steps`). What is held is bounded, whatever comes.

    A reader of a file is `patient`: all that comes later may still complete a step, so only memory bounds what waits.
    """

    def __init__(self, privacy: Privacy = Privacy.EVERYTHING, *, patient: bool = False) -> None:
        """`privacy`: as the run was recorded; what then lacks is no damage."""
        self.privacy = privacy
        self.vocabulary = Vocabulary()
        self.faults = Faults()
        self.lost_steps = 0  # engine steps of which nothing came
        self.lost_parts = 0  # requests' parts in others
        self.lost_ends = 0  # admissions and ends of requests
        self.judged = 0  # decode steps with their evidence
        self.has_figures = False  # whether a request's own span told its figures
        self.has_steps = False  # whether more came than requests' own spans
        self.without_engine = 0  # steps whose engine step's own span did not come
        self.summaries = 0
        self.draft_tokens = ""  # the draft vocabulary, where a span told it; who reads it empties it
        self._most_steps: float = math.inf if patient else STEPS_BEHIND
        self._most_bytes = HELD_OF_FILE if patient else HELD
        self._pending: dict[int, _Pending] = {}
        self._order: list[int] = []  # the steps of those, and some that were given: a heap
        self._held = 0  # bytes of them, roughly
        self._infos: dict[str, tuple[RequestInfo, int]] = {}  # with its bytes
        self._ended: dict[str, tuple[RequestInfo, int]] = {}  # of requests that may end again, on another branch
        self._infos_held = 0
        self._text = 0  # bytes of the vocabulary
        self._next = 0
        self._sent: deque[int] = deque(maxlen=SENT)  # the numbers of the records that were given

    @property
    def held(self) -> int:
        """Bytes that are held, roughly."""
        words = len(self.vocabulary.pieces) + len(self.vocabulary.special)
        return self._held + self._infos_held + self._text + 100 * words

    @property
    def lost(self) -> int:
        """Steps, and parts of steps, that did not come."""
        return self.lost_steps + self.lost_parts + self.lost_ends if self.has_steps else 0

    @property
    def in_part(self) -> bool:
        """Whether spans of the run are known to be missing: lost, or left out by somebody who chose."""
        return bool(self.lost or (self.has_steps and self.without_engine))

    def missing_text(self) -> str:
        """What is missing, in words; "" for nothing."""
        counts = (
            (self.lost_steps, "whole engine step"),
            (self.lost_parts, "part of a request in a step", "parts of requests in steps"),
            (self.lost_ends, "request's beginning or end", "beginnings and ends of requests"),
            (self.without_engine, "engine step's own span", "engine steps' own spans"),
        )
        lost = ", ".join(plural(count, *names) for count, *names in counts if count)
        return f"a part of its run, without {lost}" if self.in_part else ""

    def _is_late(self, attributes: Attributes) -> bool:
        """Whether the step of this span was given already."""
        step = attributes.get("specscope.step")
        return isinstance(step, int) and 0 <= step < self._next

    def feed(self, *spans: ReadSpan | DamagedError) -> list[StepRecord]:
        """Take these spans; gives the records that they complete."""
        records: list[StepRecord] = []
        opened = [each for each in map(self._opened, spans) if each is not None]
        evidence = [(span, given.attributes) for given, span in opened if _has_evidence(given, span)]
        nameless = self.privacy >= Privacy.NO_TOKENS  # token ids were left out
        parts = iter(read_parts(evidence, nameless=nameless))
        for given, span in opened:
            part = next(parts) if _has_evidence(given, span) else span
            try:
                if isinstance(part, DamagedError):
                    raise part
                if not self._is_late(given.attributes):
                    self._take_in(given, span, part)
            except DamagedError as error:
                self.faults.add(given.name, str(error))
            step = given.attributes.get("specscope.step")
            records += self._ready(step) if isinstance(step, int) else []
        return records

    def _opened(self, given: ReadSpan | DamagedError) -> tuple[ReadSpan, Any] | None:
        """A span, and of schema.AnySpan or what is wrong, all but the evidence of decode steps; None: not taken in."""
        if isinstance(given, DamagedError):
            self.faults.add("a span", str(given))
            return None
        if isinstance(packed := given.attributes.get(DRAFT_TOKENS), str):
            self.draft_tokens = packed
        kind = schema.kind_of(given.name, given.attributes)
        if kind is None or self._is_late(given.attributes):
            return None
        name = schema.ROOT_NAME if issubclass(kind, schema.Root) else given.name
        try:
            check_times(given.start_ns, given.end_ns)
            attributes, cut = schema.whole_objects(given.attributes)
            for each in cut:
                self.faults.add(name, f"`{each}` was cut short")
            given = ReadSpan(name, given.start_ns, given.end_ns, attributes)
            return given, checked_span(attributes, kind)
        except DamagedError as error:
            return ReadSpan(name, given.start_ns, given.end_ns, given.attributes), error

    def _take_in(self, given: ReadSpan, span: Any, evidence: Part | Any) -> None:  # noqa: ANN401
        """Take a span in. `evidence`: of a decode step; else the span."""
        start_ns, end_ns, pending = given.start_ns, given.end_ns, self._waiting(span.step)
        # bytes in memory, roughly; `length`: of ids that were left out
        sizes = (len(value) for value in given.attributes.values() if isinstance(value, str | list))
        weight = 2000 + 12 * sum(sizes) + 4 * getattr(span, "length", 0)
        self.has_steps |= not isinstance(span, schema.Root)
        if isinstance(span, schema.DecodeStep) and not isinstance(evidence, tuple):
            self.summaries += 1
            pending.bare.add(span.request_id)
            return
        if isinstance(span, schema.Prefill | schema.DecodeStep):
            if isinstance(span, schema.DecodeStep):
                part, likeliest = evidence
                self._learn(span, part, likeliest)
                self.judged += 1
                columns = part.__dict__["packed"][0]
                weight = 2000 + columns.nbytes // len(columns)
            else:
                part = read(span, RequestStep, UNDRAFTED)
            pending.parts[span.request_id] = part
            pending.notes, pending.times = span.engine or pending.notes, (start_ns, end_ns)
        elif isinstance(span, schema.Queue):
            told = {"arrival_ns": start_ns, "admitted_ns": end_ns if span.admitted else 0}
            gone = {"prompt_tokens": no_tokens(span.length)} if self.privacy >= Privacy.NO_TOKENS else {}
            info = read(span, RequestInfo, told | gone)
            pending.infos.append((info, weight))
            if span.admitted:
                pending.admitted[span.request_id] = info
            else:
                pending.waited.add(span.request_id)
        elif isinstance(span, schema.EngineStep):
            pending.engine = span
        else:
            pending.finished[span.request] = (start_ns, end_ns, span)
        pending.weight += weight
        self._held += weight
        pending.branch = span.branch
        pending.times = pending.times if pending.parts else (end_ns, end_ns)

    @property
    def _crowded(self) -> bool:
        """Whether too much is held back by missing spans."""
        return len(self._pending) > self._most_steps or self._held > self._most_bytes

    def _ready(self, step: int) -> list[StepRecord]:
        """The records at the front that need not wait, once a span of that step has come."""
        records: list[StepRecord] = []
        if not self._crowded and (step not in self._pending or not self._pending[step].complete()):
            return records
        while self._order:
            first = self._order[0]
            if (pending := self._pending.get(first)) is not None:
                follows = first - pending.left_out <= self._next  # nothing is missing before it
                if not self._crowded and not (follows and pending.complete()):
                    break
                self._take(first, records)
            heappop(self._order)
        return records

    def _waiting(self, step: int) -> _Pending:
        if step not in self._pending:
            self._pending[step] = _Pending()
            heappush(self._order, step)
        return self._pending[step]

    def _take(self, step: int, records: list[StepRecord]) -> None:
        pending = self._pending.pop(step)
        self._held -= pending.weight
        if not (pending.engine or pending.parts or pending.admitted or pending.finished):
            return  # they were without evidence
        record = self._record(step, pending, max(step - pending.left_out - self._next, 0))
        self._next = max(self._next, step + 1)
        if record is not None:
            self._sent.append(step)
            records.append(record)

    def flush(self) -> list[StepRecord]:
        """Every record, past all gaps: call it when no more spans will come."""
        records: list[StepRecord] = []
        for step in sorted(self._pending):
            self._take(step, records)
        return records

    def _record(self, step: int, pending: _Pending, steps: int) -> StepRecord | None:
        """The step's record; None where all that there is turns out to be damaged. `steps`: that are not here."""
        span = pending.engine
        for info, weight in pending.infos:  # not before: a request of a branch that was left ends as it began there
            for known in (self._infos, self._ended):
                self._infos_held -= known.pop(info.id, (None, 0))[1]
            self._infos[info.id] = (info, weight)
            self._infos_held += weight
            while self._infos_held > INFOS:  # those that never seem to end are forgotten when there is no room
                known = self._ended or self._infos
                self._infos_held -= known.pop(next(iter(known)))[1]
        finished = []
        for name in dict.fromkeys((*(() if span is None else span.finished), *pending.finished)):
            try:
                finished += [self._end(name, *pending.finished[name])] if name in pending.finished else []
            except DamagedError as error:
                self.faults.add(schema.ROOT_NAME, str(error))
        batch, of_engine = None, None  # the batch, and the record's fields, as a request's step tells them
        if span is None and pending.notes:
            try:
                notes = read_engine(pending.notes)
                batch, of_engine = notes.batch, notes.fields(pending.times[0])
            except DamagedError as error:
                self.faults.add("decode_step", str(error))
        absent, fields = pending.absent(batch, finished, steps), pending.own(of_engine)
        fields |= {
            "admitted": _known(pending.admitted, () if span is None else span.admitted),
            "requests": _known(pending.parts, () if span is None else span.requests),
            "finished": tuple(finished),
            "absent": absent,
        }
        if absent is not None:
            self.lost_steps += absent.steps
            self.lost_parts += (absent.requests or 0) - len(pending.bare.intersection(absent.names))
            self.lost_ends += absent.others
            self.without_engine += absent.engine
        record = StepRecord(step=step, **fields) if span is None else read(span, StepRecord, fields)
        if record.after is None or record.after in self._sent:
            return record
        before = max((sent for sent in self._sent if sent <= record.after), default=-1)
        return replace(record, after=before)

    def _learn(self, span: schema.DecodeStep, step: RequestStep, likeliest: Sequence[str]) -> None:
        """Learn the texts of tokens: the tree's, the final one, and the likeliest at the parents."""
        pieces, shown = self.vocabulary.pieces, [*step.told("tree", "token").tolist(), step.told("verdict", "token")]
        tops = (step.told("parents", name).tolist() for name in ("top", "draft_top")) if likeliest else ()
        named = sorted({*chain(*tops)}.difference(shown))  # as ParentNotes.named
        if len(named) != len(likeliest):
            raise DamagedError(f"`specscope.parents`: {len(likeliest)} texts for {plural(len(named), 'token')}")
        pairs = zip(shown if span.text else (), span.text, strict=True)
        for token, text in (*pairs, *zip(named, likeliest, strict=True)):
            if token not in pieces and len(pieces) < PIECES and self._text < TEXT:
                pieces[token] = piece = unescaped(text, "specscope.tree.text", unescape)
                self._text += len(piece)
        self.vocabulary.special.update(token for token in span.special if token in pieces)  # so it is bounded with them

    def _end(self, name: str, start_ns: int, end_ns: int, span: schema.Root) -> RequestEnd:
        if name in self._infos:
            self._ended[name] = self._infos.pop(name)
        info, _ = self._ended.get(name, (None, 0))
        figures = read(span, RequestFigures) if span.has_figures else None
        self.has_figures |= figures is not None
        given = {
            "info": info or _info_of_root(start_ns, span, figures, self.privacy),
            "finished_ns": end_ns,
            "reason": span.reasons[0],
            "sampled": None if span.sampling_reason is None else read(span, Sampled),
            "figures": figures,
        }
        gone = {} if span.output_tokens else {"output": no_tokens(span.length)}  # or of level `requests`
        return read(span, RequestEnd, given | gone)


def _known(spans: Mapping[str, T], names: Sequence[str]) -> tuple[T, ...]:
    """What came: first those of these names, in their order."""
    return tuple(spans[name] for name in dict.fromkeys((*names, *spans)) if name in spans)


def _phases(names: Sequence[str], times: Sequence[int]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in zip(names, times[::2], times[1::2], strict=True))


def _info_of_root(start_ns: int, span: schema.Root, figures: RequestFigures | None, privacy: Privacy) -> RequestInfo:
    """What the root span tells of a request whose `queue` span is missing (it never ran, or the span was lost)."""
    values = {name: getattr(span, name) for name in (*PARAMS, "stop")}
    values["left_out"] = tuple(sorted(withheld_at(privacy)))  # it may have had these
    if not span.other_params and figures is None:  # and in a capture of before, any others
        values["left_out"] = UNTOLD
    try:
        others = read_json(span.other_params or "{}", SamplingParams, OTHER_PARAMS)
        params = replace(others, **values)
    except UserError as error:
        raise DamagedError(f"`gen_ai.request`: {error}") from None
    labels = read_json(span.labels, dict[str, str], "specscope.request.labels")
    queued = None if figures is None else figures.queue_s
    admitted = 0 if queued is None else start_ns + round(queued * 1e9)
    nothing, chat = np.zeros(0, np.int32), span.operation == CHAT
    return RequestInfo(span.request, start_ns, admitted, "", nothing, params, labels, chat=chat)
