"""`--alert "tau < 1.5 for 2m"`: a figure that is beyond a limit, for as long as it says.

FIGURE (<|>) X[%] [for N(s|m|h)], several joined by `or`. FIGURE is tau, rate or depth N rate, by the names of
`compare --fail-if`. It is looked at in each interval, and must be beyond the limit in all of them from the start of the
first to the end of the last. An interval without the figure, as one in which nothing was drafted, changes nothing.
There is one alert until the figure is within the limit again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.history.interval import clock, counts, rate
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import printable

FORM = 'write FIGURE < X or FIGURE > X, and how long: "tau < 1.5 for 2m", "rate < 40%", "depth 1 rate < 0.5 for 30s"'
TEXT = "SPECSCOPE_ALERT"  # the environment variable of a command
PATIENCE = 10.0  # seconds that a command may still take at the end
MOST_COMMANDS = 16  # that run at once

_UNITS = {"s": 1, "m": 60, "h": 3600}
_CONDITION = re.compile(
    r"(?P<figure>tau|rate|depth (?P<depth>[1-9][0-9]{0,2})( rate)?) *(?P<way>[<>]) *"
    r"(?P<size>[0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9}) *(?P<percent>%?)"
    r"(?: *\bfor (?P<time>[0-9]{1,6}(?:\.[0-9]{1,3})?) *(?P<unit>[smh]))?",
    re.ASCII,
)


@dataclass(frozen=True)
class AlertLimit:
    """One condition, read."""

    text: str
    value: Callable[[Aggregate], float | None]  # the figure of an interval
    below: bool  # whether a smaller figure is an alert, else a larger one
    size: float
    lasting_ns: int

    def holds(self, aggregate: Aggregate) -> bool | None:
        """Whether the figure is beyond the limit; None where the interval does not have it."""
        value = self.value(aggregate)
        return None if value is None else value < self.size if self.below else value > self.size


def parse(text: str) -> list[AlertLimit]:
    """The conditions of a text. Raises UserError."""
    return [_parse_one(" ".join(part.split()), text) for part in re.split(r"\bor\b", text)]


def _parse_one(part: str, text: str) -> AlertLimit:
    parsed = _CONDITION.fullmatch(part)
    if parsed is None:
        raise UserError(f"--alert {short(text)}: {FORM}")
    size, depth = float(parsed["size"]), int(parsed["depth"] or 0)
    if parsed["percent"] and parsed["figure"] == "tau":
        raise UserError(f"--alert {short(text)}: tau is a number of tokens, not a share")
    figures: dict[str, Callable[[Aggregate], float | None]] = {"tau": lambda each: each.length, "rate": rate}
    value = figures.get(parsed["figure"], lambda each: _at(each, depth))
    lasting = float(parsed["time"]) * _UNITS[parsed["unit"]] if parsed["time"] else 0.0
    below = parsed["way"] == "<"
    return AlertLimit(part, value, below, size / 100 if parsed["percent"] else size, int(lasting * 1e9))


def _at(aggregate: Aggregate, depth: int) -> float | None:
    rates = counts(aggregate).per_position
    return rates[depth - 1] if depth <= len(rates) else None


class Alerts:
    """Takes each engine's intervals in order."""

    def __init__(self, conditions: Iterable[AlertLimit], command: Sequence[str] = ()) -> None:
        self._conditions = tuple(conditions)
        self._command = tuple(command)
        self._since: dict[tuple[str, int], int] = {}  # when a condition began to hold, by engine
        self._raised: set[tuple[str, int]] = set()
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
            key, holds = (engine, number), condition.holds(aggregate)
            if holds is None:
                continue
            if not holds:
                self._since.pop(key, None)
                self._raised.discard(key)
                continue
            since = self._since.setdefault(key, record.start_ns)
            if key not in self._raised and record.end_ns - since >= condition.lasting_ns:
                self._raised.add(key)
                value = f"{condition.value(aggregate):.3f} at {clock(record.end_ns)}"
                lines.append(f"alert: {printable(engine)}: {condition.text}: {value}")
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
