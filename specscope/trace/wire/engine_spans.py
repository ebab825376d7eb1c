"""Spans of other services, such as vLLM's `llm_request` and SGLang's stages: what is kept of them, and how many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.history.faults import Faults
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.codec import DamagedError, check_times

MOST = 20_000  # spans that are kept; with more the oldest go
BYTES = 32 * 2**20  # and of them, roughly
ATTRIBUTES = 64  # of a span
NAME, TEXT = 200, 500  # characters of a name, and of an attribute's value
OURS = "specscope."  # how the attributes of our own resources begin
REQUEST_ID = "gen_ai.request.id"
_ID = {size: re.compile(rf"(?!0+$)[0-9a-f]{{{size}}}") for size in (16, 32)}
_RANDOM = re.compile(r"-[0-9a-f]{8}$")  # what vLLM adds to a client's request id

Scalar = str | int | float | bool


def is_ours(resource: Mapping[str, Any]) -> bool:
    """Whether spans of this resource are of a specscope run, whole or damaged."""
    by_name = resource.get("service.name") in ("specscope", "specscope engine")
    return by_name or any(key.startswith(OURS) for key in resource)


@dataclass(frozen=True)
class EngineSpan:
    """A span of another service. All text in it is printable and of bounded length."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_id: str  # likewise; "" for none
    name: str
    service: str  # service.name of its resource
    scope: str  # the instrumentation scope, such as vllm.tracing.otel
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    left_out: int = 0  # attributes that are too many, or of a kind that is not shown: bytes and maps

    @property
    def weight(self) -> int:
        """Bytes that it takes in memory, roughly."""
        size = 800 + len(self.name) + len(self.service) + len(self.scope)
        for key, value in self.attributes.items():
            size += 100 + len(key) + (len(value) if isinstance(value, str) else 0)
        return size


def engine_span(
    ids: tuple[str, str, str],
    name: str,
    resource: Mapping[str, Any],
    scope: str,
    times: tuple[int, int],
    attributes: Mapping[str, Any],
) -> EngineSpan:
    """A span from what was read of it; `ids`: of the trace, its own and its parent's, in hex. Raises DamagedError."""
    trace_id, span_id, parent_id = (text.lower() for text in ids)
    for what, text, size in (("trace id", trace_id, 32), ("span id", span_id, 16), ("parent span id", parent_id, 16)):
        if not _ID[size].fullmatch(text) and not (what == "parent span id" and not text.strip("0")):
            raise DamagedError(f"its {what} is not {size} hex digits")
    check_times(*times)
    if not 0 < times[0] <= times[1]:
        raise DamagedError("it has no start, or ends before it")
    service = resource.get("service.name")
    scalars = {
        _short(key, NAME): value
        for key, raw in list(attributes.items())[:ATTRIBUTES]
        if (value := _scalar(raw)) is not None
    }
    return EngineSpan(
        trace_id,
        span_id,
        parent_id.strip("0") and parent_id,
        _short(name, NAME) or "unnamed",
        _short(service, NAME) if isinstance(service, str) and service else "unnamed service",
        _short(scope, NAME),
        *times,
        scalars,
        len(attributes) - len(scalars),
    )


def _short(text: str, limit: int) -> str:
    text = printable(" ".join(text[: 4 * limit].split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _scalar(value: Any) -> Scalar | None:  # noqa: ANN401
    """An attribute's value as it is kept: a list as text. None for what is not shown."""
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else None
    if isinstance(value, list):
        return _short(", ".join(map(str, value[:TEXT])), TEXT)
    return _short(value, TEXT) if isinstance(value, str) else None


class OtherSpans:
    """The spans of other services, by trace. With too many the first spans of the first trace go, and are counted."""

    def __init__(self) -> None:
        self.faults = Faults()  # of spans that could not be read
        self.dropped = 0  # spans that were dropped here or in transit
        self.changes = 0  # additions and losses so far
        self._traces: dict[str, dict[str, EngineSpan]] = {}
        self._by_request: dict[str, str] = {}  # the trace of each gen_ai.request.id
        self._count = self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def held(self) -> int:
        """Bytes of them, roughly."""
        return self._bytes

    def add(self, span: EngineSpan) -> None:
        """Keep one. The same span again, as after an export that was sent twice, takes the place of the first."""
        known = self._traces.setdefault(span.trace_id, {})
        if span.span_id in known:
            self._forget(known[span.span_id])
            known = self._traces.setdefault(span.trace_id, {})
        known[span.span_id] = span
        self._count += 1
        self._bytes += span.weight
        self.changes += 1
        if isinstance(name := span.attributes.get(REQUEST_ID), str):
            self._by_request[name] = span.trace_id
        while self._count > MOST or self._bytes > BYTES:
            self._forget(next(iter(next(iter(self._traces.values())).values())))
            self.dropped += 1

    def _forget(self, span: EngineSpan) -> None:
        known = self._traces[span.trace_id]
        del known[span.span_id]
        if not known:
            del self._traces[span.trace_id]
        self._count -= 1
        self._bytes -= span.weight
        name = span.attributes.get(REQUEST_ID)
        if not isinstance(name, str) or self._by_request.get(name) != span.trace_id:
            return
        if not any(other.attributes.get(REQUEST_ID) == name for other in known.values()):
            del self._by_request[name]

    def lose(self, count: int) -> None:
        """Count spans that were dropped in transit."""
        self.dropped += count
        self.changes += bool(count)

    @property
    def traces(self) -> list[str]:
        """Their traces, in the order in which they came."""
        return list(self._traces)

    @property
    def services(self) -> list[str]:
        """The services that sent the spans."""
        return sorted({span.service for known in self._traces.values() for span in known.values()})

    def of(self, trace_id: str) -> list[EngineSpan]:
        """The spans of a trace."""
        return list(self._traces.get(trace_id, {}).values())

    def trace_of_request(self, name: str) -> str:
        """The trace with a span of that request, by its `gen_ai.request.id`; "" for none.

        vLLM's span has the client's id, and our records the engine's, which is the same with eight digits more.
        """
        return self._by_request.get(name) or self._by_request.get(_RANDOM.sub("", name), "")
