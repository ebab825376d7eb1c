"""Adaptive trees: prices from the file of costs, worth from what was accepted, and the most tokens per time."""

import copy
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.speculate.sizing.acceptance import Kind
from specscope.speculate.sizing.budget import Budget, share_out
from specscope.speculate.sizing.sizer import (
    MOST_PAUSE,
    PROBE_SHARE,
    BudgetOutcome,
    Sizer,
)
from specscope.trace.costs import CostPoint, Costs, at
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.tree import ROOT, DraftTree
from tests.engines import COSTS
from tests.heads import head_tensors, write_head

PLAN = DynamicPlan(12, depth=4, top=3)


def costs(base=0.03, slope=0.001, first=0.003, later=0.002):
    """Straight lines: a step of R rows takes base + slope * R."""
    step = tuple(CostPoint(rows, base + slope * rows, 0, 0) for rows in (1, 65))
    return Costs({}, (step,), (CostPoint(1, first, 0, 0),), (CostPoint(1, later, 0, 0),))


def with_jump(costs, batch, seconds):
    """The same, but that in a batch of so many the first tree takes so much longer."""
    alone = costs.steps[0]
    curve = [CostPoint(rows, at(alone, rows) + seconds * (rows > batch), 0, 0) for rows in (batch, batch + 1, 65)]
    return replace(costs, steps=(alone, tuple(curve)))


@given(st.lists(st.tuples(st.floats(-6, 0), st.booleans()), max_size=60))
def test_acceptance_never_falls_as_the_drafter_is_surer(nodes):
    kind = Kind()
    for score, accepted in nodes:
        kind.add(np.array([score]), np.array([0] if accepted else [], dtype=np.int64))
    rates = kind.curve().at(np.linspace(-9, 0, 200).tolist())
    assert (np.diff(rates) >= 0).all()
    assert (rates >= 0).all()
    assert (rates <= 1).all()


def test_one_tree_in_a_batch_pays_for_the_jump_alone():
    """Two requests whose nodes would pay for the first tree's jump together, and one that would not."""
    sizer = Sizer(PLAN, with_jump(costs(), 2, 0.012))
    budgets = [sizer.choose(name, 2, greedy=True) for name in ("a", "b")]
    sure = np.array([0.6])
    assert budgets[0].together[1] > 0.6
    assert budgets[0].together[2] < 1.2
    assert share_out(budgets, [sure, sure]) == [1, 1]
    assert share_out(budgets, [sure, np.zeros(0)]) == [0, 0]


def test_the_curve_follows_what_was_accepted():
    kind, chance = Kind(), random.Random(0)
    for _ in range(2000):
        sure = chance.choice([0.25, 0.65])
        kind.add(np.array([math.log(sure)]), np.array([0] if chance.random() < sure + 0.2 else [], dtype=np.int64))
    assert kind.curve().at([math.log(0.25), math.log(0.65)]).tolist() == pytest.approx([0.45, 0.85], abs=0.08)


def test_prices_are_seconds_at_the_rate_of_the_engine():
    sizer = Sizer(PLAN, costs(base=0.03, slope=0.001, first=0.003, later=0.002))
    budget = sizer.choose("r", 2, greedy=True)
    plain = 0.03 + 0.002  # a step of two rows
    node = 2 * 0.001 / plain  # of each request: the batch's time, a token for each request
    assert budget.prices[5] == pytest.approx(5 * node)
    assert budget.passes.tolist() == pytest.approx([0.003 / plain, *[0.002 / plain] * 3])
    sizer.learned.steps += 1
    sizer.learned.tokens *= 2  # twice as many tokens in the same time: time is worth twice as much
    assert sizer.choose("r", 2, greedy=True).prices[5] == pytest.approx(2 * 5 * node)


class World:
    """Texts whose next tokens a drafter knows more or less: a search finds children, one of which may be right."""

    def __init__(self, quality, honesty, seed):
        self.quality, self.honesty = quality, honesty
        self.chance = random.Random(seed)

    def children(self):
        """Probabilities of a node's children, falling."""
        sure = self.chance.random() ** (1 / max(self.quality, 1e-3) - 1) if self.quality < 1 else 1.0
        return [sure * part for part in (0.7, 0.15, 0.1)]

    def step(self, budget):
        """What comes of a budget: an Outcome, and what the step took of draft passes and rows."""
        token, parent, score, right = [], [], [], []
        levels, frontier = [], [(ROOT, 0.0, True)]
        while budget.depth:
            found = []
            for node, above, on_path in frontier:
                probs = self.children()
                draw = self.chance.random()
                for i, p in enumerate(probs):
                    start = sum(probs[:i]) * self.honesty
                    hit = on_path and start <= draw < start + p * self.honesty
                    token.append(len(token))
                    parent.append(node)
                    score.append(above + math.log(max(p, 1e-9)))
                    right.append(hit)
                    found.append((len(token) - 1, score[-1], hit))
            levels.append([s for _, s, _ in found])
            frontier = sorted(sorted(found, key=lambda x: -x[1])[: PLAN.top])
            if not budget.goes_on(len(levels), budget.curve.at([s for _, s, _ in frontier]).sum()):
                break
        kept = sorted(range(len(score)), key=lambda n: (-score[n], n))[: budget.best(sorted(score, reverse=True))[0]]
        kept.sort()
        place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
        tree = DraftTree.build([token[n] for n in kept], [place[parent[n]] for n in kept])
        path = np.array([place[n] for n in kept if right[n]], dtype=np.int64)
        found = np.array([score[n] for n in kept])
        return BudgetOutcome("r", True, budget, levels, tree, found, path, 1 + len(path))


