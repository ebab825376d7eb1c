"""Trace sampling: who is kept, that nobody is kept in pieces, and that what was left out of each step is said."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.history.interval import interval_record
from specscope.trace.record.aggregate import Aggregate, LeftOut, Reason, Sampled
from specscope.trace.record.records import FinishReason
from specscope.trace.wire.sampling import Sampler, ratio_keeps, read_ratio
from specscope.trace.wire.spans import SpanLevel
from tests.trace.sampled_runs import NOT_SAMPLED, SAMPLED, FakeEngine, sampled_runs
from tests.trace.samples import decode, encoded
from tests.trace.strategies import RUN

LONG = (3, 3)  # a draft of three tokens, all accepted
ratios = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 0.5, 2**-64, 0.1])


def through(records, ratio):
    """(the sampler, what it gives)."""
    sampler = Sampler(RUN.run_id, ratio)
    return sampler, [sampled for record in records if (sampled := sampler(record)) is not None]


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
    for caller in (f"00-{0:032x}-{9:016x}-01", f"00-{5:032x}-{0:016x}-01"):  # which is none
        assert ratio_keeps(trace, caller, 1.0) is Reason.RATIO


def requests(spans):
    return Counter((s.trace, s.id, s.name) for s in spans if s.name in ("queue", "prefill", "decode_step"))


@given(sampled_runs(), ratios)
@settings(max_examples=30, deadline=None)
def test_whole_traces_are_kept_as_the_sdk_would_and_a_step_says_what_was_left_out_of_it(records, ratio):
    """By the trace ids that the spans really have. It is read again as it was, and nothing counts as lost."""
    sampler, out = through(records, ratio)
    every, kept = encoded(records), encoded(out)
    callers = {int(SAMPLED[3:35], 16): True, int(NOT_SAMPLED[3:35], 16): False}

    def wanted(trace):
        told = TraceIdRatioBased(ratio).should_sample(None, trace, "").decision
        return callers.get(trace, told is Decision.RECORD_AND_SAMPLE)

    assert requests(kept) == Counter({key: n for key, n in requests(every).items() if wanted(key[0])})
    assert sampler.kept.total() + sampler.left_out == len({name for record in records for name in _names(record)})
    whole, sent = {record.step: record for record in records}, -1
    for record in out:
        for end in record.finished:
            reason = Reason.PARENT if end.info.traceparent else Reason.RATIO
            assert end.sampled == Sampled(reason, 0 if end.info.traceparent else ratio, False)
        own = {part.request for part in record.requests}
        gone = [part for part in whole[record.step].requests if part.request not in own]
        assert (record.left_out or LeftOut()) == LeftOut(
            steps=record.step - sent - 1,
            requests=len(gone),
            prefill_tokens=sum(part.prefill_tokens for part in gone),
            drafted=sum(len(part.tree) for part in gone),
            accepted=sum(part.verdict.accepted for part in gone),
            emitted=sum(part.emitted for part in gone),
        )
        assert _names(record)  # one of its requests is kept
        assert record.step > sent
        sent = record.step
    decoder, back = decode(kept)
    assert (back, decoder.lost) == (out, 0)


def _names(record):
    told = (*(i.id for i in record.admitted), *(p.request for p in record.requests), *record.preempted)
    return {*told, *(end.info.id for end in record.finished)}


@given(sampled_runs())
@settings(max_examples=30, deadline=None)
def test_a_history_of_what_was_kept_stands_on_the_same_branch(records):
    """Where the step after which a branch begins is left out, the branch follows the last one before it."""
    _, out = through(records, 0.4)
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


@pytest.mark.parametrize("asked", ["2", "-1", "nan", "1_0"])
def test_what_cannot_be_used_is_refused_in_one_line(asked):
    with pytest.raises(UserError, match=rf"^--sample must be (a number|between 0 and 1, such as 0.01), not '?{asked}"):
        read_ratio(asked, "--sample")


def test_another_request_of_the_same_name_is_decided_anew():
    records = [
        FakeEngine(next=number).step([(caller, {})], [(0, FinishReason.EOS)], [LONG])
        for number, caller in enumerate((NOT_SAMPLED, SAMPLED))
    ]
    _, out = through(records, 0.5)
    assert [record.step for record in out] == [1]


def test_what_ended_long_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr("specscope.trace.wire.sampling.REMEMBERED", 3)
    engine, sampler = FakeEngine(), Sampler(RUN.run_id, 0.5)
    for _ in range(9):
        sampler(engine.step([("", {})], [(0, FinishReason.EOS)], [LONG]))
    assert list(sampler._decided) == ["r6", "r7", "r8"]
    assert sampler.kept.total() + sampler.left_out == 9


def test_intervals_of_an_engine_that_tells_counts_go_on():
    told = [interval_record(n, n * 10**9, (n + 1) * 10**9, Aggregate("vLLM /metrics", drafts=n)) for n in range(3)]
    assert through(told, 0.0)[1] == told


def test_levels_below_trees_say_why_too():
    _, out = through([FakeEngine().step([("", {})], [(0, FinishReason.EOS)], [LONG])], 1.0)
    for level in (SpanLevel.REQUESTS, SpanLevel.STEPS, SpanLevel.TREES):
        root = encoded(out[:1], level=level)[-1]
        told = {key.rpartition(".")[2]: value for key, value in root.attributes.items() if "sampling" in key}
        assert told == {"reason": "ratio", "early": False, "ratio": 1.0}
