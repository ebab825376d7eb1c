"""Where the outputs of a pair part: the decisions there, with p, q, coin and margin of both, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import PairedBy, other_rules, rounding
from specscope.analyze.compare.config import StepStage
from specscope.analyze.compare.side import Hashes, Side, SideRequest, mix
from specscope.analyze.findings import Reference
from specscope.trace.history.place import PlaceView, at, end
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import looks_ahead
from specscope.trace.record.tree import ROOT

BEYOND = 3.0  # rounding has no sharp bound: a difference of more than this many tolerances is not rounding
# An entropy moves by so many times a p's change: -log p of a token near 0, many tokens at once
WIDER = {"p": 1.0, "raw": 1.0, "H": 20.0}


class PartingCause(StrEnum):
    """Why two outputs part: the first that applies, with the stage where it enters and a sentence.

    Those that are `suspect` no seed, no text and no rounding explains; those that are `harmless` are to be expected.
    """

    stage: StepStage | None
    about: str
    suspect: bool
    harmless: bool

    def __new__(cls, word: str, stage: StepStage | None, about: str, kind: str = "") -> PartingCause:
        """`kind`: suspect, harmless, or neither."""
        made = str.__new__(cls, word)
        made._value_, made.stage, made.about = word, stage, about
        made.suspect, made.harmless = kind == "suspect", kind == "harmless"
        return made

    PARAMETERS = "parameters", StepStage.SAMPLING, "the sampling parameters differ", "harmless"
    END = "end", None, "one output, or its file, ends where the other continues", "harmless"
    SEED = "seed", None, "the seeds differ", "harmless"
    ROUNDING = "rounding", None, "at a near tie: rounding alone explains it", "harmless"
    TARGET = "target", StepStage.TARGET, "the target's probabilities differ at the same context", "suspect"
    CUT = "cut", None, "top-k, top-p or min-p left other tokens: rounding at the edge, or another rule"
    CHOICE = "choice", None, "the target chose another token; whether it was a near tie is not recorded"
    DRAFTER = "drafter", StepStage.DRAFTER, "the drafter's q differs at the same context", "suspect"
    DRAFTS = "drafts", None, "other tokens were drafted, so others were tried", "harmless"
    COIN = "coin", StepStage.COINS, "the coins differ, though seed and position are the same", "suspect"
    RULE = "rule", StepStage.COINS, "another rule of verification: the same p, q and coins decide otherwise", "harmless"
    VERDICT = "verdict", StepStage.VERDICT, "p, q and coin are the same, but the verdict differs", "suspect"
    UNKNOWN = "not known", None, "the captures do not say why"


@dataclass(frozen=True)
class Decision:
    """A token that was tried, or drawn as the final one, where two outputs part."""

    node: int | None  # None: the final token
    token: int
    text: str  # the token for people
    what: str  # accepted, rejected, or the kind of final token
    p: float
    q: float | None  # as drawn; None where the draft is deterministic, and for a final token
    coin: float
    accept_prob: float | None  # None for a final token
    margin: float  # how far p would have to move for another outcome; 1 where nothing could
    gap: float | None  # the target's raw first less its raw second probability; None where not recorded
    near_tie: bool
    raw_p: float | None = None  # the target's probability before temperature and rules; None where not recorded
    draft_p: float | None = None  # the drafter's own; None where it is no model, or not recorded
    greedy: bool = False  # whether the step left nothing to chance: then coin and accept_prob decided nothing
    near_draw: bool = False  # whether rounding could make another token of the drafter's draw


@dataclass(frozen=True)
class Half:
    at: Reference | None  # None where the output had ended
    position: int  # output tokens before the step
    decisions: tuple[Decision, ...]  # in the order of trial
    token: int | None  # that came out there; None where the output had ended
    row: int = -1  # its step in Side
    deep: int = 0  # output tokens of that step before this one
    rule: str = "standard"  # of verification
    drafted: tuple[tuple[int, int], ...] = ()  # (token, parent) of all nodes of the step

    @property
    def tried(self) -> list[Decision]:
        """Without that on the final token."""
        return [decision for decision in self.decisions if decision.node is not None]


@dataclass(frozen=True)
class Parting:
    """Where a pair's outputs part, or the first decision before that which differs."""

    position: int  # output tokens before it, the same on both sides
    cause: PartingCause
    a: Half
    b: Half


def decided(side: Side) -> Hashes:
    """[output tokens] a hash of what was decided at each place of the outputs: tokens tried, outcomes, kind of draw."""
    c = side.columns
    place, ends = side.begins[c.step] + c.depth - 1, side.begins[1:]
    mine = c.tried & (place < ends[c.step])
    what = mix(c.token[mine] * 4 + c.outcome[mine])
    out = np.zeros(len(c.output), np.uint64)
    np.add.at(out, place[mine], what * (mix(c.sibling[mine]) | np.uint64(1)))
    final = side.begins[:-1] + c.depth_reached
    drawn = final < ends
    np.add.at(out, final[drawn], mix(c.kind[drawn].astype(np.int64) + (c.final[drawn] << 3) + (1 << 40)))
    return out


