"""What differs at equal contexts: p, q, coin, verdict, tree and schedule, with the places where they do."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import NORMS, Longs, Side
from specscope.analyze.compare.contexts import Aligned, Hashes
from specscope.analyze.compare.parting import ENTROPY, heat, is_cut, mix
from specscope.analyze.compare.places import (
    EDGE,
    RARE,
    Pair,
    Place,
    Places,
    column,
    number,
    of_nodes,
    of_requests,
    of_steps,
    other,
    per_request,
)
from specscope.analyze.compare.result import Field
from specscope.analyze.compare.trees import tree_hash, trees
from specscope.trace.record.rules import NORM_ROUNDING, looks_ahead
from specscope.trace.record.tree import Bools, Drawn

# What the drafters gave at equal contexts: the features that fed them, their probabilities and entropies.

FEATURES = "what feeds the drafter"


def drafter(aligned: Aligned) -> list[Field]:
    """What the drafters gave: features, probabilities and entropies."""
    return [*_features(aligned), *_probabilities(aligned), *_entropy(aligned)]


def _probabilities(aligned: Aligned) -> list[Field]:
    """q as sampled from, and the drafter's own probability.

    Compared at nodes of the same depth: a head starts from the target's features at the root and from its own below
    it, so the same text at another depth may have another probability. A head runs once per level, on its output at
    the level above: its rounding grows with the depth.
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
    candidates = [
        number(here, "drafter q", *q, sampled & comparable & ~cut, tolerance, note="as sampled from", rare=RARE),
        number(here, "drafter q, cut", *q, sampled & comparable & cut, tolerance, note=edge, rare=EDGE),
        number(here, "draft p", *prob, known & ~cut, tolerance, note="its own, of the token", rare=RARE),
    ]
    return [field for field in candidates if field.compared]


def _same_elders(aligned: Aligned) -> Bools:
    """[nodes] whether the same elder siblings were drawn before the node.

    They matter only to a draw without replacement, which is from what they left of q.
    """
    each = []
    for side, nodes in zip((aligned.a, aligned.b), aligned.nodes, strict=True):
        elders = _elders(side)
        elders[side.nodes["drawn"] != Drawn.WITHOUT_REPLACEMENT] = 0
        each.append(elders[nodes])
    return np.asarray(each[0] == each[1], np.bool_)


def _elders(side: Side) -> Hashes:
    """[N] a hash of the tokens of each node's elder siblings, in draw order."""
    family = np.where(side.above < 0, -1 - side.node_step, side.above)
    order = np.argsort(family, kind="stable")
    node_hashes = mix(side.nodes["token"][order].astype(np.int64)) * (
        mix(side.sibling[order].astype(np.int64)) | np.uint64(1)
    )
    with np.errstate(over="ignore"):
        sums = np.cumsum(node_hashes) - node_hashes  # of all before it; less those of other families
        first = np.maximum.accumulate(np.where(side.sibling[order] == 0, np.arange(len(order)), 0))
        hashes = np.empty(len(order), np.uint64)
        hashes[order] = sums - sums[first]
    return hashes


def _entropy(aligned: Aligned) -> list[Field]:
    """The entropy of whole distributions that were sampled from."""
    parents = aligned.given.parents
    here = (
        Place(aligned.a, parents[0][:0], parents[0], "parents"),
        Place(aligned.b, parents[1][:0], parents[1], "parents"),
    )
    if not len(parents[0]):
        return []
    a, b = (place.side.parents["q_entropy"][place.indices].astype(np.float64) for place in here)
    where = (a > 0) & (b > 0) & (here[0].depth == here[1].depth) & of_requests(here[:1], aligned.alike)[0]
    where &= ~(per_request(here, is_cut) > 0)
    wide = ENTROPY * aligned.tolerance * per_request(here, heat) * (here[0].depth + 1)
    entropy = number(here, "drafter entropy", a, b, where, wide, rare=RARE)
    return [entropy] if entropy.compared else []


