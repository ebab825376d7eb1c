"""What the drafters gave at equal contexts: the features that fed them, their probabilities and entropies."""

from __future__ import annotations

import numpy as np

from specscope.analyze.compare.columns import NORMS, Side
from specscope.analyze.compare.contexts import Aligned, Hashes
from specscope.analyze.compare.parting import ENTROPY, heat, is_cut, mix
from specscope.analyze.compare.places import EDGE, RARE, Place, column, number, of_nodes, of_requests, per_request
from specscope.analyze.compare.result import Field
from specscope.trace.record.records import NORM_ROUNDING
from specscope.trace.record.tree import Bools, Drawn

FEATURES = "what feeds the drafter"


def drafter(aligned: Aligned) -> list[Field]:
    """All of them."""
    return [*_features(aligned), *_probabilities(aligned), *_entropy(aligned)]


def _probabilities(aligned: Aligned) -> list[Field]:
    """q as sampled from, and the drafter's own probability.

    Compared at nodes of the same depth: a head goes on from the target's features at the root and from its own below
    it, so the same text at another depth may have another probability. A head runs once more a level, on what it gave
    at the level above: its rounding grows with the depth.
    """
    here = of_nodes(aligned)
    drawn = column(aligned, "drawn")
    sampled: Bools = (drawn[0] != Drawn.DETERMINISTIC) & (drawn[1] != Drawn.DETERMINISTIC)
    comparable = (here[0].depth == here[1].depth) & _same_elders(aligned) & of_requests(here[:1], aligned.alike)[0]
    cut = (per_request(here, is_cut) > 0) & sampled
    tolerance = aligned.tolerance * per_request(here, heat) * here[0].depth
    q, prob = column(aligned, "q"), column(aligned, "prob")
    known = ~(np.isnan(prob[0]) | np.isnan(prob[1])) & comparable
    edge = "top-k, top-p or min-p cut it: rounding decides at the edge"
    found = [
        number(here, "drafter q", *q, sampled & comparable & ~cut, tolerance, note="as sampled from", rare=RARE),
        number(here, "drafter q, cut", *q, sampled & comparable & cut, tolerance, note=edge, rare=EDGE),
        number(here, "draft p", *prob, known & ~cut, tolerance, note="its own, of the token", rare=RARE),
    ]
    return [field for field in found if field.compared]


def _same_elders(aligned: Aligned) -> Bools:
    """[nodes] whether the same elder siblings were drawn before it: of a draw without replacement q holds what they
    left. Of other nodes it does not matter."""
    each = []
    for side, at in zip((aligned.a, aligned.b), aligned.nodes, strict=True):
        elders = _elders(side)
        elders[side.nodes["drawn"] != Drawn.WITHOUT_REPLACEMENT] = 0
        each.append(elders[at])
    return np.asarray(each[0] == each[1], np.bool_)


def _elders(side: Side) -> Hashes:
    """[N] of the tokens of each node's elder siblings, in draw order."""
    family = np.where(side.above < 0, -1 - side.node_step, side.above)
    order = np.argsort(family, kind="stable")
    own = mix(side.nodes["token"][order].astype(np.int64)) * (mix(side.sibling[order].astype(np.int64)) | np.uint64(1))
    with np.errstate(over="ignore"):
        sums = np.cumsum(own) - own  # of all before it; less those of other families
        first = np.maximum.accumulate(np.where(side.sibling[order] == 0, np.arange(len(order)), 0))
        hashes = np.empty(len(order), np.uint64)
        hashes[order] = sums - sums[first]
    return hashes


def _entropy(aligned: Aligned) -> list[Field]:
    """Of whole distributions that were sampled from."""
    at = aligned.given.parents
    here = Place(aligned.a, at[0][:0], at[0], "parents"), Place(aligned.b, at[1][:0], at[1], "parents")
    if not len(at[0]):
        return []
    a, b = (place.side.parents["q_entropy"][place.at].astype(np.float64) for place in here)
    where = (a > 0) & (b > 0) & (here[0].depth == here[1].depth) & of_requests(here[:1], aligned.alike)[0]
    where &= ~(per_request(here, is_cut) > 0)
    wide = ENTROPY * aligned.tolerance * per_request(here, heat) * (here[0].depth + 1)
    found = number(here, "drafter entropy", a, b, where, wide, rare=RARE)
    return [found] if found.compared else []


def _features(aligned: Aligned) -> list[Field]:
    """What fed an EAGLE head: the norms of the target's hidden states, row by row, relative to the norm."""
    sides, at = (aligned.a, aligned.b), aligned.fed
    norms = [
        np.array([side.fed[name][rows] for name in NORMS], np.float64) for side, rows in zip(sides, at, strict=True)
    ]
    known: Bools = ~(np.isnan(norms[0]) | np.isnan(norms[1]))
    where: Bools = np.any(known, axis=0)
    if not where.any():
        return []
    scale = np.maximum(np.maximum(*norms), np.finfo(np.float32).tiny)
    apart = np.where(known, np.abs(norms[0] - norms[1]) / scale, 0).max(axis=0)
    steps = [side.fed_step[rows] for side, rows in zip(sides, at, strict=True)]
    here = Place(sides[0], steps[0][:0], steps[0], "steps"), Place(sides[1], steps[1][:0], steps[1], "steps")
    dtypes = {side.dtype(request) for side in sides for request in side.requests}
    tolerance = max((NORM_ROUNDING.get(dtype, max(NORM_ROUNDING.values())) for dtype in dtypes), default=0.0)
    note = "the norms of the rows that fed the head, relative to the norm"
    same = np.zeros(len(apart))
    return [number(here, FEATURES, apart, same, where, tolerance, note=note, rare=RARE)]
