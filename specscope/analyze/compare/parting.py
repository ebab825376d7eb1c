"""Where the outputs of a pair part: the decisions there, with p, q, coin and margin of both, and why."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import Side, SideRequest
from specscope.analyze.compare.result import Decision, Half, PairedBy, Parting, PartingCause
from specscope.analyze.evidence.columns import KINDS
from specscope.analyze.findings import Reference
from specscope.trace.history.place import at, end
from specscope.trace.record.params import PARAM_NAMES
from specscope.trace.record.records import Outcome
from specscope.trace.record.rules import ROUNDING, looks_ahead
from specscope.trace.record.tree import ROOT, Drawn

BEYOND = 3.0  # rounding has no sharp bound: a difference of more than this many tolerances is not rounding
ENTROPY = 20.0  # an entropy moves by so many times a p's change: -log p of a token near 0, many tokens at once
WIDEST = max(ROUNDING.values())  # for a dtype that is not known
LENGTH = {"seed", "max_tokens", "stop", "ignore_eos", "logprobs"}  # parameters that shape no distribution
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def rounding(*dtypes: str) -> float:
    """How far apart probabilities computed in these dtypes may be by rounding alone."""
    return max(ROUNDING.get(dtype, WIDEST) for dtype in dtypes)


def mix(values: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Numbers hashed to well spread 64-bit ones (splitmix64)."""
    x = values.astype(np.uint64) + _ODD[0]
    x = (x ^ (x >> np.uint64(30))) * _ODD[1]
    x = (x ^ (x >> np.uint64(27))) * _ODD[2]
    return x ^ (x >> np.uint64(31))


def decided(side: Side) -> NDArray[np.uint64]:
    """[output tokens] a hash of what was decided at each place of the outputs: tokens tried, outcomes, kind of draw."""
    rows = side.node_step
    place = side.steps["first_output"][rows] + side.depth - 1
    ends = side.steps["first_output"] + side.steps["emitted"]
    mine = side.tried & (place < ends[rows])
    what = mix(side.nodes["token"][mine].astype(np.int64) * 4 + side.nodes["outcome"][mine])
    hashed = what * (mix(side.sibling[mine].astype(np.int64)) | np.uint64(1))
    out = np.zeros(len(side.output), np.uint64)
    np.add.at(out, place[mine], hashed)
    final = side.steps["first_output"] + side.steps["accepted"]
    drawn = side.steps["judged"] & (final < ends)
    kinds = side.steps["kind"][drawn].astype(np.int64) + (side.steps["token"][drawn].astype(np.int64) << 3)
    np.add.at(out, final[drawn], mix(kinds + (1 << 40)))
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
            begin = int(side.steps["first_output"][request.first]) if request.count else 0
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
        greedy = all(request.info is None or request.info.params.greedy for request in (a, b))
        if not greedy and _seed(a) != _seed(b):
            return PartingCause.SEED
        coins = all(side.has_coins for side in self.sides)
        certain = _certain(x, y) if match is PairedBy.EXACT and coins else None
        if certain is not None:
            return certain
        asked = None if greedy else self._asked(x, y)  # a greedy output hangs neither on the drafts nor on the rule
        if asked is not None:
            return asked
        if any(decision.near_tie for decision in (*x.decisions, *y.decisions)):
            return PartingCause.ROUNDING
        if (
            greedy
            and x.token != y.token
            and not any(decision.gap is not None for decision in (*x.decisions, *y.decisions))
        ):
            return PartingCause.CHOICE
        given = [known_p(side, part) for side, part in zip(self.sides, (x, y), strict=True)]
        raw, p = (_unlike(given[0], given[1], kinds, BEYOND * tolerance) for kinds in (("raw",), ("p", "H")))
        if raw or (greedy and x.token != y.token):
            return PartingCause.TARGET
        if p:
            return PartingCause.CUT if any(is_cut(request) for request in (a, b)) else PartingCause.TARGET
        return _mechanical(x, y, tolerance, coins=coins, cut=any(is_cut(request) for request in (a, b)))

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


def other_rules(a: SideRequest, b: SideRequest) -> bool:
    """Whether the parameters shape another distribution; how long an output may be does not."""
    if a.info is None or b.info is None:
        return False
    mine, theirs = a.info.params, b.info.params
    return any(getattr(mine, name) != getattr(theirs, name) for name in PARAM_NAMES - LENGTH)


def heat(request: SideRequest) -> float:
    """How much the temperature magnifies a change of the logits; 1 from temperature 1 on."""
    params = None if request.info is None else request.info.params
    return 1.0 if params is None or params.greedy else max(1.0, 1 / params.temperature)


def is_cut(request: SideRequest) -> bool:
    """Whether top-k, top-p or min-p cut the target's distribution: at the edge, rounding decides which tokens stay."""
    params = None if request.info is None else request.info.params
    return params is not None and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


Known = dict[tuple[str, int], float]


def _unlike(a: Known, b: Known, kinds: tuple[str, ...], tolerance: float) -> bool:
    wide = {"H": ENTROPY}
    shared = [key for key in a.keys() & b.keys() if key[0] in kinds]
    return any(abs(a[key] - b[key]) > wide.get(key[0], 1) * tolerance for key in shared)


