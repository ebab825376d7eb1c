"""W3C trace context of a request: our spans go into the caller's trace."""

from __future__ import annotations

from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers


def caller_of(headers: Headers) -> tuple[str, dict[str, str]]:
    """(traceparent, labels that keep its tracestate); ("", {}) where the client sent none that is valid."""
    given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    context = get_current_span(TraceContextTextMapPropagator().extract(given)).get_span_context()
    if not context.is_valid:
        return "", {}
    labels = {"tracestate": context.trace_state.to_header()} if context.trace_state else {}
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}", labels
