"""How a field of the evidence is declared, once: by `Wire` in its annotation on the record.

`p: Annotated[Floats, Wire(Probability, "n")]` says the type and range of a value there, and what an array is over. The
attribute of a span that tells it is the record's PREFIX and the field's name, unless `name` says another; a record
without PREFIX is JSON in an attribute. trace/wire/codec.py writes, checks and reads by this, and docs/fields.md lists
it. What a field means, the comment above it or behind it says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Meta

from specscope.tree_shape import MAX_NODES, ROOT

MAX_DROPPED = 2**16  # nodes that re-ranking left out: more than any dynamic plan looks at
MAX_TEXT = 2**24  # characters of a prompt
MAX_SHORT = 2**16  # and of other text
MAX_NOTES = 2**20  # and of notes as JSON
MAX_TOKENS = 2**22  # tokens of a prompt or an output

# Types of values on the wire. The title is what the table of fields calls them.
Step = Annotated[int, Meta(ge=0, lt=2**53, title="step")]
Count = Annotated[int, Meta(ge=0, lt=2**31, title="count")]
Sum = Annotated[int, Meta(ge=0, lt=2**53, title="count")]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS, title="count")]
Token = Annotated[int, Meta(ge=0, lt=2**31, title="token id")]
Parent = Annotated[int, Meta(ge=ROOT, lt=MAX_NODES + MAX_DROPPED, title="node or -1")]
Node = Annotated[int, Meta(ge=0, le=MAX_NODES, title="node")]
Time = Annotated[int, Meta(ge=0, le=2**63 - 1, title="ns")]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, title="number")]
# What an engine computed. A wrong number is evidence too, and kept: damage is a matter of type, length and nesting.
Probability = Annotated[float, Meta(title="probability")]
LogProbability = Annotated[float, Meta(title="log probability")]
Nats = Annotated[float, Meta(title="nats")]
SquareNats = Annotated[float, Meta(title="nats²")]
Norm = Annotated[float, Meta(title="norm")]
Share = Annotated[float, Meta(ge=0, le=1, title="share")]
Value = Annotated[float, Meta(ge=-1e300, le=1e300, title="number")]

Name = Annotated[str, Meta(min_length=1, max_length=1000, title="name")]
Short = Annotated[str, Meta(max_length=MAX_SHORT, title="text")]
Text = Annotated[str, Meta(max_length=MAX_TEXT, title="text")]
Piece = Annotated[str, Meta(max_length=4096, title="text")]  # what a token stands for, escaped
Names = Annotated[tuple[Name, ...], Meta(max_length=2**16)]  # of requests in a step
ParamValue: TypeAlias = bool | int | float | str | list[str | int] | dict[str, float | str | list[str]] | None


class Dimension(NamedTuple):
    most: int
    words: str


DIMENSIONS: Mapping[str, Dimension] = {
    "n": Dimension(MAX_NODES, "nodes of the tree"),
    "a": Dimension(MAX_NODES, "accepted nodes"),
    "d": Dimension(MAX_DROPPED, "nodes that re-ranking left out"),
    "f": Dimension(MAX_NODES + 1, "forced outcomes"),
    "v": Dimension(MAX_NODES, "accepted nodes whose KV was moved"),
    "b": Dimension(2**16, "KV blocks that the request writes to in the step"),
    "passes": Dimension(4096, "the drafter's passes"),
    "r": Dimension(2**16, "rows of the drafter's first pass"),
    "l": Dimension(64, "layers that feed a head"),
    "k": Dimension(MAX_NODES, "parents that were tried"),
    "t": Dimension(16, "the target's likeliest tokens"),
    "m": Dimension(16, "the drafter's likeliest tokens"),
    "s": Dimension(MAX_NODES, "nodes that the step came by"),
    "e": Dimension(MAX_NODES, "tokens that the step emitted"),
    "w": Dimension(20, "likeliest tokens that were asked for"),
    "prompt": Dimension(MAX_TOKENS, "tokens of the prompt"),
    "output": Dimension(MAX_TOKENS, "tokens of the output"),
}


class WireForm(Enum):
    PLAIN = "plain"  # as it is; a dataclass as JSON of its fields
    ESCAPED = "escaped"  # text that may be no Unicode: vocabulary.escape
    JSON = "JSON"  # a mapping, or what has to_dict()
    BY_HAND = "by hand"  # wire/spans.py writes it, and wire/unspan.py reads it


class Told(Enum):
    """Where a field that has a default is written."""

    OTHERWISE = "otherwise"  # where it has another value; an array: where it is not empty
    ALWAYS = "always"  # though captures of before may lack it
    NEEDED = "needed"  # always, and a span without it is damaged


class Wire(NamedTuple):
    kind: Any = None  # of a value on the wire, or of each of an array; None: as the field's
    per: str = ""  # letters of DIMENSIONS, as in "k,t": arrays that share one are of one length; with "?" or empty
    name: str = ""  # of the attribute, without "specscope.", where it does not follow from the field's
    form: WireForm = WireForm.PLAIN
    told: Told = Told.OTHERWISE
    most: int = MAX_SHORT  # characters, where the form is text
    packed: bool = False  # whether a long array is a few texts of JSON: Jaeger's page has a line for each value


Counted = Annotated[int, Wire(Count)]
Summed = Annotated[int, Wire(Sum)]
SumOrNone = Annotated[int | None, Wire(Sum | None)]
Words = Annotated[str, Wire(Short)]


def empty(dtype: type[np.generic] | None = None, shape: int | tuple[int, ...] = 0) -> Any:  # noqa: ANN401
    """The default of a field that is an array: no values; without a dtype None."""
    return field(default_factory=lambda: None if dtype is None else np.zeros(shape, dtype))


def same(a: object, b: object) -> bool:
    """Whether two fields are equal; NaN is, to NaN."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        alike = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype == b.dtype
        return alike and np.array_equal(a, b, equal_nan=True)  # type: ignore[arg-type]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)))


class ArrayEq:
    """Field-by-field equality for the records that hold arrays; of the fields that `compare`."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        fields = [field.name for field in dataclasses.fields(self) if field.compare]  # type: ignore[arg-type]
        return all(same(getattr(self, name), getattr(other, name)) for name in fields)

    __hash__ = None  # type: ignore[assignment]


def made(kind: type, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - of that kind
    """A frozen dataclass with all of these fields: a fifth of the time that its own __init__ takes."""
    record: Any = object.__new__(kind)
    record.__dict__.update(fields)
    return record
