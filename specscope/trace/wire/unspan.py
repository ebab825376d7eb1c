"""Spans to records: the reading half of the codec. Exact where every span of a step is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from specscope.errors import UserError
from specscope.trace.history.faults import Faults
from specscope.trace.history.wording import plural
from specscope.trace.record.flight import Flight
from specscope.trace.record.notes import PARENT_ARRAYS
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import (
    DraftNotes,
    ParentNotes,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary, printable, unescape
from specscope.trace.wire import aggregate_span, schema, schema_form, schema_method, schema_parents
from specscope.trace.wire.schema import DamagedError
from specscope.trace.wire.schema_run import Resource, newer
from specscope.trace.wire.spans import NOTES_ARRAYS, TREE_ARRAYS, VERDICT_ARRAYS

Attributes = Mapping[str, Any]

STEPS_BEHIND = 64  # a step that is still incomplete when this many later ones are known has lost a span
HELD = 64 * 2**20  # bytes of incomplete steps, roughly: with more, the first counts as lost
INFOS = 64 * 2**20  # bytes of what requests were, roughly: with more, the oldest are forgotten, those that ended first
PIECES = 2**19  # tokens that the vocabulary tells of; more than any model has
TEXT = 32 * 2**20  # bytes of their texts


def run_info(resource: Attributes) -> RunInfo:
    """What `spans.resource_attributes` wrote. Raises UserError for the resource of another program."""
    if "specscope.run.id" not in resource:
        service = printable(str(resource.get("service.name", "an unnamed service")))[:100]
        raise UserError(f"these spans come from another program ({service})")
    try:
        told = schema.read(Resource, resource)
        values = msgspec.structs.asdict(told)
        values["params"] = schema.read_json(told.params, dict[str, schema.ParamValue], "specscope.run.params")
        values["versions"] = schema.read_json(told.versions, dict[str, str], "specscope.run.versions")
        values["speculation"] = schema.read_json(told.speculation, dict[str, Any], "specscope.run.speculation")
    except DamagedError as error:
        why = newer(resource) or "their run cannot be read, or is of another version"
        raise UserError(f"{why}: {error}") from None
        raise UserError(f"their run cannot be read, or is of another version: {error}") from None
    values["privacy"] = Privacy.of(no_text=not values.pop("text"), no_tokens=not values.pop("tokens"))
    return RunInfo(**values | {"eos_tokens": tuple(told.eos_tokens), "aux_layers": tuple(told.aux_layers)})


@dataclass
class _Pending:
    """What has arrived of one engine step."""

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
        """One span; the records that it completes."""
        kind = schema.KINDS.get(name) or (schema.Root if name.startswith(schema.ROOT_NAME) else None)
        if kind is schema.EngineStep and any(key.startswith(aggregate_span.PREFIX) for key in attributes):
            kind = aggregate_span.AggregateStep
        if kind is None or (name == "prefill" and attributes.get("specscope.prefill.reaches_root") is True):
            return []  # not ours, or told by another span as well
        if self.privacy >= Privacy.NO_TOKENS:
            kind = schema.NAMELESS.get(kind, kind)
        step = attributes.get("specscope.step")
        if isinstance(step, int) and 0 <= step < self._next:
            return []  # too late
        try:
            schema.check_times(start_ns, end_ns)
            return self._take_in(schema.read(kind, attributes), start_ns, end_ns)
        except DamagedError as error:
            self.faults.add(schema.ROOT_NAME if issubclass(kind, schema.Root) else name, str(error))
            return []

    def _take_in(self, span: schema.AnySpan, start_ns: int, end_ns: int) -> list[StepRecord]:
        """A span that is as it should be."""
        if isinstance(span, schema.DecodeStep):
            if span.is_summary:
                self.summaries += 1
                return []
            part, texts = _decode_step(span)
            self._learn(span, part, texts)
        elif isinstance(span, schema.Prefill):
            part = _step(span, "none", DraftTree.empty(), None, 0)
        elif isinstance(span, schema.Queue):
            info = _info(start_ns, end_ns, span)
            self._remember(info, span.weight())
        pending = self._pending.setdefault(span.step, _Pending())
        pending.weight += span.weight()
        self._held += span.weight()
        if isinstance(span, schema.Prefill):  # a decode step as well
            pending.parts[span.request] = part
        elif isinstance(span, schema.Queue):
            pending.admitted[span.request] = info
        elif isinstance(span, schema.EngineStep):
            pending.engine = span
        else:
            pending.finished[span.request] = (start_ns, end_ns, span)
        return self._ready() if self._crowded or pending.complete() else []

    @property
    def _crowded(self) -> bool:
        """Whether too much waits for what is missing."""
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
        return step - (0 if span is None else span.left_steps or 0) <= self._next

    def _take(self, step: int, records: list[StepRecord]) -> None:
        pending = self._pending.pop(step)
        self._held -= pending.weight
        left_out = 0 if pending.engine is None else pending.engine.left_steps or 0
        self.lost += max(step - left_out - self._next, 0)
        self._next = max(self._next, step + 1)
        record = self._record(step, pending) if pending.complete() else None
        if record is None:
            self.lost += 1
        else:
            records.append(record)

    def flush(self) -> list[StepRecord]:
        """Whatever is complete, past all gaps: call it when no more spans will come."""
        records: list[StepRecord] = []
        for step in sorted(self._pending):
            self._take(step, records)
        return records

    def _record(self, step: int, pending: _Pending) -> StepRecord | None:
        """None where the end of a request turns out to be damaged."""
        span = pending.engine
        assert span is not None
        try:
            finished = tuple(self._end(name, *pending.finished[name]) for name in span.finished)
        except DamagedError as error:
            self.faults.add(schema.ROOT_NAME, str(error))
            return None
        return StepRecord(
            step=step,
            branch=span.branch,
            after=span.after,
            rewound=span.rewound,
            phases=_phases(span.phase_names, span.phase_times),
            passes=_phases(span.pass_names, span.pass_times),
            device_ns=tuple(span.device_ns),
            running=span.running,
            waiting=span.waiting,
            blocks_used=span.blocks_used,
            blocks_free=span.blocks_free,
            speculation=span.speculation,
            speculation_off=span.speculation_off,
            admitted=tuple(pending.admitted[name] for name in span.admitted),
            requests=tuple(pending.parts[name] for name in span.requests),
            preempted=tuple(span.preempted),
            finished=finished,
            aggregate=span.told(),
            budget=span.budget,
            flight=None if span.flight is None else Flight(*span.flight),
            left_out=span.left_out,
            queried=span.queried,
            blocks_cached=span.blocks_cached,
        )

    def _learn(self, span: schema.DecodeStep, part: RequestStep, likeliest: Sequence[str]) -> None:
        """What tokens stand for: those of the tree, the final one, and the likeliest of the parents."""
        pieces = self.vocabulary.pieces
        named = [] if part.parents is None or not likeliest else part.parents.named(part.tokens_shown)
        if len(named) != len(likeliest):
            raise DamagedError(f"`specscope.parents`: {len(likeliest)} texts for {plural(len(named), 'token')}")
        pairs = [*zip(part.tokens_shown if span.text else (), span.text, strict=True)]
        for token, text in (*pairs, *zip(named, likeliest, strict=True)):
            if token not in pieces and len(pieces) < PIECES and self._text < TEXT:
                pieces[token] = piece = _bytes(text, "specscope.tree.text")
                self._text += len(piece)
        self.vocabulary.special.update(token for token in span.special if token in pieces)  # so it is bounded with them

    def _remember(self, info: RequestInfo, weight: int) -> None:
        """A request, until its end; those that seem to have none are forgotten when there is no room."""
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
        return RequestEnd(
            info=info or _info_of_root(start_ns, span),
            finished_ns=end_ns,
            reason=span.reasons[0],
            stop=_text(span.stop_string, "specscope.finish.stop"),
            output=np.asarray(span.output, np.int32),
            error=span.error,
            sampled=span.sampled,
        )


def _phases(names: Sequence[str], times: Sequence[int]) -> tuple[Phase, ...]:
    return tuple(Phase(*phase) for phase in zip(names, times[::2], times[1::2], strict=True))


def _bytes(text: str, name: str) -> bytes:
    """What was escaped. Raises DamagedError."""
    try:
        return unescape(text)
    except ValueError:
        raise DamagedError(f"`{name}` is not escaped as it should be") from None


def _text(text: str, name: str) -> str:
    try:
        return _bytes(text, name).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise DamagedError(f"`{name}` is not escaped as it should be") from None


def _arrays(span: schema.DecodeStep, types: Mapping[str, type]) -> dict[str, Any]:
    return {name: np.asarray(getattr(span, name), dtype) for name, dtype in types.items()}


def _decode_step(span: schema.DecodeStep) -> tuple[RequestStep, Sequence[str]]:
    """The step, and the texts of its parents' likeliest tokens."""
    assert span.final_token is not UNSET
    assert span.final_p is not UNSET
    assert span.final_coin is not UNSET
    verdict = Verdict(
        **_arrays(span, VERDICT_ARRAYS),
        token=span.final_token,
        kind=span.final_kind,
        final_p=span.final_p,
        final_coin=span.final_coin,
        final_margin=span.final_margin,
        forced=np.asarray(span.forced, np.int32),
        rule=span.rule,
    )
    parents, texts = _parents(span)
    told_form = schema_form.NamelessTold if isinstance(span, schema.NamelessStep) else schema_form.LogprobAttributes
    step = dataclasses.replace(
        _step(span, span.drafter, DraftTree(**_arrays(span, TREE_ARRAYS)), verdict, span.emitted),
        notes=None if span.dropped is UNSET else _notes(span),
        sizing=span.sizing,
        preceded=span.preceded,
        parents=parents,
        method=schema_method.read(span.method, len(span.token)),
        form=schema_form.read_form(span.form, len(span.token)),
        logprobs=schema_form.read_logprobs(span.logprobs, span.emitted, told_form),
    )
    return step, texts


