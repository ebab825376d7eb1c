"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specscope.model.features import AuxLayer
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.ngram_index import NgramIndex
from specscope.speculate.drafters.suffix_index import Shelf
from specscope.trace.method import MethodNotes
from specscope.trace.records import Phase, Verdict
from specscope.trace.tree import ROOT, DraftTree


@dataclass
class _Text:
    """A request's tokens as they were seen last."""

    index: NgramIndex
    length: int = -1  # of the text that `draft` continues; -1 before the first
    draft: Draft = NO_DRAFT


class NgramDrafter:
    """Continues the most recent earlier occurrences of the longest suffix that has one.

    `width` 1 gives a chain; more give a tree of the most recent distinct continuations, most recent first. They
    share their common beginnings. Deterministic: q is a point mass.
    """

    name = "ngram"
    aux_layers: tuple[AuxLayer, ...] = ()
    passes: tuple[Phase, ...] = ()
    shelf: Shelf | None = None

    def __init__(self, depth: int = 5, width: int = 1, longest: int = 4, shortest: int = 2) -> None:
        self.depth = depth
        self.width = width
        self.longest = longest
        self.shortest = shortest
        self.max_depth = depth
        self.max_nodes = depth * width
        self._texts: dict[str, _Text] = {}

    def most_nodes(self, context: Context) -> int:
        """As many as it will propose: they are looked up here, and kept."""
        return len(self._draft(context).tree)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A trie of continuations for each request."""
        return [self._draft(context) for context in contexts]

    def _draft(self, context: Context) -> Draft:
        text = self._texts.get(context.request)
        if text is None:
            index = NgramIndex(self.depth, self.width, range(self.shortest, self.longest + 1))
            self._texts[context.request] = text = _Text(index)
        if text.length != len(context.tokens):
            text.index.grow(context.tokens)
            text.length, text.draft = len(context.tokens), self._continue(context.tokens, text.index)
        return text.draft

    def _continue(self, tokens: Sequence[int], index: NgramIndex) -> Draft:
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            if found := distinct((tokens[end : end + self.depth] for end in index.ends(size)), self.width):
                return Draft(trie(found), method=MethodNotes(match_length=size))
        return NO_DRAFT

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """What was committed is seen when the request comes again."""

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        """It asks for no features."""

    def rewind(self, request: str, tokens: int) -> None:
        """Forget the end of a request's text."""
        text = self._texts.get(request)
        if text is not None:
            text.index.cut(tokens)
            text.length = -1

    def release(self, request: str) -> None:
        """Forget a request's text."""
        self._texts.pop(request, None)


def distinct(continuations: Iterable[Sequence[int]], width: int) -> list[Sequence[int]]:
    """The first `width` that are not a beginning of an earlier one."""
    kept: list[Sequence[int]] = []
    for tokens in continuations:
        if not any(other[: len(tokens)] == tokens for other in kept):
            kept.append(tokens)
            if len(kept) == width:
                break
    return kept


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
