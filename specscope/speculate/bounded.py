"""Work whose time and memory nobody can foretell, done by a process that the system ends when it takes too much.

It is the only true bound for a library's C++ or another's template: neither can be cancelled, and a thread that was
given up would keep a core busy. Jobs and answers are pickles over standard input and output, between ends of ours.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

WALL = 300.0  # seconds that an answer may take on a machine that is busy with other things


class EndedError(Exception):
    """The process was ended: the job passed its limits."""


class BoundedProcess:
    """A process of `module`, which calls `answer_jobs`. One job at a time: callers wait. One that ended is replaced."""

    def __init__(self, module: str) -> None:
        self._command = [sys.executable, "-P", "-m", module]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._knows: object = None

    def start(self) -> None:
        """Start it before it is asked: imports take it a second."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._knows = None
        return self._process

    def ask(self, key: object, about: Any, job: Any) -> Any:  # noqa: ANN401
        """The answer to a job. `about`: what jobs of one `key` share; it is sent once. Raises EndedError."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            watch = threading.Timer(WALL, process.kill)
            watch.start()
            try:
                process.stdin.write(pickle.dumps((None if self._knows == key else about, job)))
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                process.kill()
                process.wait()
                raise EndedError from None
            finally:
                watch.cancel()
            self._knows = key
            return answer


def answer_jobs(load: Callable[[], Callable[[Any], Callable[[Any], Any]]], seconds: int, memory: int) -> None:
    """Answer jobs until standard input ends. Each may take `seconds` of processor time; the process `memory` bytes.

    `load` imports what it takes and returns what makes a job's function of what jobs share.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is its parent's: it ends when that closes the pipe
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)  # libraries print
    prepare = load()
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of one that is ended by its limit there is nothing to learn
    answer: Callable[[Any], Any] | None = None
    with suppress(EOFError):
        while True:
            about, job = pickle.load(jobs)
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            answer = answer if about is None else prepare(about)
            assert answer is not None
            pickle.dump(answer(job), answers)
            answers.flush()
