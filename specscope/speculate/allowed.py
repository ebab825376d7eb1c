"""Which tokens may follow a request's output: by the form that it must have, and by its least length.

A row is a bit for each token, int32 [V / 32, rounded up]: what is not allowed has a logit of minus infinity, in p and
in what drafts are drawn from. vLLM's meaning: below min_tokens neither EOS nor a stop token can come, unless the form
allows nothing else.

A matcher of xgrammar is kept for each request that has a form. It is advanced to, or rolled back to, whatever output it
is asked about: a rejection, a rewind, a preemption and a fork need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import put
from specscope.trace.record.tree import Ints


class Allowed:
    """What may follow one request's output. A function of the tokens alone: what it caches only saves time."""

    def __init__(
        self, vocabulary: int, stops: Iterable[int], min_tokens: int = 0, grammar: GrammarState | None = None
    ) -> None:
        """`vocabulary`: the width of the logits; `stops`: EOS and the request's stop tokens."""
        self.vocabulary, self.min_tokens, self.grammar = vocabulary, min_tokens, grammar
        bits = np.ones(32 * width(vocabulary), np.bool_)
        self._all = np.packbits(bits).view(np.int32)
        bits[[token for token in stops if token < vocabulary]] = False
        self._early = np.packbits(bits, bitorder="little").view(np.int32)  # what may come below min_tokens

    def rows(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> Ints | None:
        """int32 [n, V / 32] what may follow the output and each path; None where all may.

        A row without a bit: the form refuses the path, has ended, or cannot go on.
        """
        if self.grammar is None and len(output) >= self.min_tokens:
            return None
        if self.grammar is not None:
            self.grammar.follow(output)
        return np.stack([self._row(len(output) + len(path), path) for path in paths])

    def _row(self, length: int, path: Sequence[int]) -> Ints:
        row = self._all if self.grammar is None else self.grammar.row(path)
        if length >= self.min_tokens:
            return row
        early: Ints = row & self._early
        return early if early.any() else row

    def stuck(self, output: Sequence[int]) -> str:
        """Why an output that has not ended cannot go on; "" where it can."""
        if self.grammar is None:
            return ""
        self.grammar.follow(output)
        if self.grammar.refused:
            return "structured_outputs: the output has a token that its form does not allow"
        if not self.grammar.row(()).any():
            return "structured_outputs: no token of the vocabulary can continue this output"
        return ""


def width(vocabulary: int) -> int:
    """Numbers of a row: a bit for each token."""
    return (vocabulary + 31) // 32


def allows(row: Ints, token: int) -> bool:
    """Whether a row [V / 32] has the token's bit."""
    return bool(int(row[token // 32]) >> token % 32 & 1)


def unpacked(rows: Ints, vocabulary: int) -> NDArray[np.bool_]:
    """bool [n, V] of int32 [n, V / 32]."""
    return np.unpackbits(rows.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)


def mask_(logits: Tensor, rows: Ints) -> Tensor:
    """Logits [n, V], float32, with minus infinity where the rows [n, V / 32] have no bit; in place.

    A row without any bit stays: nothing can be drawn from it that is kept, and it must not become NaN.
    """
    refused = ~unpacked(np.ascontiguousarray(rows), logits.shape[1])
    refused[~rows.any(axis=1)] = False
    return logits.masked_fill_(put(refused, logits.device), -torch.inf)


class GrammarState:
    """A matcher behind an output, and for a while behind a path of drafted tokens after it. Of one thread at a time."""

    def __init__(self, matcher: Any, vocabulary: int, never: frozenset[int]) -> None:  # noqa: ANN401
        """`matcher`: xgrammar's; `never`: the tokens that are no text, and do not end the output either."""
        self._matcher, self._vocabulary, self._never = matcher, vocabulary, never
        self._output: list[int] = []  # what the matcher has accepted of the output
        self._path: list[int] = []  # and of a path behind it
        self._rows: dict[tuple[int, ...], Ints] = {}  # what is allowed behind each path; of this output
        self.refused = False  # whether the output went on with a token that the grammar refuses

    def follow(self, output: Sequence[int]) -> None:
        """Move to the end of this output, forward or back."""
        if list(output) != self._output or self.refused:
            self._rows.clear()
            self._move(self._path, ())
            self.refused = not self._move(self._output, output)

    def row(self, path: Sequence[int]) -> Ints:
        """What may follow the output and this path: a bit for each token, int32 [V / 32, rounded up].

        None are set where the grammar refuses the path, has ended, or can go on with no token that there is.
        """
        key = tuple(path)
        if key not in self._rows:
            rows = np.zeros((1, width(self._vocabulary)), np.int32)
            if not self.refused and self._move(self._path, key) and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(rows, 0)  # it would raise behind the end
            self._rows[key] = rows[0]
        return self._rows[key]

    def _move(self, accepted: list[int], wanted: Sequence[int]) -> bool:
        """Roll back and accept, until `accepted`, the last that the matcher did, is what is wanted, or a beginning of
        it: False where the grammar refuses a token. What xgrammar would warn of is not asked for.
        """
        pairs = enumerate(zip(accepted, wanted, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(accepted), len(wanted)))
        if same < len(accepted):
            self._matcher.rollback(len(accepted) - same)
            del accepted[same:]
        for token in wanted[same:]:
            known = 0 <= token < self._vocabulary and token not in self._never
            if not known or self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            accepted.append(token)
        return True
