"""Two sides aligned: which request belongs to which, and which steps, nodes and tokens stand at the same context.

Steps do not line up where acceptance differs; contexts do: the same request, the same output so far, the same path in
the tree. At an equal context both sides asked the same question, so p, q, coin and verdict can be compared one by one,
and where differences are is a condition over depth, what came before, and the load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.side import Hashes, Longs, Side, SideRequest, mix
from specscope.analyze.findings import Reference
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import Bools, Doubles

SAME_TEMPLATE = "if a chat template was applied to one of them only, record both with --raw, or both without"
LENGTH = {"seed", "max_tokens", "stop", "ignore_eos", "logprobs"}  # parameters that shape no distribution
WIDEST = max(ROUNDING.values())  # for a dtype that is not known
Both = tuple[Doubles, Doubles]  # of A and B
Places = NDArray[np.int32]  # there are most of them, and half as wide they all are in memory


class PairedBy(StrEnum):
    EXACT = "prompt, parameters and seed"
    SEED = "prompt and parameters"  # the seed differs
    PROMPT = "prompt"  # the parameters differ


Matched = Sequence[tuple[int, int, PairedBy]]  # places of requests of A and B


def rounding(*dtypes: str) -> float:
    """How far apart probabilities computed in these dtypes may be by rounding alone."""
    return max(ROUNDING.get(dtype, WIDEST) for dtype in dtypes)


def other_rules(a: SideRequest, b: SideRequest) -> bool:
    """Whether the parameters shape another distribution; how long an output may be does not."""
    if a.params is None or b.params is None:
        return False
    return any(getattr(a.params, name) != getattr(b.params, name) for name in PARAM_NAMES - LENGTH)


@dataclass(frozen=True)
class ContextRows:
    """What of one kind stands at equal contexts on both sides: steps, parents, nodes, tokens or fed rows.

    Places are among all of the kind that a side has; of whatever is a pair, the first is A's.
    """

    sides: tuple[Side, Side]
    at: tuple[Places, Places]
    step: tuple[Places, Places]  # the step of each
    depth: tuple[Places, Places]  # of tokens and parents in their trees; of roots and others 0
    sibling: Places  # B's rank among its siblings, from 1; of final tokens 0, of what is no token -1
    alike: Bools  # whether the same parameters shape p
    exact: Bools  # whether parameters and seed are the same

    def __len__(self) -> int:
        return len(self.alike)

    def values(self, held: Iterable[NDArray[Any]]) -> Both:
        """Whole columns of both sides at these places, as numbers."""
        a, b = (column[at].astype(np.float64) for column, at in zip(held, self.at, strict=True))
        return a, b

    def column(self, name: str) -> Both:
        """A column of the sides at these places, by its path."""
        return self.values(map(attrgetter(name), self.sides))

    def of_steps(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        a, b = (attrgetter(name)(side)[step] for side, step in zip(self.sides, self.step, strict=True))
        return a, b

    @cached_property
    def hottest(self) -> Doubles:
        """How much the temperatures magnify a change of the logits, on either side."""
        return np.asarray(np.maximum(*self.of_steps("heat")))

    @cached_property
    def cut(self) -> Bools:
        """Where top-k, top-p or min-p cut the distribution, on either side."""
        return np.asarray(np.logical_or(*self.of_steps("cut")))

    @cached_property
    def facts(self) -> dict[str, NDArray[Any]]:
        """What is known of each, in which a condition is looked for: of B, but for what compares both."""
        batch, step, side = self.of_steps("batch"), self.step[1], self.sides[1]
        facts = {
            "after": side.preceded[step],
            "requests in the step": batch[1],
            "requests in the step differ": batch[0] != batch[1],
            "output position": side.place[step],
            "context length": side.context[step],
            "prefill tokens": side.prefill[step],
        }
        if (run := side.captures[0].run) is not None:
            facts["position of the root in its block"] = side.columns.position[step] % run.block_size
        return facts | {"depth": self.depth[1], "sibling": self.sibling}

    def reference(self, index: int) -> tuple[Reference, Reference]:
        found = []
        for side, at, steps in zip(self.sides, self.at, self.step, strict=True):
            place, step = int(at[index]), int(steps[index])
            is_node = self.sibling[index] >= 0 and place < len(side.columns.step)
            node = place - int(side.columns.start[step]) if is_node else None
            request = side.requests[side.request[step]].id
            found.append(Reference(request, int(side.index[step]), int(side.step[step]), node))
        return found[0], found[1]


@dataclass(frozen=True)
class Aligned:
    a: Side
    b: Side
    steps: ContextRows  # whose roots are
    nodes: ContextRows  # of the same token
    parents: ContextRows  # with the likeliest tokens of target and drafter
    tokens: ContextRows  # whose p is known: nodes, and behind them final tokens, of Side.drawn
    fed: ContextRows  # rows that fed a head, of the same position in the same text
    paths: tuple[Hashes, Hashes]  # [rows of all trees] the contexts of roots and nodes, hashed
    some_alike: bool  # whether the same parameters shape p in any pair
    tolerance: float


_Contexts = tuple[Hashes, Places]  # of one kind: the context of each, 0 for none; [3, n] its step, depth, and sibling


def align(a: Side, b: Side, pairs: Matched) -> Aligned:
    """Match both sides by hashes of (pair, output so far, path)."""
    exact, alike = np.zeros((2, len(a.requests)), np.bool_)
    pair_a, pair_b = (np.zeros(len(side.requests), np.int64) for side in (a, b))  # the number of each one's, from 1
    for number, (first, second, kind) in enumerate(pairs, 1):
        pair_a[first] = pair_b[second] = number
        exact[first] = kind is PairedBy.EXACT
        alike[first] = kind is not PairedBy.PROMPT or not other_rules(a.requests[first], b.requests[second])
    some_alike = bool(alike.any())
    paths_a, of_a = _contexts(a, pair_a)
    paths_b, of_b = _contexts(b, pair_b)

    def rows(of_kind: _Contexts, theirs: _Contexts) -> ContextRows:
        keys, *both = np.intersect1d(of_kind[0], theirs[0], return_indices=True)  # the first place of each
        order = np.argsort(both[0])  # as A has them: the first example is the first in time
        at = x, y = tuple(each[order][keys[order] != 0].astype(np.int32) for each in both)
        step, depth, (_, sibling) = zip(of_kind[1][:, x], theirs[1][:, y], strict=True)
        request = a.request[step[0]]
        return ContextRows((a, b), at, step, depth, sibling, alike[request] | (not some_alike), exact[request])

    tolerance = rounding(*({run.dtype for side in (a, b) for run in side.runs} or {""}))
    steps, nodes, parents, tokens, fed = map(rows, of_a, of_b)
    return Aligned(a, b, steps, nodes, parents, tokens, fed, (paths_a, paths_b), some_alike, tolerance)


def _contexts(side: Side, pair: Longs) -> tuple[Hashes, list[_Contexts]]:
    """The contexts of roots and nodes by their rows, and those of each kind. `pair`: the number of each request's.

    A context is a sum of hashes: of the number of the request's pair, and of each token with its place in the output.
    """
    c, parents, every, drawn = side.columns, side.columns.parents, np.arange(len(side)), side.drawn
    begins, made = side.earlier, np.arange(len(c.output)) - np.repeat(side.earlier, side.emitted)
    sums = np.append(np.uint64(0), np.cumsum(_said(made, c.output)))

    def behind(step: Longs, tokens: Longs) -> Hashes:
        """The context behind so many output tokens of a step's request."""
        since: Hashes = sums[begins[step] + tokens] - sums[begins[step]] + mix(pair[side.request[step]])
        return since

    rows, depths = np.zeros(c.rows, np.uint64), np.zeros(c.rows, np.int64)
    rows[c.root_row], depths[c.own_row] = behind(every, side.place), c.depth
    node = _said(side.place[c.step] + c.depth - 1, c.token)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        level = np.flatnonzero(c.depth == depth)
        rows[c.own_row[level]] = rows[c.row[level]] + node[level]
    final = rows[c.final_row[drawn]] + _said(side.place[drawn] + c.depth_reached[drawn], c.final[drawn])
    # A fed row's is the output up to its token: paired requests have one prompt
    step, position, _ = side.fed
    whole = np.array([len(side.tokens(request)) for request in side.requests], np.int64)[side.request[step]]
    fed = behind(step, np.clip(side.place[step] + position + 1 - c.position[step], 0, whole)) + mix(position)
    nodes = np.stack([c.step, c.depth, c.sibling + 1], dtype=np.int32)
    finals = np.stack([drawn, c.depth_reached[drawn] + 1, 0 * drawn], dtype=np.int32)
    kinds = [
        (rows[c.root_row], _no_tokens(every)),
        (rows[c.own_row], nodes),
        (rows[parents.row] * (parents.tops > 0), _no_tokens(parents.step, depths[parents.row])),
        (np.append(rows[c.own_row], final), np.concatenate([nodes, finals], axis=1)),
        (fed, _no_tokens(step)),
    ]
    paired = pair[side.request] > 0
    side.forget()
    return rows, [(keys * paired[of[0]], of) for keys, of in kinds]


