"""Why a run stopped: a reason and its facts. The words are in show_stop.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """What made a run stop."""

    STEP = "step"  # it is where it was asked to go
    PHASE = "phase"  # it is within a step
    BREAKPOINT = "breakpoint"
    UNTIL = "until"  # a condition holds
    FINISHED = "finished"  # a request has ended
    END = "end"  # nothing is left to run
    START = "start"  # there is nothing before it
    INTERRUPTED = "interrupted"  # by the user


@dataclass(frozen=True)
class BreakpointHit:
    """A breakpoint that stopped the run, and at what."""

    number: int
    text: str  # the breakpoint, as it was typed
    step: int  # of the engine
    request: str
    node: int | None
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Where a run stopped, and why."""

    reason: StopReason
    step: int  # of the engine: the one that ran last, -1 before the first; PHASE: the one that was begun
    hits: tuple[BreakpointHit, ...] = ()  # BREAKPOINT: in the order of their events
    phase: str = ""  # PHASE: the one that ran last, "" if none of this step has
    request: str = ""  # FINISHED: which; UNTIL: for which the condition holds; STEP: which was asked for, if one was
    condition: str = ""  # UNTIL
    moved: bool = True  # END: False if nothing was left to run in the first place
