"""`specscope audit`: a capture judged by the models themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Source
from specscope.cli.streams import say
from specscope.engine.config import DEFAULT_HEAD, is_head
from specscope.errors import UserError
from specscope.model.bundled import NAME
from specscope.trace.history import History
from specscope.trace.records import RunInfo

FIRST = ", first "  # in the name of a model that is a target's first layers


def audit_capture(
    file: str, target: str | None, draft_model: str | None, sample: int | None, *, again: bool, as_json: bool
) -> int:
    """Audit a capture file and print what was found; returns the exit code. Raises UserError."""
    from specscope.interrupt import ends_at_once
    from specscope.model.quiet import hush
    from specscope.trace.reading import read_capture

    with ends_at_once():
        reader = read_capture(file)
        hush(gguf=True)
        with progress_bar() as progress:
            if again:
                from specscope.cli.audit_again import audit_again

                found = audit_again(reader.history, file, target, draft_model, sample, progress)
            else:
                options = audit_options(reader.history, target, draft_model, sample)
                found = audit(reader.history, file, options, progress)
    _print(found, reader.warnings, as_json=as_json)
    return int(found.exit)


def _print(found: Audit, warnings: list[str], *, as_json: bool) -> None:
    if as_json:
        import orjson

        click.echo(orjson.dumps(found.to_dict(), option=orjson.OPT_INDENT_2))
    else:
        from specscope.analyze.audit.text import render_audit

        render_audit(found, Pipe())
    for warning in warnings:
        say(f"specscope: warning: {warning}")


class Pipe(Console):
    """A console that leaves a closed pipe to `main`."""

    def on_broken_pipe(self) -> None:
        """Say so."""
        raise BrokenPipeError


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal; nothing where standard error is none."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def audit_options(history: History, target: str | None, draft_model: str | None, sample: int | None) -> Options:
    """The models that judge a capture: those that are named, else those that the capture names. Raises UserError."""
    run = history.run
    if run is None:
        raise UserError("the capture does not say what ran (its header is missing): it cannot be audited")
    model = target if target is not None else named(run.target)
    judge = _source(model, run.target, "--target")
    draft, why = _draft(run, model, draft_model)
    return Options(target=judge, draft=draft, sample=sample, why_no_draft=why)


def named(name: str) -> str | None:
    """What --target would be for the target that a capture names; None for the default one."""
    return None if name == NAME else name


def _source(model: str | None, name: str, flag: str) -> Source:
    """Where a model lies. Raises UserError where it is not at hand."""
    from specscope.model.loader import find_model

    try:
        path, arguments, found = find_model(model, lambda _: None)
    except UserError as error:
        raise UserError(f"the capture's model {name} is not at hand ({error}): give {flag} MODEL") from None
    return Source(path, found, arguments)


def _draft(run: RunInfo, target: str | None, given: str | None) -> tuple[Source | None, str]:
    """Where the drafter's model lies, or why it is not known."""
    name = run.draft_model
    if run.drafter == "eagle":
        folder = Path(given).expanduser() if given is not None else DEFAULT_HEAD
        if given is None and name != DEFAULT_HEAD.name:
            return None, f"the head {name} is not at hand: give --draft-model HEAD"
        if not (folder / "config.json").is_file() or (given is None and not is_head(folder)):
            raise UserError(f"no EAGLE head at {folder}: give --draft-model HEAD, a folder with its config.json")
        return Source(str(folder), folder.resolve().name), ""
    if run.drafter != "draft_model":
        if given is not None:
            raise UserError(f"--draft-model is given, but the capture's drafter is {run.drafter}")
        return None, ""
    before, first, layers = name.partition(FIRST)
    if given is None and first:
        given = f"self:{layers.split()[0]}"
    if given is not None and given.startswith("self:"):
        whole = _source(target, run.target, "--target")
        count = given.removeprefix("self:")
        if not count.isdigit():
            raise UserError(f"--draft-model {given}: write self:N, for the target's first N layers")
        arguments = {**whole.arguments, "num_hidden_layers": int(count)}
        return Source(whole.path, f"{whole.name}, first {count} layers", arguments), ""
    try:
        return _source(given if given is not None else named(before), name, "--draft-model"), ""
    except UserError as error:
        if given is not None:
            raise
        return None, str(error)
