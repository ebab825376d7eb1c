"""What a capture is found to be: the checks of verify and audit, each with the step that shows it best."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any


class Exit(IntEnum):
    """What a command that judges a capture exits with."""

    CONSISTENT = 0
    INCONSISTENT = 1
    NOT_JUDGED = 2  # bad input, or nothing in it could be judged


class Result(StrEnum):
    """The outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the capture lacks what it takes; `note` says what


@dataclass(frozen=True)
class Reference:
    """A step of a request, and a node of its tree, as `replay` and `debug --over` open it."""

    request: str
    index: int  # the request's own step number
    step: int  # the engine's
    node: int | None = None  # None: the step as a whole, or its final token

    def __str__(self) -> str:
        return f"{self.request}@{self.index}" + ("" if self.node is None else f" node {self.node}")

    def command(self, source: str) -> str:
        """The command that shows it."""
        return f"specscope replay '{source}#{self.request}@{self.index}'"


@dataclass(frozen=True)
class Check:
    """One thing that was looked for. Filled by analyze/verify/ and analyze/audit/."""

    name: str  # short, stable, lower case: "accept probability", "emitted surprisal"
    result: Result
    about: str  # what holds where it passes, in a line
    tested: int = 0  # steps, nodes or tokens that were looked at
    failed: int = 0  # of them, where each is right or wrong by itself
    example: Reference | None = None  # the first that failed, or the one that speaks loudest against it
    detail: str = ""  # the example in a line, with its figures
    note: str = ""  # why it was skipped, or what a reader of the figure must know
    # Statistical checks alone
    statistic: float | None = None  # z: the sum over its standard deviation
    p_value: float | None = None  # before Holm's correction
    bias: float | None = None  # mean excess per observation
    least_bias: float | None = None  # the smallest one that this many observations show with 95 % power

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            "name": self.name,
            "result": self.result.value,
            "about": self.about,
            "tested": self.tested,
            "failed": self.failed,
            "example": None if self.example is None else str(self.example),
            "detail": self.detail,
            "note": self.note,
            "statistic": self.statistic,
            "p_value": self.p_value,
            "bias": self.bias,
            "least_bias": self.least_bias,
        }
