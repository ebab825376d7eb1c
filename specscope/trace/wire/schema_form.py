"""What a span says of a request's form and of log-probabilities, as JSON. As schema_method.py."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from specscope.trace.record.form import FormNotes
from specscope.trace.record.logprobs import Logprobs
from specscope.trace.record.privacy import NO_TOKEN, Privacy, told_fields
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import ROOT
from specscope.trace.wire.schema import Count, DamagedError, Parent, PerNode, Token, read_json
from specscope.trace.wire.unfinite import Number, dump_notes

FORM, LOGPROBS = "specscope.form", "specscope.logprobs"


class FormAttributes(Struct, frozen=True, kw_only=True):
    """FormNotes."""

    node: PerNode[Parent] = field(default_factory=list)
    removed: PerNode[Number] = field(default_factory=list)
    pruned: Count = 0


class LogprobAttributes(Struct, frozen=True, kw_only=True):
    """Logprobs: m tokens, N likeliest of each."""

    logprob: PerNode[Number]
    top: PerNode[Annotated[list[Token], Meta(max_length=20)]]
    top_logprob: PerNode[Annotated[list[Number], Meta(max_length=20)]]


class NamelessTold(LogprobAttributes, frozen=True, kw_only=True):
    """That of a run that was recorded with --no-tokens."""

    top: PerNode[Annotated[list[Token], Meta(max_length=20)]] = []

    def __post_init__(self) -> None:
        force_setattr(self, "top", [[NO_TOKEN] * len(row) for row in self.top_logprob])


def written(part: RequestStep, privacy: Privacy = Privacy.EVERYTHING) -> dict[str, Any]:
    """The attributes; nothing where nothing is told."""
    both = {FORM: part.form, LOGPROBS: part.logprobs}
    return {
        name: dump_notes(told_fields(vars(notes), privacy, type(notes)))
        for name, notes in both.items()
        if notes is not None
    }


def read_form(text: str, n: int) -> FormNotes | None:
    """Of a tree of n nodes. Raises DamagedError."""
    if not text:
        return None
    told = read_json(text, FormAttributes, FORM)
    if len(told.node) != len(told.removed) or max(told.node, default=ROOT) >= n:
        raise DamagedError(f"`{FORM}` does not belong to a tree of {n} nodes")
    return FormNotes(np.asarray(told.node, np.int32), np.asarray(told.removed, np.float32), told.pruned)


def read_logprobs(text: str, emitted: int, form: type[LogprobAttributes] = LogprobAttributes) -> Logprobs | None:
    """Of a step that emitted so many tokens. Raises DamagedError."""
    if not text:
        return None
    told = read_json(text, form, LOGPROBS)
    widths = {len(row) for rows in (told.top, told.top_logprob) for row in rows}
    if not len(told.logprob) == len(told.top) == len(told.top_logprob) == emitted or len(widths) > 1:
        raise DamagedError(f"`{LOGPROBS}` does not belong to {emitted} tokens")
    shape = (emitted, widths.pop() if widths else 0)
    return Logprobs(
        np.asarray(told.logprob, np.float32),
        np.asarray(told.top, np.int32).reshape(shape),
        np.asarray(told.top_logprob, np.float32).reshape(shape),
    )
