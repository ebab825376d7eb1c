"""Spans to records: the reading half of the codec. Exact where every span of a step is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET

from specscope.errors import UserError
from specscope.trace.history.faults import Faults
from specscope.trace.history.wording import plural
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, completed
from specscope.trace.record.notes import DraftNotes, ParentNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy, no_tokens
from specscope.trace.record.records import (
    Flight,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.request_figures import RequestFigures
from specscope.trace.record.trace_sampling import LeftOut, Sampled
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.wire import aggregate_span, schema
from specscope.trace.wire.codec import DamagedError, check_times, checked_span, read, read_json, unescaped_bytes
from specscope.trace.wire.genai import CHAT
from specscope.trace.wire.schema import Resource, newer

Attributes = Mapping[str, Any]

STEPS_BEHIND = 64  # a step that is still incomplete when this many later ones are known has lost a span
HELD = 64 * 2**20  # bytes of incomplete steps, roughly: with more, the first counts as lost
INFOS = 64 * 2**20  # bytes of what requests were, roughly: with more, the oldest are forgotten, those that ended first
PIECES = 2**19  # tokens in the vocabulary, at most; more than any model has
TEXT = 32 * 2**20  # bytes of their texts
# Parameters that are not set: a resource may leave them out
UNSET_PARAMS = {name: value for name, value in SamplingParams().to_dict().items() if not value}
UNDRAFTED: Mapping[str, Any] = {"drafter": "none", "tree": DraftTree.empty(), "verdict": None, "emitted": 0}


def run_info(resource: Attributes) -> RunInfo:
    """What `spans.resource_attributes` wrote. Raises UserError for the resource of another program."""
    if "specscope.run.id" not in resource:
        service = printable(str(resource.get("service.name", "an unnamed service")))[:100]
        raise UserError(f"these spans come from another program ({service})")
    try:
        checked = checked_span(resource, Resource)
        privacy = Privacy.of(no_text=not checked.text, no_tokens=not checked.tokens)
        run = read(checked, RunInfo, {}, given={"privacy": privacy})
    except DamagedError as error:
        why = newer(resource) or "their run cannot be read, or is of another version"
        raise UserError(f"{why}: {error}") from None
    return dataclasses.replace(run, params={**UNSET_PARAMS, **run.params}) if run.params else run


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
    weight: int = 0  # bytes, roughly

    def complete(self) -> bool:
        """Whether every span that the engine step names is there."""
        if self.engine is None or len(self.parts) < len(self.engine.requests):
            return False
        return (
            all(name in self.parts for name in self.engine.requests)
            and all(name in self.admitted for name in self.engine.admitted)
            and all(name in self.finished for name in self.engine.finished)
        )


class Decoder:
    """Takes one run's spans in any order and gives its records in order.

    The vocabulary fills with the tokens that the spans tell the text of. A span that is not as the schema says is left
    out and named in `faults`. A step that stays incomplete is skipped and counted in `lost`; `summaries` counts decode
    steps that came without their evidence (level `steps`). What is held is bounded, whatever comes.
    """

    def __init__(self, privacy: Privacy = Privacy.EVERYTHING) -> None:
        """`privacy`: as the run was recorded; what then lacks is no damage."""
        self.privacy = privacy
        self.vocabulary = Vocabulary()
        self.faults = Faults()
        self.lost = 0
        self.summaries = 0
        self.draft_tokens = ""  # the draft vocabulary, where a span told it; who reads it empties it
        self._pending: dict[int, _Pending] = {}
        self._held = 0  # bytes of them, roughly
        self._infos: dict[str, tuple[RequestInfo, int]] = {}  # with its bytes
        self._ended: dict[str, tuple[RequestInfo, int]] = {}  # of requests that may end again, on another branch
        self._infos_held = 0
        self._text = 0  # bytes of the vocabulary
        self._next = 0

    @property
    def held(self) -> int:
        """Bytes that are held, roughly."""
        words = len(self.vocabulary.pieces) + len(self.vocabulary.special)
        return self._held + self._infos_held + self._text + 100 * words

    def feed(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> list[StepRecord]:
        """Take one span; gives the records that it completes."""
        if isinstance(packed := attributes.get(DRAFT_TOKENS), str):
            self.draft_tokens = packed
        kind = schema.kind_of(name)
        if kind is schema.EngineStep and any(key.startswith(aggregate_span.PREFIX) for key in attributes):
            kind = aggregate_span.AggregateStep
        if kind is None or (name == "prefill" and attributes.get("specscope.prefill.reaches_root") is True):
            return []  # not ours, or also covered by another span
        if self.privacy >= Privacy.NO_TOKENS:
            kind = schema.NAMELESS.get(kind, kind)
        step = attributes.get("specscope.step")
        if isinstance(step, int) and 0 <= step < self._next:
            return []  # too late
        try:
            check_times(start_ns, end_ns)
            return self._take_in(checked_span(attributes, kind), start_ns, end_ns)
        except DamagedError as error:
            self.faults.add(schema.ROOT_NAME if issubclass(kind, schema.Root) else name, str(error))
            return []

    def _take_in(self, span: schema.AnySpan, start_ns: int, end_ns: int) -> list[StepRecord]:
        """Take a valid span."""
        if isinstance(span, schema.DecodeStep):
            if span.is_summary:
                self.summaries += 1
                return []
            part, texts = _decode_step(span)
            self._learn(span, part, texts)
        elif isinstance(span, schema.Prefill):
            part = read(span, RequestStep, {}, given=UNDRAFTED)
        elif isinstance(span, schema.Queue):
            info = _info(start_ns, end_ns, span)
            self._remember(info, span.weight())
        pending = self._pending.setdefault(span.step, _Pending())
        pending.weight += span.weight()
        self._held += span.weight()
        if isinstance(span, schema.Prefill | schema.DecodeStep):
            pending.parts[span.request_id] = part
        elif isinstance(span, schema.Queue):
            pending.admitted[span.request_id] = info
        elif isinstance(span, schema.EngineStep):
            pending.engine = span
        else:
            pending.finished[span.request] = (start_ns, end_ns, span)
        return self._ready() if self._crowded or pending.complete() else []

    @property
    def _crowded(self) -> bool:
        """Whether too much is held back by missing spans."""
        return len(self._pending) > STEPS_BEHIND or self._held > HELD

    def _ready(self) -> list[StepRecord]:
        """Complete records from the front; an incomplete one blocks until too many wait behind it."""
        records: list[StepRecord] = []
        while self._pending:
            first = min(self._pending)
            waits = not self._follows(first) or not self._pending[first].complete()
            if waits and not self._crowded:
                break
            self._take(first, records)
        return records

    def _follows(self, step: int) -> bool:
        """Whether nothing is missing before a step: what sampling left out there is not."""
        span = self._pending[step].engine
        return step - (0 if span is None else span.left_out_steps or 0) <= self._next

    def _take(self, step: int, records: list[StepRecord]) -> None:
        pending = self._pending.pop(step)
        self._held -= pending.weight
        left_out = 0 if pending.engine is None else pending.engine.left_out_steps or 0
        self.lost += max(step - left_out - self._next, 0)
        self._next = max(self._next, step + 1)
        record = self._record(step, pending) if pending.complete() else None
        if record is None:
            self.lost += 1
        else:
            records.append(record)

    def flush(self) -> list[StepRecord]:
        """Every complete record, past all gaps: call it when no more spans will come."""
        records: list[StepRecord] = []
        for step in sorted(self._pending):
            self._take(step, records)
        return records

    def _record(self, step: int, pending: _Pending) -> StepRecord | None:
        """The step's record; None where the end of a request turns out to be damaged."""
        span = pending.engine
        assert span is not None
        try:
            finished = tuple(self._end(name, *pending.finished[name]) for name in span.finished)
        except DamagedError as error:
            self.faults.add(schema.ROOT_NAME, str(error))
            return None
        given = {
            "phases": _phases(span.phase_names, span.phase_times),
            "passes": _phases(span.pass_names, span.pass_times),
            "admitted": tuple(pending.admitted[name] for name in span.admitted),
            "requests": tuple(pending.parts[name] for name in span.requests),
            "finished": finished,
            "aggregate": span.told() if isinstance(span, aggregate_span.AggregateStep) else None,
            "flight": None if span.flight is None else Flight(*span.flight),
            "left_out": None if span.left_out_steps is None else read(span, LeftOut, {}),
        }
        return read(span, StepRecord, {}, given=given)

    def _learn(self, span: schema.DecodeStep, part: RequestStep, likeliest: Sequence[str]) -> None:
        """Learn the texts of tokens: the tree's, the final one, and the likeliest at the parents."""
        pieces = self.vocabulary.pieces
        named = [] if part.parents is None or not likeliest else part.parents.named(part.tokens_shown)
        if len(named) != len(likeliest):
            raise DamagedError(f"`specscope.parents`: {len(likeliest)} texts for {plural(len(named), 'token')}")
        pairs = [*zip(part.tokens_shown if span.text else (), span.text, strict=True)]
        for token, text in (*pairs, *zip(named, likeliest, strict=True)):
            if token not in pieces and len(pieces) < PIECES and self._text < TEXT:
                pieces[token] = piece = unescaped_bytes(text, "specscope.tree.text")
                self._text += len(piece)
        self.vocabulary.special.update(token for token in span.special if token in pieces)  # so it is bounded with them

    def _remember(self, info: RequestInfo, weight: int) -> None:
        """Remember a request until its end; those that never seem to end are forgotten when there is no room."""
        for known in (self._infos, self._ended):
            self._infos_held -= known.pop(info.id, (None, 0))[1]
        self._infos[info.id] = (info, weight)
        self._infos_held += weight
        while self._infos_held > INFOS:
            known = self._ended or self._infos
            self._infos_held -= known.pop(next(iter(known)))[1]

    def _end(self, name: str, start_ns: int, end_ns: int, span: schema.Root) -> RequestEnd:
        if name in self._infos:
            self._ended[name] = self._infos.pop(name)
        info, _ = self._ended.get(name, (None, 0))
        figures = read(span, RequestFigures, {}) if span.has_figures else None
        given = {
            "info": info or _info_of_root(start_ns, span, figures),
            "finished_ns": end_ns,
            "reason": span.reasons[0],
            "sampled": None if span.sampling_reason is None else read(span, Sampled, {}),
            "figures": figures,
        }
        nameless = isinstance(span, schema.NamelessRoot) or not span.output_tokens  # or of level `requests`
        gone = {"output": no_tokens(span.length)} if nameless else {}
        return read(span, RequestEnd, {}, given=given | gone)


