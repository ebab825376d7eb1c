"""`specscope bench rules`: acceptance and tokens/s of each rule of verification beside the standard one, at batch 8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from specscope.bench.paired import SLIM, Comparison, Side, machine_info, measure_paired, write_figures
from specscope.bench.prompts import PLAIN
from specscope.engine.config import EngineConfig
from specscope.engine.engine import Engine
from specscope.terminal import text_console
from specscope.trace.params import SamplingParams
from specscope.trace.rules import BLOCK, RULES, STANDARD
from specscope.trace.stats import Acceptance

TOKENS = 48  # of each prompt in a round
TREES = ("5", "3x3", "dynamic:8,depth=4,top=4")


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """One rule with one tree at one temperature."""

    tree: str
    temperature: float
    rule: str
    acceptance: Acceptance  # of all rounds
    speed: Comparison  # beside the standard rule

    @property
    def tau(self) -> float:
        """Mean acceptance length."""
        return self.acceptance.tau or 1.0


def run_rules(config: EngineConfig, rounds: int, json_file: str | None) -> None:
    """Measure and print. The trees are those of the config where it names one."""
    console, rows = text_console(), []
    trees = TREES if config.tree is None else (config.tree,)
    machine: dict[str, str] = {}
    for tree in trees:
        engine = Engine(
            dataclasses.replace(config, tree=tree, drafter=config.model_part or config.drafter, suffix_shared=0)
        )
        machine = machine_info(engine.run_info.dtype, torch.get_num_threads())
        for temperature in (0.0, 0.8):
            rows += _rows(engine, tree, temperature, rounds, console)
    _show(rows, console, machine)
    figures = [
        {"tree": row.tree, "temperature": row.temperature, "tau": row.tau, **row.speed.to_dict()} for row in rows
    ]
    write_figures(json_file, "rules", {"machine": machine, "rules": figures})


def _rows(engine: Engine, tree: str, temperature: float, rounds: int, console: Console) -> list[RuleRow]:
    prompts = [engine.encode(engine.turn(prompt))[1] for prompt in PLAIN]
    plan = engine.config.plan
    rules = [rule for rule in RULES if rule != BLOCK or (plan is not None and plan.is_chain)]
    found = {rule: Acceptance() for rule in rules}
    seeds = dict.fromkeys(rules, 0)

    def side(rule: str) -> Callable[[], int]:
        def run() -> int:
            engine.verifier.rule = rule
            seeds[rule] += 1  # a round of its own coins; the same for every rule
            params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seeds[rule], ignore_eos=True)
            results = engine.generate(prompts, params)
            for step in (step for result in results for step in result.steps):
                found[rule].add(step)
            return sum(len(result.token_ids) for result in results)

        return run

    sides: dict[str, Side] = {rule: side(rule) for rule in rules}
    rates = measure_paired(sides, rounds, console, f"{tree}, T = {temperature:g}")
    return [
        RuleRow(
            tree, temperature, rule, found[rule], Comparison(f"{tree}, T = {temperature:g}", rule, STANDARD, 0.0, rates)
        )
        for rule in rules
    ]


def _show(rows: list[RuleRow], console: Console, machine: dict[str, str]) -> None:
    table = Table(title=", ".join(machine.values()), title_justify="left", title_style="dim", **SLIM)
    for column in ("tree", "temperature", "rule", "acceptance length", "tok/s over standard", "95 %"):
        table.add_column(column, justify="left" if column in ("tree", "rule") else "right")
    for row in rows:
        low, high = row.speed.interval
        table.add_row(
            row.tree,
            f"{row.temperature:g}",
            row.rule,
            f"{row.tau:.3f}",
            f"{row.speed.ratio:.3f}",
            f"{low:.3f}–{high:.3f}",
        )
    console.print(table)
