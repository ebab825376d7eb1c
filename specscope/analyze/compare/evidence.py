"""What differs at equal contexts: p, q, coin, verdict, tree and schedule, with the places where they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import NORMS, PRECEDED, Longs, Request, Side
from specscope.analyze.compare.contexts import Aligned, Hashes
from specscope.analyze.compare.parting import BEYOND, ENTROPY, heat, is_cut, mix
from specscope.analyze.compare.result import Field, Where
from specscope.analyze.conditions import find
from specscope.analyze.findings import Reference
from specscope.trace.records import NORM_ROUNDING
from specscope.trace.tree import ROOT, Bools, Drawn

FEATURES = "what feeds the drafter"
FEWEST = 3  # contexts that must differ before they count against a side
RARE = 0.002  # and more than this share of them
COMMON = 0.05  # of those that are only a little beyond rounding
EDGE = 0.1  # where top-k, top-p or min-p cut p

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]  # of A and B


@dataclass(frozen=True)
class _Place:
    """Where compared values stand on one side: nodes, final tokens, or, without nodes, whole steps."""

    side: Side
    drawn: Longs  # rows whose final tokens stand behind the nodes
    at: Longs  # nodes, and behind them places in `drawn`; else rows of what `of` says
    of: Literal["nodes", "steps", "parents"] = "nodes"

    @cached_property
    def rows(self) -> Longs:
        """The row in `steps` of each."""
        if self.of == "parents":
            return self.side.parent_step[self.at]
        return self.at if self.of == "steps" else np.concatenate([self.side.node_step, self.drawn])[self.at]

    @cached_property
    def depth(self) -> Longs:
        """Of the token in its tree; of a parent, 0 for the root."""
        if self.of == "parents":
            node, first = self.side.parents["node"][self.at], self.side.steps["first_node"][self.rows]
            return np.where(node == ROOT, 0, np.append(self.side.depth, 0)[np.where(node == ROOT, -1, first + node)])
        final = self.side.steps["accepted"][self.drawn] + 1
        return np.concatenate([self.side.depth, final])[self.at]

    @cached_property
    def sibling(self) -> Longs:
        """Its rank among its siblings, from 1; 0 for a final token."""
        return np.concatenate([self.side.sibling + 1, np.zeros(len(self.drawn), np.int32)])[self.at]

    def reference(self, at: int) -> Reference:
        """One of them."""
        step, place = self.side.steps[self.rows[at]], int(self.at[at])
        node = place - int(step["first_node"]) if self.of == "nodes" and place < len(self.side.node_step) else None
        return Reference(self.side.requests[step["request"]].id, int(step["index"]), int(step["step"]), node)


Places = tuple[_Place, _Place]


def fields(aligned: Aligned) -> list[Field]:
    """What is compared at equal contexts."""
    return [*_target(aligned), *_whole(aligned), *_drafter(aligned), *_decisions(aligned), *_schedule(aligned)]


def _target(aligned: Aligned) -> list[Field]:
    """p wherever both sides have it. Where the first two tokens are nearly equal, rounding turns a greedy 0 into 1."""
    sides, places = (aligned.a, aligned.b), aligned.given.places
    columns = []
    for name, last, unknown in (("p", "final_whole", 0.0), ("raw_p", None, np.nan), ("gap", "final_gap", np.nan)):
        both = []
        for side, drawn, at in zip(sides, aligned.given.drawn, places, strict=True):
            finals = np.full(len(drawn), unknown) if last is None else side.steps[last][drawn]
            both.append(np.concatenate([side.nodes[name], finals]).astype(np.float64)[at])
        columns.append((both[0], both[1]))
    p, raw, gap = columns
    near = np.minimum(*(np.nan_to_num(one, nan=1.0) for one in gap)) < 2 * aligned.tolerance
    # Greedy p without the raw ones beside it: whether a 0 that became 1 was a near tie cannot be known.
    if not (aligned.a.has_p and aligned.b.has_p):
        near[:] = True  # nothing is compared then
    near |= np.isnan(gap[0]) & np.isnan(gap[1]) & np.isin(p[0], (0, 1)) & np.isin(p[1], (0, 1)) & (p[0] != p[1])
    here = tuple(_Place(side, drawn, at) for side, drawn, at in zip(sides, aligned.given.drawn, places, strict=True))
    return _target_fields((here[0], here[1]), p, raw, ~near, aligned.tolerance)


def _target_fields(here: Places, p: Pair, raw: Pair, where: Bools, tolerance: float) -> list[Field]:
    """p where nothing cuts it, p where something does, and what it was before temperature and rules."""
    requests = [place.side.steps["request"][place.rows] for place in here]
    hot = np.maximum(*(_of(place.side, heat)[at] for place, at in zip(here, requests, strict=True)))
    cut = np.maximum(*(_of(place.side, is_cut)[at] for place, at in zip(here, requests, strict=True))) > 0
    known = ~(np.isnan(raw[0]) | np.isnan(raw[1]))
    note = f"rounding of the dtypes is {tolerance:g}"
    edge = "top-k, top-p or min-p cut it: rounding decides at the edge"
    found = [
        _number(here, "target p", *p, where & ~cut, tolerance * hot, note=note, rare=RARE),
        _number(here, "target p, cut", *p, where & cut, tolerance * hot, note=edge, rare=EDGE),
        _number(here, "target p, raw", *raw, known, tolerance, note=note, rare=RARE),
    ]
    return [field for field in found if field.compared or field.name == "target p"]


def _of(side: Side, value: Callable[[Request], float]) -> NDArray[np.float64]:
    """[R] of each request."""
    return np.array([float(value(request)) for request in side.requests])


def _whole(aligned: Aligned) -> list[Field]:
    """Whole distributions: what they come to where neither side tried a token of the other."""
    at = aligned.given.parents
    if not len(at[0]):
        return []
    here = _Place(aligned.a, at[0][:0], at[0], "parents"), _Place(aligned.b, at[1][:0], at[1], "parents")

    def column(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        x, y = (side.parents[name][rows] for side, rows in zip((aligned.a, aligned.b), at, strict=True))
        return x.astype(np.float64), y.astype(np.float64)

    top, q_entropy = column("top"), column("q_entropy")
    every, wide = np.ones(len(at[0]), np.bool_), ENTROPY * aligned.tolerance
    greedy = (column("choice_p")[0] == 1) & (column("choice_p")[1] == 1)
    cut = _of(aligned.b, is_cut)[aligned.b.steps["request"][here[1].rows]] > 0
    found = [
        _number(here, "target p, first token", *column("top_p"), top[0] == top[1], aligned.tolerance, rare=RARE),
        _number(here, "target entropy", *column("entropy"), ~greedy & ~cut, wide, rare=RARE),
        _number(here, "drafter entropy", *q_entropy, (q_entropy[0] > 0) & (q_entropy[1] > 0), wide),
        _other(here, "target's first token", top[0] != top[1], every, note="raw; near ties among them"),
    ]
    return [field for field in found if field.compared]


def _drafter(aligned: Aligned) -> list[Field]:
    here = _nodes(aligned)
    drawn = _column(aligned, "drawn")
    sampled = (drawn[0] != Drawn.DETERMINISTIC) & (drawn[1] != Drawn.DETERMINISTIC)
    found = []
    if sampled.any():
        note = "the drafter's probability as sampled from"
        found.append(_number(here, "drafter q", *_column(aligned, "q"), sampled, aligned.tolerance, note=note))
    prob = _column(aligned, "prob")
    known = ~(np.isnan(prob[0]) | np.isnan(prob[1]))
    if known.any():
        note = "the drafter's own probability of the token"
        found.append(_number(here, "drafter probability", *prob, known, aligned.tolerance, note=note))
    return [*_features(aligned), *found]


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
    here = _Place(sides[0], steps[0][:0], steps[0], "steps"), _Place(sides[1], steps[1][:0], steps[1], "steps")
    dtypes = {side.dtype(request) for side in sides for request in side.requests}
    tolerance = max((NORM_ROUNDING.get(dtype, max(NORM_ROUNDING.values())) for dtype in dtypes), default=0.0)
    note = "the norms of the rows that fed the head, relative to the norm"
    same = np.zeros(len(apart))
    return [_number(here, FEATURES, apart, same, where, tolerance, note=note, rare=RARE)]


def _decisions(aligned: Aligned) -> list[Field]:
    here = _nodes(aligned)
    a, b = aligned.a, aligned.b
    rows = [side.node_step[at] for side, at in zip((a, b), aligned.nodes, strict=True)]
    positions = [_position(side)[at] for side, at in zip((a, b), rows, strict=True)]
    numbers = [at - side.steps["first_node"][row] for side, at, row in zip((a, b), aligned.nodes, rows, strict=True)]
    forced = a.steps["forced"][rows[0]] | b.steps["forced"][rows[1]]
    # A coin belongs to a position and a node's number in its tree: it is the same where these are.
    coins = aligned.a.has_coins and aligned.b.has_coins
    same_coin = aligned.same_seed & coins & (positions[0] == positions[1]) & (numbers[0] == numbers[1])
    tried = a.tried[aligned.nodes[0]] & b.tried[aligned.nodes[1]]
    coin = _column(aligned, "coin")
    note = "of the same seed, position and number in the tree"
    found = [_number(here, "coin", *coin, same_coin & tried, 1e-12, note=note, rare=RARE)]
    equal = tried & ~forced & coins & (np.abs(coin[0] - coin[1]) <= 1e-12)
    for name in ("p_trial", "q_trial"):
        x, y = _column(aligned, name)
        equal &= np.abs(x - y) <= 1e-7
    outcome = _column(aligned, "outcome")
    note = "p, q and coin are the same there"
    found.append(_other(here, "verdict", outcome[0] != outcome[1], equal, note=note, suspects=True))
    anyway = tried & ~forced
    found.append(_other(here, "outcome", outcome[0] != outcome[1], anyway, note="whatever p, q and coin are"))
    return found


def _schedule(aligned: Aligned) -> list[Field]:
    here = _steps(aligned)
    a, b = aligned.a, aligned.b
    rows = aligned.steps
    every = np.ones(len(rows[0]), np.bool_)
    trees = [_tree_hash(side)[at] for side, at in zip((a, b), rows, strict=True)]
    tokens = [side.steps["token"][at] for side, at in zip((a, b), rows, strict=True)]
    depth = [side.steps["accepted"][at] for side, at in zip((a, b), rows, strict=True)]
    found = [
        _other(here, "draft tree", trees[0] != trees[1], every, note="its tokens or its shape"),
        _other(here, "accepted tokens", depth[0] != depth[1], trees[0] == trees[1], note="same tree"),
        _other(
            here,
            "final token",
            tokens[0] != tokens[1],
            (trees[0] == trees[1]) & (depth[0] == depth[1]),
            note="same tree, as many accepted",
        ),
    ]
    about = (("batch", "requests in step"), ("prefill", "prefill tokens"), ("context", "cached tokens"))
    for name, says in about:
        x, y = (side.steps[name][at] for side, at in zip((a, b), rows, strict=True))
        found.append(_other(here, says, x != y, every))
    return [field for field in found if field.compared]


def _column(aligned: Aligned, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x, y = (side.nodes[name][at] for side, at in zip((aligned.a, aligned.b), aligned.nodes, strict=True))
    return x.astype(np.float64), y.astype(np.float64)


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


def _nodes(aligned: Aligned) -> Places:
    a, b = aligned.nodes
    return _Place(aligned.a, a[:0], a), _Place(aligned.b, b[:0], b)


def _steps(aligned: Aligned) -> Places:
    a, b = aligned.steps
    return _Place(aligned.a, a[:0], a, "steps"), _Place(aligned.b, b[:0], b, "steps")


def _number(
    places: Places,
    name: str,
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    where: Bools,
    tolerance: float | NDArray[np.float64],
    *,
    note: str = "",
    rare: float | None = None,
) -> Field:
    """Of a number. `rare`: the share that may lie beyond rounding; with more the side is suspect. None: it never is."""
    apart = np.where(where, np.abs(a - b), 0.0)
    worst = int(np.argmax(apart)) if len(apart) else -1
    largest = float(apart[worst]) if len(apart) else None
    made = _other(places, name, apart > tolerance, where, note=note, worst=worst)
    far = int((apart > BEYOND * tolerance).sum())
    suspect = rare is not None and (_many(far, made.compared, rare) or _many(made.differ, made.compared, COMMON))
    least = float(np.min(tolerance, initial=np.inf)) if isinstance(tolerance, np.ndarray) else tolerance
    return replace(made, largest=largest, tolerance=None if least == np.inf else least, suspect=suspect)


def _many(count: int, compared: int, rare: float) -> bool:
    return count >= FEWEST and count > rare * compared


def _other(
    places: Places,
    name: str,
    differ: Bools,
    where: Bools,
    *,
    note: str = "",
    suspects: bool = False,
    worst: int | None = None,
) -> Field:
    """Of whatever is equal or not."""
    differ = differ & where
    count, compared = int(differ.sum()), int(where.sum())
    example = None
    if count:
        at = int(np.argmax(differ)) if worst is None else worst
        example = (places[0].reference(at), places[1].reference(at))
    by = _where(places[1], differ, where) if count > 0 else ()
    told = _condition(places, differ[where], np.flatnonzero(where)) if 0 < count < compared else ""
    suspect = suspects and _many(count, compared, RARE)
    return Field(name, compared, count, None, None, example, by, suspect, note, told)


def _condition(places: Places, differ: Bools, chosen: Longs) -> str:
    """The shortest condition that tells where it differs, with its figures; "" where chance would find one as good."""
    a, b = places
    rows, steps = b.rows[chosen], b.side.steps[b.rows[chosen]]
    other = a.side.steps[a.rows[chosen]]
    capture = b.side.captures[0].run
    root = steps["context"] + steps["prefill"]
    facts: dict[str, NDArray[Any]] = {
        "after": np.array([*map(str, PRECEDED), "prefill"])[steps["preceded"]],
        "requests in the step": steps["batch"],
        "requests in the step differ": steps["batch"] != other["batch"],
        "output position": b.side.place[rows],
        "context length": steps["context"],
        "prefill tokens": steps["prefill"],
    }
    if capture is not None:
        facts["position of the root in its block"] = root % capture.block_size
    if b.of != "steps":
        facts["depth"] = b.depth[chosen]
    if b.of == "nodes":
        facts["sibling"] = b.sibling[chosen]
    found = find(facts, differ, rows)
    if found is None:
        return ""
    inside, outside = f"{found.hits_in:,} of {found.total_in:,}", f"{found.hits_out:,} of {found.total_out:,}"
    return f"{found.text}: {inside}; elsewhere {outside}"


def _where(place: _Place, differ: Bools, where: Bools) -> tuple[Where, ...]:
    """By depth, by rank among siblings, by what came before the step (of B), and by its batch."""
    steps = place.side.steps
    groups: list[tuple[str, NDArray[np.integer], Sequence[str] | None]] = []
    if place.of != "steps":
        groups.append(("depth", place.depth, None))
    if place.of == "nodes":
        groups.append(("sibling", place.sibling, None))
    groups += [("after", steps["preceded"][place.rows], PRECEDED)]
    groups += [("requests in the step", steps["batch"][place.rows], None)]
    found = []
    for group, values, names in groups:
        for value in np.unique(values[where]).tolist():
            mine = where & (values == value)
            text = str(value) if names is None else str(names[value]) if value >= 0 else "prefill"
            found.append(Where(group, text, int(mine.sum()), int((differ & mine).sum())))
    return tuple(found)
