"""A place in a run as people write it: r3, r3@17 or r3@17/4."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.trace.checked import whole


@dataclass(frozen=True)
class PlaceName:
    """What such a text names."""

    request: str
    index: int | None  # the request's own step
    node: int | None  # of that step's tree; the number of nodes is the final token


def read_place(text: str) -> PlaceName:
    """Read REQUEST, REQUEST@STEP or REQUEST@STEP/NODE; anything that is not the latter two is a request's name."""
    name, sign, rest = text.rpartition("@")
    index, slash, node = rest.partition("/")
    if not sign or not name or whole(index) is None or (slash and whole(node) is None):
        return PlaceName(text, None, None)
    return PlaceName(name, int(index), int(node) if slash else None)
