"""What an engine and its debugger report: why a run stopped, and the news for a screen, each a type of its own.

The words of a stop are in show.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Answer:
    line: str
    text: str
    stop: Stop | None = None  # where it stopped the run, if it moved it
    request: str = ""  # the current one since then, where one was chosen


@dataclass(frozen=True)
class LookRefused:
    """A node's distributions that cannot be shown; `node`: None for the final token."""

    step: int
    request: str
    node: int | None
    why: str


@dataclass(frozen=True)
class PromptRefused:
    why: str


@dataclass(frozen=True)
class Notice:
    text: str


class StopReason(StrEnum):
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
    number: int
    text: str  # the breakpoint, as it was typed
    step: int  # of the engine
    request: str
    node: int | None


@dataclass(frozen=True)
class Stop:
    reason: StopReason
    step: int  # the engine's step: the one that ran last, -1 before the first; PHASE: the one that was begun
    hits: tuple[BreakpointHit, ...] = ()  # BREAKPOINT: in the order of their events
    phase: str = ""  # PHASE: the one that ran last, "" if none of this step has
    request: str = ""  # FINISHED: which; UNTIL: for which the condition holds; STEP: which was asked for, if one was
    condition: str = ""  # UNTIL
    moved: bool = True  # END: False if nothing was left to run in the first place


News = Stop | Answer | LookRefused | PromptRefused | Notice  # Stop: a running engine came to a breakpoint
