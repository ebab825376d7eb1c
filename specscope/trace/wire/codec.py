"""Records to attributes and back, by what their fields declare (trace/record/declared.py).

`written` gives a record's attributes. `checking` makes a Struct that attributes are converted into once, which checks
the type, range and length of each; `read` makes records of such a Struct, and checks that arrays over the same are of
one length. Notes that are JSON in one attribute go the same way. What fails is a DamagedError.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum, IntEnum
from functools import cache, cached_property
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.declared import DIMENSIONS, MAX_NOTES, Told, Wire, WireForm
from specscope.trace.record.privacy import NO_TOKEN, Privacy, Withheld, blank
from specscope.trace.record.vocabulary import escape, unescape
from specscope.trace.wire.unfinite import Number, dump_notes

T = TypeVar("T")
S = TypeVar("S", bound=Struct)
NOTHING: Mapping[str, Any] = {}


class DamagedError(ValueError):
    """A span, or a line, that is not as declared. The message is one line that names the attribute."""


@dataclass(frozen=True, eq=False)
class WireField:
    """A field of a record that travels."""

    name: str
    base: Any  # its type, without annotations
    wire: Wire
    mark: Withheld | None
    default: Any  # MISSING where it has none

    @property
    def attribute(self) -> str:
        """What tells it; "" where it is a part of notes as JSON."""
        return self.wire.name

    @cached_property
    def slot(self) -> str:
        """The field of the checking struct."""
        return self.attribute.removeprefix("specscope.").replace(".", "_") or self.name

    @cached_property
    def dtype(self) -> Any:  # noqa: ANN401
        """Of an array; None for anything else."""
        return get_args(get_args(self.base)[1])[0] if get_origin(self.base) is np.ndarray else None

    @cached_property
    def dimensions(self) -> list[str]:
        """What an array is over."""
        return self.wire.per.rstrip("?").split(",")

    @property
    def is_id(self) -> bool:
        """Whether it is an id of a token, or an array of such."""
        return self.goes(Privacy.NO_TOKENS) and (self.dtype is not None or self.base is int)

    @cached_property
    def notes(self) -> Any:  # noqa: ANN401
        """The record that the attribute holds as JSON."""
        plain = self.wire.form is WireForm.PLAIN
        return next((kind for kind in get_args(self.base) if plain and dataclasses.is_dataclass(kind)), None)

    @property
    def may_be_empty(self) -> bool:
        """Whether an array may hold nothing instead."""
        return self.wire.per.endswith("?")

    @cached_property
    def kind(self) -> Any:  # noqa: ANN401
        """The type of a value on the wire, or of each of an array."""
        kind = self.base if self.wire.kind is None else self.wire.kind
        is_number = isinstance(kind, type) and issubclass(kind, IntEnum) and self.dtype is not None
        return Literal[tuple(int(value) for value in kind)] if is_number else kind  # quicker

    @cached_property
    def is_float(self) -> bool:
        """Whether JSON may have it as a text: NaN."""
        return getattr(self.kind, "__origin__", self.kind) is float

    def goes(self, privacy: Privacy) -> bool:
        """Whether it is absent at a level, where it could hold nothing but what stands for what was left out."""
        return self.mark is not None and self.mark.level <= privacy and self.mark.instead is blank

    def checked_as(self) -> tuple[Any, dict[str, Any]]:
        """Its type in the checking struct, and the default there."""
        in_json, kind = not self.attribute, Number if self.is_float and not self.attribute else self.kind
        if self.dtype is not None:
            most = [DIMENSIONS[letter].most for letter in self.dimensions]
            for length in reversed(most) if in_json else [math.prod(most)]:
                kind = Annotated[list[kind], Meta(max_length=length)]  # type: ignore[valid-type]
            return kind, {} if in_json and self.default is MISSING else {"default_factory": list}
        if self.notes is not None:
            return Annotated[str, Meta(max_length=MAX_NOTES)], {"default": ""}
        if self.wire.form is not WireForm.PLAIN:
            kind = Annotated[str, Meta(max_length=self.wire.most)]
        if self.goes(Privacy.NO_TOKENS) or get_origin(self.base) is tuple:  # empty arrays may be absent
            return kind, {"default": (get_origin(self.base) or self.base)()}
        if self.default is MISSING or self.wire.told is Told.NEEDED:
            return kind, {}
        return kind, {"default": json.dumps(self.default) if self.wire.form is WireForm.JSON else self.default}

    @property
    def is_needed(self) -> bool:
        """Whether it is written though there is nothing in it, or what its default is."""
        always = self.wire.told is not Told.OTHERWISE
        return always or (self.default is MISSING and (self.dtype is None or not self.attribute))

    @cached_property
    def plain(self) -> Callable[[Any], Any] | None:
        """Makes what is written of a value; None where it is that. Notes apart."""
        if self.wire.form is WireForm.ESCAPED:
            return lambda text: escape(text.encode("utf-8", "surrogatepass"))
        if self.wire.form is WireForm.JSON:
            return lambda value: json.dumps(value.to_dict() if hasattr(value, "to_dict") else dict(value))
        if self.dtype is not None and self.attribute:
            return methodcaller("tolist") if len(self.dimensions) == 1 else lambda array: array.ravel().tolist()
        if get_origin(self.base) is tuple:
            return list
        return attrgetter("value") if _enums(self.base) else None

    @property
    def is_plain(self) -> bool:
        """Whether the record has it as the checking struct does, but for floats as texts."""
        has_none = self.default is None or type(None) not in get_args(self.kind)
        return self.dtype is None and self.wire.form is WireForm.PLAIN and self.notes is None and has_none

    def read(self, value: Any, lengths: dict[str, int], where: str, *, nameless: bool) -> Any:  # noqa: ANN401
        """The record's value of what was checked, where it is neither a plain one nor an array of one dimension."""
        if self.dtype is not None:
            return self._rows(value, lengths, where)
        if self.notes is not None:
            return read_notes(value, self.notes, self.attribute, lengths, nameless=nameless) if value else None
        if self.wire.form is WireForm.ESCAPED:
            return unescaped(value, self.attribute)
        if self.wire.form is WireForm.JSON:
            return read_json(value, self.kind, self.attribute)
        return self.default if value is None else value

    def called(self, where: str) -> str:
        """How messages call it."""
        return f"`{where}`: {self.name}" if where else f"`{self.attribute}`"

    def _rows(self, values: list[Any], lengths: dict[str, int], where: str) -> NDArray[Any]:
        """An array of two dimensions: a list of rows in JSON, row after row in an attribute."""
        first, second = self.dimensions
        rows = lengths.setdefault(first, len(values) if where else 0)
        if where:
            widths = {*map(len, values)}
            if len(values) != rows:
                raise DamagedError(f"{self.called(where)} holds {len(values)} values, not {rows}")
            if len(widths) > 1 or (widths and widths != {lengths.setdefault(second, *widths)}):
                raise DamagedError(f"{self.called(where)} has rows that do not hold {lengths[second]} values")
        elif len(values) % max(rows, 1) or (values and not rows):
            raise DamagedError(f"{self.called(where)} holds {len(values)} values for {rows} rows")
        flat = list(chain.from_iterable(values)) if where else values
        return np.fromiter(flat, self.dtype, len(flat)).reshape((rows, -1) if rows else (0, 0))

    def nameless(self, lengths: Mapping[str, int]) -> Any:  # noqa: ANN401
        """What stands for ids that were left out."""
        if self.dtype is None:
            return NO_TOKEN
        return np.full([lengths.get(letter, 0) for letter in self.dimensions], NO_TOKEN, self.dtype)


