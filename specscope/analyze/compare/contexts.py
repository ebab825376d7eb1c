"""Two sides aligned by context: the same request, the same output so far, the same path in the tree.

Steps do not line up where acceptance differs; contexts do. At a context both sides asked the same thing, so p, q, coin
and verdict can be compared one by one, and what differs can be laid out by depth and by what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import PRECEDED, Longs, Side
from specscope.analyze.compare.parting import mix, rounding
from specscope.analyze.compare.result import Field, Match, Where
from specscope.analyze.findings import Reference
from specscope.trace.tree import Bools, Drawn

Hashes = NDArray[np.uint64]
FACTOR = 0x5851F42D4C957F2D
MASK = 2**64 - 1
FEWEST = 3  # contexts that must differ before they count against a side
RARE = 0.002  # and more than this share of them: rounding has no sharp bound


@dataclass(frozen=True)
class Aligned:
    """Rows of both sides that stand at equal contexts."""

    a: Side
    b: Side
    steps: tuple[Longs, Longs]  # rows of `steps` whose roots are at the same context
    nodes: tuple[Longs, Longs]  # nodes of the same token at the same context
    same_seed: Bools  # [nodes] whether the coins should be the same
    tolerance: float


def align(a: Side, b: Side, pairs: Sequence[tuple[int, int, Match]]) -> Aligned:
    """By hashes of (pair, output so far, path)."""
    keys = _keys(a, [first for first, _, _ in pairs]), _keys(b, [second for _, second, _ in pairs])
    steps = _join(keys[0][0], keys[1][0])
    nodes = _join(keys[0][1], keys[1][1])
    exact = np.zeros(len(a.requests), np.bool_)
    exact[[first for first, _, kind in pairs if kind is Match.EXACT]] = True
    request = a.steps["request"][a.node_step[nodes[0]]]
    dtypes = {capture.run.dtype for side in (a, b) for capture in side.captures if capture.run is not None}
    return Aligned(a, b, steps, nodes, exact[request], rounding(*(dtypes or {""})))


def _keys(side: Side, requests: Sequence[int]) -> tuple[Hashes, Hashes]:
    """Of steps and of nodes; 0 where there is none."""
    root = np.zeros(len(side.steps), np.uint64)
    for number, at in enumerate(requests):
        request = side.requests[at]
        if not request.count:
            continue
        state = _scramble(number + 1)
        chain = [state]
        for token in side.tokens(request).tolist():
            state = (state * FACTOR + _scramble(token + 2)) & MASK
            chain.append(state)
        rows = side.rows(request)
        root[rows] = np.array(chain, np.uint64)[side.place[rows]]
    root[~side.steps["judged"]] = 0
    own = np.zeros(len(side.node_step), np.uint64)
    token = mix(side.nodes["token"].astype(np.int64) + 2)
    for depth in range(1, int(side.depth.max(initial=0)) + 1):
        level = np.flatnonzero(side.depth == depth)
        above = root[side.node_step[level]] if depth == 1 else own[side.above[level]]
        own[level] = above * np.uint64(FACTOR) + token[level]
    own[root[side.node_step] == 0] = 0
    return root, own


_scrambled: dict[int, int] = {}


def _scramble(value: int) -> int:
    """`mix` of one number."""
    if value not in _scrambled:
        _scrambled[value] = int(mix(np.array([value], np.int64))[0])
    return _scrambled[value]


def _join(a: Hashes, b: Hashes) -> tuple[Longs, Longs]:
    """Places of equal keys, the first of each; 0 is no key."""
    first, at_first = np.unique(a, return_index=True)
    second, at_second = np.unique(b, return_index=True)
    _, x, y = np.intersect1d(first[first != 0], second[second != 0], assume_unique=True, return_indices=True)
    found = at_first[first != 0][x], at_second[second != 0][y]
    order = np.argsort(found[0])  # as A has them: the first example is the first in time
    return found[0][order], found[1][order]


def fields(aligned: Aligned) -> list[Field]:
    """What is compared at equal contexts."""
    return [*_target(aligned), *_drafter(aligned), *_decisions(aligned), *_schedule(aligned)]


def _target(aligned: Aligned) -> list[Field]:
    both = _column(aligned, "p")
    # A greedy p is 0 or 1: where the target's first two are nearly equal, rounding turns one into the other.
    near = _near_tie(aligned)
    tolerance = aligned.tolerance
    note = f"rounding of the dtypes is {tolerance:g}"
    found = [_number(aligned, "target p", *both, ~near, tolerance, note=note, suspects=True)]
    raw = _column(aligned, "raw_p")
    known = ~(np.isnan(raw[0]) | np.isnan(raw[1]))
    if known.any():
        found.append(_number(aligned, "target p, raw", *raw, known, tolerance, note=note, suspects=True))
    return found


def _drafter(aligned: Aligned) -> list[Field]:
    drawn = _column(aligned, "drawn")
    sampled = (drawn[0] != Drawn.DETERMINISTIC) & (drawn[1] != Drawn.DETERMINISTIC)
    found = []
    if sampled.any():
        note = "the drafter's probability as sampled from"
        found.append(_number(aligned, "drafter q", *_column(aligned, "q"), sampled, aligned.tolerance, note=note))
    prob = _column(aligned, "prob")
    known = ~(np.isnan(prob[0]) | np.isnan(prob[1]))
    if known.any():
        note = "the drafter's own probability of the token"
        found.append(_number(aligned, "drafter probability", *prob, known, aligned.tolerance, note=note))
    return found


def _decisions(aligned: Aligned) -> list[Field]:
    a, b = aligned.a, aligned.b
    rows = [side.node_step[at] for side, at in zip((a, b), aligned.nodes, strict=True)]
    positions = [_position(side)[at] for side, at in zip((a, b), rows, strict=True)]
    numbers = [at - side.steps["first_node"][row] for side, at, row in zip((a, b), aligned.nodes, rows, strict=True)]
    forced = a.steps["forced"][rows[0]] | b.steps["forced"][rows[1]]
    # A coin belongs to a position and a node's number in its tree: it is the same where these are.
    same_coin = aligned.same_seed & (positions[0] == positions[1]) & (numbers[0] == numbers[1])
    tried = a.tried[aligned.nodes[0]] & b.tried[aligned.nodes[1]]
    coin = _column(aligned, "coin")
    note = "of the same seed, position and number in the tree"
    found = [_number(aligned, "coin", *coin, same_coin & tried, 1e-12, note=note, suspects=True)]
    equal = tried & ~forced & (np.abs(coin[0] - coin[1]) <= 1e-12)
    for name in ("p_trial", "q_trial"):
        x, y = _column(aligned, name)
        equal &= np.abs(x - y) <= 1e-7
    outcome = _column(aligned, "outcome")
    note = "p, q and coin are the same there"
    found.append(_other(aligned, "verdict", outcome[0] != outcome[1], equal, note=note, suspects=True))
    anyway = tried & ~forced
    found.append(_other(aligned, "outcome", outcome[0] != outcome[1], anyway, note="whatever p, q and coin are"))
    return found


def _schedule(aligned: Aligned) -> list[Field]:
    a, b = aligned.a, aligned.b
    rows = aligned.steps
    every = np.ones(len(rows[0]), np.bool_)
    trees = [_tree_hash(side)[at] for side, at in zip((a, b), rows, strict=True)]
    tokens = [side.steps["token"][at] for side, at in zip((a, b), rows, strict=True)]
    depth = [side.steps["accepted"][at] for side, at in zip((a, b), rows, strict=True)]
    found = [
        _other(aligned, "draft tree", trees[0] != trees[1], every, of_steps=True, note="its tokens or its shape"),
        _other(aligned, "accepted tokens", depth[0] != depth[1], trees[0] == trees[1], of_steps=True, note="same tree"),
        _other(
            aligned,
            "final token",
            tokens[0] != tokens[1],
            (trees[0] == trees[1]) & (depth[0] == depth[1]),
            of_steps=True,
            note="same tree, as many accepted",
        ),
    ]
    about = (("batch", "requests in the step"), ("prefill", "tokens fed before the root"), ("context", "tokens cached"))
    for name, says in about:
        x, y = (side.steps[name][at] for side, at in zip((a, b), rows, strict=True))
        found.append(_other(aligned, f"schedule: {says}", x != y, every, of_steps=True))
    return [field for field in found if field.compared]


def _column(aligned: Aligned, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = (side.nodes[name][at] for side, at in zip((aligned.a, aligned.b), aligned.nodes, strict=True))
    return x.astype(np.float64), y.astype(np.float64)


def _near_tie(aligned: Aligned) -> Bools:
    """Nodes at whose parent the target's first two raw probabilities are too near to tell in one of the sides."""
    gaps = _column(aligned, "gap")
    return (np.nan_to_num(gaps[0], nan=1.0) < 2 * aligned.tolerance) | (
        np.nan_to_num(gaps[1], nan=1.0) < 2 * aligned.tolerance
    )


