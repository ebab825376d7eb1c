"""`specscope vllm` and `transformers`: somebody else's program, recorded: its flags, variables and screen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from specscope.cli import options
from specscope.cli.help import verb
from specscope.cli.options import flag
from specscope.cli.streams import need_terminal, show
from specscope.errors import UserError
from specscope.gone import GONE, refuse_gone
from specscope.interrupt import ends_at_once, handled_by
from specscope.lifetime import Lifetime
from specscope.remote.debug_socket import check_socket
from specscope.trace.files import CAPTURE, Existing, check_output
from specscope.trace.inside import settings
from specscope.trace.record.privacy import Privacy

GRACE_SECONDS = 20  # for a program to end its own processes
PRINTED = 12  # lines of its output, where it failed
DEFAULT = "run.jsonl"  # the capture of a script, where nothing says where records go
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
STEP_SECONDS = 7200  # for a vLLM worker's answer, where a debugger may hold it; vLLM's default is 300
RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
# Code that exits with 0, or the number, from 1 on, of what is missing
HAS_TRANSFORMERS = """
from importlib.metadata import entry_points
from importlib.util import find_spec
there = any(point.value.startswith("specscope.") for point in entry_points(group="torch.backends"))
raise SystemExit(1 if not find_spec("transformers") else 0 if there else 2)
"""
HAS_VLLM = """
from importlib.util import find_spec
raise SystemExit(1 if not find_spec("vllm") else 0 if find_spec("specscope") else 2)
"""
NO_TRANSFORMERS = "transformers is not installed for {path}: {path} -m pip install transformers torch"
NO_SPECSCOPE = "specscope is not installed for {path}, or too old: {path} -m pip install specscope"
NO_VLLM = "vLLM is not installed for {path}: {where}install it: {path} -m pip install vllm"
NO_PLUGIN = "the plugin is not installed for {path}: from a clone of specscope, {path} -m pip install ."


def recorded_options(program: str, *, capture: str) -> Callable[[Any], Any]:
    """Flags that say what is recorded and where it goes. `capture`: more on its flag, as help."""
    renamed = "If it exists, the capture gets another name: run.2.jsonl for run.jsonl."
    evidence = flag(
        "--evidence",
        "lean: no likeliest tokens, ranks or entropies.",
        click.Choice(settings.EVIDENCES),
        default="full",
        show_default=False,
        envvar=settings.EVIDENCE,
    )
    flags: list[Callable[[Any], Any]] = [
        flag("--capture FILE", f"Write a capture of the run. {capture}{renamed}", envvar=settings.CAPTURE),
        flag("--screen", f"Show the run live in this terminal. The output of {program} goes to a file."),
        options.endpoint_option,
        options.service_option,
        options.trace_level_option,
        flag("--python PATH", f"The Python to run {program} with.  [default: this one]"),
        evidence,
        options.privacy_options,
        options.sample_option,
    ]
    return partial(options.apply, flags)


def program_words(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """The program's own words, first among them what click took for no flag of ours. Raises UserError."""
    if words and words[0].startswith("-"):
        refuse_gone(words[0])
    return words


_words = partial(click.argument, "arguments", nargs=-1, type=click.UNPROCESSED, callback=program_words)


