"""`specscope train`: data, training and the head's own README, each resumable, under a progress bar."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specscope.errors import UserError
from specscope.interrupt import INTERRUPTED, Interrupt, StoppedError, interruptible
from specscope.model.device import pick_device, pick_dtype
from specscope.model.features import AuxLayer, published_aux_layers
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.model.loader import LoadedModel, load_model, load_tokenizer
from specscope.model.runner import ModelRunner
from specscope.terminal import text_console
from specscope.train.shards import Shards, ShardWriter, shard_files
from specscope.train.synthesise import ANSWER_TEMPERATURES, INSTRUCTION_TEMPERATURES, OPENED, OPENERS, Synthesiser
from specscope.train.texts import run_texts
from specscope.train.training import LOG, CommonRecipe, Training
from specscope.whole_file import LARGEST_DATA, read_whole, write_whole

# The README of a trained head: what it is, how it was made, and how well it does.

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


ROWS, LONGEST = 64, 320  # the defaults of the flags
EVERY = 100  # optimiser steps between two saves, each with held-out figures
LONGEST_OPENING = 256  # tokens of a chat template's opening and an opener


@dataclass(frozen=True)
class Task:
    """What the user asked for."""

    training: type[Training]  # a kind of head
    target: str | None
    data: Path | None  # a file of texts; None: the target writes its own
    tokens: int  # that the target writes
    out: Path
    recipe: CommonRecipe
    device: str
    dtype: str
    rows: int  # sequences that the target writes at once
    longest: int  # tokens of a sequence


def train(task: Task) -> int:
    """Make what is missing of data, training and README; returns the exit code: 0, or 130 after Ctrl-C."""
    console = text_console(error=True)
    if task.out.exists() and not task.out.is_dir():
        raise UserError(f"{task.out} is a file: -o takes a folder")
    try:
        with interruptible() as interrupt, _bar(console, interrupt) as progress:
            progress("loading the target", 0, 1)
            device = pick_device(task.device)
            target = load_model(task.target, device, pick_dtype(task.dtype, device))
            folder = _data(task, target, progress)
            training = task.training(target, Shards(folder), task.recipe, task.out)
            figures = _train(training, progress)
    except (StoppedError, KeyboardInterrupt):
        console.print("stopped; the same command goes on from here", highlight=False, soft_wrap=True)
        return INTERRUPTED
    write_whole(task.out / "README.md", card(training, _command(task), _source(task)).encode())
    first = ", ".join(f"{x:.2f}" for x in figures["first"])
    console.print(
        f"trained on {training.seen:,} tokens; held-out acceptance by position {first} → {task.out}",
        soft_wrap=True,
    )
    return 0


@contextmanager
def _bar(console: Console, interrupt: Interrupt) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar's update. It is called where work may stop, and raises StoppedError after Ctrl-C."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        bar_task = bar.add_task("starting", total=1)

        def progress(text: str, done: int, total: int) -> None:
            bar.update(bar_task, description=text, completed=done, total=total)
            interrupt.check()

        yield progress


def _data(task: Task, target: LoadedModel, progress: Callable[[str, int, int], None]) -> Path:
    """The folder of data, created or completed. What a killed run has written is kept."""
    folder = task.out / "data"
    aux_layers: tuple[AuxLayer, ...] = (*published_aux_layers(len(target.layers)), "final")
    done = folder / "done"
    about = {
        "target": target.revision,
        "aux_layers": list(aux_layers),
        "source": "" if task.data is None else _digest(task.data),
        "longest": task.longest,
        "seed": task.recipe.seed,
    }
    writer = ShardWriter(folder, about)
    have = Shards(folder).tokens if shard_files(folder) else 0
    if done.exists() and (task.data is not None or have >= task.tokens):
        return folder
    blocks = (task.rows + 2) * (-(-(task.longest + LONGEST_OPENING) // BLOCK_SIZE) + 1)
    runner = ModelRunner(target, blocks, aux_layers)
    tokenizer = load_tokenizer(task.target)
    count = [have]

    def more(tokens: int) -> None:
        count[0] += tokens
        progress(f"data: {count[0]:,} tokens", count[0], max(task.tokens, count[0]))

    if task.data is not None:
        for file in shard_files(folder):  # an interrupted pass over a file starts again
            file.unlink()
        run_texts(runner, tokenizer, task.data, ShardWriter(folder, about), more, task.longest)
    else:
        seed = task.recipe.seed + 1000 * len(shard_files(folder))  # so that a resumed run does not repeat itself
        synthesiser = Synthesiser(runner, tokenizer, rows=task.rows, longest=task.longest, seed=seed)
        try:
            synthesiser.write(task.tokens - have, writer, more)
        except StoppedError:
            writer.flush()
            raise
    if not shard_files(folder):
        raise UserError(f"{task.data} holds no text of at least 4 tokens")
    done.touch()
    return folder


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(read_whole(path, "the data", LARGEST_DATA), digest_size=8).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read the data {path}: {error.strerror}") from error


def _train(training: Training, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Train to the end, saving regularly; returns the last held-out figures."""
    held_out = ""
    figures: dict[str, Any] | None = None
    try:
        for outcome in training.run():
            if training.step % EVERY == 0:
                training.save()
                figures = training.evaluate()
                held_out = "; held out " + " ".join(f"{x:.2f}" for x in figures["first"])
            loss = " ".join(f"{x:.2f}" for x in outcome.by_step)
            progress(f"step {training.step} of {training.total}, loss {loss}{held_out}", training.step, training.total)
    except StoppedError:
        training.save()
        raise
    if figures is None or figures["step"] != training.step:
        training.save()
        figures = training.evaluate()
    return figures


def _command(task: Task) -> str:
    """The command that makes the same head."""
    words = ["specscope", "train", task.training.verb]
    words += [] if task.target is None else ["--target", task.target]
    words += ["--data", str(task.data)] if task.data is not None else ["--self-synthesise", str(task.tokens)]
    for name, value in asdict(task.recipe).items():
        if value != getattr(type(task.recipe)(), name):
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    for name, value, usual in (("--rows", task.rows, ROWS), ("--longest", task.longest, LONGEST)):
        words += [] if value == usual else [name, str(value)]
    return shlex.join([*words, "-o", task.out.name])


def _source(task: Task) -> str:
    """Where the data came from."""
    if task.data is not None:
        return f"the texts of {task.data.name}, over which the target was run"
    hot = ", ".join(map(str, INSTRUCTION_TEMPERATURES))
    then = ", ".join(map(str, ANSWER_TEMPERATURES))
    return (
        "the target's own writing. It continues its chat template's opening with an\n"
        f"instruction (at a temperature of {hot}; {OPENED:.0%} begin with an opener of {len(OPENERS)} kinds), then\n"
        f"answers it (at {then}, evenly), up to {task.longest} tokens in all"
    )
