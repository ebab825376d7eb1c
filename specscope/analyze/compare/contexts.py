"""Two sides aligned by context: the same request, the same output so far, the same path in the tree.

Steps do not line up where acceptance differs; contexts do. At an equal context both sides asked the same question, so
p, q, coin and verdict can be compared one by one, and differences can be listed by depth and by what came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import Longs, Side
from specscope.analyze.compare.parting import mix, other_rules, rounding
from specscope.analyze.compare.result import PairedBy
from specscope.trace.record.tree import ROOT, Bools

Hashes = NDArray[np.uint64]
FACTOR = 0x5851F42D4C957F2D
MASK = 2**64 - 1


@dataclass(frozen=True)
class Aligned:
    """Rows of both sides that are at equal contexts."""

    a: Side
    b: Side
    steps: tuple[Longs, Longs]  # rows of `steps` whose roots are at the same context
    nodes: tuple[Longs, Longs]  # nodes of the same token at the same context
    same_seed: Bools  # [nodes] whether the coins should be the same
    exact: Bools  # [requests of A] whether the request's pair has the same parameters and seed
    some_alike: bool  # whether the same parameters shape p in any pair
    alike: Bools  # [requests of A] whether they do; True everywhere where they do in no pair
    tolerance: float
    given: Given
    fed: tuple[Longs, Longs]  # rows of Side.fed of the same position in the same text


@dataclass(frozen=True)
class Given:
    """Tokens whose p is known on both sides at the same context: nodes, and final tokens.

    A token that one side drafted the other may have drawn.
    """

    places: tuple[Longs, Longs]  # in the nodes of a side followed by its `drawn`
    drawn: list[Longs]  # rows of `steps`
    parents: tuple[Longs, Longs]  # rows of Side.parents at the same context


def align(a: Side, b: Side, pairs: Sequence[tuple[int, int, PairedBy]]) -> Aligned:
    """Match rows of both sides by hashes of (pair, output so far, path)."""
    keys = _keys(a, [first for first, _, _ in pairs]), _keys(b, [second for _, second, _ in pairs])
    drawn = [np.flatnonzero(_whole_p(side)) for side in (a, b)]
    finals = [_final_keys(side, *mine[:2], rows) for side, mine, rows in zip((a, b), keys, drawn, strict=True)]
    steps = _join(keys[0][0], keys[1][0])
    nodes = _join(keys[0][1], keys[1][1])
    exact = np.zeros(len(a.requests), np.bool_)
    exact[[first for first, _, kind in pairs if kind is PairedBy.EXACT]] = True
    request = a.steps["request"][a.node_step[nodes[0]]]
    dtypes = {capture.run.dtype for side in (a, b) for capture in side.captures if capture.run is not None}
    places = _join(*(np.concatenate([mine[1], last]) for mine, last in zip(keys, finals, strict=True)))
    parents = [_parent_keys(side, *mine[:2]) for side, mine in zip((a, b), keys, strict=True)]
    given = Given(places, drawn, _join(parents[0], parents[1]))
    fed = _join(keys[0][2], keys[1][2])
    tolerance = rounding(*(dtypes or {""}))
    alike = _alike(a, b, pairs)
    every = alike if alike.any() else np.ones(len(alike), np.bool_)
    return Aligned(a, b, steps, nodes, exact[request], exact, bool(alike.any()), every, tolerance, given, fed)


def _alike(a: Side, b: Side, pairs: Sequence[tuple[int, int, PairedBy]]) -> Bools:
    """[requests of A] whether the same parameters shape p on both sides of its pair; only there is p compared."""
    alike = np.zeros(len(a.requests), np.bool_)
    for first, second, kind in pairs:
        alike[first] = kind is not PairedBy.PROMPT or not other_rules(a.requests[first], b.requests[second])
    return alike


def _keys(side: Side, requests: Sequence[int]) -> tuple[Hashes, Hashes, Hashes]:
    """The keys of steps, of nodes and of rows that fed a head; 0 where there is none."""
    root = np.zeros(len(side.steps), np.uint64)
    fed = np.zeros(len(side.fed_step), np.uint64)
    for number, place in enumerate(requests):
        request = side.requests[place]
        if not request.count:
            continue
        state = _scramble(number + 1)
        chain = [state]
        for token in side.tokens(request).tolist():
            state = (state * FACTOR + _scramble(token + 2)) & MASK
            chain.append(state)
        rows = side.rows(request)
        root[rows] = np.array(chain, np.uint64)[side.place[rows]]
        _fed_keys(side, rows, np.array(chain, np.uint64), fed)
    root[~side.steps["judged"]] = 0
    node_keys = np.zeros(len(side.node_step), np.uint64)
    token = mix(side.nodes["token"].astype(np.int64) + 2)
    for depth in range(1, int(side.depth.max(initial=0)) + 1):
        level = np.flatnonzero(side.depth == depth)
        above = root[side.node_step[level]] if depth == 1 else node_keys[side.above[level]]
        node_keys[level] = above * np.uint64(FACTOR) + token[level]
    node_keys[root[side.node_step] == 0] = 0
    return root, node_keys, fed


def _fed_keys(side: Side, rows: slice, chain: Hashes, keys: Hashes) -> None:
    """Fill in the keys of the rows that fed a head in these steps: by the output up to the row's token.

    Paired requests have the same prompt, so it is left out.
    """
    first, end = side.steps["first_fed"][rows], side.steps["first_fed"][rows] + side.steps["fed"][rows]
    mine = slice(int(first[0]), int(end[-1]))
    step, position = side.fed_step[mine], side.fed["position"][mine].astype(np.int64)
    root = side.steps["context"][step].astype(np.int64) + side.steps["prefill"][step]
    made = np.clip(side.place[step] + position + 1 - root, 0, len(chain) - 1)  # output tokens up to the row's
    keys[mine] = chain[made] + mix(position)


def _whole_p(side: Side) -> Bools:
    """[S] whether the final token's probability in the target's whole p is known."""
    known: Bools = side.steps["judged"] & ~np.isnan(side.steps["final_whole"]) & ~side.steps["forced"]
    return known


def _final_keys(side: Side, root: Hashes, node_keys: Hashes, rows: Longs) -> Hashes:
    """The keys of the final tokens of these steps."""
    steps = side.steps[rows]
    above = root[rows]
    deep = np.flatnonzero(steps["accepted"])
    last = side.path[steps["first_path"][deep] + steps["accepted"][deep] - 1] + steps["first_node"][deep]
    above[deep] = node_keys[last]
    keys = above * np.uint64(FACTOR) + mix(steps["token"].astype(np.int64) + 2)
    keys[above == 0] = 0
    return keys


def _parent_keys(side: Side, root: Hashes, node_keys: Hashes) -> Hashes:
    """The keys of the contexts at which target and drafter were asked."""
    node = side.parents["node"].astype(np.int64)
    first = side.steps["first_node"][side.parent_step]
    padded = np.append(node_keys, np.uint64(0))
    return np.where(node == ROOT, root[side.parent_step], padded[np.where(node == ROOT, -1, node + first)])


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
    places = at_first[first != 0][x], at_second[second != 0][y]
    order = np.argsort(places[0])  # as A has them: the first example is the first in time
    return places[0][order], places[1][order]
