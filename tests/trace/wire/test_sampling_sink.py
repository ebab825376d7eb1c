"""Trace sampling: who is kept, that nobody is kept in pieces, and that what waits is bounded."""

from __future__ import annotations

import dataclasses
import gc
import math
import pickle
import tracemalloc
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from specscope.errors import UserError
from specscope.trace.history.history import History, weight
from specscope.trace.record.records import FinishReason
from specscope.trace.record.trace_sampling import LeftOut, Reason, TraceSampling, ratio_keeps
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.request_words import read_sampling
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.sampling_sink import SamplingSink
from specscope.trace.wire.spans import Encoder, SpanLevel, own_trace
from tests.trace.sampled_runs import NOT_SAMPLED, SAMPLED, FakeEngine, sampled_runs
from tests.trace.strategies import RUN
from tests.trace.wire.test_spans import decode

PLENTY = 2**40
LONG, SHORT = (3, 3), (3, 0)  # a draft of three tokens, all accepted, or none
ratios = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5, 2**-64, 0.1])


def sampler(ratio=None, keep=None, buffer=PLENTY):
    """(the stage, what it hands on)."""
    out = []
    asked = dataclasses.replace(read_sampling(ratio, keep), buffer=buffer)
    return SamplingSink(out.append, RUN, asked), out


def through(records, ratio=None, keep=None, buffer=PLENTY):
    stage, out = sampler(ratio, keep, buffer)
    for record in records:
        stage(record)
    stage.close()
    return stage, out


def parts_of(records):
    """By request: the steps that tell of it, with what they tell."""
    told = {}
    for record in records:
        for part in record.requests:
            told.setdefault(part.request, []).append((record.step, part))
    return told


def spans_of(records):
    encoder = Encoder(RUN, Vocabulary())
    return [span for record in records for span in encoder.encode(record)]


# The ratio


@given(st.integers(1, 2**128 - 1), ratios, st.sampled_from([None, 0, 1]), st.booleans())
@example(2**64 - 1, 1.0, None, True)
@example(2**64, 2**-64, None, True)
@example(7, 0.0, None, True)
def test_parent_flag_and_ratio_agree_with_the_sdk(trace, ratio, flag, remote):
    context, caller = None, ""
    if flag is not None:
        parent = SpanContext(trace, 9, remote, TraceFlags(flag))
        context, caller = set_span_in_context(NonRecordingSpan(parent)), f"00-{trace:032x}-{9:016x}-{flag:02x}"
    told = ParentBased(TraceIdRatioBased(ratio)).should_sample(context, trace, "text_completion")
    kept = ratio_keeps(trace, caller, ratio)
    assert (kept is not None) == (told.decision is Decision.RECORD_AND_SAMPLE)
    assert kept in ((None, Reason.RATIO) if flag is None else (None, Reason.PARENT))


def test_a_caller_without_ids_is_none():
    assert ratio_keeps(1, f"00-{0:032x}-{9:016x}-00", 1.0) is Reason.RATIO
    assert ratio_keeps(1, f"00-{5:032x}-{0:016x}-01", 0.0) is None


@given(sampled_runs(), ratios)
@settings(max_examples=60, deadline=None)
def test_whole_traces_are_kept_as_the_sdk_would(records, ratio):
    """By the trace ids that the spans really have."""
    stage, out = through(records, ratio)
    every, kept = spans_of(records), spans_of(out)
    samples = TraceIdRatioBased(ratio).should_sample
    callers = {int(SAMPLED[3:35], 16): True, int(NOT_SAMPLED[3:35], 16): False}

    def wanted(trace):
        return callers.get(trace, samples(None, trace, "").decision is Decision.RECORD_AND_SAMPLE)

    def requests(spans):
        return Counter((s.trace, s.id, s.name) for s in spans if s.name in ("queue", "prefill", "decode_step"))

    assert requests(kept) == Counter({key: n for key, n in requests(every).items() if wanted(key[0])})
    assert stage.held == 0
    assert stage.decisions.early == 0
    for record in out:
        for end in record.finished:
            reason = Reason.PARENT if end.info.traceparent else Reason.RATIO
            assert (end.sampled.reason, end.sampled.ratio) == (reason, 0 if end.info.traceparent else ratio)