def _enums(kind: Any) -> list[Any]:  # noqa: ANN401
    """The enumerations that a type allows."""
    return [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, Enum)]


@cache
def wired(kind: type) -> tuple[WireField, ...]:
    """The fields of a record that are declared."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_wired(kind, hints))


def _wired(kind: Any, hints: Mapping[str, Any]) -> Iterator[WireField]:  # noqa: ANN401
    for field in dataclasses.fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        wire = next((mark for mark in marks if isinstance(mark, Wire)), None)
        if wire is not None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            mark = next((mark for mark in marks if isinstance(mark, Withheld)), None)
            yield WireField(field.name, hints[field.name].__origin__, wire, mark, default)


def written(
    record: object,
    privacy: Privacy = Privacy.EVERYTHING,
    by_hand: Mapping[str, Mapping[str, Any]] = NOTHING,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A record's attributes, or its notes. `by_hand`: more attributes in a field's place, or more of a field's JSON."""
    plan = _writing(type(record), privacy, only)
    values: dict[str, Any] = {}
    for (key, plain, told, default, special), value in zip(plan.fields, plan.values(record), strict=False):
        if special is not None:
            values |= _by_hand(special, value, privacy, by_hand.get(special.name, NOTHING))
        elif told or (value.size if default is _ARRAY else value is not default and value != default):
            values[key] = value if plain is None else plain(value)
    return values


