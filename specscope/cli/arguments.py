"""What an argument may be: a number, or X. What X is, one rule says for every verb that reads."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args

import click
from click.shell_completion import CompletionItem
from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import checked, without_login
from specscope.trace.kinds import ReadAs, kind_of, start_of
from specscope.trace.record.vocabulary import printable
from specscope.trace.stored import CaptureSource, StoreAddress

_FORMS = {int: r"[+-]?[0-9]{1,40}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}
X_RULE = """X or CAPTURE is a file (its first bytes show whether it is a capture, a log, a metrics page, results or
prompts), FILE#REQUEST@STEP (a step in a capture), http://HOST:16686/trace/ID (a trace in Jaeger or Tempo), any other
URL (a metrics page), a debugger's socket, or - (standard input)."""


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click alone
    """A flag's number. Raises UserError that names the flag. Click's own types accept nan, 1_000 and any digits."""

    def __init__(self, kind: Any) -> None:  # noqa: ANN401
        """`kind`: an Annotated int or float with its bounds."""
        self.kind = kind
        self.base: type = get_args(kind)[0]
        self.name = "integer" if self.base is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The number in a text; a default is checked as it is."""
        if isinstance(value, str) and re.fullmatch(_FORMS[self.base], value):
            value = self.base(value)
        return checked(value, self.kind, param.opts[0] if param is not None else "the number")


def whole_from(smallest: int, largest: int) -> Number:
    """A whole number between two bounds."""
    return Number(Annotated[int, Meta(ge=smallest, le=largest, description=f"between {smallest} and {largest}")])


def real_from(smallest: float, largest: float) -> Number:
    """A number between two bounds."""
    return Number(Annotated[float, Meta(ge=smallest, le=largest, description=f"between {smallest:g} and {largest:g}")])


class What(Enum):
    """What X is, and what a verb says that does not take it."""

    TRACE = "{x} is the address of a trace: specscope open {x} shows it"
    PAGE = "{x} is a metrics page: specscope watch {x} reads it"
    INPUT = "- is standard input: give a file"
    SOCKET = "{x} is a socket: specscope debug {x} attaches to the engine behind it"
    RECORDING = "{x} is a capture: specscope open {x} shows it"
    FILE = "{x} is a file"
    MISSING = "there is no file {x}; a prompt contains spaces or is one plain word"
    WORDS = "{x} is a prompt: specscope run takes it"

    @staticmethod
    def of(text: str) -> What:
        """What an argument is. A word that names no file is a prompt if it has no slash and no suffix."""
        if isinstance(text, CaptureSource):
            return What.RECORDING
        if text == "-":
            return What.INPUT
        words = any(map(str.isspace, text))
        if StoreAddress.is_one(text) and not words:
            with suppress(UserError):
                StoreAddress.read(text)
                return What.TRACE
            return What.PAGE
        file, sign, _ = (text, "", "") if os.path.exists(text) else text.rpartition("#")
        if os.path.exists(file):
            if stat.S_ISSOCK(os.stat(file).st_mode):
                return What.SOCKET
            kind = kind_of(start_of(file))
            return What.RECORDING if kind is not None and kind.reader is ReadAs.CAPTURES else What.FILE
        is_path = "/" in text or Path(text).suffix or sign
        return What.MISSING if is_path and not words else What.WORDS


class FileName(click.ParamType):  # type: ignore[type-arg]
    """A name that a shell completes. Reading the file reports what is wrong with it."""

    name = "file"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Files, by the shell itself."""
        return [CompletionItem(incomplete, type="file")]


class X(FileName):
    """X, as far as a verb takes it."""

    def __init__(self, *takes: What, place: bool = False) -> None:
        """`place`: whether #REQUEST@STEP may follow the address of a trace."""
        self.takes, self._place = takes, place

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As click calls it: the address of a trace as one, and what is piped in as a file that holds it."""
        what = What.RECORDING if isinstance(value, StoreAddress) else What.of(value)
        if what is What.PAGE and re.search(r":16686(/search.*|/)?$", value):
            name = without_login(value)
            raise UserError(f"{name} is Jaeger's start page: open a trace there and give its address (.../trace/ID)")
        if what not in self.takes:
            if what is What.PAGE:
                StoreAddress.read(value)  # raises
            raise UserError(what.value.format(x=printable(value)))
        if what is What.TRACE:
            address = StoreAddress.read(value)
            if address.place and not self._place:
                raise UserError(
                    f"{address}#{printable(address.place)} names a place: give the address of the whole trace"
                )
            return address
        file, sign, step = value.rpartition("@")
        if sign and not os.path.exists(value) and os.path.isfile(file):
            raise UserError(f"a step is written {printable(file)}#REQUEST@{printable(step)}")
        if What.TRACE in self.takes and StoreAddress.lacks_scheme(value) and not os.path.exists(value):
            raise UserError(f"there is no file {printable(value)}; the address of a trace begins with http://")
        if what is What.INPUT and What.MISSING in self.takes and What.TRACE in self.takes:
            return value if ctx is None or ctx.resilient_parsing else _spooled()
        return value


def _spooled() -> CaptureSource:
    """Standard input, as a file that is deleted with the process: a recording is read more than once."""
    number, name = tempfile.mkstemp(prefix="specscope-")
    atexit.register(lambda: Path(name).unlink(missing_ok=True))
    with open(number, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return CaptureSource("standard input", Path(name))


FILE = FileName()
CAPTURE = X(*(what for what in What if what not in (What.SOCKET, What.PAGE)))
PLACE = X(*CAPTURE.takes, place=True)
FIGURES = X(*CAPTURE.takes, What.PAGE)  # of a metrics page, one reading
PROMPT = X(What.INPUT, What.RECORDING, What.FILE, What.WORDS)  # of a recording, whoever reads prompts says what it is
DEBUGGED = X(*PROMPT.takes, What.TRACE, What.SOCKET, place=True)
WATCHED = X(What.PAGE, What.INPUT, What.RECORDING, What.FILE, What.MISSING, What.WORDS)
