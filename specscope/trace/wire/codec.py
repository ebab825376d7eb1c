"""Records to attributes and back, by what their fields declare (trace/record/declared.py).

`written` gives a record's attributes. `checks` makes a Struct that attributes are converted into once, which checks the
type, range and length of each; `read` makes records of such a Struct. What fails is a DamagedError. The evidence of
decode steps is not read into records: decode_step.py lays it out in columns.

In JSON, numbers that it has no form for (NaN, Infinity) are texts, as protobuf's JSON has them. An engine that went
wrong may have computed them, so they are kept: written, read back, and judged by `verify`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum, IntEnum
from functools import cache, cached_property
from operator import attrgetter, methodcaller
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import orjson
from msgspec import Meta, Struct

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.declared import DIMENSIONS, MAX_NOTES, Told, Wire, WireForm, made
from specscope.trace.record.privacy import Privacy, Withheld, blank, withheld
from specscope.trace.record.vocabulary import escape, unescape

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
NOTHING: Mapping[str, Any] = {}
Number = float | Literal["NaN", "Infinity", "-Infinity"]  # in JSON; numpy reads the texts as what they stand for
FEW, EACH = 32, 75  # values of an array that is not packed, and of each text: of at most 26 bytes
NUMERIC = ("number", "integer")  # of JSON schemas' types
_NULL = b"null"  # what orjson writes for such a number; no evidence of ours holds another
_ARRAY = object()  # stands for the default of an array: no values


class DamagedError(ValueError):
    """A span, or a line, that is not as declared. The message is one line that names the attribute."""


def named(value: float) -> float | str:
    """A number as we write it in JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def dump_numbers(values: Sequence[float]) -> bytes:
    """A JSON array."""
    text = orjson.dumps(values)
    return orjson.dumps(list(map(named, values))) if _NULL in text else text


def _packed(values: Sequence[float]) -> Sequence[float] | list[str]:
    """An array, or JSON of some of it at a time: stores cut texts of over 2,048 bytes."""
    if len(values) <= FEW:
        return values
    return [dump_numbers(values[start : start + EACH]).decode() for start in range(0, len(values), EACH)]