def seconds(costs, outcome):
    """What a step of one request took."""
    took = costs.step_seconds(1 + len(outcome.tree), 1)
    if outcome.levels:
        took += costs.first_seconds(1) + sum(costs.pass_seconds(PLAN.top) for _ in outcome.levels[1:])
    return took


def rate(costs, world, choose, learn, steps=2500):
    """Tokens a second; and the worst of any 200 steps. Tokens are expected ones: over 200 steps luck would be 3 %."""
    made = []
    for _ in range(steps):
        outcome = world.step(choose())
        learn(outcome)
        tokens = 1 + (np.exp(outcome.scores) * world.honesty**outcome.tree.depth).sum()
        made.append((tokens, seconds(costs, outcome)))
    spans = [made[i : i + 200] for i in range(0, steps - 200, 50)]
    each = [sum(t for t, _ in span) / sum(s for _, s in span) for span in spans]
    return sum(t for t, _ in made) / sum(s for _, s in made), min(each)


@pytest.mark.parametrize(
    ("quality", "honesty", "slope"),
    [
        pytest.param(quality, honesty, slope, marks=() if (slope < 0.001) == (honesty < 1) else pytest.mark.slow)
        for quality in (0.0, 0.3, 0.6, 0.9)
        for honesty in (1.0, 0.5)
        for slope in (0.0003, 0.002)
    ],
)
def test_it_is_never_below_plain_decoding_and_close_to_the_best_fixed_tree(quality, honesty, slope):
    takes = costs(base=0.03, slope=slope, first=0.004, later=0.002)
    sizer = Sizer(PLAN, takes)
    found, worst = rate(
        takes,
        World(quality, honesty, 1),
        lambda: sizer.choose("r", 1, greedy=True),
        lambda outcome: sizer.learn([outcome]),
    )
    plain = 1 / takes.step_seconds(1, 1)
    assert worst >= 0.98 * plain
    fixed = [
        rate(takes, World(quality, honesty, 1), lambda d=d, n=n: Budget.whole(d, n), lambda _: None, steps=1200)[0]
        for d in (1, 2, 4)
        for n in (1, 2, 4, 8, 12)
    ]
    assert found >= 0.97 * max(*fixed, plain)


@pytest.mark.parametrize(("batch", "most"), [(1, MOST_PAUSE), (8, MOST_PAUSE), (16, 8), (32, 16), (40, 16)])
def test_requests_that_find_nothing_are_left_alone_for_longer_in_large_batches(batch, most):
    sizer = Sizer(PLAN, costs(first=1.0))
    asked = []
    for step in range(120):
        budget = sizer.choose("r", batch, greedy=True)
        if not budget.is_off:  # its text may be looked into
            asked.append(step)
        nothing = np.zeros(0, np.float32)
        sizer.learn([BudgetOutcome("r", True, budget, (), DraftTree.empty(), nothing, nothing.astype(np.int64), 1)])
    assert max(np.diff(asked)) == most + 1


def test_a_batch_that_goes_to_and_fro_by_one_request_brings_no_further_questions():
    """From 31 to 32 requests, rows are priced anew: that is no reason to look into all texts again."""

    def asked(sizes):
        sizer, times = Sizer(PLAN, costs(first=1.0)), 0
        for step in range(120):
            budget = sizer.choose("r", sizes[step % len(sizes)], greedy=True)
            times += not budget.is_off
            nothing = np.zeros(0, np.float32)
            sizer.learn([BudgetOutcome("r", True, budget, (), DraftTree.empty(), nothing, nothing.astype(np.int64), 1)])
        return times

    assert asked([31, 32]) <= asked([31]) + 2  # they wait for other steps