@verb(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@recorded_options("the script", capture=f"Without a flag that says where records go it is {DEFAULT}. ")
@_words(required=True, metavar="SCRIPT [ARGS]...")
@click.pass_obj
def transformers(lifetime: Lifetime, /, arguments: tuple[str, ...], *, screen: bool, **flags: Any) -> None:  # noqa: ANN401
    """Run your script and record its assisted generation in transformers.

    \b
      specscope transformers script.py
      specscope transformers --screen script.py

    The script's flags follow it. It runs like `python script.py` with variables set, such as
    SPECSCOPE_CAPTURE=run.jsonl; you can also set them yourself. The capture is valid however the script ends.
    """
    if flags["capture"] is None and flags["otlp_endpoint"] is None and not screen:
        flags["capture"] = DEFAULT
    variables = script_environment(recorded_variables(flags, screen=screen, inputs=arguments[:1]))
    if arguments[0].startswith("-") and Path(arguments[0]).is_file():  # a script, and no option of Python
        arguments = (f"./{arguments[0]}", *arguments[1:])
    command = [interpreter(flags.pop("python"), HAS_TRANSFORMERS, NO_TRANSFORMERS, NO_SPECSCOPE), *arguments]
    if os.environ.get(AUTOLOAD, "1") != "1":
        raise UserError(f"{AUTOLOAD} is {os.environ[AUTOLOAD]}: torch would not call specscope; unset it")
    if screen:
        instead, unbuffered = "specscope transformers --capture FILE SCRIPT", variables | {"PYTHONUNBUFFERED": "1"}
        sys.exit(run_with_screen(command, unbuffered, lifetime, name=name_of(arguments), instead=instead))
    sys.stdout.flush()
    os.execve(command[0], command, variables)  # this process: signals and the exit code are the script's own


def script_environment(given: Mapping[str, str | None]) -> dict[str, str]:
    variables = with_variables(given)
    if not sys.flags.safe_path:
        variables.pop("PYTHONSAFEPATH", None)  # __main__.py sets it; a script finds the modules beside it
    return variables


def name_of(arguments: Sequence[str]) -> str:
    """What is run, as people know it."""
    words = [word for word in arguments if not word.startswith("-")]
    return Path(words[0]).name if words else "python"


@verb(context_settings={"ignore_unknown_options": True})
@recorded_options("vLLM", capture="Each data-parallel rank gets its own. ")
@flag("--debug SOCKET", "Unix socket for specscope debug SOCKET.", envvar=settings.DEBUG)
@_words(metavar="-- ARGS")
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
    path = interpreter(python, HAS_VLLM, NO_VLLM.format(where=where, path="{path}"), NO_PLUGIN)
    command, variables = [path, "-P", "-m", "specscope.vllm.launch", *arguments], vllm_environment(given)
    if screen:
        instead = "specscope vllm --capture FILE -- ..."
        sys.exit(run_with_screen(command, variables, lifetime, name="vLLM", instead=instead))
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    lifetime.leave = lambda: end(process)

    def pass_on(number: signal.Signals) -> None:  # to all of its processes, once: it has a session of its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with handled_by(pass_on):
        sys.exit(process.wait())


def vllm_environment(given: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the plugin's settings: vLLM's processes inherit it, Ray copies what is named."""
    variables = with_variables(given)
    if given.get(settings.DEBUG) is not None:
        variables.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(STEP_SECONDS))
    return variables | {RAY: ",".join(filter(None, (variables.get(RAY), *given)))}


def recorded_variables(flags: dict[str, Any], *, screen: bool, inputs: Sequence[str] = ()) -> dict[str, str | None]:
    """What is recorded and where it goes, as variables: takes these flags out of `flags`.

    `inputs`: files that the capture must not be. Raises UserError.
    """
    capture, endpoint = flags.pop("capture"), flags.pop("otlp_endpoint") or None
    if screen and endpoint is not None and options.from_flag("otlp_endpoint"):
        raise UserError("--screen receives the spans: leave out --otlp-endpoint, or use watch --listen")
    if capture is not None:
        check_output(capture, "--capture", inputs, CAPTURE, Existing.NEW_NAME)
    options.asked_ratio(flags["ratio"], sent=screen or endpoint is not None)
    privacy = options.asked_privacy(flags)
    return {
        settings.CAPTURE: None if capture is None else str(Path(capture).resolve()),
        settings.ENDPOINT: None if endpoint is None else options.checked_endpoint(endpoint, "--otlp-endpoint"),
        settings.EVIDENCE: flags.pop("evidence"),
        "OTEL_SERVICE_NAME": flags.pop("service_name"),  # of the program's own spans, too
        settings.LEVEL: flags.pop("trace_level"),
        settings.SAMPLE: flags.pop("ratio"),
        settings.NO_TEXT: "1" if privacy >= Privacy.NO_TEXT else None,
        settings.NO_TOKENS: "1" if privacy >= Privacy.NO_TOKENS else None,
    }


def with_variables(given: Mapping[str, str | None]) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in (*given, *GONE)}
    return variables | {name: value for name, value in given.items() if value is not None}


def interpreter(python: str | None, check: str, *missing: str) -> str:
    """The Python that a program runs with: `python`, or ours, which has all that `check` asks for. Raises UserError."""
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
        variables = {**environment, settings.ENDPOINT: f"http://127.0.0.1:{launched.listening.grpc_port}"}
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(
            command, env=variables, stdin=nothing, stdout=log, stderr=log, start_new_session=True
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
