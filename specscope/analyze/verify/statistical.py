"""The run as a whole: did chance fall as the recorded probabilities say that it should? One level for all checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Check, CheckResult, Unit
from specscope.analyze.significance import holm
from specscope.analyze.verify import coins
from specscope.analyze.verify.chances import Chances
from specscope.analyze.verify.parents import LACKING
from specscope.analyze.verify.sums import Distance, Sum

Scale = Callable[[float], str]
FEW = "too few to judge"
LOOSE = 1e-3  # about the level of each of a dozen checks
OF = ("those of nodes", "those of final tokens")
AGAINST = ("a node's coin and its q", "a node's coin and its token id", "the final coin and the draft's token id")


@dataclass(frozen=True)
class Cell:
    """One sum of a check: all there is, or what has one depth, place or size."""

    name: str  # "" where there is only one
    sum: Sum | Distance


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
        """The cells with enough in them to show a bias that is possible."""
        most = math.inf if self.unit is nats else 1.0
        return [cell for cell in self.cells if cell.sum.judged and cell.sum.least_bias(LOOSE) < most]

    @property
    def worst(self) -> Cell:
        """The cell that speaks loudest."""
        return min(self.judged, key=lambda cell: cell.sum.p_value)

    @property
    def p_value(self) -> float:
        """Of the whole check."""
        return min(1.0, len(self.judged) * self.worst.sum.p_value)

    def skipped(self) -> Check:
        """As one that could not be judged."""
        return Check(self.name, CheckResult.SKIPPED, self.about, note=self.lacking, unit=self.counted)

    @property
    def counted(self) -> str:
        """What the sums count: coins in themselves, or what chance decided or drew."""
        return "coin" if self.name.startswith("coins") else "decision" if self.name.startswith("acceptance") else "draw"

    def check(self, level: float, *, failed: bool) -> Check:
        """As it was judged. `level`: what its p-value had to be below, in the first place."""
        worst, cells = self.worst, self.judged
        found = worst.sum
        least = max(cell.sum.least_bias(level / len(cells)) for cell in _large(cells))
        here = f"{worst.name}: " if worst.name else ""
        detail = f"{here}off by {self.unit(found.bias)} on average, z = {found.z:.2f} over {found.count:,}"
        return Check(
            self.name,
            CheckResult.FAILED if failed else CheckResult.PASSED,
            self.about,
            tested=sum(cell.sum.count for cell in cells),
            example=self.of.where(found.worst) if failed and found.worst >= 0 else None,
            detail=detail if failed else "",
            note="" if failed else f"would have seen {self.unit(least)} with 95 % power",
            statistic=found.z,
            p_value=self.p_value,
            bias=found.bias,
            least_bias=least,
            unit=self.counted,
        )


def _large(cells: Sequence[Cell]) -> list[Cell]:
    """Cells with a tenth of the largest one's observations: of smaller ones no pass says much."""
    most = max(cell.sum.count for cell in cells)
    return [cell for cell in cells if cell.sum.count >= most / 10]


def share(value: float) -> str:
    """Of a probability."""
    return f"{100 * value:.2g} %"


def nats(value: float) -> str:
    """Of a surprisal."""
    return f"{value:.2g} nats a token"


def correlation(value: float) -> str:
    """Of two numbers."""
    return f"a correlation of {value:.2g}"


def distance(value: float) -> str:
    """From a uniform distribution."""
    return f"a distance of {value:.2g}"


def statistical_checks(c: Columns, alpha: float, *, by_outcome: bool = False) -> list[Check]:
    """All of them, with a family-wise error of alpha over those that can be judged.

    `by_outcome`: the capture holds requests that were chosen for what became of them, with whose chances nothing can be
    said: of those with poor acceptance, acceptance is poor.
    """
    families = [*_decisions(c), *_draws(c), *_coins(c)]
    if by_outcome:
        return [dataclasses.replace(family, lacking=BY_OUTCOME).skipped() for family in families]
    judged = [family for family in families if family.judged]
    failed = iter(holm([family.p_value for family in judged], alpha))
    level = alpha / max(len(judged), 1)
    return [f.check(level, failed=next(failed)) if f.judged else f.skipped() for f in families]


def _decisions(c: Columns) -> list[Family]:
    """Accepted against the acceptance probability."""
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
        return Family(name, about, [Cell("", total)], unit, c.nodes if total in (first, later) else c.steps, why)

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
        family("drafted surprisal", "first siblings follow q", first, why=no_draws),
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
    """Coins as random numbers."""
    if not c.has_coins:
        no_coins = "the capture has no coins"
        names = ("coins uniform", "coins in series", "coins and draws")
        return [Family(name, "", (), distance, c.steps, no_coins) for name in names]
    uniform = [Cell(name, found) for name, found in zip(OF, coins.uniform(c), strict=True)]
    draws = [Cell(name, found) for name, found in zip(AGAINST, coins.against_draws(c), strict=True)]
    return [
        Family("coins uniform", "coins are spread evenly over 0 to 1", uniform, distance, c.steps),
        Family(
            "coins in series",
            "a coin is not correlated with the next one",
            [Cell("", coins.serial(c))],
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
