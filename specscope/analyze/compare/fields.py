"""What differs at equal contexts: p, q, features, coins, verdicts and the schedule, with the places where it does.

Each kind of evidence is a Field: how many of those compared differ, how far, an example, and the stage that it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Aligned, Hashes, mix
from specscope.analyze.compare.parting import BEYOND, ENTROPY, heat, is_cut
from specscope.analyze.compare.result import Field, StepStage, Where
from specscope.analyze.compare.side import Longs, Side
from specscope.analyze.conditions import find
from specscope.analyze.evidence.columns import PRECEDED
from specscope.analyze.findings import Reference
from specscope.trace.record.rules import NORM_ROUNDING, looks_ahead
from specscope.trace.record.tree import Bools, Doubles, Drawn

FEWEST = 3  # contexts that must differ before they count against a side
RARE = 0.002  # and more than this share of them
COMMON = 0.05  # of those that are only a little beyond rounding
EDGE = 0.1  # where top-k, top-p or min-p cut a distribution
EDGE_NOTE = "top-k, top-p or min-p cut it: rounding decides at the edge"
FEATURES, FIRST = "what feeds the drafter", "target's first token"
Both = tuple[Doubles, Doubles]  # of A and B


@dataclass(frozen=True)
class ContextRows:
    """Where compared values are, on both sides: at steps, at parents, or at tokens (nodes, and final tokens behind)."""

    aligned: Aligned
    of: Literal["steps", "parents", "tokens", "fed"]
    at: tuple[Longs, Longs]

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """A and B."""
        return self.aligned.a, self.aligned.b

    @cached_property
    def rows(self) -> tuple[Longs, Longs]:
        """The step of each."""
        a, b = (self._rows(number)[at] for number, at in enumerate(self.at))
        return a, b

    def _rows(self, number: int) -> Longs:
        side = self.sides[number]
        if self.of == "tokens":
            return np.concatenate([side.columns.step, self.aligned.drawn[number]])
        if self.of == "parents":
            return side.columns.parents.step
        return np.arange(len(side)) if self.of == "steps" else side.fed_step

    @cached_property
    def depth(self) -> tuple[Longs, Longs]:
        """The depth of each token in its tree; of a parent, 0 for the root."""
        depths = []
        for side, at, drawn in zip(self.sides, self.at, self.aligned.drawn, strict=True):
            c = side.columns
            if self.of == "parents":
                own = np.zeros(c.rows, np.int64)
                own[c.own_row] = c.depth
                depths.append(own[c.parents.row[at]])
            else:
                depths.append(np.concatenate([c.depth, c.depth_reached[drawn] + 1])[at])
        return depths[0], depths[1]

    @cached_property
    def sibling(self) -> Longs:
        """The rank of B's among its siblings, from 1; 0 for a final token."""
        c, drawn = self.sides[1].columns, self.aligned.drawn[1]
        return np.concatenate([c.sibling + 1, np.zeros(len(drawn), np.int64)])[self.at[1]]

    def hottest(self) -> Doubles:
        """How much the temperatures magnify a change of the logits, on either side."""
        return np.maximum(*self.by_request(heat))

    def cut(self) -> Bools:
        """Where top-k, top-p or min-p cut the distribution, on either side."""
        return np.logical_or(*self.by_request(is_cut))

    def by_request(self, value: Any) -> Both:  # noqa: ANN401 - a function of SideRequest
        """A number of the request of each."""
        a, b = (
            np.array([float(value(request)) for request in side.requests])[side.request[rows]]
            for side, rows in zip(self.sides, self.rows, strict=True)
        )
        return a, b

    @cached_property
    def alike(self) -> Bools:
        """Whether the same parameters shape p on both sides."""
        return self.aligned.alike[self.sides[0].request[self.rows[0]]]

    @cached_property
    def exact(self) -> Bools:
        """Whether parameters and seed are the same."""
        return self.aligned.exact[self.sides[0].request[self.rows[0]]]

    def column(self, name: str) -> Both:
        """A column of Columns, TriedParents or Side at these places."""
        held = [getattr(side.columns.parents if self.of == "parents" else side.columns, name) for side in self.sides]
        return self.values(held)

    def values(self, held: Sequence[NDArray[Any]]) -> Both:
        """Whole columns of both sides at these places, as numbers."""
        a, b = (column[at].astype(np.float64) for column, at in zip(held, self.at, strict=True))
        return a, b

    def of_steps(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """A column over the steps of Side."""
        a, b = (getattr(side, name)[rows] for side, rows in zip(self.sides, self.rows, strict=True))
        return a, b

    def reference(self, index: int) -> tuple[Reference, Reference]:
        """The compared values with this index, to look at."""
        a, b = (self._reference(number, int(self.at[number][index]), index) for number in (0, 1))
        return a, b

    def _reference(self, number: int, place: int, index: int) -> Reference:
        side, row = self.sides[number], int(self.rows[number][index])
        is_node = self.of == "tokens" and place < len(side.columns.step)
        node = place - int(side.columns.start[row]) if is_node else None
        return Reference(side.requests[side.request[row]].id, int(side.index[row]), int(side.step[row]), node)


def nodes(aligned: Aligned) -> ContextRows:
    """The nodes at equal contexts."""
    return ContextRows(aligned, "tokens", aligned.nodes)


def many(count: int, compared: int, rare: float) -> bool:
    """Whether it is more than a few, and more than this share."""
    return count >= FEWEST and count > rare * compared


def number(
    here: ContextRows,
    name: str,
    stage: StepStage,
    values: Both,
    where: Bools,
    tolerance: float | Doubles,
    *,
    note: str = "",
    rare: float = RARE,
) -> Field:
    """The field of a number. `rare`: the share that may lie beyond rounding; with more it is suspect."""
    # A value that is no number on one side alone is as far from the other as can be.
    a, b = values
    apart = np.where(np.isnan(a) | np.isnan(b), np.where(np.isnan(a) & np.isnan(b), 0.0, np.inf), np.abs(a - b))
    apart = np.where(where, apart, 0.0)
    worst = int(np.argmax(apart)) if len(apart) else -1
    made = other(here, name, stage, apart > tolerance, where, note=note, worst=worst)
    far = int((apart > BEYOND * tolerance).sum())
    suspect = many(far, made.compared, rare) or many(made.differ, made.compared, COMMON)
    least = float(np.min(tolerance, initial=np.inf))
    largest = float(apart[worst]) if len(apart) else None
    return replace(made, largest=largest, tolerance=None if least == np.inf else least, suspect=suspect)


def other(
    here: ContextRows,
    name: str,
    stage: StepStage | None,
    differ: Bools,
    where: Bools,
    *,
    note: str = "",
    far: Bools | None = None,
    worst: int | None = None,
) -> Field:
    """The field of values that are equal or not. `far`: where rounding does not explain a difference; None: everywhere.

    Without a stage it follows from other fields, or from the load, and is not judged.
    """
    differ = differ & where
    count, compared = int(differ.sum()), int(where.sum())
    example = here.reference(int(np.argmax(differ)) if worst is None else worst) if count else None
    suspect = stage is not None and many(int((differ if far is None else differ & far).sum()), compared, RARE)
    return Field(
        name,
        compared,
        count,
        None,
        None,
        example,
        _where(here, differ, where) if count else (),
        suspect,
        judged=stage is not None,
        note=note,
        condition=_condition(here, differ[where], np.flatnonzero(where)) if 0 < count < compared else "",
        stage=stage,
    )


def _condition(here: ContextRows, differ: Bools, chosen: Longs) -> str:
    """The shortest condition that says where it differs, with its counts; "" where chance would find one as good."""
    side, rows, beside = here.sides[1], here.rows[1][chosen], here.rows[0][chosen]
    run = side.captures[0].run
    facts: dict[str, NDArray[Any]] = {
        "after": np.array(list(map(str, PRECEDED)))[side.preceded[rows]],
        "requests in the step": side.batch[rows],
        "requests in the step differ": side.batch[rows] != here.sides[0].batch[beside],
        "output position": side.place[rows],
        "context length": side.context[rows],
        "prefill tokens": side.prefill[rows],
    }
    if run is not None:
        facts["position of the root in its block"] = side.columns.position[rows] % run.block_size
    if here.of in ("tokens", "parents"):
        facts["depth"] = here.depth[1][chosen]
    if here.of == "tokens":
        facts["sibling"] = here.sibling[chosen]
    best = find(facts, differ, rows)
    if best is None:
        return ""
    inside, outside = f"{best.hits_in:,} of {best.total_in:,}", f"{best.hits_out:,} of {best.total_out:,}"
    return f"{best.text}: {inside}; elsewhere {outside}"


def _where(here: ContextRows, differ: Bools, where: Bools) -> tuple[Where, ...]:
    """By depth, by rank among siblings, by what came before the step (of B), and by its batch."""
    rows, side = here.rows[1], here.sides[1]
    groups: list[tuple[str, Longs]] = [("after", side.preceded[rows]), ("requests in the step", side.batch[rows])]
    if here.of == "tokens":
        groups.insert(0, ("sibling", here.sibling))
    if here.of in ("tokens", "parents"):
        groups.insert(0, ("depth", here.depth[1]))
    lines = []
    for group, values in groups:
        for value in np.unique(values[where]).tolist():
            mine = where & (values == value)
            text = str(PRECEDED[value]) if group == "after" else str(value)
            lines.append(Where(group, text, int(mine.sum()), int((differ & mine).sum())))
    return tuple(lines)


def fields(aligned: Aligned, trees: Sequence[Field]) -> list[Field]:
    """What is compared at equal contexts; `trees` among it."""
    every = [*_target(aligned), *_whole(aligned), *_drafter(aligned), *_decisions(aligned), *trees, *_steps(aligned)]
    return [field for field in every if field.compared or field.name in ("target p", "coin", "verdict", "outcome")]


def _target(aligned: Aligned) -> list[Field]:
    """p wherever both sides have it. Where the first two tokens are nearly equal, rounding turns a greedy 0 into 1."""
    sides = aligned.a, aligned.b
    here = ContextRows(aligned, "tokens", aligned.tokens)

    def known(of_node: str, of_final: str | None) -> Both:
        held = []
        for side, drawn in zip(sides, aligned.drawn, strict=True):
            values = side.columns.p if of_node == "p" else getattr(side, of_node)
            last = np.full(len(drawn), np.nan) if of_final is None else getattr(side, of_final)[drawn]
            held.append(np.concatenate([values, last]))
        return here.values(held)

    p, raw, gap = known("p", "final_whole"), known("raw_p", None), known("gap", "final_gap")
    tolerance = aligned.tolerance
    near = np.minimum(*(np.nan_to_num(values, nan=1.0) for values in gap)) < 2 * tolerance
    if not (aligned.a.has_p and aligned.b.has_p):
        near[:] = True  # nothing is compared then
    # A greedy p without raw probabilities: whether a 0 that became 1 was a near tie cannot be known.
    near |= np.isnan(gap[0]) & np.isnan(gap[1]) & np.isin(p[0], (0, 1)) & np.isin(p[1], (0, 1)) & (p[0] != p[1])
    where, hot, cut = ~near & here.alike, here.hottest(), here.cut()
    note, shaped = f"rounding of the dtypes is {tolerance:g}", StepStage.SAMPLING
    return [
        number(here, "target p", shaped, p, where & ~cut, tolerance * hot, note=note),
        number(here, "target p, cut", shaped, p, where & cut, tolerance * hot, note=EDGE_NOTE, rare=EDGE),
        number(here, "target p, raw", StepStage.TARGET, raw, ~np.isnan(raw[0] + raw[1]), tolerance, note=note),
    ]


def _whole(aligned: Aligned) -> list[Field]:
    """Whole distributions: first token and entropy, which compare even where neither side tried the other's tokens."""
    here = ContextRows(aligned, "parents", aligned.parents)
    if not len(here.at[0]):
        return []
    tolerance = aligned.tolerance
    top, top_p = ([getattr(side.columns.parents, name)[:, 0] for side in here.sides] for name in ("top", "top_p"))
    first, choice_p = here.values(top), here.column("choice_p")
    greedy = (choice_p[0] == 1) & (choice_p[1] == 1)
    drawn = ~greedy & ~here.cut() & here.alike
    far = ~(np.minimum(*here.column("gap")) < 2 * tolerance)  # both tokens' probabilities move
    wide, note = ENTROPY * tolerance * here.hottest(), "raw; near ties among them"
    same, every = np.asarray(first[0] == first[1], np.bool_), np.ones(len(far), np.bool_)
    return [
        number(here, "target p, first token", StepStage.TARGET, here.values(top_p), same, tolerance),
        number(here, "target entropy", StepStage.SAMPLING, here.column("entropy"), drawn, wide),
        other(here, FIRST, StepStage.TARGET, ~same, every, note=note, far=far),
    ]


def _drafter(aligned: Aligned) -> list[Field]:
    """What the drafters gave: features, q as sampled from, the drafter's own probability, and entropies.

    Compared at nodes of the same depth: a head starts from the target's features at the root and from its own below
    it, so the same text at another depth may have another probability. A head runs once per level, on its output at
    the level above: its rounding grows with the depth.
    """
    here, stage = nodes(aligned), StepStage.DRAFTER
    sampled = np.logical_and(*(values != Drawn.DETERMINISTIC for values in here.column("drawn")))
    comparable = (here.depth[0] == here.depth[1]) & _same_elders(here) & here.alike
    tolerance = aligned.tolerance * here.hottest() * here.depth[0]
    q, prob, cut = here.column("q"), here.column("draft_prob"), here.cut() & sampled
    known = ~np.isnan(prob[0] + prob[1]) & comparable & ~cut
    found = [
        *_features(aligned),
        number(here, "drafter q", stage, q, sampled & comparable & ~cut, tolerance, note="as sampled from"),
        number(here, "drafter q, cut", stage, q, comparable & cut, tolerance, note=EDGE_NOTE, rare=EDGE),
        number(here, "draft p", stage, prob, known, tolerance, note="its own, of the token"),
    ]
    above = ContextRows(aligned, "parents", aligned.parents)
    if len(above.at[0]):
        entropy, depth = above.column("q_entropy"), above.depth
        where = (entropy[0] > 0) & (entropy[1] > 0) & (depth[0] == depth[1]) & above.alike & ~above.cut()
        wide = ENTROPY * aligned.tolerance * above.hottest() * (depth[0] + 1)
        found.append(number(above, "drafter entropy", stage, entropy, where, wide))
    return found


def _same_elders(here: ContextRows) -> Bools:
    """[nodes] whether the same elder siblings were drawn before the node.

    They matter only to a draw without replacement, which is from what they left of q.
    """
    a, b = (
        np.where(side.columns.drawn == Drawn.WITHOUT_REPLACEMENT, _elders(side), 0)[at]
        for side, at in zip(here.sides, here.at, strict=True)
    )
    return np.asarray(a == b)


def _elders(side: Side) -> Hashes:
    """[N] a hash of the tokens of each node's elder siblings, in draw order."""
    c = side.columns
    order = np.argsort(c.row, kind="stable")
    each = mix(c.token[order]) * (mix(c.sibling[order]) | np.uint64(1))
    sums = np.cumsum(each) - each  # of all before it; less those of other families
    first = np.maximum.accumulate(np.where(c.sibling[order] == 0, np.arange(len(order)), 0))
    hashes = np.empty(len(order), np.uint64)
    hashes[order] = sums - sums[first]
    return hashes


def _features(aligned: Aligned) -> list[Field]:
    """What fed an EAGLE head: the norms of the target's hidden states, row by row, as relative differences."""
    here = ContextRows(aligned, "fed", aligned.fed)
    layers = min(side.fed_norms.shape[1] for side in here.sides)
    a, b = (side.fed_norms[at, :layers] for side, at in zip(here.sides, here.at, strict=True))
    known = ~np.isnan(a + b)
    if not known.any():
        return []
    scale = np.maximum(np.maximum(a, b), np.finfo(np.float32).tiny)
    apart = np.where(known, np.abs(a - b) / scale, 0).max(axis=1)
    dtypes = {run.dtype for side in here.sides for run in side.runs} or {""}
    tolerance = max(NORM_ROUNDING.get(dtype, max(NORM_ROUNDING.values())) for dtype in dtypes)
    note = "the norms of the rows that fed the head, relative to the norm"
    where, none = np.asarray(known.any(axis=1), np.bool_), np.zeros(len(apart))
    return [number(here, FEATURES, StepStage.FEATURES, (apart, none), where, tolerance, note=note)]


def _decisions(aligned: Aligned) -> list[Field]:
    here = nodes(aligned)
    a, b = aligned.a, aligned.b
    rows, coin, outcome = here.rows, here.column("coin"), here.column("outcome")
    tried = np.logical_and(*(side.columns.tried[at] for side, at in zip((a, b), here.at, strict=True)))
    judged = tried & ~(a.forced[rows[0]] | b.forced[rows[1]])
    coins = a.has_coins and b.has_coins
    # A coin belongs to a position and a node's number in its tree: it is the same where these are.
    positions = [side.columns.position[row] for side, row in zip((a, b), rows, strict=True)]
    numbers = here.column("node")
    same_coin = here.exact & coins & (positions[0] == positions[1]) & (numbers[0] == numbers[1])
    equal = judged & coins & (np.abs(coin[0] - coin[1]) <= 1e-12) & _same_below(here)
    for x, y in (here.column("p_trial"), here.column("q_trial")):
        equal &= np.abs(x - y) <= 1e-7
    differ, of_coin = outcome[0] != outcome[1], "of the same seed, position and number in the tree"
    return [
        number(here, "coin", StepStage.COINS, coin, same_coin & tried, 1e-12, note=of_coin),
        other(here, "verdict", StepStage.VERDICT, differ, equal, note="p, q and coin are the same there"),
        other(here, "outcome", None, differ, judged, note="follows from p, q, coin and verdict"),
    ]


def _same_below(here: ContextRows) -> Bools:
    """[nodes] False where the rule judges what is drafted below a node first, and that is not the same."""
    ahead, trees = [], []
    for side, rows in zip(here.sides, here.rows, strict=True):
        ahead.append(np.array(list(map(looks_ahead, side.rules)), np.bool_)[rows])
        trees.append(tree_hash(side)[rows])
    return np.asarray(~(ahead[0] | ahead[1]) | (trees[0] == trees[1]))


def tree_hash(side: Side) -> Hashes:
    """[S] a hash of the tokens and the shape of each step's tree, in draw order."""
    c = side.columns
    each = mix((c.token << 20) ^ ((c.parent + 1) << 9) ^ c.node)
    out = np.zeros(len(side), np.uint64)
    np.add.at(out, c.step, each * (mix(c.node) | np.uint64(1)))
    return out


def _steps(aligned: Aligned) -> list[Field]:
    """Whole steps: what follows from all that was judged before, and the load."""
    here = ContextRows(aligned, "steps", aligned.steps)
    every = np.ones(len(here.at[0]), np.bool_)
    trees = [tree_hash(side)[at] for side, at in zip(here.sides, here.at, strict=True)]
    same, depth, final = trees[0] == trees[1], here.column("depth_reached"), here.column("final")
    follows = "same tree; follows from the verdicts", "same tree, as many accepted; follows from p and coin"
    found = [
        other(here, "accepted tokens", None, depth[0] != depth[1], same, note=follows[0]),
        other(here, "final token", None, final[0] != final[1], same & (depth[0] == depth[1]), note=follows[1]),
    ]
    for name, says in (("batch", "requests in step"), ("prefill", "prefill tokens"), ("context", "cached tokens")):
        x, y = here.of_steps(name)
        found.append(other(here, says, None, x != y, every, note="load: not judged"))
    return found
