"""Forked: a request run again from one of its steps, with and without changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import draw_tree

TEXT = 300  # characters of each side's output that are shown


@dataclass(frozen=True)
class Forked:
    """The original and the fork, side by side. Filled by live/local.py."""

    request: str
    index: int  # the request's step from which both run
    changes: str  # in words
    original: tuple[RequestStep, ...]
    fork: tuple[RequestStep, ...]
    tokens: int  # how many of each are compared
    dtype: str  # of the target
    forced: bool  # whether a verdict, a coin or a token was forced in the fork: it is not lossless
    note: str = ""  # what makes the comparison doubtful
    explained: str = ""  # which of the changes can make another token come out there, in words

    @cached_property
    def outputs(self) -> tuple[list[int], list[int]]:
        first, second = ([t for step in side for t in step.output()] for side in (self.original, self.fork))
        return first[: self.tokens], second[: self.tokens]

    @cached_property
    def figures(self) -> tuple[Acceptance, Acceptance]:
        return measure(self.original), measure(self.fork)

    @cached_property
    def same(self) -> int:
        """Tokens before the first difference."""
        a, b = self.outputs
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    @property
    def differ(self) -> bool:
        return self.same < max(map(len, self.outputs))

    def parting(self, side: Sequence[RequestStep]) -> int:
        """The step of a side, from 0, in which its first different token came; the number of steps if none did."""
        made = 0
        for place, step in enumerate(side):
            made += step.emitted
            if self.differ and made > self.same:
                return place
        return len(side)

    @property
    def gained(self) -> float | None:
        """Acceptance length of the fork minus that of the original."""
        a, b = (figures.tau for figures in self.figures)
        return None if a is None or b is None else b - a

    def describe(self, vocabulary: Vocabulary) -> str:
        """Both outputs with the first difference marked, and the change in acceptance length."""
        lines = [f"fork of {self.request}@{self.index}: {self.changes}"]
        for name, tokens, figures in zip(("original", "fork"), self.outputs, self.figures, strict=True):
            before = vocabulary.text(tokens[: self.same])[-TEXT:]
            after = vocabulary.text(tokens[self.same :])[:TEXT]
            tau = f"τ {figures.tau:.3f} over {plural(figures.drafts, 'draft')}" if figures.drafts else "no drafts"
            lines.append(f"{name:<9} {tau}")
            lines.append(f"          {before}{'»' if self.differ else ''}{after}".replace("\n", "⏎"))
        lines.append(self.difference(vocabulary))
        if self.gained is not None:
            lines.append(f"acceptance length {self.gained:+.3f}")
        if self.forced:
            lines.append("a verdict, coin or token was forced: this fork is not lossless")
        lines += [self.note] if self.note else []
        for name, side in (("original", self.original), ("fork", self.fork)):
            place = self.parting(side) if self.differ else 0
            if place < len(side):
                place_text = f"{self.request}@{self.index + place}, +{place} since the fork"
                lines += [f"{name}, {place_text}:", draw_tree(side[place], vocabulary)]
        return "\n".join(lines)

    def difference(self, vocabulary: Vocabulary) -> str:
        if not self.differ:
            return "the same tokens"
        a, b = (vocabulary.show(x[self.same]) if self.same < len(x) else "the end" for x in self.outputs)
        why = ", at a near tie: rounding alone may explain it" if self.near_tie else ""
        why = f": {self.explained} explains it" if self.explained else why  # rounding, where no change can matter
        return f"first difference: token {self.same} after the fork, {a} became {b}{why}"

    @property
    def near_tie(self) -> bool:
        """Whether the first difference is in a step with a decision, or at a draw, that rounding could change."""
        parted = [side[place] for side in (self.original, self.fork) if (place := self.parting(side)) < len(side)]
        decided = any(step.verdict is not None and bool(step.verdict.near_ties(self.dtype)) for step in parted)
        return decided or (len(parted) == 2 and part_at_near_draw(parted[0], parted[1], self.dtype))


def part_at_near_draw(step: RequestStep, other: RequestStep, dtype: str) -> bool:
    """Whether the first node at which two trees differ is one of `near_draws`: rounding may be why."""
    pairs = zip(step.tree.token.tolist(), other.tree.token.tolist(), strict=False)
    return next((node for node, (left, right) in enumerate(pairs) if left != right), None) in step.near_draws(dtype)
