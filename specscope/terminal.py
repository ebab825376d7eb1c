"""Where text goes: to a terminal as wide as that is, or down a pipe, where no line is wrapped and no cell is cut."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

UNBOUNDED = 100_000  # columns of a pipe: more than any line has


def text_console(*, error: bool = False, quiet: bool = False) -> Console:
    """A console on standard output, which leaves a closed pipe to `main`, or on standard error.

    Whatever it prints is printable, and none of it is markup: captures, pages, sockets and models write some of it.
    """
    from rich.console import Console

    from specscope.trace.record.vocabulary import printable

    class Plain(Console):
        """Such a one."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            """Its segments; those that move the cursor are rich's own."""
            for segment in super().render(renderable, options):
                text = segment.text
                plain = segment.control or text.isprintable() or text == "\n"
                yield segment if plain else segment._replace(text=printable(text, keep="\n"))

    width = None if error or sys.stdout.isatty() else UNBOUNDED
    return Plain(stderr=error, quiet=quiet, width=width, markup=False)
