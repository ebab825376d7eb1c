"""Tokens: the token ids of one request, with their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from specscope.speculate.counts import TokenCounts


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
