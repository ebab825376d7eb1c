"""Differences of ratios with intervals: a cluster bootstrap over requests, seeded.

Steps of one request are alike, so whole requests are drawn, not steps. Both requests of a pair are drawn together,
which takes the variation between prompts out of the difference. The interval is log(B / A) +- t * s, where s is the
bootstrap's standard error times sqrt(n / (n - 1)): with a dozen requests, plain percentiles cover less than their
nominal level. An end x of it is the difference 2 sqrt(A B) sinh(x / 2), which is B - A where x is log(B / A), and the
same with its sign changed where the sides change places. Where a side is 0, or a figure may be negative, the difference
takes the logarithm's place. It ends where either figure does. In per cent it is the same interval, over A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from specscope.analyze.significance import holm, t_quantile, t_two_sided
from specscope.analyze.table import NONE
from specscope.trace.history.conditions import COUNTED
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import Doubles

REPLICATES = 2000
BATCH = 100  # replicates that are drawn at once
LEVEL = 0.95  # of the intervals
POWER = 0.95  # of Estimate.visible
FEWEST = 3  # clusters; with fewer there is no interval
SEED = 20_260_101
SAME = ROUNDING["float32"]  # rounding alone moves two engines' q by as much


@dataclass(frozen=True)
class Estimate:
    """A figure of both sides, and the difference B - A with its 95 % interval."""

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    significant: bool = False  # tau: by its interval; any other: after Holm's correction over its table
    visible: float | None = None  # the least difference that would be seen with 95 % power; None: none that can be
    clusters: int = 0  # that it is computed from: requests, or pairs of these; for counts, drafts
    weight: tuple[float, float] = (0.0, 0.0)  # drafts, steps or nodes under the figure
    percent: bool = False  # whether it is a share
    unit: str = "request"  # what a cluster is
    without_interval: str = ""  # why there is none, where more data would not help

    @property
    def nonzero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def text(self, value: float | None, digits: int = 3, sign: str = "") -> str:
        """`3.420`, `36.2%`, of counts `4,816`: a value in the figure's unit. `sign`: "+" for a difference."""
        if value is None:
            return NONE
        if self.percent:
            return f"{100 * value:{sign}.1f}%"
        return f"{value:{sign},.{0 if self.name in COUNTED else digits}f}"

    def points(self, value: float | None, digits: int = 3, sign: str = "") -> str:
        """`-0.120`, of shares `-12.0 points`: a difference."""
        return self.text(value, digits, sign).replace("%", " points")

    def interval(self, digits: int = 3) -> str:
        """The 95 % interval of the difference; of shares in points."""
        if self.low is None:
            return NONE
        return " to ".join(self.text(end, digits, "+").removesuffix("%") for end in (self.low, self.high))

    @property
    def change(self) -> str:
        """`3.42 → 3.30, -0.12 (-0.20 to -0.04, 95 %; 24 requests)`"""
        if self.a is None or self.b is None or self.difference is None:
            return "not known on both sides"
        text = f"{self.text(self.a)} → {self.text(self.b)}, {self.points(self.difference, sign='+')}"
        if self.low is None or self.name in COUNTED:
            return text
        return f"{text} ({self.interval()}, 95 %; {plural(self.clusters, self.unit)})"


@dataclass(frozen=True)
class Ratio:
    """A figure: sum of `top` over sum of `bottom`, by cluster."""

    name: str
    top: tuple[Doubles, Doubles]  # of A and of B, [clusters]
    bottom: tuple[Doubles, Doubles]
    percent: bool = False
    offset: float = 0.0  # added to the ratio
    signed: bool = False  # whether it may be below 0


def measured(ratios: Sequence[Ratio], clusters: int) -> list[Estimate]:
    """The estimate of each ratio with its interval; which are significant is left to `marked`."""
    if not ratios:
        return []
    sums = np.stack([column for ratio in ratios for column in (*ratio.top, *ratio.bottom)], axis=1)
    drawn = resampled(sums, clusters)
    return [_estimate(ratio, drawn[:, 4 * index : 4 * index + 4]) for index, ratio in enumerate(ratios)]