def test_with_a_ratio_alone_nothing_waits():
    engine, (stage, out) = FakeEngine(), sampler(0.5)
    for _ in range(4):
        stage(engine.step([("", {})] * 3, [], [LONG]))
        assert stage.held == 0
    assert 0 < len({part.request for record in out for part in record.requests}) < 12


# The condition


@given(sampled_runs(), st.sampled_from([None, 0.0, 0.3]), st.sampled_from([PLENTY, 200_000, 60_000, 12_000, 1]))
@settings(max_examples=200, deadline=None)
def test_keep_decides_at_the_end_and_the_buffer_is_bounded(records, ratio, buffer):
    stage, out = sampler(ratio, "tau < 1.5 or error", buffer)
    for record in records:
        stage(record)
        assert 0 <= stage.held <= buffer
        assert stage.held >= sum(step.weight for step in stage._waiting)
    stage.close()
    assert stage.held == 0
    before, after = parts_of(records), parts_of(out)
    for name, parts in after.items():
        assert parts == before[name], "a request in pieces"
    steps = [record.step for record in out]
    assert steps == sorted(steps)
    _check_counts(records, out)
    decided = stage.decisions
    assert sum(decided.kept.values()) + decided.left_out == len({n for r in records for n in _names(r)})
    assert decided.left_out_undecided <= decided.early
    if buffer == PLENTY:
        _check_outcomes(records, out, ratio)


def _names(record):
    told = (*(i.id for i in record.admitted), *(p.request for p in record.requests), *record.preempted)
    return {*told, *(end.info.id for end in record.finished)}


def _check_counts(records, out):
    """What was left out of each step, and of the steps between."""
    whole = {record.step: record for record in records}
    sent = -1
    for record in out:
        told = record.left_out or LeftOut()
        kept = {part.request for part in record.requests}
        gone = [part for part in whole[record.step].requests if part.request not in kept]
        assert told == LeftOut(
            steps=record.step - sent - 1,
            requests=len(gone),
            prefill_tokens=sum(part.prefill_tokens for part in gone),
            drafted=sum(len(part.tree) for part in gone),
            accepted=sum(part.verdict.accepted for part in gone),
            emitted=sum(part.emitted for part in gone),
        )
        assert _names(record)  # one of its requests is kept
        sent = record.step


def _check_outcomes(records, out, ratio):
    """Each end, by the history as it stood then: on its own branch."""
    sampled = {(end.info.id, record.step): end.sampled for record in out for end in record.finished}
    history, decided = History(), set()
    for record in records:
        history.append(record)
        for end in record.finished:
            if end.info.id in decided:
                continue
            decided.add(end.info.id)
            tau = history.requests[end.info.id].acceptance.tau
            holds = (tau is not None and tau < 1.5) or end.reason is FinishReason.ERROR
            told = sampled.get((end.info.id, record.step))
            by_ratio = ratio is not None and ratio_keeps(
                own_trace(RUN.run_id, end.info.id), end.info.traceparent, ratio
            )
            assert (told is not None) == (holds or bool(by_ratio))
            if told is not None:
                assert told.reason is (Reason.OUTCOME if holds else by_ratio)
                assert told.ratio == (1 if holds else ratio if by_ratio is Reason.RATIO else 0)
                assert not told.early


