"""Who may use a server on this machine: no page of another site. And how its address is written.

A page that a browser has open can send requests here. Its Origin says whose it is, and a name that was rebound to this
machine's address (DNS rebinding) stands in its Host. On an address that other machines reach every name may be right:
there a key or a token decides. The port in Host may be another one: of a tunnel, or of a container.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specscope.trace.checked import is_loopback

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]]+))(?::[0-9]{1,5})?")


def another_site(listens: str, host: str, origins: Iterable[str]) -> str:
    """Why a request with these headers is refused at an address; empty where it is not."""
    host = host.lower()
    name = _HOST.fullmatch(host)
    if is_loopback(listens) and not (name and is_loopback(name[1] or name[2])):
        return f"this server is {bracketed(listens)}, not {host[:100]!r}: only this machine may use it, by its own name"
    if any(origin.lower() != f"http://{host}" for origin in origins):
        return "pages of other sites may not use this server"
    return ""


def bracketed(host: str) -> str:
    """The host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host.lower()


def address(host: str, port: int) -> str:
    """HOST:PORT as it stands in a URL."""
    return f"{bracketed(host)}:{port}"