def _notes(span: schema.DecodeStep) -> DraftNotes:
    arrays = _arrays(span, NOTES_ARRAYS)
    rows = len(span.fed_token)
    arrays["fed_norms"] = arrays["fed_norms"].reshape((rows, -1) if rows else (0, 0))
    return DraftNotes(**arrays, cached=span.cached)


def _parents(span: schema.DecodeStep) -> tuple[ParentNotes | None, Sequence[str]]:
    if not span.parents:
        return None, ()
    form = schema_parents.NamelessParents if isinstance(span, schema.NamelessStep) else schema_parents.Parents
    told = schema.read_json(span.parents, form, "specscope.parents")
    told.check(len(span.token))
    arrays: dict[str, Any] = {name: np.asarray(getattr(told, name), kind) for name, kind in PARENT_ARRAYS.items()}
    for name in ("top", "top_p", "draft_top", "draft_top_p"):
        arrays[name] = arrays[name].reshape(len(told.node), -1) if told.node else np.zeros((0, 0), arrays[name].dtype)
    notes = ParentNotes(
        **arrays,
        final_entropy=float(told.final_entropy),
        final_varentropy=float(told.final_varentropy),
        final_target_p=float(told.final_target_p),
    )
    return notes, told.text


def _step(
    span: schema.Prefill,
    drafter: str,
    tree: DraftTree,
    verdict: Verdict | None,
    emitted: int,
) -> RequestStep:
    return RequestStep(
        request=span.request,
        index=span.index,
        context_len=span.context_len,
        prefill_tokens=span.prefill_tokens,
        drafter=drafter,
        tree=tree,
        verdict=verdict,
        emitted=emitted,
        blocks=np.asarray(span.blocks, np.int32),
        moved=np.asarray(span.moved, np.int32),
        found=span.found,
    )


