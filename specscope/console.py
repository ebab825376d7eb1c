"""`specscope debug`: the debugger as a console, over a live engine or a capture, driven by hand or by a script."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.interrupt import interruptible
from specscope.trace.vocabulary import printable

PROMPT = "(specscope) "


def converse(commands: Commands, script: str | None) -> None:
    """Obey lines until they end or one quits. Of a script the first bad line ends it: UserError names the line."""
    if script is not None:
        for number, line in enumerate(_script(script), 1):
            click.echo(f"{PROMPT}{line}")
            try:
                if line.strip():
                    _obey(commands, line)
            except UserError as error:
                raise UserError(f"{script}, line {number}: {error}") from error
            if commands.quitting:
                return
        return
    for line in _lines(commands):
        try:
            _obey(commands, line)
        except UserError as error:
            click.echo(printable(str(error)), err=True)
        if commands.quitting:
            return


def _obey(commands: Commands, line: str) -> None:
    """Run one line and show what it says. Ctrl-C stops a run between two steps."""
    with interruptible() as interrupt:
        commands.session.interrupted = lambda: interrupt.asked
        text = commands.run(line)
    if text:
        click.echo(text)


def _script(path: str) -> list[str]:
    try:
        return (sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the commands in {path}: {reason}") from error


def _lines(commands: Commands) -> Iterator[str]:
    """Typed lines, with history and completion where there is a terminal; Ctrl-C drops a line, Ctrl-D ends."""
    _readline(commands)
    while True:
        try:
            yield input("> " if commands.reading else PROMPT)
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()


def _readline(commands: Commands) -> None:
    if not sys.stdin.isatty():
        return
    try:
        import readline
    except ImportError:  # not on every system
        return
    found: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            found[:] = commands.complete(readline.get_line_buffer())
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def over_capture(path: str) -> Commands:
    """The debugger over a recording. Raises UserError."""
    from specscope.trace.reading import read_capture

    reader = read_capture(path)
    for warning in reader.warnings:
        click.echo(f"specscope: warning: {warning}", err=True)
    return Commands(Session(history=reader.history))