def known_p(side: Side, half: Half) -> Known:
    """The target's probabilities at the context: (p or raw, token) to its value."""
    known: Known = {}
    if half.row < 0 or not side.has_p:
        return known
    above = _parent(side, half.row, half)
    known |= _given(side, half.row, above)
    for node in _children(side, half.row, above):
        token = int(side.nodes["token"][node])
        known["p", token] = float(side.nodes["p"][node])
        if not np.isnan(side.nodes["raw_p"][node]):
            known["raw", token] = float(side.nodes["raw_p"][node])
    step = side.steps[half.row]
    if half.decisions and half.decisions[-1].node is None and not np.isnan(step["final_whole"]):
        known["p", int(step["token"])] = float(step["final_whole"])
    return known


def _given(side: Side, row: int, above: int) -> Known:
    """Of the target's first token at a parent and its entropy, where they are recorded."""
    step = side.steps[row]
    first, count = int(step["first_parent"]), int(step["parents"])
    node = above - int(step["first_node"]) if above >= 0 else ROOT
    rows = first + np.flatnonzero(side.parents["node"][first : first + count] == node)
    if not len(rows):
        return {}
    given = {name: values[rows[0]] for name, values in side.parents.items()}
    choice, top = int(given["choice"]), int(given["top"])
    return {
        ("p", choice): float(given["choice_p"]),
        ("raw", top): float(given["top_p"]),
        ("H", 0): float(given["entropy"]),
    }


def _parent(side: Side, row: int, half: Half) -> int:
    """The node of the side under which the half's token was decided; -1 for the root."""
    step = side.steps[row]
    return int(side.path[step["first_path"] + half.deep - 1] + step["first_node"]) if half.deep else -1


def _children(side: Side, row: int, above: int) -> NDArray[np.int64]:
    step = side.steps[row]
    first, count = int(step["first_node"]), int(step["nodes"])
    return first + np.flatnonzero(side.above[first : first + count] == above)


def half(side: Side, request: SideRequest, index: int, tolerance: float) -> Half:
    """The step of a request that committed its output token number `index`, and what was decided there."""
    output = side.tokens(request)
    if index >= len(output):
        return Half(None, len(output), (), None)
    rows = side.rows(request)
    row = rows.start + int(np.searchsorted(side.place[rows], index, "right")) - 1
    while not side.steps["emitted"][row]:  # prefill chunks have the same place
        row -= 1
    step, place = side.steps[row], int(side.place[row])
    deep = index - place
    above = int(side.path[step["first_path"] + deep - 1] + step["first_node"]) if deep else -1
    decisions = [_trial(side, row, int(node), tolerance) for node in _children(side, row, above) if side.tried[node]]
    if deep == step["accepted"]:
        decisions.append(_final(side, row, tolerance))
    where = Reference(request.id, int(step["index"]), int(step["step"]))
    tree = side.part(row).tree
    drafted = tuple(zip(tree.token.tolist(), tree.parent.tolist(), strict=True))
    return Half(where, place, tuple(decisions), int(output[index]), row, deep, side.names[step["rule"]], drafted)


def _gap(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _trial(side: Side, row: int, node: int, tolerance: float) -> Decision:
    nodes = {name: values[node] for name, values in side.nodes.items()}
    coin, place = float(nodes["coin"]), node - int(side.steps["first_node"][row])
    part = side.part(row)
    verdict, there = part.verdict, at(part, place)
    margin = float(verdict.margin[place]) if verdict is not None and side.has_coins and side.has_p else 1.0
    gap = _gap(nodes["gap"])
    return Decision(
        node=place,
        token=int(nodes["token"]),
        text=side.vocabulary.show(int(nodes["token"])),
        what="accepted" if nodes["outcome"] == Outcome.ACCEPTED else "rejected",
        p=float(nodes["p"]),
        q=None if nodes["drawn"] == Drawn.DETERMINISTIC else float(nodes["q"]),
        coin=coin,
        accept_prob=float(nodes["accept_prob"]),
        margin=margin,
        gap=gap,
        near_tie=_near(side, row, margin, gap, tolerance),
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=verdict is not None and verdict.is_greedy,
        near_draw=bool(nodes["draw_margin"] < tolerance),
    )


def _final(side: Side, row: int, tolerance: float) -> Decision:
    step = side.steps[row]
    margin, gap = float(step["final_margin"]), _gap(step["final_gap"])
    part = side.part(row)
    there = end(part)
    return Decision(
        node=None,
        token=int(step["token"]),
        text=side.vocabulary.show(int(step["token"])),
        what=KINDS[step["kind"]].value,
        p=float(step["final_p"]),
        q=None,
        coin=float(step["final_coin"]),
        accept_prob=None,
        margin=margin,
        gap=gap,
        near_tie=_near(side, row, margin, gap, tolerance),
        raw_p=there.raw_p,
        draft_p=there.draft_p,
        greedy=part.verdict is not None and part.verdict.is_greedy,
    )


def _near(side: Side, row: int, margin: float, gap: float | None, tolerance: float) -> bool:
    """Whether rounding could flip it. A greedy p is 0 or 1, so the raw probabilities decide, both of which move."""
    info = side.requests[side.steps["request"][row]].info
    greedy = info is None or info.params.greedy
    return margin < tolerance or (greedy and gap is not None and gap < 2 * tolerance)
