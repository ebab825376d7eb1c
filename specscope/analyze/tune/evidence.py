"""What a capture says about trees that were not drafted: each step's candidates and the probability of reaching them.

A candidate is a node that the drafter considered: a node of the tree, or one that re-ranking left out. Its *reach* is
the probability that a tree containing its path accepts it. If the drafts are deterministic, that is the product of p
along the path, whatever its siblings are: siblings x1, x2, .. are tried one after the other, a rejected one is zeroed
out of p, and so xi is accepted with probability
(1 - p(x1) - .. - p(xi-1)) * p(xi) / (1 - p(x1) - .. - p(xi-1)) = p(xi). Hence

    E[tokens accepted of a tree] = sum of reach over its nodes,

for every tree within the candidates at once, and with less noise than the outcomes have (a Rao-Blackwell estimate: the
coins are averaged out). Block and traversal verification accept as many from deterministic drafts: no lossless rule can
accept a path more often than the target generates it, and the standard rule already does. Token matching accepts a
child with probability p(child) however it was drawn.

What other trees would have drawn where drafts were sampled is not known.

For greedy requests the reach is 0 or 1, and known for left-out candidates too: the path is what the target generated,
or it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, holding, joined, lengths, levels, places, siblings
from specscope.analyze.evidence.columns import Columns
from specscope.errors import UserError
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.records import RequestStep
from specscope.trace.record.rules import SUM_ROUNDING, sound
from specscope.trace.record.tree import Doubles, Ints

MOST_STEPS = 4000  # that are judged, evenly spread over the run
MOST_CANDIDATES = 1_000_000  # over all steps: with huge trees fewer steps are judged
ALL_RANKS = 10**6  # known ranks of a node whose children of every rank are known


@dataclass(frozen=True)
class RecordedCandidates:
    """The candidates of S steps, padded to C per step, in the drafter's order: best first, parents before children.

    `parent` is C for the root's children and for padding, whose depth is 0. `known`: how many ranks of children are
    known for each candidate, and in column C for the root; a child of a known rank that is absent cannot be accepted.
    """

    parent: Ints  # [S, C]
    depth: Ints  # [S, C]
    rank: Ints  # [S, C] among its siblings, likeliest first
    reach: Doubles  # [S, C] nan where it is not known
    q: Doubles  # [S, C] the drafter's probability at the parent; nan where it is not known
    known: Ints  # [S, C + 1]
    largest: int  # nodes of the largest recorded tree
    request: Ints  # [S] number of the request
    tokens: Ints  # [S] that the step committed
    undrafted: Ints  # [R] steps of each request in which nothing was drafted
    drafts: int  # steps with drafts in the capture, of which S are judged
    committed: int  # tokens of those steps
    ranked: bool  # whether candidates have scores, so that dynamic trees can be judged
    lookup: bool  # the drafter is prompt lookup: what is not drafted does not exist

    # How many requests there are; the largest depth of a candidate, and the most children that the drafter considered
    requests = cached_property[int](lambda told: len(told.undrafted))
    max_depth = cached_property[int](lambda told: int(told.depth.max(initial=0)))
    max_rank = cached_property[int](lambda told: int(told.rank.max(initial=0)) + 1)

    @property
    def max_leaves(self) -> int:
        """Paths of a step's candidates, at most: prompt lookup's continuations."""
        return max(
            int(d.astype(bool).sum()) - len(set(p.tolist())) + 1 for d, p in zip(self.depth, self.parent, strict=True)
        )


def evidence(histories: Sequence[History]) -> RecordedCandidates:
    """The candidates in captures of one run configuration. Raises UserError where there are none to judge."""
    steps: list[tuple[RequestHistory, int, int]] = []
    undrafted: list[int] = []
    for history in histories:
        for request in history.requests.values():
            judged = [step for step in request.steps if step.verdict is not None]
            steps += [(request, place, len(undrafted)) for place, step in enumerate(request.steps) if _usable(step)]
            undrafted.append(sum(not len(step.tree) for step in judged))
    if not steps:
        raise UserError(_why_nothing(histories))
    every = [request.steps[place] for request, place, _ in steps]
    why = "the trees are from a text and a model" if any(part.is_ranked_with_text for part in every) else ""
    if why := why or ("the drafts were sampled" if any(part.tree.is_sampled for part in every) else ""):
        raise UserError(
            f"{why}: tune cannot tell what other trees would have held. Record the likeliest tokens of one drafter, "
            "with --tree dynamic:32 or top:..."
        )
    dropped = (0 if step.notes is None else len(step.notes.dropped_token) for step in every)  # by re-ranking
    widest = max(len(step.tree) + left_out for step, left_out in zip(every, dropped, strict=True))
    count = min(len(steps), MOST_STEPS, max(MOST_CANDIDATES // widest, 20))
    chosen = [steps[i * len(steps) // count] for i in range(count)]
    parts = [every[i * len(steps) // count] for i in range(count)]
    return RecordedCandidates(
        **_laid(Columns(parts), *_texts(chosen)),
        request=np.array([number for _, _, number in chosen], np.int32),
        tokens=np.array([len(part.tokens()) for part in parts], np.int32),
        undrafted=np.array(undrafted, np.int32),
        drafts=len(steps),
        committed=sum(len(part.tokens()) for part in every),
        ranked=all(part.notes is not None for part in parts),
        lookup=all(part.drafter == "ngram" for part in parts),
    )


def _usable(step: RequestStep) -> bool:
    verdict = step.verdict
    if verdict is None or not len(step.tree) or step.lossy or len(verdict.forced):
        return False
    scores = [] if step.notes is None else [*step.notes.score.tolist(), *step.notes.dropped_score.tolist()]
    wrong = np.isnan(sound(verdict.p)).any() or any(not score <= SUM_ROUNDING for score in scores)
    return not wrong  # values that are no probabilities say nothing about other trees


def _why_nothing(histories: Sequence[History]) -> str:
    steps = [step for history in histories for request in history.requests.values() for step in request.steps]
    if not any(len(step.tree) for step in steps):
        return "the capture has no drafts: record with a drafter, such as --drafter eagle --tree dynamic:32"
    return (
        "every draft of the capture was judged by a lossy rule or forced, or has numbers that are not probabilities, "
        "so its acceptance says nothing about a drafter"
    )


def _texts(chosen: Sequence[tuple[RequestHistory, int, int]]) -> tuple[Indices, Indices, Indices]:
    """(What greedy targets generated; of each step, where the text after its root begins there, and where it ends)."""
    text: list[int] = []
    bounds: list[tuple[int, int]] = []
    begins: dict[int, list[int]] = {}  # of each request's steps
    for request, place, number in chosen:
        if request.info is None or not request.info.params.greedy:
            bounds.append((0, 0))
            continue
        if number not in begins:
            begins[number] = [len(text)]
            for step in request.steps:
                text += step.tokens()
                begins[number].append(len(text))
        bounds.append((begins[number][place], begins[number][-1]))
    start, end = np.array(bounds, np.int64).T
    return np.array(text, np.int64), start, end


def _laid(c: Columns, text: Indices, start: Indices, end: Indices) -> dict[str, Any]:
    """The candidates of all steps: nodes of the tree, and what re-ranking left out."""
    noted, steps = holding(c.picked, "notes")[c.step], np.arange(len(c))
    counts = lengths(c.picked, "notes", "dropped_token")
    parents, tokens, scores = (
        joined(c.picked, "notes", f"dropped_{name}", kind)
        for name, kind in (("parent", np.int64), ("token", np.int64), ("score", np.float64))
    )
    of, nodes = np.repeat(steps, counts), len(c.token)
    size, first = np.diff(c.start)[of], (nodes + np.cumsum(counts) - counts)[of]
    over = np.where(parents < size, c.start[of] + parents, first + parents - size)
    step, above = np.concatenate([c.step, of]), np.concatenate([c.above, np.where(parents < 0, -1, over)])
    score = np.concatenate([np.where(noted, c.score, 0.0), scores])
    rank, depth = siblings(np.where(above < 0, -1 - step, above)), levels(above)
    q = np.exp(np.minimum(score - np.where(above < 0, 0.0, score[above]), 0))
    q[:nodes][~noted] = np.nan
    made, reach = np.zeros(len(above), np.int64), np.zeros(len(above))
    after = start[step] + depth - 1  # the token of a greedy target at that place
    told, same = after < end[step], np.zeros(len(above), np.bool_)
    same[told] = text[after[told]] == np.concatenate([c.token, tokens])[told]
    for level in range(1, int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        up = above[here]
        order = np.lexsort((here, np.where(up < 0, 0, made[up]), step[here]))  # as a drafter makes them
        made[here[order]] = int(made.max(initial=0)) + 1 + np.arange(len(here))
        over_reach = np.where(up < 0, 1.0, reach[up])
        guess = np.where(told[here], same[here], np.where(over_reach == 0, 0.0, np.nan))
        reach[here] = over_reach * np.where(here < nodes, c.p[np.minimum(here, nodes - 1)], guess)
    known = np.bincount(above[above >= 0], minlength=len(above))
    of_root = np.bincount(step[above < 0], minlength=len(c))
    looks_up = np.array([part.drafter == "ngram" for part in c.parts])
    known[looks_up[step]], of_root[looks_up] = ALL_RANKS, ALL_RANKS
    columns = {"depth": depth, "rank": rank, "reach": reach, "q": q}
    order = np.lexsort((made, -score, step))
    return {"largest": int(np.diff(c.start).max())} | _padded(step, above, order, known, of_root, columns)


def _padded(
    step: Indices, above: Indices, order: Indices, known: Indices, of_root: Indices, columns: dict[str, NDArray[Any]]
) -> dict[str, Any]:
    """The candidates of each step in a row, in this order: by score, equal scores as they were made."""
    rows, place = len(of_root), np.zeros(len(step), np.int64)
    place[order] = places(step[order])
    width = int(place.max(initial=-1)) + 1
    parent = np.full((rows, width), width, np.int32)
    parent[step, place] = np.where(above < 0, width, place[above])
    every = np.zeros((rows, width + 1), np.int32)
    every[step, place], every[:, width] = known, of_root
    kinds = {"depth": np.int32, "rank": np.int32}
    laid = {name: np.zeros((rows, width), kinds.get(name, column.dtype)) for name, column in columns.items()}
    for name, column in columns.items():
        laid[name][step, place] = column
    return {"parent": parent, "known": every, **laid}
