"""From the bytes of a request to a checked struct."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from specscope.serve.errors import ApiError
from specscope.serve.requests import REFUSED
from specscope.trace.checked import decoded

T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """The body as a struct. Raises ApiError that names the field."""
    try:
        asked = decoded(body, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or _quoted(message)
        raise ApiError(400, f"{param}: {message}" if path else message, param) from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    _refuse(asked)
    return asked


def _quoted(message: str) -> str | None:
    """The name of the field in a message about a missing one."""
    match = re.search(r"field `(\w+)`", message)
    return match and match[1]


def _refuse(asked: object, above: str = "") -> None:
    """Refuse what is not implemented and would change the output. Raises ApiError that names the field."""
    if isinstance(asked, list):
        for index, item in enumerate(asked[:10_000]):
            _refuse(item, f"{above}[{index}]")
    if not isinstance(asked, msgspec.Struct):
        return
    for name, meta in _refused(type(asked)).items():
        extra: Any = meta.extra_json_schema
        value, harmless = getattr(asked, name), extra["enum"]
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            param = f"{above}.{name}".lstrip(".")
            raise ApiError(400, f"{param} is not implemented: {extra[REFUSED]}", param)
    for name in asked.__struct_fields__:
        if isinstance(value := getattr(asked, name), msgspec.Struct | list):
            _refuse(value, f"{above}.{name}".lstrip("."))


@cache
def _refused(kind: type) -> dict[str, Meta]:
    """The fields of a struct that are not implemented."""
    return {
        name: meta
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for meta in (_metas(hint))
        if REFUSED in (meta.extra_json_schema or {})
    }


def _metas(hint: object) -> list[Meta]:
    return [x for x in get_args(hint)[1:] if isinstance(x, Meta)] if get_origin(hint) is not None else []
