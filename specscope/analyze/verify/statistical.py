"""The run as a whole: did chance fall as the recorded probabilities say? One significance level for all checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Check, CheckResult, Unit
from specscope.analyze.significance import holm
from specscope.analyze.verify import coins
from specscope.analyze.verify.exact import BONUS, RECOVERED, TARGET
from specscope.analyze.verify.parents import LACKING
from specscope.analyze.verify.sums import Distance, DrawsFromQ, Likeliest, Sum
from specscope.trace.record.records import FinishReason
from specscope.trace.record.tree import Bools, Doubles, Drawn

# The sums over a run: what verification decided and drew, against the chances that it recorded.

FLAT = 1e-4  # nats^2: a distribution of less varentropy is nearly all one token, and rounding outweighs chance
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # an output that ended by itself
SPENT = 0.01  # of q: where less is left, figures of the rest are mostly rounding


@dataclass(frozen=True)
class Chances:
    """The chances that were recorded, and sums over a run of how they fell."""

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
        return surprisal(c.final_p[steps], e.final_entropy[steps], e.final_varentropy[steps], steps)

    def _output(self) -> tuple[Bools, Bools]:
        """[N] accepted nodes and [S] final tokens that a sum over what came out may count.

        Under rules that look ahead, how many tokens a step gives depends on which they are. There only whole outputs
        count, up to where they ended by themselves: no token that was cut off, and no request that has not ended.
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
        # Whether a final token counts depends on what was accepted before it, and under rules that look ahead on the
        # whole tree: then a step in which anything was forced is left out as a whole
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
        parent = np.concatenate([e.at_row[c.row[nodes]], e.at_row[c.final_row[ends]]])
        p = np.concatenate([c.p[nodes], e.final_p[ends], e.final_p[others]])
        entropy = np.concatenate([e.entropy[parent], e.final_entropy[others]])
        varentropy = np.concatenate([e.varentropy[parent], e.final_varentropy[others]])
        steps = np.concatenate([c.step[nodes], ends, others])
        usable = varentropy > FLAT
        return surprisal(p[usable], entropy[usable], varentropy[usable], steps[usable])

    def top_token(self) -> Sum:
        """Whether the target's first choice came out, against its p; numbered by step."""
        c, e = self.c, self.c.parents
        rows, (out, finals) = self._untouched() & (e.at_row >= 0), self._output()
        nodes = np.flatnonzero(out & rows[c.row])
        ends = np.flatnonzero((c.kind == RECOVERED) & rows[c.final_row] & finals)
        parent = np.concatenate([e.at_row[c.row[nodes]], e.at_row[c.final_row[ends]]])
        token = np.concatenate([c.token[nodes], c.final[ends]])
        steps = np.concatenate([c.step[nodes], ends])
        chance = e.choice_p[parent]
        usable = (chance > 0) & (chance < 1)
        difference, variance = (e.choice[parent] == token) - chance, chance * (1 - chance)
        return Sum.of(difference[usable], variance[usable], 1.0, steps[usable])

    def drafted(self) -> tuple[DrawsFromQ, Sum]:
        """Sampled drafts against q: first siblings, and the surprisal of later ones; numbered by node."""
        parts = list(self._draws())
        nodes, q, entropy, varentropy = (np.concatenate(column) for column in zip(*parts, strict=True))
        first = self.c.sibling[nodes] == 0
        sums = [surprisal(q[m], entropy[m], varentropy[m], nodes[m]) for m in (first, ~first)]
        return DrawsFromQ(sums[0], Likeliest.of(q[first], self.c.parents.q_rank[nodes[first]] == 1)), sums[1]

    def _draws(self) -> Iterator[tuple[Indices, Doubles, Doubles, Doubles]]:
        """By place among siblings: nodes, q as drawn, entropy and varentropy of what they were drawn from.

        Without replacement the sums of q log q and q log^2 q lose one term with each draw; both figures follow.
        """
        c, e = self.c, self.c.parents
        parent = e.at_node
        sums = np.zeros((2, c.rows))
        rows = np.flatnonzero(e.at_row >= 0)
        k = e.at_row[rows]
        sums[0, rows], sums[1, rows] = -e.q_entropy[k], e.q_varentropy[k] + e.q_entropy[k] ** 2
        usable = c.sampled & (parent >= 0) & self.free()[c.step] & (c.q > 0)
        # Under rules that look ahead what is drawn below an inner node has a part in whether that node is accepted, and
        # so in whether its children are seen here
        usable &= c.by_rule.walks[c.step] | (c.depth == 1)
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

        Of two tokens drawn one after the other without replacement, with shares a and b of what was left of q, a comes
        first with probability a b / (1 - a), b with a b / (1 - b).
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


