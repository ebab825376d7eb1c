"""A place in a run as people write it: r3, r3@17 or r3@17/4; and several steps of a request: r3@10:40."""

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


@dataclass(frozen=True)
class Stretch:
    """Steps of a request, both ends included."""

    request: str
    first: int | None = None  # None: from its first step on
    last: int | None = None  # None: up to its last step


def read_stretch(text: str) -> Stretch:
    """Read REQUEST, REQUEST@STEP or REQUEST@FIRST:LAST; anything that is not the latter two is a request's name."""
    name, sign, rest = text.rpartition("@")
    first, colon, last = rest.partition(":")
    if not sign or not name or whole(first) is None or (last and whole(last) is None):
        return Stretch(text)
    return Stretch(name, int(first), int(last) if last else None if colon else int(first))
