"""`python -m benchmarks debug`: what the debugger costs an engine that it does not stop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.cpu import TOKENS, encode, run_prompts
from benchmarks.paired import PairedSides, Side, measure_paired, show, write_json
from specscope.debug.answers import StopReason
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.live.local import commands_over
from specscope.measure.prompts import unseen_prompts
from specscope.measure.step_costs import machine_info
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams

PROMPTS = 5
NEVER = (
    ("reject", "depth == 1 and p < 0.1 and q > 2"),
    ("accept", "a > 1.5 and depth >= 1"),
    ("step", "tau > 99 or committed > 99"),
    ("emit", '"∎∎" in text'),
    ("draft", "nodes > 999"),
    ("bonus", "final_p > 1.5"),
    ("recover", "accepted > 99"),
    ("finish", 'request == "nobody"'),
    ("prefill", "context < 0"),
    ("step", "ms < 0"),
)


def run_debug(config: EngineConfig, rounds: int, json_file: str | None) -> None:
    """Measure and print: a session without breakpoints, and with twenty conditional ones that never hit."""
    console = text_console()
    console.print("loading the engine", style="dim")
    engine = Engine(config)
    prompts = encode(engine, unseen_prompts(PROMPTS))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def alone() -> int:
        engine.timeline = None
        return run_prompts(engine, prompts, params)

    def debugged(points: Sequence[tuple[str, str]]) -> int:
        engine.timeline = None
        session = commands_over(engine).session
        for event, condition in points:
            session.breakpoints.add(event, condition)
        for prompt in prompts:
            engine.add(prompt, params)
            assert session.cont().reason is StopReason.END
        return sum(len(request.output()) for request in session.history.requests.values())

    sides: dict[str, Side] = {
        "twenty breakpoints": lambda: debugged(NEVER * 2),
        "no breakpoints": lambda: debugged(()),
        "no debugger": alone,
    }
    rates = measure_paired(sides, rounds, console, "batch 1")
    comparisons = [
        PairedSides("twenty that never hit", "twenty breakpoints", "no breakpoints", 0.97, rates),
        PairedSides("a session without breakpoints", "no breakpoints", "no debugger", 0.98, rates),
    ]
    machine = machine_info(engine.run_info.dtype, torch.get_num_threads())
    show(comparisons, console, machine)
    write_json(json_file, "debug", comparisons, machine)
