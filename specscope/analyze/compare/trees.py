"""Draft trees at equal contexts, and the drafter on the whole: whether the rounding of its dtype explains differences.

A bound on rounding lets a single decision pass. What rounding does as a rule is far less, and many decisions show it:
most near ties are nearer than three times that, and the log odds of a whole request move by less than twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from specscope.analyze.compare.align import Aligned, ContextRows
from specscope.analyze.compare.config import StepStage
from specscope.analyze.compare.fields import COMMON, FEWEST, RARE, Field, first_tokens, many, other
from specscope.analyze.compare.parting import BEYOND
from specscope.analyze.compare.side import Hashes, Side
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.rules import ROUNDING, log_odds
from specscope.trace.record.tree import Bools, Doubles

TREE, FREE, DRIFT = "draft tree", "draft tree, not judged", "draft p, on the whole"
UNTOLD = "whether at near ties is not recorded"
# d log p = dp / p: what moves a p of 1/4 by the tolerance moves its logarithm by four times that
OF_LOG = 4.0
NARROW = ROUNDING["float32"]  # with a wider rounding a near tie at one level may change the levels below it
USUAL = 0.4  # of the bound: what rounding moves log odds by, at the median
NEAR, FURTHER = 3.0, 0.05  # times that by the root of the depth: so many near ties are further apart, at most
CHANCE = 1e-3  # that near ties alone are so far apart
DRIFTED = 1.75  # times the usual: no rounding moves the median request by so much
SMALLEST = 1e-9  # of a probability whose log odds are compared


FAR = (math.inf, 0.0, 1)  # no near tie
UNKNOWN = (math.nan, 0.0, 1)  # what would tell is not recorded


def trees(aligned: Aligned) -> list[Field]:
    """Trees that must be the same, and those that need not be; and the drafter's p where it moves on the whole."""
    here, narrow, usual = aligned.steps, aligned.tolerance <= NARROW, _usual(aligned)
    differ, judged = np.not_equal(*here.of_steps("tree")), _judged(here)
    ties = [_tie(aligned, index) for index in np.flatnonzero(differ & judged).tolist()]
    apart, bound, depth = np.array(ties, np.float64).reshape(-1, 3).T
    further = int(((apart > bound) | (apart > NEAR * usual * np.sqrt(depth))).sum())  # it adds up as a random walk does
    far, known = int((apart > bound).sum()), int((~np.isnan(apart)).sum())
    made = other(here, TREE, StepStage.TREE, differ, judged, note="its tokens or its shape; near ties among them")
    odd, rare = (
        not narrow and further >= FEWEST and _at_least(further, known, FURTHER) < CHANCE,
        RARE if narrow else COMMON,
    )
    suspect = many(far, made.compared, rare) or odd
    unsure = not suspect and many(far + len(ties) - known, made.compared, rare)
    says = f"{further:,} of {known:,} are further apart than near ties" if odd else ""
    made = replace(
        made, suspect=suspect, unsure=unsure, note=UNTOLD if unsure else made.note, condition=made.condition or says
    )
    note = "of other seeds, costs, load, shared texts, or an engine that drafts nothing behind a prompt"
    return [made, other(here, FREE, None, differ, ~judged, note=note), *([] if narrow else _drift(aligned, usual))]


def _at_least(count: int, of: int, share: float) -> float:
    """The probability of so many or more, each with this probability."""
    return sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(count, of + 1))


def _drift(aligned: Aligned, usual: float) -> list[Field]:
    """The drafter's own p, where the requests' median of how far its log odds moved is more than twice the usual."""
    here = aligned.nodes
    apart, request = _apart(*here.column("columns.draft_prob")), here.sides[0].request[here.step[0]]
    comparable = ~np.isnan(apart) & here.alike & (here.depth[0] == here.depth[1])
    found = []
    for level, where in (("at the root", here.depth[0] == 1), ("below the root", here.depth[0] > 1)):
        mine = where & comparable
        medians = [float(np.median(apart[mine & (request == one)])) for one in np.unique(request[mine])]
        median = float(np.median(medians)) if len(medians) >= FEWEST else 0.0
        if median > DRIFTED * usual:
            made = other(here, f"{DRIFT}, {level}", StepStage.DRAFTER, apart > 2 * usual, mine)
            says = f"log odds move by {median:.2g} at the median request, where rounding moves them by {usual:.2g}"
            found.append(replace(made, suspect=True, condition=says, note=says))
    return found


