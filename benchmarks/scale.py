"""`python -m benchmarks scale`: plain decoding over batch size, context length and mixed batches, beside other engines.

The contexts are made up: KV caches hold noise, so that no prompt has to be run through a model first. What a step costs
does not depend on it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.cpu import Peer, read_bandwidth, without_drafting
from benchmarks.paired import SLIM, median_interval, progress_bar, write_figures
from benchmarks.peers import need_python, vllm_process
from benchmarks.scale_sides import OwnDecoding, PaddedDecoding, context_seconds, fill
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.measure.step_costs import machine_info
from specscope.model.kv_cache import BLOCK_SIZE, KVCache
from specscope.terminal import text_console

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 1024, 2048, 4096, 7500)
SHORT, SHORTS, LONGS = 128, 7, (1024, 2048, 4096, 7500)  # tokens and number of the short ones of a mixed batch
OWN, PEER, VLLM = "specscope", "transformers", "vLLM"
STEPS = 8  # of a round
Side = Callable[[], float]  # tokens a second of a few steps


@dataclass
class ScalePoint:
    """One batch: how long its requests' contexts are, and what was measured."""

    curve: str
    size: int  # where on the curve it lies
    lengths: Sequence[int]
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens/s by side and round
    context: float = 0.0  # seconds that the contexts add to a step
    reading: float = 0.0  # seconds that the keys and values of a step take to read

    @property
    def name(self) -> str:
        """In words."""
        if len(set(self.lengths)) > 1:
            return f"{SHORTS} x {self.lengths[0]:,} + {self.lengths[-1]:,}"
        return f"{len(self.lengths)} x {self.lengths[0]:,}"

    def ratios(self, side: str) -> list[float]:
        """Of this engine's tokens/s over a side's, by round."""
        return [own / other for own, other in zip(self.rates[OWN], self.rates[side], strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        others = [side for side in self.rates if side != OWN]
        return {
            "curve": self.curve,
            "size": self.size,
            "name": self.name,
            "lengths": list(self.lengths),
            "rates": {side: [round(rate, 2) for rate in rates] for side, rates in self.rates.items()},
            "ratios": {side: median(self.ratios(side)) for side in others},
            "intervals": {side: median_interval(self.ratios(side)) for side in others},
            "context_ms": self.context * 1e3,
            "reading_ms": self.reading * 1e3,
            "context_over_its_bytes": self.context / self.reading,
        }


def points(most: int) -> list[ScalePoint]:
    """Of all three curves, for contexts of up to `most` tokens."""
    short = min(SHORT, most)
    wanted = [ScalePoint("batch", batch, [short] * batch) for batch in BATCHES]
    wanted += [ScalePoint("context", context, [context]) for context in CONTEXTS if context <= most]
    return wanted + [ScalePoint("mixed", long, [short] * SHORTS + [long]) for long in LONGS if short < long <= most]


def run_scale(config: EngineConfig, rounds: int, json_file: str | None, *, vllm: str | None) -> None:
    """Measure and print. `vllm`: the Python of an environment that has vLLM."""
    need_python(vllm)
    console = text_console()
    console.print("loading the engine and its peers", style="dim")
    engine = _engine(config)
    wanted = _fit(engine, points(engine.max_context - STEPS - 2), console)
    if not wanted:
        raise UserError("the KV cache holds none of the batches to measure: raise --kv-memory")
    with ExitStack() as stack:
        peer = Peer(config).model
        made = made_by_vllm(stack, vllm, engine, wanted, console)
        speed = read_bandwidth(engine.runner.loaded.device)
        fill(engine.runner.cache)
        with progress_bar(console, "{task.description:<20}") as bar:
            task = bar.add_task("", total=len(wanted) * (rounds + 1))
            for number, point in enumerate(wanted):
                sides: dict[str, Side] = {OWN: OwnDecoding(engine, point.lengths, STEPS)}
                sides[PEER] = PaddedDecoding(peer, engine.runner.cache.layers, point.lengths, STEPS)
                if made is not None:
                    sides[VLLM] = lambda number=number: made(number)  # type: ignore[misc]
                bar.update(task, description=point.name)
                point.rates = _in_turn(sides, rounds, lambda: bar.advance(task))
                point.context = context_seconds(engine.runner, point.lengths)
                point.reading = _bytes(engine, point) / speed
    machine = machine_info(engine.run_info.dtype, torch.get_num_threads())
    show(wanted, speed, machine, console)
    data = {"machine": machine, "reading_gb_per_s": speed / 1e9, "points": [point.to_dict() for point in wanted]}
    write_figures(json_file, "scale", data)


def made_by_vllm(
    stack: ExitStack, python: str | None, engine: Engine, wanted: Sequence[ScalePoint], console: Console
) -> Callable[[int], float] | None:
    """What tells the tokens/s of vLLM at a point, by number; None without one."""
    if python is None:
        return None
    console.print("starting vLLM", style="dim")
    draw, size = random.Random(0), engine.runner.loaded.vocab_size
    batches = [[[draw.randrange(size) for _ in range(length)] for length in point.lengths] for point in wanted]
    ask = stack.enter_context(vllm_process(python, engine, {"ngram": False, "tokens": STEPS, "batches": batches}))
    return lambda number: float(ask(str(number)))


def _engine(config: EngineConfig) -> Engine:
    """Without drafts."""
    return Engine(dataclasses.replace(without_drafting(config), max_batch=max(BATCHES)))


def _fit(engine: Engine, wanted: Sequence[ScalePoint], console: Console) -> list[ScalePoint]:
    """The points whose contexts the KV cache holds; says which ones are left out."""
    blocks = engine.runner.cache.pool.blocks
    needed = [sum((length + STEPS + 2) // BLOCK_SIZE + 1 for length in point.lengths) for point in wanted]
    left_out = [point.name for point, count in zip(wanted, needed, strict=True) if count > blocks]
    if left_out:
        console.print(f"left out, as they need more --kv-memory: {', '.join(left_out)}", style="yellow")
    return [point for point, count in zip(wanted, needed, strict=True) if count <= blocks]


def _in_turn(sides: Mapping[str, Side], rounds: int, advance: Callable[[], None]) -> dict[str, list[float]]:
    """Every side's tokens/s, in turn, after a warm-up; the order turns round from one round to the next."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            rate = sides[name]()
            if number:
                rates[name].append(rate)
        advance()
    return rates


def _bytes(engine: Engine, point: ScalePoint) -> int:
    """Of the keys and values that a step reads."""
    loaded = engine.runner.loaded
    return sum(point.lengths) * KVCache.block_bytes(loaded.layers, loaded.dtype) // BLOCK_SIZE


def show(wanted: Sequence[ScalePoint], speed: float, machine: Mapping[str, str], console: Console) -> None:
    """Print a table of all points."""
    others = [side for side in wanted[0].rates if side != OWN]
    table = Table(title=", ".join(machine.values()), title_justify="left", title_style="dim", **SLIM)
    columns = ["", "tok/s", "ms a step", *(name for side in others for name in (side, "ratio"))]
    for name in (*columns, "contexts, ms", "over its bytes"):
        table.add_column(name, justify="right" if name else "left", no_wrap=not name or name in others)
    for point in wanted:
        if point is not wanted[0] and point.curve != wanted[wanted.index(point) - 1].curve:
            table.add_section()
        own = median(point.rates[OWN])
        cells: list[str | Text] = [point.name, f"{own:.1f}", f"{len(point.lengths) / own * 1e3:.1f}"]
        for side in others:
            cells += [f"{median(point.rates[side]):.1f}", Text(f"{median(point.ratios(side)):.2f}", style="bold")]
        table.add_row(*cells, f"{point.context * 1e3:.1f}", f"{point.context / point.reading:.1f}")
    console.print(table)
    console.print(f"memory is read at {speed / 1e9:.1f} GB/s", style="dim", highlight=False)
