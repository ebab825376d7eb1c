"""Where the outputs of a pair part: the decisions there, with p, q, coin and margin of both, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import Hashes, mix, other_rules, rounding
from specscope.analyze.compare.result import Decision, Half, PairedBy, Parting, PartingCause
from specscope.analyze.compare.side import Side, SideRequest
from specscope.analyze.findings import Reference
from specscope.trace.history.place import at, end
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.rules import looks_ahead
from specscope.trace.record.tree import ROOT, Drawn

BEYOND = 3.0  # rounding has no sharp bound: a difference of more than this many tolerances is not rounding
ENTROPY = 20.0  # an entropy moves by so many times a p's change: -log p of a token near 0, many tokens at once


def heat(request: SideRequest) -> float:
    """How much the temperature magnifies a change of the logits; 1 from temperature 1 on."""
    params = None if request.info is None else request.info.params
    return 1.0 if params is None or params.greedy else max(1.0, 1 / params.temperature)


def is_cut(request: SideRequest) -> bool:
    """Whether top-k, top-p or min-p cut the target's distribution: at the edge, rounding decides which tokens stay."""
    params = None if request.info is None else request.info.params
    return params is not None and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _greedy(request: SideRequest) -> bool:
    return request.info is None or request.info.params.greedy


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
    """Finds where the outputs of pairs of two sides part."""

    def __init__(self, a: Side, b: Side) -> None:
        self.sides = (a, b)
        self._decided = (decided(a), decided(b))
        self._other_drafts = _drafting(a) != _drafting(b)  # as configured

    def of(self, a: SideRequest, b: SideRequest, match: PairedBy) -> tuple[Parting | None, Parting | None]:
        """(where the outputs part, the first decision before that which differs)."""
        outputs = [side.tokens(request) for side, request in zip(self.sides, (a, b), strict=True)]
        place = first_difference(*outputs)
        hashes = []
        for side, request, every, output in zip(self.sides, (a, b), self._decided, outputs, strict=True):
            begin = int(side.begins[request.first])
            hashes.append(every[begin : begin + len(output)])
        before = first_difference(*hashes)
        parting = None if place is None else self._parting(a, b, place, match)
        earlier = before is not None and before < min(map(len, outputs)) and (place is None or before < place)
        return parting, self._parting(a, b, before, match) if earlier and before is not None else None

    def _parting(self, a: SideRequest, b: SideRequest, place: int, match: PairedBy) -> Parting:
        tolerance = rounding(*(side.dtype(request) for side, request in zip(self.sides, (a, b), strict=True)))
        tolerance *= max(heat(a), heat(b))
        first, second = (
            half(side, request, place, tolerance) for side, request in zip(self.sides, (a, b), strict=True)
        )
        return Parting(place, self._cause(a, b, first, second, match, tolerance), first, second)

    def _cause(
        self, a: SideRequest, b: SideRequest, x: Half, y: Half, match: PairedBy, tolerance: float
    ) -> PartingCause:
        if match is PairedBy.PROMPT and other_rules(a, b):
            return PartingCause.PARAMETERS
        if x.token is None or y.token is None:
            return PartingCause.END
        greedy = _greedy(a) and _greedy(b)
        if not greedy and _seed(a) != _seed(b):
            return PartingCause.SEED
        coins = all(side.has_coins for side in self.sides)
        certain = _certain(x, y) if match is PairedBy.EXACT and coins else None
        if certain is not None:
            return certain
        given = [known_p(side, part) for side, part in zip(self.sides, (x, y), strict=True)]
        raw, p = (_unlike(given[0], given[1], kinds, BEYOND * tolerance) for kinds in (("raw",), ("p", "H")))
        cut = is_cut(a) or is_cut(b)
        decisions = (*x.decisions, *y.decisions)
        near = any(decision.near_tie for decision in decisions)
        asked = None if greedy else self._asked(x, y)  # a greedy output hangs neither on the drafts nor on the rule
        if asked is not None and (near or not (raw or (p and not cut))):  # they do not excuse another target
            return asked
        if near:
            return PartingCause.ROUNDING
        if greedy and x.token != y.token and all(decision.gap is None for decision in decisions):
            return PartingCause.CHOICE
        if raw or (greedy and x.token != y.token):
            return PartingCause.TARGET
        if p:
            return PartingCause.CUT if cut else PartingCause.TARGET
        return _mechanical(x, y, tolerance, coins=coins, cut=cut)

    def _asked(self, x: Half, y: Half) -> PartingCause | None:
        """What is configured differently and decides which coins are used: it takes precedence over rounding."""
        if x.rule != y.rule:
            return PartingCause.RULE
        tried = [[decision.token for decision in half.decisions if decision.node is not None] for half in (x, y)]
        other = x.position != y.position or tried[0] != tried[1]
        if not self._other_drafts or other:
            return PartingCause.DRAFTS if self._other_drafts else None
        qs = [[decision.q for decision in half.decisions if decision.node is not None] for half in (x, y)]
        return PartingCause.DRAFTER if qs[0] != qs[1] else None


