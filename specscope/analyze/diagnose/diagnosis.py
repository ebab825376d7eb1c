"""What diagnose finds: suspects, the best first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit, Reference

# How sure a suspect is. In between, the share of the evidence that it explains decides.
CERTAIN = 0.95  # a right engine cannot do this, and nothing else does
RERUN = 0.85  # computed again with this mistake, the recorded figures come out
CONDITION = 0.7  # what differs, differs where this cause would make it differ
STATISTICAL = 0.5  # more than chance allows
REMARK = 0.2  # an explanation in which nothing is wrong


@dataclass(frozen=True)
class Suspect:
    """A cause that the evidence speaks for."""

    cause: Cause
    score: float  # 0 to 1
    for_: tuple[str, ...]  # the figures that speak for it, in lines
    against: tuple[str, ...] = ()
    example: Reference | None = None

    def command(self, source: str) -> str:
        """The command that shows one example; of the whole run where there is none."""
        return f"specscope report {source}" if self.example is None else self.example.command(source)

    def to_dict(self, source: str) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            "cause": self.cause.label,
            "is_fault": self.cause.is_fault,
            "about": self.cause.about,
            "look": self.cause.look,
            "score": round(self.score, 3),
            "for": list(self.for_),
            "against": list(self.against),
            "example": None if self.example is None else str(self.example),
            "command": self.command(source),
        }


@dataclass(frozen=True)
class Diagnosis:
    """The suspects of a run, the most likely first; explanations without a fault come last."""

    suspects: tuple[Suspect, ...]
    unexplained: tuple[str, ...] = ()  # what is wrong by verify or audit and fits none of the causes
    looked_at: tuple[str, ...] = ()  # what could be run: the capture, verify, audit, ...
    left_out: tuple[str, ...] = field(default=())  # what could not, and why
    steps: int = 0  # decode steps that were looked at
    beside: tuple[str, ...] = ()  # what differs from a good capture, where there is one

    @property
    def faults(self) -> Sequence[Suspect]:
        """Those in which something is wrong."""
        return [one for one in self.suspects if one.cause.is_fault]

    @property
    def exit(self) -> Exit:
        """0: nothing wrong was found; 1: something was; 2: there was nothing to judge."""
        if self.faults or self.unexplained:
            return Exit.INCONSISTENT
        return Exit.CONSISTENT if self.steps else Exit.NOT_JUDGED

    def to_dict(self, source: str) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            "source": source,
            "steps": self.steps,
            "suspects": [one.to_dict(source) for one in self.suspects],
            "unexplained": list(self.unexplained),
            "looked_at": list(self.looked_at),
            "left_out": list(self.left_out),
            "beside": list(self.beside),
        }
