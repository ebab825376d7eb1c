"""Somebody else's program that is recorded: its flags, variables and interpreter, and the screen over it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from specscope.cli.options import (
    apply,
    asked_privacy,
    asked_ratio,
    checked_endpoint,
    flag,
    from_flag,
    privacy_options,
    sample_option,
    service_option,
    trace_level_option,
)
from specscope.cli.streams import need_terminal, show
from specscope.errors import UserError
from specscope.gone import GONE, refuse_gone
from specscope.interrupt import ends_at_once, handled_by
from specscope.lifetime import Lifetime
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.inside import settings
from specscope.trace.record.privacy import Privacy

GRACE_SECONDS = 20  # for a program to end its own processes
PRINTED = 12  # lines of its output, where it failed


def recorded_options(program: str, *, capture: str) -> Callable[[Any], Any]:
    """Flags that say what is recorded and where it goes. `capture`: more on its flag, as help."""
    options: list[Callable[[Any], Any]] = [
        flag(
            "--capture FILE",
            f"Write a capture of the run. {capture}If it exists, the capture gets another name: run.2.jsonl for "
            "run.jsonl.",
            envvar=settings.CAPTURE,
        ),
        flag("--screen", f"Show the run live in this terminal. The output of {program} goes to a file."),
        flag("--otlp-endpoint URL", "Send spans to this URL."),
        service_option,
        trace_level_option,
        flag("--python PATH", f"The Python to run {program} with.  [default: this one]"),
        flag(
            "--evidence",
            "lean: no likeliest tokens, ranks or entropies.",
            click.Choice(settings.EVIDENCES),
            default="full",
            show_default=False,
        ),
        privacy_options,
        sample_option,
    ]
    return partial(apply, options)


def program_words(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own words, first among them what click took for no flag of ours. Raises UserError."""
    if words and words[0].startswith("-"):
        refuse_gone(words[0])
    return words


def recorded_variables(flags: dict[str, Any], *, screen: bool, inputs: Sequence[str] = ()) -> dict[str, str | None]:
    """What is recorded and where it goes, as variables: takes these flags out of `flags`.

    `inputs`: files that the capture must not be. Raises UserError.
    """
    capture, endpoint = flags.pop("capture"), flags.pop("otlp_endpoint") or None
    if screen and endpoint is not None and from_flag("otlp_endpoint"):
        raise UserError("--screen receives the spans: leave out --otlp-endpoint, or use watch --listen")
    if capture is not None:
        check_output(capture, "--capture", inputs, CAPTURE, Existing.NEW_NAME)
    asked_ratio(flags["ratio"], sent=screen or endpoint is not None)
    privacy = asked_privacy(flags)
    return {
        settings.CAPTURE: None if capture is None else str(Path(capture).resolve()),
        settings.ENDPOINT: None if endpoint is None else checked_endpoint(endpoint, "--otlp-endpoint"),
        settings.EVIDENCE: flags.pop("evidence"),
        "OTEL_SERVICE_NAME": flags.pop("service_name"),  # of the program's own spans, too
        settings.LEVEL: flags.pop("trace_level"),
        settings.SAMPLE: flags.pop("ratio"),
        settings.NO_TEXT: "1" if privacy >= Privacy.NO_TEXT else None,
        settings.NO_TOKENS: "1" if privacy >= Privacy.NO_TOKENS else None,
    }


def with_variables(given: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the variables given."""
    variables = {name: value for name, value in os.environ.items() if name not in (*given, *GONE)}
    return variables | {name: value for name, value in given.items() if value is not None}


def interpreter(python: str | None, check: str, *missing: str) -> str:
    """The Python that a program runs with: `python`, or ours. Raises UserError.

    `check`: code whose exit code is 0, or the number, from 1 on, of what is missing; `missing` says how to install it.
    """
    path = shutil.which(python or sys.executable)
    if path is None:
        raise UserError(f"--python {python}: there is no such program")
    try:
        code = subprocess.run([path, "-P", "-c", check], capture_output=True, timeout=60, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--python {path}: it cannot be run ({error})") from None
    if 0 < code <= len(missing):
        raise UserError(missing[code - 1].format(path=path))
    if code:
        raise UserError(f"--python {path}: it is not Python, or it is broken")
    return path


def run_with_screen(
    command: Sequence[str],
    environment: Mapping[str, str],
    lifetime: Lifetime,
    *,
    name: str,
    instead: str,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run a program with its output in a file, and the screen until the user leaves; its exit code.

    0 where it was ended from here: it ends with the screen. `environment`: its variables but for the endpoint that it
    sends to. `instead`: what works without a terminal. `grace`: seconds that it has to end. Raises UserError.
    """
    from specscope.remote.attached import LaunchedEngine, last_lines

    need_terminal(instead)
    with tempfile.NamedTemporaryFile(prefix="specscope-", suffix=".log", delete=False) as log, ends_at_once():
        from specscope.tui.app import run_app

        launched = LaunchedEngine(name)
        process = subprocess.Popen(
            command,
            env={**environment, settings.ENDPOINT: f"http://127.0.0.1:{launched.listening.grpc_port}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    launched.follow(process, Path(log.name))
    lifetime.leave = lambda: end(process)
    try:
        run_app(launched.on_screen(), lifetime, title=f"{name} · its output: {log.name}")
    finally:
        by_itself = process.poll() is not None
        end(process, grace)
        launched.close()
    code = 0 if process.returncode in (0, -signal.SIGINT, 128 + signal.SIGINT) else process.returncode
    if code and by_itself:
        show("\n".join(last_lines(Path(log.name), PRINTED)), error=True)
    print(f"the output of {name} is in {log.name}")
    return code if code >= 0 else 128 - code


def end(process: subprocess.Popen[bytes], grace: float = GRACE_SECONDS) -> None:
    """End a program, which leads a session, as Ctrl-C does; another Ctrl-C hurries it. Kill it where it stays."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with handled_by(lambda _: os.killpg(process.pid, signal.SIGINT)):
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
