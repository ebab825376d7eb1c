"""What a comparison finds, as plain values. Filled by comparison.py; text, page, screen and JSON all show these."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specscope.analyze.compare.align import PairedBy
from specscope.analyze.compare.bootstrap import Estimate
from specscope.analyze.compare.config import Difference
from specscope.analyze.compare.failif import FailCondition
from specscope.analyze.compare.fields import Field
from specscope.analyze.compare.figures import CalibrationBin
from specscope.analyze.compare.parting import Parting, PartingCause
from specscope.trace.history.conditions import TAU


class Sameness(StrEnum):
    """Whether the two sides do the same."""

    SAME = "same"
    CONFIGURED = "as configured"  # it differs where the configuration does, and nowhere else
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Pair:
    """A request of each side."""

    a: int  # place in Side.requests
    b: int
    id_a: str
    id_b: str
    title: str
    match: PairedBy
    tokens: tuple[int, int]
    tau: tuple[float | None, float | None]
    drafts: tuple[int, int]  # steps with drafts
    parting: Parting | None = None  # None where the outputs are the same
    first: Parting | None = None  # the first decision that differs, where that is before the parting

    @property
    def same(self) -> bool:
        """Whether the outputs are the same."""
        return self.parting is None

    @property
    def causes(self) -> dict[PartingCause, int]:
        """Of its first differing decision and of where its outputs part, with the output tokens before it."""
        both = [parting for parting in (self.parting, self.first) if parting is not None]
        return {parting.cause: parting.position for parting in both}


@dataclass(frozen=True)
class SideFacts:
    """The models and counts of one side, and its files."""

    warnings: tuple[str, ...]
    target: str
    drafter: str
    requests: int
    unmatched: int
    engine_steps: int
    decode_steps: int
    tokens: int
    source: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that `specscope compare` shows."""

    a: SideFacts
    b: SideFacts
    answer: Sameness  # this and the next three are the verdict's
    summary: str  # it in a sentence
    headline: str  # the acceptance length of both sides, its change and interval
    reasons: tuple[str, ...]  # what speaks for it, the strongest first
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]  # what a side lacks, and what was therefore not compared
    pairs: tuple[Pair, ...]
    nodes: int  # at equal contexts
    steps: int  # at equal contexts
    fields: tuple[Field, ...]
    figures: tuple[Estimate, ...]
    groups: dict[str, tuple[Estimate, ...]]  # acceptance length by group
    calibration: tuple[CalibrationBin, ...]
    conditions: tuple[FailCondition, ...]
    unpaired: str  # why there is no pair, in a sentence; "" where there is one

    @property
    def sides(self) -> dict[str, SideFacts]:
        """By their names."""
        return {"A": self.a, "B": self.b}

    @property
    def tau(self) -> Estimate | None:
        """The primary figure; None where it is not known on both sides."""
        return next((figure for figure in self.figures if figure.name == TAU), None)

    @property
    def depths(self) -> list[Estimate]:
        """The acceptance rate of each depth."""
        return [figure for figure in self.figures if figure.name.startswith("depth ")]

    @property
    def grouped(self) -> list[tuple[str, Estimate]]:
        """(the group, its figure with the group in its name) of each row of the groups."""
        rows = [(title, figure) for title, each in self.groups.items() for figure in each]
        return [(title, dataclasses.replace(figure, name=f"{title}: {figure.name}")) for title, figure in rows]

    @property
    def partings(self) -> dict[PartingCause, int]:
        """How many pairs part, by cause, the most frequent first."""
        return dict(Counter(pair.parting.cause for pair in self.pairs if pair.parting is not None).most_common())

    @property
    def warnings(self) -> list[str]:
        """Of both sides' captures."""
        return [f"{name}: {line}" for name, side in self.sides.items() for line in side.warnings]

    @property
    def exit_code(self) -> int:
        """1 where something differs beyond error and not as configured, else 0; --fail-if alone decides."""
        hit = any(condition.hit for condition in self.conditions)
        return int(hit if self.conditions else self.answer is Sameness.DIFFERENT)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"partings": {str(cause): n for cause, n in self.partings.items()}}