def resampled(sums: Doubles, clusters: int) -> Doubles:
    """[replicates, columns] of sums [clusters, columns], the clusters drawn with replacement."""
    generator = np.random.default_rng(SEED)
    parts = []
    for _ in range(REPLICATES // BATCH):
        drawn = generator.integers(0, clusters, (BATCH, clusters)) + np.arange(BATCH)[:, None] * clusters
        weights = np.bincount(drawn.ravel(), minlength=BATCH * clusters).reshape(BATCH, clusters)
        parts.append(weights @ sums)
    return np.concatenate(parts)


def alone(top: Doubles, bottom: Doubles, offset: float = 0.0) -> tuple[float, float] | None:
    """The 95 % interval of one run's figure, from sums [requests]; None where too few requests have it."""
    some = bottom > 0
    n = int(some.sum())
    if n < FEWEST or not top.any():
        return None
    drawn = resampled(np.stack([top[some], bottom[some]], axis=1), n)
    figures = drawn[:, 0] / drawn[:, 1] + offset
    if not (figures > 0).all():
        return None
    value = float(top[some].sum() / bottom[some].sum()) + offset  # at least `offset`
    half = t_quantile((1 + LEVEL) / 2, n - 1) * math.sqrt(n / (n - 1)) * float(np.std(np.log(figures), ddof=1))
    return max(value * math.exp(-half), offset), value * math.exp(half)


def _estimate(ratio: Ratio, drawn: Doubles) -> Estimate:
    """`drawn`: [replicates, 4] the sums of A's and B's top, and of A's and B's bottom."""
    below = [float(side.sum()) for side in ratio.bottom]
    n = min(int((side > 0).sum()) for side in ratio.bottom)
    a, b = (
        float(top.sum()) / under + ratio.offset if under else None for top, under in zip(ratio.top, below, strict=True)
    )
    bare = Estimate(ratio.name, a, b, clusters=n, weight=(below[0], below[1]), percent=ratio.percent)
    if a is None or b is None or n < FEWEST:
        return replace(bare, difference=None if a is None or b is None else b - a)
    with np.errstate(divide="ignore", invalid="ignore"):
        sides = drawn[:, :2] / drawn[:, 2:] + ratio.offset
    sides = sides[np.isfinite(sides).all(axis=1)]
    of_logs = a > 0 and b > 0 and bool((sides > 0).all())
    spread = np.diff(np.log(sides) if of_logs else sides, axis=1)
    error = float(np.std(spread, ddof=1)) * math.sqrt(n / (n - 1))
    least = -math.inf if ratio.signed else ratio.offset
    return spanned(bare, error if error > 1e-12 else 0.0, of_logs=of_logs, least=least)


def spanned(bare: Estimate, error: float, *, of_logs: bool, least: float) -> Estimate:
    """With its interval and what follows from it. `error`: the standard error of B - A, `of_logs` of log(B / A).

    A figure ends at its `least` value, and a share at 1; a change by more than the figure is not called visible.
    """
    a, b, degrees = bare.a or 0.0, bare.b or 0.0, bare.clusters - 1
    change = (math.log(b / a) if of_logs else b - a) if abs(b - a) > SAME else 0.0
    t = t_quantile((1 + LEVEL) / 2, degrees)
    seen = (t + NormalDist().inv_cdf(POWER)) * error
    visible = a * math.expm1(seen) if of_logs else seen
    ends = change - t * error, change + t * error
    low, high = (2 * math.sqrt(a * b) * math.sinh(end / 2) if of_logs else end for end in ends)
    reach = math.inf if least < 0 else max(a, 1 - a) if bare.percent else a
    low, high = max(low, least - a), min(high, b - least)
    if bare.percent:
        low, high = max(low, b - 1), min(high, 1 - a)
    return replace(
        bare,
        difference=b - a if change else 0.0,
        low=low,
        high=high,
        p_value=t_two_sided(change / error, degrees) if error else float(not change),
        visible=visible if visible <= reach else None,
    )


def marked(estimates: Sequence[Estimate], alpha: float) -> list[Estimate]:
    """Set which are significant, by Holm's correction: any of them is false with probability `alpha` at most."""
    judged = [estimate for estimate in estimates if estimate.p_value is not None]
    rejected = iter(holm([estimate.p_value or 0.0 for estimate in judged], alpha))
    return [each if each.p_value is None else replace(each, significant=next(rejected)) for each in estimates]
