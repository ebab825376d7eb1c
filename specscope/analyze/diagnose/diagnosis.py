"""What diagnose finds, in three lists: faults, the likeliest first; what no fault explains; remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit, Reference
from specscope.analyze.locate.located import Located
from specscope.trace.record.vocabulary import shell_word

CHANCE = 1e-3 / len(Cause)  # evidence likelier than this by chance names no cause: 1 in 1,000 over all causes
LOG_CHANCE = math.log(CHANCE)
NINE_IN_TEN = 0.9


class Proof(IntEnum):
    """What kind of evidence names a cause, the surest first: a formula, or a rerun, that gives what was recorded; a
    condition, where differences are where the cause would put them; a sum, off by more than chance allows."""

    ROWS = 0
    CONDITION = 1
    SUM = 2


class Grade(StrEnum):
    """How sure a cause is. Proven: a formula or an operation gives all that differs. Likely: it is net of what it
    spoils nine in ten of it. Possible: less, or a sum, which has no rows."""

    PROVEN = "proven"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True)
class Suspect:
    """A cause for which there is evidence."""

    cause: Cause
    proof: Proof
    for_: tuple[str, ...]  # the evidence for it, in lines
    against: tuple[str, ...] = ()
    example: Reference | None = None
    explained: int | None = None  # how many of what differs it explains; None: all
    of: int = 0  # what differs, as the check or the rerun that names it counts; 0: not by count
    spoiled: int = 0  # of what agrees, how many would differ
    explains: Mapping[str, float] = field(default_factory=dict)  # by check, the share that it explains where not all
    chance: float | None = None  # how often chance gives such evidence; None where chance has no part in it
    rerun: bool = False  # whether something was computed again under this very mistake, and came out as recorded

    @staticmethod
    def rerun_of(cause: Cause, line: str, example: Reference | None, counts: tuple[int, int]) -> Suspect:
        """A cause under which something was computed again. `counts`: (explained, of what differs)."""
        explained, of = counts
        return Suspect(cause, Proof.ROWS, (line,), (), example, explained, of, rerun=True)

    @property
    def net(self) -> float:
        """The share of what differs that it explains, less what it spoils."""
        return (self.of if self.explained is None else self.explained - self.spoiled) / self.of if self.of else 1.0

    @property
    def grade(self) -> Grade:
        """How sure it is by itself."""
        if self.proof is Proof.ROWS and self.net >= 1:
            return Grade.PROVEN
        return Grade.LIKELY if self.proof is not Proof.SUM and self.net >= NINE_IN_TEN else Grade.POSSIBLE

    def command(self, source: str) -> str:
        """The command that shows one example; of the whole run where there is none."""
        return f"specscope report {shell_word(source)}" if self.example is None else self.example.command(source)

    def covers(self, check: str) -> float:
        """The share of a failed check that it explains."""
        return self.explains.get(check, 1.0) if check in self.cause.follows else 0.0

    def to_dict(self, source: str) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            "cause": self.cause.label,
            "is_fault": self.cause.is_fault,
            "about": self.cause.about,
            "look": self.cause.look,
            "grade": self.grade.value,
            "explained": self.of if self.explained is None else self.explained,
            "of": self.of,
            "spoiled": self.spoiled,
            "for": list(self.for_),
            "against": list(self.against),
            "chance": self.chance,
            "example": None if self.example is None else str(self.example),
            "command": self.command(source),
        }


@dataclass(frozen=True)
class Diagnosis:
    """The faults of a run, the most likely first; what is wrong and no fault explains; and remarks."""

    suspects: tuple[Suspect, ...]  # faults
    unexplained: tuple[str, ...] = ()  # what verify or audit found wrong and no fault explains
    looked_at: tuple[str, ...] = ()  # what could be run: the capture, verify, audit, ...
    left_out: tuple[str, ...] = field(default=())  # what was asked for and could not be judged, and why
    steps: int = 0  # decode steps that were looked at
    remarks: tuple[Suspect, ...] = ()  # explanations without a fault, and causes that only text or acceptance suggests
    declined: tuple[str, ...] = ()  # what the user told it to leave out
    located: tuple[Located, ...] = ()  # faults with their places, those that explain most first
    ruled_out: tuple[str, ...] = ()  # what agrees, a sentence each, where something was looked for
    when: tuple[str, ...] = ()  # the conditions under which checks fail, the clearest first
    would_see: tuple[str, ...] = ()  # how large an error each check of chance that passed would have seen
    builds: str = ""  # which build recorded the run, and which judged it
    notes: tuple[str, ...] = ()  # how far was looked, where nobody asked for more

    @property
    def faults(self) -> tuple[Suspect, ...]:
        """Those in which something is wrong."""
        return tuple(suspect for suspect in self.suspects if suspect.cause.is_fault)

    @property
    def exit(self) -> Exit:
        """1: something is wrong; else 2: something that was asked for could not be judged; else 0."""
        unjudged = bool(self.left_out) or not self.steps
        return Exit.of(wrong=bool(self.located or self.faults or self.unexplained), unjudged=unjudged)

    def to_dict(self, source: str) -> dict[str, Any]:
        """As plain values, for --json."""
        return {
            "source": source,
            "exit": int(self.exit),
            "steps": self.steps,
            "suspects": [suspect.to_dict(source) for suspect in self.suspects],
            "unexplained": list(self.unexplained),
            "remarks": [remark.to_dict(source) for remark in self.remarks],
            "looked_at": list(self.looked_at),
            "left_out": [*self.left_out, *self.declined],
            "located": [located.to_dict() for located in self.located],
            "ruled_out": list(self.ruled_out),
            "when": list(self.when),
            "would_see": list(self.would_see),
            "builds": self.builds,
            "notes": list(self.notes),
        }