def _by_hand(field: WireField, value: Any, privacy: Privacy, more: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ANN401
    """What is written of a field by hand, or as JSON."""
    if field.notes is None:
        return more
    notes = {} if value is None else {**written(value, privacy), **more}
    return {field.attribute: dump_notes(notes)} if notes else NOTHING


_ARRAY = object()  # stands for the default of an array: no values


class _Writing:
    """How a record is written: what is worked out of its fields but once."""

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
    """The attributes, with these first."""
    return {name: attributes[name] for name in (*names, *attributes) if name in attributes}


def checks(
    *kinds: type,
    absent: Mapping[str, Any] = NOTHING,
    only: tuple[str, ...] = (),
    order: Iterable[str] = (),
    nameless: bool = False,
) -> Callable[[type[S]], type[S]]:
    """Gives a Struct the fields of what is written of records, so that it checks them.

    `absent`: attributes that may lack, and what stands for them. `order`: of attributes that are written first, so that
    they are found at once. `nameless`: ids were left out of notes.
    """
    declared = {field.attribute or field.name: field for kind in kinds for field in wired(kind)}
    fields: list[tuple[str, Any, Any]] = []
    for name, field in first(order, declared).items():
        if field.wire.form is WireForm.BY_HAND or (only and name not in only):
            continue
        kind, default = field.checked_as()
        if nameless and field.is_id and field.dtype is not None:
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
    """How a record is read from a checking struct: what is as it is there, arrays, and the rest."""

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
    told: dict[str, Any] = dict(zip(plan.names, plan.plain_values(span), strict=False))
    for name in plan.floats:
        told[name] = float(told[name])
    for array, values in zip(plan.arrays, plan.array_values(span), strict=False):
        name, letter, dtype, may_be_empty, field = array
        length = len(values)
        if (length or not may_be_empty) and length != lengths.setdefault(letter, length):
            raise DamagedError(f"{field.called(where)} holds {length} values, not {lengths[letter]}")
        told[name] = np.fromiter(values, dtype, length)  # quicker than asarray
    for field in plan.rest:
        if field.name not in given:
            told[field.name] = field.read(getattr(span, field.slot), lengths, where, nameless=nameless)
    for field in plan.gone:
        told[field.name] = field.nameless(lengths)
    return kind(**{**told, **given})


_notes_struct: Callable[[Any, bool], Any] = cache(lambda kind, nameless: checks(kind, nameless=nameless)(Struct))


def read_notes(text: str, kind: type[T], name: str, lengths: Mapping[str, int], *, nameless: bool = False) -> T:
    """Notes as JSON, of a step with these lengths. Raises DamagedError."""
    told = read_json(text, _notes_struct(kind, nameless), name)
    return read(told, kind, dict(lengths), where=name, nameless=nameless)


def checked_span(attributes: Mapping[str, Any], kind: type[T]) -> T:
    """A span's attributes, checked. Raises DamagedError."""
    try:
        return msgspec.convert(attributes, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(plain_error(error)) from None


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
