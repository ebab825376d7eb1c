"""What a tuning chooses, what it says of captures that tell less, and the best static tree of a size."""

import dataclasses
import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze.tune.candidates import best_shapes
from specscope.analyze.tune.text import advice
from specscope.analyze.tune.tuning import lengths, over, recorded, tune
from specscope.errors import UserError
from specscope.plans.costs import CostPoint, Costs
from specscope.plans.plan import parse_plan
from tests.analyze.edits import rebuilt, sample


def costs(plain=0.02, row=0.0, one_pass=0.002, base=0.02, drafter="eagle"):
    """A machine where rows cost so much each."""
    step = tuple(CostPoint(rows, s, s * 0.99, s * 1.01) for rows in (2, 8, 32) for s in [base + row * rows])
    passes = tuple(CostPoint(rows, one_pass, one_pass, one_pass) for rows in (1, 8))
    first = (CostPoint(1, one_pass, one_pass, one_pass),)
    steps = (CostPoint(1, plain, plain, plain), *step)
    return Costs({"drafter": drafter, "context": "50"}, steps, first, passes)


def judged(priced, name="eagle", most=16, **named):
    data = recorded([name], [sample(name)])
    return tune(data, {key: parse_plan(tree) for key, tree in named.items()}, most, priced)


def test_the_tree_follows_what_rows_and_passes_cost():
    """The largest where rows are free, a shallow one where passes cost, none where nothing pays."""
    found = judged(costs(row=0, one_pass=0))
    assert found.choice.nodes == 16
    speed = found.choice.length.value / 0.02
    assert found.choice.speed.value == pytest.approx(speed, rel=0.1)  # first steps draft nothing
    deep, shallow = (judged(costs(plain=0.05, row=0.0002, one_pass=seconds)) for seconds in (0.0005, 0.02))
    assert deep.choice.depth > shallow.choice.depth == 1
    nothing = judged(costs(row=0.02))
    assert nothing.choice.family == "plain"
    assert "--drafter none" in advice(nothing)


def test_the_choice_is_the_fastest_and_no_slower_than_the_default():
    found = judged(costs(row=0.001), default="dynamic:4,depth=2,top=4")
    told = [row for row in found.rows if row.untold <= 0.05]
    assert found.choice.speed.value == max(row.speed.value for row in told)
    assert found.choice.speed.value >= found.named("default").speed.value
    assert found.choice.speed.low < found.choice.speed.value < found.choice.speed.high
    assert found.choice.tree in advice(found)
    parse_plan(found.choice.tree)


def test_the_recorded_tree_has_the_length_that_the_run_had():
    found = judged(None)
    assert found.choice is None
    assert found.named("recorded").length.value == pytest.approx(found.recorded_length, rel=1e-6)
    assert found.recorded_length == sample("eagle").acceptance.tau


def test_sampled_drafts_tell_of_no_other_tree():
    with pytest.raises(UserError, match="the drafts were sampled: tune cannot tell"):
        judged(None, "sampled")


def test_another_engines_capture_tells_of_shorter_chains():
    history = rebuilt(sample("planted"), versions={"vllm": "0.32.0"})
    found = tune(recorded(["c"], [history]), {}, 16, None)
    assert {row.tree for row in found.family("static")} <= {"1", "2", "3", "4"}
    assert any("shorter chains" in note for note in found.notes)


def test_of_a_long_run_some_steps_are_judged(monkeypatch):
    whole = judged(None)
    monkeypatch.setattr("specscope.analyze.tune.evidence.MOST_STEPS", whole.steps // 2)
    half = judged(None)
    assert half.judged == whole.steps // 2
    assert any(f"of {whole.steps:,} were judged" in note for note in half.notes)
    assert half.named("recorded").length.value == pytest.approx(whole.recorded_length, rel=0.15)
    monkeypatch.setattr("specscope.analyze.tune.evidence.MOST_CANDIDATES", 1)
    assert judged(None).judged == 20


def test_the_interval_covers_as_often_as_it_says():
    """Requests drawn from a known population: the length's interval holds the true one in about 95 % of draws."""
    data = recorded(["a"], [sample("eagle")]).evidence
    drawn, inside = np.random.default_rng(3), 0
    for _ in range(200):
        rate = drawn.beta(4, 3, size=25)
        request = np.repeat(np.arange(25), 30)
        accepted = (drawn.random(750) < rate[request]).astype(float)
        some = dataclasses.replace(data, request=request, tokens=1 + accepted.astype(int), undrafted=np.zeros(25))
        (found,) = lengths(some, [accepted])
        inside += found.low <= 1 + 4 / 7 <= found.high
    assert 0.9 * 200 <= inside <= 0.99 * 200


def test_two_trees_are_compared_request_by_request():
    """What differs between requests goes: where one tree accepts a tenth more of each, the interval is narrow."""
    data = recorded(["a"], [sample("eagle")]).evidence
    drawn, inside, widths = np.random.default_rng(5), 0, []
    for _ in range(100):
        rate = 0.1 * drawn.integers(1, 9, size=40)
        request = np.repeat(np.arange(40), 30)
        accepted = (drawn.random((2, 1200)) < np.stack([1.1 * rate[request], rate[request]])).astype(float)
        tokens = np.full(1200, 2)
        some = dataclasses.replace(data, request=request, tokens=tokens, undrafted=np.zeros(40))
        found = over(some, *accepted)
        steps = [np.mean(1 / (1 + 0.1 * factor * np.arange(1, 9))) for factor in (1, 1.1)]
        inside += found.low <= steps[0] / steps[1] <= found.high
        widths.append(found.error / math.hypot(*(length.error for length in lengths(some, accepted))))
    assert inside >= 90
    assert np.median(widths) < 0.6


MOST = 6


@cache
def every_tree(nodes, width, depth):
    """All trees of so many nodes, closed under parents and elder siblings, as sets of rank paths."""
    if nodes == 0:
        return [frozenset()]
    found = set()
    for tree in every_tree(nodes - 1, width, depth):
        for above in [(), *tree]:
            rank = sum(path[:-1] == above and len(path) == len(above) + 1 for path in tree)
            if rank < width and len(above) < depth:
                found.add(tree | {(*above, rank)})
    return sorted(found, key=sorted)


def test_there_are_as_many_trees_as_catalan_says():
    assert [len(every_tree(n, MOST, MOST)) for n in range(1, MOST + 1)] == [1, 2, 5, 14, 42, 132]


@given(st.data())
def test_no_tree_is_better(data):
    """Also where a child's figure is above its parent's: noise can make it so."""
    width, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    positions = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
    drawn = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rho = dict(zip(positions, drawn.random(len(positions)), strict=True))
    found = best_shapes(rho, range(1, MOST + 1), depth)
    for nodes, (shape, value) in enumerate(found, 1):
        best = max(sum(rho[path] for path in tree) for tree in every_tree(nodes, width, depth))
        assert value == pytest.approx(best)
        assert len(shape) == nodes
        assert sum(rho[path] for path in shape.paths) == pytest.approx(value)
    assert len(found) == min(MOST, len(positions))