def _features(aligned: Aligned) -> list[Field]:
    """What fed an EAGLE head: the norms of the target's hidden states, row by row, as relative differences."""
    sides, fed = (aligned.a, aligned.b), aligned.fed
    norms = [
        np.array([side.fed[name][rows] for name in NORMS], np.float64) for side, rows in zip(sides, fed, strict=True)
    ]
    known: Bools = ~(np.isnan(norms[0]) | np.isnan(norms[1]))
    where: Bools = np.any(known, axis=0)
    if not where.any():
        return []
    scale = np.maximum(np.maximum(*norms), np.finfo(np.float32).tiny)
    apart = np.where(known, np.abs(norms[0] - norms[1]) / scale, 0).max(axis=0)
    steps = [side.fed_step[rows] for side, rows in zip(sides, fed, strict=True)]
    here = Place(sides[0], steps[0][:0], steps[0], "steps"), Place(sides[1], steps[1][:0], steps[1], "steps")
    dtypes = {side.dtype(request) for side in sides for request in side.requests}
    tolerance = max((NORM_ROUNDING.get(dtype, max(NORM_ROUNDING.values())) for dtype in dtypes), default=0.0)
    note = "the norms of the rows that fed the head, relative to the norm"
    same = np.zeros(len(apart))
    return [number(here, FEATURES, apart, same, where, tolerance, note=note, rare=RARE)]


FIRST = "target's first token"


def fields(aligned: Aligned) -> list[Field]:
    """What is compared at equal contexts."""
    return [*_target(aligned), *_whole(aligned), *drafter(aligned), *_decisions(aligned), *_steps(aligned)]


def _target(aligned: Aligned) -> list[Field]:
    """p wherever both sides have it. Where the first two tokens are nearly equal, rounding turns a greedy 0 into 1."""
    sides, places = (aligned.a, aligned.b), aligned.given.places
    columns = []
    for name, last, unknown in (("p", "final_whole", 0.0), ("raw_p", None, np.nan), ("gap", "final_gap", np.nan)):
        both = []
        for side, drawn, rows in zip(sides, aligned.given.drawn, places, strict=True):
            finals = np.full(len(drawn), unknown) if last is None else side.steps[last][drawn]
            both.append(np.concatenate([side.nodes[name], finals]).astype(np.float64)[rows])
        columns.append((both[0], both[1]))
    p, raw, gap = columns
    near = np.minimum(*(np.nan_to_num(values, nan=1.0) for values in gap)) < 2 * aligned.tolerance
    # A greedy p without raw probabilities: whether a 0 that became 1 was a near tie cannot be known.
    if not (aligned.a.has_p and aligned.b.has_p):
        near[:] = True  # nothing is compared then
    near |= np.isnan(gap[0]) & np.isnan(gap[1]) & np.isin(p[0], (0, 1)) & np.isin(p[1], (0, 1)) & (p[0] != p[1])
    here = tuple(Place(side, drawn, rows) for side, drawn, rows in zip(sides, aligned.given.drawn, places, strict=True))
    where = ~near & of_requests(here[:1], aligned.alike)[0]
    return _target_fields((here[0], here[1]), p, raw, where, aligned.tolerance)


def _target_fields(here: Places, p: Pair, raw: Pair, where: Bools, tolerance: float) -> list[Field]:
    """p where nothing cuts it, p where something does, and what it was before temperature and rules."""
    hot, cut = per_request(here, heat), per_request(here, is_cut) > 0
    known = ~(np.isnan(raw[0]) | np.isnan(raw[1]))
    note = f"rounding of the dtypes is {tolerance:g}"
    edge = "top-k, top-p or min-p cut it: rounding decides at the edge"
    candidates = [
        number(here, "target p", *p, where & ~cut, tolerance * hot, note=note, rare=RARE),
        number(here, "target p, cut", *p, where & cut, tolerance * hot, note=edge, rare=EDGE),
        number(here, "target p, raw", *raw, known, tolerance, note=note, rare=RARE),
    ]
    return [field for field in candidates if field.compared or field.name == "target p"]


