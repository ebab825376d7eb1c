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


class GrammarState:
    """A matcher behind an output, and for a while behind a path of drafted tokens after it. Of one thread at a time."""

    def __init__(
        self,
        xgr: Any,  # noqa: ANN401
        grammar: Any,  # noqa: ANN401
        stops: Sequence[int],
        vocabulary: int,
        never: frozenset[int],
    ) -> None:
        """`stops`: the tokens that end the output where the grammar is complete; `never`: those without any text."""
        self._matcher = xgr.GrammarMatcher(grammar, override_stop_tokens=list(stops))
        self._vocabulary = vocabulary
        self._never = never - set(stops)
        self._output: list[int] = []  # what the matcher has accepted of the output
        self._path: list[int] = []  # and of a path behind it
        self._rows: dict[tuple[int, ...], Ints] = {}  # what is allowed behind each path; of this output
        self.refused = False  # whether the output went on with a token that the grammar refuses

    def follow(self, output: Sequence[int]) -> None:
        """Move to the end of this output, forward or back."""
        wanted = list(output)
        if wanted == self._output and not self.refused:
            return
        self._rollback_path(0)
        self._rows.clear()
        same = _common(self._output, wanted)
        if same < len(self._output):
            self._matcher.rollback(len(self._output) - same)
            del self._output[same:]
        for token in wanted[same:]:
            if not self._accept(token):
                break
            self._output.append(token)
        self.refused = len(self._output) < len(wanted)

    def row(self, path: Sequence[int]) -> Ints:
        """What may follow the output and this path: a bit for each token, int32 [V / 32, rounded up].

        None are set where the grammar refuses the path, has ended, or can go on with no token that there is.
        """
        key = tuple(path)
        if key not in self._rows:
            rows = np.zeros((1, (self._vocabulary + 31) // 32), np.int32)
            if self._go(key) and not self._matcher.is_terminated():  # where it is, filling would raise
                self._matcher.fill_next_token_bitmask(rows, 0)
            self._rows[key] = rows[0]
        return self._rows[key]

    def _go(self, path: Sequence[int]) -> bool:
        """Move to the end of a path; False where the grammar refuses one of its tokens."""
        if self.refused:
            return False
        self._rollback_path(_common(self._path, path))
        for token in path[len(self._path) :]:
            if not self._accept(token):
                return False
            self._path.append(token)
        return True

    def _accept(self, token: int) -> bool:
        """False, and nothing changed, where the grammar refuses it. What xgrammar would warn of is not asked for."""
        if token in self._never or not 0 <= token < self._vocabulary or self._matcher.is_terminated():
            return False
        return bool(self._matcher.accept_token(token))

    def _rollback_path(self, length: int) -> None:
        if len(self._path) > length:
            self._matcher.rollback(len(self._path) - length)
            del self._path[length:]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
