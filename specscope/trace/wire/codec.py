"""Records to attributes and back, by what their fields declare (trace/record/declared.py).

`written` gives a record's attributes. `checking` makes a Struct that attributes are converted into once, which checks
the type, range and length of each; `read` makes records of such a Struct, and checks that arrays over the same are of
one length. Notes that are JSON in one attribute go the same way. What fails is a DamagedError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.declared import WireForm
from specscope.trace.record.equal import made
from specscope.trace.record.privacy import NO_TOKEN, Privacy
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
    order: Iterable[str] = (),
) -> Callable[[type[S]], type[S]]:
    """Decorator that gives a Struct the wire fields of records, so that it checks them.

    `absent`: attributes that may be absent, and their defaults. `order`: of attributes that are written first, so that
    they are found at once. Arrays of token ids may be absent: `read` knows whether they were left out.
    """
    declared = {field.attribute or field.name: field for kind in kinds for field in wired(kind)}
    fields: list[tuple[str, Any, Any]] = []
    for name, field in first(order, declared).items():
        if field.wire.form is WireForm.BY_HAND or (only and name not in only):
            continue
        kind, default = field.checked_as()
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


class _Plan:
    """How a record is read from a checking struct: fields taken as they are, arrays, and the rest."""

    def __init__(self, struct: type[Struct], kind: type, nameless: bool) -> None:
        fields = [field for field in wired(kind) if field.slot in struct.__struct_fields__]
        self.gone = [field for field in fields if nameless and field.is_id]
        there = [field for field in fields if field not in self.gone]
        plain = [field for field in there if field.is_plain]
        arrays = [field for field in there if field.dtype is not None and len(field.dimensions) == 1]
        self.rest = [field for field in there if field not in plain and field not in arrays]
        self.names = [field.name for field in plain]
        self.floats = [field.name for field in plain if field.is_float and not field.attribute]
        self.arrays = [(f.name, f.dimensions[0], np.dtype(f.dtype), f.may_be_empty, f) for f in arrays]
        # A tuple of values each, however few
        self.plain_values = attrgetter(*(field.slot for field in plain), "__class__", "__class__")
        self.array_values = attrgetter(*(field.slot for field in arrays), "__class__", "__class__")


_plan: Callable[[Any, Any, bool], _Plan] = cache(_Plan)


def read(
    span: Struct,
    kind: type[T],
    lengths: dict[str, int],
    *,
    where: str = "",
    nameless: bool = False,
    given: Mapping[str, Any] = NOTHING,
) -> T:
    """A record of what was checked. Raises DamagedError where its arrays are not of `lengths`, which gains theirs.

    `where`: of notes, their attribute. `nameless`: ids were left out. `given`: fields that are read elsewhere.
    """
    plan = _plan(type(span), kind, nameless)
    field_values: dict[str, Any] = dict(zip(plan.names, plan.plain_values(span), strict=False))
    for name in plan.floats:
        field_values[name] = float(field_values[name])
    for array, values in zip(plan.arrays, plan.array_values(span), strict=False):
        name, letter, dtype, may_be_empty, field = array
        length = len(values)
        if (length or not may_be_empty) and length != lengths.setdefault(letter, length):
            raise DamagedError(f"{field.called(where)} holds {length} values, not {lengths[letter]}")
        field_values[name] = (
            np.fromiter(values, dtype, length) if length else np.empty(0, dtype)
        )  # quicker than asarray
    for field in plan.rest:
        if field.name not in given:
            field_values[field.name] = _value(field, getattr(span, field.slot), lengths, where, nameless=nameless)
    for field in plan.gone:
        field_values[field.name] = _nameless(field, lengths)
    field_values |= given
    is_whole = len(field_values) == len(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    return made(kind, field_values) if is_whole and not hasattr(kind, "__post_init__") else kind(**field_values)


def _value(
    field: WireField,
    value: Any,  # noqa: ANN401
    lengths: dict[str, int],
    where: str,
    *,
    nameless: bool,
) -> Any:  # noqa: ANN401
    """A record's value of what was checked, where it is neither a plain one nor an array of one dimension."""
    if field.dtype is not None:
        return _rows(field, value, lengths, where)
    if field.notes is not None:
        return read_notes(value, field.notes, field.attribute, lengths, nameless=nameless) if value else None
    if field.wire.form is WireForm.ESCAPED:
        return unescaped(value, field.attribute)
    if field.wire.form is WireForm.JSON:
        return read_json(value, field.kind, field.attribute)
    return field.default if value is None else value


