"""What an engine in its own process and its parent say to each other, over one pipe each way.

From the engine also come the bus's records, debug.answers.News, Forked and NodeView.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specscope.debug.breakpoints import BreakpointInfo
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary


@dataclass(frozen=True)
class Loading:
    """How far it has loaded."""

    stage: str


@dataclass(frozen=True)
class Ready:
    """The engine has loaded. Sent once."""

    run: RunInfo
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Status:
    """What the engine does now."""

    name: str  # running, paused or idle


@dataclass(frozen=True)
class Failed:
    """The engine ended, and why. Sent last."""

    why: str


@dataclass(frozen=True)
class BreakpointList:
    """The debugger's breakpoints, whenever they or their hits have changed."""

    breakpoints: tuple[BreakpointInfo, ...]


@dataclass(frozen=True)
class Command:
    """What the parent asks."""

    verb: str  # submit, cancel, pause, resume, step, debug, look, watch, stop
    value: Any = None
