"""A step's decisions computed again from p, q and coins, by the formulas of each rule, in float64 over whole rows.

Independent of the engine. Siblings x_1..x_k below a node have p_1 = p and q_1 = q; r is 1, under block and traversal
what is left of the path's ratio:

    standard, match:   a = min(1, p_i / q_i), accepted where coin < a (match: q = 1, and one coin draws the token)
    block, traversal:  a = min(1, r p_i / q_i), judged when nothing below was accepted, by what is then left of it
    rejected:          S = sum(max(r p_i - q_i, 0)); p_(i+1) = max(r p_i - q_i, 0) / S; r' = S / (S + 1 - r)
    drawn without replacement: q_(i+1) = q_i without x_i, renormalised; a point mass where nothing is drawn
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from specscope.analyze.findings import Reference
from specscope.trace.record.records import FinalKind, Outcome, Verdict
from specscope.trace.record.rules import LOOK_AHEAD, MATCH, STANDARD
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn

ROW = 2e-7  # by which float32 rounds a row of probabilities, in sum
SUM = 2e-6  # by which a sum of float32 over a vocabulary may be off
HOPELESS = 0.02  # where a row may be off by more, what follows from it is not judged
P, Q, ACCEPTANCE, RESIDUAL, FINAL = "p", "q", "acceptance", "residual", "final draw"


@dataclass(frozen=True)
class Figure:
    """One figure of both sides: the engine's, and what rules or formulas give."""

    operation: str  # P, Q, ...
    what: str  # a field of Verdict: "p_trial", "outcome", ...; or in words
    node: int | None  # None: of the final token
    ours: float
    right: float
    allowed: float  # how far rounding may move it
    where: Reference | None = None

    @property
    def error(self) -> float:
        """How far ours is off; a number that is none is off by all."""
        off = abs(self.ours - self.right)
        return off if off == off else 1.0

    @property
    def differs(self) -> bool:
        """Whether by more than rounding explains."""
        return self.error > self.allowed


@dataclass
class LeftRow:
    """What is left of a distribution, and the sum of all by which rounding may have moved it."""

    value: Doubles
    error: float = 0.0


class HopelessError(Exception):
    """Rounding may have moved the figures by more than can be judged, or they lead to a row that is not known."""


