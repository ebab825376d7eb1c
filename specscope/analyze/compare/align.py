"""Two sides aligned: which request belongs to which, and which steps, nodes and tokens stand at the same context.

Steps do not line up where acceptance differs; contexts do: the same request, the same output so far, the same path in
the tree. At an equal context both sides asked the same question, so p, q, coin and verdict can be compared one by one,
and differences can be listed by depth and by what came before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.result import PairedBy
from specscope.analyze.compare.side import Longs, Side, SideRequest
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import Bools
from specscope.trace.record.vocabulary import printable

SHORTEST = 12  # characters of a prompt that says something where it stands within another
LOOKED = 200  # requests of a side: what holds for these holds for the others
LENGTH = {"seed", "max_tokens", "stop", "ignore_eos", "logprobs"}  # parameters that shape no distribution
WIDEST = max(ROUNDING.values())  # for a dtype that is not known
Hashes = NDArray[np.uint64]
FACTOR = 0x5851F42D4C957F2D
MASK = 2**64 - 1
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
Matched = Sequence[tuple[int, int, PairedBy]]  # places of requests of A and B


def rounding(*dtypes: str) -> float:
    """How far apart probabilities computed in these dtypes may be by rounding alone."""
    return max(ROUNDING.get(dtype, WIDEST) for dtype in dtypes)


def mix(values: NDArray[np.integer]) -> Hashes:
    """Numbers hashed to well spread 64-bit ones (splitmix64)."""
    x = values.astype(np.uint64) + _ODD[0]
    x = (x ^ (x >> np.uint64(30))) * _ODD[1]
    x = (x ^ (x >> np.uint64(27))) * _ODD[2]
    return x ^ (x >> np.uint64(31))


def other_rules(a: SideRequest, b: SideRequest) -> bool:
    """Whether the parameters shape another distribution; how long an output may be does not."""
    if a.info is None or b.info is None:
        return False
    mine, theirs = a.info.params, b.info.params
    return any(getattr(mine, name) != getattr(theirs, name) for name in PARAM_NAMES - LENGTH)


@dataclass(frozen=True)
class Aligned:
    """What of both sides is at equal contexts: places in A and in B."""

    a: Side
    b: Side
    steps: tuple[Longs, Longs]  # whose roots are
    nodes: tuple[Longs, Longs]  # of the same token
    parents: tuple[Longs, Longs]  # with the likeliest tokens of target and drafter
    tokens: tuple[Longs, Longs]  # whose p is known: nodes, and behind them final tokens
    drawn: tuple[Longs, Longs]  # the steps of those final tokens
    fed: tuple[Longs, Longs]  # rows that fed a head, of the same position in the same text
    exact: Bools  # [requests of A] whether the request's pair has the same parameters and seed
    some_alike: bool  # whether the same parameters shape p in any pair
    alike: Bools  # [requests of A] whether they do; True everywhere where they do in no pair
    tolerance: float


def align(a: Side, b: Side, pairs: Matched) -> Aligned:
    """Match both sides by hashes of (pair, output so far, path)."""
    sides = a, b
    keys = _keys(a, [first for first, _, _ in pairs]), _keys(b, [second for _, second, _ in pairs])
    drawn = tuple(np.flatnonzero(~np.isnan(side.final_whole) & ~side.forced) for side in sides)
    exact, alike = np.zeros((2, len(a.requests)), np.bool_)
    for first, second, kind in pairs:
        exact[first] = kind is PairedBy.EXACT
        alike[first] = kind is not PairedBy.PROMPT or not other_rules(a.requests[first], b.requests[second])
    nodes = [key.rows[side.columns.own_row] for key, side in zip(keys, sides, strict=True)]
    finals = [_final_keys(side, key.rows, rows) for side, key, rows in zip(sides, keys, drawn, strict=True)]
    return Aligned(
        a,
        b,
        steps=_join(*(key.rows[side.columns.root_row] for key, side in zip(keys, sides, strict=True))),
        nodes=_join(*nodes),
        parents=_join(*(_parent_keys(side, key.rows) for key, side in zip(keys, sides, strict=True))),
        tokens=_join(*(np.concatenate(both) for both in zip(nodes, finals, strict=True))),
        drawn=(drawn[0], drawn[1]),
        fed=_join(*(key.fed for key in keys)),
        exact=exact,
        some_alike=bool(alike.any()),
        alike=alike if alike.any() else ~alike,
        tolerance=rounding(*({run.dtype for side in sides for run in side.runs} or {""})),
    )


@dataclass(frozen=True)
class _Keys:
    """Hashes of contexts; 0 where there is none."""

    rows: Hashes  # [rows of all trees] of roots and nodes
    fed: Hashes  # [F] of rows that fed a head, by the output up to the row's token: paired requests have one prompt


def _keys(side: Side, requests: Sequence[int]) -> _Keys:
    c = side.columns
    first, last = np.zeros((2, len(side.requests)), np.int64)  # in `chain`, of each request; 0 where it has no pair
    chain = [0]
    for number, place in enumerate(requests):
        state, first[place] = _scramble(number + 1), len(chain)
        chain.append(state)
        for token in side.tokens(side.requests[place]).tolist():
            state = (state * FACTOR + _scramble(token + 2)) & MASK
            chain.append(state)
        last[place] = len(chain) - 1
    chains, begin = np.array(chain, np.uint64), first[side.request]
    rows = np.zeros(c.rows, np.uint64)
    rows[c.root_row] = root = chains[np.where(begin > 0, begin + side.place, 0)]
    token = mix(c.token + 2)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        level = np.flatnonzero((c.depth == depth) & (root[c.step] != 0))
        rows[c.own_row[level]] = rows[c.row[level]] * np.uint64(FACTOR) + token[level]
    step = side.fed_step
    made = np.clip(side.place[step] + side.fed_position + 1 - c.position[step], 0, None)  # output up to the row's token
    at = np.minimum(begin[step] + made, last[side.request[step]])
    return _Keys(rows, np.where(begin[step] > 0, chains[at] + mix(side.fed_position), np.uint64(0)))


def _final_keys(side: Side, rows: Hashes, steps: Longs) -> Hashes:
    """Of the final tokens of these steps."""
    above = rows[side.columns.final_row[steps]]
    keys = above * np.uint64(FACTOR) + mix(side.columns.final[steps] + 2)
    return np.where(above == 0, np.uint64(0), keys)


def _parent_keys(side: Side, rows: Hashes) -> Hashes:
    """Of the contexts at which target and drafter were asked."""
    parents = side.columns.parents
    return np.where(parents.tops > 0, rows[parents.row], np.uint64(0)) if len(parents) else rows[:0]


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


def match(a: Side, b: Side) -> list[tuple[int, int, PairedBy]]:
    """Pairs of places in both lists of requests, in A's order.

    Matched by prompt and all parameters, then without the seed, then by prompt alone, then by order.
    Of several equal requests, the first of A is paired with the first of B. Only requests whose prompt is not known on
    one side (captures made with --no-text) are paired by order: requests with different prompts make no pair. Nor do
    requests of which steps are missing.
    """
    left, right = ({i: request for i, request in enumerate(side.requests) if request.whole} for side in (a, b))
    pairs: list[tuple[int, int, PairedBy]] = []
    for kind, key in _KEYS:
        theirs: dict[Hashable, list[int]] = defaultdict(list)
        for place, request in right.items():
            if (mark := key(request)) is not None:
                theirs[mark].append(place)
        for place, request in list(left.items()):
            mark = key(request)
            if mark is not None and theirs[mark]:
                other = theirs[mark].pop(0)
                pairs.append((place, other, kind))
                del left[place], right[other]
    for place in list(left):
        other_place = next((o for o in right if _prompt(left[place]) is None or _prompt(right[o]) is None), None)
        if other_place is not None:
            pairs.append((place, other_place, PairedBy.ORDER))
            del left[place], right[other_place]
    return sorted(pairs)


def _prompt(request: SideRequest) -> Hashable | None:
    """The prompt's tokens, or its text; None where neither is known."""
    if request.info is None:
        return None
    tokens = request.info.prompt_tokens
    return tokens.tobytes() if len(tokens) else request.info.prompt or None


