"""Draft trees at equal contexts: whether rounding explains where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Aligned
from specscope.analyze.compare.fields import COMMON, RARE, Places, many, other, tree_hash
from specscope.analyze.compare.parting import BEYOND
from specscope.analyze.compare.result import Field, Stage
from specscope.analyze.compare.side import Side
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import ROOT, Bools

TREE, FREE = "draft tree", "draft tree, not judged"
UNTOLD = "whether at near ties is not recorded"
# d log p = dp / p: what moves a p of 1/4 by the tolerance moves its logarithm by four times that
OF_LOG = 4.0
NARROW = ROUNDING["float32"]  # with a wider rounding a near tie at one level may change the levels below it


class Why(IntEnum):
    """Why two trees of one context differ."""

    ROUNDING = 0
    FAR = 1  # no rounding explains it
    UNKNOWN = 2  # what would decide it is not recorded


def trees(aligned: Aligned) -> list[Field]:
    """Trees that must be the same, and those that need not be."""
    here = Places(aligned, "steps", aligned.steps)
    hashes = [tree_hash(side)[at] for side, at in zip(here.sides, here.at, strict=True)]
    differ: Bools = np.asarray(hashes[0] != hashes[1], np.bool_)
    judged = _judged(here)
    why = np.zeros(len(differ), np.int8)
    hot = here.hottest()
    for index in np.flatnonzero(differ & judged).tolist():
        rows = int(here.at[0][index]), int(here.at[1][index])
        why[index] = _why(here.sides, rows, aligned.tolerance * float(hot[index]))
    made = other(here, TREE, Stage.TREE, differ, judged, note="its tokens or its shape; near ties among them")
    rare = RARE if aligned.tolerance <= NARROW else COMMON
    far, unknown = (int((why == kind).sum()) for kind in (Why.FAR, Why.UNKNOWN))
    suspect = many(far, made.compared, rare)
    unsure = not suspect and many(far + unknown, made.compared, rare)
    made = replace(made, suspect=suspect, unsure=unsure, note=UNTOLD if unsure else made.note)
    note = "of other seeds, costs, load, shared texts, or an engine that drafts nothing behind a prompt"
    return [made, other(here, FREE, None, differ, ~judged, note=note)]


def _judged(here: Places) -> Bools:
    """[steps] whether the context alone decides what is drafted; where drafts are sampled, with the same coins."""
    free, drawn = _waits(here), np.zeros(len(here.at[0]), np.bool_)
    for side, rows in zip(here.sides, here.at, strict=True):
        free |= side.varies[rows]
        draws = np.zeros(len(side), np.bool_)
        draws[side.columns.step[side.columns.sampled]] = True
        drawn |= draws[rows]
    return np.asarray(~free & here.alike & (here.exact | ~drawn))


def _waits(here: Places) -> Bools:
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


def _why(sides: tuple[Side, Side], rows: tuple[int, int], tolerance: float) -> Why:
    """Of a step of each side."""
    a, b = (_Tree.of(side, row) for side, row in zip(sides, rows, strict=True))
    first = next(
        (index for index, (x, y) in enumerate(zip(a.paths, b.paths, strict=False)) if x != y), min(len(a), len(b))
    )
    if a.drawn or b.drawn:
        return _of_draws(a, b, first, tolerance)
    if a.looked_up and b.looked_up:
        return Why.FAR
    if any(np.isnan(tree.columns[name]).any() for tree in (a, b) for name in ("score", "prob")):
        return Why.UNKNOWN
    return _of_ranks(a, b, first, BEYOND * tolerance)


def _of_draws(a: _Tree, b: _Tree, first: int, tolerance: float) -> Why:
    """Why the first draw that differs does: whether its coin was at the border of another token on either side."""
    if first == min(len(a), len(b)):
        return Why.FAR  # one has nodes that the other does not
    margin = min(float(tree.columns["draw_margin"][first]) for tree in (a, b))
    if np.isnan(margin):
        return Why.UNKNOWN
    return Why.ROUNDING if margin < BEYOND * tolerance * int(a.columns["depth"][first]) else Why.FAR


def _of_ranks(a: _Tree, b: _Tree, first: int, rounding: float) -> Why:
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
    return Why.ROUNDING if abs(max(alone[0]) - max(alone[1])) <= OF_LOG * rounding * deepest else Why.FAR
