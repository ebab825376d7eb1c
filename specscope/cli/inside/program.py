"""A program of the user's own that is recorded: its interpreter, and the screen over it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specscope.cli.streams import need_terminal, show
from specscope.errors import UserError
from specscope.interrupt import ends_at_once, handled_by
from specscope.lifetime import Lifetime

GRACE_SECONDS = 20  # for a program to end its own processes
PRINTED = 12  # lines of its output, where it failed


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
    environment: Callable[[str], Mapping[str, str]],
    lifetime: Lifetime,
    *,
    name: str,
    instead: str,
    grace: float = GRACE_SECONDS,
) -> int:
    """Run a program with its output in a file, and the screen until the user leaves; its exit code.

    0 where it was ended from here: it ends with the screen. `environment`: its variables, of the endpoint that it is
    to send to. `instead`: what works without a terminal. `grace`: seconds that it has to end. Raises UserError.
    """
    from specscope.remote.attached import LaunchedEngine, last_lines

    need_terminal(instead)
    with tempfile.NamedTemporaryFile(prefix="specscope-", suffix=".log", delete=False) as log, ends_at_once():
        from specscope.tui.app import run_app

        launched = LaunchedEngine(name)
        process = subprocess.Popen(
            command,
            env=environment(f"http://127.0.0.1:{launched.listening.grpc_port}"),
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
