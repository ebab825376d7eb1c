"""Records to spans: the writing half of the codec. `unspan.py` is the other.

Ids are hashes of the run and of what the span stands for, so links and parents need no state. A request that ended on
more than one branch has a root span for each end, of which the first has the children.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import unquote

from specscope.trace.checked import decoded
from specscope.trace.history.totals import RequestTally
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, digest
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import strip
from specscope.trace.record.records import (
    FinishReason,
    Phase,
    RequestEnd,
    RequestInfo,
    RequestStep,
    RunInfo,
    StepRecord,
    Verdict,
)
from specscope.trace.record.vocabulary import Vocabulary, escape
from specscope.trace.wire import schema
from specscope.trace.wire.codec import wired, written
from specscope.trace.wire.schema import engine_text
from specscope.trace.words import draw_tree

SCOPE = "specscope"
SERVICE, OF_ENGINE = "specscope", " engine"  # the service's name by default; what is added to it for engine steps
KEPT = 20_000  # requests that have ended and are remembered
RUN_PARAMS = "specscope.run.params"
DEFAULT_PARAMS = SamplingParams().to_dict()
MESSAGE = 4000  # characters of a message
LABEL = "specscope.label."  # and its key: an attribute that can be searched for
LABELS, KEY, VALUE = 16, 100, 200  # labels that are, and their characters; `specscope.request.labels` has all
FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop"}  # the conventions' names of why a message ended
_DEFAULTS = [field for field in wired(RunInfo) if field.default is not MISSING]
# What a reader assumes of a run where a resource does not tell
ASSUMED = {f.attribute: f.default if f.plain is None else f.plain(f.default) for f in _DEFAULTS}


class SpanLevel(StrEnum):
    """How much of a run becomes spans. Captures are always `trees`: nothing less can be replayed."""

    OFF = "off"
    REQUESTS = "requests"  # a root span a request
    STEPS = "steps"  # and a span a step, with counts
    TREES = "trees"  # and the whole evidence


INTERNAL, SERVER = 1, 2  # kinds of spans, as OTLP numbers them


class Span(NamedTuple):
    """A finished span as plain values, before any exporter's own form."""

    name: str
    trace: int  # 128-bit id
    id: int  # 64-bit id
    parent: int  # 64-bit id, 0 for a root
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]  # str, bool, int, float, or lists of one of them
    links: tuple[tuple[int, int], ...] = ()  # (trace, span) ids
    kind: int = INTERNAL
    error: str | None = None  # of a span that failed: what went wrong; else its status is not set
    of_engine: bool = False  # whether it belongs to the engine's service, and not to the requests'


def own_trace(run_id: str, *what: object, size: int = 16) -> int:
    """The id of a trace of ours: of a request, by its id, or of an engine step, by "step" and its number."""
    return int.from_bytes(blake2b(f"{run_id}/{what}".encode(), digest_size=size).digest(), "big")


