"""Text that loops: a cycle of up to 32 tokens that comes three times or more in a row.

A drafter guesses such text with ease, so an acceptance length that is measured on it says little of the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import Bools

LONGEST = 32  # tokens of a cycle
TIMES = 3  # repeats in a row
TOLD = 0.1  # share of the output in loops from which it is mentioned beside an acceptance length


def in_loops(tokens: NDArray[np.integer], text: NDArray[np.integer] | None = None) -> Bools:
    """[n] which tokens lie in such a cycle. `text`: [n] the text that each token is of; cycles do not go beyond one.

    A stretch of n tokens repeats itself after `period` where n - period tokens in a row equal the one that far ahead.
    So one pass for each period finds all of them.
    """
    n = len(tokens)
    depth = np.zeros(n + 1, np.int64)  # differences of the number of stretches that a token lies in
    for period in range(1, min(LONGEST, n // TIMES) + 1):
        same = (tokens[period:] == tokens[:-period]) & (tokens[period:] != NO_TOKEN)
        if text is not None:
            same &= text[period:] == text[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
        start, end = edges[::2], edges[1::2]
        long = end - start >= (TIMES - 1) * period
        np.add.at(depth, start[long], 1)
        np.add.at(depth, end[long] + period, -1)
    return np.cumsum(depth[:-1]) > 0


@dataclass(frozen=True)
class Loops:
    """How much of some output lies in loops, and the acceptance of the other steps."""

    tokens: int = 0  # of the output, where they are told
    looped: int = 0  # of those, in loops
    rest: Acceptance = field(default_factory=Acceptance)  # without the steps all of whose output lies in loops

    @property
    def share(self) -> float | None:
        return self.looped / self.tokens if self.tokens else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "looped": self.looped,
            "share": self.share,
            "drafts_without": self.rest.drafts,
            "mean_acceptance_length_without": self.rest.tau,
        }


def loop_share(outputs: Sequence[NDArray[np.integer]]) -> float:
    """The share of all tokens of some whole outputs that lie in loops; 0 without tokens."""
    texts = np.repeat(np.arange(len(outputs)), [len(output) for output in outputs])
    return float(in_loops(np.concatenate(outputs), texts).mean()) if len(texts) else 0.0


def loops_of(request: Sequence[RequestStep]) -> Loops:
    """The loops of a request, from its steps in order. No cycle continues across missing steps."""
    texts = accumulate((b.index > a.index + 1 for a, b in pairwise(request)), initial=0)
    judged = [(step, text, step.output()) for step, text in zip(request, texts, strict=False) if step.is_judged]
    sizes = np.array([len(output) for *_, output in judged], np.int64)
    tokens = np.array([token for *_, output in judged for token in output], np.int64)
    sums = np.cumsum([0, *in_loops(tokens, np.repeat(np.array([text for _, text, _ in judged], np.int64), sizes))])
    looped = np.diff(sums[np.cumsum([0, *sizes])]).tolist()  # tokens of each step
    each = zip(judged, looped, strict=True)
    rest = measure(step for (step, _, output), inside in each if not output or inside < len(output))
    return Loops(sum(len(output) for *_, output in judged if NO_TOKEN not in output), sum(looped), rest)


def together(parts: Iterable[Loops]) -> Loops:
    every, rest = list(parts), Acceptance()
    for part in every:
        rest.merge(part.rest)
    return Loops(sum(part.tokens for part in every), sum(part.looped for part in every), rest)
