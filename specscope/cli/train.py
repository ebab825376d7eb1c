"""`specscope train`: its verbs and their flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specscope.cli.numbers import real_from, whole_from
from specscope.errors import UserError
from specscope.model.places import check_device, check_model, head_place
from specscope.trace.files import check_training
from specscope.train.data import check_data, check_kind

if TYPE_CHECKING:
    from specscope.train.training import CommonRecipe, Training

RECIPE = ("draft_vocab", "epochs", "learning_rate", "batch_tokens", "seed", "start")  # of every kind of head


COMMON = (
    click.option(
        "-o", "--output", required=True, metavar="DIR", help="Folder for the head, its data and its training state."
    ),
    click.option(
        "--target",
        metavar="MODEL",
        help="Model: a folder, a hub name or a .gguf file.  [default: SmolLM2-135M-Instruct]",
    ),
    click.option(
        "--data", metavar="FILE", help='Text, or JSON Lines with "text", "prompt" and "response", or "messages".'
    ),
    click.option(
        "--self-synthesise",
        "tokens",
        type=whole_from(1, 10**10),
        metavar="N",
        help="Let the target write N tokens of training data.",
    ),
    click.option(
        "--draft-vocab",
        type=whole_from(4, 10**6),
        metavar="N",
        help="Size of the head's vocabulary; with --start, more than that head's adds tokens.  [default: 8192]",
    ),
    click.option(
        "--epochs",
        type=real_from(0.01, 1000),
        metavar="N",
        default=4.0,
        show_default=True,
        help="Passes over the data.",
    ),
    click.option(
        "--learning-rate",
        type=real_from(1e-9, 10),
        metavar="RATE",
        default=1e-3,
        show_default=True,
        help="Peak learning rate, before cosine decay.",
    ),
    click.option(
        "--batch-tokens",
        type=whole_from(16, 2**20),
        metavar="N",
        default=2048,
        show_default=True,
        help="Tokens per training step.",
    ),
    click.option(
        "--seed", type=whole_from(0, 2**31 - 1), metavar="N", default=0, show_default=True, help="Seed of the training."
    ),
    click.option("--start", default="", metavar="HEAD", help="Continue from this head instead of a new one."),
    click.option(
        "--rows",
        type=whole_from(1, 4096),
        metavar="N",
        default=64,
        show_default=True,
        help="Sequences that the target writes at once (--self-synthesise).",
    ),
    click.option(
        "--longest",
        type=whole_from(32, 2**17),
        metavar="N",
        default=320,
        show_default=True,
        help="Longest sequence, in tokens.",
    ),
    click.option("--device", metavar="DEVICE", default="auto", show_default=True, help="cpu, cuda or auto."),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
    ),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags for every kind of head."""
    for option in reversed(COMMON):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.pass_context
def train(context: click.Context) -> None:
    """Train a drafter for your own target.

    \b
      specscope train eagle3 -o my/head --target my/model --data texts.jsonl
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@train.command("eagle3")
@common_options
@click.option(
    "--steps",
    type=whole_from(1, 16),
    metavar="N",
    default=3,
    show_default=True,
    help="Passes over the head's own output (EAGLE-3's training-time test).",
)
@click.option(
    "--norm-output",
    is_flag=True,
    help="Feed the normalised state to the next depth, in training and in use (EAGLE-3.1).",
)
def train_eagle3(**how: Any) -> None:  # noqa: ANN401
    """Train an EAGLE-3 head and write it in the published format.

    \b
      specscope train eagle3 -o my/head --self-synthesise 1000000
      specscope train eagle3 -o my/head --target my/model --data texts.jsonl

    The training data is what the target writes by itself (instructions, then its answers), or your file. Interrupt or
    kill the training at any time: the same command resumes it.
    """
    _check(how)
    from specscope.train.eagle3 import Eagle3Training, Recipe

    _run(Eagle3Training, Recipe(**_taken(how, (*RECIPE, "steps", "norm_output"))), how)


@train.command("p-eagle")
@common_options
@click.option(
    "--depths",
    type=whole_from(1, 16),
    metavar="N",
    default=4,
    show_default=True,
    help="Tokens that one pass drafts.",
)
@click.option(
    "--keep-ratio",
    type=real_from(0.01, 1),
    metavar="RATIO",
    default=0.7,
    show_default=True,
    help="Share of a depth's training positions that are also used at the next depth.",
)
def train_p_eagle(**how: Any) -> None:  # noqa: ANN401
    """Train a P-EAGLE head, which drafts all depths in one pass, and write it in the layout of vLLM's speculators.

    \b
      specscope train p-eagle -o my/head --self-synthesise 1000000 --start my/eagle3

    Data and resuming work as in specscope train eagle3. It is best to start from an
    EAGLE-3 head: give it with --start.
    """
    _check(how)
    from specscope.train.p_eagle import PEagleRecipe, PEagleTraining

    _run(PEagleTraining, PEagleRecipe(**_taken(how, (*RECIPE, "depths", "keep_ratio"))), how)


def _check(how: dict[str, Any]) -> None:
    """Refuse what can be refused before torch is imported. Raises UserError."""
    if (how["data"] is None) == (how["tokens"] is None):
        raise UserError("give either --data FILE or --self-synthesise N")
    check_training(how["output"], (how["target"], how["data"], how["start"] or None))
    if how["data"] is not None:
        check_kind(Path(how["data"]))
    check_model(how["target"])
    if how["start"]:
        head_place(how["start"])
    check_device(how["device"])
    if how["data"] is not None:
        check_data(Path(how["data"]))


def _taken(how: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Take these flags out of `how`."""
    return {name: how.pop(name) for name in names}


def _run(kind: type[Training], recipe: CommonRecipe, how: dict[str, Any]) -> None:
    from specscope.train.run import Task
    from specscope.train.run import train as run_training

    data, tokens, output = (how.pop(name) for name in ("data", "tokens", "output"))
    file = None if data is None else Path(data)
    sys.exit(run_training(Task(kind, data=file, tokens=tokens or 0, out=Path(output), recipe=recipe, **how)))
