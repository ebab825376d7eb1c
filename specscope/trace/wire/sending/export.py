"""A run's spans as exporters take them, in batches that every receiver takes: gRPC's own limit is 4 MiB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import specscope
from specscope.trace.history.wording import plural
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.sampling import Sampler, sampling_text
from specscope.trace.wire.sending.sender import Sender
from specscope.trace.wire.spans import SCOPE, Encoder, Span, SpanLevel, brief, engine_resource, resource_attributes

BATCH, BATCH_BYTES = 128, 4 * 2**20 - 2**16  # of an export: spans, and bytes without its resources
_FLAGS = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(SCOPE, specscope.__version__)


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """A Span as the SDK's ReadableSpan, for any OpenTelemetry exporter. Built by hand: 10 times cheaper."""
    return ReadableSpan(
        name=span.name,
        context=SpanContext(span.trace, span.id, False, _FLAGS),
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


def most_bytes(span: Span) -> int:
    """No fewer than a span takes as protobuf: a number takes 13 bytes at most, a character four."""
    size = 200 + 40 * len(span.links) + 4 * (len(span.name) + len(span.error or "") + sum(map(len, span.attributes)))
    for value in span.attributes.values():
        if isinstance(value, list | tuple):
            size += 24 + 13 * len(value) + (4 * sum(map(len, value)) if value and isinstance(value[0], str) else 0)
        else:
            size += 24 + (4 * len(value) if isinstance(value, str) else 0)
    return size


def _detected(attributes: Mapping[str, Any]) -> Resource:
    """A resource, with what OTEL_EXPERIMENTAL_RESOURCE_DETECTORS asks for, and without the SDK, which made no span."""
    whole = Resource.create(attributes).attributes
    return Resource({name: value for name, value in whole.items() if not name.startswith("telemetry.sdk.")})


class SpanSink:
    """A sink that hands a run's spans to what sends them."""

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
        once = (DRAFT_TOKENS,) if level in (SpanLevel.STEPS, SpanLevel.TREES) else ()
        self._once = {name: resource[name] for name in once if name in resource}
        self._batch: list[ReadableSpan] = []
        self._bytes = 0  # of it, at most

    def __call__(self, record: StepRecord) -> None:
        """Take a record; spans go out in batches, and at the latest when the engine rests: the bus calls `flush`."""
        sampled = record if self.sampler is None else self.sampler(record)
        for span in () if sampled is None else self._encoder.encode(sampled):
            if self._once:
                span, self._once = span._replace(attributes=span.attributes | self._once), {}
            size = most_bytes(span)
            if len(self._batch) >= BATCH or self._bytes + size > BATCH_BYTES:
                self.flush()
            self._batch.append(readable(span, self._engine_resource if span.of_engine else self._resource))
            self._bytes += size
        if sampled is not None and sampled.finished:
            self.flush()

    @property
    def sampled(self) -> str:
        """How many requests were kept, and why; "" where all are."""
        return "" if self.sampler is None else self.sampler.text

    def losses(self) -> list[str]:
        """How many spans were not sent, and why; a line each."""
        return [f"{plural(count, 'span')} not sent: {why}" for why, count in self._sender.lost.most_common()]

    def flush(self) -> None:
        """Send what is waiting."""
        if self._batch:
            self._sender.put(self._batch)
            self._batch, self._bytes = [], 0

    def close(self) -> None:
        """Flush, and end what sends."""
        self.flush()
        self._sender.close()
