"""Which n-grams of a growing text were followed by what, kept as the text grows and is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Gram = tuple[int, ...]


class NgramIndex:
    """For each n-gram its last occurrences that were followed by something else each time, at most `width` of them.

    An occurrence is named by its end, the index past its last token. An end is taken in once the `depth` tokens that
    follow it are there, so that what follows two ends is the same or not for good; the few ends after that are looked
    at one by one. So a look costs the same however long the text is, and however often it repeats itself. What was
    taken in is undone in reverse when the text is cut.
    """

    def __init__(self, depth: int, width: int, sizes: range) -> None:
        self.depth, self.width, self.sizes = depth, width, sizes
        self._first = self._next = min(sizes, default=0)  # the first end that was not taken in
        self._ends: dict[Gram, tuple[int, ...]] = {}  # latest first
        self._undo: list[tuple[Gram, tuple[int, ...]]] = []  # a gram, and its ends before; one for each size that fits

    def grow(self, tokens: Sequence[int]) -> None:
        """The text is now this; it begins with what it was."""
        for end in range(self._next, len(tokens) - self.depth + 1):
            follows = tokens[end : end + self.depth]
            for gram in self._grams(tokens, end):
                before = self._ends.get(gram, ())
                others = [e for e in before if tokens[e : e + self.depth] != follows]
                self._undo.append((gram, before))
                self._ends[gram] = (end, *others)[: self.width]
            self._next = end + 1

    def cut(self, length: int) -> None:
        """Only the first `length` tokens are left."""
        while self._next > max(length - self.depth + 1, self._first):
            self._next -= 1
            for _ in range(sum(size <= self._next for size in self.sizes)):
                gram, before = self._undo.pop()
                if before:
                    self._ends[gram] = before
                else:
                    del self._ends[gram]

    def ends(self, tokens: Sequence[int], size: int) -> Iterator[int]:
        """Earlier ends of the last `size` tokens, latest first; of those with one continuation only the latest."""
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, max(len(tokens) - self.depth, size - 1), -1):
            if tokens[end - size : end] == suffix:
                yield end
        yield from self._ends.get(tuple(suffix), ())

    def _grams(self, tokens: Sequence[int], end: int) -> Iterator[Gram]:
        return (tuple(tokens[end - size : end]) for size in self.sizes if size <= end)