def surprisal(p: Doubles, entropy: Doubles, varentropy: Doubles, places: Indices) -> Sum:
    """The sum over tokens drawn with these probabilities. Its bound is the largest difference that was seen."""
    difference = -np.log(np.maximum(p, 1e-45)) - entropy
    return Sum.of(difference, varentropy, float(np.abs(difference).max(initial=1.0)), places)


Scale = Callable[[float], str]
FEW = "too few to judge"
LOOSE = 1e-3  # about the level of each of a dozen checks
OF = ("those of nodes", "those of final tokens", "those that drew drafts")
NEXT = ("", "those that drew drafts", "those that drew drafts, from step to step")
AGAINST = (
    "a node's coin and its q",
    "a node's coin and its token id",
    "the final coin and the draft's token id",
    "a node's coin and the one that drew it",
    "the final coin and the one that drew the draft",
)


@dataclass(frozen=True)
class Cell:
    """One sum of a check: over everything, or over one depth, place or size."""

    name: str  # "" where there is only one
    sum: Sum | Distance | DrawsFromQ
    more: str = ""  # what else it is judged by, in words


BY_OUTCOME = "requests were kept for their outcome (--keep): they are no fair sample"


@dataclass(frozen=True)
class Family:
    """A check before it is judged: one sum, or several of which the worst counts (Bonferroni's correction)."""

    name: str
    about: str
    cells: Sequence[Cell]
    unit: Scale
    of: Unit  # what the sums number
    lacking: str = FEW  # why it is skipped, where it is

    @cached_property
    def judged(self) -> list[Cell]:
        """The cells with enough in them to show a bias of a possible size."""
        largest = math.inf if self.unit is nats else 1.0
        return [cell for cell in self.cells if cell.sum.judged and cell.sum.least_bias(LOOSE) < largest]

    @property
    def worst(self) -> Cell:
        """The cell with the smallest p-value."""
        return min(self.judged, key=lambda cell: cell.sum.p_value)

    @property
    def p_value(self) -> float:
        """The p-value of the whole check."""
        return min(1.0, len(self.judged) * self.worst.sum.p_value)

    def skipped(self) -> Check:
        """The check, where it could not be judged."""
        return Check(self.name, CheckResult.SKIPPED, self.about, note=self.lacking, unit=self.counted)

    @property
    def counted(self) -> str:
        """What the sums count: coins in themselves, or what chance decided or drew."""
        return "coin" if self.name.startswith("coins") else "decision" if self.name.startswith("acceptance") else "draw"

    def check(self, level: float, *, failed: bool) -> Check:
        """The check, where it was judged. `level`: that of the first step of Holm's procedure."""
        worst, cells = self.worst, self.judged
        measured = worst.sum
        least = max(cell.sum.least_bias(level / len(cells)) for cell in _large(cells))
        here = f"{worst.name}: " if worst.name else ""
        detail = f"{here}off by {self.unit(measured.bias)} on average, z = {measured.z:.2f} over {measured.count:,}"
        detail += f"; {worst.more}" if worst.more else ""
        return Check(
            self.name,
            CheckResult.FAILED if failed else CheckResult.PASSED,
            self.about,
            tested=sum(cell.sum.count for cell in cells),
            example=self.of.where(measured.worst) if failed and measured.worst >= 0 else None,
            detail=detail if failed else "",
            note="" if failed else f"would have seen {self.unit(least)} with 95 % power",
            statistic=measured.z,
            p_value=self.p_value,
            bias=measured.bias,
            least_bias=least,
            unit=self.counted,
        )


