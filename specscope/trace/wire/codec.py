"""Records to attributes and back, by what their fields declare (trace/record/declared.py).

`written` gives a record's attributes. `checks` makes a Struct that attributes are converted into once, which checks the
type, range and length of each; `read` makes records of such a Struct. What fails is a DamagedError. The evidence of
decode steps is not read into records: decode_step.py lays it out in columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
import numpy as np
from msgspec import Struct

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.declared import WireForm
from specscope.trace.record.equal import made
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import unescape
from specscope.trace.wire.unfinite import dump_notes
from specscope.trace.wire.wire_field import WireField, wired

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
NOTHING: Mapping[str, Any] = {}


class DamagedError(ValueError):
    """A span, or a line, that is not as declared. The message is one line that names the attribute."""


def written(
    record: object,
    privacy: Privacy = Privacy.EVERYTHING,
    by_hand: Mapping[str, Mapping[str, Any]] = NOTHING,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A record's attributes, or its notes. `by_hand`: more attributes in a field's place, or more of a field's JSON."""
    plan = _writing(type(record), privacy, only)
    values: dict[str, Any] = {}
    for (key, plain, always, default, special), value in zip(plan.fields, plan.values(record), strict=False):
        if special is not None:
            values |= _by_hand(special, value, privacy, by_hand.get(special.name, NOTHING))
        elif always or (value.size if default is _ARRAY else value is not default and value != default):
            values[key] = value if plain is None else plain(value)
    return values