def _usual(aligned: Aligned) -> float:
    """How far rounding moves a log odds of the drafter as a rule, between these two runs.

    As the dtype does, or more where both the target and the drafter at the root moved more: a fault of the drafter
    moves no target.
    """
    here, least = aligned.nodes, USUAL * aligned.tolerance
    if not len(aligned.parents):
        return least
    root = _apart(*here.column("columns.draft_prob"))[(here.depth[0] == 1) & (here.depth[1] == 1)]
    first, top_p = first_tokens(aligned.parents)
    moved = root, _apart(*top_p)[first[0] == first[1]]
    return max(least, min(0.0 if np.isnan(each).all() else float(np.nanmedian(each)) for each in moved))


def _apart(a: Doubles, b: Doubles) -> Doubles:
    """How far the log odds of two probabilities are apart."""
    return np.asarray(np.abs(np.subtract(*(log_odds(p, SMALLEST, 1 - SMALLEST) for p in (a, b)))))


def _judged(here: ContextRows) -> Bools:
    """[steps] whether the context alone decides what is drafted; where drafts are sampled, with the same coins.

    Not where one of two engines drafted nothing behind a prompt, as it never does.
    """
    engines = [{"" if run.is_ours else run.backend for run in side.runs} for side in here.sides]
    behind = np.not_equal(*here.of_steps("drafts")) & (np.maximum(*here.of_steps("prefill")) > 0)
    free = np.logical_or(*here.of_steps("varies")) | (behind & (engines[0] != engines[1]))
    drawn = [c.any_in_step(c.sampled) for c in (side.columns for side in here.sides)]
    x, y = (each[step] for each, step in zip(drawn, here.step, strict=True))
    return np.asarray(~free & here.alike & (here.exact | ~(x | y)))


class _Tree:
    """The nodes of a step, by column. A path is the hash of its tokens."""

    def __init__(self, side: Side, paths: Hashes, step: int) -> None:
        c, nodes = side.columns, slice(side.columns.start[step], side.columns.start[step + 1])
        self.path, self.above = paths[c.own_row[nodes]], paths[c.row[nodes]]
        self.score, self.prob, self.depth = c.score[nodes], c.draft_prob[nodes], c.depth[nodes]
        self.margin, self.drawn = side.draw_margin[nodes], bool(c.sampled[nodes].any())
        drafter = c.parts[step].drafter
        self.looked_up = bool(text_part(drafter)) and not model_part(drafter)  # then nothing is rounded
        self.told = not np.isnan(self.score + self.prob).any()


def _tie(aligned: Aligned, index: int) -> tuple[float, float, int]:
    """The tie at which the trees of a step part: how far apart it is, and may be by rounding at most; at which level.

    What is in a tree ranks above what is left out, so rounding swaps two nodes only where their scores are nearly the
    same; the nodes below them follow. Children of one parent are of one distribution: their probabilities, each from
    the side that has it, cannot sum to more than 1.
    """
    here, rounding = aligned.steps, BEYOND * aligned.tolerance * float(aligned.steps.hottest[index])
    places = zip(here.sides, aligned.paths, here.step, strict=True)
    a, b = (_Tree(side, paths, int(step[index])) for side, paths, step in places)
    shared = min(len(a.path), len(b.path))
    first = int(np.argmax(np.append(a.path[:shared] != b.path[:shared], True)))
    if a.drawn or b.drawn:  # was the coin of the first draw that differs at the border of another token?
        if first == shared:
            return FAR  # one has nodes that the other does not
        margin, depth = min(float(tree.margin[first]) for tree in (a, b)), int(a.depth[first])
        return margin, rounding * depth, depth
    if a.looked_up and b.looked_up:
        return FAR
    if not (a.told and b.told):
        return UNKNOWN
    deepest = max(int(tree.depth.max(initial=1)) for tree in (a, b))
    only_a, only_b = ~np.isin(a.path, b.path), ~np.isin(b.path, a.path)
    _, family = np.unique(np.concatenate([a.above, b.above[only_b]]), return_inverse=True)
    masses = np.bincount(family, np.concatenate([a.prob, b.prob[only_b]]))
    if (masses > 1 + rounding * deepest).any() or only_a.any() != only_b.any():
        return FAR  # with the same plan one has fewer nodes
    best = [
        float(tree.score[only].max() if only.any() else tree.score[first])  # else the same nodes in another order
        for tree, only in ((a, only_a), (b, only_b))
    ]
    return abs(best[0] - best[1]), OF_LOG * rounding * deepest, deepest
