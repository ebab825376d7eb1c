"""Rows of a trace: nested, in one scale, whatever the order in which spans came."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from specscope.trace.history import timeline
from specscope.trace.history.history import History
from specscope.trace.history.timeline import of_request, of_trace, other_traces
from specscope.trace.wire.reading import CaptureReader, read_capture
from tests.trace.samples import records
from tests.trace.wire.test_engine_spans import span

DATA = Path(__file__).parents[2] / "data" / "vllm"
TRACE = f"{1:032x}"
MS = 1_000_000


def over(*spans) -> History:
    history = History()
    for one in spans:
        history.others.add(one)
    return history


def shape(shown) -> list[tuple[int, str]]:
    return [(row.depth, row.name) for row in shown.rows]


def alone(path: Path) -> History:
    reader = CaptureReader(path, others_alone=True)
    while reader.read():
        pass
    return reader.history


def test_what_vllm_and_the_plugin_told_of_one_request():
    history = read_capture(DATA / "spans.jsonl").history
    first, second = history.requests.values()
    shown = of_request(history, first)
    rows = {row.name.split(",")[0]: row for row in shown.rows}
    told = rows["llm_request"].span
    assert told.trace_id == first.info.traceparent.split("-")[1] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (told.scope, told.attributes["gen_ai.usage.completion_tokens"]) == ("vllm.tracing.otel", 16)
    assert shown.notes == ()
    assert [name for name in rows if not name.startswith("@")] == [
        "llm_request",
        f"request {first.id}",
        "queue",
        "prefill",
        "decode",
    ]
    assert [row.position for row in shown.rows if row.position is not None] == first.engine_steps
    assert rows["decode"].marks == tuple(history.steps[at].start_ns for at in first.engine_steps)
    assert all(told.start_ns - MS < row.start_ns and row.end_ns < told.end_ns + MS for row in rows.values())
    assert rows["queue"].start_ns == first.info.arrival_ns
    assert rows["queue"].end_ns == first.info.admitted_ns < history.steps[first.engine_steps[0]].end_ns
    # The client sent no traceparent with the second: vLLM's span is of a trace of its own, and it is said
    shown = of_request(history, second)
    assert not second.info.traceparent
    assert shown.others == 1
    assert shown.notes == (timeline.BY_NAME,)
    assert len(other_traces(history)) == 1  # what vLLM told of its start


def test_sglang_alone_is_shown_as_it_tells():
    history = alone(DATA / "sglang_spans.jsonl")
    (trace,) = other_traces(history)
    shown = of_trace(history, trace)
    assert shape(shown)[:6] == [
        (0, "Req 5e0f1a2b"),
        (1, "Tokenizer(host:8d3fe27c | pid:4101)"),
        (2, "tokenize"),
        (2, "api_server_dispatch"),
        (1, "Scheduler [TP 0] [PP 0] (host:8d3fe27c | pid:4177)"),
        (2, "request_process"),
    ]
    assert shape(shown).count((3, "decode_loop")) == shape(shown).count((3, "spec_draft")) == 5
    assert shown.notes == (timeline.NOT_OURS,)
    assert shown.span_ns == 93_100_000


def test_the_order_in_which_spans_come_changes_nothing():
    spans = [span(1), span(2, parent=1, start=1002), span(3, parent=1, start=1001), span(4, parent=3, start=1003)]
    shapes = {tuple(shape(of_trace(over(*order), TRACE))) for order in itertools.permutations(spans)}
    assert shapes == {((0, "span 1"), (1, "span 3"), (2, "span 4"), (1, "span 2"))}


@pytest.mark.parametrize("seed", range(8))
def test_parents_that_are_unknown_or_go_in_a_circle_lose_no_span(seed):
    rng = random.Random(seed)
    spans = [
        span(n, start=rng.randrange(1, 1000), parent=rng.choice([0, rng.randrange(1, 60), n])) for n in range(1, 40)
    ]
    shown = of_trace(over(*spans), TRACE)
    assert sorted(row.name for row in shown.rows) == sorted(one.name for one in spans)
    places = {row.id: at for at, row in enumerate(shown.rows)}
    for row in shown.rows:
        if row.depth:
            assert places[row.parent] < places[row.id]
            assert shown.rows[places[row.parent]].depth == row.depth - 1


def test_a_deep_chain_is_no_recursion():
    shown = of_trace(over(*(span(n, parent=n - 1, start=1000 + n) for n in range(1, 3000))), TRACE)
    assert [row.depth for row in shown.rows] == list(range(2999))


def test_clocks_that_differ_are_said_and_nothing_is_shifted():
    parent, fine, early = (
        span(1, start=10 * MS, took=9 * MS),
        span(2, start=9 * MS, parent=1),
        span(3, start=7 * MS, parent=1),
    )
    shown = of_trace(over(parent, fine, early), TRACE)
    assert [(row.name, row.early_ns) for row in shown.rows] == [("span 1", 0), ("span 3", 3 * MS), ("span 2", 0)]
    assert [row.start_ns for row in shown.rows] == [10 * MS, 7 * MS, 9 * MS]
    assert shown.notes[1] == "1 span begins up to 3.0 ms before the parent: clocks differ. Nothing was shifted."


def test_a_request_without_other_services_says_so_and_how_to_get_them():
    history = History()
    for record in records():
        history.append(record)
    shown = of_request(history, history.requests["r0"])
    assert shown.notes == (timeline.NO_OTHERS,)
    assert "--otlp-traces-endpoint" in timeline.NO_OTHERS
    assert [row.name for row in shown.rows][:3] == ["request r0", "queue", "prefill, 1 step"]
    assert all(row.span is None for row in shown.rows)


def test_what_is_not_known_of_a_request_is_said_and_not_made_up():
    history = History()
    for record in records()[1:2]:
        history.append(record)
    shown = of_request(history, history.requests["r0"])
    assert "queue" not in [row.name for row in shown.rows]
    assert shown.rows[0].name == "request r0 (no end yet)"
    assert "Its arrival was not seen: how long it waited is not known." in shown.notes
    assert "What it did before its step 1 is not known." in shown.notes


def test_a_long_request_has_a_row_for_its_last_steps_and_says_so(monkeypatch):
    monkeypatch.setattr(timeline, "STEPS", 5)
    history = read_capture(DATA / "spans.jsonl").history
    first = next(iter(history.requests.values()))
    shown = of_request(history, first)
    assert [row.position for row in shown.rows if row.position is not None] == first.engine_steps[-5:]
    assert len(next(row for row in shown.rows if row.name.startswith("decode")).marks) == len(first.steps)
    assert "Only the last 5 of 12 decode steps have a row; the lane `decode` has all." in shown.notes


def test_spans_that_were_dropped_or_damaged_are_said():
    history = over(span(1))
    history.others.lose(7)
    history.others.faults.add("a span", "its trace id is not 32 hex digits")
    assert of_trace(history, TRACE).notes[1:] == (
        "7 spans of other services were lost, the oldest first.",
        "1 span of other services could not be read.",
    )
