"""`specscope vllm`: vLLM's own command line with the plugin on, and the screen beside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from specscope.cli.inside.flags import privacy_variables, recorded_options, sampling_variables, with_variables
from specscope.cli.options import asked_privacy
from specscope.cli.streams import need_terminal
from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime, watched
from specscope.remote.debug_server import check_socket
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.inside import settings
from specscope.trace.record.privacy import Privacy

STEP_SECONDS = 7200  # for a worker's answer, where a debugger may hold it; vLLM's default is 300
GRACE_SECONDS = 20  # for vLLM to end its own processes
PRINTED = 12  # lines of its log, where it failed
CHECK = """
from importlib.util import find_spec
raise SystemExit(1 if not find_spec("vllm") else 0 if find_spec("specscope") else 2)
"""


@dataclass(frozen=True)
class VllmRun:
    """What the flags ask for."""

    python: str | None
    arguments: Sequence[str]
    capture: str | None
    endpoint: str | None
    debug: str | None
    screen: bool
    evidence: str  # full, lean or counts
    privacy: Privacy
    sampling: Mapping[str, str | None] = field(default_factory=dict)  # variables of trace sampling, and others


@click.command(context_settings={"ignore_unknown_options": True})
@recorded_options("vLLM", capture="Each data-parallel rank gets its own. ", evidence=["full", "lean", "counts"])
@click.option("--debug", metavar="SOCKET", help="Accept the debugger's commands on this Unix socket.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- ARGS")
def vllm(
    capture: str | None,
    otlp_endpoint: str | None,
    debug: str | None,
    python: str | None,
    evidence: str,
    arguments: tuple[str, ...],
    *,
    screen: bool,
    **flags: Any,  # noqa: ANN401
) -> None:
    """Run vLLM's own command line, and record every step of its speculation.

    \b
      specscope vllm --screen -- serve MODEL --speculative-config '{...}'

    specscope must be installed in vLLM's environment: pip install 'specscope[vllm]'.
    """
    given = sampling_variables(flags, capture=capture is not None, sent=screen or otlp_endpoint is not None)
    run = VllmRun(python, arguments, capture, otlp_endpoint, debug, screen, evidence, asked_privacy(flags), given)
    with watched() as lifetime:
        sys.exit(run_vllm(run, lifetime))


def run_vllm(run: VllmRun, lifetime: Lifetime) -> int:
    """Run vLLM; returns its exit code. Raises UserError."""
    if not run.arguments:
        raise UserError("nothing to run: give vLLM's command line after --, as in: specscope vllm -- serve MODEL")
    if not (run.capture or run.endpoint or run.debug or run.screen):
        raise UserError("nothing to record to: give --capture FILE, --screen, --otlp-endpoint URL or --debug SOCKET")
    if run.screen and run.endpoint:
        raise UserError("--screen has its own listener: give it without --otlp-endpoint, or use specscope tui --listen")
    if run.capture is not None:
        check_output(run.capture, "--capture", (), CAPTURE, Existing.NEW_NAME)
    if run.debug is not None:
        check_socket(run.debug, "--debug")
    python = interpreter(run.python)
    command = [python, "-P", "-m", "specscope.vllm.launch", *run.arguments]
    if run.screen:
        return _with_screen(run, command, lifetime)
    process = subprocess.Popen(command, env=environment(run), start_new_session=True)
    lifetime.leave = lambda: _end(process)
    return _wait(process)


def interpreter(python: str | None) -> str:
    """The Python that has vLLM and the plugin. Raises UserError that says how to install what is missing."""
    path = shutil.which(python or sys.executable)
    if path is None:
        raise UserError(f"--python {python}: no such program")
    try:
        missing = subprocess.run([path, "-P", "-c", CHECK], capture_output=True, timeout=60, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--python {path}: it cannot be run ({error})") from None
    if missing == 1:
        where = "give --python PATH of an environment that has it, or install it" if python is None else "install it"
        raise UserError(f"vLLM is not installed for {path}: {where}: {path} -m pip install vllm")
    if missing == 2:
        raise UserError(f"the plugin is not installed for {path}: {path} -m pip install 'specscope[vllm]'")
    if missing:
        raise UserError(f"--python {path}: it is not Python, or is broken")
    return path


def environment(run: VllmRun, endpoint: str | None = None) -> dict[str, str]:
    """This process's environment with the plugin's settings: vLLM's processes inherit it, Ray copies what is named."""
    given = {
        settings.CAPTURE: None if run.capture is None else str(Path(run.capture).resolve()),
        settings.ENDPOINT: endpoint or run.endpoint,
        settings.DEBUG: None if run.debug is None else str(Path(run.debug).resolve()),
        settings.EVIDENCE: run.evidence,
        settings.AGGREGATES: "1" if run.evidence == "counts" else None,
        **privacy_variables(run.privacy),
        **run.sampling,
    }
    variables = with_variables(given)
    if run.debug is not None:
        variables.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(STEP_SECONDS))
    ray = [
        *filter(None, [variables.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY")]),
        *(name for name in given if name in variables),
    ]
    return variables | {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(ray)}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for vLLM's exit code. It has a session of its own: signals are passed on to all of its processes, once."""

    def pass_on(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with handled_by(pass_on):
        return process.wait()


def _with_screen(run: VllmRun, command: Sequence[str], lifetime: Lifetime) -> int:
    """The screen in this terminal; vLLM ends with it."""
    from specscope.debug.viewer import Viewer
    from specscope.interrupt import ends_at_once
    from specscope.remote.launched import LaunchedEngine, last_lines

    need_terminal("specscope vllm --capture FILE -- ...")
    with ends_at_once():
        from specscope.tui.app import run_app

        launched = LaunchedEngine("vLLM")
    viewer = Viewer(control=launched)
    launched.viewer = viewer
    with tempfile.NamedTemporaryFile(prefix="specscope-vllm-", suffix=".log", delete=False) as log:
        endpoint = f"http://127.0.0.1:{launched.listening.grpc_port}"
        process = subprocess.Popen(
            command, env=environment(run, endpoint), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    launched.follow(process, Path(log.name))
    lifetime.leave = lambda: _end(process)
    try:
        run_app(viewer, lifetime, title=f"vLLM · its output: {log.name}")
    finally:
        by_itself = process.poll() is not None
        _end(process)
        launched.close()
    code = 0 if process.returncode in (0, -signal.SIGINT, 128 + signal.SIGINT) else process.returncode
    if code and by_itself:
        print(*last_lines(Path(log.name), PRINTED), sep="\n", file=sys.stderr)
    print(f"vLLM's output is in {log.name}")
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End vLLM as Ctrl-C does, and kill it where that does not help."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
