"""Tokens: the token ids of one request, with their counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.tree import Ints


class Tokens(Sequence[int]):
    """Prompt and output, which grow at the end and are cut there when the debugger goes back: `del tokens[n:]`.

    There is no other way to change them, so that what is counted is what they are.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.prompt_len = len(prompt)
        self._all = [*prompt, *output]
        self._counts: TokenCounts | None = None

    @property
    def counts(self) -> TokenCounts:
        """How often each occurs. Counted when it is first asked for, and kept from then on."""
        if self._counts is None:
            self._counts = TokenCounts.of(self._all[: self.prompt_len], self._all[self.prompt_len :])
        return self._counts

    def append(self, token: int) -> None:
        """One more token of output."""
        self._all.append(token)
        if self._counts is not None:
            self._counts.add(token)

    def __delitem__(self, part: slice) -> None:
        """Cut the end off. Raises ValueError for anything else, and for a part of the prompt."""
        start, stop, step = part.indices(len(self))
        if step != 1 or stop != len(self) or start < self.prompt_len:
            raise ValueError("only the end of the output can be cut off")
        if self._counts is not None:
            for token in self._all[start:]:
                self._counts.remove(token)
        del self._all[start:]

    def __len__(self) -> int:
        return len(self._all)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._all[index]

    def __repr__(self) -> str:
        return f"Tokens({self._all[: self.prompt_len]}, {self._all[self.prompt_len :]})"


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
