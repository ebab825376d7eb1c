"""`--fail-if "tau drops > 2%"`: what a build must not lose.

trace/history/conditions.py has the grammar. FIGURE is a row of the table of figures, by its name there, a count, or a
row `GROUP: VALUE` of the table by group, as `tau where GROUP is VALUE` (`tau where label kind is code`; `label ` may be
left out). A change hits where its 95 % interval lies wholly beyond X: noise alone hits it in at most one of forty
builds. Where the interval reaches both sides of X, the report says so, and the build does not fail. `tau < 1.5` is
about B's figure as it is, and counts have no interval either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specscope.analyze.compare.bootstrap import Estimate
from specscope.analyze.compare.figures import FEWEST_DRAFTS, FIGURES, LABEL
from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.history.conditions import COUNTED, TAU, Threshold, Way, parse_thresholds
from specscope.trace.history.wording import plural

GROUPED = f"{TAU} where "
NO_GROUPS: Mapping[str, Sequence[Estimate]] = MappingProxyType({})


@dataclass(frozen=True)
class FailCondition:
    text: str
    hit: bool
    detail: str


def parse(text: str) -> list[Threshold]:
    return parse_thresholds(text, (*FIGURES, *COUNTED), grouped=rf"{GROUPED}.+ is .+")


def counted(a: Mapping[str, int | None], b: Mapping[str, int | None]) -> list[Estimate]:
    """The counts that both sides know, by their names: exact, so their intervals have no width."""
    pairs = [(name, before, after) for name in COUNTED for before, after in [(a.get(name), b.get(name))]]
    return [
        Estimate(name, before, after, after - before, after - before, after - before, significant=True)
        for name, before, after in pairs
        if before is not None and after is not None
    ]


def named(title: str, figure: Estimate) -> str:
    """What a row of the table by group is called in a condition and in a sentence."""
    return f"{GROUPED}{title} is {figure.name}"


def judge(
    limits: Sequence[Threshold], figures: Sequence[Estimate], groups: Mapping[str, Sequence[Estimate]] = NO_GROUPS
) -> list[FailCondition]:
    """The outcome of each limit. Raises UserError where a figure is not known on both sides."""
    grouped = [(title, figure) for title, each in groups.items() for figure in each]
    names = [(named(title.removeprefix(LABEL), figure), figure) for title, figure in grouped]
    names += [(named(title, figure), figure) for title, figure in grouped]  # before a label of the same name
    names += [(figure.name, figure) for figure in figures]
    # As the table shows it: with the spaces of a label's value made single.
    known = {" ".join(name.split()): figure for name, figure in names}
    return [_judge(limit, known.get(limit.figure), groups) for limit in limits]


def _judge(limit: Threshold, figure: Estimate | None, groups: Mapping[str, Sequence[Estimate]]) -> FailCondition:
    a, b = (None, None) if figure is None else (figure.a, figure.b)
    if figure is None or b is None or (limit.of_change and a is None):
        sides = " on both sides" if limit.of_change else ""
        grouped = limit.figure.startswith(GROUPED)
        there = f"; a figure by depth or group needs {FEWEST_DRAFTS} drafts on each side" if figure is None else ""
        there += f"; groups: {', '.join(map(short, groups))}" if grouped and groups else ""
        raise UserError(f"--fail-if {short(str(limit))}: the captures do not show this figure{sides}{there}")
    if not limit.of_change:
        hit = limit.passed_by(b)
        return FailCondition(str(limit), hit, f"{'hit' if hit else 'not hit'}; B has {figure.text(b)}")
    if a is None or figure.low is None or figure.high is None:
        are = "is" if figure.clusters == 1 else "are"
        few = f"{plural(figure.clusters, figure.unit)} {are} too few for an interval; give more"
        raise UserError(f"--fail-if {limit}: {figure.without_interval or few}")
    hit = limit.passed_by_change(a, figure.low, figure.high)
    least = limit.size * abs(a) if limit.percent else limit.size
    largest = {Way.DROPS: -figure.low, Way.RISES: figure.high}.get(limit.way, max(-figure.low, figure.high))
    outcome = "hit" if hit else "not shown: the interval includes it" if largest > least else "not hit"
    alone = " (by its own interval; after correction for all figures it is not starred)"
    outcome += alone if hit and not figure.significant else ""
    return FailCondition(str(limit), hit, f"{outcome}; {figure.change}")