@given(sampled_runs(), st.sampled_from([(0.4, None), (None, "tau < 1.5 or error"), (0.2, "nodes > 4")]))
@settings(max_examples=80, deadline=None)
def test_what_goes_on_is_read_again_as_it_was_and_nothing_counts_as_lost(records, asked):
    _, out = through(records, *asked)
    spans = spans_of(out)
    decoder, back = decode(spans)
    assert back == out
    assert decoder.lost == 0
    for span in spans:
        if span.name == "engine_step" and span.attributes.get("specscope.left_out.requests"):
            assert span.attributes["specscope.left_out.drafted"] >= 0
        if span.name.startswith("text_completion"):
            assert span.attributes["specscope.sampling.reason"] in {"ratio", "parent", "outcome"}


@given(sampled_runs(), st.sampled_from([(0.4, None), (None, "tau < 1.5 or error")]))
@settings(max_examples=80, deadline=None)
def test_a_history_of_what_was_kept_stands_on_the_same_branch(records, asked):
    """Where the step after which a branch begins is left out, the branch follows the last one before it."""
    _, out = through(records, *asked)
    whole, sampled = History(), History()
    for record in records:
        whole.append(record)
    for record in out:
        sampled.append(record)
    kept = {record.step for record in out}
    if out and out[-1].step == records[-1].step:
        assert [r.step for r in sampled.steps] == [r.step for r in whole.steps if r.step in kept]
    for branch in sampled.branches:
        sampled.show(branch)
        whole.show(branch)
        last = sampled.last_step
        assert [r.step for r in sampled.steps] == [r.step for r in whole.steps if r.step in kept and r.step <= last]


def test_an_error_before_anything_was_drafted_is_kept():
    """tau is unknown then, and an unknown number must not make the whole condition false."""
    engine = FakeEngine()
    records = [engine.step([("", {})], [(0, FinishReason.ERROR)], [(0, 0)])]
    stage, out = through(records, None, "tau < 1.5 or error")
    assert stage.decisions.kept == {Reason.OUTCOME: 1}
    assert out[0].finished[0].sampled.reason is Reason.OUTCOME
    assert not through(records, None, "tau < 1.5")[1]


KEPT = [
    ("tau < 1.5", {1}),
    ("tau >= 1.5", {0}),
    ("rate == 1", {0}),
    ("emitted == 8 and nodes == 6 and accepted == 6 and drafts == 2", {0}),
    ("steps == 2 and prompt == 3", {0, 1}),
    ("error", {1}),
    ("cancelled", set()),
    ('reason == "eos"', {0}),
    ('reason in "eos or so"', {0}),
    ('"kind=code" in labels', {1}),
    ('request == "r1"', {1}),
    ("ms > 50 and queue_ms == 1 and ttft_ms < 60", {0, 1}),
    ("preempted", {0}),
    ('rule == "standard" and not forced', {0, 1}),
    ("ttft_ms / 0 > 1", set()),
]


@pytest.mark.parametrize(("condition", "wanted"), KEPT)
def test_the_fields_of_a_request(condition, wanted):
    engine = FakeEngine()
    records = [engine.step([("", {}), ("", {"kind": "code"})], [], [LONG, SHORT], preempted=True)]
    records.append(engine.step([], [(0, FinishReason.EOS), (0, FinishReason.ERROR)], [LONG, SHORT]))
    _, out = through(records, None, condition)
    assert {part.request for record in out for part in record.requests} == {f"r{i}" for i in wanted}


BAD = [
    ((None, 'reason in ("eos", "stop")'), "--keep: tuple cannot be used in a condition, at column 11"),
    (("2", None), "--sample must be between 0 and 1, such as 0.01, not 2.0"),
    (("-1", None), "--sample must be a number, not '-1'"),
    (("nan", None), "--sample must be a number, not 'nan'"),
    (("1_0", None), "--sample must be a number, not '1_0'"),
    ((None, ""), "--keep: give a condition, such as tau < 1.5 or error"),
    ((None, "tua < 1"), "--keep: there is no field tua here, at column 1: »tua < 1 (did you mean tau?)"),
    (
        (None, "depth < 1"),
        "--keep: there is no field depth here, at column 1: »depth < 1 (the fields are: accepted, cancelled, drafts",
    ),
    ((None, "tau <"), "--keep: invalid condition, at column 6: tau <»"),
    ((None, "tau = 1"), "--keep: invalid condition (to compare, write ==), at column 5: tau »= 1"),
    ((None, "open('x')"), "--keep: only abs, min, max, len, round can be called, at column 1"),
    ((None, "tau < 1", "0"), "--keep-buffer must be between 1 and 1,048,576 (MiB), not 0.0"),
    ((None, "tau < 1", "many"), "--keep-buffer must be a number, not 'many'"),
    (("0.1", None, "8"), "--keep-buffer needs --keep: without a condition nothing is held"),
]


