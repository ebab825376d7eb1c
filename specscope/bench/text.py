"""`specscope bench text`: drafters that look into the text, the head, and both together, beside no speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from specscope.bench.cpu import encode
from specscope.bench.edits import edit_prompts
from specscope.bench.paired import SLIM, Comparison, Side, machine_info, measure_paired, write_figures
from specscope.bench.prompts import unseen_prompts
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.terminal import text_console
from specscope.trace.params import SamplingParams
from specscope.trace.stats import Acceptance

EDIT_TOKENS, UNSEEN_TOKENS = 160, 64
UNSEEN = 10  # prompts, evenly over their kinds
SHARED = 8192  # tokens of earlier turns
DRAFTERS: Mapping[str, Mapping[str, object]] = {
    "no speculation": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "suffix, shared": {"drafter": "suffix", "suffix_shared": SHARED},
    "eagle": {"drafter": "eagle"},
    "ngram+eagle": {"drafter": "ngram+eagle"},
    "suffix+eagle": {"drafter": "suffix+eagle"},
    "suffix+eagle, shared": {"drafter": "suffix+eagle", "suffix_shared": SHARED},
}


@dataclasses.dataclass(frozen=True)
class TextRow:
    """One drafter on one workload."""

    workload: str
    acceptance: Acceptance  # of one round
    steps: int
    tokens: int
    speed: Comparison  # beside no speculation

    @property
    def length(self) -> float:
        """Tokens a step, steps without drafts included: what the tokens/s follow from."""
        return self.tokens / self.steps


def run_text(config: EngineConfig, rounds: int, json_file: str | None) -> None:
    """Measure and print."""
    console = text_console()
    console.print("loading an engine for each drafter", style="dim")
    engines = _engines(config)
    plain = engines["no speculation"]
    machine = machine_info(plain.run_info.dtype, torch.get_num_threads())
    rows = _rows("ten edits of a file", engines, encode(plain, edit_prompts()), EDIT_TOKENS, rounds, console)
    rows += _rows("unseen prompts", engines, encode(plain, unseen_prompts(UNSEEN)), UNSEEN_TOKENS, rounds, console)
    _show(rows, console, machine)
    figures = [
        {"workload": row.workload, "length": row.length, "tau": row.acceptance.tau, **row.speed.to_dict()}
        for row in rows
    ]
    write_figures(json_file, "text", {"machine": machine, "text": figures})


def _engines(config: EngineConfig) -> dict[str, Engine]:
    """One for each drafter over the config's target; those with a head where the config has one."""
    bare = config.without_drafting()
    found = {}
    for name, how in DRAFTERS.items():
        needs_head = "eagle" in str(how["drafter"])
        if config.model_part == "eagle" or not needs_head:
            head = {"draft_model": config.draft_model} if needs_head else {}
            found[name] = Engine(dataclasses.replace(bare, **how, **head))  # type: ignore[arg-type]
    return found


def _rows(
    workload: str,
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    rounds: int,
    console: Console,
) -> list[TextRow]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    counted = {name: Acceptance() for name in engines}
    made = dict.fromkeys(engines, 0)

    def side(name: str) -> Side:
        def run() -> int:
            counted[name], made[name] = Acceptance(), 0
            shelf = engines[name].drafter.shelf
            if shelf is not None:
                shelf.restore({})  # else the last round's answers would be found in this one
            for prompt in prompts:  # turn by turn, as an agent asks
                (result,) = engines[name].generate([prompt], params)
                for step in result.steps:
                    counted[name].add(step)
                made[name] += len(result.token_ids)
            return made[name]

        return run

    rates = measure_paired({name: side(name) for name in engines}, rounds, console, workload)
    return [
        TextRow(
            workload,
            counted[name],
            counted[name].steps,
            made[name],
            Comparison(workload, name, "no speculation", 0.0, rates),
        )
        for name in engines
    ]


def _show(rows: Sequence[TextRow], console: Console, machine: Mapping[str, str]) -> None:
    console.print(", ".join(machine.values()), style="dim", highlight=False)
    for workload in dict.fromkeys(row.workload for row in rows):
        table = Table(title=workload, title_justify="left", **SLIM)
        for column in ("drafter", "tokens a step", "acceptance length", "tok/s over none", "95 %"):
            table.add_column(
                column, justify="left" if column == "drafter" else "right", no_wrap=column in ("drafter", "95 %")
            )
        for row in rows:
            if row.workload == workload:
                table.add_row(*_cells(row))
        console.print(table)


def _cells(row: TextRow) -> tuple[str, ...]:
    low, high = row.speed.interval
    tau = "-" if row.acceptance.tau is None else f"{row.acceptance.tau:.3f}"
    return row.speed.a, f"{row.length:.3f}", tau, f"{row.speed.ratio:.3f}", f"{low:.3f}–{high:.3f}"
