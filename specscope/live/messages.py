"""What an engine in its own process and its parent say to each other, over one pipe each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specscope.debug.breakpoints import BreakpointInfo
from specscope.trace.records import RunInfo
from specscope.trace.vocabulary import Vocabulary


@dataclass(frozen=True)
class Ready:
    """The engine has loaded. Sent once."""

    run: RunInfo
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Status:
    """A line of news from the worker."""

    kind: str  # loading (text: the stage), status (text: running, paused, idle), refused or failed (text: why), said
    text: str


@dataclass(frozen=True)
class Points:
    """The debugger's breakpoints, whenever they or their hits have changed."""

    points: tuple[BreakpointInfo, ...]


@dataclass(frozen=True)
class Command:
    """What the parent asks."""

    verb: str  # submit, cancel, pause, resume, step, debug, look, watch, stop
    value: Any = None
