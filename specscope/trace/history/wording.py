"""How counts, acceptance and ends are worded, in one place: for the console, the screens and the reports. No torch."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specscope.plans.kinds import BY_NAME, model_part
from specscope.trace.record.notes import SOURCES, MethodNotes
from specscope.trace.record.records import FinishReason, RequestEnd, RequestStep
from specscope.trace.record.vocabulary import Vocabulary, printable

TITLE = 80  # characters
KINDS_OF_FAULT = 20  # that are told apart
LONGEST = 200  # characters of a message
# The sentences about decisions, by name, with {places} for what is filled in
SENTENCES: dict[str, str] = json.loads(Path(__file__).with_name("sentences.json").read_text())


def said(name: str, **values: object) -> str:
    return SENTENCES[name].format(**values)


def probability(value: float) -> str:
    """A probability in at most five cells, never rounded to a 0 or 1 that it is not."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or value == 1:
        return f"{value:.0f}"
    if 0 < value < 0.0005:
        return f"{value:.0e}"
    return ">.999" if 0.9995 <= value < 1 else f"{value:.3f}"


def title_of(prompt: str) -> str:
    """The end of a prompt in one line, for lists of requests of which no chat message is known."""
    return " ".join(prompt[-4 * TITLE :].split())[-TITLE:]


def plural(count: int, singular: str, many: str = "") -> str:
    """`1 request`, `1,000 requests`. `many`: the plural, where it is not `singular` with an s."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def quoted(vocabulary: Vocabulary, token: int) -> str:
    return f"‘{vocabulary.show(token)}’"


def ordinal(number: int) -> str:
    """`1st`, `12th`, `1,022nd`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def ending(reason: str) -> str:
    """Why a request ended, for people: `length` alone would read as the acceptance length."""
    return "length limit" if reason == FinishReason.LENGTH else str(reason)


def failures(ends: Iterable[RequestEnd | None]) -> list[str]:
    """How many requests failed, and why: a line for each reason."""
    told = [end for end in ends if end is not None]
    errors = Counter(end.error for end in told if end.reason is FinishReason.ERROR)
    of = plural(len(told), "request")
    return [f"{count:,} of {of} failed: {printable(why) or 'no reason given'}" for why, count in errors.items()]


def acceptance(step: RequestStep, *, short: bool = False) -> str:
    """`2 of 16 nodes, depth 2 of 5`, `nothing drafted` or `prefill of 12 tokens`. `short`: with a stroke for `of`."""
    if step.verdict is None:
        return f"prefill of {plural(step.prefill_tokens, 'token')}"
    if not len(step.tree):
        return "nothing drafted"
    accepted, of = step.verdict.accepted, "/" if short else " of "
    return f"{accepted}{of}{plural(len(step.tree), 'node')}, depth {accepted}{of}{step.tree.max_depth}"


def accepted_text(step: RequestStep) -> str:
    """`acceptance` as a clause: `accepted 2 of 16 nodes, depth 2 of 5`."""
    judged = step.verdict is not None and len(step.tree)
    return f"accepted {acceptance(step)}" if judged else acceptance(step)


def about_sizing(step: RequestStep) -> str:
    """Why a step's tree has its size; "" where that is not told. Trees followed costs in older captures."""
    if not len(step.tree):
        return printable(step.sizing)
    kind = BY_NAME.get(model_part(step.drafter))
    alone = f"the {'model' if kind is None else kind.called}'s draft would not pay"
    return printable(step.sizing.replace(alone, f"{alone}, and the text's was verified", 1))


def about_method(notes: MethodNotes) -> list[str]:
    counts = zip(SOURCES, np.bincount(notes.source, minlength=len(SOURCES)).tolist(), strict=True)
    by = ", ".join(f"{name} {count}" for name, count in counts if count)
    often = f", {notes.match_count} times" if notes.match_count else ""
    where = f", in {printable(notes.match_source)}" if notes.match_source else ""
    remarks = {
        "all depths in one pass": notes.one_pass,
        f"{plural(notes.unverified, 'draft')} not verified": notes.unverified,
        f"from {by}": by,
        f"a match of {plural(notes.match_length, 'token')}{often}{where}": notes.match_length,
    }
    return [words for words, holds in remarks.items() if holds]


def about_draft(notes: MethodNotes, node: int) -> list[str]:
    parts = [f"confidence {float(notes.confidence[node]):.3f}"] if len(notes.confidence) else []
    source = notes.source_of(node)
    parts += [f"from {'both' if source == 'both' else 'the ' + source}"] if source else []
    return parts + ([f"module {int(notes.module[node])}"] if len(notes.module) else [])


@dataclass
class Faults:
    """What was left out of a capture or of what engines sent, and why: each kind of fault once, with a count."""

    total: int = 0
    _first: dict[str, str] = field(default_factory=dict)  # the message of the first of each kind
    _counts: Counter[str] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)  # the counts that `news` gave

    def add(self, what: str, why: str) -> None:
        """Count one: `what` was left out, `why` names the attribute. Texts that differ only in numbers are one kind."""
        self.total += 1
        message = f"{what}: {why}"[: 2 * LONGEST]
        kind = re.sub(r"[0-9]+", "0", message)
        if kind not in self._first and len(self._first) >= KINDS_OF_FAULT:
            kind, message = "", "faults of other kinds"
        if kind not in self._first:
            text = printable(" ".join(message.split()))
            self._first[kind] = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        self._counts[kind] += 1

    def lines(self) -> list[str]:
        return [f"left out {self._counts[kind]:,}×: {first}" for kind, first in self._first.items()]

    def news(self) -> list[str]:
        """The lines to print now: kinds that are new, and kinds whose count has grown tenfold."""
        due = [count >= max(10 * self._told[kind], 1) for kind, count in self._counts.items()]
        news = [line for line, is_due in zip(self.lines(), due, strict=True) if is_due]
        self._told |= {kind: count for (kind, count), is_due in zip(self._counts.items(), due, strict=True) if is_due}
        return news