def test_it_stops_where_nothing_is_accepted_probes_and_comes_back():
    sizer = Sizer(PLAN, costs(first=0.006))
    bad, good = World(0.5, 0.0, 2), World(0.9, 1.0, 2)
    depths = []
    for world in (bad, good):
        for _ in range(300):
            budget = sizer.choose("r", 1, greedy=True)
            depths.append(budget.depth)
            sizer.learn([world.step(budget)])
    assert depths[0] > 0
    assert depths[200:300].count(0) >= 90
    probe = 0.006 + 0.002 + 4 * 0.001  # the first pass, one of the tokens that it missed, the rows of four nodes
    every = math.ceil(probe / (PROBE_SHARE * 0.031))
    longest = max(len(run) for run in "".join("x" if d else "." for d in depths).split("x"))
    assert longest == every
    assert depths[-50:].count(0) == 0
    assert "the model's draft would not pay" in _sized(sizer, bad).reason


def test_one_request_at_a_time_probes():
    """Each that tries again feeds the drafter all that it missed: together they would be felt."""
    sizer, bad = Sizer(PLAN, costs(first=0.006)), World(0.5, 0.0, 2)
    names, probes = [f"r{i}" for i in range(6)], []
    for _ in range(400):
        budgets = {name: sizer.choose(name, 6, greedy=True) for name in names}
        assert budgets == {name: sizer.choose(name, 6, greedy=True) for name in names}  # asked twice, told the same
        probes.append(sum(budget.probe for budget in budgets.values()))
        sizer.learn([replace(bad.step(budget), request=name) for name, budget in budgets.items()])
    assert max(probes) == 1
    times = [step for step, count in enumerate(probes) if count]
    probe = 0.006 + 0.002 + 4 * 0.001
    late = np.diff(times[5:])  # when it is known that nothing is accepted
    assert len(late) > 3
    assert min(late) >= probe / (PROBE_SHARE * 0.036)


def test_those_who_draft_bear_the_cost_of_a_pass_together():
    sizer = Sizer(PLAN, costs(first=0.0005, later=0.0005))
    names, good = [f"r{i}" for i in range(4)], World(0.9, 1.0, 2)

    def step(drafting):
        budgets = {name: sizer.choose(name, 4, greedy=True) for name in names}
        sizer.learn([
            replace(good.step(budget if name in drafting else idle(budget)), request=name)
            for name, budget in budgets.items()
        ])  # fmt: skip
        return budgets["r0"]

    def idle(budget):
        return budget if budget.is_off else replace(budget, depth=0, probe=False)

    def price():
        while (budget := sizer.choose("r0", 4, greedy=True)).is_off:
            step(())
        rate = max(sizer.learned.tokens / sizer.learned.costs, 1.0)
        return budget.passes[0] / rate

    step(names)
    together = price()
    for _ in range(200):
        step(names[:1])
    assert price() == pytest.approx(4 * together, rel=0.01)
    for _ in range(300):
        step(())
    assert price() == pytest.approx(together, rel=0.02), "after a while without drafts all may try again together"


def _sized(sizer, world):
    """A budget that allows nothing, after steps that brought nothing."""
    for _ in range(400):
        budget = sizer.choose("r", 1, greedy=True)
        if not budget.depth:
            return budget
        sizer.learn([world.step(budget)])
    raise AssertionError("it went on")


def test_a_copy_of_what_was_learned_brings_back_the_same_choices():
    sizer, world = Sizer(PLAN, costs()), World(0.6, 1.0, 3)
    for _ in range(50):
        sizer.learn([world.step(sizer.choose("r", 1, greedy=True))])
    kept = copy.deepcopy(sizer.learned)

    def more():
        same = World(0.6, 1.0, 4)
        outcomes = [same.step(sizer.choose("r", 1, greedy=True)) for _ in range(1)]
        for _ in range(40):
            sizer.learn(outcomes[-1:])
            outcomes.append(same.step(sizer.choose("r", 1, greedy=True)))
        return [one.tree.token.tolist() for one in outcomes]

    first = more()
    sizer.learned = kept
    assert more() == first


def test_being_asked_teaches_nothing():
    """A scheduler asks for requests that then find no place: a step that is run again may not ask for them."""
    sizer = Sizer(PLAN, costs())
    assert sizer.choose("waiting", 2, greedy=True, length=40).depth
    assert (sizer.learned.recent, sizer.learned.gains) == ({}, {})
    budget = sizer.choose("r", 1, greedy=True, length=40)
    found = [[math.log(0.5)]]
    sizer.learn([BudgetOutcome("r", True, budget, found, DraftTree.empty(), np.zeros(0), np.zeros(0, np.int64), 1)])
    assert list(sizer.learned.recent) == ["r"]
    assert list(sizer.learned.gains) == [1]


