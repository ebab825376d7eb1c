"""How often each token occurs in a request: what penalties are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Ints

FIRST = 64  # places at first; doubled when they are full


@dataclass
class TokenCounts:
    """The different tokens of a prompt and an output, with how often each is in the output.

    A token costs the same to add or to take away however many there are. What is taken away keeps its place, with a
    count of 0. The arrays are as long as there are different tokens: rows of logits are changed by them at once.
    """

    _place: dict[int, int] = field(default_factory=dict)
    _token: NDArray[np.int64] = field(default_factory=lambda: np.zeros(FIRST, np.int64))
    _times: Ints = field(default_factory=lambda: np.zeros(FIRST, np.int32))
    _prompt: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(FIRST, np.bool_))

    @staticmethod
    def of(prompt: Iterable[int], output: Iterable[int] = ()) -> TokenCounts:
        """The counts of a prompt and an output."""
        counts = TokenCounts()
        for token in prompt:
            place = counts._at(token)
            counts._prompt[place] = True
        for token in output:
            counts.add(token)
        return counts

    def add(self, token: int) -> None:
        """Count one more occurrence of the token in the output."""
        place = self._at(token)  # first: it may make the arrays anew
        self._times[place] += 1

    def remove(self, token: int) -> None:
        """Count one occurrence less."""
        self._times[self._at(token)] -= 1

    def _at(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._token):
                self._token, self._times, self._prompt = (
                    np.concatenate([x, np.zeros_like(x)]) for x in (self._token, self._times, self._prompt)
                )
            self._token[place] = token
        return place

    def times(self, token: int) -> int:
        """How often the token occurs in the output."""
        place = self._place.get(token)
        return 0 if place is None else int(self._times[place])

    @property
    def seen(self) -> NDArray[np.int64]:
        """Each token of prompt and output once, int64 [U]."""
        used = slice(len(self._place))
        return self._token[used][self._prompt[used] | (self._times[used] > 0)]

    @property
    def output(self) -> tuple[NDArray[np.int64], Ints]:
        """Each token of the output once, int64 [U], and how often, int32 [U]."""
        used = slice(len(self._place))
        there = self._times[used] > 0
        return self._token[used][there], self._times[used][there]
