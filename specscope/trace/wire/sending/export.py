"""Spans over the network: OTLP by gRPC or HTTP, through the official exporters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import specscope
from specscope.errors import UserError
from specscope.trace.history.wording import plural
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.sampling import Sampler, sampling_text
from specscope.trace.wire.sending.endpoint import TIMEOUT, OtlpEndpoint, one_try, place_of
from specscope.trace.wire.sending.sender import Sender
from specscope.trace.wire.spans import SCOPE, Encoder, Span, SpanLevel, brief, engine_resource, resource_attributes

BATCH = 128  # spans an export
WITH_STEPS = (SpanLevel.STEPS, SpanLevel.TREES)
PROTOCOLS = ("grpc", "http/protobuf")
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE, specscope.__version__)


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A Span as the SDK's ReadableSpan, for any OpenTelemetry exporter. Built by hand: 10 times cheaper."""
    context = SpanContext(span.trace, span.id, False, _FLAGS)
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=SpanContext(span.trace, span.parent, False, _FLAGS) if span.parent else None,
        resource=resource,
        attributes=span.attributes,
        links=[Link(SpanContext(trace, span_id, False, _FLAGS)) for trace, span_id in span.links],
        kind=SpanKind(span.kind - 1),  # OTLP's numbers begin with "unspecified"
        status=Status(StatusCode.UNSET if span.error is None else StatusCode.ERROR, span.error or None),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _detected(attributes: Mapping[str, Any]) -> Resource:
    """A resource, with what OTEL_EXPERIMENTAL_RESOURCE_DETECTORS asks for, and without the SDK, which made no span."""
    whole = Resource.create(attributes).attributes
    return Resource({name: value for name, value in whole.items() if not name.startswith("telemetry.sdk.")})


class SpanSink:
    """A sink that hands a run's spans to what sends them. Those that are not sent are counted in `failed`."""

    def __init__(
        self,
        sender: Sender,
        run: RunInfo,
        vocabulary: Vocabulary,
        level: SpanLevel,
        service: str = "",
        ratio: float | None = None,
    ) -> None:
        """`service`: its name, as `resource_attributes` has it. `ratio`: the share of requests whose spans are sent."""
        self.sampler = None if ratio is None else Sampler(run.run_id, ratio)
        run = run if ratio is None else replace(run, sampling=sampling_text(ratio))
        self._sender = sender
        self._encoder = Encoder(run, vocabulary, level)
        resource = resource_attributes(run, service)
        self._resource = _detected(brief(resource))
        self._engine_resource = _detected(engine_resource(brief(resource)))
        # What the resource has a digest of; it goes with the first span
        self._once = {name: resource[name] for name in (DRAFT_TOKENS,) if name in resource and level in WITH_STEPS}
        self._batch: list[ReadableSpan] = []

    def __call__(self, record: StepRecord) -> None:
        """Take a record; spans go out in batches, and at the latest when the engine rests: the bus calls `flush`."""
        sampled = record if self.sampler is None else self.sampler(record)
        if sampled is None:
            return
        spans = self._encoder.encode(sampled)
        if self._once and spans:
            spans[0] = spans[0]._replace(attributes=spans[0].attributes | self._once)
            self._once = {}
        self._batch += [readable(span, self._engine_resource if span.of_engine else self._resource) for span in spans]
        if len(self._batch) >= BATCH or sampled.finished:
            self.flush()

    @property
    def sampled(self) -> str:
        """How many requests were kept, and why; "" where all are."""
        return "" if self.sampler is None else self.sampler.text

    @property
    def failed(self) -> int:
        """Spans that were not sent."""
        return sum(self._sender.lost.values())

    def losses(self) -> list[str]:
        """How many were not sent, and why; a line each."""
        return [f"{plural(count, 'span')} not sent: {why}" for why, count in self._sender.lost.most_common()]

    def flush(self) -> None:
        """Send what is waiting."""
        if self._batch:
            self._sender.put(self._batch)
            self._batch = []

    def close(self) -> None:
        """Flush, and end what sends."""
        self.flush()
        self._sender.close()


def endpoint_from_environment() -> bool:
    """Whether the OTEL_EXPORTER_OTLP_* variables name an endpoint for traces."""
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))


def pick_protocol(endpoint: str | None, protocol: str | None) -> str:
    """The protocol asked for; else the environment's; else http for port 4318 and paths, grpc otherwise."""
    env = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    chosen = protocol or env
    if chosen is None:
        looks_http = endpoint is not None and (":4318" in endpoint or endpoint.rstrip("/").endswith("/v1/traces"))
        return "http/protobuf" if looks_http else "grpc"
    if chosen not in PROTOCOLS:
        raise UserError(f"unknown OTLP protocol {chosen!r}: use {' or '.join(PROTOCOLS)}")
    return chosen


def make_sender(endpoint: str | None, protocol: str | None = None) -> Sender:
    """What sends to an OTLP endpoint. `endpoint` None leaves it to the OTEL_EXPORTER_OTLP_* variables.

    Raises UserError for a protocol that is none, and for a login that cannot be sent.
    """
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    kind = pick_protocol(endpoint, protocol)
    where = place_of(endpoint, kind)
    return Sender(OtlpEndpoint(_exporter(endpoint, kind), where))


def _exporter(endpoint: str | None, protocol: str) -> SpanExporter:
    once = one_try(protocol)
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, timeout=TIMEOUT, **once)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    if endpoint is not None and not endpoint.rstrip("/").endswith("/v1/traces"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return HttpExporter(endpoint=endpoint, timeout=TIMEOUT, **once)
