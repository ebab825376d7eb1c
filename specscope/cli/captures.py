"""What the commands that judge a capture have in common: reading it, a console for their text, and their pages."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specscope.cli.streams import say
from specscope.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from specscope.trace.history import History
    from specscope.trace.reading import CaptureReader


def read_branch(file: str, branch: int | None) -> CaptureReader:
    """A whole capture, its history at the end of a branch; of the last where it is None. Raises UserError."""
    from specscope.trace.reading import read_capture

    reader = read_capture(file)
    gc.freeze()  # what was read stays until the command ends: no later search for cycles looks at it
    if branch is not None:
        if branch not in reader.history.branches:
            known = ", ".join(map(str, reader.history.branches))
            raise UserError(f"--branch {branch}: the run has no such branch; there are: {known}")
        reader.history.show(branch)
    return reader


def need_steps(history: History, file: str, what: str = "judged") -> None:
    """Refuse a capture of sums over intervals: it has no step of a request. Raises UserError."""
    if history.counts_only:
        sources = {step.aggregate.source for step in history.steps if step.aggregate is not None}
        raise UserError(
            f"{file} cannot be {what}: the capture holds counts only ({', '.join(sorted(sources))} reports no trees); "
            "use replay, report or compare"
        )


@contextmanager
def reading_bar(what: str) -> Iterator[Callable[[float], None] | None]:
    """A bar of the reading, where somebody looks, else None. It is given how much has been read, 0 to 1."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def print_json(value: Any) -> None:  # noqa: ANN401
    """A result's plain values on standard output: as bytes, for a locale may not know all characters."""
    import click
    import orjson

    data = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    click.echo(data if hasattr(sys.stdout, "buffer") else data.decode())


def write_page(path: str, html: str) -> None:
    """Write a page. Raises UserError."""
    try:
        Path(path).write_bytes(html.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    say(f"wrote {path}")


def text_console() -> Console:
    """A console on standard output that leaves a closed pipe to `main`."""
    from rich.console import Console

    class Pipe(Console):
        """Such a one."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Pipe()
