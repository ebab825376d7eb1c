"""What an engine in its own process and its parent say to each other, over one pipe each way.

From the engine also come the bus's records, debug.answers.News, Forked and NodeView.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from specscope.debug.breakpoints import BreakpointInfo
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary

# What an engine's process prints. The terminal belongs to the screen, so it goes down a pipe instead.
#
# Libraries print warnings and retries, and C++ code why it aborts. The last line is shown only if the process dies.

KEPT = 4096  # bytes, the last ones


class LastOutput:
    """The parent's side: drains the pipe, so that printing never blocks the process, and keeps the end."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._kept = b""
        self._reader = threading.Thread(target=self._drain, name="specscope-worker-output", daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        with suppress(OSError):
            while data := os.read(self._pipe.fileno(), KEPT):
                self._kept = (self._kept + data)[-KEPT:]
        self._pipe.close()

    def last_line(self) -> str:
        """The last line that was printed, once the process has ended; empty where there is none."""
        self._reader.join(1)
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""


def redirect_output(pipe: Connection) -> None:
    """The process's side: standard output and standard error go down the pipe from now on."""
    for number in (1, 2):
        os.dup2(pipe.fileno(), number)
    pipe.close()


@dataclass(frozen=True)
class Loading:
    """How far the engine has loaded."""

    stage: str


@dataclass(frozen=True)
class Ready:
    """The engine has loaded. Sent once."""

    run: RunInfo
    vocabulary: Vocabulary


@dataclass(frozen=True)
class EngineState:
    """Whenever it changes."""

    status: str  # running, paused or idle
    points: tuple[BreakpointInfo, ...]  # the debugger's breakpoints, with their hits


@dataclass(frozen=True)
class Failed:
    """The engine ended, and why. Sent last."""

    why: str


@dataclass(frozen=True)
class Command:
    """A command of the parent."""

    verb: str  # submit, cancel, pause, resume, step, debug, look, watch, stop
    value: Any = None
