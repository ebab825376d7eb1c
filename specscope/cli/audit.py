"""`specscope audit`: a capture judged by the models themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specscope.analyze.audit.audit import Audit, audit
from specscope.cli.captures import need_steps, print_json, text_console
from specscope.cli.judges import audit_options
from specscope.cli.streams import warn


def audit_capture(
    file: str, target: str | None, draft_model: str | None, sample: int | None, *, again: bool, as_json: bool
) -> int:
    """Audit a capture file and print what was found; returns the exit code. Raises UserError."""
    from specscope.interrupt import ends_at_once
    from specscope.live.start import share_cores

    share_cores()
    from specscope.model.quiet import hush
    from specscope.trace.reading import read_capture

    with ends_at_once():
        reader = read_capture(file)
        need_steps(reader.history, file)
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
        print_json(found.to_dict())
    else:
        from specscope.analyze.audit.text import render_audit

        render_audit(found, text_console())
    for warning in warnings:
        warn(warning)


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
