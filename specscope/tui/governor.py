"""FrameGovernor: limits how often the screen refreshes, so that it takes a small share of the machine."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

SHORTEST, LONGEST = 0.05, 2.0  # seconds between two looks
GOAL = 0.03  # of the machine; 0.05 is guaranteed
WINDOW = 4.0  # seconds over which a frame's cost is averaged
RECENT = 5  # frames that may raise the interval sooner than the window does


class FrameGovernor:
    """Measures what a frame costs and spaces frames so that their share of the machine stays below the goal.

    The cost of a frame is the processor time of the whole process between two ticks: polling, drawing, layout and
    writing to the terminal. Time is passed in by clocks so that tests need none.
    """

    def __init__(
        self,
        fps: float = 10,
        *,
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self.base = min(max(1 / fps if fps > 0 else LONGEST, SHORTEST), LONGEST)
        self.interval = self.base
        self._cores = cores or os.cpu_count() or 1
        self._clock, self._cpu = clock, cpu
        self._samples: deque[tuple[float, float]] = deque()

    def start(self) -> None:
        """Discard the measurements so far: starting up is not a frame."""
        self._samples.clear()
        self._samples.append((self._clock(), self._cpu()))

    def tick(self) -> float:
        """Note the end of a frame; returns the seconds to wait before the next."""
        self._samples.append((self._clock(), self._cpu()))
        while len(self._samples) > 2 and self._samples[0][0] < self._samples[-1][0] - WINDOW:
            self._samples.popleft()
        cost = max(self._cost(len(self._samples) - 1), self._cost(RECENT))
        self.interval = min(max(self.base, cost / (GOAL * self._cores)), LONGEST)
        return self.interval

    def _cost(self, frames: int) -> float:
        """Mean processor seconds of the last `frames` frames."""
        frames = min(frames, len(self._samples) - 1)
        return (self._samples[-1][1] - self._samples[-1 - frames][1]) / frames if frames > 0 else 0.0

    @property
    def share(self) -> float:
        """The share of the machine that the screen took over the window."""
        if len(self._samples) < 2:
            return 0.0
        (begin, cpu0), (end, cpu1) = self._samples[0], self._samples[-1]
        return (cpu1 - cpu0) / max(end - begin, 1e-9) / self._cores
