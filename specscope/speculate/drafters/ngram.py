"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.ngram_index import NgramIndex
from specscope.speculate.drafters.text_drafter import TextDrafter
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.tree import ROOT, DraftTree


class NgramDrafter(TextDrafter[NgramIndex]):
    """Continues the most recent earlier occurrences of the longest suffix that has one.

    `width` 1 gives a chain; more give a tree of the most recent distinct continuations, most recent first. They
    share their common beginnings.
    """

    name = "ngram"

    def __init__(self, depth: int = 5, width: int = 1, longest: int = 4, shortest: int = 2) -> None:
        super().__init__(depth * width, depth)
        self.depth = depth
        self.width = width
        self.longest = longest
        self.shortest = shortest

    def _new_index(self) -> NgramIndex:
        return NgramIndex(self.depth, self.width, range(self.shortest, self.longest + 1))

    def _continue(self, context: Context, index: NgramIndex) -> Draft:
        tokens = context.tokens
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            if continuations := distinct((tokens[end : end + self.depth] for end in index.ends(size)), self.width):
                return Draft(trie(continuations), method=MethodNotes(match_length=size))
        return NO_DRAFT


def distinct(continuations: Iterable[Sequence[int]], width: int) -> list[Sequence[int]]:
    """The first `width` that are not a beginning of an earlier one."""
    unique: list[Sequence[int]] = []
    for tokens in continuations:
        if not any(other[: len(tokens)] == tokens for other in unique):
            unique.append(tokens)
            if len(unique) == width:
                break
    return unique


def trie(sequences: Sequence[Sequence[int]]) -> DraftTree:
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
