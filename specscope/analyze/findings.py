"""What was found about a capture: the checks of verify and audit, each with the step that shows it best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.conditions import Condition
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import shell_word


class Exit(IntEnum):
    """What a command that judges a capture exits with."""

    CONSISTENT = 0
    INCONSISTENT = 1
    NOT_JUDGED = 2  # bad input, or something that was asked for could not be judged

    @staticmethod
    def of(*, wrong: bool, unjudged: bool) -> Exit:
        """A failure takes precedence over what could not be judged, and that over success.

        `unjudged`: something asked for could not be judged, such as when a model is missing. A check that does not
        apply does not count.
        """
        return Exit.INCONSISTENT if wrong else Exit.NOT_JUDGED if unjudged else Exit.CONSISTENT

    @staticmethod
    def over(captures: Iterable[Exit]) -> Exit:
        exits = set(captures)
        return Exit.of(wrong=Exit.INCONSISTENT in exits, unjudged=Exit.NOT_JUDGED in exits)

    @property
    def words(self) -> str:
        return ("consistent", "not consistent", "not judged")[self]


class CheckResult(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the capture lacks what the check needs; `note` says what


@dataclass(frozen=True)
class Reference:
    """A step of a request, and a node of its tree, as `open` and `debug` take it."""

    request: str
    index: int  # the request's own step number
    step: int  # the engine's
    node: int | None = None  # None: the step as a whole, or its final token

    def __str__(self) -> str:
        return f"{self.request}@{self.index}" + ("" if self.node is None else f"/{self.node}")

    def command(self, source: str) -> str:
        return f"specscope open {shell_word(f'{source}#{self}')}"


@dataclass(frozen=True)
class Example:
    """One item that differs from what a model says."""

    where: Reference
    recorded: float
    judged: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"where": str(self.where)}


@dataclass(frozen=True)
class Finding:
    """One check and its result: rows that are wrong, or a sum that is off. Filled by verify and audit."""

    name: str  # short, stable, lower case: "accept probability", "emitted surprisal"
    result: CheckResult
    about: str  # what holds where it passes, in a line
    tested: int = 0  # how many of its unit were tested
    failed: int = 0  # how many of them failed, where each is right or wrong by itself
    example: Reference | None = None  # the first that failed, or the strongest evidence against it
    detail: str = ""  # the example in a line, with its figures
    note: str = ""  # why it was skipped, or what a reader of the figure must know
    unit: str = ""  # what was tested, in the singular: node, step, parent, draw, coin, request
    # Which failed, as their unit is numbered: nodes, decode steps and parents as verify's Columns has them, request
    # steps as `evidence.visits` gives them. What explains a failure starts from these and measures nothing again.
    wrong: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), compare=False, repr=False)
    # Of sums over chance alone
    statistic: float | None = None  # z: the sum over its standard deviation
    p_value: float | None = None  # before Holm's correction
    bias: float | None = None  # mean excess per observation
    least_bias: float | None = None  # the smallest one that this many observations show with 95 % power
    # Of what models judged alone
    condition: Condition | None = None  # None where all agree, or none separates those that differ
    examples: tuple[Example, ...] = ()  # the first that differ
    first_only: bool = False  # whether the condition is of each request up to its first step that differs
    items: tuple[Reference, ...] = ()  # all that were compared, where some differ
    differs: tuple[bool, ...] = ()  # of each item
    rarest: str = ""  # what the few that differ have in common, where no condition is certain

    @property
    def sentence(self) -> str:
        """The condition with its figures; "" where nothing differs."""
        if self.condition is not None:
            sentence = self.condition.sentence(f"{self.name} differs", self.unit)
            return sentence + (" (in each request up to the first step that differs)" if self.first_only else "")
        figures = f"{self.failed:,} of {plural(self.tested, self.unit)}"
        like = f": {self.rarest}" if self.rarest else ""
        return f"{self.name} differs at {figures}; no condition separates them{like}" if self.failed else ""

    def to_dict(self) -> dict[str, Any]:
        example = None if self.example is None else str(self.example)
        shown = ("about", "unit", "tested", "failed", "detail", "note", "statistic", "p_value", "bias", "least_bias")
        values = {"name": self.name, "result": self.result.value, "example": example}
        return values | {name: getattr(self, name) for name in shown}

    def compared(self) -> dict[str, Any]:
        """The same of what models judged."""
        condition = None if self.condition is None else self.condition.to_dict()
        more = {"noun": self.unit, "condition": condition, "sentence": self.sentence, "first_only": self.first_only}
        return self.to_dict() | more | {"examples": [example.to_dict() for example in self.examples]}