@dataclass
class Encoder:
    run: RunInfo
    vocabulary: Vocabulary
    level: SpanLevel = SpanLevel.TREES
    _callers: dict[str, tuple[int, int]] = field(default_factory=dict)  # a caller's trace and span, by request
    # Requests that have a root span, with their callers: on another branch they may go on
    _ended: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    _tally: RequestTally = field(init=False)

    def __post_init__(self) -> None:
        self._tally = RequestTally(self.run)
        if self.run.privacy:  # without text there is nothing to write
            self.vocabulary = Vocabulary()

    def encode(self, record: StepRecord) -> list[Span]:
        """The spans that end with this step, children before parents."""
        record, spans = strip(record, self.run.privacy), list[Span]()
        if self.level is SpanLevel.OFF:
            return spans
        self._tally.add(record)
        for info in (*record.admitted, *(end.info for end in record.finished)):
            if info.traceparent:
                _, trace, above, _ = info.traceparent.split("-")
                self._callers[info.id] = (int(trace, 16), int(above, 16))
        if self.level is not SpanLevel.REQUESTS:
            spans += [self._queue(info, record, info.admitted_ns) for info in record.admitted]
            never = [end for end in record.finished if not end.info.admitted_ns]
            spans += [self._queue(end.info, record, end.finished_ns) for end in never]
            of_step = _of_step(record, engine_text(record) if record.is_timed else "")
            for part in record.requests:
                spans += self._request_step(part, record, of_step)
            if record.absent is None or not record.absent.engine:
                spans.append(self._engine_step(record))
        spans += [self._root(end, record) for end in record.finished]
        for end in record.finished:
            self._ended[end.info.id] = self._callers.pop(end.info.id, None) or self._ended.get(end.info.id)
        while len(self._ended) > KEPT:
            del self._ended[next(iter(self._ended))]
        return spans

    def _caller(self, name: str) -> tuple[int, int] | None:
        return self._callers.get(name) or self._ended.get(name)

    def _request_trace(self, name: str) -> int:
        caller = self._caller(name)
        return own_trace(self.run.run_id, name) if caller is None else caller[0]

    def _span(self, *what: object) -> int:
        return own_trace(self.run.run_id, *what, size=8) or 1

    def _step(self, number: int) -> tuple[int, int]:
        return own_trace(self.run.run_id, "step", number), self._span("step", number)

    def _queue(self, info: RequestInfo, record: StepRecord, end_ns: int) -> Span:
        """The span of the wait for admission, or for an end without admission."""
        own = schema.OfQueue(info.admitted_ns > 0, len(info.prompt_tokens))
        attributes = _of_step(record) | self._written(info) | written(own)
        trace, root = self._request_trace(info.id), self._span(info.id)
        span_id = self._span(info.id, "queue", *((record.branch,) if record.branch else ()))
        return Span("queue", trace, span_id, root, info.arrival_ns, end_ns, attributes)

    def _request_step(self, part: RequestStep, record: StepRecord, of_step: Mapping[str, Any]) -> Iterator[Span]:
        """`prefill` where prompt tokens were fed, `decode_step` where a verdict was given; both may be."""
        trace, root = self._request_trace(part.request), self._span(part.request)
        link = (self._step(record.step),)
        common = {**of_step, **self._written(part, only=schema.IN_PREFILL)}
        start, end = record.start_ns, record.end_ns
        if part.prefill_tokens or part.verdict is None:
            with_decode = {"specscope.prefill.reaches_root": part.verdict is not None}
            span_id = self._span(part.request, record.step, "prefill")
            yield Span("prefill", trace, span_id, root, start, end, common | with_decode, link)
        if part.verdict is not None:
            span_id = self._span(part.request, record.step, "decode")
            attributes = common | self._decode_step(part, part.verdict)
            yield Span("decode_step", trace, span_id, root, start, end, attributes, link)

    def _written(self, record: object, **how: Any) -> dict[str, Any]:  # noqa: ANN401
        return written(record, self.run.privacy, **how)

    def _decode_step(self, part: RequestStep, verdict: Verdict) -> dict[str, Any]:
        only = () if self.level is SpanLevel.TREES else schema.SUMMARY
        values = self._written(part.tree, only=only) | self._written(verdict, only=only)
        if not len(part.tree):
            values.pop("specscope.verdict.path", None)
        if part.notes is not None:
            values |= self._written(part.notes, only=only)
        shown = [*part.tree.token.tolist(), verdict.token]
        likeliest = None if only or part.parents is None else self._pieces(part.parents.named(shown))
        values |= self._written(part, notes={} if likeliest is None else {"parents": {"text": likeliest}}, only=only)
        special = tuple(token for token in shown if token in self.vocabulary.special)
        own = schema.OfDecodeStep(
            part.request,
            len(part.tree),
            verdict.accepted,
            None if part.notes is None else len(part.notes.dropped_token),
            () if only else tuple(self._pieces(shown) or ()),
            () if only else special,
        )
        drawing = {} if only else {"specscope.drawing": draw_tree(part, self.vocabulary)}  # which people read in Jaeger
        return values | written(own) | drawing

    def _pieces(self, tokens: Sequence[int]) -> list[str] | None:
        """The bytes of tokens, reversibly; "" for one that has no text, such as a padding row's. None: all are so."""
        pieces = self.vocabulary.pieces
        texts = [escape(pieces[token]) if token in pieces else "" for token in tokens]
        return texts if any(texts) else None

    def _engine_step(self, record: StepRecord) -> Span:
        trace, root = self._step(record.step)
        own = schema.OfEngineStep(
            *_timings(record.phases),
            *_timings(record.passes),
            requests=(*(part.request for part in record.requests), *(record.absent.names if record.absent else ())),
            admitted=tuple(info.id for info in record.admitted),
            finished=tuple(end.info.id for end in record.finished),
            flight=None if record.flight is None else dataclasses.astuple(record.flight),
        )
        told = [record, own, *filter(None, (record.left_out, record.aggregate))]
        if record.aggregate is not None and (averages := record.aggregate.averages):
            told.append(schema.OfAggregate(tuple(averages), tuple(map(float, averages.values()))))
        attributes = {name: value for each in told for name, value in self._written(each).items()}
        kinds = [(part.request, "prefill" if part.verdict is None else "decode") for part in record.requests]
        links = tuple((self._request_trace(name), self._span(name, record.step, kind)) for name, kind in kinds)
        return Span("engine_step", trace, root, 0, record.start_ns, record.end_ns, attributes, links, of_engine=True)

    def _root(self, end: RequestEnd, record: StepRecord) -> Span:
        """By the GenAI conventions, with the request's figures. At level `requests` it is all that is sent: small."""
        info, values = end.info, self._written(end)
        # Of a step that was read in part, its reader knows them: steps of the request may be missing
        figures = end.figures or (self._tally.figures(end) if record.absent is None else None)
        values |= self._written(info, only=("specscope.request.labels",))
        short = [(key, value) for key, value in info.labels.items() if 0 < len(key) <= KEY and len(value) <= VALUE]
        values |= {LABEL + key: value for key, value in short[:LABELS]}  # attributes of their own
        values |= {} if figures is None else self._written(figures)
        values |= {} if end.sampled is None else self._written(end.sampled)
        if self.run.tells_text:
            values |= _messages(end, self.run, self.vocabulary)
        if self.level is SpanLevel.REQUESTS:
            values.pop("specscope.output.tokens", None)
        operation = schema.CHAT if info.chat else schema.TEXT_COMPLETION
        attributes = _of_step(record) | _genai(end, operation, self.run.target) | values
        span_id = self._span(info.id, "root", record.step) if info.id in self._ended else self._span(info.id)
        return Span(
            f"{operation} {self.run.target}",
            self._request_trace(info.id),
            span_id,
            (self._caller(info.id) or (0, 0))[1],
            info.arrival_ns,
            end.finished_ns,
            attributes,
            kind=SERVER if info.served else INTERNAL,
            error=end.error if end.reason is FinishReason.ERROR else None,
        )


