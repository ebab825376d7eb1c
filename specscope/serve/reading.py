"""From the bytes of a request to a checked struct."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw

from specscope.serve.errors import ApiError
from specscope.serve.requests import REFUSED, ChatRequest, Refusals, Sampling
from specscope.trace.checked import decoded

T = TypeVar("T", bound=Sampling)


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """The body as a struct. Raises ApiError that names the field."""
    try:
        asked, fields = decoded(body, kind), decoded(body, dict[str, Raw])
        in_chats = kind is ChatRequest  # whose template has the special tokens
        _refuse(fields, REFUSED | {"add_special_tokens": ([not in_chats], "leave it out")})
        if asked.structured_outputs is not None:
            _refuse(decoded(bytes(fields["structured_outputs"]), dict[str, Raw]), REFUSED, "structured_outputs.")
        turns = decoded(bytes(fields["messages"]), list[dict[str, Raw]]) if in_chats else ()
        for index, turn in enumerate(turns):
            _refuse(turn, REFUSED, f"messages[{index}].")
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or _quoted(message)
        raise ApiError(400, f"{param}: {message}" if path else message, param) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return asked


def _quoted(message: str) -> str | None:
    """The name of the field in a message about a missing one."""
    match = re.search(r"field `(\w+)`", message)
    return match and match[1]


def _refuse(fields: Mapping[str, Raw], refusals: Refusals, above: str = "") -> None:
    """Refuse what is not implemented and would change the output. Raises ApiError that names the field."""
    for name in filter(refusals.__contains__, fields):
        harmless, instead = refusals[name]
        value = decoded(bytes(fields[name]))
        if not any(type(value) is type(allowed) and value == allowed for allowed in (None, *harmless)):
            param = f"{above}{name}"
            raise ApiError(400, f"{param} is not implemented: {instead}", param)
