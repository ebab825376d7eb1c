"""`--alert "tau < 1.5 for 2m"`: a figure that is beyond a limit, for as long as it says.

The conditions are those of `compare --fail-if` (trace/history/thresholds.py). A figure is looked at in each interval,
and must be beyond the limit in all of them from the start of the first to the end of the last. An interval without the
figure, as one in which nothing was drafted, changes nothing. There is one alert until it is within the limit again.

A change is against the mean of the engine's intervals before, without those that were beyond the limit. As in a
comparison the 95 % interval must lie beyond X wholly: here that of one interval among those before.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.history.interval import clock, counts, rate
from specscope.trace.history.thresholds import COUNTED, RATE, TAU, Threshold, depth_rate, parse_thresholds
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import printable

TEXT = "SPECSCOPE_ALERT"  # the environment variable of a command
PATIENCE = 10.0  # seconds that a command may still take at the end
MOST_COMMANDS = 16  # that run at once
FEWEST = 8  # intervals before: with fewer there is nothing to compare with
SIGMAS = 1.96  # of a 95 % interval


def parse(text: str) -> list[Threshold]:
    """The conditions of a text. Raises UserError."""
    return parse_thresholds("--alert", text, (TAU, RATE, *COUNTED), lasting=True)


def figure(aggregate: Aggregate, name: str) -> float | None:
    """A figure of an interval by its name; None where the interval does not have it."""
    if name == TAU:
        return aggregate.length
    if name == RATE:
        return rate(aggregate)
    if name in COUNTED:
        count: int | None = getattr(aggregate, COUNTED[name])
        return count
    rates = {depth_rate(depth): value for depth, value in enumerate(counts(aggregate).per_position, 1)}
    return rates.get(name)


@dataclass
class _State:
    """One condition on one engine."""

    since: int | None = None  # when it began to hold, nanoseconds
    raised: bool = False
    before: int = 0  # intervals within the limit
    mean: float = 0.0  # of the figure in these
    squares: float = 0.0  # sum of their squared distances from it

    def holds(self, threshold: Threshold, value: float) -> bool:
        """Whether the figure is beyond the limit."""
        if not threshold.of_change:
            return threshold.passed_by(value)
        if self.before < FEWEST:
            return False
        half = SIGMAS * math.sqrt(self.squares / (self.before - 1) * (1 + 1 / self.before))
        change = value - self.mean
        return threshold.passed_by_change(self.mean, change - half, change + half)

    def remember(self, value: float) -> None:
        """An interval within the limit."""
        self.before += 1
        distance = value - self.mean
        self.mean += distance / self.before
        self.squares += distance * (value - self.mean)


class Alerts:
    """Takes each engine's intervals in order."""

    def __init__(self, conditions: Iterable[Threshold], command: Sequence[str] = ()) -> None:
        self._conditions = tuple(conditions)
        self._command = tuple(command)
        self._states: dict[tuple[str, int], _State] = {}  # by engine and condition
        self._running: list[subprocess.Popen[bytes]] = []
        self._failed = 0  # commands

    @staticmethod
    def of(texts: Sequence[str], command: str | None) -> Alerts:
        """As a command line gives them. Raises UserError."""
        conditions = [condition for text in texts for condition in parse(text)]
        try:
            words = shlex.split(command or "")
        except ValueError as error:
            raise UserError(f"--exec {short(command or '')}: {error}") from None
        if command is not None and (not words or shutil.which(words[0]) is None):
            raise UserError(f"--exec {short(command)}: there is no such command")
        return Alerts(conditions, words)

    def take(self, engine: str, record: StepRecord) -> list[str]:
        """The alerts that this interval raises, a line each."""
        aggregate = record.aggregate
        assert aggregate is not None
        lines = []
        for number, condition in enumerate(self._conditions):
            value = figure(aggregate, condition.figure)
            if value is None:
                continue
            state = self._states.setdefault((engine, number), _State())
            if not state.holds(condition, value):
                state.since, state.raised = None, False
                state.remember(value)
                continue
            state.since = record.start_ns if state.since is None else state.since
            if not state.raised and record.end_ns - state.since >= condition.seconds * 1e9:
                state.raised = True
                before = f", {state.mean:.6g} before" if condition.of_change else ""
                lines.append(f"alert: {printable(engine)}: {condition}: {value:.4g}{before}, at {clock(record.end_ns)}")
        for line in lines:
            self._run(line)
        return lines

    def _run(self, line: str) -> None:
        self._running = [process for process in self._running if process.poll() is None]
        if not self._command:
            return
        if len(self._running) >= MOST_COMMANDS:
            self._failed += 1
            return
        try:
            process = subprocess.Popen(self._command, env={**os.environ, TEXT: line}, stdin=subprocess.DEVNULL)
        except OSError:
            self._failed += 1
            return
        self._running.append(process)

    def close(self) -> list[str]:
        """Wait for the commands; a line where some could not run."""
        until = time.monotonic() + PATIENCE
        for process in self._running:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._failed += 1
        self._running = []
        failed, self._failed = self._failed, 0
        return [f"--exec: {failed} of its runs did not start or did not end"] if failed else []
