"""Trees of counted draws: what is emitted has the target's distribution, by enumeration of all draws and coins."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.drafters import tree_builder
from specscope.speculate.drafters.base import NO_DRAFT, Context
from specscope.speculate.drafters.level import Level
from specscope.speculate.drafters.tree_builder import CountedTreeBuilder, StaticTreeBuilder
from specscope.speculate.sizing.acceptance import EDGES, Curve
from specscope.speculate.sizing.budget import FREE, Budget
from specscope.speculate.sizing.sizer import DRAWS, BudgetOutcome, Learned, Sizer
from specscope.trace.plan import DynamicPlan, StaticPlan
from specscope.trace.record.notes import DraftNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import ROOT, DraftTree, Drawn, TreeShape
from tests.speculate.sizing.test_sizer import costs
from tests.speculate.verify.enumeration import Model, emitted, sampled_children, variation
from tests.speculate.verify.test_oracle import coin_outcomes

NO_SCORES = np.zeros(0)
CURVES = tuple(Curve(rates) for rates in DRAWS)


def budget(nodes, depth, row=0.15, a_pass=0.1):
    """Rows and passes that cost so many tokens."""
    prices = row * np.arange(nodes + 1)
    whole = Budget(depth, nodes, prices, np.full(depth, a_pass), np.full(depth, 0.4), FREE, "", siblings=CURVES)
    return DynamicPlan(nodes, depth, 2), whole


def build(q_model, plan, whole):
    """A grown tree, as a Draft."""
    context = Context("r", [1, 2], 1, SamplingParams(temperature=1.0), whole)
    return grown(CountedTreeBuilder(context, plan, whole), q_model)


def grown(builder, q_model):
    """It, from start to finish."""
    while builder.frontier:
        rows = [q_model(tuple(builder.path(node))) for node in builder.frontier]
        builder.grow(Level(torch.tensor(np.log(rows)), q_model.vocab), slice(0, len(rows)))
    return builder.finish()[0]


def every_draft(monkeypatch, q_model, plan, whole):
    """(tree, q, probability) of all that can be drawn: the draws are taken in every order in turn."""
    script, at, weight = [0], 0, 1.0

    def draw(rows, coins):
        nonlocal at, weight
        drawn = []
        for row in rows.double().numpy():
            ways = list(sampled_children(row / row.sum(), coins.shape[1], Drawn.WITHOUT_REPLACEMENT))
            if at == len(script):
                script.append(0)
            left[at:] = [len(ways) - script[at] - 1]
            tokens, share = ways[script[at]]
            at, weight = at + 1, weight * share
            n = len(tokens)
            drawn.append((list(tokens), [float(row[token]) for token in tokens], [1.0] * n, [0.0] * n))
        return tuple(zip(*drawn, strict=True))

    monkeypatch.setattr(tree_builder, "draw_siblings", draw)
    left = []
    while True:
        at, weight, left = 0, 1.0, []
        draft = build(q_model, plan, whole)
        yield draft.tree, draft.q, weight
        last = max((place for place, count in enumerate(left) if count), default=None)
        if last is None:
            return
        script[last] += 1
        del script[last + 1 :]


def worst(monkeypatch, seeds=12):
    """Total variation of what is emitted; and the sizes of the trees."""
    found, sizes = [], set()
    for seed in range(seeds):
        p_model, q_model = Model(3, seed), Model(3, seed + 1000)
        drafts = []
        for tree, q, weight in every_draft(monkeypatch, q_model, *budget(5, 2, row=0.03, a_pass=0.02)):
            drafts.append((tree, {n: row for n, row in q.items() if tree.children(n)}, weight))
            sizes.add(len(tree))
        found.append(variation(emitted(drafts, p_model, 3, coin_outcomes), p_model, 3))
    return max(found), sizes


def test_what_is_emitted_has_the_targets_distribution(monkeypatch):
    found, sizes = worst(monkeypatch)
    assert found < 1e-6
    assert len(sizes) > 2  # the trees differ


def test_a_mistake_is_caught(monkeypatch):
    """Draws that turned out unlikely are dropped."""
    take = CountedTreeBuilder.take

    def kept(self, q, drawn):
        return take(self, q, [[d._replace(prob=d.prob if d.prob > 0.3 else 0.0) for d in row] for row in drawn])

    monkeypatch.setattr(CountedTreeBuilder, "take", kept)
    assert worst(monkeypatch)[0] > 0.01


@given(st.integers(0, 99), st.floats(0.0, 0.6), st.floats(0.0, 0.3), st.integers(1, 9), st.integers(1, 4))
def test_trees_are_within_their_budget(seed, row, a_pass, nodes, depth):
    plan, whole = budget(nodes, min(depth, nodes), row, a_pass)
    draft = build(Model(8, seed), plan, whole)
    tree = draft.tree
    assert len(tree) == len(draft.sure) <= nodes
    assert tree.max_depth <= depth
    assert (tree.drawn == Drawn.WITHOUT_REPLACEMENT).all()
    assert sum(map(len, draft.levels)) == len(tree)
    assert all(-math.inf < chance <= 0 for level in draft.levels for chance in level)
    for parent in {ROOT, *tree.parent.tolist()}:
        assert len(tree.children(parent)) <= plan.top
    if row > 0.35 and len(tree):  # what is expected pays for its row
        assert max(np.exp(draft.levels[0])) > 0.35


def test_where_the_drafter_is_surer_it_draws_less_often(monkeypatch):
    """The second draw at a node comes where the first is likely to fail."""

    def children(sure):
        rest = [(1 - sure) / 7] * 7
        model = lambda path: np.array([sure, *rest])  # noqa: E731
        model.vocab = 8
        return len(build(model, *budget(4, 1, row=0.04)).tree)

    assert [children(sure) for sure in (0.3, 0.9)] == [2, 1]


@pytest.mark.parametrize("row", [0.9, 2.0])
def test_where_no_row_pays_nothing_is_drawn(row):
    draft = build(Model(8, 0), *budget(4, 2, row=row))
    assert len(draft.tree) == 0
    assert draft.levels == [[]]


def firsts(tree):
    """Nodes that are the first draw at their parent, as are all above them: others never come where q is p."""
    found = []
    for node, parent in enumerate(tree.parent.tolist()):
        if tree.children(parent)[0] == node and (parent == ROOT or parent in found):
            found.append(node)
    return found


class Sampled:
    """One sampled request, whose drafter's q is the target's p at some nodes, and far from it at the others."""

    def __init__(self, slope):
        self.plan, self.costs = DynamicPlan(8, depth=3, top=3), costs(base=0.03, slope=slope, first=0.004, later=0.002)
        self.sizer, self.chance, self.steps = Sizer(self.plan, self.costs), np.random.default_rng(1), 0
        self.plain = 1 / self.costs.step_seconds(1, 1)

    def run(self, steps, quality):
        """Each step's expected tokens and seconds, as an array. `quality`: how many nodes have p = q."""
        return np.array([self.step(quality) for _ in range(steps)])

    def step(self, quality):
        """One of them. A node's first draw is accepted where p = q, and no other ever is."""
        whole = self.sizer.choose("r", 1, greedy=False)
        draft, path, seconds = NO_DRAFT, [], self.costs.step_seconds(1, 1)
        if whole.depth:
            draft = build(Model(8, self.steps), DynamicPlan(whole.nodes, whole.depth, self.plan.top), whole)
            for node in firsts(draft.tree):
                if draft.tree.parent[node] in (ROOT, *path) and self.chance.random() < quality:
                    path.append(node)
            seconds = self.costs.step_seconds(1 + len(draft.tree), 1) + self.costs.first_seconds(1)
            seconds += (len(draft.levels) - 1) * self.costs.pass_seconds(self.plan.top)
        made = 1 + sum(quality ** draft.tree.depth[node] for node in firsts(draft.tree))
        found = BudgetOutcome(
            "r", False, whole, draft.levels, draft.tree, NO_SCORES, np.array(path, np.int64), 1 + len(path)
        )
        self.sizer.learn([replace(found, sure=draft.sure)])
        self.steps += 1
        return made, seconds


