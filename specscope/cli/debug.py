"""`specscope debug`: the debugger as a console, over a live engine or a capture, typed or from a script."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import click

from specscope.analyze.why import Typical
from specscope.cli.arguments import DEBUGGED, X_RULE, What
from specscope.cli.captures import read_shown, source_options, tell_failed
from specscope.cli.help import verb
from specscope.cli.options import (
    engine_config,
    engine_options,
    file_option,
    flag,
    read_specs,
    refuse_others,
    sampling_options,
    sampling_params,
)
from specscope.cli.streams import say, show
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.interrupt import interruptible
from specscope.remote.debug_socket import AttachedCommands
from specscope.trace.files import read_lines
from specscope.trace.history.wording import plural
from specscope.trace.wire.reading import split_reference

PROMPT = "(specscope) "
LARGEST_SCRIPT = 2**20  # bytes
LONGEST_LINE = 10_000  # characters


@verb(epilog=X_RULE)
@click.argument("given", nargs=-1, metavar="X...", type=DEBUGGED)
@file_option
@flag("--commands,script FILE", "Run the commands in FILE, then exit. Standard input is -.")
@engine_options
@sampling_options
@source_options
def debug(given: tuple[str, ...], file: str | None, script: str | None, **flags: Any) -> None:  # noqa: ANN401
    """Debug prompts on a live engine, a capture, or a running engine.

    \b
      specscope debug "Why is the sky blue?"
      specscope debug run.jsonl#r3@17           a capture, from that step on
      specscope debug debug.sock                the socket of specscope serve --debug-socket or vllm --debug

    Set breakpoints, step forward and back, try other outcomes. The run starts paused before step 0. Try
    `break reject if p > 0.2`, then `continue`; `help` lists all commands. A script (--commands) runs to its end; the
    exit code is 2 if a command failed.
    """
    config = engine_config(flags)
    params, how = sampling_params(flags)
    whole = next((x for x in given if What.of(x) in (What.SOCKET, What.RECORDING)), None)
    if whole is not None:
        is_socket = What.of(whole) is What.SOCKET
        if len(given) > 1 or file is not None:
            raise UserError(f"{whole} is {'a socket' if is_socket else 'a capture'}, so debug takes no prompts with it")
        others = {"given", "script", "headers", "run"}
        refuse_others(whole, "is a running engine" if is_socket else "is a capture", others)
    lines = None if script is None else Script.read(script)
    if whole is not None:
        with attached(whole) if is_socket else nullcontext(over_capture(whole)) as commands:
            converse(commands, lines)
        return
    specs = read_specs(given, file, params, how)
    if not specs:
        raise UserError("nothing to debug: give a prompt, --file FILE, a capture or a socket")
    from specscope.live.start import check_places

    check_places(config)
    from specscope.live.local import live_commands

    commands = live_commands(config, specs)
    converse(commands, lines)
    if lines is not None:
        sys.exit(int(tell_failed(commands.session.history)))


@dataclass(frozen=True)
class Script:
    """The commands of a file."""

    path: str
    lines: Sequence[str]

    @staticmethod
    def read(path: str) -> Script:
        """Read all of it before the first command runs and before a model is loaded. Raises UserError."""
        lines = [line for _, line in read_lines(path, "the commands in", largest=LARGEST_SCRIPT)]
        for number, line in enumerate(lines, 1):
            if len(line) > LONGEST_LINE:
                raise UserError(f"{path}, line {number}: the line is too long")
        return Script(path, lines)


def converse(commands: Commands, script: Script | None) -> None:
    """Run typed lines until they end, or those of a script. Raises UserError for a script with refused lines."""
    commands.session.typical = Typical(lambda: commands.session.history)
    if script is not None:
        _run_script(commands, script)
        return
    for line in _lines(commands):
        try:
            _obey(commands, line)
        except UserError as error:
            show(str(error), error=True)
        if commands.quitting:
            return


def _run_script(commands: Commands, script: Script) -> None:
    """Run every line; a refused one is reported at once, and at the end a UserError counts them and names the first."""
    refused: list[int] = []
    for number, line in enumerate(script.lines, 1):
        show(f"{PROMPT}{line}")
        try:
            if line.strip():
                _obey(commands, line)
        except UserError as error:
            say(f"{script.path}, line {number}: {error}")
            refused.append(number)
        if commands.quitting:
            break
    if refused:
        where = f"in line {refused[0]}" if len(refused) == 1 else f"the first in line {refused[0]}"
        raise UserError(f"{script.path}: {plural(len(refused), 'command')} failed, {where}")


def _obey(commands: Commands, line: str) -> None:
    """Run one line and print the answer. Ctrl-C stops a run between two steps."""
    with interruptible() as interrupt:
        commands.session.interrupted = lambda: interrupt.asked
        text = commands.run(line)
    if interrupt.asked and interrupt.number is not signal.SIGINT:
        sys.exit(interrupt.code)
    if text:
        show(text)


def _lines(commands: Commands) -> Iterator[str]:
    """Typed lines, with history and completion where there is a terminal; Ctrl-C drops a line, Ctrl-D ends."""
    _readline(commands)
    while True:
        try:
            yield input(PROMPT)
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

    def complete(text: str, state: int) -> str | None:
        matches = commands.complete(readline.get_line_buffer())
        return matches[state] if state < len(matches) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


@contextmanager
def attached(path: str) -> Iterator[Commands]:
    """The debugger over an engine that listens on a socket; when it ends, the engine runs on. Raises UserError."""
    commands = AttachedCommands(path)
    try:
        show(commands.greeting)
        yield commands
    finally:
        commands.close()


def over_capture(reference: str) -> Commands:
    """The debugger over a recording, FILE, or at a step of one, FILE#REQUEST@STEP. Raises UserError."""
    path, start = split_reference(reference)
    commands = Commands(Session(history=read_shown(path, "debugged").history))
    if start:
        show(commands.run(f"goto {start}"))
    return commands
