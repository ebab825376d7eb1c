"""What differs at equal contexts: p, q, features, coins, verdicts and trees, with the places where it does.

Each kind of evidence is a Field: how many of those compared differ, how far, an example, and the stage that it is of.

A bound on rounding lets a single decision pass. What rounding does as a rule is far less, and many decisions show it:
most near ties of trees are nearer than three times that, and the log odds of a whole request move by less than twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from specscope.analyze.compare.align import Aligned, Both, ContextRows
from specscope.analyze.compare.config import StepStage
from specscope.analyze.compare.parting import BEYOND
from specscope.analyze.compare.side import Hashes, Longs, Side, mix
from specscope.analyze.conditions import find
from specscope.analyze.evidence.columns import PRECEDED
from specscope.analyze.findings import Reference
from specscope.plans.kinds import model_part, text_part
from specscope.trace.record.rules import NORM_ROUNDING, ROUNDING, log_odds
from specscope.trace.record.tree import Bools, Doubles, Drawn

FEWEST = 3  # contexts that must differ before they count against a side
RARE = 0.002  # and more than this share of them
COMMON = 0.05  # of those that are only a little beyond rounding
EDGE = 0.1  # where top-k, top-p or min-p cut a distribution
EDGE_NOTE = "top-k, top-p or min-p cut it: rounding decides at the edge"
FEATURES, FIRST = "what feeds the drafter", "target's first token"
ALWAYS = ("target p", "coin", "verdict")  # listed also where nothing is compared
BEFORE = np.array(list(map(str, PRECEDED)))
TREE, DRIFT = "draft tree", "draft p, on the whole"
UNTOLD = "whether at near ties is not recorded"
# d log p = dp / p: what moves a p of 1/4 by the tolerance moves its logarithm by four times that
OF_LOG = 4.0
NARROW = ROUNDING["float32"]  # with a wider rounding a near tie at one level may change the levels below it
USUAL = 0.4  # of the bound: what rounding moves log odds by, at the median
NEAR, FURTHER = 3.0, 0.05  # times that by the root of the depth: so many near ties are further apart, at most
CHANCE = 1e-3  # that near ties alone are so far apart
DRIFTED = 1.75  # times the usual: no rounding moves the median request by so much
SMALLEST = 1e-9  # of a probability whose log odds are compared


FAR = (math.inf, 0.0, 1)  # no near tie
UNKNOWN = (math.nan, 0.0, 1)  # what would tell is not recorded


@dataclass(frozen=True)
class Field:
    """One kind of evidence at equal contexts."""

    name: str
    compared: int
    differ: int
    largest: float | None  # the largest difference; None where it is no number
    example: tuple[Reference, Reference] | None  # of the largest, or the first
    stage: StepStage
    suspect: bool = False  # whether no rounding and nothing in the configuration explains it
    explained: tuple[str, ...] = ()  # what in the configuration does, where no rounding can
    unsure: bool = False  # whether it is not recorded if rounding explains it
    note: str = ""
    condition: str = ""  # the condition that best says where it differs, with its counts

    @property
    def share(self) -> float:
        return self.differ / self.compared if self.compared else 0.0

    @property
    def sentence(self) -> str:
        """`draft p differs at 12 of 300 equal contexts`."""
        return f"{self.name} differs at {self.differ:,} of {self.compared:,} equal contexts"


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
    none = np.isnan(values[0]), np.isnan(values[1])  # on one side alone, no number is as far as can be
    apart = np.where(none[0] | none[1], np.where(none[0] & none[1], 0.0, np.inf), np.abs(values[0] - values[1]))
    apart = np.where(where, apart, 0.0)
    worst = int(np.argmax(apart)) if len(apart) else -1
    made = other(here, name, stage, apart > tolerance, where, note=note, worst=worst)
    suspect = many(int((apart > BEYOND * tolerance).sum()), made.compared, rare)
    suspect |= many(made.differ, made.compared, COMMON)
    return replace(made, largest=float(apart[worst]) if len(apart) else None, suspect=suspect)


def other(
    here: ContextRows,
    name: str,
    stage: StepStage,
    differ: Bools,
    where: Bools,
    *,
    note: str = "",
    far: Bools | None = None,
    worst: int | None = None,
) -> Field:
    """The field of values that are equal or not. `far`: where rounding explains no difference; None: everywhere."""
    differ, compared = differ & where, int(where.sum())
    count = int(differ.sum())
    return Field(
        name,
        compared,
        count,
        largest=None,
        example=here.reference(int(np.argmax(differ)) if worst is None else worst) if count else None,
        stage=stage,
        suspect=many(int((differ if far is None else differ & far).sum()), compared, RARE),
        note=note,
        condition=_condition(here, differ[where], np.flatnonzero(where)) if 0 < count < compared else "",
    )


def _condition(here: ContextRows, differ: Bools, chosen: Longs) -> str:
    """The shortest condition that says where it differs, with its counts; "" where chance would find one as good."""
    facts = {name: column[chosen] for name, column in here.facts.items()}
    best = find(facts | {"after": BEFORE[facts["after"]]}, differ, here.step[1][chosen])
    if best is None:
        return ""
    inside, outside = f"{best.hits_in:,} of {best.total_in:,}", f"{best.hits_out:,} of the other {best.total_out:,}"
    return f"differs at {inside} where {best.text}, at {outside}"


def fields(aligned: Aligned) -> list[Field]:
    """All that is compared at equal contexts, each behind what decides it."""
    kinds = (_target, _features, _drafter, _decisions, _trees)
    every = list[Field]()
    for kind in kinds:
        every += kind(aligned)
        aligned.a.forget()
        aligned.b.forget()
    return [field for field in every if field.compared or field.name in ALWAYS]


def _target(aligned: Aligned) -> list[Field]:
    """p wherever both sides have it. Where the first two tokens are nearly equal, rounding turns a greedy 0 into 1.

    At parents the first token: also where neither side tried the other's tokens.
    """
    here, tolerance, sampling, target = aligned.tokens, aligned.tolerance, StepStage.SAMPLING, StepStage.TARGET
    p = here.values(np.append(side.columns.p, side.final_whole[side.drawn]) for side in here.sides)
    raw = here.values(np.append(side.raw_p, np.full(len(side.drawn), np.nan)) for side in here.sides)
    gap = here.values(np.append(side.gap, side.final_gap[side.drawn]) for side in here.sides)
    near = np.fmin(*gap) < 2 * tolerance
    # A greedy p without raw probabilities: whether a 0 that became 1 was a near tie cannot be known.
    near |= np.isnan(gap[0]) & np.isnan(gap[1]) & np.isin(p[0], (0, 1)) & np.isin(p[1], (0, 1)) & (p[0] != p[1])
    where, wide, note = ~near & here.alike, tolerance * here.hottest, f"rounding of the dtypes is {tolerance:g}"
    where &= aligned.a.has_p and aligned.b.has_p
    found = [
        number(here, "target p", sampling, p, where & ~here.cut, wide, note=note),
        number(here, "target p, cut", sampling, p, where & here.cut, wide, note=EDGE_NOTE, rare=EDGE),
        number(here, "target p, raw", target, raw, ~np.isnan(raw[0] + raw[1]), tolerance, note=note),
    ]
    here = aligned.parents
    if not len(here):
        return found
    first, top_p = first_tokens(here)
    far = ~(np.minimum(*here.column("columns.parents.gap")) < 2 * tolerance)  # both tokens' probabilities move
    same, note = np.asarray(first[0] == first[1]), "raw; near ties among them"
    return [
        *found,
        number(here, "target p, first token", target, top_p, same, tolerance),
        other(here, FIRST, target, ~same, np.ones_like(same), note=note, far=far),
    ]


def first_tokens(parents: ContextRows) -> tuple[Both, Both]:
    """The target's likeliest token at parents, and its probability."""
    held = [side.columns.parents for side in parents.sides]
    return parents.values(each.top[:, 0] for each in held), parents.values(each.top_p[:, 0] for each in held)