def _whole(aligned: Aligned) -> list[Field]:
    """Whole distributions: first token and entropy, which compare even where neither side tried the other's tokens."""
    parents = aligned.given.parents
    if not len(parents[0]):
        return []
    here = (
        Place(aligned.a, parents[0][:0], parents[0], "parents"),
        Place(aligned.b, parents[1][:0], parents[1], "parents"),
    )

    def column(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        x, y = (side.parents[name][rows] for side, rows in zip((aligned.a, aligned.b), parents, strict=True))
        return x.astype(np.float64), y.astype(np.float64)

    top, gap = column("top"), np.minimum(*column("top_gap"))
    every, wide = np.ones(len(parents[0]), np.bool_), ENTROPY * aligned.tolerance * per_request(here, heat)
    greedy = (column("choice_p")[0] == 1) & (column("choice_p")[1] == 1)
    where = ~greedy & ~(per_request(here, is_cut) > 0) & of_requests(here[:1], aligned.alike)[0]
    far = ~(gap < 2 * aligned.tolerance)  # both tokens' probabilities move
    candidates = [
        number(here, "target p, first token", *column("top_p"), top[0] == top[1], aligned.tolerance, rare=RARE),
        number(here, "target entropy", *column("entropy"), where, wide, rare=RARE),
        other(here, FIRST, top[0] != top[1], every, note="raw; near ties among them", rare=RARE, far=far),
    ]
    return [field for field in candidates if field.compared]


def _decisions(aligned: Aligned) -> list[Field]:
    here = of_nodes(aligned)
    a, b = aligned.a, aligned.b
    rows = [side.node_step[nodes] for side, nodes in zip((a, b), aligned.nodes, strict=True)]
    positions = [_position(side)[row] for side, row in zip((a, b), rows, strict=True)]
    numbers = [
        nodes - side.steps["first_node"][row] for side, nodes, row in zip((a, b), aligned.nodes, rows, strict=True)
    ]
    forced = a.steps["forced"][rows[0]] | b.steps["forced"][rows[1]]
    # A coin belongs to a position and a node's number in its tree: it is the same where these are.
    coins = aligned.a.has_coins and aligned.b.has_coins
    same_coin = aligned.same_seed & coins & (positions[0] == positions[1]) & (numbers[0] == numbers[1])
    tried = a.tried[aligned.nodes[0]] & b.tried[aligned.nodes[1]]
    coin = column(aligned, "coin")
    note = "of the same seed, position and number in the tree"
    decisions = [number(here, "coin", *coin, same_coin & tried, 1e-12, note=note, rare=RARE)]
    equal = tried & ~forced & coins & (np.abs(coin[0] - coin[1]) <= 1e-12) & _same_below(aligned, rows)
    for name in ("p_trial", "q_trial"):
        x, y = column(aligned, name)
        equal &= np.abs(x - y) <= 1e-7
    outcome = column(aligned, "outcome")
    note = "p, q and coin are the same there"
    decisions.append(other(here, "verdict", outcome[0] != outcome[1], equal, note=note, rare=RARE))
    anyway = tried & ~forced
    decisions.append(
        other(here, "outcome", outcome[0] != outcome[1], anyway, note="follows from p, q, coin and verdict")
    )
    return decisions


def _same_below(aligned: Aligned, rows: list[Longs]) -> Bools:
    """[nodes] False where the rule judges what is drafted below a node first, and that is not the same."""
    sides = (aligned.a, aligned.b)
    ahead = [np.array([looks_ahead(name) for name in side.names] or [False])[side.steps["rule"]] for side in sides]
    trees = [tree_hash(side)[row] for side, row in zip(sides, rows, strict=True)]
    either: Bools = ahead[0][rows[0]] | ahead[1][rows[1]]
    same: Bools = ~either | (trees[0] == trees[1])
    return same


def _steps(aligned: Aligned) -> list[Field]:
    """Whole steps: the trees, then what follows from all that was judged before, and the load."""
    here = of_steps(aligned)
    a, b = aligned.a, aligned.b
    rows = aligned.steps
    every = np.ones(len(rows[0]), np.bool_)
    hashes = [tree_hash(side)[row] for side, row in zip((a, b), rows, strict=True)]
    same = hashes[0] == hashes[1]
    tokens = [side.steps["token"][row] for side, row in zip((a, b), rows, strict=True)]
    depth = [side.steps["accepted"][row] for side, row in zip((a, b), rows, strict=True)]
    candidates = [
        *trees(aligned),
        other(here, "accepted tokens", depth[0] != depth[1], same, note="same tree; follows from the verdicts"),
        other(
            here,
            "final token",
            tokens[0] != tokens[1],
            same & (depth[0] == depth[1]),
            note="same tree, as many accepted; follows from p and coin",
        ),
    ]
    about = (("batch", "requests in step"), ("prefill", "prefill tokens"), ("context", "cached tokens"))
    for name, says in about:
        x, y = (side.steps[name][row] for side, row in zip((a, b), rows, strict=True))
        candidates.append(other(here, says, x != y, every, note="load: not judged"))
    return [field for field in candidates if field.compared]


def _position(side: Side) -> Longs:
    position: Longs = side.steps["context"].astype(np.int64) + side.steps["prefill"]
    return position
