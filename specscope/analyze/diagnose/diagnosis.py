"""What diagnose finds, in three lists: faults, the likeliest first; what no fault explains; remarks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.findings import Exit, Reference
from specscope.analyze.locate.located import Located
from specscope.trace.record.vocabulary import shell_word

# How sure a suspect is by itself; how much of what failed it explains then moves it up or down.
CERTAIN = 0.95  # a correct engine cannot do this, and no other fault does
RERUN = 0.85  # computing again with this mistake gives the recorded figures
CONDITION = 0.7  # the differences are where this cause would put them
STATISTICAL = 0.5  # more than chance allows
REMARK = 0.2  # an explanation in which nothing is wrong
CHANCE = 1e-3 / len(Cause)  # evidence likelier than this by chance names no cause: 1 in 1,000 over all causes
LOG_CHANCE = math.log(CHANCE)


@dataclass(frozen=True)
class Suspect:
    """A cause for which there is evidence."""

    cause: Cause
    score: float  # 0 to 1
    for_: tuple[str, ...]  # the evidence for it, in lines
    against: tuple[str, ...] = ()
    example: Reference | None = None
    explained: int | None = None  # how many failures of the check it explains; None: all
    explains: Mapping[str, float] = field(default_factory=dict)  # by check, the share that it explains where not all
    chance: float | None = None  # how often chance gives such evidence; None where chance has no part in it
    rerun: bool = False  # whether something was computed again under this very mistake, and came out as recorded

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
            "score": round(self.score, 3),
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
        }
