"""Adaptive sizes: the best depth by the measured costs, down to none where drafts do not pay, and back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.speculate.adaptive import PROBE_DEPTH, PROBE_EVERY, Sizer
from specscope.trace.plan import DynamicPlan
from specscope.trace.records import FinalKind
from specscope.trace.tree import DraftTree
from tests.heads import head_tensors, write_head
from tests.trace.samples import verdict

PLAN = DynamicPlan(12, depth=4, top=3)


def judged(depth, accepted):
    """A chain with its first nodes accepted."""
    tree = DraftTree.build(list(range(depth)), list(range(-1, depth - 1)))
    return tree, verdict(tree, [0] * depth, list(range(accepted)), 1, FinalKind.TARGET)


def measured(base, slope, per_pass):
    """A sizer that has seen steps of these costs in seconds."""
    sizer = Sizer(PLAN)
    for rows in (1, 4, 7, 10, 13):
        sizer.timed(rows, base + slope * rows, 1, per_pass)
    return sizer


def steps(sizer, accepted, count):
    """Let request r draft what the sizer says `count` times, `accepted` levels of it accepted; the depths."""
    depths = []
    for _ in range(count):
        size = sizer.choose("r", 1)
        depths.append(size.depth)
        tree, verdict = judged(size.depth, min(accepted, size.depth))
        sizer.learn("r", tree, verdict)
    return depths


def test_the_whole_tree_until_costs_are_known():
    size = Sizer(PLAN).choose("r", 1)
    assert (size.depth, size.nodes) == (4, 12)
    assert "not known" in size.reason


@given(
    base=st.floats(0.001, 0.1),
    slope=st.floats(0, 0.02),
    per_pass=st.floats(0.0001, 0.05),
    outcomes=st.lists(st.integers(0, 4), max_size=30),
    batch=st.integers(1, 8),
)
def test_the_choice_is_the_most_tokens_per_time(base, slope, per_pass, outcomes, batch):
    sizer = measured(base, slope, per_pass)
    reach = [0.6 ** (d + 1) for d in range(4)]
    sizer.choose("r", batch)
    for accepted in outcomes:
        tree, verdict = judged(4, accepted)
        sizer.learn("r", tree, verdict)
        reach = [a + 0.08 * ((accepted > d) - a) for d, a in enumerate(reach)]
    rates = []
    for depth in range(5):
        rows = batch * (1 + (max(round(12 * depth / 4), depth) if depth else 0))
        cost = base + slope * rows + depth * per_pass
        rates.append((1 + sum(reach[:depth])) / cost)
    chosen = sizer.choose("r", batch)
    assert rates[chosen.depth] == pytest.approx(max(rates), rel=0.02)
    assert chosen.nodes == (max(round(12 * chosen.depth / 4), chosen.depth) if chosen.depth else 0)


def test_it_shrinks_to_nothing_probes_and_grows_back():
    sizer = measured(base=0.03, slope=0.001, per_pass=0.003)
    down = steps(sizer, accepted=0, count=60)
    assert down[0] > 0
    assert down[-1] == 0
    assert "no draft pays" in sizer.choose("r", 1).reason
    idle = [len(list(group)) for depth, group in itertools.groupby(steps(sizer, 0, 200)) if depth == 0]
    assert max(idle) == PROBE_EVERY
    up = steps(sizer, accepted=4, count=400)
    assert PROBE_DEPTH in up
    assert up[-1] == 4


def test_requests_are_told_apart_and_forgotten():
    sizer = measured(base=0.03, slope=0.001, per_pass=0.003)
    steps(sizer, accepted=0, count=60)
    assert sizer.choose("other", 1).depth > 0
    sizer.forget("r")
    sizer.forget("other")
    sizer.forget("never seen")
    assert sizer.choose("r", 1).depth > 0


def test_an_engine_with_adaptive_sizes_is_lossless_and_says_why(deep, tmp_path):
    folder = write_head(tmp_path / "h", head_tensors())
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    common = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01}
    plain = Engine(drafter="none", **common).generate(["hello", "what is this"], params)
    engine = Engine(drafter="eagle", draft_model=str(folder), tree="dynamic:8", adaptive=True, **common)
    found = engine.generate(["hello", "what is this"], params)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    # The prompt's last token is never drafted from, whatever the sizer says: nothing is to be explained there.
    first = [next(step for step in result.steps if step.verdict is not None) for result in found]
    later = [
        step for result in found for step in result.steps if step.verdict is not None and step.index > first[0].index
    ]
    assert not any(step.sizing or len(step.tree) for step in first)
    assert all(step.sizing for step in later)
    assert {len(step.tree) for step in later} != {8}
