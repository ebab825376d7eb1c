"""Which n-grams of a growing text were followed by what, kept as the text grows and is cut."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

Gram = bytes  # its tokens, four bytes each
Ends = int | tuple[int, ...]  # latest first; an int where there is one, as nearly always: it is no garbage collector's


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
        self._text = array("i")
        self._ends: dict[Gram, Ends] = {}
        self._grams: list[Gram] = []  # that were taken in, one after another, each with its ends before
        self._before: list[Ends | None] = []

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the whole text so far; it begins with what was taken in before."""
        self._text.extend(tokens[len(self._text) :])
        for end in range(self._next, len(tokens) - self.depth + 1):
            for size in self._sizes_at(end):
                gram = self._text[end - size : end].tobytes()
                before = self._ends.get(gram)
                self._grams.append(gram)
                self._before.append(before)
                self._ends[gram] = end if before is None else self._together(end, before)
            self._next = end + 1

    def _together(self, end: int, before: Ends) -> Ends:
        """A new end, and those of the others that were followed by something else."""
        follows = self._text[end : end + self.depth]
        others = [e for e in _all(before) if self._text[e : e + self.depth] != follows]
        return (end, *others)[: self.width] if others else end

    def cut(self, length: int) -> None:
        """Only the first `length` tokens are left."""
        del self._text[length:]
        while self._next > max(length - self.depth + 1, self._first):
            self._next -= 1
            for _ in self._sizes_at(self._next):
                gram, before = self._grams.pop(), self._before.pop()
                if before is None:
                    del self._ends[gram]
                else:
                    self._ends[gram] = before

    def ends(self, size: int) -> Iterator[int]:
        """Earlier ends of the last `size` tokens, latest first; of those with one continuation only the latest."""
        text = self._text
        suffix = text[-size:]
        for end in range(len(text) - 1, max(len(text) - self.depth, size - 1), -1):
            if text[end - size : end] == suffix:
                yield end
        yield from _all(self._ends.get(suffix.tobytes(), ()))

    def _sizes_at(self, end: int) -> range:
        """Sizes of the n-grams that can end there."""
        return range(self.sizes.start, min(self.sizes.stop, end + 1))


def _all(ends: Ends) -> tuple[int, ...]:
    return (ends,) if isinstance(ends, int) else ends