def _features(aligned: Aligned) -> list[Field]:
    """What fed an EAGLE head: the norms of the target's hidden states, row by row, as relative differences."""
    here, norms = aligned.fed, [side.fed[2] for side in aligned.fed.sides]
    layers = min(each.shape[1] for each in norms)
    a, b = here.values(each[:, :layers] for each in norms)
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


def _drafter(aligned: Aligned) -> list[Field]:
    """What the drafters gave: q as sampled from, and the drafter's own probability.

    Compared at nodes of the same depth: a head starts from the target's features at the root and from its own below
    it, so the same text at another depth may have another probability. A head runs once per level, on its output at
    the level above: its rounding grows with the depth.
    """
    here, stage = aligned.nodes, StepStage.DRAFTER
    sampled = np.logical_and(*(values != Drawn.DETERMINISTIC for values in here.column("columns.drawn")))
    x, y = (_elders(side)[at] for side, at in zip(here.sides, here.at, strict=True))
    comparable = (here.depth[0] == here.depth[1]) & (x == y) & here.alike
    q, prob, cut = here.column("columns.q"), here.column("columns.draft_prob"), here.cut & sampled
    known, wide = ~np.isnan(prob[0] + prob[1]) & comparable & ~cut, aligned.tolerance * here.hottest * here.depth[0]
    return [
        number(here, "drafter q", stage, q, sampled & comparable & ~cut, wide, note="as sampled from"),
        number(here, "drafter q, cut", stage, q, comparable & cut, wide, note=EDGE_NOTE, rare=EDGE),
        number(here, "draft p", stage, prob, known, wide, note="its own, of the token"),
    ]


