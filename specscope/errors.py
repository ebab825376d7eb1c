"""The one error meant for users, and values as its message shows them."""

import re
import traceback
from pathlib import Path
from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


class UserError(Exception):
    """Something the user gave cannot be used. The message is one line: what is wrong and what to do."""


class Ending(SystemExit):
    """A signal ends the process."""


MISTAKES = (Exception, SystemExit)  # what the user's code may raise


def first_line(error: BaseException) -> str:
    """The first line of a library's error; not torch's advice to run what a file holds."""
    if "Weights only load failed" in str(error):
        return "it holds Python objects, which specscope never loads: save its tensors as safetensors"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def not_loaded(what: str, error: BaseException) -> UserError:
    """Why transformers cannot load a model or a tokenizer."""
    if "trust_remote_code" in str(error):  # it advises to set that
        return UserError(f"cannot load {what}: it needs its own Python code, which specscope never runs")
    kind = str(error).partition("configuration class <class '")[2].partition("Config'")[0].rpartition(".")[2]
    if kind:  # of another Auto class, such as AutoModelForImageTextToText
        return UserError(f"cannot load {what}: {kind} is no text model (transformers' AutoModelForCausalLM has none)")
    return UserError(f"cannot load {what}: {first_line(error)}")


def short(value: object) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of over 38 digits"
    return _SHORT.repr(value)


def failed(what: str, error: BaseException) -> BaseException:
    """An error of the user's code as one line, with the place in that code."""
    if isinstance(error, UserError | Ending):
        return error
    skip = re.compile(rf"importlib|^{re.escape(str(Path(__file__).parent))}/")  # our own code is not the user's
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not skip.search(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return UserError(f"{what}: {type(error).__name__}: {error}{place}")