def _of_step(record: StepRecord, engine: str = "") -> dict[str, Any]:
    return written(schema.OfStep(record.step, record.branch, engine))


def _timings(phases: Sequence[Phase]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(phase.name for phase in phases), tuple(t for phase in phases for t in (phase.start_ns, phase.end_ns))


def _genai(end: RequestEnd, operation: str, model: str) -> dict[str, Any]:
    info, params = end.info, end.info.params
    told = (*schema.PARAMS, "stop", "left_out")  # what privacy leaves out, the resource says
    others = {n: value for n, value in params.to_dict().items() if n not in told and value != DEFAULT_PARAMS.get(n)}
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "specscope",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        **{f"gen_ai.request.{name}": getattr(params, name) for name in schema.PARAMS},
        "gen_ai.request.stop_sequences": list(params.stop),
        "gen_ai.response.finish_reasons": [end.reason.value],
        "gen_ai.usage.input_tokens": len(info.prompt_tokens),
        "gen_ai.usage.output_tokens": len(end.output),
        "specscope.request.id": info.id,
        **({"error.type": "_OTHER"} if end.reason is FinishReason.ERROR else {}),
        **({schema.OTHER_PARAMS: _json(others)} if others else {}),
    }


def _messages(end: RequestEnd, run: RunInfo, vocabulary: Vocabulary) -> dict[str, str]:
    """The last message of the prompt and the output, as the conventions' JSON; of a long text a part."""
    info = end.info
    asked = (info.title if info.chat and run.is_ours else info.prompt) or vocabulary.text(info.prompt_tokens.tolist())
    answer = end.text(end.output.tolist(), vocabulary)
    asked = asked if len(asked) <= MESSAGE else "…" + asked[-MESSAGE:]
    answer = answer if len(answer) <= MESSAGE else answer[:MESSAGE] + "…"
    reason = {"finish_reason": FINISH.get(end.reason, end.reason.value)}
    return {
        "gen_ai.input.messages": _json([_message("user", asked)]),
        "gen_ai.output.messages": _json([_message("assistant", answer) | reason]),
    }


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text.encode("utf-8", "replace").decode()}]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def resource_attributes(run: RunInfo, service: str = "", *, recorded: bool = False) -> dict[str, Any]:
    """RunInfo as the resource of requests' spans; `unspan.run_info` reads it back.

    `service`: its name; "" leaves it to OTEL_* variables. `recorded`: elsewhere, so that those say nothing of the run.
    """
    run, given = strip(run, run.privacy), {} if recorded else environment()
    name = service or given.get("service.name") or SERVICE
    attributes: dict[str, Any] = {"service.instance.id": run.run_id} | given
    attributes |= {"service.name": name, "service.version": run.versions.get("specscope", "")}
    return attributes | written(run) | written(schema.OfRun(run.tells_text, run.tells_tokens))


def environment() -> dict[str, str]:
    """Resource attributes that the environment gives, as the OpenTelemetry SDK reads them."""
    pairs = (item.partition("=") for item in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    given = {key.strip(): unquote(value.strip()) for key, sign, value in pairs if sign and key.strip()}
    given = {key: value for key, value in given.items() if not key.startswith(schema.OURS)}
    name = os.environ.get("OTEL_SERVICE_NAME", "").strip()
    return given | ({"service.name": name} if name else {})


def engine_resource(resource: Mapping[str, Any]) -> dict[str, Any]:
    """The resource of engine steps: another service, so that a search for the requests' does not list them."""
    return {**resource, "service.name": f"{resource['service.name']}{OF_ENGINE}"}


def brief(resource: Mapping[str, Any]) -> dict[str, Any]:
    """The resource as batches repeat it: a digest for the draft vocabulary, and nothing that a reader assumes."""
    told = {name: value for name, value in resource.items() if value != ASSUMED.get(name, MISSING)}
    params = decoded(resource[RUN_PARAMS])
    told[RUN_PARAMS] = json.dumps({name: value for name, value in params.items() if value or name == "temperature"})
    return told | ({DRAFT_TOKENS: digest(told[DRAFT_TOKENS])} if DRAFT_TOKENS in told else {})
