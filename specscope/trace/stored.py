"""Captures as verbs are given them: a file, several files of one run, one run of several in a file, or a trace store.

All are text: the name, or the address as it may be shown, without its login. So whoever shows, compares or suggests the
name of a capture does not have to know where it came from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from specscope.errors import UserError
from specscope.trace.checked import checked_url, without_login
from specscope.trace.files import BROKEN, open_plain
from specscope.trace.kinds import OTLP_PROTOBUF, kind_of, start_of

PIECE, LONGEST_NAME = 2**20, 2**11  # bytes of a file that are looked at together; that a run's name is within

# What the address of a trace ends with: a page of Jaeger, or the API of Jaeger or Tempo
_TRACE = re.compile(r"(?P<root>.*)/(?P<what>trace|api/(?:v[23]/)?traces)/(?P<id>[0-9a-fA-F]{1,32})/?")
_PLACE = re.compile(r".+@[0-9]+(?::[0-9]*)?(?:/[0-9]+)?")  # a step of a request, or several


class StoreAddress(str):
    trace: str  # its id, as given
    place: str  # what follows # where that names a step, as of a file; "" for none
    apis: tuple[str, ...]  # URLs that its id follows, with the login
    query: str  # what follows the id there

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether text is a URL and no file."""
        return re.match(r"https?://", text, re.IGNORECASE) is not None

    @staticmethod
    def lacks_scheme(text: str) -> bool:
        """Whether text, which is no file, looks like an address of a trace without its http://."""
        host = re.match(r"(\[[0-9a-fA-F:]+\]|[\w.-]+)(:[0-9]+)?(?=/)", text)
        return host is not None and _TRACE.fullmatch(re.split("[?#]", text[host.end() :])[0]) is not None

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a URL. Raises UserError, without a password, where it leads to no trace."""
        says = "{} is not a trace's address: write http://HOST:16686/trace/ID (specscope watch URL reads metrics)"
        parts = checked_url(text, says)
        known = _TRACE.fullmatch(parts.path)
        if known is None:
            raise UserError(says.format(without_login(parts._replace(query="", fragment="").geturl())))
        address = cls(without_login(parts._replace(query="", fragment="").geturl()))
        root = parts._replace(path=known["root"], query="", fragment="").geturl()
        address.trace = known["id"].lower()
        address.place = parts.fragment if _PLACE.fullmatch(parts.fragment) else ""  # else it is the page's
        best = "api/v2/traces" if known["what"] == "api/v2/traces" else "api/v3/traces"  # Tempo's, or Jaeger's
        address.apis = tuple(f"{root}/{api}/" for api in (best, "api/traces"))  # by the latter arrays come as text
        address.query = f"?{parts.query}" if parts.query and known["what"] != "trace" else ""
        return address


class CaptureSource(str):
    """A capture by the name that it is called by; where it is read from, and what of it."""

    files: tuple[Path, ...]  # of one run, in their order
    run: str = ""  # the id of the run that is read; "" for the only one
    first_run: bool = False  # of several runs the first is read: a caller's trace may have asked several engines
    place: str = ""  # as of an address
    notes: tuple[str, ...] = ()  # what is missing, in words
    error: str = ""  # why it could not be fetched: whoever reads it hears of it

    def __new__(cls, name: str, *files: Path, **others: Any) -> Self:  # noqa: ANN401 - the other fields
        source = super().__new__(cls, name)
        source.__dict__.update(others, files=files)
        return source

    @staticmethod
    def of(capture: str | os.PathLike[str]) -> CaptureSource:
        """A capture, however it is called. Raises UserError where it could not be fetched."""
        if not isinstance(capture, CaptureSource):
            return CaptureSource(str(Path(capture)), Path(capture))
        if capture.error:
            raise UserError(capture.error)
        return capture

    def but(self, **change: Any) -> CaptureSource:  # noqa: ANN401 - its fields
        source = CaptureSource(self)
        source.__dict__.update({**vars(self), **change})
        return source


# How a resource names its run, in OTLP JSON, on Jaeger's page, and in protobuf, where a length stands before it
_RUN = re.compile(
    rb'specscope\.run\.id(?:"[^}]{0,60}?"(?:stringValue|string_value|value)"\s*:\s*"([^"\\]{1,1000})"|\x12.\n(.))',
    re.DOTALL,
)


_SPAN = re.compile(rb'"span_?[iI][dD]"\s*:\s*"([^"]{1,32})"')


def runs_in(content: bytes) -> list[str]:
    names: dict[str, None] = {}
    for match in _RUN.finditer(content):
        name = match[1] or content[match.end() : match.end() + match[2][0]]
        names[name.decode("utf-8", "replace")] = None
    return list(names)


def every_run(capture: str | os.PathLike[str]) -> list[str]:
    """A capture; or, of a file that holds several runs, each of them. Reading it reports what is wrong with it."""
    with suppress(UserError, *BROKEN):
        source = CaptureSource.of(capture)
        if not source.run and not source.first_run and all(file.is_file() for file in source.files):
            runs: dict[str, None] = {}
            for file in source.files:
                is_protobuf = kind_of(start_of(file)) is OTLP_PROTOBUF
                with open(file, "rb") as raw, open_plain(raw, str(file)) as content:
                    runs |= _in_messages(content, str(file)) if is_protobuf else {}
                    tail = b""
                    while piece := content.read(PIECE):
                        runs |= dict.fromkeys(runs_in(tail + piece))
                        tail = piece[-LONGEST_NAME:]
            if len(runs) > 1:
                return [CaptureSource(f"{source} (run {run[:12]})", *source.files, run=run) for run in runs]
    return [capture if isinstance(capture, str) else os.fspath(capture)]


def _in_messages(content: BinaryIO, name: str) -> dict[str, None]:
    """The runs of a file of OTLP protobuf, whose messages may each be compressed."""
    from specscope.trace.wire.otlp_proto import messages

    found: dict[str, None] = {}
    for _, held in messages(content, name, lambda *_: None):
        runs = runs_in(held) if isinstance(held, bytes) else [each.get("specscope.run.id") for each, _ in held]
        found |= {run: None for run in runs if isinstance(run, str)}
    return found


def as_runs(captures: Sequence[str]) -> list[str]:
    """These captures, with files of one run as one, such as rotated ones; but copies, which begin alike, stay apart."""
    by_run: dict[str, dict[bytes, str]] = {}
    for number, capture in enumerate(captures):
        start = start_of(capture) if type(capture) is str and os.path.isfile(capture) else b""
        run, first = next(iter(runs_in(start)), ""), _SPAN.search(start)
        key = run if run and first else f"\0{number}"
        if first is not None and first[1] in by_run.get(key, ()):
            key = f"{key}\0{number}"
        by_run.setdefault(key, {})[b"" if first is None else first[1]] = capture
    return [
        names[0] if len(names) == 1 else CaptureSource(" + ".join(names), *map(Path, names))
        for names in (list(same.values()) for same in by_run.values())
    ]
