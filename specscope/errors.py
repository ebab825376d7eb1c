"""The one error meant for users, and values as its message shows them."""

import traceback
from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2


class UserError(Exception):
    """Something the user gave cannot be used. The message is one line: what is wrong and what to do.

    The command line prints it and exits with code 2; from Python it is an ordinary exception.
    """


def first_line(error: BaseException) -> str:
    """The first line of a library's error; not torch's advice to run what a file holds."""
    if "Weights only load failed" in str(error):
        return "it holds Python objects, which are never loaded: save its tensors as safetensors"
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def not_loaded(what: str, error: BaseException) -> UserError:
    """Why transformers cannot load a model or a tokenizer."""
    if "trust_remote_code" in str(error):  # it advises to set that
        return UserError(f"cannot load {what}: it needs Python code of its own, which specscope never runs")
    return UserError(f"cannot load {what}: {first_line(error)}")


def short(value: object) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of over 38 digits"
    return _SHORT.repr(value)


def failed(what: str, error: Exception) -> UserError:
    """An error of the user's code as one line, with the place in that code."""
    if isinstance(error, UserError):
        return error
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return UserError(f"{what}: {type(error).__name__}: {error}{place}")