def _no_tokens(step: Longs, depth: Longs | int = 0) -> Places:
    """[3, n] the step of each, its depth, and no sibling."""
    return np.stack(np.broadcast_arrays(step, depth, -1), dtype=np.int32)


def _said(place: Longs, token: Longs) -> Hashes:
    """A token at a place of the output, hashed."""
    seen: Hashes = mix(place) + token.astype(np.uint64)
    return mix(seen)


def match(a: Side, b: Side) -> list[tuple[int, int, PairedBy]]:
    """Pairs of places in both lists of requests, in A's order.

    Matched by prompt and all parameters, then without the seed, then by prompt alone. Of several equal requests, the
    first of A is paired with the first of B. Requests whose prompt is not known, or of which steps are missing, make no
    pair.
    """
    left, right = ({i: request for i, request in enumerate(side.requests) if request.whole} for side in (a, b))
    pairs: list[tuple[int, int, PairedBy]] = []
    for kind in (PairedBy.EXACT, PairedBy.SEED, PairedBy.PROMPT):
        theirs: dict[Hashable, list[int]] = defaultdict(list)
        for place, request in right.items():
            theirs[_key(request, kind)].append(place)
        theirs[None] = []
        for place, request in list(left.items()):
            if theirs[key := _key(request, kind)]:
                pairs.append((place, theirs[key].pop(0), kind))
                del left[place], right[pairs[-1][1]]
    return sorted(pairs)


def _key(request: SideRequest, kind: PairedBy) -> Hashable | None:
    """What a pair of this kind has in common; None where the prompt is not known."""
    if request.info is None:
        return None
    tokens, params = request.info.prompt_tokens, request.info.params
    prompt = tokens.tobytes() if len(tokens) else request.info.prompt or None
    if prompt is None or kind is PairedBy.PROMPT:
        return prompt
    names = PARAM_NAMES - ({"seed"} if kind is PairedBy.SEED else set())
    values = (getattr(params, name) for name in sorted(names))
    return prompt, *(tuple(sorted(each.items())) if isinstance(each, Mapping) else str(each) for each in values)


def unpaired(a: Side, b: Side, matched: Matched) -> str:
    """Why no request of A has a pair, in a sentence; "" where one has."""
    if matched:
        return ""
    for name, side in (("A", a), ("B", b)):
        if not side.tells_tokens:
            return f"no requests are paired: {name} was recorded with --no-tokens"
        if not any(request.whole for request in side.requests):
            return f"no requests are paired: every request of {name} lacks steps"
    return f"no request of A has the same prompt as one of B: {SAME_TEMPLATE}"
