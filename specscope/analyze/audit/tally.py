"""What was compared, item by item: how many differ, the first and the worst of them, and under which condition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.analyze.conditions import Condition, find
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import Check, Reference, Result
from specscope.trace.history import History
from specscope.trace.wording import plural

LEAST = 2e-6  # two probabilities so near are the same whatever the dtype: they are stored as float32
EXAMPLES = 5


@dataclass(frozen=True)
class Difference:
    """One item that differs."""

    where: Reference
    recorded: float
    judged: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        return {"where": str(self.where), "recorded": self.recorded, "judged": self.judged, "text": self.text}


@dataclass(frozen=True)
class Finding:
    """One quantity that was judged: the check, what tells the items that differ from the others, and examples."""

    check: Check
    noun: str  # what an item is: node, step
    condition: Condition | None = None  # None where all agree, or nothing tells those that differ
    examples: tuple[Difference, ...] = ()  # the first that differ

    @property
    def sentence(self) -> str:
        """The condition with its figures; "" where there is none."""
        if self.condition is not None:
            return self.condition.sentence(f"{self.check.name} differs", self.noun)
        return "no condition tells those that differ from the others" if self.check.failed else ""

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            **self.check.to_dict(),
            "noun": self.noun,
            "condition": None if self.condition is None else self.condition.to_dict(),
            "sentence": self.sentence,
            "examples": [example.to_dict() for example in self.examples],
        }


@dataclass
class Tally:
    """The items of one quantity while they are compared."""

    name: str
    about: str
    noun: str = "node"
    items: list[Reference] = field(default_factory=list)
    differs: list[bool] = field(default_factory=list)
    examples: list[Difference] = field(default_factory=list)
    excused: int = 0  # items that rounding could have made either way

    def add(self, where: Reference, *, differs: bool, recorded: float, judged: float, text: str = "") -> None:
        """One more item."""
        self.items.append(where)
        self.differs.append(differs)
        if differs and len(self.examples) < EXAMPLES:
            self.examples.append(Difference(where, recorded, judged, text or f"{recorded:.4g}, not {judged:.4g}"))

    def finding(self, history: History) -> Finding:
        """What it came to. The condition is looked for among all items."""
        failed = sum(self.differs)
        note = f"{plural(self.excused, self.noun)} at near ties left out" if self.excused else ""
        check = Check(
            name=self.name,
            result=Result.SKIPPED if not self.items else Result.FAILED if failed else Result.PASSED,
            about=self.about,
            tested=len(self.items),
            failed=failed,
            example=self.examples[0].where if self.examples else None,
            detail=self.examples[0].text if self.examples else "",
            note=note,
        )
        if not failed:
            return Finding(check, self.noun)
        clusters = [(item.request, item.index) for item in self.items]
        numbers = {key: at for at, key in enumerate(dict.fromkeys(clusters))}
        facts = facts_table(history, self.items)
        condition = find(facts, self.differs, [numbers[key] for key in clusters])
        return Finding(check, self.noun, condition, tuple(self.examples))


def skipped(name: str, about: str, note: str) -> Finding:
    """A quantity that could not be judged, and why."""
    return Finding(Check(name, Result.SKIPPED, about, note=note), "node")


def span(p: float, slack: float) -> tuple[float, float]:
    """The least and the largest probability whose log odds lie within `slack` of those of `p`."""
    if p <= 0 or p >= 1:
        return max(p - LEAST, 0.0), min(p + LEAST, 1.0)
    odds = math.log(p) - math.log1p(-p)
    low, high = (1 / (1 + math.exp(-min(max(odds + off, -700), 700))) for off in (-slack, slack))
    return max(low - LEAST, 0.0), min(high + LEAST, 1.0)


def within(value: float, bounds: tuple[float, float]) -> bool:
    """Whether a recorded figure is one that rounding allows."""
    return bounds[0] <= value <= bounds[1]


def conditional(p: tuple[float, float], taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bounds of p / (1 - what was taken), from bounds of each."""
    least, most = (1 - sum(one[end] for one in taken) for end in (1, 0))
    return p[0] / max(most, LEAST), min(p[1] / max(least, LEAST), 1.0) + LEAST