def _all_named(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, np.ndarray):
        return _all_named(value.tolist())
    if isinstance(value, Mapping):
        return {name: _all_named(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_all_named(inner) for inner in value]
    return named(value) if isinstance(value, float) else value


@dataclass(frozen=True, eq=False)
class WireField:
    """A field of a record that travels, with what follows from its declaration."""

    name: str
    attribute: str  # that holds the field; "" where it is part of notes as JSON
    base: Any  # its type, without annotations
    wire: Wire
    mark: Withheld | None
    default: Any  # MISSING where it has none

    @cached_property
    def slot(self) -> str:
        """The field of the checking struct."""
        return self.attribute.removeprefix("specscope.").replace(".", "_") or self.name

    @cached_property
    def dtype(self) -> Any:  # noqa: ANN401
        """An array's dtype; None for anything else."""
        return get_args(get_args(self.base)[1])[0] if get_origin(self.base) is np.ndarray else None

    @cached_property
    def dimensions(self) -> list[str]:
        """What an array is over."""
        return self.wire.per.rstrip("?").split(",")

    @cached_property
    def is_id(self) -> bool:
        """Whether it is a token id, or an array of token ids."""
        return self.is_absent_at(Privacy.NO_TOKENS) and (self.dtype is not None or self.base is int)

    @cached_property
    def notes(self) -> Any:  # noqa: ANN401
        """The record that the attribute holds as JSON."""
        plain = self.wire.form is WireForm.PLAIN
        return next((kind for kind in get_args(self.base) if plain and dataclasses.is_dataclass(kind)), None)

    @cached_property
    def kind(self) -> Any:  # noqa: ANN401
        """The type of a value on the wire, or of each value of an array."""
        kind = self.base if self.wire.kind is None else self.wire.kind
        is_number = isinstance(kind, type) and issubclass(kind, IntEnum) and self.dtype is not None
        return Literal[tuple(int(value) for value in kind)] if is_number else kind  # quicker

    @cached_property
    def is_float(self) -> bool:
        """Whether JSON may have it as a text: NaN."""
        return getattr(self.kind, "__origin__", self.kind) is float

    @cached_property
    def many(self) -> Any:  # noqa: ANN401
        """The type of a value in each of several spans, or of all values of an array."""
        return list[self.kind if self.dtype is not None else self.checked_as[0]]  # type: ignore[misc]

    @cached_property
    def is_any_float(self) -> bool:
        """Whether any float will do."""
        bounds = [(mark.ge, mark.gt, mark.le, mark.lt) for mark in get_args(self.kind)[1:] if isinstance(mark, Meta)]
        return self.is_float and all(bound is None for each in bounds for bound in each)

    def is_absent_at(self, privacy: Privacy) -> bool:
        """Whether it could hold only the marks of what was left out."""
        return self.mark is not None and self.mark.level <= privacy and self.mark.instead is blank

    @cached_property
    def checked_as(self) -> tuple[Any, dict[str, Any]]:
        """Its type and default in the checking struct."""
        in_json, kind = not self.attribute, Number if self.is_float and not self.attribute else self.kind
        if self.dtype is not None:
            limits = [DIMENSIONS[letter].most for letter in self.dimensions]
            for length in reversed(limits) if in_json else [math.prod(limits)]:
                kind = Annotated[list[kind], Meta(max_length=length)]  # type: ignore[valid-type]
            return kind, {} if in_json and self.default is MISSING and not self.is_id else {"default_factory": list}
        if self.notes is not None:
            return Annotated[str, Meta(max_length=MAX_NOTES)], {"default": ""}
        if self.wire.form is not WireForm.PLAIN:
            kind = Annotated[str, Meta(max_length=self.wire.most)]
        if self.is_absent_at(Privacy.NO_TOKENS) or get_origin(self.base) is tuple:  # empty arrays may be absent
            return kind, {"default": (get_origin(self.base) or self.base)()}
        if self.default is MISSING or self.wire.told is Told.NEEDED:
            return kind, {}
        return kind, {"default": json.dumps(self.default) if self.wire.form is WireForm.JSON else self.default}

    @cached_property
    def plain(self) -> Callable[[Any], Any] | None:
        """Converts a value to what is written; None where it is written as it is. Not for notes."""
        if self.wire.form is WireForm.ESCAPED:
            return lambda text: escape(text.encode("utf-8", "surrogatepass"))
        if self.wire.form is WireForm.JSON:
            return lambda value: json.dumps(value.to_dict() if hasattr(value, "to_dict") else dict(value))
        if self.wire.packed:
            return lambda array: _packed(array.ravel().tolist())
        if self.dtype is not None and self.attribute:
            return methodcaller("tolist") if len(self.dimensions) == 1 else lambda array: array.ravel().tolist()
        if get_origin(self.base) is tuple:
            return list
        kinds = (self.base, *get_args(self.base))
        return attrgetter("value") if any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds) else None


@cache
def wired(kind: type) -> tuple[WireField, ...]:
    """The declared fields of a record."""
    hints, marks, found = get_type_hints(kind, include_extras=True), withheld(kind), []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        wire = next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Wire)), None)
        if wire is not None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            base = unaliased(hint.__origin__)
            found.append(WireField(field.name, wire.name, base, wire, marks[field.name], default))
    return tuple(found)


def unaliased(kind: Any) -> Any:  # noqa: ANN401
    """A type that an alias stands for: from NumPy 2.5 on, under Python 3.12, `NDArray` is a `type` statement's."""
    value = getattr(get_origin(kind), "__value__", None)
    return kind if value is None else value[get_args(kind)]