@pytest.mark.parametrize(("asked", "why"), BAD)
def test_what_cannot_be_used_is_refused_in_one_line(asked, why):
    with pytest.raises(UserError) as refused:
        read_sampling(*asked)
    assert str(refused.value).startswith(why)
    assert "\n" not in str(refused.value)


# What comes late, and what goes back


@pytest.mark.parametrize("kept", [True, False])
def test_late_parts_follow_the_decision(kept):
    engine, (stage, out) = FakeEngine(), sampler(None, "error")
    reason = FinishReason.ERROR if kept else FinishReason.EOS
    stage(engine.step([("", {})], [(0, reason)], [LONG]))
    ended = [part for record in out for part in record.requests]
    late = dataclasses.replace(engine.step([], [], [LONG]), requests=(dataclasses.replace(_any_part(), request="r0"),))
    stage(late)
    stage.close()
    assert len(ended) == kept
    assert [part.request for record in out for part in record.requests] == ["r0", "r0"] * kept
    assert stage.decisions.kept.total() + stage.decisions.left_out == 1


def _any_part():
    return FakeEngine().step([("", {})], [], [LONG]).requests[0]


def test_another_request_of_the_same_name_is_decided_anew():
    (stage, out) = sampler(None, "error")
    for number, reason in enumerate((FinishReason.EOS, FinishReason.ERROR)):
        engine = FakeEngine(next=number)
        stage(engine.step([("", {})], [(0, reason)], [LONG]))
    assert [record.step for record in out] == [1]
    assert stage.decisions.left_out == 1


def test_the_oldest_is_decided_by_what_is_known_when_the_buffer_is_full():
    engine = FakeEngine()
    first = engine.step([("", {}), ("", {})], [], [LONG, SHORT])
    stage, out = sampler(None, "tau < 1.5 or error", 3 * weight(first))
    stage(first)
    for _ in range(4):
        stage(engine.step([], [], [LONG, SHORT]))
    stage(engine.step([], [(0, FinishReason.ERROR), (0, FinishReason.EOS)], [LONG, SHORT]))
    stage.close()
    assert (stage.decisions.early, stage.decisions.left_out_undecided) == (2, 1)
    assert stage.decisions.kept == {Reason.OVERFLOW: 1}
    assert [part.request for record in out for part in record.requests] == ["r1"] * 6  # from its first step on
    sampled = out[-1].finished[0].sampled
    assert (sampled.reason, sampled.early, sampled.ratio) == (Reason.OVERFLOW, True, 1)
    assert "2 requests decided before the end, 1 of them left out" in stage.decisions.early_text(2**20)


def test_a_branch_asks_the_condition_of_its_own_steps():
    """On the branch that is left the drafts are poor; on the one that ends they are good."""
    engine, (stage, out) = FakeEngine(), sampler(None, "tau < 2.5")  # 2.2 with both, 4 on the branch
    stage(engine.step([("", {})], [], [LONG]))
    for _ in range(3):
        stage(engine.step([], [], [SHORT]))
    engine.go_back(3)
    stage(engine.step([], [(0, FinishReason.EOS)], [LONG]))
    assert out == []
    assert stage.decisions.left_out == 1
    engine.go_back(1)  # it goes on after its end: it was decided, and stays so
    stage(engine.step([], [(0, FinishReason.EOS)], [SHORT]))
    assert out == []
    assert stage.decisions.left_out == 1


