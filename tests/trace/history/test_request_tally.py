"""A request's figures on its span are those of a history that stands where it ends, whatever the run goes back to."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.trace.history import totals
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import RequestTally
from specscope.trace.record.records import FinishReason
from tests.trace.sampled_runs import FakeEngine, sampled_runs
from tests.trace.strategies import RUN

END = [(0, FinishReason.EOS)]


def told(records):
    """(figures, the history's acceptance and reasons) of each end."""
    tally, history = RequestTally(RUN), History(RUN)
    for record in records:
        tally.add(record)
        history.append(record)
        for end in record.finished:
            request = history.requests[end.info.id]
            yield tally.figures(end), request.acceptance, request.totals.undrafted_upto(len(request.steps))


def check(figures, acceptance, undrafted):
    pooled = Acceptance()
    pooled.add(figures)  # whose depths are bounded, where an acceptance's are not
    assert pooled.to_dict() == acceptance.to_dict()
    assert (figures.tau, figures.rate) == (acceptance.tau, acceptance.rate)
    assert figures.undrafted == {reason.value: count for reason, count in undrafted.items() if count}


@given(sampled_runs(most=30), st.just(totals.KEPT) | st.integers(1, 20))
@settings(max_examples=160)
def test_the_figures_are_those_of_the_branch_on_which_it_ends_and_beyond_what_is_kept_none(records, most):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(totals, "KEPT", most)
        for figures, acceptance, undrafted in told(records):
            if most > 20 or (figures is not None and figures.steps):  # more requests than are remembered have none
                check(figures, acceptance, undrafted)


def test_a_run_may_go_on_from_a_step_of_a_branch_that_it_left():
    engine = FakeEngine()
    first = [engine.step([("", {})], [], [(2, 1)]), engine.step([], [], [(3, 3)]), engine.step([], [], [(1, 0)])]
    left = list(engine.path)
    engine.go_back(2)
    second = [engine.step([], [], [(0, 0)]), engine.step([], [], [(2, 2)])]
    engine.path = left[:2]  # to step 1 on branch 0
    engine.after, engine.alive = left[1][0], left[1][1]
    engine.branch, engine.branches = engine.branches, engine.branches + 1
    last = engine.step([], END, [(3, 1)])
    ((figures, acceptance, undrafted),) = told([*first, *second, last])
    assert (figures.drafts, figures.drafted, figures.accepted) == (3, 8, 5)
    check(figures, acceptance, undrafted)


def test_a_name_that_comes_again_is_another_request():
    engine = FakeEngine()
    records = [engine.step([("", {})], END, [(2, 1)])]
    engine.names = 0
    records += [engine.step([("", {})], [], [(3, 3)]), engine.step([], END, [(3, 0)])]
    figures = [each for each, _, _ in told(records)]
    assert [each.drafted for each in figures] == [2, 6]


def test_times_that_cannot_be_are_none():
    engine, tally = FakeEngine(), RequestTally(RUN)
    record = engine.step([("", {})], END, [(2, 1)])
    end = record.finished[0]
    late = dataclasses.replace(end, info=dataclasses.replace(end.info, arrival_ns=2**62, admitted_ns=0))
    tally.add(dataclasses.replace(record, requests=(), finished=(late,)))
    figures = tally.figures(late)
    assert (figures.queue_s, figures.first_s, figures.total_s) == (None, None, None)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(totals, "KEPT", 100)
    tally, engine, chance = RequestTally(RUN), FakeEngine(), random.Random(0)
    for _ in range(400):
        engine.path.clear()
        tally.add(engine.step([("", {})], END if chance.random() < 0.9 else [], [(2, 1)]))
        engine.alive = dict(list(engine.alive.items())[-3:])  # ends that were lost on the way
    assert tally._size <= 100
    assert sum(1 + len(sums) for sums in tally._after.values()) == tally._size
