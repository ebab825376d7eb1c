"""The README of a trained head: what it is, how it was made, and how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specscope.train.training import LOG, CommonRecipe, Training

ONE_PASS = """ Deeper
positions are drafted without sight of the draft's own tokens before them."""


def card(training: Training, command: str, source: str) -> str:
    """The text, in Markdown. `source` is where the data came from."""
    lines = [json.loads(line) for line in (training.folder / LOG).read_text("utf-8").splitlines()]
    along = list({line["step"]: line for line in lines}.values())
    config, recipe = training.head.config, training.recipe
    parameters = sum(p.numel() for p in training.head.parameters())
    fed_back = " The normalised state is fed to the next depth\n(`norm_output`)." if config.norm_output else ""
    note = "" if config.parallel is None else ONE_PASS
    layout = "published EAGLE-3 checkpoints" if config.parallel is None else "vLLM's speculators"
    return f"""# {training.kind} head for {training.target.name}

One decoder layer over what enters layers {", ".join(map(str, config.aux_layers))} of the target;
{parameters / 1e6:.1f} M
parameters, draft vocabulary {config.draft_vocab:,}, bfloat16, in the format of {layout}.{fed_back}
Made by

    {command}

Data: {training.data.tokens:,} tokens in {len(training.data):,} sequences: {source}. Every 40th sequence is held out.
{_vocabulary(recipe)}

Training: {training.seen:,} tokens ({recipe.epochs:g} epochs) in {training.step:,} steps of AdamW, learning rate
{recipe.learning_rate:g} with cosine decay, {training.method}, cross-entropy with the target's
distribution, seed {recipe.seed}; {training.seconds / 60:.0f} minutes on {training.target.device.type}.

## Held out

How often the target's likeliest token is the head's first choice when the tokens before it are right, by position in
the draft, and how often it is among the head's first four; with the tokens trained on so far.{note}

{_table(along, training.depths)}
"""


def _vocabulary(recipe: CommonRecipe) -> str:
    if recipe.start:
        return (
            f"It continues from {recipe.start}, whose draft vocabulary it keeps; more tokens are the data's commonest."
        )
    return "The draft vocabulary is the commonest tokens of the data."


def _table(along: list[Mapping[str, Any]], steps: int) -> str:
    """A row for each evaluation."""
    names = [f"first, {i}" for i in range(1, steps + 1)] + [f"among four, {i}" for i in range(1, steps + 1)]
    rows = ["| tokens | " + " | ".join(names) + " |", "|---" * (1 + 2 * steps) + "|"]
    for line in along:
        figures = " | ".join(f"{x:.3f}" for x in (*line["first"], *line["among"]))
        rows.append(f"| {line['tokens']:,} | {figures} |")
    return "\n".join(rows)