def first_difference(a: NDArray[np.generic], b: NDArray[np.generic]) -> int | None:
    """The first place at which they differ, or the end of the shorter one where it begins the other; None if equal."""
    shared = min(len(a), len(b))
    unlike = np.flatnonzero(a[:shared] != b[:shared])
    if len(unlike):
        return int(unlike[0])
    return None if len(a) == len(b) else shared


class Partings:
    def __init__(self, a: Side, b: Side) -> None:
        self.sides = (a, b)
        self._decided = (decided(a), decided(b))
        drafting = [{(run.drafter, run.draft_model, run.tree) for run in side.runs} for side in (a, b)]
        self._other_drafts = drafting[0] != drafting[1]  # as configured
        self._coins = a.has_coins and b.has_coins

    def of(self, a: SideRequest, b: SideRequest, match: PairedBy) -> tuple[Parting | None, Parting | None]:
        """(where the outputs part, the first decision before that which differs)."""
        both = list(zip(self.sides, (a, b), self._decided, strict=True))
        place = first_difference(*(side.tokens(request) for side, request, _ in both))
        before = first_difference(*(every[side.output(request)] for side, request, every in both))
        return (
            None if place is None else self._parting(a, b, place, match),
            None if before is None or (place is not None and before >= place) else self._parting(a, b, before, match),
        )

    def _parting(self, a: SideRequest, b: SideRequest, place: int, match: PairedBy) -> Parting:
        both = list(zip(self.sides, (a, b), strict=True))
        tolerance = rounding(*(side.dtype(request) for side, request in both)) * max(a.heat, b.heat)
        first, second = (half(side, request, place, tolerance) for side, request in both)
        return Parting(place, self._cause(a, b, first, second, match, tolerance), first, second)

    def _cause(
        self, a: SideRequest, b: SideRequest, x: Half, y: Half, match: PairedBy, tolerance: float
    ) -> PartingCause:
        if match is PairedBy.PROMPT and other_rules(a, b):
            return PartingCause.PARAMETERS
        if x.token is None or y.token is None:
            return PartingCause.END
        greedy = a.greedy and b.greedy
        if not greedy and getattr(a.params, "seed", None) != getattr(b.params, "seed", None):
            return PartingCause.SEED
        cut, how = a.cut or b.cut, self._mechanical(x, y, tolerance, cut=a.cut or b.cut)
        if match is PairedBy.EXACT and self._coins and _certain(how, x, y):
            return how
        p, other = (known_p(side, part) for side, part in zip(self.sides, (x, y), strict=True))
        apart = {each: abs(p[each] - other[each]) for each in p.keys() & other.keys()}
        far = {kind for (kind, _), by in apart.items() if by > BEYOND * tolerance * WIDER[kind]}
        raw, p_differs, decisions = "raw" in far, bool(far - {"raw"}), (*x.decisions, *y.decisions)
        near = any(decision.near_tie for decision in decisions)
        drafted = self._other_drafts and how in (PartingCause.DRAFTS, PartingCause.DRAFTER)
        # A greedy output hangs neither on the drafts nor on the rule, and they do not excuse another target
        asked = not greedy and (drafted or how is PartingCause.RULE)
        if asked and (near or not (raw or (p_differs and not cut))):
            return how
        if near:
            return PartingCause.ROUNDING
        if greedy and x.token != y.token and all(decision.gap is None for decision in decisions):
            return PartingCause.CHOICE
        if raw or (greedy and x.token != y.token):
            return PartingCause.TARGET
        if p_differs:
            return PartingCause.CUT if cut else PartingCause.TARGET
        return how

    def _mechanical(self, x: Half, y: Half, tolerance: float, *, cut: bool) -> PartingCause:
        """If the target agrees: rule, drafter, drafts, coins or verdict. `cut`: whether top-k, top-p or min-p cut p."""
        if x.rule != y.rule:
            return PartingCause.RULE
        tried = list(zip(x.tried, y.tried, strict=False))
        qs = [(first.q, second.q) for first, second in tried if first.token == second.token]
        within = 0.0 if self._other_drafts else BEYOND * tolerance
        if any((q is None) != (r is None) or abs((q or 0.0) - (r or 0.0)) > within for q, r in qs):
            return PartingCause.DRAFTER
        other = next((pair for pair in tried if pair[0].token != pair[1].token), ())
        if any(decision.near_draw for decision in other):
            return PartingCause.ROUNDING
        below = looks_ahead(x.rule) and x.drafted != y.drafted  # what lies below decides as well
        if other or below or x.position != y.position or not x.decisions or not y.decisions:
            return PartingCause.DRAFTS
        for first, second in zip(x.decisions, y.decisions, strict=False) if self._coins else ():
            if first.node != second.node:
                return PartingCause.DRAFTS
            if first.coin != second.coin:
                return PartingCause.COIN
            if first.node is None and first.what == second.what and first.token != second.token and cut:
                return PartingCause.CUT  # one more token at the edge moves the borders of all that are drawn from
            if first.what != second.what or first.token != second.token:
                return PartingCause.VERDICT
        return PartingCause.UNKNOWN