def test_a_request_that_is_kept_is_kept_with_all_of_its_branches():
    engine, (stage, out) = FakeEngine(), sampler(None, "tau < 2")
    records = [engine.step([("", {})], [], [SHORT]), engine.step([], [], [SHORT])]
    engine.go_back(1)
    records.append(engine.step([], [(0, FinishReason.EOS)], [SHORT]))
    for record in records:
        stage(record)
    assert [record.step for record in out] == [0, 1, 2]
    assert [record.after for record in out] == [None, None, 0]


# Memory, and what is behind


def test_what_is_held_is_what_it_takes():
    """The bound is about real memory: a held step takes no more than it counts for, and one that is dropped is free."""
    engine = FakeEngine()
    tracemalloc.start()
    try:
        stage, _ = sampler(None, "error")
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        for number in range(300):
            stage(engine.step([("", {})] * 4 if not number else [], [], [LONG, SHORT]))
        engine.path.clear()
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - start
        assert stage.held / 4 < taken < stage.held
        stage(engine.step([], [(0, FinishReason.EOS)] * 4, [LONG]))
        engine.path.clear()
        gc.collect()
        assert stage.held == 0
        assert tracemalloc.get_traced_memory()[0] - start < taken / 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["evidence", "eagle", "sampled", "ngram"])
def test_what_real_evidence_takes_is_less_than_what_it_counts_for(name):
    stage, _ = sampler(None, "error")
    steps = pickle.dumps(
        [dataclasses.replace(r, finished=()) for r in read_capture(f"traces/{name}.jsonl").history.steps]
    )
    gc.collect()
    tracemalloc.start()
    try:
        for record in pickle.loads(steps):
            stage(record)
        gc.collect()
        assert 0.6 * stage.held < tracemalloc.get_traced_memory()[0] < stage.held
    finally:
        tracemalloc.stop()


class Behind:
    """A sink with all that one may have."""

    failed = 3

    def __init__(self):
        self.calls = []

    def __call__(self, record):
        raise OSError("gone")

    def flush(self):
        self.calls.append("flush")

    def close(self):
        self.calls.append("close")


def test_the_sink_behind_is_flushed_and_closed_even_where_it_fails():
    behind = Behind()
    stage = SamplingSink(behind, RUN, read_sampling(None, "error"))
    stage(FakeEngine().step([("", {})], [], [LONG]))
    stage.flush()
    assert behind.calls == ["flush"]
    assert stage.failed == 3
    kept = SamplingSink(behind, RUN, TraceSampling(ratio=1.0))
    with pytest.raises(OSError, match="gone"):
        kept(FakeEngine().step([("", {})], [], [LONG]))
    stage.close()
    assert behind.calls == ["flush", "close"]


def test_intervals_of_an_engine_that_tells_counts_go_on():
    from specscope.trace.history.interval import interval_record
    from specscope.trace.record.aggregate import Aggregate

    told = [interval_record(n, n * 10**9, (n + 1) * 10**9, Aggregate("vLLM /metrics", drafts=n)) for n in range(3)]
    assert through(told, 0.0, "error")[1] == told


def test_levels_below_trees_say_why_too():
    engine = FakeEngine()
    _, out = through([engine.step([("", {})], [(0, FinishReason.EOS)], [LONG])], 1.0, None)
    for level in (SpanLevel.REQUESTS, SpanLevel.STEPS, SpanLevel.TREES):
        root = Encoder(RUN, Vocabulary(), level).encode(out[0])[-1]
        told = {key: value for key, value in root.attributes.items() if "sampling" in key}
        assert told == {
            "specscope.sampling.reason": "ratio",
            "specscope.sampling.early": False,
            "specscope.sampling.ratio": 1.0,
        }
        assert math.isclose(told["specscope.sampling.ratio"], 1)
