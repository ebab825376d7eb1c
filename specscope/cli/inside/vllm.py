"""`specscope vllm`: vLLM's own command line with the plugin on, and the screen beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specscope.cli.help import verb
from specscope.cli.inside.program import (
    end,
    interpreter,
    program_words,
    recorded_options,
    recorded_variables,
    run_with_screen,
    with_variables,
)
from specscope.cli.options import flag
from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime
from specscope.remote.debug_socket import check_socket
from specscope.trace.inside import settings

STEP_SECONDS = 7200  # for a worker's answer, where a debugger may hold it; vLLM's default is 300
CHECK = """
from importlib.util import find_spec
raise SystemExit(1 if not find_spec("vllm") else 0 if find_spec("specscope") else 2)
"""
NO_VLLM = "vLLM is not installed for {path}: {where}install it: {path} -m pip install vllm"
NO_PLUGIN = "the plugin is not installed for {path}: from a clone of specscope, {path} -m pip install ."


@verb(context_settings={"ignore_unknown_options": True})
@recorded_options("vLLM", capture="Each data-parallel rank gets its own. ")
@flag("--debug SOCKET", "Unix socket for specscope debug SOCKET.", envvar=settings.DEBUG)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, callback=program_words, metavar="-- ARGS")
@click.pass_obj
def vllm(lifetime: Lifetime, /, arguments: tuple[str, ...], *, screen: bool, **flags: Any) -> None:  # noqa: ANN401
    """Run a vLLM command line and record every step of its speculation.

    \b
      specscope vllm --screen -- serve MODEL --speculative-config '{...}'
      specscope vllm --capture run.jsonl -- serve MODEL ...      then: specscope why run.jsonl

    specscope must be installed in vLLM's environment: from a clone, pip install . there.
    """
    debug, python, given = flags.pop("debug"), flags.pop("python"), recorded_variables(flags, screen=screen)
    if not arguments:
        raise UserError("nothing to run: give vLLM's command line after --, as in: specscope vllm -- serve MODEL")
    if not (given[settings.CAPTURE] or given[settings.ENDPOINT] or debug or screen):
        raise UserError("nothing to record to: give --capture FILE, --screen, --otlp-endpoint URL or --debug SOCKET")
    if debug is not None:
        check_socket(debug, "--debug")
        given[settings.DEBUG] = str(Path(debug).resolve())
    where = "" if python else "give --python PATH of an environment that has it, or "
    path = interpreter(python, CHECK, NO_VLLM.format(where=where, path="{path}"), NO_PLUGIN)
    command = [path, "-P", "-m", "specscope.vllm.launch", *arguments]
    if screen:
        instead = "specscope vllm --capture FILE -- ..."
        sys.exit(run_with_screen(command, environment(given), lifetime, name="vLLM", instead=instead))
    process = subprocess.Popen(command, env=environment(given), start_new_session=True)
    lifetime.leave = lambda: end(process)
    sys.exit(_wait(process))


def environment(given: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the plugin's settings: vLLM's processes inherit it, Ray copies what is named."""
    variables = with_variables(given)
    if given.get(settings.DEBUG) is not None:
        variables.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(STEP_SECONDS))
    ray = [variables.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"), *given]
    return variables | {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(filter(None, ray))}


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for vLLM's exit code. It has a session of its own: signals are passed on to all of its processes, once."""

    def pass_on(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with handled_by(pass_on):
        return process.wait()
