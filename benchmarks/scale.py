"""`python -m benchmarks scale`: plain decoding over batch size, context length and mixed batches, beside other engines.

The contexts are made up: KV caches hold noise, so that no prompt has to be run through a model first. What a step costs
does not depend on it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from benchmarks.cpu import Peer, without_drafting
from benchmarks.peers import need_python, vllm_process
from benchmarks.scale_points import BATCHES, OWN, PEER, VLLM, ScalePoint, points
from benchmarks.scale_sides import OwnDecoding, PaddedDecoding, context_seconds, fill
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.measure.device import read_bandwidth
from specscope.measure.paired import SLIM, machine_info, write_figures
from specscope.model.kv_cache import BLOCK_SIZE, KVCache
from specscope.terminal import text_console

STEPS = 8  # of a round
Side = Callable[[], float]  # tokens a second of a few steps


def run_scale(config: EngineConfig, rounds: int, json_file: str | None, *, vllm: str | None, plot: str | None) -> None:
    """Measure and print. `vllm`: the Python of an environment that has vLLM."""
    if plot is not None:
        _need_matplotlib()
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
        with _progress(console) as bar:
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
    code = 0
    try:
        if plot is not None:
            from benchmarks.scale_plot import write_plot

            write_plot(wanted, plot)
    except UserError:
        code = 2
        raise
    finally:
        write_figures(json_file, "scale", data, code=code)


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


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


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


def _need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"--plot needs {error.name}: pip install 'specscope[html]'") from None
