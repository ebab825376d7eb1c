"""The sums over a run: what verification decided and drew, against the chances that it recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.verify.exact import BONUS, RECOVERED, TARGET
from specscope.analyze.verify.sums import Sum
from specscope.trace.record.records import FinishReason
from specscope.trace.record.tree import Bools, Doubles, Drawn

FLAT = 1e-4  # nats^2: a distribution of less varentropy is all but one token, and rounding outweighs chance
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # an output that ended by itself
SPENT = 0.01  # of q: where less is left, what is said of the rest is rounding


@dataclass(frozen=True)
class Chances:
    """The columns with what several sums need."""

    c: Columns

    def free(self) -> Bools:
        """[S] steps whose coins were not known before."""
        return self.c.fresh & self.c.told

    def acceptance(self) -> tuple[Indices, Doubles, Doubles]:
        """Nodes that chance decided: which, accepted minus a, and a (1 - a)."""
        c = self.c
        a = c.accept_prob
        nodes = np.flatnonzero(c.by_rule.judged & ~c.forced & self.free()[c.step] & (a > 0) & (a < 1))
        return nodes, c.accepted[nodes] - a[nodes], a[nodes] * (1 - a[nodes])

    def final_draws(self, recovered: bool) -> Sum:
        """Surprisal of final tokens against the entropy of what they were drawn from; numbered by step."""
        c, e = self.c, self.c.parents
        of_kind = (c.kind == RECOVERED) if recovered else (c.kind == BONUS) | (c.kind == TARGET)
        steps = np.flatnonzero(of_kind & self.free() & e.there & ~c.forced_final & (e.final_varentropy > FLAT))
        return _surprisal(c.final_p[steps], e.final_entropy[steps], e.final_varentropy[steps], steps)

    def _output(self) -> tuple[Bools, Bools]:
        """[N] accepted nodes and [S] final tokens that a sum over what came out may count.

        Under rules that look ahead, how many tokens a step gives hangs on which they are. There only whole outputs
        count, to where they ended by themselves: no token that was cut off, and no request that is not at its end.
        """
        c = self.c
        finals, nodes = np.ones(len(c), np.bool_), c.accepted.copy()
        for s in np.flatnonzero(c.by_rule.ahead).tolist():
            visit = c.visits[s]
            end, emitted = visit.request.end, visit.part.emitted
            if end is None or end.reason not in WHOLE:
                emitted = 0
            path = c.start[s] + c.verdicts[s].path
            nodes[path[emitted:]] = False
            finals[s] = emitted > len(path)
        return nodes, finals

    def _untouched(self) -> Bools:
        """[rows] of free steps, where neither a child nor the final token was forced."""
        c = self.c
        rows = np.zeros(c.rows, np.bool_)
        rows[c.root_row] = self.free()
        rows[c.own_row] = self.free()[c.step]
        rows[c.row[c.forced]] = False
        # Whether a final token counts hangs on what was accepted before it, and under rules that look ahead on all of a
        # tree: then a step that was forced is left out as a whole
        gone = c.forced_final.copy()
        gone[c.step[c.forced]] |= c.by_rule.ahead[c.step[c.forced]]
        rows[c.root_row[gone]] = False
        rows[c.own_row[gone[c.step]]] = False
        return rows

    def emitted(self) -> Sum:
        """Surprisal of every committed token in the target's p at its place, whatever drew it; numbered by step."""
        c, e = self.c, self.c.parents
        rows, (out, finals) = self._untouched() & (e.at_row >= 0), self._output()
        nodes = np.flatnonzero(out & rows[c.row])
        ends = np.flatnonzero((c.kind == RECOVERED) & rows[c.final_row] & finals)
        others = np.flatnonzero((c.kind != RECOVERED) & e.there & self._untouched()[c.final_row] & finals)
        at = np.concatenate([e.at_row[c.row[nodes]], e.at_row[c.final_row[ends]]])
        p = np.concatenate([c.p[nodes], e.final_p[ends], e.final_p[others]])
        entropy = np.concatenate([e.entropy[at], e.final_entropy[others]])
        varentropy = np.concatenate([e.varentropy[at], e.final_varentropy[others]])
        steps = np.concatenate([c.step[nodes], ends, others])
        kept = varentropy > FLAT
        return _surprisal(p[kept], entropy[kept], varentropy[kept], steps[kept])

    def top_token(self) -> Sum:
        """Whether the target's first choice came out, against its p; numbered by step."""
        c, e = self.c, self.c.parents
        rows, (out, finals) = self._untouched() & (e.at_row >= 0), self._output()
        nodes = np.flatnonzero(out & rows[c.row])
        ends = np.flatnonzero((c.kind == RECOVERED) & rows[c.final_row] & finals)
        at = np.concatenate([e.at_row[c.row[nodes]], e.at_row[c.final_row[ends]]])
        token = np.concatenate([c.token[nodes], c.final[ends]])
        steps = np.concatenate([c.step[nodes], ends])
        chance = e.choice_p[at]
        kept = (chance > 0) & (chance < 1)
        difference, variance = (e.choice[at] == token) - chance, chance * (1 - chance)
        return Sum.of(difference[kept], variance[kept], 1.0, steps[kept])

    def drafted(self) -> tuple[Sum, Sum]:
        """Surprisal of sampled drafts against the entropy of q: first siblings, and later ones; numbered by node."""
        parts = list(self._draws())
        nodes, q, entropy, varentropy = (np.concatenate(column) for column in zip(*parts, strict=True))
        first = self.c.sibling[nodes] == 0
        return tuple(_surprisal(q[m], entropy[m], varentropy[m], nodes[m]) for m in (first, ~first))  # type: ignore[return-value]

    def _draws(self) -> Iterator[tuple[Indices, Doubles, Doubles, Doubles]]:
        """By place among siblings: nodes, q as drawn, entropy and varentropy of what they were drawn from.

        Without replacement the sums over q of log q and log^2 q lose a term with each draw; that gives both.
        """
        c, e = self.c, self.c.parents
        at = e.at_row[c.row]
        sums = np.zeros((2, c.rows))
        rows = np.flatnonzero(e.at_row >= 0)
        k = e.at_row[rows]
        sums[0, rows], sums[1, rows] = -e.q_entropy[k], e.q_varentropy[k] + e.q_entropy[k] ** 2
        usable = c.sampled & (at >= 0) & self.free()[c.step] & (c.q > 0)
        for place in range(int(c.sibling[usable].max(initial=0)) + 1):
            nodes = np.flatnonzero(usable & (c.sibling == place))
            left, (first, second) = c.q_left[nodes], sums[:, c.row[nodes]]
            with np.errstate(divide="ignore", invalid="ignore"):
                log = np.log(left)
                entropy = log - first / left
                varentropy = second / left - 2 * log * first / left + log**2 - entropy**2
            fine = (left > SPENT) & (varentropy > 10 * FLAT)
            yield nodes[fine], c.q[nodes[fine]] / left[fine], entropy[fine], varentropy[fine]
            gone = nodes[c.drawn[nodes] == Drawn.WITHOUT_REPLACEMENT]
            q = c.q[gone]
            sums[:, c.row[gone]] -= np.stack([q * np.log(q), q * np.log(q) ** 2])

    def draw_order(self) -> Sum:
        """Whether the likelier of two neighbours came first, against its chance of that; numbered by node.

        Of two tokens drawn one after the other without replacement, with q a and b of what was left, a comes first with
        a b / (1 - a) against a b / (1 - b) for b.
        """
        c = self.c
        nodes = np.flatnonzero((c.elder >= 0) & c.sampled & self.free()[c.step])
        nodes = nodes[(c.drawn[c.elder[nodes]] == Drawn.WITHOUT_REPLACEMENT)]
        left = np.maximum(c.q_left[c.elder[nodes]], 1e-6)
        first, second = np.minimum(c.q[c.elder[nodes]] / left, 1.0), np.minimum(c.q[nodes] / left, 1.0)
        usable = (second > 0) & (first > 0) & (first + second < 1 - 1e-4) & (first != second)
        nodes, first, second = nodes[usable], first[usable], second[usable]
        larger, smaller = np.maximum(first, second), np.minimum(first, second)
        chance = (1 - smaller) / ((1 - larger) + (1 - smaller))
        return Sum.of((first > second) - chance, chance * (1 - chance), 1.0, nodes)


def _surprisal(p: Doubles, entropy: Doubles, varentropy: Doubles, places: Indices) -> Sum:
    """Of tokens drawn with these probabilities. The bound is the largest that was seen."""
    difference = -np.log(np.maximum(p, 1e-45)) - entropy
    return Sum.of(difference, varentropy, float(np.abs(difference).max(initial=1.0)), places)