def _certain(how: PartingCause, x: Half, y: Half) -> bool:
    """Whether rounding cannot explain it: another coin at the same place, or another outcome of the same numbers."""
    pairs = zip(x.tried, y.tried, strict=False)
    other = next((pair for pair in pairs if pair[0].coin != pair[1].coin or pair[0].what != pair[1].what), None)
    if other is None or how not in (PartingCause.COIN, PartingCause.VERDICT):
        return False
    a, b = ((one.accept_prob, one.p, one.q) for one in other)
    return how is PartingCause.COIN or a == b


def known_p(side: Side, half: Half) -> dict[tuple[str, int], float]:
    """The target's probabilities at the context: (p or raw, token) to its value; its entropy under H."""
    known: dict[tuple[str, int], float] = {}
    if half.row < 0 or not side.has_p:
        return known
    c, place = side.columns, _parent(side, half.row, half.deep)
    if place.choice is not None and place.likeliest:
        known = {("p", place.choice.token): place.choice.prob, ("H", 0): place.number("entropy") or 0.0}
        known["raw", place.likeliest[0].token] = place.likeliest[0].prob
    for node in (int(c.start[half.row]) + child for child in place.children):
        known["p", int(c.token[node])] = float(c.p[node])
        if not np.isnan(side.raw_p[node]):
            known["raw", int(c.token[node])] = float(side.raw_p[node])
    whole = float(side.final_whole[half.row])
    if len(half.decisions) > len(half.tried) and not np.isnan(whole):
        known["p", int(c.final[half.row])] = whole
    return known


def _parent(side: Side, step: int, deep: int) -> PlaceView:
    """The parent in a step under which its output token number `deep` was decided."""
    verdict = (part := side.columns.parts[step]).verdict
    assert verdict is not None
    return PlaceView(part, int(verdict.path[deep - 1]) if deep else ROOT)


def half(side: Side, request: SideRequest, index: int, tolerance: float) -> Half:
    """The step of a request that committed its output token number `index`, and what was decided there."""
    output, c, rows = side.tokens(request), side.columns, side.rows(request)
    if index >= len(output):
        return Half(None, len(output), (), None)
    row = rows.start + int(np.searchsorted(side.place[rows], index, "right")) - 1
    place = int(side.place[row])
    part, parent, deep = c.parts[row], _parent(side, row, index - place), index - place
    tried: list[int | None] = [node for node in parent.children if c.tried[c.start[row] + node]]
    every = [*tried, None] if deep == c.depth_reached[row] else tried
    decisions = tuple(_decision(side, row, node, tolerance, greedy=request.greedy) for node in every)
    where = Reference(request.id, part.index, int(side.step[row]))
    drafted = tuple(zip(part.tree.token.tolist(), part.tree.parent.tolist(), strict=True))
    return Half(where, place, decisions, int(output[index]), row, deep, str(c.rule[row]), drafted)


def _decision(side: Side, step: int, number: int | None, tolerance: float, *, greedy: bool) -> Decision:
    """What was decided on a node of a step, or on its final token (None). `greedy`: whether the request is."""
    c, part = side.columns, side.columns.parts[step]
    verdict = part.verdict
    assert verdict is not None
    if number is None:
        there, what, accept_prob, draw = end(part), verdict.kind.value, None, 1.0
        given = (c.final[step], c.final_p[step], c.final_coin[step], c.final_margin[step], side.final_gap[step])
    else:
        node, there = int(c.start[step]) + number, at(part, number)
        what = "accepted" if verdict.outcome[number] == Outcome.ACCEPTED else "rejected"
        accept_prob, draw = float(c.accept_prob[node]), float(side.draw_margin[node])
        margin = verdict.margin[number] if side.has_coins and side.has_p else 1.0
        given = (c.token[node], c.p[node], c.coin[node], margin, side.gap[node])
    token, (p, coin, margin, gap) = int(given[0]), map(float, given[1:])
    return Decision(
        node=number,
        token=token,
        text=side.vocabulary.show(token),
        what=what,
        p=p,
        q=None if number is None else there.q,
        coin=coin,
        accept_prob=accept_prob,
        margin=margin,
        gap=None if np.isnan(gap) else gap,
        near_tie=margin < tolerance or (greedy and gap < 2 * tolerance),  # of a greedy p both raw probabilities move
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=verdict.is_greedy,
        near_draw=draw < tolerance,
    )
