"""Records to attributes, by what their fields declare (trace/record/declared.py); tables.py reads them back.

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

import numpy as np
import orjson
from msgspec import Meta, Struct

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.declared import DIMENSIONS, MAX_NOTES, Told, Wire, WireForm
from specscope.trace.record.privacy import Privacy, Withheld, blank, withheld
from specscope.trace.record.vocabulary import escape

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
NOTHING: Mapping[str, Any] = {}
Number = float | Literal["NaN", "Infinity", "-Infinity"]  # in JSON; numpy reads the texts as what they stand for
FEW, EACH = 32, 75  # values of an array that is not packed, and of each text: of at most 26 bytes
_NULL = b"null"  # what orjson writes for such a number; no evidence of ours holds another
_ARRAY = object()  # stands for the default of an array: no values


class DamagedError(ValueError):
    """A span, or a line, that is not as declared. The message is one line that names the attribute."""


def named(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def dump_numbers(values: Sequence[float]) -> bytes:
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


@dataclass(eq=False)
class WireField:
    """A field of a record that travels, with what follows from its declaration."""

    name: str
    attribute: str  # that holds the field; "" where it is part of notes as JSON
    base: Any  # its type, without annotations
    wire: Wire
    mark: Withheld | None
    default: Any  # MISSING where it has none
    notes: Any  # the record that the attribute holds as JSON
    dtype: Any  # an array's
    kind: Any  # of a value on the wire, or of each value of an array

    def __post_init__(self) -> None:
        in_notes, plain = not self.attribute, self.wire.form is WireForm.PLAIN
        self.key = self.attribute or self.name
        self.dimensions = self.wire.per.rstrip("?").split(",")  # what an array is over
        # Whether it is a tuple, where it is not None; a token id, or an array of these; a number that may be NaN
        self.is_list = any(get_origin(kind) is tuple for kind in (self.base, *get_args(self.base)))
        self.is_id = self.is_absent_at(Privacy.NO_TOKENS) and (self.dtype is not None or self.base is int)
        self.is_float = getattr(self.kind, "__origin__", self.kind) is float
        bounds = [(mark.ge, mark.gt, mark.le, mark.lt) for mark in get_args(self.kind)[1:] if isinstance(mark, Meta)]
        self.is_any_float = self.is_float and all(bound is None for each in bounds for bound in each)
        # What its value must be; of an array that is an attribute, each of its values
        kind = Number if self.is_float and in_notes else self.kind
        for letter in reversed(self.dimensions) if self.dtype is not None and in_notes else ():
            kind = Annotated[list[kind], Meta(max_length=DIMENSIONS[letter].most)]  # type: ignore[valid-type]
        most = MAX_NOTES if self.notes is not None else self.wire.most
        self.type = kind if plain and self.notes is None else Annotated[str, Meta(max_length=most)]

    def is_absent_at(self, privacy: Privacy) -> bool:
        """Whether it could hold only the marks of what was left out."""
        return self.mark is not None and self.mark.level <= privacy and self.mark.instead is blank

    @cached_property
    def absent(self) -> Any:  # noqa: ANN401
        """What stands for it where it is not there; MISSING where it must be."""
        if self.dtype is not None:
            return MISSING if not self.attribute and self.default is MISSING and not self.is_id else []
        if self.is_id or self.wire.told is Told.NEEDED:
            return MISSING
        if type(None) in get_args(self.kind):
            return None
        if self.is_absent_at(Privacy.NO_TOKENS) or self.is_list:  # empty arrays may be absent
            return (get_origin(self.base) or self.base)()
        is_json = self.default is not MISSING and self.wire.form is WireForm.JSON
        return json.dumps(self.default) if is_json else self.default

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
    hints, marks, prefix = get_type_hints(kind, include_extras=True), withheld(kind), getattr(kind, "PREFIX", "")
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        wire = next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Wire)), None)
        if wire is None:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        own = wire.name if wire.name.startswith("gen_ai.") else f"specscope.{wire.name}"
        attribute = own if wire.name else prefix and prefix + field.name
        base = unaliased(hint.__origin__)
        records = [each for each in get_args(base) if wire.form is WireForm.PLAIN and dataclasses.is_dataclass(each)]
        dtype = get_args(get_args(base)[1])[0] if get_origin(base) is np.ndarray else None
        value = base if wire.kind is None else wire.kind
        if isinstance(value, type) and issubclass(value, IntEnum) and dtype is not None:
            value = Literal[tuple(int(each) for each in value)]  # quicker
        notes = records[0] if records else None
        found.append(WireField(field.name, attribute, base, wire, marks[field.name], default, notes, dtype, value))
    return tuple(found)


def unaliased(kind: Any) -> Any:  # noqa: ANN401
    """A type that an alias stands for: from NumPy 2.5 on, under Python 3.12, `NDArray` is a `type` statement's."""
    value = getattr(get_origin(kind), "__value__", None)
    return kind if value is None else value[get_args(kind)]


