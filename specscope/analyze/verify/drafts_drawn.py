"""Each sampled draft by itself: the coin that drew it, done again from its key, and the interval that it fell into."""

from __future__ import annotations

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Check, CheckResult
from specscope.analyze.verify.exact import HOPELESS, LEAST, RELATIVE, WHOLE, check_each
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.record.coins import Stream, coins_at, draw_number
from specscope.trace.record.records import RunInfo
from specscope.trace.record.tree import ROOT, Doubles
from specscope.tree_shape import TreeShape

NO_COINS = "the capture does not tell the coins that drew drafts"


def drawn_checks(c: Columns, run: RunInfo | None) -> list[Check]:
    """All checks of draws by themselves."""
    return [in_intervals(c), recomputed_draft_coins(c, run)]


def interval(c: Columns) -> tuple[Doubles, Doubles, Doubles]:
    """[N] the interval of each draw, and how far rounding may move its ends: q and what was left of it were float32."""
    left = np.maximum(c.q_left, 1e-12)
    width, share = c.q / left, RELATIVE + WHOLE / left
    drawn = c.draft_low[c.drawn_by_coin]
    single = bool((drawn == drawn.astype(np.float32)).all())  # sums over a vocabulary in float32
    return c.draft_low, c.draft_low + width, share * width + (WHOLE if single else LEAST)


def in_intervals(c: Columns) -> Check:
    """The coin lies in [low, low + q), q renormalised after the siblings that were drawn before."""
    low, high, slack = interval(c)
    tested = c.drawn_by_coin & c.sound[c.step] & (slack < HOPELESS)
    return check_each(
        "draft coins in their intervals",
        "the coin that drew a draft lies in the draft's interval of q's distribution function",
        (c.draft_coin < low - slack) | (c.draft_coin >= high + slack),
        tested,
        c.nodes,
        lambda i: f"coin {c.draft_coin[i]:.6g} is not in [{low[i]:.6g}, {high[i]:.6g}), the interval of its draft",
        note="" if c.drawn_by_coin.any() else NO_COINS if c.sampled.any() else "no draft was sampled",
    )


def recomputed_draft_coins(c: Columns, run: RunInfo | None) -> Check:
    """Each draft's coin, computed again from its key."""
    name, about = "draft coins", "every draft's coin follows from the request's seed, the root's position and its draw"
    if not c.ours:
        return Check(name, CheckResult.SKIPPED, about, note="the coins are another engine's")
    number = draw_numbers(c, run)
    tested = c.drawn_by_coin & c.known[c.step] & (number >= 0)
    nodes = np.flatnonzero(tested)
    expected = draft_coins(c, nodes, number, c.position)
    bad = np.zeros(len(c.token), np.bool_)
    bad[nodes] = c.draft_coin[nodes] != expected
    return check_each(
        name,
        about,
        bad,
        tested,
        c.nodes,
        lambda i: f"not coin {number[i]} of seed {c.params[c.step[i]].seed} at position {c.position[c.step[i]]}",
        note="" if c.drawn_by_coin.any() else NO_COINS if c.sampled.any() else "no draft was sampled",
    )


def draft_coins(
    c: Columns, nodes: Indices, number: Indices, position: Indices, stream: Stream = Stream.DRAFT
) -> Doubles:
    """[nodes] coins of these numbers [N], of the seeds of the nodes' requests at a position [S] for each step."""
    steps, at = np.unique(c.step[nodes], return_inverse=True)
    counts = np.zeros(len(steps), np.int64)
    np.maximum.at(counts, at, number[nodes] + 1)
    seeds = np.array([c.params[step].seed for step in steps], np.uint64)
    every = coins_at(seeds, stream, position[steps], counts)
    result: Doubles = every[(np.cumsum(counts) - counts)[at] + number[nodes]] if len(nodes) else every
    return result


def draw_numbers(c: Columns, run: RunInfo | None) -> Indices:
    """[N] the number of each node's draw, as our drafters count them; -1 where it is none of the plan's."""
    plan = None if run is None else read_plan(run.tree)
    if plan is None:
        return np.full(len(c.token), -1, np.int64)
    if not isinstance(plan, StaticPlan):
        return draw_number(c.parent, c.sibling)
    children = _children(plan.shape)
    number = np.full(len(c.token), -1, np.int64)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero((c.depth == depth) & (c.sibling < children.shape[1]))
        above = np.full(len(nodes), ROOT) if depth == 1 else number[c.above[nodes]]
        known = (above >= 0) | (depth == 1)
        number[nodes] = np.where(known, children[above + 1, c.sibling[nodes]], -1)
    return number


def _children(shape: TreeShape) -> Indices:
    """[nodes + 1, w] the children of the root, then those of each node; -1 beyond the last."""
    every = [shape.children(node) for node in range(ROOT, len(shape))]
    table = np.full((len(every), max(map(len, every))), -1, np.int64)
    for row, children in zip(table, every, strict=True):
        row[: len(children)] = children
    return table