def _elders(side: Side) -> Hashes:
    """[N] a hash of the tokens of each node's elder siblings, in draw order, where it was drawn from what they left."""
    c = side.columns
    hashes, told = np.zeros(len(c.token), np.uint64), mix(c.token) * (mix(c.sibling) | np.uint64(1))
    for place in range(1, int(c.sibling.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.sibling == place)
        hashes[nodes] = hashes[c.elder[nodes]] + told[c.elder[nodes]]
    return np.where(c.drawn == Drawn.WITHOUT_REPLACEMENT, hashes, 0)


def _decisions(aligned: Aligned) -> list[Field]:
    """Coins and verdicts at nodes that both sides tried."""
    here, coins = aligned.nodes, aligned.a.has_coins and aligned.b.has_coins

    def same(name: str, within: float = 0.0) -> Bools:
        a, b = here.column(f"columns.{name}")
        return np.asarray(np.abs(a - b) <= within)

    coin, tried = here.column("columns.coin"), np.logical_and(*here.column("columns.tried"))
    judged = tried & ~np.logical_or(*here.of_steps("forced"))
    # A coin belongs to a position and a node's number in its tree: it is the same where these are.
    position = np.equal(*here.of_steps("columns.position"))
    same_coin = tried & here.exact & coins & position & same("node")
    equal = judged & coins & same("coin", 1e-12) & same("p_trial", 1e-7) & same("q_trial", 1e-7)
    # Where the rule judges what is drafted below a node first, that must be the same too.
    equal &= np.equal(*here.of_steps("tree")) | ~np.logical_or(*here.of_steps("columns.looks_ahead"))
    of_coin = "of the same seed, position and number in the tree"
    return [
        number(here, "coin", StepStage.COINS, coin, same_coin, 1e-12, note=of_coin),
        other(here, "verdict", StepStage.VERDICT, ~same("outcome"), equal, note="p, q and coin are the same there"),
    ]


def _trees(aligned: Aligned) -> list[Field]:
    """Trees where the context decides what is drafted; and the drafter's p where it moves on the whole."""
    here, narrow, usual = aligned.steps, aligned.tolerance <= NARROW, _usual(aligned)
    differ, judged = np.not_equal(*here.of_steps("tree")), _judged(here)
    ties = [_tie(aligned, index) for index in np.flatnonzero(differ & judged).tolist()]
    apart, bound, depth = np.array(ties, np.float64).reshape(-1, 3).T
    further = int(((apart > bound) | (apart > NEAR * usual * np.sqrt(depth))).sum())  # it adds up as a random walk does
    far, known = int((apart > bound).sum()), int((~np.isnan(apart)).sum())
    made = other(here, TREE, StepStage.TREE, differ, judged, note="its tokens or its shape; near ties among them")
    odd = not narrow and further >= FEWEST and _at_least(further, known, FURTHER) < CHANCE
    rare = RARE if narrow else COMMON
    suspect = many(far, made.compared, rare) or odd
    unsure = not suspect and many(far + len(ties) - known, made.compared, rare)
    says = f"{further:,} of {known:,} are further apart than near ties" if odd else ""
    made = replace(
        made, suspect=suspect, unsure=unsure, note=UNTOLD if unsure else made.note, condition=made.condition or says
    )
    return [made, *([] if narrow else _drift(aligned, usual))]


def _at_least(count: int, of: int, share: float) -> float:
    """The probability of so many or more, each with this probability."""
    return sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(count, of + 1))


def _drift(aligned: Aligned, usual: float) -> list[Field]:
    """The drafter's own p, where the requests' median of how far its log odds moved is more than twice the usual."""
    here = aligned.nodes
    apart, request = _apart(*here.column("columns.draft_prob")), here.sides[0].request[here.step[0]]
    comparable = ~np.isnan(apart) & here.alike & (here.depth[0] == here.depth[1])
    found = []
    for level, where in (("at the root", here.depth[0] == 1), ("below the root", here.depth[0] > 1)):
        mine = where & comparable
        medians = [float(np.median(apart[mine & (request == one)])) for one in np.unique(request[mine])]
        median = float(np.median(medians)) if len(medians) >= FEWEST else 0.0
        if median > DRIFTED * usual:
            made = other(here, f"{DRIFT}, {level}", StepStage.DRAFTER, apart > 2 * usual, mine)
            says = f"log odds move by {median:.2g} at the median request; rounding moves them by {usual:.2g}"
            found.append(replace(made, suspect=True, condition=says, note=says))
    return found


