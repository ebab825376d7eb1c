"""`--fail-if "tau drops > 2%"`: what a build must not lose.

FIGURE (drops|rises|differs) > X[%], several joined by `or`. FIGURE is tau, rate, or `depth N rate`; X% is of A's
figure, X alone is in the figure's own unit (tokens for tau, a share from 0 to 1 for rates). It is hit where the 95 %
interval of the change lies wholly beyond X: noise alone hits it in at most one of forty builds. A change that may or
may not be larger is said to be so, and does not fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specscope.analyze.compare.bootstrap import FEWEST
from specscope.analyze.compare.result import Condition, Estimate
from specscope.errors import UserError
from specscope.trace.checked import short

FORM = 'write FIGURE (drops|rises|differs) > X[%], such as "tau drops > 2%", "depth 1 rate differs > 0.05"'
FIGURES = "tau, rate, or depth N rate"
LARGEST = 1e6


class Way(StrEnum):
    """Which change is meant."""

    DROPS = "drops"
    RISES = "rises"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Limit:
    """One condition, read."""

    figure: str  # tau, rate, `depth 3 rate`
    way: Way
    size: float  # a share of A's figure where `relative`
    relative: bool

    def __str__(self) -> str:
        size = f"{self.size * 100:.10g}%" if self.relative else f"{self.size:.10g}"
        return f"{self.figure} {self.way} > {size}"


_NUMBER = r"(?P<size>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_CONDITION = re.compile(
    rf"(?P<figure>[a-z][a-z0-9 ]*?) +(?P<way>drops|rises|differs) *> *{_NUMBER} *(?P<percent>%?)", re.ASCII
)


def parse(text: str) -> list[Limit]:
    """The conditions of a text. Raises UserError."""
    return [_parse_one(part.strip(), text) for part in re.split(r"\bor\b", text)]


def _parse_one(part: str, text: str) -> Limit:
    found = _CONDITION.fullmatch(part) if len(part) < 200 else None
    if found is None:
        raise UserError(f"--fail-if {short(text)}: {FORM}")
    figure = " ".join(found["figure"].split())
    if match := re.fullmatch(r"depth ([1-9][0-9]{0,2})( rate)?", figure):
        figure = f"depth {match[1]} rate"
    elif figure not in ("tau", "rate"):
        raise UserError(f"--fail-if {short(text)}: there is no figure {short(figure)}; use {FIGURES}")
    size = float(found["size"])
    if size > LARGEST:
        raise UserError(f"--fail-if {short(text)}: {found['size'][:40]} is too large")
    return Limit(figure, Way(found["way"]), size / 100 if found["percent"] else size, bool(found["percent"]))


def judge(limits: Sequence[Limit], figures: Sequence[Estimate]) -> list[Condition]:
    """What became of each. Raises UserError where a figure is not known on both sides."""
    return [_judge(limit, figures) for limit in limits]


def _judge(limit: Limit, figures: Sequence[Estimate]) -> Condition:
    figure = next((one for one in figures if one.name == limit.figure), None)
    if figure is None or figure.a is None or figure.b is None or figure.difference is None:
        raise UserError(f"--fail-if {limit}: the captures do not show this figure on both sides")
    if figure.low is None or figure.high is None:
        raise UserError(
            f"--fail-if {limit}: {figure.clusters} requests are too few for an interval; {FEWEST} or more are needed"
        )
    least = limit.size * abs(figure.a) if limit.relative else limit.size
    low, high = figure.low, figure.high
    drop, rise = -high > least, low > least
    hit = {Way.DROPS: drop, Way.RISES: rise, Way.DIFFERS: drop or rise}[limit.way]
    beyond = {Way.DROPS: -low, Way.RISES: high, Way.DIFFERS: max(-low, high)}[limit.way] > least
    said = "hit" if hit else "not shown: the interval reaches beyond it" if beyond else "not hit"
    return Condition(str(limit), hit, f"{said}; {change(figure)}")


def change(figure: Estimate) -> str:
    """`3.42 → 3.30, -0.12 (-0.20 to -0.04, 95 %)`"""
    if figure.a is None or figure.b is None or figure.difference is None:
        return "not known on both sides"
    unit = 100.0 if figure.percent else 1.0
    sign = "%" if figure.percent else ""
    digits = 1 if figure.percent else 3
    a, b = (f"{value * unit:.{digits}f}{sign}" for value in (figure.a, figure.b))
    text = f"{a} → {b}, {figure.difference * unit:+.{digits}f}"
    if figure.low is None or figure.high is None:
        return text
    return f"{text} ({figure.low * unit:+.{digits}f} to {figure.high * unit:+.{digits}f}, 95 %)"
