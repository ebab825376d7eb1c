"""No process that specscope starts outlives its terminal or its parent.

The kernel signals the loss of a terminal only to the session leader and the foreground, and the death of a parent to no
process. So a thread polls, a few times per second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

POLL_SECONDS = 0.2
GRACE_SECONDS = 1.0  # from the loss until `leave` is called
LEAVE_SECONDS = 20.0  # that it may take on a busy machine, until the process is ended by force


class Lifetime:
    """Watches the parent and the controlling terminal of this process while the context is open, but not under nohup.

    When either is gone, the process gets SIGHUP, which ends its work cleanly. After GRACE_SECONDS `leave`,
    which saves what must not be lost, is called from here, and the process ends by force.
    """

    def __init__(self) -> None:
        self.leave: Callable[[], object] = lambda: None
        self._parent = os.getppid()
        self._leads = os.getsid(0) == os.getpid()  # a session leader may outlive its parent
        self._terminal = _controlling_terminal()
        self._closed = threading.Event()

    def __enter__(self) -> Lifetime:
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            threading.Thread(target=self._watch, name="specscope-lifetime", daemon=True).start()
        return self

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            is_orphan = os.getppid() != self._parent and not self._leads
            if is_orphan or (self._terminal is not None and not _is_there(self._terminal)):
                os.kill(os.getpid(), signal.SIGHUP)
                _end_soon(self.leave)

    def hurry(self) -> None:
        """Make sure that the process, which is ending, does not hang on a terminal that is gone."""
        threading.Thread(target=_end_soon, args=(self.leave,), name="specscope-hurry", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None


def _controlling_terminal() -> int | None:
    try:
        return os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _is_there(terminal: int) -> bool:
    try:
        os.tcgetpgrp(terminal)
    except OSError:
        return False
    return True


def _end_soon(leave: Callable[[], object]) -> None:
    """End this process by force where it has not ended after GRACE_SECONDS: when `leave` has saved what it can."""
    time.sleep(GRACE_SECONDS)
    leaving = threading.Thread(target=leave, name="specscope-leaving", daemon=True)
    leaving.start()
    leaving.join(LEAVE_SECONDS)
    os._exit(128 + signal.SIGHUP)


def end_with_parent() -> None:
    """In a process that multiprocessing started: end at once when the parent is gone, whatever is being done."""
    parent = multiprocessing.parent_process()

    def end() -> None:
        assert parent is not None
        parent.join()
        os._exit(128 + signal.SIGHUP)

    if parent is not None:
        threading.Thread(target=end, name="specscope-lifetime", daemon=True).start()
