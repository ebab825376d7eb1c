"""What an engine's process prints. The terminal belongs to the screen, so it goes down a pipe instead.

Libraries print warnings and retries, and C++ code why it aborts. The last line is shown only if the process dies.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

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
