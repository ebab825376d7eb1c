"""The screen over a program that was started for it: what it sends, what it prints, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from specscope.cli.streams import need_terminal
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.remote.attached import Attached

GRACE_SECONDS = 20  # for a program to end its own processes
TAIL_BYTES = 4096  # of what it printed, where its last line is looked for
OURS = "specscope: "  # how the lines begin that are ours


class Started(Attached):
    """Receives from one program. `name`: as people know it; `log`: the file that it prints to."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__("127.0.0.1", 0, 0)
        self.name, self.log = name, log
        self.child: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    @property
    def endpoint(self) -> str:
        """Where the program sends its spans."""
        return f"http://127.0.0.1:{self.listening.grpc_port}"

    @property
    def status(self) -> str:
        """`ended` when the program has."""
        self._look()
        return "ended" if self._code is not None else super().status

    @property
    def progress(self) -> tuple[str, float | None, float | None]:
        """The last line that it printed, until it sends something."""
        return last_line(self.log) or f"{self.name} has not printed anything yet", None, None

    def _look(self) -> None:
        """Whether the program has ended, and what is to be said of it."""
        if self._code is not None or self.child is None or self.child.poll() is None:
            return
        self._code = self.child.returncode
        how = how_ended(self._code) if self._code else "nothing sent" if not self.runs else ""
        if how:
            line = last_line(self.log, ours=not self._code)
            self.error = f"{self.name}, {how}" + (f": {line}" if line else "")


def how_ended(code: int) -> str:
    """An exit code as subprocess has it, in words."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_line(log: Path, *, ours: bool = False) -> str:
    """What a program printed last; `ours`: what specscope printed there. "" where there is nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((line for line in reversed(lines) if line.startswith(OURS) is ours), "")
    return line.removeprefix(OURS)


def run_with_screen(
    command: Sequence[str],
    environment: Callable[[str], Mapping[str, str]],
    lifetime: Lifetime,
    *,
    name: str,
    instead: str,
) -> int:
    """Run a program with its output in a file, and the screen until the user leaves; its exit code.

    0 where it was ended from here: it ends with the screen. `environment`: its variables, of the endpoint that it is
    to send to. `instead`: what works without a terminal. Raises UserError.
    """
    from specscope.debug.viewer import Viewer

    need_terminal(instead)
    with tempfile.NamedTemporaryFile(prefix="specscope-", suffix=".log", delete=False) as log, ends_at_once():
        from specscope.tui.app import run_app

        attached = Started(name, Path(log.name))
        viewer = Viewer(control=attached)
        attached.viewer = viewer
        process = attached.child = subprocess.Popen(
            command,
            env=environment(attached.endpoint),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    lifetime.leave = lambda: end(process)
    try:
        run_app(viewer, lifetime, title=f"{name} · its output: {attached.log}")
    finally:
        end(process)
        attached.close()
    print(f"the output of {name} is in {attached.log}")
    code = process.returncode
    return 0 if code in (0, -signal.SIGINT, 128 + signal.SIGINT) else code if code > 0 else 128 - code


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program, which leads a session, as Ctrl-C does, and kill it where that does not help."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