def _position(side: Side) -> Longs:
    position: Longs = side.steps["context"].astype(np.int64) + side.steps["prefill"]
    return position


def _tree_hash(side: Side) -> Hashes:
    """[S] of the tokens and the shape of each step's tree, in draw order."""
    number = np.arange(len(side.node_step)) - side.steps["first_node"][side.node_step]
    token, parent = side.nodes["token"].astype(np.int64), side.nodes["parent"].astype(np.int64)
    each = mix((token << 20) ^ ((parent + 1) << 9) ^ number)
    out = np.zeros(len(side.steps), np.uint64)
    np.add.at(out, side.node_step, each * (mix(number) | np.uint64(1)))
    return out


def _number(
    aligned: Aligned,
    name: str,
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    where: Bools,
    tolerance: float,
    *,
    note: str = "",
    suspects: bool = False,
) -> Field:
    """Of a number at nodes."""
    apart = np.where(where, np.abs(a - b), 0.0)
    worst = int(np.argmax(apart)) if len(apart) else -1
    largest = float(apart[worst]) if len(apart) else None
    made = _other(aligned, name, apart > tolerance, where, note=note, suspects=suspects, worst=worst)
    return Field(
        made.name, made.compared, made.differ, largest, tolerance, made.example, made.where, made.suspect, made.note
    )


