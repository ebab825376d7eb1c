"""Standard input, output and error: any of them may be closed, full, or read by a process that has ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

import click

from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable


class OutputError(OSError):
    """Standard output cannot be written: the disk is full, or it is closed."""


class _Output(FileIO):
    """Standard output, with errors that can be distinguished from those of files."""

    def write(self, data: Any) -> int:  # noqa: ANN401
        """Write. Raises BrokenPipeError where the reader has closed the pipe, else OutputError."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from None


class _Error(FileIO):
    """Standard error that never fails: no run ends because a message cannot be written."""

    def write(self, data: Any) -> int:  # noqa: ANN401
        with suppress(OSError):
            return super().write(data) or 0
        return len(data)


def open_streams() -> None:
    """Make all three usable. Called first: otherwise the next file opened would get a closed stream's number.

    A closed input reads as empty, a closed standard error drops what is written, and a closed output raises.
    """
    for number, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            _replace(number, mode)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, TextIOWrapper):
        buffer = BufferedWriter(_Output(1, "w", closefd=False))
        sys.stdout = TextIOWrapper(buffer, sys.stdout.encoding, "backslashreplace", line_buffering=os.isatty(1))
    if isinstance(sys.stderr, TextIOWrapper):
        error = BufferedWriter(_Error(2, "w", closefd=False))
        sys.stderr = TextIOWrapper(error, sys.stderr.encoding, "backslashreplace", line_buffering=True)


def _replace(number: int, mode: int) -> None:
    """Replace a stream by os.devnull."""
    nowhere = os.open(os.devnull, mode)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def need_terminal(instead: str) -> None:
    """Refuse to draw a screen where there is no terminal. Raises UserError. `instead`: what works without one.

    Textual draws on standard error, so that standard output may be a pipe.
    """
    if not os.isatty(2):
        raise UserError(f"the screen needs a terminal; without one use {instead}")
    if not os.isatty(0):  # a pipe, which is read: keys come from the terminal itself
        with suppress(OSError):
            sys.__stdin__ = open("/dev/tty", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115


def flush_output() -> None:
    """Write what is left of standard output. Raises OutputError or BrokenPipeError where that is not possible."""
    if not sys.stdout.closed:
        sys.stdout.flush()


def give_up_output() -> None:
    """Drop what is left of standard output, so that the interpreter does not try again when it ends."""
    if isinstance(sys.stdout, TextIOWrapper):
        _replace(1, os.O_WRONLY)


def show(text: str, *, error: bool = False) -> None:
    """Print lines on standard output, or error, without control characters: parts may be from captures or sockets."""
    click.echo(printable(text, keep="\n\t"), err=error)


def warn(*texts: str) -> None:
    for text in texts:
        say(f"specscope: warning: {text}")


def say(text: str) -> None:
    """Print one line on standard error, shortened and without control characters."""
    line = printable(" ".join(text.split()))
    print(line if len(line) <= 600 else line[:599] + "…", file=sys.stderr, flush=True)
