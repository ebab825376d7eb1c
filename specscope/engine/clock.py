"""What the phases of a step take on a GPU: the host only launches them, so that its own clock says where it waited.

A phase's time is from where the device began with it to where it began with the next: what it waited for is in it.
"""

from __future__ import annotations

from itertools import pairwise

import torch


class DeviceClock:
    """Marks around every phase, read one step late: by then they have passed, and reading waits for nothing."""

    def __init__(self) -> None:
        self._now: list[torch.cuda.Event] = []
        self._last: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """A phase begins."""
        self._now.append(self._make())

    def turn(self) -> tuple[int, ...]:
        """A step has ended. What each phase of the step before it took, in nanoseconds; empty for the first."""
        self.mark()
        if self._last:
            self._last[-1].synchronize()  # it has passed, unless neither step read anything
        times = tuple(round(a.elapsed_time(b) * 1e6) for a, b in pairwise(self._last))
        self._last, self._now = self._now, []
        return times

    def give_up(self) -> None:
        """The step that was begun will not be finished."""
        self._now = []

    def _make(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
