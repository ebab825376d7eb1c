"""Processor time by who took it: threads of this process, and other processes."""

from __future__ import annotations

import threading
from collections import Counter

import psutil

NAMES = {"MainThread": "engine", "specscope-sink": "sinks"}  # of threads; all others are torch's


def thread_seconds() -> Counter[str]:
    """Seconds that the threads of this process have taken so far, together by what they do."""
    names = {thread.native_id: NAMES.get(thread.name, "others") for thread in threading.enumerate()}
    taken: Counter[str] = Counter()
    for thread in psutil.Process().threads():
        taken[names.get(thread.id, "torch's threads")] += thread.user_time + thread.system_time
    return taken


def process_seconds(pid: int | None = None) -> float:
    """Seconds that a process has taken so far, this one by default."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
