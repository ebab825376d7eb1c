"""How much of what people and models wrote leaves a process, and the one place that leaves it out.

A field says by `Withheld` in its type from which level on it is left out. All ways out (files, spans, the debugger's
socket) go through `strip`, so that what is not declared here is not text and no token id.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

NO_TOKEN = -1  # stands for a token id that was left out: no token has it
LEFT_OUT = "…"  # stands for a text that was left out, where it counts that there was one


class Privacy(IntEnum):
    """What is left out of records; each level leaves out all that the ones before do."""

    EVERYTHING = 0  # is kept
    NO_TEXT = 1  # no string that a user or a model wrote: prompts, output, token texts, stop strings, forms, labels
    NO_TOKENS = 2  # no token id either: shapes, probabilities, coins, verdicts and times stay

    @staticmethod
    def of(*, no_text: bool, no_tokens: bool) -> Privacy:
        """The level of two flags, of which the second implies the first."""
        return Privacy.NO_TOKENS if no_tokens else Privacy.NO_TEXT if no_text else Privacy.EVERYTHING

    @property
    def flag(self) -> str:
        return ("", "--no-text", "--no-tokens")[self]

    @property
    def remark(self) -> str:
        """What the user of this level must know; "" for nothing."""
        if self is not Privacy.NO_TEXT:
            return ""
        return "--no-text keeps token ids, which a tokenizer turns into text: --no-tokens leaves them out too"

    @property
    def lack(self) -> str:
        """Why readers of a capture cannot say more; "" where nothing was left out."""
        gone = ("", "prompts and texts are not in this file", "token ids are not in this file")[self]
        return f"recorded with {self.flag}: {gone}" if gone else ""


def blank(value: Any, _: Privacy) -> Any:  # noqa: ANN401
    """A value left out: as many ids as there were, each NO_TOKEN; anything else becomes empty."""
    if isinstance(value, np.ndarray):
        return np.full_like(value, NO_TOKEN)
    return NO_TOKEN if isinstance(value, int) else type(value)()


def marked(value: str, _: Privacy) -> str:
    """A marker where there was a text, "" where there was none."""
    return LEFT_OUT if value else ""


class Withheld(NamedTuple):
    """Of a field: from which level on it is left out, and what stands there instead."""

    level: Privacy
    instead: Callable[[Any, Privacy], Any] = blank


TEXT, IDS = Withheld(Privacy.NO_TEXT), Withheld(Privacy.NO_TOKENS)
Written = Annotated[str, TEXT]
TokenId = Annotated[int, IDS]
TokenIds = Annotated[NDArray[np.int32], IDS]


def no_tokens(count: int) -> NDArray[np.int32]:
    """An array of so many left-out ids. It takes no memory, since the count comes from a file or a sender."""
    return np.broadcast_to(np.int32(NO_TOKEN), count)


def told_ids(tokens: NDArray[np.int32]) -> list[int] | None:
    """Ids for JSON and tables; None where they were left out."""
    return None if len(tokens) and tokens[0] == NO_TOKEN else tokens.tolist()


@cache
def withheld(kind: type) -> Mapping[str, Withheld | None]:
    """The fields of a dataclass, each with its declaration; None where nothing is declared."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        field.name: next((mark for mark in marks[field.name] if isinstance(mark, Withheld)), None)
        for field in dataclasses.fields(kind)
    }


def strip(value: T, level: Privacy) -> T:
    """A record, or a part of one, as it is kept at a level; the same object where nothing is left out."""
    if level is Privacy.EVERYTHING:
        return value
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):  # a step's requests in a run are no tuple
        parts = tuple(strip(part, level) for part in value)
        return value if all(map(operator.is_, parts, value)) else parts  # type: ignore[return-value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for name, mark in withheld(type(value)).items():
        before = getattr(value, name)
        is_due = mark is not None and mark.level <= level and before is not None
        after = mark.instead(before, level) if is_due and mark is not None else strip(before, level)
        if after is not before:
            changes[name] = after
    return dataclasses.replace(value, **changes) if changes else value
