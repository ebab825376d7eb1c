"""`python -m benchmarks observe`: what it costs to be watched, as a ratio in one run."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.paired import PairedSides, Side, measure_paired, show, thread_seconds, write_json
from benchmarks.terminal import Terminal, module
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.measure.prompts import COPYING, PLAIN
from specscope.measure.step_costs import machine_info
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams
from specscope.trace.wire.outputs import OutputOptions, Outputs
from specscope.trace.wire.spans import SpanLevel

TOKENS = 48  # a side of a round: many short rounds see more than a few long ones


def run_observe(config: EngineConfig, rounds: int, json_file: str | None, *, screen: bool) -> None:
    """Measure and print: capture and metrics at batch 1 and 8, then the live screen beside the engine."""
    console = text_console()
    comparisons: list[PairedSides] = []
    engine = Engine(config)
    for size, goal in ((1, 0.99), (8, 0.97)):
        comparisons.append(_observed(engine, size, goal, rounds, console))
    machine = machine_info(engine.run_info.dtype, torch.get_num_threads())
    if screen:
        comparisons += _with_screen(config, rounds, console)
    show(comparisons, console, machine)
    write_json(json_file, "observe", comparisons, machine)


def prompts_of(size: int) -> list[str]:
    """Prompts of which half copy, so that trees are drafted and judged all the time."""
    both = [prompt for pair in zip(COPYING, PLAIN, strict=False) for prompt in pair]
    return both[:size]


def _observed(engine: Engine, size: int, goal: float, rounds: int, console: Console) -> PairedSides:
    prompts = [engine.encode(engine.turn(prompt))[1] for prompt in prompts_of(size)]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    taken: dict[str, Counter[str]] = {"observed": Counter(), "off": Counter()}
    steps: Counter[str] = Counter()

    def off(side: str = "off") -> int:
        engine.verifier.notes = side == "observed" and engine.run_info.evidence == "full"  # they are for the capture
        before, first = thread_seconds(), engine.steps
        made = sum(len(result.token_ids) for result in engine.generate(prompts, params))
        engine.bus.flush()
        taken[side].update(thread_seconds() - before)
        steps[side] += engine.steps - first
        return made

    def on() -> int:
        with tempfile.TemporaryDirectory() as folder:
            options = OutputOptions(str(Path(folder) / "run.jsonl"), None, None, SpanLevel.TREES, 0)
            outputs = Outputs(options, engine.bus, engine.run_info, engine.vocabulary, params)
            try:
                return off("observed")
            finally:
                outputs.close()

    sides: dict[str, Side] = {"observed": on, "off": off}
    rates = measure_paired(sides, rounds, console, f"capture, batch {size}")
    row = PairedSides(f"capture and metrics, batch {size}", "observed", "off", goal, rates)
    row.processor_ms = {
        side: {who: 1000 * seconds / steps[side] for who, seconds in of.items()} for side, of in taken.items()
    }
    return row


def _with_screen(config: EngineConfig, rounds: int, console: Console) -> list[PairedSides]:
    """A worker's rate with capture, metrics and a real screen on a pseudo-terminal, over everything off."""
    cores = os.cpu_count() or 1
    settings = ((1, 0.99), (cores, 0.95)) if cores > 1 else ((1, 0.95),)
    rows = []
    for threads, goal in settings:
        with console.status(f"live screen, engine on {threads} of {cores} cores"):
            found = _on_terminal(dataclasses.replace(config, threads=threads), rounds)
        name = f"and live screen, engine on {threads} of {cores} cores"
        rows.append(PairedSides(name, "observed", "off", goal, found["rates"], found["processor_ms"]))
    return rows


def _on_terminal(config: EngineConfig, rounds: int) -> dict[str, Any]:
    """Run benchmarks/screen.py on a pseudo-terminal of its own, and read what it measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rates.json"
        task = json.dumps({"config": dataclasses.asdict(config), "rounds": rounds, "out": str(out)})
        terminal = Terminal(module("benchmarks.screen", task))
        if terminal.finish() != 0 or not out.exists():
            raise UserError(f"the screen benchmark failed: {terminal.shown[-300:].decode(errors='replace').strip()}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found