def _other(
    aligned: Aligned,
    name: str,
    differ: Bools,
    where: Bools,
    *,
    of_steps: bool = False,
    note: str = "",
    suspects: bool = False,
    worst: int | None = None,
) -> Field:
    """Of whatever is equal or not, at nodes or at steps."""
    differ = differ & where
    count, compared = int(differ.sum()), int(where.sum())
    example = None
    if count:
        at = int(np.argmax(differ)) if worst is None else worst
        example = (_reference(aligned, 0, at, of_steps), _reference(aligned, 1, at, of_steps))
    places_of = _where(aligned, differ, where, of_steps) if count > 0 else ()
    suspect = suspects and count >= FEWEST and count > RARE * compared
    return Field(name, compared, count, None, None, example, places_of, suspect, note)


def _reference(aligned: Aligned, side_at: int, at: int, of_steps: bool) -> Reference:
    side = (aligned.a, aligned.b)[side_at]
    row = int(aligned.steps[side_at][at] if of_steps else side.node_step[aligned.nodes[side_at][at]])
    step = side.steps[row]
    node = None if of_steps else int(aligned.nodes[side_at][at] - step["first_node"])
    return Reference(side.requests[step["request"]].id, int(step["index"]), int(step["step"]), node)


def _where(aligned: Aligned, differ: Bools, where: Bools, of_steps: bool) -> tuple[Where, ...]:
    """By depth, by rank among siblings, by what came before the step (of B), and by its batch."""
    b = aligned.b
    rows = aligned.steps[1] if of_steps else b.node_step[aligned.nodes[1]]
    groups: list[tuple[str, NDArray[np.integer], Sequence[str] | None]] = []
    if not of_steps:
        groups += [("depth", b.depth[aligned.nodes[1]], None), ("sibling", b.sibling[aligned.nodes[1]] + 1, None)]
    groups += [("after", b.steps["preceded"][rows], PRECEDED), ("requests in the step", b.steps["batch"][rows], None)]
    found = []
    for group, values, names in groups:
        for value in np.unique(values[where]).tolist():
            mine = where & (values == value)
            text = str(value) if names is None else str(names[value]) if value >= 0 else "prefill"
            found.append(Where(group, text, int(mine.sum()), int((differ & mine).sum())))
    return tuple(found)
