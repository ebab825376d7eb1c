"""Runs combined: the rounds of one load on one server, and servers side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specscope.bench.datasets import Load
from specscope.measure.paired import median_interval

Figures = Mapping[str, Any]  # of a run (figures.py)
# What is compared, in words; more throughput is better, less time is
COMPARED = {
    "request_throughput": "requests/s",
    "output_throughput": "output tok/s",
    "median_ttft_ms": "TTFT, median",
    "median_tpot_ms": "TPOT, median",
    "median_e2el_ms": "E2E, median",
}


@dataclass(frozen=True)
class LoadPoint:
    """The rounds of a load on a server."""

    label: str  # of the server
    load: Load
    runs: Sequence[Figures]

    def median(self, name: str) -> float | None:
        """The median of a figure over the rounds that have it."""
        values = [run[name] for run in self.runs if run.get(name) is not None]
        return median(values) if values else None

    def total(self, name: str) -> int:
        """The sum of a count over the rounds."""
        return sum(run[name] for run in self.runs)


@dataclass(frozen=True)
class LoadRatio:
    """A figure of the first server over that of another, under one load."""

    load: Load
    figure: str
    a: str
    b: str
    values: tuple[float, float]  # medians over the rounds
    interval: tuple[float, float]  # of the rounds' own ratios

    @property
    def ratio(self) -> float:
        """The ratio of the medians."""
        return self.values[0] / self.values[1]


def points(runs: Sequence[Figures]) -> list[LoadPoint]:
    """The runs by server and load, in the order of their first runs."""
    by_load: dict[tuple[str, Load], list[Figures]] = {}
    for run in runs:
        rate = None if run["request_rate"] == "inf" else run["request_rate"]
        by_load.setdefault((run["label"], Load(rate, run["max_concurrency"])), []).append(run)
    return [LoadPoint(label, load, each) for (label, load), each in by_load.items()]


def ratios(of: Sequence[LoadPoint]) -> Iterator[LoadRatio]:
    """The ratios of the first server over each other one, from the rounds that both have."""
    for first in (point for point in of if point.label == of[0].label):  # none where nothing was run
        for other in of:
            if other.label == first.label or other.load != first.load:
                continue
            for name in COMPARED:
                pairs = [
                    (a[name], b[name]) for a, b in zip(first.runs, other.runs, strict=False) if a[name] and b[name]
                ]
                if pairs:
                    medians = median(a for a, _ in pairs), median(b for _, b in pairs)
                    interval = median_interval([a / b for a, b in pairs])
                    yield LoadRatio(first.load, name, first.label, other.label, medians, interval)


def to_json(runs: Sequence[Figures]) -> Mapping[str, Any]:
    """A single run as vLLM's bench writes it; several as a list of these, with medians over the rounds and ratios."""
    if len(runs) == 1:
        return runs[0]
    load_points = points(runs)
    summary = []
    for point in load_points:
        medians = {name: point.median(name) for name in COMPARED}
        summary.append({"label": point.label, "load": point.load.name, **medians})
    beside = []
    for ratio in ratios(load_points):
        about = {"load": ratio.load.name, "figure": ratio.figure, "a": ratio.a, "b": ratio.b}
        beside.append({**about, "ratio": ratio.ratio, "interval": ratio.interval})
    return {"runs": list(runs), "summary": summary, "ratios": beside}