def pace(made):
    """Tokens a second."""
    return made[:, 0].sum() / made[:, 1].sum()


@pytest.mark.parametrize("quality", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.0003, 0.002])
def test_sampled_requests_are_not_slower_than_plain_decoding(quality, slope):
    """But for the first steps with a drafter that is sure of what never comes: these have to be tried."""
    world = Sampled(slope)
    made = world.run(900, quality)
    spans = [made[at : at + 200] for at in range(0, 700, 25)]
    assert min(map(pace, spans[2:])) >= 0.98 * world.plain
    assert pace(spans[0]) >= 0.96 * world.plain
    takes = world.costs
    chain = (1 + quality) / (takes.step_seconds(2, 1) + takes.first_seconds(1))  # one draw in each step
    assert pace(made[200:]) >= 0.97 * max(chain, world.plain)


def test_draws_come_back_where_they_pay_again():
    world = Sampled(0.002)
    assert pace(world.run(400, 0.0)[200:]) >= 0.98 * world.plain
    assert pace(world.run(800, 0.9)[600:]) >= 2 * world.plain  # each probe shows one draw


NARROW = {
    "plain": {},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8, "temperature": 0.7},
}


@pytest.mark.parametrize("name", NARROW)
@given(seed=st.integers(0, 9999))
def test_drawn_again_from_its_shape_it_is_the_same(name, seed):
    """Also where q has fewer tokens to give than were asked for, at a node above others."""
    model, (plan, whole) = Model(8, seed), budget(12, 4, row=0.005, a_pass=0.0)
    params = SamplingParams(**{"temperature": 1.0, "seed": seed} | NARROW[name])
    plan = replace(plan, top=4)
    context = Context("r", [1, 2], 1, params, whole)
    first = grown(CountedTreeBuilder(context, plan, whole), model)
    if not len(first.tree):
        return
    shape = TreeShape(tuple(first.tree.parent.tolist()))
    again = grown(StaticTreeBuilder(replace(context, budget=None, shape=shape), StaticPlan(shape)), model)
    assert again.tree == first.tree


