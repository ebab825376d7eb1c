"""What a start has gone through: a line for each stage, with the seconds that it has taken."""

from __future__ import annotations

import time


class Stages:
    """The stages of a start, in order. One that counts ("4 of 20" behind a colon) is one stage."""

    def __init__(self, first: str) -> None:
        self._begun = [(first, time.monotonic())]

    def begin(self, stage: str) -> str:
        """The next stage begins, or the last one counts on. The line of the stage that has ended; "" for none."""
        last, since = self._begun[-1]
        if stage.partition(":")[0] == last.partition(":")[0]:
            self._begun[-1] = (stage, since)
            return ""
        ended = self.lines()[-1]
        self._begun.append((stage, time.monotonic()))
        return ended

    def lines(self) -> list[str]:
        """A line for each: whole seconds, and the stage; the last one's go on."""
        ends = [since for _, since in self._begun[1:]] + [time.monotonic()]
        return [f"{int(end - since):>4} s  {stage}" for (stage, since), end in zip(self._begun, ends, strict=True)]