def _usual(aligned: Aligned) -> float:
    """How far rounding moves a log odds of the drafter as a rule, between these two runs.

    As the dtype does, or more where both the target and the drafter at the root moved more: a fault of the drafter
    moves no target.
    """
    here, least = aligned.nodes, USUAL * aligned.tolerance
    if not len(aligned.parents):
        return least
    root = _apart(*here.column("columns.draft_prob"))[(here.depth[0] == 1) & (here.depth[1] == 1)]
    first, top_p = first_tokens(aligned.parents)
    moved = root, _apart(*top_p)[first[0] == first[1]]
    return max(least, min(0.0 if np.isnan(each).all() else float(np.nanmedian(each)) for each in moved))


def _apart(a: Doubles, b: Doubles) -> Doubles:
    """How far the log odds of two probabilities are apart."""
    return np.asarray(np.abs(np.subtract(*(log_odds(p, SMALLEST, 1 - SMALLEST) for p in (a, b)))))


def _judged(here: ContextRows) -> Bools:
    """[steps] whether the context alone decides what is drafted; where drafts are sampled, with the same coins.

    Not where one of two engines drafted nothing behind a prompt, as it never does.
    """
    engines = [{"" if run.is_ours else run.backend for run in side.runs} for side in here.sides]
    behind = np.not_equal(*here.of_steps("drafts")) & (np.maximum(*here.of_steps("prefill")) > 0)
    free = np.logical_or(*here.of_steps("varies")) | (behind & (engines[0] != engines[1]))
    drawn = [c.any_in_step(c.sampled) for c in (side.columns for side in here.sides)]
    x, y = (each[step] for each, step in zip(drawn, here.step, strict=True))
    return np.asarray(~free & here.alike & (here.exact | ~(x | y)))


class _Tree:
    """The nodes of a step, by column. A path is the hash of its tokens."""

    def __init__(self, side: Side, paths: Hashes, step: int) -> None:
        c, nodes = side.columns, slice(side.columns.start[step], side.columns.start[step + 1])
        self.path, self.above = paths[c.own_row[nodes]], paths[c.row[nodes]]
        self.score, self.prob, self.depth = c.score[nodes], c.draft_prob[nodes], c.depth[nodes]
        self.margin, self.drawn = side.draw_margin[nodes], bool(c.sampled[nodes].any())
        drafter = c.parts[step].drafter
        self.looked_up = bool(text_part(drafter)) and not model_part(drafter)  # then nothing is rounded
        self.told = not np.isnan(self.score + self.prob).any()


def _tie(aligned: Aligned, index: int) -> tuple[float, float, int]:
    """The tie at which the trees of a step part: how far apart it is, and may be by rounding at most; at which level.

    What is in a tree ranks above what is left out, so rounding swaps two nodes only where their scores are nearly the
    same; the nodes below them follow. Children of one parent are of one distribution: their probabilities, each from
    the side that has it, cannot sum to more than 1.
    """
    here, rounding = aligned.steps, BEYOND * aligned.tolerance * float(aligned.steps.hottest[index])
    places = zip(here.sides, aligned.paths, here.step, strict=True)
    a, b = (_Tree(side, paths, int(step[index])) for side, paths, step in places)
    shared = min(len(a.path), len(b.path))
    first = int(np.argmax(np.append(a.path[:shared] != b.path[:shared], True)))
    if a.drawn or b.drawn:  # was the coin of the first draw that differs at the border of another token?
        if first == shared:
            return FAR  # one has nodes that the other does not
        margin, depth = min(float(tree.margin[first]) for tree in (a, b)), int(a.depth[first])
        return margin, rounding * depth, depth
    if a.looked_up and b.looked_up:
        return FAR
    if not (a.told and b.told):
        return UNKNOWN
    deepest = max(int(tree.depth.max(initial=1)) for tree in (a, b))
    only_a, only_b = ~np.isin(a.path, b.path), ~np.isin(b.path, a.path)
    _, family = np.unique(np.concatenate([a.above, b.above[only_b]]), return_inverse=True)
    masses = np.bincount(family, np.concatenate([a.prob, b.prob[only_b]]))
    if (masses > 1 + rounding * deepest).any() or only_a.any() != only_b.any():
        return FAR  # with the same plan one has fewer nodes
    best = [
        float(tree.score[only].max() if only.any() else tree.score[first])  # else the same nodes in another order
        for tree, only in ((a, only_a), (b, only_b))
    ]
    return abs(best[0] - best[1]), OF_LOG * rounding * deepest, deepest