def _phases(names: Sequence[str], times: Sequence[int]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in zip(names, times[::2], times[1::2], strict=True))


def _decode_step(span: schema.DecodeStep) -> tuple[RequestStep, Sequence[str]]:
    """The step, and the texts of its parents' likeliest tokens. Raises DamagedError."""
    lengths: dict[str, int] = {}
    nameless = span.nameless
    tree = read(span, DraftTree, lengths, nameless=nameless)
    verdict = read(span, Verdict, lengths, nameless=nameless)
    notes = None
    if span.dropped is not UNSET:
        notes = read(span, DraftNotes, lengths | {"d": span.dropped}, nameless=nameless)
    span.check(len(tree))
    lengths["e"] = span.emitted
    parents, texts = _parents(span, lengths)
    given = {"tree": tree, "verdict": verdict, "notes": notes, "parents": parents}
    step = read(span, RequestStep, lengths, nameless=nameless, given=given)
    if step.form is not None:
        schema.check_nodes("specscope.form", step.form.node.tolist(), len(tree))
    return step, texts


def _parents(span: schema.DecodeStep, lengths: Mapping[str, int]) -> tuple[ParentNotes | None, Sequence[str]]:
    name = "specscope.parents"
    if not span.parents:
        return None, ()
    parsed: Any = read_json(span.parents, schema.NamelessParents if span.nameless else schema.Parents, name)
    notes = read(parsed, ParentNotes, dict(lengths), where=name, nameless=span.nameless)
    schema.check_nodes(name, parsed.node, lengths["n"])
    return notes, parsed.text


def _info(start_ns: int, end_ns: int, span: schema.Queue) -> RequestInfo:
    given = {"arrival_ns": start_ns, "admitted_ns": end_ns if span.admitted else 0}
    gone = {"prompt_tokens": no_tokens(span.length)} if isinstance(span, schema.NamelessQueue) else {}
    return read(span, RequestInfo, {}, given=given | gone)


def _info_of_root(start_ns: int, span: schema.Root, figures: RequestFigures | None) -> RequestInfo:
    """What the root span tells of a request whose `queue` span is missing (it never ran, or the span was lost)."""
    names = ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed", "stop")
    try:
        params = SamplingParams(**{name: getattr(span, name) for name in names})
    except UserError as error:
        raise DamagedError(f"`gen_ai.request`: {error}") from None
    labels = read_json(span.labels, dict[str, str], "specscope.request.labels")
    queued = None if figures is None else figures.queue_s
    admitted = 0 if queued is None else start_ns + round(queued * 1e9)
    nothing, chat = np.zeros(0, np.int32), span.operation == CHAT
    return RequestInfo(span.request, start_ns, admitted, "", nothing, params, labels, chat=chat)