def _drafting(side: Side) -> set[tuple[str | None, ...]]:
    """What the runs of a side draft with."""
    return {(run.drafter, run.draft_model, run.tree) for run in side.runs}


def _seed(request: SideRequest) -> int | None:
    return None if request.info is None else request.info.params.seed


def _certain(x: Half, y: Half) -> PartingCause | None:
    """What rounding cannot explain: another coin at the same place, or another outcome from the same p, q and coin."""
    if x.position != y.position or x.rule != y.rule or (looks_ahead(x.rule) and x.drafted != y.drafted):
        return None
    for first, second in zip(x.decisions, y.decisions, strict=False):
        if first.node is None or (first.node, first.token) != (second.node, second.token):
            return None
        if first.coin != second.coin:
            return PartingCause.COIN
        if first.what != second.what:
            return (
                PartingCause.VERDICT
                if (first.accept_prob, first.p, first.q) == (second.accept_prob, second.p, second.q)
                else None
            )
    return None


def _mechanical(x: Half, y: Half, tolerance: float, *, coins: bool, cut: bool) -> PartingCause:
    """The target agrees: drafter, drafts, coins or verdict. `cut`: whether top-k, top-p or min-p cut p."""
    shared = list(zip(x.decisions, y.decisions, strict=False))
    qs = [
        (first.q, second.q)
        for first, second in shared
        if first.token == second.token and None not in (first.node, second.node)
    ]
    if any((q is None) != (r is None) or abs((q or 0.0) - (r or 0.0)) > BEYOND * tolerance for q, r in qs):
        return PartingCause.DRAFTER
    tried = [[decision for decision in half.decisions if decision.node is not None] for half in (x, y)]
    other = next((pair for pair in zip(*tried, strict=False) if pair[0].token != pair[1].token), ())
    if any(decision.near_draw for decision in other):
        return PartingCause.ROUNDING
    if other or x.position != y.position or not shared:
        return PartingCause.DRAFTS
    if x.rule != y.rule:
        return PartingCause.RULE
    if looks_ahead(x.rule) and x.drafted != y.drafted:  # what lies below decides as well
        return PartingCause.DRAFTS
    for first, second in shared if coins else ():
        if first.node != second.node:
            return PartingCause.DRAFTS
        if first.coin != second.coin:
            return PartingCause.COIN
        if first.node is None and first.what == second.what and first.token != second.token and cut:
            return PartingCause.CUT  # one more token at the edge moves the borders of all that are drawn from
        if first.what != second.what or first.token != second.token:
            return PartingCause.VERDICT
    return PartingCause.UNKNOWN


Known = dict[tuple[str, int], float]


def _unlike(a: Known, b: Known, kinds: tuple[str, ...], tolerance: float) -> bool:
    wide = {"H": ENTROPY}
    shared = [key for key in a.keys() & b.keys() if key[0] in kinds]
    return any(abs(a[key] - b[key]) > wide.get(key[0], 1) * tolerance for key in shared)


