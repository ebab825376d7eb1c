"""`specscope audit`: a capture judged by its models."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.analyze.audit.audit import audit
from specscope.cli.captures import judge_each, need_steps
from specscope.cli.streams import warn
from specscope.envelope import of_capture
from specscope.errors import UserError
from specscope.measure.judges import audit_options
from specscope.terminal import text_console

if TYPE_CHECKING:
    from specscope.trace.wire.reading import CaptureReader

EVERY = 10.0  # seconds between lines of progress


def audit_captures(
    captures: Sequence[str],
    target: str | None,
    draft_model: str | None,
    sample: int | None,
    *,
    trainer: str | None,
    as_json: bool,
) -> int:
    """Audit captures, each by itself, and print what was found; returns the exit code. Raises UserError."""
    if trainer is not None and sample is not None:
        raise UserError("--sample does not go with --trainer: it compares whole folders, no steps")
    from specscope.interrupt import ends_at_once
    from specscope.live.start import share_cores

    share_cores()
    from specscope.trace.wire.reading import read_capture

    def audited(file: str) -> Mapping[str, Any]:
        reader = read_capture(file)
        need_steps(reader.history, file)
        if trainer is not None:
            return beside_training(reader, file, trainer)
        with progress_bar() as progress:
            options = audit_options(reader.history, target, draft_model, sample)
            result = audit(reader.history, file, options, progress)
        if not as_json:
            from specscope.analyze.audit.text import render_audit

            render_audit(result, text_console())
        for warning in reader.warnings:
            warn(warning)
        return of_capture(file, result.to_dict(), code=result.exit, warnings=(*reader.warnings, *result.notes))

    def beside_training(reader: CaptureReader, file: str, folder: str) -> Mapping[str, Any]:
        from specscope.measure.trainer import audit_trainer, render_trainer

        compared = audit_trainer(reader.history, file, folder, target, draft_model)
        if not as_json:
            render_trainer(compared, text_console())
        for warning in reader.warnings:
            warn(warning)
        return of_capture(file, compared.to_dict(), code=compared.exit, warnings=(*reader.warnings, *compared.warnings))

    with ends_at_once():
        return judge_each("audit", captures, audited, as_json=as_json)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on the terminal; where standard error is not one, a line every few seconds."""
    if not sys.stderr.isatty():
        with _progress_lines() as tell:
            yield tell
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=text_console(error=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextmanager
def _progress_lines() -> Iterator[Callable[[str, int, int], None]]:
    """Lines in a log: from a thread, since a model that loads or a search reports nothing for long."""
    ended, began, now = threading.Event(), time.monotonic(), ["loading"]

    def lines() -> None:
        while not ended.wait(EVERY):
            click.echo(f"{time.monotonic() - began:.0f} s: {now[0]}", err=True)

    def tell(what: str, done: int, total: int) -> None:
        now[0] = f"{what}, {done:,} of {total:,}" if total > 1 else what

    threading.Thread(target=lines, daemon=True).start()
    try:
        yield tell
    finally:
        ended.set()
