"""The figures, against numbers worked out by hand; short cuts to them at any position; those on a request's span."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from specscope.trace.history import stats, totals
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.totals import RequestTally, count_undrafted
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.wire.reading import read_capture
from tests.trace.sampled_runs import FakeEngine, sampled_runs
from tests.trace.samples import part, records, verdict
from tests.trace.strategies import RUN
from tests.tui.sample import START_NS, maker


def chain(depth, accepted):
    tree = DraftTree.build(list(range(depth)), range(-1, depth - 1))
    outcome = [1] * accepted + [2] * (accepted < depth) + [0] * max(depth - accepted - 1, 0)
    kind = FinalKind.BONUS if accepted == depth else FinalKind.RECOVERED
    return part(0, tree, verdict(tree, outcome, range(accepted), 9, kind), accepted + 1)


def test_figures_of_three_chains():
    figures = measure([chain(3, 3), chain(3, 1), chain(2, 0)])
    assert (figures.tau, figures.rate) == (pytest.approx(1 + 4 / 3), pytest.approx(4 / 8))
    assert figures.per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert figures.per_position_corrected == pytest.approx([2 / 3, 1 / 3, 1 / 2])
    assert (figures.conditional, figures.counts) == (pytest.approx([2 / 3, 1 / 2, 1]), [3, 2, 1, 1])
    assert figures.kinds == {FinalKind.BONUS: 1, FinalKind.RECOVERED: 2}


def test_trees_count_nodes_and_depth():
    figures = measure(p for record in records() for p in record.requests)
    assert (figures.steps, figures.drafts, figures.drafted, figures.accepted) == (3, 2, 5, 3)
    assert (figures.depth_rate, figures.emitted) == (pytest.approx(3 / 4), 6)


def test_an_accepted_leaf_above_the_deepest_node_is_no_trial_below_it():
    tree = DraftTree.build([1, 2, 3], [ROOT, ROOT, 0])
    figures = measure([part(0, tree, verdict(tree, [2, 1, 0], [1], 9, FinalKind.BONUS), 2)])
    assert (figures.conditional, figures.per_position_corrected) == ([1.0, None], [1.0, 0.0])


def test_a_depth_that_no_draft_proposed_has_no_rate():
    figures = measure([Aggregate("x", drafts=4, drafted=6, accepted=3, accepted_at=(2, 1, 0), proposed_at=(4, 2, 0))])
    assert figures.per_position == [0.5, 0.25, None]
    assert figures.per_position_corrected == [0.5, 0.5, None]
    assert figures.to_dict()["proposed_at"] == [4, 2, 0]


CAPTURE = Path(__file__).parents[3] / "traces" / "ngram.jsonl"


@pytest.fixture
def history() -> History:
    return maker().run()


def test_counts_at_any_position(history):
    positions = list(range(-1, len(history.steps)))
    random.Random(0).shuffle(positions)
    for position in positions:
        parts = [part for record in history.steps[: position + 1] for part in record.requests]
        assert history.acceptance_at(position, None) == stats.measure(parts)
        for name in history.requests:
            own = [part for part in parts if part.request == name]
            assert history.acceptance_at(position, name) == stats.measure(own)
            assert history.requests[name].count_at(position) == len(own)
        each = [stats.measure(part for part in parts if part.request == name) for name in history.requests]
        mean, over = history.mean_tau_at(position)
        assert mean == pytest.approx(stats.mean_tau(each)) if over else mean is None
        assert over == sum(one.tau is not None for one in each)


def test_why_steps_drafted_nothing_at_any_position_also_after_going_back():
    read = read_capture(CAPTURE).history
    history = History(run=read.run)
    for at, step in enumerate(read.steps):
        history.append(replace(step, speculation=False) if 5 <= at < 8 else step)
    while history.steps:
        last = len(history.steps) - 1
        for position in (-1, last // 2, last):
            records = history.steps[: position + 1]
            assert +history.undrafted_at(position, None) == count_undrafted(history.run, records)
            for name in history.requests:
                own = [replace(r, requests=tuple(p for p in r.requests if p.request == name)) for r in records]
                assert +history.undrafted_at(position, name) == count_undrafted(history.run, own)
        history.truncate(max(len(history.steps) - 7, 0))


def test_a_copy_that_another_thread_reads_has_the_figures():
    read = read_capture(CAPTURE).history
    copied = replace(read, steps=list(read.steps), requests=dict(read.requests))
    assert copied.acceptance == measure(part for record in read.steps for part in record.counted)
    assert copied.acceptance.steps > 0


def test_buckets_of_the_plot(history):
    last = len(history.steps) - 1
    values, size = history.lengths_at(last, None, 1000)
    assert size == 1
    assert len(values) == last + 1
    values, size = history.lengths_at(last, None, 10)
    assert size == 8
    assert len(values) == -(-(last + 1) // 8)
    parts = [part for record in history.steps[8:16] for part in record.requests]
    assert values[1] == pytest.approx(stats.measure(parts).tau)
    assert set(history.lengths_at(last, "r2", 10)[0]) == {None}  # never drafted
    assert history.lengths_at(-1, None, 10) == ([], 1)
    assert history.lengths_at(last, "no such", 10) == ([], 1)


def test_speed_is_tokens_over_the_wall_clock_of_the_records(history):
    emitted = sum(part.emitted for record in history.steps[:11] for part in record.requests)
    elapsed = (history.steps[10].end_ns - START_NS) / 1e9
    assert history.speed_at(10) == pytest.approx(emitted / elapsed)
    assert history.elapsed_at(10) == pytest.approx(elapsed)
    assert history.speed_at(-1) is None


def check(figures, acceptance, undrafted):
    pooled = Acceptance()
    pooled.add(figures)  # whose depths are bounded, where an acceptance's are not
    assert pooled.to_dict() == acceptance.to_dict()
    assert (figures.tau, figures.rate) == (acceptance.tau, acceptance.rate)
    assert figures.undrafted == {reason.value: count for reason, count in undrafted.items() if count}


@given(sampled_runs(most=30))
@settings(max_examples=60)
def test_the_figures_are_those_of_all_its_steps_and_where_the_run_went_back_meanwhile_none(records):
    tally, history, began = RequestTally(RUN), History(RUN), {}
    last_branch = 0
    for record in records:
        tally.add(record)
        history.append(record)
        last_branch = record.step if record.after is not None else last_branch
        began |= {part.request: record.step for part in record.requests if not part.index}
        for end in record.finished:
            figures, request = tally.figures(end), history.requests[end.info.id]
            if end.info.admitted_ns and began.get(end.info.id, -1) < last_branch:
                assert figures is None
            else:
                check(figures, request.acceptance, request.totals.undrafted_upto(len(request.steps)))


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(totals, "KEPT", 100)
    tally, engine = RequestTally(RUN), FakeEngine()
    for _ in range(400):  # whose ends are lost on the way
        engine.path.clear()
        tally.add(engine.step([("", {})], [], [(2, 1)]))
        engine.alive = dict(list(engine.alive.items())[-3:])
    assert len(tally._sums) == 100
