"""`--fail-if "tau drops > 2%"`: what a build must not lose.

FIGURE (drops|rises|differs) > X[%], several joined by `or`. FIGURE is a row of the table of figures, by its name there
(tau, rate, depth N rate, tokens per step, ...), or a row `GROUP: VALUE` of the table by group, as `tau where GROUP is
VALUE` (`tau where label kind is code`; `label ` may be left out). X% is of A's figure, X alone is in the figure's own
unit (tokens for tau, a share from 0 to 1 for rates). It is hit where the 95 % interval in that row lies wholly beyond
X: noise alone hits it in at most one of forty builds. Where the interval reaches both sides of X, the report says so,
and the build does not fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specscope.analyze.compare.result import FIGURES, TAU, Estimate, FailCondition, depth_rate
from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.history.wording import plural

FORM = 'write FIGURE (drops|rises|differs) > X[%], such as "tau drops > 2%", "depth 1 rate differs > 0.05"'
LABEL = "label "  # before the name of a label that groups requests
GROUPED = f"{TAU} where "
KNOWN = f"{', '.join(FIGURES[:2])}, depth N rate, {', '.join(FIGURES[2:])}, or {GROUPED}GROUP is VALUE"
LARGEST = 1e6
LONGEST = 400  # characters of a condition


class Way(StrEnum):
    """Which change is meant."""

    DROPS = "drops"
    RISES = "rises"
    DIFFERS = "differs"


@dataclass(frozen=True)
class FailLimit:
    """One condition, read."""

    figure: str  # tau, rate, `depth 3 rate`, `tau where label kind is code`
    way: Way
    size: float  # a share of A's figure where `relative`
    relative: bool

    def __str__(self) -> str:
        size = f"{self.size * 100:.10g}%" if self.relative else f"{self.size:.10g}"
        return f"{self.figure} {self.way} > {size}"


_NUMBER = r"(?P<size>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_CONDITION = re.compile(rf"(?P<figure>\S.*?) +(?P<way>drops|rises|differs) *> *{_NUMBER} *(?P<percent>%?)", re.ASCII)
# A condition ends with its number, so that a label's value may hold the word `or`.
_NEXT = re.compile(r"(> *[0-9.]+ *%?) *\bor\b")


def parse(text: str) -> list[FailLimit]:
    """The conditions of a text. Raises UserError."""
    parts = _NEXT.sub(r"\1\n", text.replace("\n", " ")).split("\n")
    return [_parse_one(part.strip(), text) for part in parts]


def _parse_one(part: str, text: str) -> FailLimit:
    parsed = _CONDITION.fullmatch(part) if len(part) < LONGEST else None
    if parsed is None:
        raise UserError(f"--fail-if {short(text)}: {FORM}")
    figure = " ".join(parsed["figure"].split())
    if match := re.fullmatch(r"depth ([1-9][0-9]{0,2})( rate)?", figure, re.ASCII):
        figure = depth_rate(int(match[1]))
    elif figure not in FIGURES and not re.fullmatch(rf"{GROUPED}.+ is .+", figure):
        raise UserError(f"--fail-if {short(text)}: there is no figure {short(figure)}; use {KNOWN}")
    size = float(parsed["size"])
    if size > LARGEST:
        raise UserError(f"--fail-if {short(text)}: {parsed['size'][:40]} is too large")
    return FailLimit(figure, Way(parsed["way"]), size / 100 if parsed["percent"] else size, bool(parsed["percent"]))


def named(title: str, figure: Estimate) -> str:
    """What a row of the table by group is called in a condition and in a sentence."""
    return f"{GROUPED}{title} is {figure.name}"


def judge(
    limits: Sequence[FailLimit], figures: Sequence[Estimate], groups: Mapping[str, Sequence[Estimate]] | None = None
) -> list[FailCondition]:
    """The outcome of each limit. Raises UserError where a figure is not known on both sides."""
    known = {figure.name: figure for figure in figures}
    for title, each in (groups or {}).items():
        mine = {figure.name: figure for figure in each}
        known |= {named(title, figure): figure for figure in each}
        if title.startswith(LABEL):
            short_ones = {named(title.removeprefix(LABEL), figure): figure for figure in mine.values()}
            known = short_ones | known  # a built-in group takes precedence over a label of its name
    return [_judge(limit, known, groups or {}) for limit in limits]


def _judge(limit: FailLimit, known: Mapping[str, Estimate], groups: Mapping[str, Sequence[Estimate]]) -> FailCondition:
    # As the table shows it: with the spaces of a label's value made single.
    figure = next((estimate for name, estimate in known.items() if " ".join(name.split()) == limit.figure), None)
    if figure is None or figure.a is None or figure.b is None or figure.difference is None:
        there = _there(limit.figure, groups) if limit.figure.startswith(GROUPED) else ""
        raise UserError(f"--fail-if {short(str(limit))}: the captures do not show this figure on both sides{there}")
    if figure.low is None or figure.high is None:
        raise UserError(
            f"--fail-if {limit}: {plural(figure.clusters, figure.unit)} are too few for an interval; give more"
        )
    least = limit.size * abs(figure.a) if limit.relative else limit.size
    low, high = figure.low, figure.high
    drop, rise = -high > least, low > least
    hit = {Way.DROPS: drop, Way.RISES: rise, Way.DIFFERS: drop or rise}[limit.way]
    beyond = {Way.DROPS: -low, Way.RISES: high, Way.DIFFERS: max(-low, high)}[limit.way] > least
    outcome = "hit" if hit else "not shown: the interval reaches beyond it" if beyond else "not hit"
    alone = " (by its own interval: among all figures of the table it is not starred)"
    outcome += alone if hit and not figure.significant else ""
    return FailCondition(str(limit), hit, f"{outcome}; {change(figure)}")


def _there(figure: str, groups: Mapping[str, Sequence[Estimate]]) -> str:
    """What can be asked for instead: the values of the group, where there is one, else the groups."""
    title = figure.removeprefix(GROUPED).split(" is ")[0]
    each = groups.get(title) or groups.get(f"{LABEL}{title}")
    if each:
        return f"; {title} is one of {', '.join(short(estimate.name) for estimate in each)}"
    return f"; groups: {', '.join(map(short, groups))}" if groups else ""


def change(figure: Estimate) -> str:
    """`3.42 → 3.30, -0.12 (-0.20 to -0.04, 95 %; 24 requests)`"""
    if figure.a is None or figure.b is None or figure.difference is None:
        return "not known on both sides"
    unit = 100.0 if figure.percent else 1.0
    sign = "%" if figure.percent else ""
    digits = 1 if figure.percent else 3
    a, b = (f"{value * unit:.{digits}f}{sign}" for value in (figure.a, figure.b))
    text = f"{a} → {b}, {figure.difference * unit:+.{digits}f}"
    if figure.low is None or figure.high is None:
        return text
    low, high = figure.low * unit, figure.high * unit
    return f"{text} ({low:+.{digits}f} to {high:+.{digits}f}, 95 %; {plural(figure.clusters, figure.unit)})"
