"""Which tokens may follow a request's output: by the form that it must have, and by its least length.

A row is a bit for each token, int32 [V / 32, rounded up]: what is not allowed has a logit of minus infinity, in p and
in what drafts are drawn from. vLLM's meaning: below min_tokens neither EOS nor a stop token can come, unless the form
allows nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import put
from specscope.speculate.structured.matcher import GrammarState
from specscope.trace.record.tree import Ints


class Allowed:
    """What may follow one request's output. A function of the tokens alone: what it caches only saves time."""

    def __init__(
        self, vocabulary: int, stops: Iterable[int], min_tokens: int = 0, grammar: GrammarState | None = None
    ) -> None:
        """`vocabulary`: the width of the logits; `stops`: EOS and the request's stop tokens."""
        self.vocabulary, self.min_tokens, self.grammar = vocabulary, min_tokens, grammar
        self._all = ones(vocabulary)
        self._early = self._all.copy()  # what may come below min_tokens
        bits = self._early.view(np.uint32)
        for token in stops:
            if token < vocabulary:
                bits[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))

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


def ones(vocabulary: int) -> Ints:
    """A row that allows every token."""
    return np.full((vocabulary + 31) // 32, -1, np.int32)


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
    dead = ~np.asarray(rows.any(axis=1))
    if dead.any():
        rows = np.where(dead[:, None], np.int32(-1), rows)
    refused = ~unpacked(np.ascontiguousarray(rows), logits.shape[1])
    return logits.masked_fill_(put(refused, logits.device), -torch.inf)
