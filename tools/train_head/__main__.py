"""`python -m tools.train_head -o my/head --self-synthesise 1000000`: an EAGLE-3 head for a target, from its own text.

Data, training and the head's README are each resumable: the same command goes on from where it was stopped.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from specscope.errors import UserError
from specscope.interrupt import Interrupt, interruptible
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.model.loader import LoadedModel, load_model, load_tokenizer, pick_device, pick_dtype
from specscope.model.runner import AuxLayer, ModelRunner, published_aux_layers
from specscope.terminal import text_console
from specscope.whole_file import write_whole
from tools.train_head.heads import Recipe
from tools.train_head.shards import Shards, ShardWriter, shard_files
from tools.train_head.synthesise import ANSWER_TEMPERATURES, INSTRUCTION_TEMPERATURES, OPENED, OPENERS, Synthesiser
from tools.train_head.training import LOG, Training

EVERY = 100  # optimiser steps between two saves, each with held-out figures
LONGEST_OPENING = 256  # tokens of a chat template's opening and an opener
Told = Callable[[str, int, int], None]  # what is done, how much of how much


@click.command()
@click.option("-o", "--output", type=Path, required=True, help="Folder for the head, its data and its training state.")
@click.option("--target", help="A folder, a hub name or a .gguf file.  [default: SmolLM2-135M-Instruct]")
@click.option(
    "--self-synthesise", "tokens", type=click.IntRange(1), required=True, help="Tokens that the target writes."
)
@click.option("--draft-vocab", type=click.IntRange(4), help="Its vocabulary; with --start, a larger one adds tokens.")
@click.option("--epochs", type=float, default=4.0, show_default=True)
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Peak, before cosine decay.")
@click.option("--batch-tokens", type=click.IntRange(16), default=2048, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--start", default="", help="Continue from this head.")
@click.option("--steps", type=click.IntRange(1, 16), default=3, show_default=True, help="Passes of training-time test.")
@click.option("--rows", type=click.IntRange(1), default=64, show_default=True, help="Sequences written at once.")
@click.option("--longest", type=click.IntRange(32), default=320, show_default=True, help="Tokens of a sequence.")
@click.option("--device", default="auto", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
def main(
    output: Path,
    target: str | None,
    tokens: int,
    rows: int,
    longest: int,
    device: str,
    dtype: str,
    **recipe: Any,  # noqa: ANN401
) -> None:
    """Train an EAGLE-3 head and write it in the published format."""
    console = text_console(error=True)
    try:
        with interruptible() as interrupt, _bar(console, interrupt) as progress:
            progress("loading the target", 0, 1)
            place = pick_device(device)
            loaded = load_model(target, place, pick_dtype(dtype, place))
            data = _data(output / "data", loaded, target, tokens, rows, longest, recipe["seed"], progress)
            figures = _train(training := Training(loaded, data, Recipe(**recipe), output), progress)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", highlight=False, soft_wrap=True)
        sys.exit(130)
    except UserError as error:
        raise click.ClickException(str(error)) from None
    command = shlex.join(["python", "-m", "tools.train_head", *sys.argv[1:]])
    write_whole(output / "README.md", card(training, command, longest).encode())
    first = ", ".join(f"{x:.2f}" for x in figures["first"])
    console.print(f"held-out acceptance by position: {first} → {output}", soft_wrap=True)


@contextmanager
def _bar(console: Console, interrupt: Interrupt) -> Iterator[Told]:
    """A progress bar's update. It is called where work may stop, and raises KeyboardInterrupt after Ctrl-C."""
    with Progress(
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        bar_task = bar.add_task("starting", total=1)

        def progress(text: str, done: int, total: int) -> None:
            bar.update(bar_task, description=text, completed=done, total=total)
            if interrupt.asked:
                raise KeyboardInterrupt

        yield progress


def _data(
    folder: Path, target: LoadedModel, name: str | None, tokens: int, rows: int, longest: int, seed: int, told: Told
) -> Shards:
    """What the target wrote, up to so many tokens. What a killed run has written is kept."""
    aux_layers: tuple[AuxLayer, ...] = (*published_aux_layers(len(target.layers)), "final")
    about = {"target": target.revision, "aux_layers": list(aux_layers), "longest": longest, "seed": seed}
    writer = ShardWriter(folder, about)
    have = Shards(folder).tokens if shard_files(folder) else 0
    if have < tokens:
        blocks = (rows + 2) * (-(-(longest + LONGEST_OPENING) // BLOCK_SIZE) + 1)
        runner, count = ModelRunner(target, blocks, aux_layers), [have]

        def more(new: int) -> None:
            count[0] += new
            told(f"data: {count[0]:,} tokens", count[0], max(tokens, count[0]))

        seed += 1000 * len(shard_files(folder))  # so that a resumed run does not repeat itself
        synthesiser = Synthesiser(runner, load_tokenizer(name), rows=rows, longest=longest, seed=seed)
        try:
            synthesiser.write(tokens - have, writer, more)
        finally:
            writer.flush()
    return Shards(folder)


def _train(training: Training, progress: Told) -> dict[str, Any]:
    """Train to the end, saving regularly; returns the last held-out figures."""
    held_out = ""
    try:
        for outcome in training.run():
            if training.step % EVERY == 0:
                training.save()
                held_out = "; held out " + " ".join(f"{x:.2f}" for x in training.evaluate()["first"])
            loss = " ".join(f"{x:.2f}" for x in outcome.by_step)
            progress(f"step {training.step} of {training.total}, loss {loss}{held_out}", training.step, training.total)
    finally:
        training.save()
    return training.evaluate()


def card(training: Training, command: str, longest: int) -> str:
    """The head's README: what it is, how it was made, and how well it does."""
    lines = [json.loads(line) for line in (training.folder / LOG).read_text("utf-8").splitlines()]
    along = list({line["step"]: line for line in lines}.values())
    config, recipe = training.head.config, training.recipe
    parameters = sum(p.numel() for p in training.head.parameters())
    vocabulary = f"that of {recipe.start}, and its commonest" if recipe.start else "its commonest"
    return f"""# EAGLE-3 head for {training.target.name}

One decoder layer over what enters layers {", ".join(map(str, config.aux_layers))} of the target;
{parameters / 1e6:.1f} M
parameters, draft vocabulary {config.draft_vocab:,}, bfloat16, in the format of published EAGLE-3 checkpoints.
Made by

    {command}

Data: {training.data.tokens:,} tokens in {len(training.data):,} sequences of up to {longest}, the target's own writing.
It continues its chat template's opening with an instruction (at a temperature of {INSTRUCTION_TEMPERATURES};
{OPENED:.0%} begin with an opener of {len(OPENERS)} kinds), then answers it (at {ANSWER_TEMPERATURES}, evenly).
Every 40th sequence is held out. The draft vocabulary is {vocabulary} tokens.

Training: {training.seen:,} tokens ({recipe.epochs:g} epochs) in {training.step:,} steps of AdamW, learning rate
{recipe.learning_rate:g} with cosine decay, {recipe.steps} passes of training-time test, cross-entropy with the target's
distribution, seed {recipe.seed}; {training.seconds / 60:.0f} minutes on {training.target.device.type}.

## Held out

How often the target's likeliest token is the head's first choice when the tokens before it are right, by position in
the draft, and how often it is among the head's first four; with the tokens trained on so far.

{_table(along, recipe.steps)}
"""


def _table(along: list[Mapping[str, Any]], steps: int) -> str:
    """A row for each evaluation."""
    names = [f"{what}, {i}" for what in ("first", "among four") for i in range(1, steps + 1)]
    figures = [[f"{line['tokens']:,}", *(f"{x:.3f}" for x in (*line["first"], *line["among"]))] for line in along]
    rows = [["tokens", *names], ["---"] * (1 + len(names)), *figures]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
