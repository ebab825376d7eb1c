"""Captures that lie in a trace store: their addresses, and what they are once they were fetched.

Both are text: the address as it may be shown, without its login. So whoever shows, compares or suggests the name of a
capture does not have to know where it came from.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

from specscope.errors import UserError
from specscope.trace.checked import checked_url, without_login

# What the address of a trace ends with: a page of Jaeger, or the API of Jaeger or Tempo
_TRACE = re.compile(r"(?P<root>.*)/(?P<what>trace|api/(?:v[23]/)?traces)/(?P<id>[0-9a-fA-F]{1,32})/?")
_PLACE = re.compile(r".+@[0-9]+(?::[0-9]*)?(?:/[0-9]+)?")  # a step of a request, or several
# The APIs that may answer for each, the best one first: by the oldest, Jaeger gives arrays as text
_APIS = {
    "trace": ("api/v3/traces", "api/traces"),
    "api/v3/traces": ("api/v3/traces", "api/traces"),
    "api/traces": ("api/v3/traces", "api/traces"),
    "api/v2/traces": ("api/v2/traces", "api/traces"),
}


class StoreAddress(str):
    """The address of a trace, as people copy it from their browser."""

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
        says = "{} is no address of a trace: write http://HOST:16686/trace/ID, or the API's, .../api/traces/ID"
        parts = checked_url(text, says)
        known = _TRACE.fullmatch(parts.path)
        if known is None:
            raise UserError(says.format(without_login(parts._replace(query="", fragment="").geturl())))
        address = cls(without_login(parts._replace(query="", fragment="").geturl()))
        root = parts._replace(path=known["root"], query="", fragment="").geturl()
        address.trace = known["id"].lower()
        address.place = parts.fragment if _PLACE.fullmatch(parts.fragment) else ""  # else it is the page's
        address.apis = tuple(f"{root}/{api}/" for api in _APIS[known["what"]])
        address.query = f"?{parts.query}" if parts.query and known["what"] != "trace" else ""
        return address


class FetchedCapture(str):
    """A capture that was fetched: it is called by its address and read from a file."""

    file: Path  # where it lies until this process ends
    place: str  # as of its address
    notes: tuple[str, ...]  # what is missing, in words
    error: str  # why it could not be fetched: whoever reads it hears of it

    def __new__(
        cls, address: str, file: Path = Path(), *, place: str = "", notes: tuple[str, ...] = (), error: str = ""
    ) -> Self:
        """As of its fields."""
        capture = super().__new__(cls, address)
        capture.file, capture.place, capture.notes, capture.error = file, place, notes, error
        return capture

    def at(self, place: str) -> FetchedCapture:
        """The same, with another place."""
        return FetchedCapture(self, self.file, place=place, notes=self.notes, error=self.error)


def file_of(capture: str | os.PathLike[str]) -> Path:
    """The file of a capture, however it is called. Raises UserError where it could not be fetched."""
    if not isinstance(capture, FetchedCapture):
        return Path(capture)
    if capture.error:
        raise UserError(capture.error)
    return capture.file