def test_a_kind_that_was_not_seen_for_long_is_tried_again():
    """The counts of all kinds fade; what is known of one kind says nothing of the others."""
    kind = Learned().draws[0]
    for _ in range(100):  # which never succeeded
        kind.add(np.log([0.35]), np.array([], np.int64))
    assert kind.curve(rises=False).rates[np.searchsorted(EDGES, 0.35)] < 0.01
    for _ in range(6000):
        kind.add(np.log([0.93]), np.array([0]))
    rates = kind.curve(rises=False).rates
    assert rates[:-4] == pytest.approx(DRAWS[0][:-4], abs=1e-3)
    assert rates[np.searchsorted(EDGES, 0.93)] == pytest.approx(1.0, abs=1e-2)


def test_a_rule_that_takes_no_notice_of_q_has_no_draws():
    plan, world = DynamicPlan(8, depth=3, top=3), costs()
    assert Sizer(plan, world).choose("r", 1, greedy=False).siblings
    assert not Sizer(plan, world, draws=False).choose("r", 1, greedy=False).siblings


def test_only_what_parts_at_a_near_draw_is_excused():
    """The first node that differs is the one whose draw was near another token; what lies behind follows from it."""
    none, ones = np.zeros(0, np.int32), np.ones(3, np.float32)
    notes = DraftNotes(ones, ones, none, none, ones[:0], draw_margin=np.array([0.2, 1e-6, 0.2]))

    def chain(*tokens):
        return DraftTree.build(tokens, [ROOT, 0, 1], [0.5] * 3, Drawn.WITHOUT_REPLACEMENT)

    step = RequestStep("r", 0, 1, 0, "made", chain(1, 2, 3), None, 0, notes=notes)
    assert step.near_draws("float32") == [1]
    assert step.parts_at_near_draw(chain(1, 7, 8), "float32")
    for other, dtype in ((chain(7, 2, 3), "float32"), (chain(1, 2, 7), "float32"), (chain(1, 7, 8), "another")):
        assert not step.parts_at_near_draw(other, dtype)
    assert not step.parts_at_near_draw(step.tree, "float32")
    assert not replace(step, notes=None).parts_at_near_draw(chain(1, 7, 8), "float32")
