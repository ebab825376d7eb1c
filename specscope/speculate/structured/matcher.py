"""Where a grammar stands behind an output, and what it allows next: a function of the tokens alone.

A matcher of xgrammar is kept for each request. It is advanced to, or rolled back to, whatever output it is asked about:
a rejection, a rewind, a preemption and a fork need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specscope.trace.record.tree import Ints


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
