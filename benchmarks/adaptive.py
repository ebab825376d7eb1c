"""`python -m benchmarks adaptive`: adaptive trees beside plain decoding and fixed trees, over texts and batch sizes.

All engines share one model and step in turn, so that other load on the machine meets all alike; what the machine did in
a round is taken out of its steps (lanes.pace).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specscope.engine.config import DEFAULT_TREES, EngineConfig
from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.measure.lanes import Lane, Rounds, Timed, Work, in_turn, lanes, pace, scaled
from specscope.measure.paired import SLIM, machine_info, write_figures
from specscope.measure.prompts import unseen_prompts
from specscope.terminal import text_console
from specscope.trace.record.params import SamplingParams

PLAIN, ADAPTIVE = "none", "adaptive"
TREES = ("1", "3", "dynamic:4,depth=2,top=4", "dynamic:8,depth=3,top=4", "dynamic:16,depth=5,top=4")
MANY = 16  # requests at once, from which on a quarter of the steps has tokens enough to rate a fixed tree
EVERY = 4  # rounds between two such steps
KV_MEMORY = 4.0  # GiB at least, so that the contexts of eight engines with up to 32 requests each lie side by side
TOKENS, UNLIKE = 64, 8  # of each request, and by how many lengths differ: those of equal ones would end together
SPAN = 200  # steps over which adaptive trees may not be slower than plain decoding
LEAST_PLAIN, LEAST_BEST = 0.98, 0.97  # of plain decoding over any such span; of the best fixed tree


@dataclass(frozen=True)
class Mix:
    """What is run: prompts of a kind ("" for all), so many at once, at a temperature."""

    kind: str
    batch: int
    temperature: float

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.kind or 'all kinds'}, batch {self.batch}, T = {self.temperature:g}"


MIXES = (
    Mix("instructions", 1, 0.0),
    Mix("code", 1, 0.0),
    Mix("maths", 1, 1.0),
    Mix("summarising", 1, 0.0),
    Mix("chat", 1, 1.0),
    Mix("code", 4, 0.0),
    Mix("chat", 4, 1.0),
    Mix("maths", 4, 0.0),
    Mix("", 16, 0.0),
    Mix("", 16, 1.0),
    Mix("", 32, 0.0),
)


@dataclass(frozen=True)
class Found:
    """What came of a mix: tokens a second by side, and the adaptive side's slowest span over plain decoding."""

    mix: Mix
    rates: dict[str, float]
    worst: float
    best_rate: float  # of the fastest fixed tree, or none, chosen by other steps than it is rated by

    @property
    def best(self) -> str:
        """The fastest fixed tree over all steps, or none."""
        return max((side for side in self.rates if side != ADAPTIVE), key=lambda side: self.rates[side])

    @property
    def good(self) -> bool:
        """Whether both goals are met."""
        return self.worst >= LEAST_PLAIN and self.rates[ADAPTIVE] >= LEAST_BEST * self.best_rate

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mix": self.mix.name,
            "tokens_s": self.rates,
            "best_fixed": self.best,
            "best_tokens_s": self.best_rate,
            "worst_span": self.worst,
        }


def run_adaptive(config: EngineConfig, steps: int, json_file: str | None) -> None:
    """Measure and print."""
    console = text_console()
    engine = Engine(replace(config, kv_memory=max(config.kv_memory, KV_MEMORY)))
    if engine.sizer is None:
        raise UserError("bench adaptive compares adaptive trees: use a drafter with a head, without --tree")
    found = []
    with Progress(console=console, transient=True) as bar:
        for mix in MIXES:
            task = bar.add_task(mix.name, total=steps)
            found.append(_measure(engine, mix, steps, lambda done, task=task: bar.update(task, completed=done)))
    machine = machine_info(engine.run_info.dtype, torch.get_num_threads())
    _show(found, console, machine)
    mixes = [one.to_dict() for one in found]
    write_figures(json_file, "adaptive", {"machine": machine, "steps": steps, "mixes": mixes})


