"""`specscope transformers`: a script of the user's own, recorded, and the screen beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from specscope.cli.help import verb
from specscope.cli.inside.program import (
    interpreter,
    program_words,
    recorded_options,
    recorded_variables,
    run_with_screen,
    with_variables,
)
from specscope.errors import UserError
from specscope.lifetime import Lifetime

DEFAULT = "run.jsonl"  # the capture, where nothing says where records go
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CHECK = """
from importlib.metadata import entry_points
from importlib.util import find_spec
there = any(point.value.startswith("specscope.") for point in entry_points(group="torch.backends"))
raise SystemExit(1 if not find_spec("transformers") else 0 if there else 2)
"""
MISSING = (
    "transformers is not installed for {path}: {path} -m pip install transformers torch",
    "specscope is not installed for {path}, or too old: {path} -m pip install specscope",
)


@verb(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@recorded_options("the script", capture=f"Without a flag that says where records go it is {DEFAULT}. ")
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, callback=program_words, metavar="SCRIPT [ARGS]..."
)
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
    given = recorded_variables(flags, screen=screen, inputs=arguments[:1])
    if arguments[0].startswith("-") and Path(arguments[0]).is_file():  # a script, and no option of Python
        arguments = (f"./{arguments[0]}", *arguments[1:])
    command = [interpreter(flags.pop("python"), CHECK, *MISSING), *arguments]
    if os.environ.get(AUTOLOAD, "1") != "1":
        raise UserError(f"{AUTOLOAD} is {os.environ[AUTOLOAD]}: torch would not call specscope; unset it")
    if screen:
        variables = environment(given | {"PYTHONUNBUFFERED": "1"})
        instead = "specscope transformers --capture FILE SCRIPT"
        sys.exit(run_with_screen(command, variables, lifetime, name=name_of(arguments), instead=instead))
    sys.stdout.flush()
    os.execve(command[0], command, environment(given))  # this process: signals and the exit code are the script's own


def environment(given: Mapping[str, str | None]) -> dict[str, str]:
    """The script's."""
    variables = with_variables(given)
    if not sys.flags.safe_path:
        variables.pop("PYTHONSAFEPATH", None)  # __main__.py sets it; a script finds the modules beside it
    return variables


def name_of(arguments: Sequence[str]) -> str:
    """What is run, as people know it."""
    words = [word for word in arguments if not word.startswith("-")]
    return Path(words[0]).name if words else "python"
