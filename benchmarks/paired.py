"""Interleaved A/B: the sides alternate, round by round, so that other load on the machine affects all alike."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specscope.envelope import envelope
from specscope.whole_file import write_whole

NAMES = {"MainThread": "engine", "specscope-sink": "sinks"}  # of threads; all others are torch's
SLIM: Any = {"box": SIMPLE, "pad_edge": False, "padding": (0, 1, 0, 0)}  # tables of many columns in 80 characters
Side = Callable[[], int]  # does the work, returns how many tokens it made


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with this confidence, whatever the distribution.

    The number of values below the median is binomial (n, 1/2). With too few values it is the whole range.
    """
    ordered, n = sorted(values), len(values)
    outside, low = 1 / 2**n, 0
    while low + 1 < n // 2 and 2 * (outside + math.comb(n, low + 1) / 2**n) <= 1 - confidence:
        low += 1
        outside += math.comb(n, low) / 2**n
    return ordered[low], ordered[n - 1 - low]


@dataclass
class PairedSides:
    """One row of a benchmark: two sides, their throughput in tokens/s by round, and the goal for their ratio."""

    name: str
    a: str  # the side whose figure is asked for
    b: str  # the side it is compared with
    goal: float  # the least a/b that the project aims for
    rates: dict[str, list[float]] = field(default_factory=dict)
    # Milliseconds of processor time per step, by side and by who used it: independent of what else is running.
    processor_ms: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Ratio of medians, a over b."""
        return median(self.rates[self.a]) / median(self.rates[self.b])

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the median of the rounds' ratios, at 95 % or the highest level that so few rounds allow."""
        return median_interval([a / b for a, b in zip(self.rates[self.a], self.rates[self.b], strict=True)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        rates = {side: [round(rate, 2) for rate in values] for side, values in self.rates.items()}
        named = {"name": self.name, "a": self.a, "b": self.b, "ratio": self.ratio, "interval": self.interval}
        return {**named, "goal": self.goal, "rates": rates, "processor_ms": self.processor_ms}


def progress_bar(console: Console, title: str, *more: TextColumn) -> Progress:
    """How far a benchmark is."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *more)
    return Progress(*columns, console=console, transient=True)


def measure_paired(sides: Mapping[str, Side], rounds: int, console: Console, title: str) -> dict[str, list[float]]:
    """Tokens/s of every side, `rounds` times in turn after one uncounted warm-up each.

    The order is reversed from one round to the next, so that no side is always first.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with progress_bar(console, f"{title:<28}", TextColumn("{task.fields[side]}")) as bar:
        task = bar.add_task(title, total=(rounds + 1) * len(sides), side="")
        for number in range(rounds + 1):
            names = list(sides) if number % 2 else list(sides)[::-1]
            for name in names:
                bar.update(task, side=name)
                start = time.perf_counter()
                tokens = sides[name]()
                if number:
                    rates[name].append(tokens / (time.perf_counter() - start))
                bar.advance(task)
    return rates


def show(comparisons: list[PairedSides], console: Console, machine: Mapping[str, str]) -> None:
    """Print the comparisons as a table."""
    table = Table(title=", ".join(machine.values()), title_justify="left", title_style="dim", **SLIM)
    for column in ("", "compared", "tok/s", "over", "ratio", "95 %", "goal"):
        words = column in ("", "compared")
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for row in comparisons:
        style = "" if row.ratio >= row.goal else "yellow"
        table.add_row(
            row.name,
            f"{row.a} over {row.b}",
            f"{median(row.rates[row.a]):.1f}",
            f"{median(row.rates[row.b]):.1f}",
            Text(f"{row.ratio:.3f}", style="bold"),
            "{:.3f}–{:.3f}".format(*row.interval),
            f"{row.goal:.2f}",
            style=style,
        )
    console.print(table)
    for row in comparisons:
        for side, shares in row.processor_ms.items():
            parts = ", ".join(f"{who} {ms:.2f}" for who, ms in shares.items())
            console.print(f"{row.name}, {side}: processor ms: {parts}", style="dim", highlight=False)


def write_json(path: str | None, bench: str, comparisons: list[PairedSides], machine: Mapping[str, str]) -> None:
    """Write the figures of comparisons where the user wants them."""
    write_figures(path, bench, {"machine": dict(machine), "comparisons": [row.to_dict() for row in comparisons]})


def write_figures(
    path: str | None, bench: str, data: Mapping[str, Any], *, source: Sequence[str] = (), code: int = 0
) -> None:
    """Write a benchmark's figures as JSON; nothing where no path is given. Raises UserError."""
    if path is None:
        return
    whole = envelope(f"bench.{bench}", data, source=source, code=code)
    write_whole(path, json.dumps(whole, indent=2).encode() + b"\n")


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