def known_p(side: Side, half: Half) -> Known:
    """The target's probabilities at the context: (p or raw, token) to its value; its entropy under H."""
    known: Known = {}
    if half.row < 0 or not side.has_p:
        return known
    c = side.columns
    part, verdict = _judged(side, half.row)
    above = int(verdict.path[half.deep - 1]) if half.deep else ROOT
    given = part.parents
    if given is not None and given.top.shape[1] and len(at_parent := np.flatnonzero(given.node == above)):
        first = at_parent[0]
        known["p", int(given.choice[first])] = float(given.choice_p[first])
        known["raw", int(given.top[first, 0])] = float(given.top_p[first, 0])
        known["H", 0] = float(given.entropy[first])
    for child in part.tree.children(above):
        node = int(c.start[half.row]) + child
        known["p", int(c.token[node])] = float(c.p[node])
        if not np.isnan(side.raw_p[node]):
            known["raw", int(c.token[node])] = float(side.raw_p[node])
    whole = float(side.final_whole[half.row])
    if half.decisions and half.decisions[-1].node is None and not np.isnan(whole):
        known["p", int(c.final[half.row])] = whole
    return known


def _judged(side: Side, row: int) -> tuple[RequestStep, Verdict]:
    part = side.columns.parts[row]
    assert part.verdict is not None
    return part, part.verdict


def half(side: Side, request: SideRequest, index: int, tolerance: float) -> Half:
    """The step of a request that committed its output token number `index`, and what was decided there."""
    output = side.tokens(request)
    if index >= len(output):
        return Half(None, len(output), (), None)
    rows = side.rows(request)
    row = rows.start + int(np.searchsorted(side.place[rows], index, "right")) - 1
    part, verdict = _judged(side, row)
    place = int(side.place[row])
    deep = index - place
    children = part.tree.children(int(verdict.path[deep - 1]) if deep else ROOT)
    near = _Near(side, row, tolerance, greedy=_greedy(request))
    decisions = [_trial(near, int(node)) for node in children if verdict.outcome[node] != Outcome.UNTRIED]
    if deep == verdict.accepted:
        decisions.append(_final(near))
    where = Reference(request.id, part.index, int(side.step[row]))
    drafted = tuple(zip(part.tree.token.tolist(), part.tree.parent.tolist(), strict=True))
    return Half(where, place, tuple(decisions), int(output[index]), row, deep, side.rules[row], drafted)


@dataclass(frozen=True)
class _Near:
    """A step, and what rounding could flip in it."""

    side: Side
    row: int
    tolerance: float
    greedy: bool

    def tie(self, margin: float, gap: float | None) -> bool:
        """Whether a decision. A greedy p is 0 or 1, so the raw probabilities decide, both of which move."""
        return margin < self.tolerance or (self.greedy and gap is not None and gap < 2 * self.tolerance)


def _gap(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _trial(near: _Near, place: int) -> Decision:
    side, c = near.side, near.side.columns
    part, verdict = _judged(side, near.row)
    node = int(c.start[near.row]) + place
    there, gap = at(part, place), _gap(side.gap[node])
    margin = float(verdict.margin[place]) if side.has_coins and side.has_p else 1.0
    return Decision(
        node=place,
        token=int(c.token[node]),
        text=side.vocabulary.show(int(c.token[node])),
        what="accepted" if verdict.outcome[place] == Outcome.ACCEPTED else "rejected",
        p=float(c.p[node]),
        q=None if c.drawn[node] == Drawn.DETERMINISTIC else float(c.q[node]),
        coin=float(c.coin[node]),
        accept_prob=float(c.accept_prob[node]),
        margin=margin,
        gap=gap,
        near_tie=near.tie(margin, gap),
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=verdict.is_greedy,
        near_draw=bool(side.draw_margin[node] < near.tolerance),
    )


def _final(near: _Near) -> Decision:
    side, c, row = near.side, near.side.columns, near.row
    part, verdict = _judged(side, row)
    margin, gap, there = float(c.final_margin[row]), _gap(side.final_gap[row]), end(part)
    return Decision(
        node=None,
        token=int(c.final[row]),
        text=side.vocabulary.show(int(c.final[row])),
        what=verdict.kind.value,
        p=float(c.final_p[row]),
        q=None,
        coin=float(c.final_coin[row]),
        accept_prob=None,
        margin=margin,
        gap=gap,
        near_tie=near.tie(margin, gap),
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=verdict.is_greedy,
    )