def _by_hand(field: WireField, value: Any, privacy: Privacy, more: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401
    """The attributes of a field that is written by hand, or as JSON."""
    if field.notes is None:
        return more
    notes = {} if value is None else {**written(value, privacy), **more}
    return {field.attribute: dump_notes(notes)} if notes else NOTHING


_ARRAY = object()  # stands for the default of an array: no values


class _Writing:
    """How a record type is written: worked out from its fields once."""

    def __init__(self, kind: type, privacy: Privacy, only: tuple[str, ...]) -> None:
        fields = [f for f in wired(kind) if not f.goes(privacy) and (not only or f.attribute in only)]
        special = [f if f.notes is not None or f.wire.form is WireForm.BY_HAND else None for f in fields]
        defaults = [f.default if f.dtype is None else _ARRAY for f in fields]
        names = [f.attribute or f.name for f in fields]
        self.fields = [
            (name, f.plain, f.is_needed, default, by_hand)
            for name, f, default, by_hand in zip(names, fields, defaults, special, strict=True)
        ]
        self.values = attrgetter(*(f.name for f in fields), "__class__", "__class__")  # a tuple, however few


_writing: Callable[[Any, Privacy, tuple[str, ...]], _Writing] = cache(_Writing)


def first(names: Iterable[str], attributes: Mapping[str, T]) -> dict[str, T]:
    """The attributes, reordered so that these come first."""
    return {name: attributes[name] for name in (*names, *attributes) if name in attributes}


def checks(
    *kinds: type,
    absent: Mapping[str, Any] = NOTHING,
    only: tuple[str, ...] = (),
) -> Callable[[type[S]], type[S]]:
    """Decorator that gives a Struct the wire fields of records, so that it checks them.

    `absent`: attributes that may be absent, and their defaults. Arrays of token ids may be absent too.
    """
    declared = {field.attribute or field.name: field for kind in kinds for field in wired(kind)}
    fields: list[tuple[str, Any, Any]] = []
    for name, field in declared.items():
        if field.wire.form is WireForm.BY_HAND or (only and name not in only):
            continue
        kind, default = field.checked_as
        if field.is_id and field.dtype is not None:
            default = {"default_factory": list}
        if name in absent:
            kind, default = kind | type(absent[name]), {"default": absent[name]}
        fields.append((field.slot, kind, msgspec.field(name=name, **default)))

    def extended(base: type[S]) -> type[S]:
        struct = msgspec.defstruct(
            base.__name__, fields, bases=(base,), module=base.__module__, frozen=True, kw_only=True
        )
        struct.__doc__ = base.__doc__
        return struct  # type: ignore[return-value]

    return extended


@cache
def _plan(struct: Any, kind: Any) -> tuple[list[str], Callable[[Struct], tuple[Any, ...]], list[WireField]]:  # noqa: ANN401
    """Of a record and the struct that checks it: the fields that are taken as they are, these values, and the rest."""
    there = [field for field in wired(kind) if field.slot in struct.__struct_fields__]
    plain = [field for field in there if field.is_plain]
    values = attrgetter(*(field.slot for field in plain), "__class__", "__class__")  # a tuple, however few
    return [field.name for field in plain], values, [field for field in there if not field.is_plain]


def read(span: Struct, kind: type[T], given: Mapping[str, Any] = NOTHING) -> T:
    """A record of what was checked. `given`: fields that are read elsewhere. Raises DamagedError."""
    names, plain_values, rest = _plan(type(span), kind)  # type: ignore[arg-type]
    values: dict[str, Any] = dict(zip(names, plain_values(span), strict=False))
    values |= {field.name: _value(field, getattr(span, field.slot)) for field in rest if field.name not in given}
    values |= given
    is_whole = len(values) == len(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    return made(kind, values) if is_whole and not hasattr(kind, "__post_init__") else kind(**values)


def _value(field: WireField, value: Any) -> Any:  # noqa: ANN401
    """A record's value of what was checked, where it is another one."""
    if field.dtype is not None:
        return np.fromiter(value, field.dtype, len(value))  # quicker than asarray
    if field.wire.form is WireForm.ESCAPED:
        return unescaped(value, field.attribute)
    if field.wire.form is WireForm.JSON:
        return read_json(value, field.kind, field.attribute)
    return field.default if value is None else value


notes_struct: Callable[[Any], Any] = cache(lambda kind: checks(kind)(Struct))


def checked_span(attributes: Mapping[str, Any], kind: type[T]) -> T:
    """A span's attributes, checked. Raises DamagedError.

    Where it was kept in a store that has no arrays, such as Jaeger's, they are texts of JSON; long ones may be a few.
    """
    try:
        return msgspec.convert(attributes, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        texts = {name: array for name, array in _arrays(kind).items() if is_text(attributes.get(name), array)}  # type: ignore[arg-type]
        if not texts:
            raise DamagedError(plain_error(error)) from None
    arrays = {name: array_of_text(name, attributes[name], texts[name]) for name in texts}
    return checked_span({**attributes, **arrays}, kind)


@cache
def _arrays(kind: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """The attributes that are declared to be arrays, with their types."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    schemas = {name: msgspec.json.schema(declared) for name, declared in types.items()}
    options = {name: schema.get("anyOf", [schema]) for name, schema in schemas.items()}
    return {name: types[name] for name, each in options.items() if any(one.get("type") == "array" for one in each)}


def is_text(value: Any, declared: Any) -> bool:  # noqa: ANN401
    """Whether an array came as a text of JSON, or as several."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], str) and _holds_numbers(declared)
    return isinstance(value, str) and value[:1] in ("[", "")


@cache
def _holds_numbers(declared: Any) -> bool:  # noqa: ANN401
    items: dict[str, object] = msgspec.json.schema(declared).get("items", {})
    return items.get("type") in ("number", "integer")


def array_of_text(name: str, text: Any, declared: Any) -> Any:  # noqa: ANN401
    """An array that came as a text of JSON, or as several. Raises DamagedError."""
    if isinstance(text, str) and text.startswith('["[') and _holds_numbers(declared):
        text = read_json(text, list[str], name)
    if isinstance(text, list):
        return [value for part in text for value in array_of_text(name, part, declared)]
    if not text:  # what Jaeger's page makes of NaN, which its JSON cannot hold
        raise DamagedError(f"`{name}` is empty: Jaeger's page loses arrays with NaN in them (its API v3 has them)")
    try:
        return decoded(text, declared, strict=False)
    except ValueError as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None


def check_times(start_ns: int, end_ns: int) -> None:
    """When a span began and ended. Raises DamagedError."""
    if not (0 <= start_ns < 2**63 and 0 <= end_ns < 2**63):
        raise DamagedError("its start or end is no time in nanoseconds")


def read_json(text: str, kind: type[T], name: str) -> T:
    """The JSON that an attribute holds, checked. Raises DamagedError."""
    try:
        return decoded(text, kind)
    except (UserError, ValueError) as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None


def unescaped(text: str, name: str) -> str:
    """Text that was escaped. Raises DamagedError."""
    try:
        return unescaped_bytes(text, name).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise DamagedError(f"`{name}` is not escaped as it should be") from None


def unescaped_bytes(text: str, name: str) -> bytes:
    """What was escaped. Raises DamagedError."""
    try:
        return unescape(text)
    except ValueError:
        raise DamagedError(f"`{name}` is not escaped as it should be") from None


def plain_error(error: Exception) -> str:
    """msgspec's message without its JSON path's sign."""
    return str(error).replace(" - at `$.", " in `").replace(" - at `$`", "")
