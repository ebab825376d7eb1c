"""Values from outside, checked against one declared type (msgspec): what fails becomes one line for people."""

from __future__ import annotations

import ipaddress
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from specscope.errors import UserError
from specscope.errors import short as short
from specscope.whole_file import decoded as decoded

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    """What the command line says of a field: cli/options.py makes its flag from this and from the field's type."""

    help: str  # with the default, where that is not None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    name: str = ""  # where it is not the field's own
    negated: bool = True  # of a bool: whether there is --no-NAME


# Text that can be encoded: half of a surrogate pair, from JSON or from bytes in an argument, cannot be.
Text = Annotated[str, Meta(pattern="^[^\ud800-\udfff]*\\Z", description="valid Unicode text")]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1, description="between 0 and 2^63 - 1")]
Port = Annotated[int, Meta(ge=0, le=65535, description="between 0 and 65535")]

_NUMBERS: dict[Any, str] = {float: "a number", int: "a whole number", bool: "true or false"}


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches this address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost"


def checked(value: object, kind: Any, name: str) -> Any:  # noqa: ANN401
    """`value` as `kind`, an Annotated type whose Meta says in its description what is allowed. Raises UserError."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (ValueError, RecursionError):  # ValueError: of msgspec, and for text that is not Unicode
        raise UserError(f"{name} must be {_wanted(value, kind)}, not {short(value)}") from None


def checked_fields(values: dict[str, Any], kind: type[T]) -> T:
    """A msgspec.Struct from a mapping, field by field, so that the message names the field; other keys are ignored."""
    hints = {name: hint for name, hint in field_types(kind).items() if name in values}
    titles = {name: next((meta.title for meta in _metas(hint) if meta.title), name) for name, hint in hints.items()}
    return kind(**{name: checked(values[name], hint, titles[name]) for name, hint in hints.items()})


def field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def required_types(kind: type) -> dict[str, Any]:
    """The declared types without None, for fields that must be given."""
    types = field_types(kind)
    for name, hint in types.items():
        inner = base_of(hint)
        if get_origin(inner) in (Union, UnionType):
            types[name] = next(member for member in get_args(inner) if member is not NoneType)
    return types


def base_of(kind: Any) -> Any:  # noqa: ANN401
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def flags_of(kind: type) -> dict[str, Flag]:
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in field_types(kind).items()}
    return {name: mark for name, declared in marks.items() for mark in declared if isinstance(mark, Flag)}


def _metas(kind: Any) -> list[Meta]:  # noqa: ANN401
    """The annotations of a type, outermost first."""
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return [meta for meta in reversed(marks) if isinstance(meta, Meta)]


def _wanted(value: object, kind: Any) -> str:  # noqa: ANN401
    """What was expected: the type if the type is wrong, otherwise the range."""
    base = base_of(kind)
    if base in _NUMBERS and not _is_a(value, base):
        return _NUMBERS[base]
    return next((meta.description for meta in _metas(kind) if meta.description), "of another type")


def _is_a(value: object, base: type) -> bool:
    """Whether only the range of a number is wrong. JSON gives integers beyond 64 bits as floats."""
    if isinstance(value, float):
        return math.isfinite(value) and (base is float or abs(value) >= 2**63)
    return isinstance(value, int) and not isinstance(value, bool) and base is not bool


def checked_url(text: str, says: str) -> SplitResult:
    """An http or https URL, in parts. Raises UserError with the text `says`, whose {} is the URL without a password."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, a bracket that is not closed
        good = False
    if not good or not text.isascii() or not text.isprintable() or " " in text:
        hidden = re.sub(r"(?<=://).*@", "", text, flags=re.DOTALL)  # whatever a password is made of
        raise UserError(says.format(short(hidden)))
    return parts


def without_login(url: str) -> str:
    return re.sub(r"(?<=://)[^/?#]*@", "", url)


def whole(text: str) -> int | None:
    """A number of up to 19 ASCII digits, which every seed has; None for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None