def test_a_text_that_brings_nothing_is_looked_into_less_often():
    sizer, nothing = Sizer(PLAN, costs(first=0.006)), DraftTree.empty()
    sizer.learned.gains[1] = -1.0  # so that the model does not draft

    def looks(steps, found=nothing):
        for _ in range(steps):
            budget = sizer.choose("r", 1, greedy=True)
            assert budget.is_off is not budget.looks
            yield budget.looks
            tree = found if budget.looks else nothing
            path = np.arange(len(tree))
            sizer.learn([BudgetOutcome("r", True, budget, (), tree, np.zeros(len(tree)), path, len(tree) + 1)])

    assert "".join("x" if look else "." for look in looks(20)) == "x.xx.x....x....x...."
    assert list(looks(1, DraftTree.build([7], [ROOT]))) == [True]
    assert list(looks(3)) == [True, True, False]  # what paid is looked for at once


def test_a_request_that_is_left_alone_is_asked_for_when_the_batch_shrinks():
    sizer = Sizer(PLAN, costs(first=0.006))
    sizer.learned.gains[3] = -1.0  # in batches of 4 to 7 no draft pays
    budget, nothing = sizer.choose("r", 4, greedy=True), np.zeros(0, np.int64)
    sizer.learn([BudgetOutcome("r", True, budget, (), DraftTree.empty(), np.zeros(0), nothing, 1)])
    sizer.learned.recent["r"].until = sizer.learned.steps + 3
    assert sizer.choose("r", 5, greedy=True).is_off
    budget = sizer.choose("r", 1, greedy=True)
    assert budget.depth > 0
    sizer.learn(
        [BudgetOutcome("r", True, budget, ((-0.1,),), DraftTree.build([7], [ROOT]), np.zeros(1), np.arange(1), 2)]
    )
    assert sizer.choose("r", 1, greedy=True).depth > 0  # it drafted: that it was left alone is over


def test_requests_are_told_apart_and_forgotten():
    sizer, bad = Sizer(PLAN, costs(first=0.006)), World(0.5, 0.0, 2)
    sizer.choose("other", 1, greedy=True)
    _sized(sizer, bad)
    assert sizer.choose("other", 1, greedy=True).depth > 0  # it was promised more when it came
    for name in ("r", "other", "never seen"):
        sizer.forget(name)
    assert not sizer.learned.recent


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_engine_with_adaptive_trees_is_lossless_says_why_and_repeats(deep, tmp_path, temperature):
    folder = write_head(tmp_path / "h", head_tensors())
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    common = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01}
    plain = Engine(drafter="none", **common).generate(["hello", "what is this"], params)
    how = {"drafter": "eagle", "draft_model": str(folder), "tree": "dynamic:8", "adaptive": True, "costs": COSTS}
    engines = [Engine(**how, **common) for _ in range(2)]
    found, again = (engine.generate(["hello", "what is this"], params) for engine in engines)
    if temperature == 0:
        assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert [r.token_ids for r in found] == [r.token_ids for r in again]
    trees = [[step.tree.token.tolist() for step in result.steps] for result in found]
    assert trees == [[step.tree.token.tolist() for step in result.steps] for result in again]
    assert engines[0].run_info.costs == engines[1].run_info.costs != ""
    # The prompt's last token is never drafted from, whatever the sizer says: nothing is to be explained there.
    first = [next(step for step in result.steps if step.verdict is not None) for result in found]
    later = [
        step for result in found for step in result.steps if step.verdict is not None and step.index > first[0].index
    ]
    assert not any(step.sizing or len(step.tree) for step in first)
    assert all(step.sizing for step in later)
    assert {len(step.tree) for step in later} != {8}


def test_costs_are_measured_once_and_kept(deep, tmp_path):
    folder = write_head(tmp_path / "h", head_tensors())
    file = tmp_path / "costs.json"
    how = {"target": str(deep), "dtype": "float32", "kv_memory": 0.05, "drafter": "eagle", "draft_model": str(folder)}
    said = []
    first = Engine(**how, costs=str(file), progress=said.append)
    assert any("measuring" in text for text in said)
    assert Path(file).exists()
    said.clear()
    second = Engine(**how, costs=str(file), progress=said.append)
    assert not any("measuring" in text for text in said)
    assert first.sizer.costs == second.sizer.costs
    assert all(point.seconds > 0 for point in first.sizer.costs.steps[0])
    assert first.runner.cache.pool.used == 0
    assert first.drafter.cache.pool.used == 0


def test_without_room_to_measure_trees_are_not_adaptive(deep, tmp_path):
    folder = write_head(tmp_path / "h", head_tensors())
    said = []
    engine = Engine(
        target=str(deep),
        dtype="float32",
        kv_memory=0.001,
        drafter="eagle",
        draft_model=str(folder),
        costs=str(tmp_path / "c.json"),
        progress=said.append,
    )
    assert engine.sizer is None
    assert engine.run_info.costs == ""
    assert any("not adaptive" in text for text in said)
