"""Ctrl-C, SIGTERM and SIGHUP do not cut work in half: they ask, and the work ends where it is whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from types import FrameType

from specscope.errors import Ending

FORCE_SECONDS = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """`asked` is True after the first of these signals; a Ctrl-C after that raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = False
        self.number = signal.SIGINT  # of the signal that asked

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:  # a terminal's end may be told twice
            self.asked, self.number = True, signal.Signals(number)

    @property
    def code(self) -> int:
        """The exit code of a program that this signal ended."""
        return 128 + self.number


def may_end() -> tuple[signal.Signals, ...]:
    """The signals that may end this process: not SIGHUP where it was started with nohup."""
    return tuple(s for s in ENDING if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN)


@contextmanager
def _handled(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Other handlers for a while; only the main thread can, and elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def handled_by(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call this with each ending signal, for a while."""
    with _handled(dict.fromkeys(may_end(), lambda number, frame: handler(signal.Signals(number)))):
        yield


@contextmanager
def ignore_terminal() -> Iterator[None]:
    """Start a process in here: Ctrl-C and the end of the terminal are its parent's business, which tells it.

    The signals are blocked, which the process inherits. Ignoring them would lose one that is sent to us meanwhile.
    """
    resource_tracker.ensure_running()  # else the start below would make it, which unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Let the ending signals only ask, for a while."""
    handler = Interrupt()
    with _handled(dict.fromkeys(may_end(), handler)):
        yield handler


@contextmanager
def ends_at_once(*, on_ctrl_c: bool = True) -> Iterator[None]:
    """While there is nothing to save: a signal ends the program as an exit does, whoever catches its exception."""
    asked: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not asked:
            _surely(number)
        asked.append(number)
        _raise(number)

    with _handled({number: end for number in may_end() if on_ctrl_c or number is not signal.SIGINT}):
        yield
        if asked:  # an import dropped it
            _raise(asked[0])


def _raise(number: int) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Ending(128 + number)


def _surely(number: int) -> None:
    """End the process in a second, should an exception not do it: imports of libraries catch and drop them."""

    def force() -> None:
        time.sleep(FORCE_SECONDS)
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # a progress bar hides the cursor
        os._exit(128 + number)

    threading.Thread(target=force, name="specscope-ending", daemon=True).start()


def program() -> None:
    """The installed program: until its modules are there, Ctrl-C ends it without a traceback."""
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    if on_ctrl_c is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    entry = import_module("specscope.__main__").entry
    signal.signal(signal.SIGINT, on_ctrl_c)
    entry()
