"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.speculate.drafters.text_drafter import TextDrafter
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.tree import ROOT, DraftTree


class NgramIndex:
    """For each n-gram its last occurrences that were followed by something else each time, at most `width` of them.

    An occurrence is named by its end, the index past its last token. An end is taken in once the `depth` tokens that
    follow it are there, so that what follows two ends is the same or not for good; the few ends after that are looked
    at one by one. So a look costs the same however long the text is, and however often it repeats itself.
    """

    def __init__(self, depth: int, width: int, sizes: range) -> None:
        self.depth, self.width, self.sizes = depth, width, sizes
        self._next = sizes.start  # the first end that was not taken in
        self._text = array("i")
        self._ends: dict[bytes, tuple[int, ...]] = {}  # by the n-gram's tokens, four bytes each; latest first

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the whole text so far; it begins with what was taken in before."""
        self._text.extend(tokens[len(self._text) :])
        for end in range(self._next, len(tokens) - self.depth + 1):
            follows = self._text[end : end + self.depth]
            for size in range(self.sizes.start, min(self.sizes.stop, end + 1)):
                gram = self._text[end - size : end].tobytes()
                others = [e for e in self._ends.get(gram, ()) if self._text[e : e + self.depth] != follows]
                self._ends[gram] = (end, *others)[: self.width]
            self._next = end + 1

    def ends(self, size: int) -> Iterator[int]:
        """Earlier ends of the last `size` tokens, latest first; of those with one continuation only the latest."""
        text = self._text
        suffix = text[-size:]
        for end in range(len(text) - 1, max(len(text) - self.depth, size - 1), -1):
            if text[end - size : end] == suffix:
                yield end
        yield from self._ends.get(suffix.tobytes(), ())


class NgramDrafter(TextDrafter):
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
