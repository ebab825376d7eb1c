"""What is kept of other services' spans, and how much."""

from __future__ import annotations

import pytest

from specscope.trace.wire import engine_spans
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.engine_spans import ATTRIBUTES, NAME, TEXT, EngineSpan, OtherSpans, engine_span, is_ours

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "b7ad6b7169203331"
HOSTILE = "\x1b[2J\u202eevil\n"


def span(number: int = 1, trace: int = 1, start: int = 1000, took: int = 10, parent: int = 0, **more) -> EngineSpan:
    """A span of a service; `more`: its attributes."""
    ids = (f"{trace:032x}", f"{number:016x}", f"{parent:016x}" if parent else "")
    return engine_span(ids, f"span {number}", {"service.name": "vllm"}, "scope", (start, start + took), more)


def test_what_is_kept_of_a_span():
    attributes = {"text": "a", "flag": True, "count": 3, "share": 0.5, "list": ["stop", "length"]}
    made = engine_span(
        (TRACE.upper(), SPAN, PARENT), "llm_request", {"service.name": "vllm"}, "vllm.tracing.otel", (5, 9), attributes
    )
    assert (made.trace_id, made.span_id, made.parent_id) == (TRACE, SPAN, PARENT)
    assert (made.name, made.service, made.scope) == ("llm_request", "vllm", "vllm.tracing.otel")
    assert (made.start_ns, made.end_ns, made.left_out) == (5, 9, 0)
    assert made.attributes == attributes | {"list": "stop, length"}


@pytest.mark.parametrize("parent", ["", "0000000000000000"])
def test_a_span_without_a_parent(parent):
    assert engine_span((TRACE, SPAN, parent), "x", {}, "", (1, 2), {}).parent_id == ""


@pytest.mark.parametrize(
    ("ids", "times", "why"),
    [
        (("", SPAN, ""), (1, 2), "trace id"),
        (("0" * 32, SPAN, ""), (1, 2), "trace id"),
        ((TRACE[:-1] + "g", SPAN, ""), (1, 2), "trace id"),
        ((TRACE, "AAAA", ""), (1, 2), "span id"),
        ((TRACE, SPAN, "12"), (1, 2), "parent span id"),
        ((TRACE, SPAN, ""), (0, 2), "no start"),
        ((TRACE, SPAN, ""), (3, 2), "ends before"),
        ((TRACE, SPAN, ""), (-1, 2), "no time"),
        ((TRACE, SPAN, ""), (1, 2**63), "no time"),
    ],
)
def test_a_damaged_span_is_named(ids, times, why):
    with pytest.raises(DamagedError, match=why):
        engine_span(ids, "x", {}, "", times, {})


def test_a_span_is_bounded_and_printable_and_says_what_is_left_out():
    attributes = {f"key {n} {HOSTILE}{'k' * 1000}": "v" * 10_000 for n in range(ATTRIBUTES + 9)}
    made = engine_span((TRACE, SPAN, ""), HOSTILE * 1000, {"service.name": HOSTILE * 1000}, HOSTILE, (1, 2), attributes)
    assert len(made.attributes) == ATTRIBUTES
    assert made.left_out == 9
    assert all(len(key) <= NAME and key.isprintable() for key in made.attributes)
    assert all(len(value) == TEXT for value in made.attributes.values())
    for text in (made.name, made.service, made.scope):
        assert text.isprintable()
        assert len(text) <= NAME
    assert made.weight < 800 + 3 * NAME + ATTRIBUTES * (100 + NAME + TEXT) + 1


def test_kinds_that_are_not_shown_are_counted():
    """None is what the readers make of bytes and maps."""
    made = engine_span((TRACE, SPAN, ""), "", {"service.name": 5}, "", (1, 2), {"a": None, "b": 2**70, "c": 1})
    assert made.attributes == {"c": 1}
    assert made.left_out == 2
    assert (made.name, made.service) == ("unnamed", "unnamed service")


def test_ours_is_known_by_its_resource():
    assert is_ours({"specscope.run.id": "x"})
    assert is_ours({"service.name": "specscope"})  # damaged, and not another service's
    assert not is_ours({"service.name": "vllm"})
    assert not is_ours({})


def test_spans_are_kept_by_trace():
    held = OtherSpans()
    for number, trace in ((1, 1), (2, 2), (3, 1)):
        held.add(span(number, trace))
    assert held.traces == [f"{1:032x}", f"{2:032x}"]
    assert [one.span_id for one in held.of(f"{1:032x}")] == [f"{1:016x}", f"{3:016x}"]
    assert held.of("none") == []
    assert held.services == ["vllm"]
    assert (len(held), held.dropped) == (3, 0)


def test_a_span_that_comes_twice_is_kept_once():
    held = OtherSpans()
    held.add(span(1))
    size = held.held
    held.add(span(1))
    assert (len(held), held.held, held.dropped) == (1, size, 0)


def test_a_trace_is_found_by_the_request_it_tells_of():
    held = OtherSpans()
    held.add(span(1, 7, **{"gen_ai.request.id": "chatcmpl-5f"}))
    assert held.trace_of_request("chatcmpl-5f") == f"{7:032x}"
    assert held.trace_of_request("chatcmpl-5f-91cf6081") == f"{7:032x}"  # vLLM's own name of it
    assert held.trace_of_request("chatcmpl-5f-91cf608") == ""
    assert held.trace_of_request("chatcmpl") == ""


def test_too_many_spans_drop_the_oldest_and_count_them(monkeypatch):
    monkeypatch.setattr(engine_spans, "MOST", 10)
    held = OtherSpans()
    for number in range(1, 26):
        held.add(span(number, trace=1 + number // 4, **{"gen_ai.request.id": f"r{number}"}))
    assert (len(held), held.dropped) == (10, 15)
    kept = [one.span_id for trace in held.traces for one in held.of(trace)]
    assert kept == [f"{number:016x}" for number in range(16, 26)]
    assert held.trace_of_request("r15") == ""
    assert held.trace_of_request("r16") == f"{5:032x}"


def test_too_many_bytes_do_too(monkeypatch):
    monkeypatch.setattr(engine_spans, "BYTES", 50_000)
    held = OtherSpans()
    for number in range(1, 200):
        held.add(span(number, text="x" * 400))
    assert held.held <= 50_000
    assert held.held == sum(one.weight for one in held.of(f"{1:032x}"))
    assert held.dropped == 199 - len(held) > 0
