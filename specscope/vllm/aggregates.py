"""Aggregates of a vLLM server: where evidence cannot be had, its own sums over all requests become records.

vLLM asks entry points for loggers of its statistics, and where it finds one it computes statistics even if told not to.
So the package has none: `offer` adds one to this process, when a variable asks for it and evidence is lacking.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specscope.trace.history.interval import counts_run, interval_record
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import RunInfo, StepRecord

SOURCE = "vLLM stat logger"
SECONDS = 1.0  # of an interval


def offer() -> None:
    """Let vLLM find our logger of statistics in this process: `offered` holds metadata of one entry point."""
    folder = str(Path(__file__).parent / "offered")
    if folder not in sys.path:
        sys.path.append(folder)


@dataclass
class Sums:
    """One engine's sums over the interval that runs. `publish` takes each finished record."""

    engine: str
    publish: Callable[[StepRecord], None]
    depth: int = 0  # tokens of a draft at most
    steps: int = 0
    _since_ns: int = field(default_factory=time.time_ns)
    _counts: dict[str, int] = field(default_factory=dict)
    _depths: dict[str, list[int]] = field(default_factory=dict)
    _now: dict[str, Any] = field(default_factory=dict)

    def add(self, scheduler: Any, iteration: Any) -> None:
        """vLLM's SchedulerStats and IterationStats of one of its steps, each None where it has none."""
        stats = getattr(scheduler, "spec_decoding_stats", None)
        if stats is None and hasattr(scheduler, "spec_decoding_stats"):  # a step without drafts
            for name in ("drafts", "drafted", "accepted"):
                self._count(name, 0)
            for name in ("accepted_at", "proposed_at"):
                self._deepen(name, [0] * self.depth)
        if stats is not None:
            for name, its in (
                ("drafts", "num_drafts"),
                ("drafted", "num_draft_tokens"),
                ("accepted", "num_accepted_tokens"),
            ):
                self._count(name, getattr(stats, its, None))
            for name, its in (
                ("accepted_at", "num_accepted_tokens_per_pos"),
                ("proposed_at", "num_draft_tokens_per_pos"),
            ):
                self._deepen(name, getattr(stats, its, None))
        self._count("emitted", getattr(iteration, "num_generation_tokens", None))
        for name, its in (
            ("running", "num_running_reqs"),
            ("waiting", "num_waiting_reqs"),
            ("kv_usage", "kv_cache_usage"),
        ):
            if (value := getattr(scheduler, its, None)) is not None:
                self._now[name] = value
        if time.time_ns() - self._since_ns >= SECONDS * 1e9:
            self.end()

    def _count(self, name: str, value: Any) -> None:
        if value is not None:
            self._counts[name] = self._counts.get(name, 0) + int(value)

    def _deepen(self, name: str, values: Any) -> None:
        if values is not None:
            there = self._depths.setdefault(name, [])
            there += [0] * (len(values) - len(there))
            for depth, value in enumerate(values):
                there[depth] += int(value)

    def end(self) -> None:
        """End the interval. One in which nothing happened is not published."""
        began, self._since_ns = self._since_ns, time.time_ns()
        counts, self._counts = self._counts, {}
        depths, self._depths = self._depths, {}
        if not any(counts.values()):
            return
        kv = self._now.get("kv_usage")
        sums: dict[str, Any] = counts | {name: tuple(values) for name, values in depths.items()}
        aggregate = Aggregate(
            source=SOURCE,
            engine=self.engine,
            **sums,
            running=self._now.get("running"),
            waiting=self._now.get("waiting"),
            kv_usage=None if kv is None else min(max(float(kv), 0.0), 1.0),
        )
        record = interval_record(self.steps, began, max(self._since_ns, began), aggregate)
        self.steps += 1
        self.publish(record)


def run_of_sums(config: Any, version: str, speculation: dict[str, Any]) -> RunInfo:
    """As much of a run as every vLLM gives. `config`: its VllmConfig."""
    model = getattr(config, "model_config", None)
    name = getattr(model, "served_model_name", None) or getattr(model, "model", "")
    name = name[0] if isinstance(name, list) and name else name
    return replace(
        counts_run(SOURCE, str(name).rstrip("/").rsplit("/", 1)[-1]),
        drafter=str(speculation.get("method", "")),
        versions={"vllm": version},
        speculation=speculation,
    )
