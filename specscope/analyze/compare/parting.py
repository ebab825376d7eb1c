"""Where the outputs of a pair part: the decisions there, with p, q, coin and margin of both, and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.align import other_rules, rounding
from specscope.analyze.compare.result import Decision, Half, PairedBy, Parting, PartingCause
from specscope.analyze.compare.side import Hashes, Side, SideRequest, mix
from specscope.analyze.findings import Reference
from specscope.trace.history.place import at, end
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.rules import looks_ahead
from specscope.trace.record.tree import ROOT, Drawn

BEYOND = 3.0  # rounding has no sharp bound: a difference of more than this many tolerances is not rounding
ENTROPY = 20.0  # an entropy moves by so many times a p's change: -log p of a token near 0, many tokens at once


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
        drafting = [{(run.drafter, run.draft_model, run.tree) for run in side.runs} for side in (a, b)]
        self._other_drafts = drafting[0] != drafting[1]  # as configured
        self._coins = a.has_coins and b.has_coins

    def of(self, a: SideRequest, b: SideRequest, match: PairedBy) -> tuple[Parting | None, Parting | None]:
        """(where the outputs part, the first decision before that which differs)."""
        both = list(zip(self.sides, (a, b), strict=True))
        outputs = [side.tokens(request) for side, request in both]
        begins = [int(side.begins[request.first]) for side, request in both]
        cut = zip(self._decided, begins, outputs, strict=True)
        place = first_difference(*outputs)
        before = first_difference(*(every[begin : begin + len(output)] for every, begin, output in cut))
        ends = min(map(len, outputs)) if place is None else place
        return (
            None if place is None else self._parting(a, b, place, match),
            None if before is None or before >= ends else self._parting(a, b, before, match),
        )

    def _parting(self, a: SideRequest, b: SideRequest, place: int, match: PairedBy) -> Parting:
        tolerance = rounding(*(side.dtype(request) for side, request in zip(self.sides, (a, b), strict=True)))
        tolerance *= max(a.heat, b.heat)
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
        greedy = a.greedy and b.greedy
        if not greedy and _seed(a) != _seed(b):
            return PartingCause.SEED
        certain = _certain(x, y) if match is PairedBy.EXACT and self._coins else None
        if certain is not None:
            return certain
        given = [known_p(side, part) for side, part in zip(self.sides, (x, y), strict=True)]
        raw, p = (_unlike(given[0], given[1], kinds, BEYOND * tolerance) for kinds in (("raw",), ("p", "H")))
        cut, decisions = a.cut or b.cut, (*x.decisions, *y.decisions)
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
        return self._mechanical(x, y, tolerance, cut=cut)

    def _asked(self, x: Half, y: Half) -> PartingCause | None:
        """What is configured differently and decides which coins are used: it takes precedence over rounding."""
        if x.rule != y.rule:
            return PartingCause.RULE
        if not self._other_drafts:
            return None
        if x.position != y.position or [one.token for one in x.tried] != [one.token for one in y.tried]:
            return PartingCause.DRAFTS
        return PartingCause.DRAFTER if [one.q for one in x.tried] != [one.q for one in y.tried] else None

    def _mechanical(self, x: Half, y: Half, tolerance: float, *, cut: bool) -> PartingCause:
        """The target agrees: drafter, drafts, coins or verdict. `cut`: whether top-k, top-p or min-p cut p."""
        tried = list(zip(x.tried, y.tried, strict=False))
        qs = [(first.q, second.q) for first, second in tried if first.token == second.token]
        if any((q is None) != (r is None) or abs((q or 0.0) - (r or 0.0)) > BEYOND * tolerance for q, r in qs):
            return PartingCause.DRAFTER
        other = next((pair for pair in tried if pair[0].token != pair[1].token), ())
        if any(decision.near_draw for decision in other):
            return PartingCause.ROUNDING
        if other or x.position != y.position or not x.decisions or not y.decisions:
            return PartingCause.DRAFTS
        if x.rule != y.rule:
            return PartingCause.RULE
        if looks_ahead(x.rule) and x.drafted != y.drafted:  # what lies below decides as well
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


def _seed(request: SideRequest) -> int | None:
    return None if request.params is None else request.params.seed


def _certain(x: Half, y: Half) -> PartingCause | None:
    """What rounding cannot explain: another coin at the same place, or another outcome from the same p, q and coin."""
    if x.position != y.position or x.rule != y.rule or (looks_ahead(x.rule) and x.drafted != y.drafted):
        return None
    for first, second in zip(x.tried, y.tried, strict=False):
        if (first.node, first.token) != (second.node, second.token):
            return None
        if first.coin != second.coin:
            return PartingCause.COIN
        if first.what != second.what:
            given = [(one.accept_prob, one.p, one.q) for one in (first, second)]
            return PartingCause.VERDICT if given[0] == given[1] else None
    return None


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
    part, above = _at(side, half.row, half.deep)
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
    if len(half.decisions) > len(half.tried) and not np.isnan(whole):
        known["p", int(c.final[half.row])] = whole
    return known


def _at(side: Side, step: int, deep: int) -> tuple[RequestStep, int]:
    """A step, and the parent under which its output token number `deep` was decided."""
    part = side.columns.parts[step]
    return part, int(_verdict(part).path[deep - 1]) if deep else ROOT


def _verdict(part: RequestStep) -> Verdict:
    assert part.verdict is not None
    return part.verdict


def half(side: Side, request: SideRequest, index: int, tolerance: float) -> Half:
    """The step of a request that committed its output token number `index`, and what was decided there."""
    output = side.tokens(request)
    if index >= len(output):
        return Half(None, len(output), (), None)
    rows = side.rows(request)
    row = rows.start + int(np.searchsorted(side.place[rows], index, "right")) - 1
    place = int(side.place[row])
    deep = index - place
    part, above = _at(side, row, deep)
    verdict, tree = _verdict(part), part.tree
    tried: list[int | None] = [node for node in tree.children(above) if verdict.outcome[node] != Outcome.UNTRIED]
    every = [*tried, None] if deep == verdict.accepted else tried
    decisions = tuple(_decision(side, row, node, tolerance, greedy=request.greedy) for node in every)
    where = Reference(request.id, part.index, int(side.step[row]))
    drafted = tuple(zip(tree.token.tolist(), tree.parent.tolist(), strict=True))
    return Half(where, place, decisions, int(output[index]), row, deep, side.rules[row], drafted)


def _decision(side: Side, step: int, number: int | None, tolerance: float, *, greedy: bool) -> Decision:
    """What was decided on a node of a step, or on its final token (None). `greedy`: whether the request is."""
    c, part = side.columns, side.columns.parts[step]
    verdict = _verdict(part)
    if number is None:
        node, there, token, gap = -1, end(part), int(c.final[step]), float(side.final_gap[step])
        margin, what = float(c.final_margin[step]), verdict.kind.value
    else:
        node, there = int(c.start[step]) + number, at(part, number)
        token, gap = int(c.token[node]), float(side.gap[node])
        margin = float(verdict.margin[number]) if side.has_coins and side.has_p else 1.0
        what = "accepted" if verdict.outcome[number] == Outcome.ACCEPTED else "rejected"
    # A greedy p is 0 or 1, so the raw probabilities decide, both of which move
    tie = margin < tolerance or (greedy and gap < 2 * tolerance)
    final = number is None
    return Decision(
        node=number,
        token=token,
        text=side.vocabulary.show(token),
        what=what,
        p=float(c.final_p[step] if final else c.p[node]),
        q=None if final or c.drawn[node] == Drawn.DETERMINISTIC else float(c.q[node]),
        coin=float(c.final_coin[step] if final else c.coin[node]),
        accept_prob=None if final else float(c.accept_prob[node]),
        margin=margin,
        gap=None if np.isnan(gap) else gap,
        near_tie=tie,
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=verdict.is_greedy,
        near_draw=not final and bool(side.draw_margin[node] < tolerance),
    )
