"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specscope.model.features import AuxLayer
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.trace.records import Phase, Verdict
from specscope.trace.tree import ROOT, DraftTree, Ints


class NgramDrafter:
    """Continues the most recent earlier occurrences of the longest suffix that has one.

    `width` 1 gives a chain; more give a tree of the most recent distinct continuations, most recent first. They
    share their common beginnings. Deterministic: q is a point mass.
    """

    name = "ngram"
    aux_layers: tuple[AuxLayer, ...] = ()
    passes: tuple[Phase, ...] = ()

    def __init__(self, depth: int = 5, width: int = 1, longest: int = 4, shortest: int = 2) -> None:
        self.depth = depth
        self.width = width
        self.longest = longest
        self.shortest = shortest
        self.max_depth = depth
        self.max_nodes = depth * width

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A trie of continuations for each request."""
        return [self._draft(np.asarray(context.tokens, dtype=np.int32)) for context in contexts]

    def _draft(self, tokens: Ints) -> Draft:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            ends = occurrences(tokens, size)
            if len(ends):
                found = distinct([tokens[end : end + self.depth].tolist() for end in ends[::-1]], self.width)
                return Draft(trie(found))
        return NO_DRAFT

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """It keeps nothing between steps."""

    def observe(self, request: str, start: int, features: Tensor) -> None:
        """It asks for no features."""

    def rewind(self, request: str, tokens: int) -> None:
        """It keeps nothing between steps."""

    def release(self, request: str) -> None:
        """It keeps nothing between steps."""


def occurrences(tokens: Ints, size: int) -> np.ndarray:
    """Ends (index past the last token), ascending, of earlier occurrences of the last `size` tokens."""
    suffix = tokens[-size:]
    candidates = np.flatnonzero(tokens[size - 1 : -1] == suffix[-1]) + size
    for back in range(2, size + 1):
        candidates = candidates[tokens[candidates - back] == suffix[-back]]
    return candidates


def distinct(continuations: Sequence[list[int]], width: int) -> list[list[int]]:
    """The first `width` that are not a beginning of an earlier one."""
    kept: list[list[int]] = []
    for tokens in continuations:
        if not any(other[: len(tokens)] == tokens for other in kept):
            kept.append(tokens)
            if len(kept) == width:
                break
    return kept


def trie(sequences: Sequence[list[int]]) -> DraftTree:
    """Sequences as a tree that shares common beginnings, breadth first, earlier sequences first."""
    node_of: dict[tuple[int, ...], int] = {}
    token: list[int] = []
    parent: list[int] = []
    for depth in range(max(map(len, sequences), default=0)):
        for sequence in sequences:
            path = tuple(sequence[: depth + 1])
            if len(path) == depth + 1 and path not in node_of:
                node_of[path] = len(token)
                token.append(path[-1])
                parent.append(node_of[path[:-1]] if depth else ROOT)
    return DraftTree.build(token, parent)