def _large(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with at least a tenth of the largest one's observations: that a smaller one passes says little."""
    largest = max(cell.sum.count for cell in cells)
    return [cell for cell in cells if cell.sum.count >= largest / 10]


def share(value: float) -> str:
    """A bias of a probability, in words."""
    return f"{100 * value:.2g} %"


def nats(value: float) -> str:
    """A bias of a surprisal, in words."""
    return f"{value:.2g} nats a token"


def correlation(value: float) -> str:
    """A correlation of two numbers, in words."""
    return f"a correlation of {value:.2g}"


def distance(value: float) -> str:
    """A distance from the uniform distribution, in words."""
    return f"a distance of {value:.2g}"


def statistical_checks(c: Columns, alpha: float, *, by_outcome: bool = False) -> list[Check]:
    """All checks, with a family-wise error of alpha over those that can be judged.

    `by_outcome`: the capture holds requests that were kept for their outcome, and so says nothing about chance: where
    requests with poor acceptance were kept, acceptance is poor.
    """
    families = [*_decisions(c), *_draws(c), *_coins(c)]
    if by_outcome:
        return [dataclasses.replace(family, lacking=BY_OUTCOME).skipped() for family in families]
    judged = [family for family in families if family.judged]
    failed = iter(holm([family.p_value for family in judged], alpha))
    level = alpha / max(len(judged), 1)
    return [f.check(level, failed=next(failed)) if f.judged else f.skipped() for f in families]


def _decisions(c: Columns) -> list[Family]:
    """Outcomes against the acceptance probability."""
    nodes, difference, variance = Chances(c).acceptance()
    lacking = FEW if len(nodes) else "every acceptance probability was 0 or 1" if len(c.token) else "nothing drafted"

    def family(name: str, about: str, of: Indices, label: Callable[[int], str]) -> Family:
        cells = []
        for value in np.unique(of).tolist():
            mine = of == value
            cells.append(Cell(label(value), Sum.of(difference[mine], variance[mine], 1.0, nodes[mine])))
        return Family(name, about, cells, share, c.nodes, lacking)

    size = np.minimum((c.accept_prob[nodes] * 10).astype(np.int64), 9)
    return [
        family("acceptance", "nodes are accepted as often as a says", np.zeros(len(nodes), np.int64), lambda _: ""),
        family("acceptance by depth", "the same at each depth", c.depth[nodes], lambda d: f"depth {d}"),
        family("acceptance by sibling", "the same at each place among siblings", c.sibling[nodes], _nth),
        family("acceptance by size", "the same for small and large a", size, lambda b: f"a from 0.{b}"),
    ]


def _nth(place: int) -> str:
    return f"sibling {place + 1}"


def _draws(c: Columns) -> list[Family]:
    """Tokens against the distributions that they were drawn from."""
    chances = Chances(c)
    first, later = chances.drafted()
    lacking = FEW if c.parents.there.any() else LACKING
    no_draws = lacking if c.sampled.any() else "no draft was sampled"

    def family(name: str, about: str, total: Sum, unit: Scale = nats, why: str = lacking) -> Family:
        return Family(name, about, [Cell("", total)], unit, c.nodes if total is later else c.steps, why)

    return [
        family("recovered draws", "recovered tokens follow the residual", chances.final_draws(recovered=True)),
        family("other final draws", "bonus and target tokens follow p", chances.final_draws(recovered=False)),
        family("emitted surprisal", "emitted tokens follow the target's p: lossless", chances.emitted()),
        family(
            "target's choice emitted",
            "the target's likeliest token is emitted as often as its p says",
            chances.top_token(),
            share,
        ),
        Family(
            "drafted surprisal",
            "first siblings follow q, and are its likeliest token no more often than draws are",
            [Cell("", first, first.likeliest.words)],
            nats,
            c.nodes,
            no_draws,
        ),
        family("later siblings", "siblings drawn after the first follow what is left of q", later, why=no_draws),
        Family(
            "order of siblings",
            "of two sampled siblings the likelier one comes first as often as draws give",
            [Cell("", chances.draw_order())],
            share,
            c.nodes,
            no_draws,
        ),
    ]


def _coins(c: Columns) -> list[Family]:
    """Coins against uniform, independent random numbers."""
    if not c.has_coins:
        no_coins = "the capture has no coins"
        names = ("coins uniform", "coins in series", "coins and draws")
        return [Family(name, "", (), distance, c.steps, no_coins) for name in names]
    uniform = [Cell(name, measured) for name, measured in zip(OF, coins.uniform(c), strict=True)]
    draws = [Cell(name, measured) for name, measured in zip(AGAINST, coins.against_draws(c), strict=True)]
    return [
        Family("coins uniform", "coins are spread evenly over 0 to 1", uniform, distance, c.steps),
        Family(
            "coins in series",
            "a coin is not correlated with the next one",
            [Cell(name, measured) for name, measured in zip(NEXT, coins.serial(c), strict=True)],
            correlation,
            c.steps,
        ),
        Family(
            "coins and draws",
            "coins are not correlated with what was drafted",
            draws,
            correlation,
            c.steps,
            FEW if c.sampled.any() else "no draft was sampled",
        ),
    ]