def _labels(text: str) -> dict[str, str]:
    return schema.read_json(text, dict[str, str], "specscope.request.labels")


def _info(start_ns: int, end_ns: int, span: schema.Queue) -> RequestInfo:
    return RequestInfo(
        id=span.request,
        arrival_ns=start_ns,
        admitted_ns=end_ns if span.admitted else 0,
        prompt=_text(span.prompt, "specscope.request.prompt"),
        prompt_tokens=np.asarray(span.prompt_tokens, np.int32),
        params=schema.read_json(span.params, SamplingParams, "specscope.request.params"),
        labels=_labels(span.labels),
        title=_text(span.title, "specscope.request.title"),
        traceparent=span.traceparent,
    )


def _info_of_root(start_ns: int, span: schema.Root) -> RequestInfo:
    """What the root span tells of a request whose `queue` span is missing (it never ran, or the span was lost)."""
    names = ("temperature", "top_k", "top_p", "frequency_penalty", "presence_penalty", "max_tokens", "seed", "stop")
    try:
        params = SamplingParams(**{name: getattr(span, name) for name in names})
    except UserError as error:
        raise DamagedError(f"`gen_ai.request`: {error}") from None
    return RequestInfo(span.request, start_ns, 0, "", np.zeros(0, np.int32), params, _labels(span.labels))
