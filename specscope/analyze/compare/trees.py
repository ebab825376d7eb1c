"""Draft trees at equal contexts, and the drafter on the whole: whether the rounding of its dtype explains differences.

A bound on rounding lets a single decision pass. What rounding does as a rule is far less, and many decisions show it:
most near ties are nearer than three times that, and the log odds of a whole request move by less than twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Aligned
from specscope.analyze.compare.fields import COMMON, FEWEST, RARE, ContextRows, many, nodes, other, tree_hash
from specscope.analyze.compare.parting import BEYOND
from specscope.analyze.compare.result import Field, StepStage
from specscope.analyze.compare.side import Side
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import ROOT, Bools, Doubles

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


class Why(IntEnum):
    """Why two trees of one context differ."""

    ROUNDING = 0
    SELDOM = 1  # rounding seldom does it
    FAR = 2  # no rounding explains it
    UNKNOWN = 3  # what would decide it is not recorded


def trees(aligned: Aligned) -> list[Field]:
    """Trees that must be the same, and those that need not be; and the drafter's p where it moves on the whole."""
    here = ContextRows(aligned, "steps", aligned.steps)
    hashes = [tree_hash(side)[at] for side, at in zip(here.sides, here.at, strict=True)]
    differ: Bools = np.asarray(hashes[0] != hashes[1], np.bool_)
    judged, hot, usual = _judged(here), here.hottest(), _usual(aligned)
    why = []
    for index in np.flatnonzero(differ & judged).tolist():
        rows = int(here.at[0][index]), int(here.at[1][index])
        why.append(_why(here.sides, rows, aligned.tolerance * float(hot[index]), usual))
    made = other(here, TREE, StepStage.TREE, differ, judged, note="its tokens or its shape; near ties among them")
    narrow = aligned.tolerance <= NARROW
    far, unknown, seldom = why.count(Why.FAR), why.count(Why.UNKNOWN), why.count(Why.SELDOM)
    further, known = seldom + far, len(why) - unknown
    odd = not narrow and further >= FEWEST and _at_least(further, known, FURTHER) < CHANCE
    suspect = many(far, made.compared, RARE if narrow else COMMON) or odd
    unsure = not suspect and many(far + unknown, made.compared, RARE if narrow else COMMON)
    made = replace(made, suspect=suspect, unsure=unsure, note=UNTOLD if unsure else made.note)
    if odd and not made.condition:
        made = replace(made, condition=f"{further:,} of {known:,} are further apart than near ties")
    note = "of other seeds, costs, load, shared texts, or an engine that drafts nothing behind a prompt"
    return [made, other(here, FREE, None, differ, ~judged, note=note), *([] if narrow else _drift(aligned, usual))]


def _at_least(count: int, of: int, share: float) -> float:
    """The probability of so many or more, each with this probability."""
    return sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(count, of + 1))


def _drift(aligned: Aligned, usual: float) -> list[Field]:
    """The drafter's own p, where the requests' median of how far its log odds moved is more than twice the usual."""
    here = nodes(aligned)
    apart, request = _moved(here, "draft_prob"), here.sides[0].request[here.rows[0]]
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
    here, above = nodes(aligned), ContextRows(aligned, "parents", aligned.parents)
    root = _moved(here, "draft_prob")[(here.depth[0] == 1) & (here.depth[1] == 1)]
    moved: list[Doubles] = [root]
    if len(above.at[0]):
        top, top_p = ([getattr(side.columns.parents, name)[:, 0] for side in above.sides] for name in ("top", "top_p"))
        first = above.values(top)
        moved.append(_apart(*above.values(top_p))[first[0] == first[1]])
    known = [float(np.nanmedian(each)) if len(each) and not np.isnan(each).all() else 0.0 for each in moved]
    return max(USUAL * aligned.tolerance, min(known) if len(known) > 1 else 0.0)


def _moved(here: ContextRows, name: str) -> Doubles:
    return _apart(*here.column(name))


def _apart(a: Doubles, b: Doubles) -> Doubles:
    """How far the log odds of two probabilities are apart."""
    x, y = (np.clip(p, SMALLEST, 1 - SMALLEST) for p in (a, b))
    return np.asarray(np.abs(np.log(x / (1 - x)) - np.log(y / (1 - y))), np.float64)


def _judged(here: ContextRows) -> Bools:
    """[steps] whether the context alone decides what is drafted; where drafts are sampled, with the same coins."""
    free, drawn = _waits(here), np.zeros(len(here.at[0]), np.bool_)
    for side, rows in zip(here.sides, here.at, strict=True):
        free |= side.varies[rows]
        drawn |= side.columns.any_in_step(side.columns.sampled)[rows]
    return np.asarray(~free & here.alike & (here.exact | ~drawn))


