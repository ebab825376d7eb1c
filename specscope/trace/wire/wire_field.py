"""The fields of a record that travel, with what follows from their declarations: codec.py works from these."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum, IntEnum
from functools import cache, cached_property
from operator import attrgetter, methodcaller
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import Meta

from specscope.trace.record.declared import DIMENSIONS, MAX_NOTES, Told, Wire, WireForm
from specscope.trace.record.privacy import Privacy, Withheld, blank
from specscope.trace.record.vocabulary import escape
from specscope.trace.wire.unfinite import Number, packed


@dataclass(frozen=True, eq=False)
class WireField:
    """A field of a record that travels."""

    name: str
    base: Any  # its type, without annotations
    wire: Wire
    mark: Withheld | None
    default: Any  # MISSING where it has none

    @cached_property
    def attribute(self) -> str:
        """The attribute that holds the field; "" where it is part of notes as JSON."""
        return self.wire.name

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
        return self.goes(Privacy.NO_TOKENS) and (self.dtype is not None or self.base is int)

    @cached_property
    def notes(self) -> Any:  # noqa: ANN401
        """The record that the attribute holds as JSON."""
        plain = self.wire.form is WireForm.PLAIN
        return next((kind for kind in get_args(self.base) if plain and dataclasses.is_dataclass(kind)), None)

    @cached_property
    def may_be_empty(self) -> bool:
        """Whether an array may also be empty."""
        return self.wire.per.endswith("?")

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

    def goes(self, privacy: Privacy) -> bool:
        """Whether it is absent at a level: it could hold only the marks of what was left out."""
        return self.mark is not None and self.mark.level <= privacy and self.mark.instead is blank

    @cached_property
    def checked_as(self) -> tuple[Any, dict[str, Any]]:
        """Its type and default in the checking struct."""
        in_json, kind = not self.attribute, Number if self.is_float and not self.attribute else self.kind
        if self.dtype is not None:
            limits = [DIMENSIONS[letter].most for letter in self.dimensions]
            for length in reversed(limits) if in_json else [math.prod(limits)]:
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

    @cached_property
    def is_needed(self) -> bool:
        """Whether it is written even when it is empty or has its default."""
        always = self.wire.told is not Told.OTHERWISE
        return always or (self.default is MISSING and (self.dtype is None or not self.attribute))

    @cached_property
    def plain(self) -> Callable[[Any], Any] | None:
        """Converts a value to what is written; None where it is written as it is. Not for notes."""
        if self.wire.form is WireForm.ESCAPED:
            return lambda text: escape(text.encode("utf-8", "surrogatepass"))
        if self.wire.form is WireForm.JSON:
            return lambda value: json.dumps(value.to_dict() if hasattr(value, "to_dict") else dict(value))
        if self.wire.packed:
            return lambda array: packed(array.ravel().tolist())
        if self.dtype is not None and self.attribute:
            return methodcaller("tolist") if len(self.dimensions) == 1 else lambda array: array.ravel().tolist()
        if get_origin(self.base) is tuple:
            return list
        return attrgetter("value") if _enums(self.base) else None

    @cached_property
    def is_plain(self) -> bool:
        """Whether the record has it as the checking struct does, but for floats as texts."""
        has_none = self.default is None or type(None) not in get_args(self.kind)
        return self.dtype is None and self.wire.form is WireForm.PLAIN and self.notes is None and has_none

    def called(self, where: str) -> str:
        """Its name in messages."""
        return f"`{where}`: {self.name}" if where else f"`{self.attribute}`"


def _enums(kind: Any) -> list[Any]:  # noqa: ANN401
    """The enumerations that a type allows."""
    return [option for option in (kind, *get_args(kind)) if isinstance(option, type) and issubclass(option, Enum)]


@cache
def wired(kind: type) -> tuple[WireField, ...]:
    """The declared fields of a record."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_wired(kind, hints))


def _wired(kind: Any, hints: Mapping[str, Any]) -> Iterator[WireField]:  # noqa: ANN401
    for field in dataclasses.fields(kind):
        marks = getattr(hints[field.name], "__metadata__", ())
        wire = next((mark for mark in marks if isinstance(mark, Wire)), None)
        if wire is not None:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            mark = next((mark for mark in marks if isinstance(mark, Withheld)), None)
            yield WireField(field.name, unaliased(hints[field.name].__origin__), wire, mark, default)


def unaliased(kind: Any) -> Any:  # noqa: ANN401
    """A type that an alias stands for: from NumPy 2.5 on, under Python 3.12, `NDArray` is a `type` statement's."""
    value = getattr(get_origin(kind), "__value__", None)
    return kind if value is None else value[get_args(kind)]