def work_of(engine: Engine, mix: Mix) -> list[Work]:
    """Prompts that the default head never saw, of a kind."""
    return [
        (
            engine.turn(prompt),
            SamplingParams(
                max_tokens=TOKENS + UNLIKE * (seed % 5 - 2), temperature=mix.temperature, seed=seed, ignore_eos=True
            ),
        )
        for seed, prompt in enumerate(unseen_prompts(kind=mix.kind))
    ]


def _measure(engine: Engine, mix: Mix, steps: int, progress: Any) -> Found:  # noqa: ANN401
    work = work_of(engine, mix)
    wanted: dict[str, dict[str, str | None]] = {
        PLAIN: {"drafter": "none", "draft_model": None, "tree": None},
        ADAPTIVE: {},
        **{
            tree: {"drafter": engine.config.model_part, "draft_model": engine.config.draft_model, "tree": tree}
            for tree in TREES
        },
    }
    if engine.config.text_part:
        tree = DEFAULT_TREES[engine.config.drafter]
        wanted[f"{engine.config.drafter} {tree}"] = {"tree": tree}
    engine.scheduler.max_batch = max(engine.scheduler.max_batch, mix.batch)
    with lanes(engine, wanted, mix.batch) as run:
        for lane in run:
            lane.engine.scheduler.max_batch = max(lane.engine.scheduler.max_batch, mix.batch)
            lane.every = EVERY if mix.batch >= MANY and lane.name not in (PLAIN, ADAPTIVE) else 1
            lane.give(itertools.cycle(work))
        rounds: Rounds = []
        in_turn(run, rounds, lambda: _more(rounds, steps, progress))
        return _found(mix, run, rounds)


def _more(rounds: Rounds, steps: int, progress: Any) -> bool:  # noqa: ANN401
    done = sum(one[1] is not None for one in rounds)
    progress(done)
    return done < steps


def _found(mix: Mix, run: Sequence[Lane], rounds: Rounds) -> Found:
    paces = pace(rounds)
    by_lane = {lane.name: scaled(each, paces) for lane, each in zip(run, zip(*rounds, strict=True), strict=True)}
    rates = {name: rate(steps) for name, steps in by_lane.items()}
    adaptive = by_lane[ADAPTIVE]
    spans = [adaptive[at : at + SPAN] for at in range(max(len(adaptive) - SPAN, 0) + 1)]
    fixed = {name: steps for name, steps in by_lane.items() if name != ADAPTIVE}
    return Found(mix, rates, min(map(rate, spans)) / rates[PLAIN], best_rate(fixed))


def best_rate(fixed: Mapping[str, Sequence[Timed]]) -> float:
    """Tokens a second of the fastest side, chosen by every other step and rated by those between, and the reverse.

    The highest of many rates, each measured with some error, is too high; that of a choice made elsewhere is not.
    """
    halves = [{name: steps[start::2] for name, steps in fixed.items()} for start in (0, 1)]
    chosen = [max(half, key=lambda name: rate(half[name])) for half in halves]
    return rate([*halves[1][chosen[0]], *halves[0][chosen[1]]])


def rate(steps: Sequence[Timed]) -> float:
    """Tokens a second; 0 of a side that had no step with a full batch and no prefill."""
    return sum(step.tokens for step in steps) / sum(step.seconds for step in steps) if steps else 0.0


def _show(found: Sequence[Found], console: Console, machine: dict[str, str]) -> None:
    table = Table(title=", ".join(machine.values()), title_justify="left", title_style="dim", **SLIM)
    for column in ("", "tok/s", "plain", "ratio", f"worst {SPAN}", "best tree", "tok/s", "ratio"):
        table.add_column(column, justify="left" if column in ("", "best tree") else "right")
    for one in found:
        adaptive, plain, best = one.rates[ADAPTIVE], one.rates[PLAIN], one.best_rate
        table.add_row(
            one.mix.name,
            f"{adaptive:.1f}",
            f"{plain:.1f}",
            Text(f"{adaptive / plain:.3f}", style="bold"),
            f"{one.worst:.3f}",
            one.best,
            f"{best:.1f}",
            f"{adaptive / best:.3f}",
            style="" if one.good else "yellow",
        )
    console.print(table)
