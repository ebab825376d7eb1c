"""`specscope vllm`: vLLM's own command line with the plugin on, and the screen beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from specscope.cli.help import verb
from specscope.cli.inside.flags import (
    check_places,
    program_words,
    recorded_options,
    recorded_variables,
    with_variables,
)
from specscope.cli.inside.program import end, interpreter, run_with_screen
from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime, watched
from specscope.remote.debug_socket import check_socket
from specscope.trace.inside import settings

STEP_SECONDS = 7200  # for a worker's answer, where a debugger may hold it; vLLM's default is 300
CHECK = """
from importlib.util import find_spec
raise SystemExit(1 if not find_spec("vllm") else 0 if find_spec("specscope") else 2)
"""
NO_VLLM = "vLLM is not installed for {path}: {where}install it: {path} -m pip install vllm"
NO_PLUGIN = "the plugin is not installed for {path}: from a clone of specscope, {path} -m pip install ."


@dataclass(frozen=True)
class VllmRun:
    """What the flags ask for."""

    python: str | None
    arguments: Sequence[str]
    capture: str | None
    endpoint: str | None
    debug: str | None
    screen: bool
    given: Mapping[str, str | None]  # the plugin's settings, as variables


@verb(context_settings={"ignore_unknown_options": True})
@recorded_options("vLLM", capture="Each data-parallel rank gets its own. ")
@click.option("--debug", metavar="SOCKET", envvar=settings.DEBUG, help="Unix socket for specscope debug SOCKET.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, callback=program_words, metavar="-- ARGS")
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
    """Run a vLLM command line and record every step of its speculation.

    \b
      specscope vllm --screen -- serve MODEL --speculative-config '{...}'

    specscope must be installed in vLLM's environment: from a clone, pip install . there.
    """
    given = recorded_variables(flags, capture, otlp_endpoint, evidence, screen=screen)
    run = VllmRun(python, arguments, capture, otlp_endpoint, debug, screen, given)
    with watched() as lifetime:
        sys.exit(run_vllm(run, lifetime))


def run_vllm(run: VllmRun, lifetime: Lifetime) -> int:
    """Run vLLM; returns its exit code. Raises UserError."""
    if not run.arguments:
        raise UserError("nothing to run: give vLLM's command line after --, as in: specscope vllm -- serve MODEL")
    if not (run.capture or run.endpoint or run.debug or run.screen):
        raise UserError("nothing to record to: give --capture FILE, --screen, --otlp-endpoint URL or --debug SOCKET")
    check_places(run.capture, run.endpoint or None, screen=run.screen)
    if run.debug is not None:
        check_socket(run.debug, "--debug")
    where = "" if run.python else "give --python PATH of an environment that has it, or "
    python = interpreter(run.python, CHECK, NO_VLLM.format(where=where, path="{path}"), NO_PLUGIN)
    command = [python, "-P", "-m", "specscope.vllm.launch", *run.arguments]
    if run.screen:
        variables = partial(environment, run)
        return run_with_screen(
            command, variables, lifetime, name="vLLM", instead="specscope vllm --capture FILE -- ..."
        )
    process = subprocess.Popen(command, env=environment(run), start_new_session=True)
    lifetime.leave = lambda: end(process)
    return _wait(process)


def environment(run: VllmRun, endpoint: str | None = None) -> dict[str, str]:
    """This process's environment with the plugin's settings: vLLM's processes inherit it, Ray copies what is named."""
    given = {
        **run.given,
        settings.ENDPOINT: endpoint or run.endpoint,
        settings.DEBUG: None if run.debug is None else str(Path(run.debug).resolve()),
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
