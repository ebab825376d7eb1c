"""Acceptance: how often nodes were accepted, by what a text and a model said of them. No torch.

Two sources that draft for one request say things that cannot be compared: the share of occurrences that went on so,
and a model's probability. Here both become a chance of being accepted, by counting: of the candidates of each kind
(what the text said, what the model said), how many were the token that came. Candidates count whether they were
verified or not, as far as the committed text tells what came, so that the choice of a tree does not bias the count.

What is counted is a function of the request's own steps before a position, so that going back in a request, giving up
its place and running it again all give the same numbers, whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
# What a source says of a candidate: how sure it is, in one of its levels; that it drafted others there; or that it did
# not look there.
SHARES = (0.4, 0.95)  # of the occurrences that came this far: how many went on so
MATCHES = (4, 8, 16)  # tokens that matched, those on the way down to the candidate included
PROBABILITIES = (0.1, 0.25, 0.5, 0.75, 0.9)  # a model's, of the token at its parent
TEXT_LEVELS = (len(SHARES) + 1) * (len(MATCHES) + 1)
MODEL_LEVELS = len(PROBABILITIES) + 1
OTHERS, UNSEEN = -1, -2  # it drafted others; it did not look

STRENGTH = 12.0  # candidates that what is known beforehand counts as much as
STRENGTH_OF_ALL = 24.0  # and where it is told apart from what became of other requests'
KEEP = 0.995  # of the counts of all requests, at each step that had candidates
# Known beforehand, where the other source did not look: measured with the default model and its head, on prompts of
# several kinds, on copying and on edits of a file. By share, then by match; by the model's probability.
TEXT_PRIOR = (0.2, 0.25, 0.3, 0.3, 0.3, 0.4, 0.5, 0.7, 0.6, 0.75, 0.92, 0.96)
MODEL_PRIOR = (0.05, 0.17, 0.34, 0.63, 0.77, 0.85)


def text_level(share: float, match: int) -> int:
    """How sure a text is: `share` of the occurrences went on so behind `match` tokens that are the same."""
    return sum(share >= s for s in SHARES) * (len(MATCHES) + 1) + sum(match >= m for m in MATCHES)


def model_level(prob: float) -> int:
    """How sure a model is."""
    return sum(prob >= p for p in PROBABILITIES)


def code(text: int, model: int) -> int:
    """What both say, as one number from 0 to 111."""
    return (text + 2) * (MODEL_LEVELS + 2) + model + 2


def _prior(text: int, model: int) -> float:
    """A candidate's chance before anything was counted."""
    of_text = TEXT_PRIOR[text] if text >= 0 else 0.0
    of_model = MODEL_PRIOR[model] if model >= 0 else 0.0
    if text >= 0 and model >= 0:
        return 1 - (1 - of_text) * (1 - of_model)
    alone = of_text + of_model
    return alone**2 if OTHERS in (text, model) else alone  # that the other one has other tokens makes it less likely


KINDS = (TEXT_LEVELS + 2) * (MODEL_LEVELS + 2)
PRIOR = tuple(_prior(text, model) for text in range(-2, TEXT_LEVELS) for model in range(-2, MODEL_LEVELS))
KNOWN = np.array(PRIOR)


@dataclass
class Lately:
    """Of all requests of an engine: what became of their candidates in the last steps."""

    _tried: Doubles = field(default_factory=lambda: np.zeros(KINDS))
    _accepted: Doubles = field(default_factory=lambda: np.zeros(KINDS))

    def learn(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        """What became of a step's candidates: their kinds, and whether each one came."""
        if not outcomes:
            return
        self._tried *= KEEP
        self._accepted *= KEEP
        for kind, came in outcomes:
            self._tried[kind] += 1
            self._accepted[kind] += came

    def chances(self) -> list[float]:
        """That a candidate is accepted where its parent is, by kind, before anything is known of its request."""
        found: list[float] = ((self._accepted + STRENGTH_OF_ALL * KNOWN) / (self._tried + STRENGTH_OF_ALL)).tolist()
        return found


@dataclass
class CandidateHistory:
    """Of one request: what became of its candidates, step by step."""

    _steps: list[tuple[int, bytes]] = field(default_factory=list)  # the root's position; code * 2 + accepted of each
    _tried: list[int] = field(default_factory=lambda: [0] * KINDS)
    _accepted: list[int] = field(default_factory=lambda: [0] * KINDS)

    def chance(self, kind: int, beforehand: Sequence[float] = PRIOR) -> float:
        """That a candidate of this kind is accepted where its parent is. `beforehand`: what is known of each kind."""
        return (self._accepted[kind] + STRENGTH * beforehand[kind]) / (self._tried[kind] + STRENGTH)

    def learn(self, position: int, outcomes: Iterable[tuple[int, bool]]) -> None:
        """What became of the candidates behind the root at `position`: their kinds, and whether each one came."""
        step = bytes(kind * 2 + came for kind, came in outcomes)
        self._steps.append((position, step))
        self._count(step, 1)

    def cut(self, position: int) -> None:
        """Forget the steps from this position on."""
        while self._steps and self._steps[-1][0] >= position:
            self._count(self._steps.pop()[1], -1)

    def before(self, position: int) -> CandidateHistory:
        """Another one that knows the steps before this position."""
        other = CandidateHistory()
        for at, step in self._steps:
            if at < position:
                other._steps.append((at, step))
                other._count(step, 1)
        return other

    def _count(self, step: bytes, by: int) -> None:
        for one in step:
            self._tried[one >> 1] += by
            self._accepted[one >> 1] += by * (one & 1)
