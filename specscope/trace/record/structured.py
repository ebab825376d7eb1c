"""StructuredOutputs: the form that a request's output must have. Only its description: no grammar library is needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import Text, checked, decoded, field_types, short

LONGEST_SCHEMA = 64 * 1024  # characters of a JSON schema, and of a grammar
LONGEST_REGEX = 8 * 1024
DEEPEST = 64  # arrays and objects in one another
MOST_CHOICES = 1000

Choice = Annotated[Text, Meta(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these, by vLLM's names. Raises UserError, naming the field, for what cannot be used."""

    # a JSON schema as JSON text; a mapping is taken and kept as text
    json: Annotated[
        Annotated[str, Meta(max_length=LONGEST_SCHEMA)] | Mapping[str, Any] | None,
        Meta(description=f"a JSON schema of at most {LONGEST_SCHEMA >> 10} KiB"),
    ] = None
    # of the whole output, as if it began with ^ and ended with $
    regex: Annotated[
        Annotated[Text, Meta(min_length=1, max_length=LONGEST_REGEX)] | None,
        Meta(description=f"a regular expression, not empty, of at most {LONGEST_REGEX >> 10} KiB"),
    ] = None
    # the output is one of these texts
    choice: Annotated[
        Annotated[tuple[Choice, ...], Meta(min_length=1, max_length=MOST_CHOICES)] | None,
        Meta(description=f"1 to {MOST_CHOICES} non-empty texts of at most 1000 characters"),
    ] = None
    # EBNF as llama.cpp writes it (GBNF); the first rule is `root`
    grammar: Annotated[
        Annotated[Text, Meta(min_length=1, max_length=LONGEST_SCHEMA)] | None,
        Meta(description=f"a grammar in EBNF, not empty, of at most {LONGEST_SCHEMA >> 10} KiB"),
    ] = None
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _as_text(self.json))
        for name, kind in _TYPES.items():
            object.__setattr__(self, name, checked(getattr(self, name), kind, f"structured_outputs: {name}"))
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = " and ".join(given) or "none"
            raise UserError(f"structured_outputs needs exactly one of {', '.join(_TYPES)}; given: {names}")
        if self.json is not None:
            _check_json(self.text)
        elif any("\0" in text for text in self.choice or (self.text,)):
            raise UserError(f"structured_outputs: {self.kind} holds a NUL character: remove it")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _TYPES if getattr(self, name) not in (None, False))

    @property
    def text(self) -> str:
        """The source as one text: a JSON list for choices, empty for json_object."""
        value = getattr(self, self.kind)
        if value is True:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: only the field that is given."""
        value = getattr(self, self.kind)
        return {self.kind: list(value) if isinstance(value, tuple) else value}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> StructuredOutputs:
        """The object that `to_dict` described. Other names raise UserError."""
        unknown = [name for name in values if name not in _TYPES]
        if unknown:
            raise UserError(f"structured_outputs has no {short(unknown[0])}: use {', '.join(_TYPES)}")
        return StructuredOutputs(**values)


_TYPES = field_types(StructuredOutputs)


def _as_text(schema: Mapping[str, Any]) -> str:
    """The schema as JSON text, in its own order: a grammar requires the properties in that order."""
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError("structured_outputs: json cannot be written as JSON: give the schema as text") from None


def _check_json(text: str) -> None:
    """Check that a schema is JSON, an object or true, and not too deep. Raises UserError."""
    try:
        schema = decoded(text)
    except (orjson.JSONDecodeError, UnicodeEncodeError) as error:
        where = f" ({error.msg}, at column {error.colno})" if isinstance(error, orjson.JSONDecodeError) else ""
        raise UserError(f"structured_outputs: json is not valid JSON{where}") from None
    if not isinstance(schema, dict) and schema is not True:
        raise UserError("structured_outputs: json must be a JSON schema: an object, or true for any JSON")
    level, depth = [schema], 0
    while level := [x for container in level if isinstance(container, dict | list) for x in _inside(container)]:
        depth += 1
        if depth > DEEPEST:
            raise UserError(f"structured_outputs: json is nested more than {DEEPEST} deep: write a flatter schema")


def _inside(container: dict[str, Any] | list[Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container
