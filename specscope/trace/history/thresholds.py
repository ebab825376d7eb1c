"""Conditions on figures, as `compare --fail-if` takes them: `tau drops > 2%`.

FIGURE (<|>) X[%]                    the figure itself, of side B
FIGURE (drops|rises|differs) > X[%]  its change, from A to B

Several are joined by `or`. FIGURE is a figure by its name: tau, rate, depth N rate, a count, and what the verb adds to
these. X% of a change is of the older figure, and of a rate its share; X alone is in the figure's own unit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from specscope.errors import UserError
from specscope.trace.checked import short

TAU, RATE = "tau", "rate"
# Counts, by their names in conditions and in code
COUNTED: Mapping[str, str] = {
    "drafts": "drafts",
    "drafted": "drafted",
    "accepted": "accepted",
    "output tokens": "emitted",
    "requests": "requests",
}
LARGEST = 1e10
LONGEST = 400  # characters of a condition


def depth_rate(depth: int) -> str:
    """The figure of one depth."""
    return f"depth {depth} rate"


class Way(StrEnum):
    """What is asked of a figure."""

    BELOW = "<"
    ABOVE = ">"
    DROPS = "drops"
    RISES = "rises"
    DIFFERS = "differs"


@dataclass(frozen=True)
class Threshold:
    """One condition, read."""

    figure: str  # tau, rate, `depth 3 rate`, drafts, `tau where label kind is code`
    way: Way
    size: float  # a share where `percent`
    percent: bool

    def __str__(self) -> str:
        size = f"{self.size * 100:.10g}%" if self.percent else f"{self.size:.10g}"
        return f"{self.figure} {self.way}{' >' if self.of_change else ''} {size}"

    @property
    def of_change(self) -> bool:
        """Whether it is about a change, and not about the figure itself."""
        return self.way not in (Way.BELOW, Way.ABOVE)

    def passed_by(self, value: float) -> bool:
        """Whether the figure itself is beyond the limit."""
        return value < self.size if self.way is Way.BELOW else value > self.size

    def passed_by_change(self, before: float, low: float, high: float) -> bool:
        """Whether all changes from `low` to `high` are beyond the limit."""
        least = self.size * abs(before) if self.percent else self.size
        drop, rise = -high > least, low > least
        return {Way.DROPS: drop, Way.RISES: rise, Way.DIFFERS: drop or rise}[self.way]


_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_CONDITION = re.compile(
    rf"(?P<figure>\S.*?)(?: +(?P<way>drops|rises|differs) *>| *(?P<sign>[<>])) *(?P<size>{_NUMBER}) *(?P<percent>%?)",
    re.ASCII,
)
# A condition ends with its number, so that a label's value may hold the word `or`.
_NEXT = re.compile(r"([<>] *[0-9.]+ *%?) *\bor\b", re.ASCII)
_DEPTH = re.compile(r"depth ([1-9][0-9]{0,2})( rate)?", re.ASCII)


def parse_thresholds(text: str, figures: Collection[str], *, grouped: str) -> list[Threshold]:
    """The conditions of a text. Raises UserError.

    `figures`: those that the verb has, besides the rates by depth. `grouped`: a pattern of names of further ones.
    """
    parts = _NEXT.sub(r"\1\n", text.replace("\n", " ")).split("\n")
    try:
        return [_parse(part.strip(), figures, grouped) for part in parts]
    except UserError as error:
        raise UserError(f"--fail-if {short(text)}: {error}") from None


def _parse(part: str, figures: Collection[str], grouped: str) -> Threshold:
    parsed = _CONDITION.fullmatch(part) if len(part) < LONGEST else None
    if parsed is None:
        raise UserError(
            'write FIGURE (drops|rises|differs) > X[%] or FIGURE (<|>) X[%], such as "tau drops > 2%", '
            '"depth 1 rate < 0.5"'
        )
    figure = " ".join(parsed["figure"].split())
    if match := _DEPTH.fullmatch(figure):
        figure = depth_rate(int(match[1]))
    elif figure not in figures and not re.fullmatch(grouped, figure):
        names = list(figures)
        names.insert(2, "depth N rate")
        raise UserError(f"there is no figure {short(figure)}; use {', '.join(names)} or tau where GROUP is VALUE")
    size, way, percent = float(parsed["size"]), Way(parsed["way"] or parsed["sign"]), bool(parsed["percent"])
    if size > LARGEST:
        raise UserError(f"{parsed['size'][:40]} is too large")
    if percent and not parsed["way"] and (figure.startswith((TAU, "tokens")) or figure in COUNTED):
        raise UserError(f"{figure} is a number, not a share")
    return Threshold(figure, way, size / 100 if percent else size, percent)