def _waits(here: ContextRows) -> Bools:
    """[steps] whether one of two engines drafted nothing behind a prompt, as it never does."""
    engines = [{"" if run.is_ours else run.backend for run in side.runs} for side in here.sides]
    drafts, prefill = here.of_steps("drafts"), here.of_steps("prefill")
    behind = (drafts[0] != drafts[1]) & ((prefill[0] > 0) | (prefill[1] > 0))
    return np.asarray(behind & (engines[0] != engines[1]))


Path = tuple[int, ...]  # drafted tokens down to a node


@dataclass(frozen=True)
class _Tree:
    """The nodes of a step, by column."""

    drafter: str
    columns: Mapping[str, NDArray[Any]]

    @staticmethod
    def of(side: Side, row: int) -> _Tree:
        """The tree of a step."""
        c = side.columns
        span = slice(c.start[row], c.start[row + 1])
        held = {name: getattr(c, name)[span] for name in ("token", "parent", "sampled", "score", "depth")}
        return _Tree(c.parts[row].drafter, {**held, "draw_margin": side.draw_margin[span], "prob": c.draft_prob[span]})

    def __len__(self) -> int:
        return len(self.columns["token"])

    @property
    def drawn(self) -> bool:
        """Whether any node is a draw."""
        return bool(self.columns["sampled"].any())

    @property
    def looked_up(self) -> bool:
        """Whether it is from a text alone: nothing is rounded there."""
        return bool(text_part(self.drafter)) and not model_part(self.drafter)

    @cached_property
    def paths(self) -> list[Path]:
        """Of each node."""
        paths: list[Path] = []
        for token, parent in zip(self.columns["token"].tolist(), self.columns["parent"].tolist(), strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), token))
        return paths

    def by_path(self, name: str) -> dict[Path, float]:
        """A column."""
        return dict(zip(self.paths, self.columns[name].tolist(), strict=True))


def _why(sides: tuple[Side, Side], rows: tuple[int, int], tolerance: float, usual: float) -> Why:
    """Of a step of each side."""
    a, b = (_Tree.of(side, row) for side, row in zip(sides, rows, strict=True))
    first = next(
        (index for index, (x, y) in enumerate(zip(a.paths, b.paths, strict=False)) if x != y), min(len(a), len(b))
    )
    if a.drawn or b.drawn:
        return _of_draws(a, b, first, tolerance, usual)
    if a.looked_up and b.looked_up:
        return Why.FAR
    if any(np.isnan(tree.columns[name]).any() for tree in (a, b) for name in ("score", "prob")):
        return Why.UNKNOWN
    return _of_ranks(a, b, first, BEYOND * tolerance, usual)


def _of_draws(a: _Tree, b: _Tree, first: int, tolerance: float, usual: float) -> Why:
    """Why the first draw that differs does: whether its coin was at the border of another token on either side."""
    if first == min(len(a), len(b)):
        return Why.FAR  # one has nodes that the other does not
    margin = min(float(tree.columns["draw_margin"][first]) for tree in (a, b))
    if np.isnan(margin):
        return Why.UNKNOWN
    depth = int(a.columns["depth"][first])
    return _grade(margin, BEYOND * tolerance * depth, usual, depth)


def _grade(apart: float, bound: float, usual: float, depth: int) -> Why:
    """Of a tie that is so far apart. Rounding adds up level by level, as a random walk does."""
    if apart > bound:
        return Why.FAR
    return Why.ROUNDING if apart <= NEAR * usual * math.sqrt(depth) else Why.SELDOM


def _of_ranks(a: _Tree, b: _Tree, first: int, rounding: float, usual: float) -> Why:
    """Whether the best nodes that only one side has have nearly equal scores.

    What is in a tree ranks above what is left out, so rounding swaps two nodes only where their scores are nearly the
    same; the nodes below them follow. Children of one parent are of one distribution: their probabilities, each from
    the side that has it, cannot sum to more than 1.
    """
    deepest = max(int(tree.columns["depth"].max(initial=1)) for tree in (a, b))
    masses: dict[Path, float] = defaultdict(float)
    for path, prob in (b.by_path("prob") | a.by_path("prob")).items():
        masses[path[:-1]] += prob
    if any(mass > 1 + rounding * deepest for mass in masses.values()):
        return Why.FAR
    scores_a, scores_b = a.by_path("score"), b.by_path("score")
    alone = [
        [score for path, score in x.items() if path not in y] for x, y in ((scores_a, scores_b), (scores_b, scores_a))
    ]
    if not alone[0] and not alone[1]:  # the same nodes in another order
        alone = [[float(tree.columns["score"][first])] for tree in (a, b)]
    if not alone[0] or not alone[1]:
        return Why.FAR  # with the same plan one has fewer nodes
    return _grade(abs(max(alone[0]) - max(alone[1])), OF_LOG * rounding * deepest, usual, deepest)
