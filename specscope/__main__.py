"""The program: runs the command, and turns every failure into one line and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable

import click

from specscope.cli.main import cli
from specscope.cli.streams import OutputError, flush_output, give_up_output, open_streams, say
from specscope.errors import UserError, first_line
from specscope.gone import instead
from specscope.interrupt import ends_at_once
from specscope.lifetime import Lifetime
from specscope.trace.checked import without_login

# What an installation may lack, and the extra that has it
EXTRAS = {
    **dict.fromkeys(("textual", "platformdirs", "grpc", "starlette", "uvicorn"), "screen"),
    **dict.fromkeys(("torch", "transformers", "accelerate", "gguf", "psutil", "safetensors"), "engine"),
    "pyarrow": "export",
}


def main(command: click.Group = cli, name: str = "specscope") -> None:
    """Run the command; errors that users can fix become one line and exit code 2."""
    open_streams()
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what is lost is counted and shown at the end
    code = _guarded(lambda: _run(command, name))
    code = _guarded(flush_output) or code  # printed text must not be lost silently
    sys.exit(code)


def _run(command: click.Group, name: str) -> None:
    """Run the command. Not through click's own main, which hides broken pipes."""
    if "_SPECSCOPE_COMPLETE" in os.environ:
        command.main(prog_name=name)
    for line in filter(None, map(instead, os.environ)):
        say(f"specscope: {line}")
    with (
        ends_at_once(on_ctrl_c=False),
        Lifetime() as lifetime,
        command.make_context(name, sys.argv[1:], obj=lifetime) as context,
    ):
        command.invoke(context)


def _guarded(work: Callable[[], None]) -> int:
    """Do some work; its exit code."""
    try:
        work()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (UserError, click.ClickException) as error:
        text = without_login(error.format_message()) if isinstance(error, click.ClickException) else str(error)
        if isinstance(error, click.NoSuchOption):
            close = f": did you mean {error.possibilities[0]}?" if error.possibilities else ""
            text = instead(error.option_name) or f"No such option {error.option_name}{close}"
        if isinstance(error, click.UsageError) and error.ctx is not None:
            text += f" (see {error.ctx.command_path} --help)"
        say(f"specscope: error: {text}")
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            return _unexpected(error)
        say(f"specscope: error: this needs {error.name}: pip install 'specscope[{EXTRAS[error.name]}]'")
        return 2
    except BrokenPipeError:
        give_up_output()  # the reader closed the pipe, which is no error
        return 0
    except OutputError as error:
        give_up_output()
        say(f"specscope: error: cannot write to standard output: {error.strerror}")
        return 2
    except Exception as error:
        return _unexpected(error)
    return 0


def _unexpected(error: Exception) -> int:
    """Too little memory, or a bug. The traceback is shown only on request."""
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "can't allocate memory" in str(error):
        less = "a smaller model, --kv-memory, --max-context or --max-batch needs less"
        say(f"specscope: error: not enough memory: {less}")
        return 2
    raising = traceback.extract_tb(error.__traceback__)[-1].filename
    if os.path.join("torch", "__init__.py") in raising:
        say(f"specscope: error: torch cannot be loaded: {first_line(error)}: install it again (see specscope doctor)")
        return 2
    if os.environ.get("SPECSCOPE_TRACEBACK"):
        traceback.print_exc()
    advice = "please report it; SPECSCOPE_TRACEBACK=1 prints the traceback"
    say(f"specscope: internal error: {type(error).__name__}: {str(error)[:300]} ({advice})")
    return 70


def entry(command: click.Group = cli, name: str = "specscope") -> None:
    """The program: `main`, then an immediate exit; an interpreter with torch takes a second to shut down."""
    os.environ["PYTHONSAFEPATH"] = "1"  # no child looks for modules in the current folder: multiprocessing's would
    code = _guarded(lambda: main(command, name))
    if "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # one that is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
