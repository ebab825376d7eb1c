"""Ctrl-C that does not cut work in half: it asks, and the work ends where it is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code


class StoppedError(Exception):
    """Raised between two pieces of work, when somebody asked to stop."""


class Interrupt:
    """`asked` is True after the first Ctrl-C (or SIGTERM); the second one raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def check(self) -> None:
        """Raise StoppedError where Ctrl-C was pressed: call it where the work is whole."""
        if self.asked:
            raise StoppedError


@contextmanager
def deaf() -> Iterator[None]:
    """Start a process in here: until it can say so itself, Ctrl-C in the terminal is not for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Handle Ctrl-C and SIGTERM so for a while."""
    handler = Interrupt()
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield handler
    finally:
        for number, old in before.items():
            signal.signal(number, old)
