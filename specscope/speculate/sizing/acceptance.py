"""Acceptance: how often nodes were accepted, by how sure their drafter was. No torch.

A model says how probable a path is; a text, how many of its occurrences went on so behind how many tokens that are the
same. Neither is the chance of being accepted, so that is counted: of a model's nodes by bins of their probability,
which makes a curve; of the candidates of two sources, whose probabilities cannot be compared, by what both said. These
count whether they were verified or not, as far as the committed text tells what came, so that the choice of a tree does
not bias the count.

What a request's candidates are counted by is a function of its own steps before a position, so that going back in a
request, giving up its place and running it again all give the same numbers, whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Floats

Doubles = NDArray[np.float64]

MEMORY = 20  # steps that a mean looks back on: fewer follow luck, more miss a change of text
BINS = 10  # of probabilities: fewer are told apart too little, more learn too slowly
KEEP = 1 - 1 / (BINS * MEMORY)  # of the counts at each tree or step that adds to them: each bin has its MEMORY
PRIOR_NODES = 0.5  # that what is expected of a bin counts as: less than one, as a drafter may be sure and wrong
STRENGTH = 16.0  # candidates of a kind that what is expected of it counts as: kinds of one request are rare

# Probabilities of a path, between which nodes are counted together: closer where they are low, as most paths' are.
EDGES = (np.arange(1, BINS) / BINS) ** 1.5
MIDDLES = (np.concatenate([[0.0], EDGES]) + np.concatenate([EDGES, [1.0]])) / 2
LEVELS = EDGES[::2]  # and those of a candidate where its parent is: half as many, as there are two sources
LIKELY = (np.concatenate([[0.0], LEVELS]) + np.concatenate([LEVELS, [1.0]])) / 2
TEXT_LEVELS = MODEL_LEVELS = len(LIKELY)
OTHERS, UNSEEN = -1, -2  # it drafted others; it did not look


@dataclass(frozen=True)
class Curve:
    """Acceptance by the drafter's probability: of a path, or of the likeliest token where draws are counted."""

    rates: Doubles  # [bins] at MIDDLES

    def at(self, scores: Sequence[float]) -> Doubles:
        """The probability that nodes are accepted, [n], from cumulative log probabilities."""
        rates: Doubles = np.interp(np.exp(np.asarray(scores, dtype=np.float64)), MIDDLES, self.rates)
        return rates


class Kind:
    """What became of nodes of one kind: a decaying count for each bin of probabilities, beside what is expected."""

    def __init__(self, expected: Doubles = MIDDLES) -> None:
        self.expected = expected  # before anything is known, and where nothing is known any more
        self.tries, self.hits = np.zeros(BINS), np.zeros(BINS)

    def add(self, scores: Floats | Doubles, accepted: NDArray[Any]) -> None:
        """Verified nodes by the logs of their probabilities, and which of them were accepted; -inf is left out."""
        hit = np.zeros(len(scores), np.bool_)
        hit[accepted] = True
        known = np.isfinite(scores)
        bins, accepted = np.searchsorted(EDGES, np.exp(scores[known])), hit[known]
        self.tries = KEEP * self.tries + np.bincount(bins, minlength=BINS)
        self.hits = KEEP * self.hits + np.bincount(bins[accepted], minlength=BINS)

    def curve(self, *, rises: bool = True) -> Curve:
        """As counted. `rises`: neighbours that fall are set to the higher one's rate, so that the best stay so."""
        rates = (self.hits + PRIOR_NODES * self.expected) / (self.tries + PRIOR_NODES)
        return Curve(np.maximum.accumulate(rates) if rises else rates)


def text_level(share: float, match: int) -> int:
    """How sure a text is: `share` of the occurrences went on so behind `match` tokens that are the same.

    That the next token is the same too, after so many, is as likely as by the rule of succession.
    """
    return model_level(share * (match + 1) / (match + 2))


def model_level(prob: float) -> int:
    """How sure a model is."""
    return int(np.searchsorted(LEVELS, prob, side="right"))


def code(text: int, model: int) -> int:
    """What both say, as one number from 0 to 63."""
    return (text + 2) * (MODEL_LEVELS + 2) + model + 2


def _prior(text: int, model: int) -> float:
    """A candidate's chance before anything was counted."""
    of_text = float(LIKELY[text]) if text >= 0 else 0.0
    of_model = float(LIKELY[model]) if model >= 0 else 0.0
    if text >= 0 and model >= 0:
        return 1 - (1 - of_text) * (1 - of_model)
    alone = of_text + of_model
    return alone**2 if OTHERS in (text, model) else alone  # that the other one has other tokens makes it less likely


KINDS = (TEXT_LEVELS + 2) * (MODEL_LEVELS + 2)
PRIOR = tuple(_prior(text, model) for text in range(-2, TEXT_LEVELS) for model in range(-2, MODEL_LEVELS))
KNOWN = np.array(PRIOR)


@dataclass
class Lately:
    """What became of the candidates of all requests of an engine in the last steps."""

    _tried: Doubles = field(default_factory=lambda: np.zeros(KINDS))
    _accepted: Doubles = field(default_factory=lambda: np.zeros(KINDS))

    def learn(self, outcomes: Sequence[tuple[int, bool]]) -> None:
        """Count a step's candidates: their kinds, and whether each one's token came."""
        if not outcomes:
            return
        self._tried *= KEEP
        self._accepted *= KEEP
        for kind, came in outcomes:
            self._tried[kind] += 1
            self._accepted[kind] += came

    def chances(self) -> list[float]:
        """The chance that a candidate is accepted where its parent is, by kind, with nothing known of its request."""
        chances: list[float] = ((self._accepted + STRENGTH * KNOWN) / (self._tried + STRENGTH)).tolist()
        return chances


@dataclass
class CandidateHistory:
    """What became of one request's candidates, step by step."""

    _steps: list[tuple[int, bytes]] = field(default_factory=list)  # the root's position; code * 2 + accepted of each
    _tried: list[int] = field(default_factory=lambda: [0] * KINDS)
    _accepted: list[int] = field(default_factory=lambda: [0] * KINDS)

    def chance(self, kind: int, beforehand: Sequence[float] = PRIOR) -> float:
        """The chance that a candidate of this kind is accepted where its parent is. `beforehand`: known of each."""
        return (self._accepted[kind] + STRENGTH * beforehand[kind]) / (self._tried[kind] + STRENGTH)

    def learn(self, position: int, outcomes: Iterable[tuple[int, bool]]) -> None:
        """Count the candidates below the root at `position`: their kinds, and whether each one's token came."""
        step = bytes(kind * 2 + came for kind, came in outcomes)
        self._steps.append((position, step))
        self._count(step, 1)

    def cut(self, position: int) -> None:
        """Forget the steps from this position on."""
        while self._steps and self._steps[-1][0] >= position:
            self._count(self._steps.pop()[1], -1)

    def before(self, position: int) -> CandidateHistory:
        """A copy that holds only the steps before this position."""
        other = CandidateHistory()
        for root, step in self._steps:
            if root < position:
                other._steps.append((root, step))
                other._count(step, 1)
        return other

    def _count(self, step: bytes, by: int) -> None:
        for entry in step:
            self._tried[entry >> 1] += by
            self._accepted[entry >> 1] += by * (entry & 1)
