"""`specscope bench waiting`: how the engine's threads should wait, on a machine that other programs use as well.

torch's threads spin for a while when they have nothing to do, which is quickest on a machine of their own. Beside a
busy process a thread that spins takes the core from the one that all of them wait for. So policies are compared quiet
and beside busy processes, each policy in an engine of its own, all of them in turn in one run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import IO

from rich.table import Table

from specscope.bench.paired import write_figures
from specscope.bench.prompts import COPYING, PLAIN
from specscope.engine.config import EngineConfig
from specscope.errors import UserError
from specscope.live.start import WAITING_NAMES, start_engine
from specscope.terminal import text_console
from specscope.trace.params import SamplingParams
from specscope.trace.wording import plural

POLICIES: dict[str, dict[str, str]] = {
    "torch's default": {"GOMP_SPINCOUNT": "300000"},
    "spin 30,000": {"GOMP_SPINCOUNT": "30000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 3,000": {"GOMP_SPINCOUNT": "3000"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
STEPS = 6  # a turn
# What runs beside the engine: the shares of their time that processes are busy. A screen that draws takes a quarter.
BESIDE = {"quiet": (), "a screen": (0.25,), "1 busy": (1.0,), "2 busy": (1.0, 1.0)}
BEAT = 0.02  # seconds in which a process is busy for its share


class _Engine:
    """An engine under one policy, in a process of its own, that runs a few steps when asked."""

    def __init__(self, config: EngineConfig, policy: dict[str, str], requests: int) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in WAITING_NAMES}
        told = [json.dumps(dataclasses.asdict(config)), str(requests)]
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "specscope.bench.waiting", *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, **policy},
        )

    def ask(self) -> float:
        """Milliseconds of a step, as the median of a turn."""
        told, heard = self._child.stdin, self._child.stdout
        assert told is not None
        assert heard is not None
        print("go", file=told, flush=True)
        line = heard.readline()
        if not line:
            raise UserError("an engine of the benchmark ended")
        return float(line)

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.wait()


def run_waiting(config: EngineConfig, rounds: int, requests: int, json_file: str | None) -> None:
    """Measure and print a row a policy: milliseconds of a step, quiet and beside other processes."""
    console = text_console()
    engines = {name: _Engine(config, policy, requests) for name, policy in POLICIES.items()}
    times: dict[str, dict[str, list[float]]] = {name: {beside: [] for beside in BESIDE} for name in POLICIES}
    try:
        for number in range(rounds + 1):
            for beside, shares in BESIDE.items():
                with console.status(f"round {number} of {rounds}, {beside}"), _busy(shares):
                    for name, engine in engines.items():
                        took = engine.ask()
                        if number:
                            times[name][beside].append(took)
    finally:
        for engine in engines.values():
            engine.close()
    title = f"ms of a step of {plural(requests, 'request')} (median of {rounds} rounds)"
    table = Table(title=title, title_justify="left")
    for column in ("threads wait", *BESIDE):
        table.add_column(column, justify="left" if column == "threads wait" else "right")
    for name, row in times.items():
        table.add_row(name, *(f"{median(row[beside]):.0f}" for beside in BESIDE))
    console.print(table)
    write_figures(json_file, "waiting", {"policies": times})


@contextmanager
def _busy(shares: Sequence[float]) -> Iterator[None]:
    """Processes that are busy for these shares of their time."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, args=(share,), daemon=True) for share in shares]
    for process in processes:
        process.start()
    time.sleep(0.5 if shares else 0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin(share: float) -> None:
    while True:
        until = time.perf_counter() + share * BEAT
        while time.perf_counter() < until:
            pass
        time.sleep((1 - share) * BEAT)


def main(config: str, requests: int, told: IO[str]) -> None:
    """The child: load an engine, then run a turn for each line that comes."""
    engine = start_engine(EngineConfig(**json.loads(config)), lambda stage: None)
    params = SamplingParams(max_tokens=10_000, ignore_eos=True)
    both = [prompt for pair in zip(COPYING, PLAIN, strict=False) for prompt in pair]
    prompts = list(itertools.islice(itertools.cycle(both), requests))
    for _ in told:
        for prompt in prompts if not engine.busy else ():
            engine.add(engine.turn(prompt), params)
        while engine.scheduler.waiting or any(request.pending > 1 for request in engine.requests.values()):
            engine.step()
        took = []
        for _ in range(STEPS):
            start = time.perf_counter()
            engine.step()
            took.append((time.perf_counter() - start) * 1000)
        engine.cancel_all()
        while engine.busy:
            engine.step()
        print(median(took), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.stdin)