def _with(*left_out: str) -> Callable[[SideRequest], Hashable | None]:
    names = sorted(PARAM_NAMES - set(left_out))

    def key(request: SideRequest) -> Hashable | None:
        prompt = _prompt(request)
        if prompt is None or request.info is None:
            return None
        params = request.info.params
        return prompt, tuple(map(_plain, (getattr(params, name) for name in names)))

    return key


def _plain(value: object) -> Hashable:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else str(value)


_KEYS: tuple[tuple[PairedBy, Callable[[SideRequest], Hashable | None]], ...] = (
    (PairedBy.EXACT, _with()),
    (PairedBy.SEED, _with("seed")),
    (PairedBy.PROMPT, _prompt),
)


def unpaired(a: Side, b: Side, matched: Matched) -> str:
    """Why no request of A has a pair, in a sentence; "" where one has."""
    if matched:
        return ""
    for name, side in (("A", a), ("B", b)):
        if not side.tells_tokens:
            return f"no requests are paired: {name} was recorded with --no-tokens"
        if not any(request.whole for request in side.requests):
            return f"no requests are paired: of each request of {name} steps are missing"
    why = hint(a, b, matched)
    return "no request of A has the prompt of one of B" + (f": {why}" if why else "")


def hint(a: Side, b: Side, matched: Matched) -> str:
    """What keeps requests from being paired whose prompts look alike, with an example; "" where none do."""
    left = [request for _, request in _left(a, {first for first, _, _ in matched})]
    right = [request for _, request in _left(b, {second for _, second, _ in matched})]
    for mine in left:
        for theirs in right:
            example = f"{printable(mine.id)} of A and {printable(theirs.id)} of B"
            text, other = _text(mine), _text(theirs)
            if text and text == other:
                return f"{example} are one text in different tokens: give both the same special tokens"
            if _within(text, other, mine):
                return f"A's are within a chat template ({example}): {_advice(('A', a), ('B', b))}"
            if _within(other, text, theirs):
                return f"B's are within a chat template ({example}): {_advice(('B', b), ('A', a))}"
            if (title := _title(mine)) and title == _title(theirs):
                return f"{example} ask the same within other chat templates, or behind other system prompts"
    return ""


def _left(side: Side, taken: set[int]) -> Iterator[tuple[int, SideRequest]]:
    """Requests without a pair whose prompts are known, as many as are looked at."""
    known = ((place, request) for place, request in enumerate(side.requests) if place not in taken and request.info)
    return (each for _, each in zip(range(LOOKED), known, strict=False))


def _text(request: SideRequest) -> str:
    return "" if request.info is None else request.info.prompt.strip()


def _title(request: SideRequest) -> str:
    return "" if request.info is None else request.info.title.strip()


def _within(whole: str, part: str, request: SideRequest) -> bool:
    """Whether a prompt is another within a template."""
    return bool(part) and part != whole and part in whole and (len(part) >= SHORTEST or _title(request) == part)


def _advice(templated: tuple[str, Side], bare: tuple[str, Side]) -> str:
    """What to type, where one of them is our own engine's."""
    ours = [all(c.run is not None and c.run.is_ours for c in side.captures) for _, side in (templated, bare)]
    if ours[0]:
        return f"record {templated[0]} with --raw"
    if ours[1]:
        return f"record {bare[0]} without --raw"
    return "send both to the same endpoint (/v1/completions takes a prompt as it is)"
