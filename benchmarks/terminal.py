"""A command on a pseudo-terminal of its own, 120 by 40, as a person would run it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def module(name: str, *arguments: str) -> list[str]:
    """A command that runs a module of this folder. No child looks in the current folder, so it is told where."""
    found = f"import sys, runpy; sys.path.append({str(Path(__file__).parents[1])!r})"
    return [sys.executable, "-P", "-c", f"{found}; runpy.run_module({name!r}, run_name='__main__')", *arguments]


class Terminal:
    """Runs `command`; `shown` is all that it has drawn."""

    def __init__(self, command: Sequence[str], columns: int = 120, lines: int = 40) -> None:
        self.began = time.perf_counter()
        self.shown = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.child = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
            start_new_session=True,
        )
        os.close(theirs)

    def wait_for(self, condition: Callable[[bytes], bool], seconds: float) -> float | None:
        """Seconds from the start until what is drawn meets the condition; None where it never does."""
        while time.perf_counter() - self.began < seconds:
            if not self._read():
                return None
            if condition(self.shown):
                return time.perf_counter() - self.began
        return None

    def _read(self) -> bool:
        """Take what was drawn within a few milliseconds; False where the command has closed the terminal."""
        ready, _, _ = select.select([self._ours], [], [], 0.005)
        if not ready:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.shown += data
        return bool(data)

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._ours, keys.encode())

    def finish(self) -> int:
        """Read on until the command ends; its exit code."""
        while self._read():
            pass
        os.close(self._ours)
        return self.child.wait()