def written(
    record: object,
    privacy: Privacy = Privacy.EVERYTHING,
    by_hand: Mapping[str, Mapping[str, Any]] = NOTHING,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A record's attributes, or its notes. `by_hand`: more attributes in a field's place, or more of a field's JSON."""
    fields, get = _writing(type(record), privacy, only)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for (key, plain, always, default, special), value in zip(fields, get(record), strict=False):
        if special is not None:
            values |= _by_hand(special, value, privacy, by_hand.get(special.name, NOTHING))
        elif always or (value.size if default is _ARRAY else value is not default and value != default):
            values[key] = value if plain is None else plain(value)
    return values


def _by_hand(field: WireField, value: Any, privacy: Privacy, more: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401
    """The attributes of a field that is written by hand, or as a JSON object of arrays and plain values."""
    if field.notes is None:
        return more
    notes = {} if value is None else {**written(value, privacy), **more}
    text = orjson.dumps(notes, default=np.ndarray.tolist, option=orjson.OPT_SERIALIZE_NUMPY)
    return (
        {field.attribute: (orjson.dumps(_all_named(notes)) if _NULL in text else text).decode()} if notes else NOTHING
    )


@cache
def _writing(kind: Any, privacy: Privacy, only: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], attrgetter[Any]]:  # noqa: ANN401
    """How a record type is written: what of each field, and what gets their values."""
    fields = []
    for field in wired(kind):
        if field.is_absent_at(privacy) or (only and field.attribute not in only):
            continue
        is_array, is_special = field.dtype is not None, field.wire.form is WireForm.BY_HAND or field.notes is not None
        always = field.wire.told is not Told.OTHERWISE
        always |= field.default is MISSING and not (is_array and field.attribute)
        default, key = _ARRAY if is_array else field.default, field.attribute or field.name
        fields.append((field.name, (key, field.plain, always, default, field if is_special else None)))
    get = attrgetter(*(name for name, _ in fields), "__class__", "__class__")  # a tuple, however few
    return [each for _, each in fields], get


def checks(
    *kinds: type, absent: Mapping[str, Any] = NOTHING, only: tuple[str, ...] = ()
) -> Callable[[type[S]], type[S]]:
    """Decorator that gives a Struct the wire fields of records, so that it checks them.

    `absent`: attributes that may be absent, and their defaults. Arrays of token ids may be absent too.
    """
    fields: list[tuple[str, Any, Any]] = []
    for name, field in {field.attribute or field.name: field for kind in kinds for field in wired(kind)}.items():
        if field.wire.form is WireForm.BY_HAND or (only and name not in only):
            continue
        kind, default = field.checked_as
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
    plain: list[WireField] = []
    rest: list[WireField] = []
    for field in wired(kind):
        if field.slot in struct.__struct_fields__:
            has_none = field.default is None or type(None) not in get_args(field.kind)
            is_plain = field.dtype is None and field.wire.form is WireForm.PLAIN and field.notes is None and has_none
            (plain if is_plain else rest).append(field)
    values = attrgetter(*(field.slot for field in plain), "__class__", "__class__")  # a tuple, however few
    return [field.name for field in plain], values, rest


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
        return unescaped(value, field.attribute, lambda text: unescape(text).decode("utf-8", "surrogatepass"))
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
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind) if _items(field.type)}


@cache
def _items(declared: Any) -> str:  # noqa: ANN401
    """The type of an array's values, as JSON schemas have it; "" where none is declared."""
    schema = msgspec.json.schema(declared)
    arrays = [one for one in schema.get("anyOf", [schema]) if one.get("type") == "array"]
    return str(arrays[0].get("items", {}).get("type", "any")) if arrays else ""


def is_text(value: Any, declared: Any) -> bool:  # noqa: ANN401
    """Whether an array came as a text of JSON, or as several."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], str) and _items(declared) in NUMERIC
    return isinstance(value, str) and value[:1] in ("[", "")


def array_of_text(name: str, text: Any, declared: Any) -> Any:  # noqa: ANN401
    """An array that came as a text of JSON, or as several. Raises DamagedError."""
    if isinstance(text, str) and text.startswith('["[') and _items(declared) in NUMERIC:
        text = read_json(text, list[str], name)
    if isinstance(text, list):
        return [value for part in text for value in array_of_text(name, part, declared)]
    if not text:  # what Jaeger's page makes of NaN, which its JSON cannot hold
        raise DamagedError(f"`{name}` is empty: Jaeger's page loses arrays that contain NaN (its API v3 keeps them)")
    try:
        return decoded(text, declared, strict=False)
    except ValueError as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None


def check_times(start_ns: int, end_ns: int) -> None:
    """When a span began and ended. Raises DamagedError."""
    if not (0 <= start_ns < 2**63 and 0 <= end_ns < 2**63):
        raise DamagedError("its start or end is not a time in nanoseconds")


def read_json(text: str, kind: type[T], name: str) -> T:
    """The JSON that an attribute holds, checked. Raises DamagedError."""
    try:
        return decoded(text, kind)
    except (UserError, ValueError) as error:
        raise DamagedError(f"`{name}`: {plain_error(error)}") from None


def unescaped(text: str, name: str, read: Callable[[str], T]) -> T:
    """What was escaped, read by `vocabulary.unescape` or by what goes on from there. Raises DamagedError."""
    try:
        return read(text)
    except ValueError:
        raise DamagedError(f"`{name}` is not escaped correctly") from None


def plain_error(error: Exception) -> str:
    """msgspec's message without its JSON path's sign."""
    return str(error).replace(" - at `$.", " in `").replace(" - at `$`", "")