def _rows(field: WireField, values: list[Any], lengths: dict[str, int], where: str) -> NDArray[Any]:
    """An array of two dimensions: a list of rows in JSON, row after row in an attribute."""
    outer, inner = field.dimensions
    called, rows = field.called(where), lengths.setdefault(outer, len(values) if where else 0)
    if where:
        widths = {*map(len, values)}
        if len(values) != rows:
            raise DamagedError(f"{called} holds {len(values)} values, not {rows}")
        if len(widths) > 1 or (widths and widths != {lengths.setdefault(inner, *widths)}):
            raise DamagedError(f"{called} has rows that do not hold {lengths.get(inner, min(widths))} values")
    elif len(values) % max(rows, 1) or (values and not rows):
        raise DamagedError(f"{called} holds {len(values)} values for {rows} rows")
    flat = list(chain.from_iterable(values)) if where else values
    return np.fromiter(flat, field.dtype, len(flat)).reshape((rows, -1) if rows else (0, 0))


def _nameless(field: WireField, lengths: Mapping[str, int]) -> Any:  # noqa: ANN401
    """The value that stands for ids that were left out."""
    if field.dtype is None:
        return NO_TOKEN
    return np.full([lengths.get(letter, 0) for letter in field.dimensions], NO_TOKEN, field.dtype)


notes_struct: Callable[[Any], Any] = cache(lambda kind: checks(kind)(Struct))


def read_notes(text: str, kind: type[T], name: str, lengths: Mapping[str, int], *, nameless: bool = False) -> T:
    """Notes as JSON, of a step with these lengths. Raises DamagedError."""
    parsed = read_json(text, notes_struct(kind), name)
    return read(parsed, kind, dict(lengths), where=name, nameless=nameless)


def checked_span(attributes: Mapping[str, Any], kind: type[T]) -> T:
    """A span's attributes, checked. Raises DamagedError.

    Where it was kept in a store that has no arrays, such as Jaeger's, they are texts of JSON; long ones may be a few.
    """
    try:
        return msgspec.convert(attributes, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        texts = {name: array for name, array in _arrays(kind).items() if is_text(attributes.get(name), array)}
        if not texts:
            raise DamagedError(plain_error(error)) from None
    arrays = {name: array_of_text(name, attributes[name], texts[name]) for name in texts}
    return checked_span({**attributes, **arrays}, kind)


def _array_types(kind: Any) -> Mapping[str, Any]:  # noqa: ANN401
    """The attributes that are declared to be arrays, with their types."""
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return {name: declared for name, declared in types.items() if _is_array(msgspec.inspect.type_info(declared))}


@cache
def extents(kind: type[Struct]) -> Callable[[Struct], tuple[Any, ...]]:
    """Gives the arrays and the texts of a span of this kind."""
    types = {field.name: msgspec.inspect.type_info(field.type) for field in msgspec.structs.fields(kind)}
    return attrgetter(*(name for name, declared in types.items() if _is_array(declared) or _is_string(declared)))


def _is_string(declared: msgspec.inspect.Type) -> bool:
    return isinstance(getattr(declared, "type", declared), msgspec.inspect.StrType)


def _is_array(declared: msgspec.inspect.Type) -> bool:
    while isinstance(declared, msgspec.inspect.Metadata):
        declared = declared.type
    if isinstance(declared, msgspec.inspect.UnionType):
        return any(map(_is_array, declared.types))
    return isinstance(declared, msgspec.inspect.ListType | msgspec.inspect.VarTupleType)


_arrays: Callable[[Any], Mapping[str, Any]] = cache(_array_types)


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