@dataclass
class Decided:
    """A step that is decided by p, q and coins, figure by figure."""

    verdict: Verdict  # the engine's, whose outcomes are taken where rounding decides
    tree: DraftTree
    p: Mapping[int, Doubles]  # [V] below ROOT and below each node
    q: Mapping[int, Doubles]  # [V] by parent, where its children were drawn
    figures: list[Figure] = field(default_factory=list)  # in the order of deciding
    left: LeftRow | None = None  # what is left of p behind the path; None where that is not known
    drawn_from: Doubles | None = None  # what the final coin draws from: the same, but under match, where it is p
    final_coin: float = 0.0

    def tell(self, operation: str, name: str, node: int, right: float, allowed: float) -> None:
        ours = float(getattr(self.verdict, name)[node])
        self.figures.append(Figure(operation, name, node, ours, right, allowed))

    def trial(self, child: int, r: float, p: LeftRow, q: LeftRow | None, p_1: Doubles) -> tuple[float, float]:
        """(The ratio of the path down to a child, how far it may be off) when the child is tried."""
        token = int(self.tree.token[child])
        p_x, q_x = float(p.value[token]), 1.0 if q is None else float(q.value[token])
        off_p, off_q = p.error + 1e-6 * p_x, 0.0 if q is None else q.error + 1e-6 * q_x
        self.tell(P if p.value is p_1 else RESIDUAL, "p_trial", child, p_x, off_p + 1e-9)
        self.tell(Q, "q_trial", child, q_x, off_q + 1e-9)
        if max(p.error, 0.0 if q is None else q.error) > HOPELESS:
            raise HopelessError
        if q_x <= 0:
            return 0.0, off_q
        a = min(1.0, r * p_x / q_x)
        return a, (r * off_p + a * off_q) / q_x + 1e-6 * a

    def accepts(self, child: int, coin: float, low: float, high: float, off: float) -> bool:
        """Whether a child's coin lies where it is accepted; near a border as the engine has it."""
        near = min(abs(coin - low), abs(coin - high)) <= off
        accepted = self.verdict.outcome[child] == Outcome.ACCEPTED if near else low <= coin < high
        self.tell(ACCEPTANCE, "outcome", child, Outcome.ACCEPTED if accepted else Outcome.REJECTED, 0.0)
        return accepted

    def reject(
        self, child: int, r: float, p: LeftRow, q: LeftRow | None, *, last: bool
    ) -> tuple[LeftRow, LeftRow | None, float]:
        """What is left of p and q, and the mass before it was normalised."""
        token, left = int(self.tree.token[child]), r * p.value
        if q is None:
            left[token] = 0
        else:
            left = np.maximum(left - q.value, 0)
        mass, off = float(left.sum()), r * p.error + (0.0 if q is None else q.error) + ROW
        self.tell(RESIDUAL, "residual_mass", child, mass, off + SUM)
        error = (off + ROW) / mass + SUM if mass > off + SUM else 1.0  # all of it may be rounding
        gone = self.tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT and not last
        after = LeftRow(left / mass if mass > 0 else p.value, error)
        return after, _without(q, token) if gone and q is not None else q, mass

    def rows(self, node: int) -> tuple[LeftRow, LeftRow | None]:
        """p below a node, and q that its children were drawn from; None where they were not drawn."""
        children = self.tree.children(node)
        drawn = children and self.tree.drawn[children[0]] != Drawn.DETERMINISTIC
        if node not in self.p or (drawn and node not in self.q):  # nobody computed it: the engine did not come here
            raise HopelessError
        return LeftRow(self.p[node]), LeftRow(self.q[node]) if drawn else None

    def standard(self) -> None:
        node, kind = ROOT, FinalKind.TARGET
        p, q = self.rows(node)
        while children := self.tree.children(node):
            p_1 = p.value
            for child in children:
                a, off = self.trial(child, 1.0, p, q, p_1)
                self.tell(ACCEPTANCE, "accept_prob", child, a, off + 1e-9)
                if self.accepts(child, float(self.verdict.coin[child]), -np.inf, a, off + 1e-12):
                    node, kind = child, FinalKind.BONUS
                    p, q = self.rows(node)
                    break
                p, q, _ = self.reject(child, 1.0, p, q, last=child == children[-1])
            else:
                kind = FinalKind.RECOVERED
                break
        self.end(node, kind, p)

    def ahead(self) -> None:
        node, p, kind = self._below(ROOT, 1.0, 0.0) or (ROOT, LeftRow(self.p[ROOT]), FinalKind.TARGET)
        self.end(node, kind, p)

    def _below(self, node: int, r: float, off: float) -> tuple[int, LeftRow, FinalKind] | None:
        """What is accepted at a node or below it: the node, what is left of p there, the kind of final token."""
        p, q = self.rows(node)
        p_1, children = p.value, self.tree.children(node)
        for child in children:
            a, off_a = self.trial(child, r, p, q, p_1)
            off_a += off * a / max(r, 1e-9)
            found = self._below(child, a, off_a) if a > 0 else None
            if a <= 0 or (found is not None and found[0] != child):
                self.tell(ACCEPTANCE, "accept_prob", child, a, off_a + 1e-9)
                self.tell(ACCEPTANCE, "outcome", child, Outcome.REJECTED if found is None else Outcome.ACCEPTED, 0.0)
            if found is not None:
                return found
            p, q, mass = self.reject(child, r, p, q, last=child == children[-1])
            left = mass / (mass + 1 - r) if mass > 0 else float(r == 1)
            off = (off + ROW + SUM + (0.0 if q is None else q.error)) / max(mass + 1 - r, 1e-9)
            r = left
            if off > HOPELESS:
                raise HopelessError
        kind = FinalKind.RECOVERED if children else FinalKind.TARGET if node == ROOT else FinalKind.BONUS
        if node == ROOT:
            return node, p, kind
        self.tell(ACCEPTANCE, "accept_prob", node, r, off + 1e-9)
        is_accepted = self.accepts(node, float(self.verdict.coin[node]), -np.inf, r, off + 1e-12)
        return (node, p, kind) if is_accepted else None

    def match(self) -> None:
        node, kind, coin = ROOT, FinalKind.TARGET, None
        p = LeftRow(self.p[ROOT])
        while children := self.tree.children(node):
            coin = float(self.verdict.coin[children[0]])
            p_1 = p.value
            for child in children:
                token = int(self.tree.token[child])
                self.tell(P, "p_trial", child, float(p.value[token]), p.error + 1e-6)
                if self.accepts(child, coin, *interval_of(p_1, token), SUM):
                    node, kind, p = child, FinalKind.BONUS, LeftRow(self.p[child])
                    break
                p, _, _ = self.reject(child, 1.0, p, None, last=True)
            else:
                self.end(node, FinalKind.RECOVERED, p)  # one coin drew the token from the whole of p
                self.drawn_from, self.final_coin = p_1, coin
                return
        self.end(node, kind, p)

    def end(self, node: int, kind: FinalKind, p: LeftRow) -> None:
        self.left, self.drawn_from = p, p.value
        self.final_coin = self.verdict.final_coin
        leaf = int(self.verdict.path[-1]) if len(self.verdict.path) else ROOT
        ours = float((self.verdict.kind, leaf) == (kind, node))
        self.figures.append(Figure(FINAL, "kind", None, ours, 1.0, 0.0))


def decide(verdict: Verdict, tree: DraftTree, p: Mapping[int, Doubles], q: Mapping[int, Doubles]) -> Decided:
    """The figures of a step, up to where rounding may have moved them too far, or to a row that is not known."""
    decided = Decided(verdict, tree, p, q)
    try:
        if verdict.rule == STANDARD:
            decided.standard()
        elif verdict.rule == MATCH:
            decided.match()
        elif verdict.rule in LOOK_AHEAD:
            decided.ahead()
    except HopelessError:
        decided.left = None
    return decided


def interval_of(row: Doubles, token: int) -> tuple[float, float]:
    """The ends of a token's part of a row's distribution function, as shares of its sum."""
    whole = float(row.sum())
    low = float(row[:token].sum()) / whole
    return low, low + float(row[token]) / whole


def _without(q: LeftRow, token: int) -> LeftRow:
    value = q.value.copy()
    value[token] = 0
    mass = float(value.sum())
    return LeftRow(value / mass, (q.error + ROW) / mass + SUM) if mass > 0 else q
