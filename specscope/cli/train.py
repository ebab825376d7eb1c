"""`specscope train`: its verbs and their flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from specscope.cli.numbers import real_from, whole_from
from specscope.errors import UserError
from specscope.trace.files import check_training


@click.group(invoke_without_command=True)
@click.pass_context
def train(context: click.Context) -> None:
    """Train a drafter for your own target."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@train.command("eagle3")
@click.option(
    "-o", "--output", required=True, metavar="DIR", help="Folder for the head, its data and its training state."
)
@click.option(
    "--target", metavar="MODEL", help="Model: a folder, a hub name or a .gguf file.  [default: SmolLM2-135M-Instruct]"
)
@click.option("--data", metavar="FILE", help='Text, or JSON Lines with "text", "prompt" and "response", or "messages".')
@click.option(
    "--self-synthesise",
    "tokens",
    type=whole_from(1, 10**10),
    metavar="N",
    help="Let the target write N tokens of training data.",
)
@click.option(
    "--draft-vocab",
    type=whole_from(4, 10**6),
    metavar="N",
    help="Size of the head's vocabulary; with --start, more than that head's adds tokens.  [default: 8192]",
)
@click.option(
    "--steps",
    type=whole_from(1, 16),
    metavar="N",
    default=3,
    show_default=True,
    help="Passes over the head's own output (EAGLE-3's training-time test).",
)
@click.option(
    "--epochs", type=real_from(0.01, 1000), metavar="N", default=4.0, show_default=True, help="Passes over the data."
)
@click.option(
    "--learning-rate",
    type=real_from(1e-9, 10),
    metavar="RATE",
    default=1e-3,
    show_default=True,
    help="Peak learning rate, before cosine decay.",
)
@click.option(
    "--batch-tokens",
    type=whole_from(16, 2**20),
    metavar="N",
    default=2048,
    show_default=True,
    help="Tokens per training step.",
)
@click.option(
    "--seed", type=whole_from(0, 2**31 - 1), metavar="N", default=0, show_default=True, help="Seed of the training."
)
@click.option("--start", default="", metavar="HEAD", help="Continue from this head instead of a new one.")
@click.option(
    "--rows",
    type=whole_from(1, 4096),
    metavar="N",
    default=64,
    show_default=True,
    help="Sequences that the target writes at once (--self-synthesise).",
)
@click.option(
    "--longest",
    type=whole_from(32, 2**17),
    metavar="N",
    default=320,
    show_default=True,
    help="Longest sequence, in tokens.",
)
@click.option("--device", metavar="DEVICE", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
def train_eagle3(output: str, target: str | None, data: str | None, tokens: int | None, **how: Any) -> None:  # noqa: ANN401
    """Train an EAGLE-3 head and write it in the published format.

    The training data is what the target writes by itself (instructions, then its answers), or your file. Interrupt or
    kill the training at any time: the same command resumes it.
    """
    if (data is None) == (tokens is None):
        raise UserError("give either --data FILE or --self-synthesise N")
    check_training(output, (target, data, how["start"] or None))
    from specscope.train.eagle3 import Recipe
    from specscope.train.run import Task
    from specscope.train.run import train as run_training

    names = ("draft_vocab", "steps", "epochs", "learning_rate", "batch_tokens", "seed", "start")
    recipe = Recipe(**{name: how.pop(name) for name in names})
    file = None if data is None else Path(data)
    sys.exit(run_training(Task(target, file, tokens or 0, Path(output), recipe, **how)))