def written(
    record: object,
    privacy: Privacy = Privacy.EVERYTHING,
    notes: Mapping[str, Mapping[str, Any]] = NOTHING,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A record's attributes, or its notes. `notes`: more of a field's JSON."""
    fields, get = _writing(type(record), privacy, only)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for (key, plain, always, default, noted), value in zip(fields, get(record), strict=False):
        if noted:
            if value is not None and (told := {**written(value, privacy), **notes.get(noted, NOTHING)}):
                text = orjson.dumps(told, default=np.ndarray.tolist, option=orjson.OPT_SERIALIZE_NUMPY)
                values[key] = (orjson.dumps(_all_named(told)) if _NULL in text else text).decode()
        elif always or (value.size if default is _ARRAY else value is not default and value != default):
            values[key] = value if plain is None else plain(value)
    return values


@cache
def _writing(kind: Any, privacy: Privacy, only: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], attrgetter[Any]]:  # noqa: ANN401
    fields = []
    for field in wired(kind):
        by_hand = field.wire.form is WireForm.BY_HAND  # of the span's own record
        if by_hand or field.is_absent_at(privacy) or (only and field.attribute not in only):
            continue
        is_array, noted = field.dtype is not None, field.name if field.notes is not None else ""
        always = field.wire.told is not Told.OTHERWISE
        always |= field.default is MISSING and not (is_array and field.attribute)
        default = _ARRAY if is_array else field.default
        fields.append((field.name, (field.key, field.plain, always, default, noted)))
    get = attrgetter(*(name for name, _ in fields), "__class__", "__class__")  # a tuple, however few
    return [each for _, each in fields], get


def array_of_text(name: str, text: str, declared: Any) -> Any:  # noqa: ANN401
    """An array that came as a text of JSON, as stores have it that keep no arrays. Raises DamagedError."""
    if not text:  # what Jaeger's page makes of NaN, which its JSON cannot hold
        raise DamagedError(f"`{name}` is empty: Jaeger's page loses arrays that contain NaN (its API v3 keeps them)")
    return read_json(text, declared, name, strict=False)


def numbers_of_text(name: str, text: Any, declared: Any) -> Any:  # noqa: ANN401
    """Numbers that came as a text of JSON, or as several, which may be in one. Raises DamagedError."""
    if isinstance(text, str) and text.startswith('["['):
        text = read_json(text, list[str], name)
    if isinstance(text, list):
        return [value for part in text for value in numbers_of_text(name, part, declared)]
    return array_of_text(name, text, declared)


def check_times(start_ns: int, end_ns: int) -> None:
    """Raises DamagedError."""
    if not (0 <= start_ns < 2**63 and 0 <= end_ns < 2**63):
        raise DamagedError("its start or end is not a time in nanoseconds")


def read_json(text: str, kind: type[T], name: str, *, strict: bool = True) -> T:
    """The JSON that an attribute holds, checked; if not `strict`, a number may be a text. Raises DamagedError."""
    try:
        return decoded(text, kind, strict=strict)
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
