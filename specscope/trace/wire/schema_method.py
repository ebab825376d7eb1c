"""What a span says of a drafter's method, as JSON: MethodNotes. As schema.py, which reads it."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, field

from specscope.trace.record.method import SOURCES, MethodNotes
from specscope.trace.wire.schema import Count, DamagedError, Name, PerNode, read_json
from specscope.trace.wire.unfinite import Number, dump_notes

ATTRIBUTE = "specscope.method"
Source = Annotated[int, Meta(ge=0, lt=len(SOURCES))]


class Method(Struct, frozen=True, kw_only=True):
    """MethodNotes, of which only what is told is written."""

    confidence: PerNode[Number] = field(default_factory=list)
    module: PerNode[Count] = field(default_factory=list)
    source: PerNode[Source] = field(default_factory=list)
    one_pass: bool = False
    unverified: Count = 0
    match_length: Count = 0
    match_count: Count = 0
    match_source: Name | None = None


def written(notes: MethodNotes) -> dict[str, Any]:
    """The attribute; nothing where nothing is told."""
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(notes).items()}
    told = {name: value for name, value in plain.items() if value}
    return {ATTRIBUTE: dump_notes(told)} if told else {}


def read(text: str, n: int) -> MethodNotes | None:
    """Of a tree of n nodes; None where nothing is told. Raises DamagedError."""
    if not text:
        return None
    told = read_json(text, Method, ATTRIBUTE)
    for name in ("confidence", "module", "source"):
        values = getattr(told, name)
        if values and len(values) != n:
            raise DamagedError(f"`{ATTRIBUTE}`: {name} holds {len(values)} values, not {n}")
    return MethodNotes(
        confidence=np.asarray(told.confidence, np.float32),
        module=np.asarray(told.module, np.int32),
        source=np.asarray(told.source, np.int32),
        one_pass=told.one_pass,
        unverified=told.unverified,
        match_length=told.match_length,
        match_count=told.match_count,
        match_source=told.match_source or "",
    )
