"""Where the last tokens of a text occurred before: the occurrences of its longest suffixes, in one text or in several.

A suffix tree answers the same question in less time for a text that repeats itself without end; this keeps, for each
pair of tokens, the last places at which it ended, and compares backwards from there. So memory is bounded by what was
taken in, and a look by MOST occurrences, and taking a text back is as simple as taking it in.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

SHORTEST = 2  # tokens of a suffix
MOST = 128  # occurrences of a pair that are looked at, the latest
Pair = tuple[int, int]
Place = tuple["Text", int]  # an occurrence: the index past its last token, in a text


class Text:
    """A growing text and its pairs of tokens."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._ends: dict[Pair, array[int]] = {}  # the indices past each pair, rising

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        """The text is now this; it begins with what it was."""
        for at in range(len(self.tokens), len(tokens)):
            self.tokens.append(tokens[at])
            if at:
                self._ends.setdefault((tokens[at - 1], tokens[at]), array("i")).append(at + 1)

    def cut(self, length: int) -> None:
        """Only the first `length` tokens are left."""
        while len(self.tokens) > length:
            if len(self.tokens) > 1:
                pair = (self.tokens[-2], self.tokens[-1])
                ends = self._ends[pair]
                ends.pop()
                if not ends:
                    del self._ends[pair]
            self.tokens.pop()

    def ends(self, pair: Pair, most: int) -> Iterator[int]:
        """The last places past a pair that something follows, latest first."""
        ends = self._ends.get(pair, ())
        for at in range(len(ends) - 1, max(len(ends) - 1 - most, -1), -1):
            if ends[at] < len(self.tokens):
                yield ends[at]


class Shelf:
    """Texts of earlier requests, `most` tokens at most: the oldest is dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0  # tokens
        self._texts: dict[str, Text] = {}

    def put(self, name: str, tokens: Sequence[int]) -> None:
        """A request's text, as much of its end as there is room for, in place of an earlier one of that name."""
        self.take(name)
        self._texts[name] = text = Text()
        text.grow(tokens[-self.most :])
        self.size += len(text)
        while self.size > self.most:
            self.take(next(iter(self._texts)))

    def take(self, name: str) -> None:
        """Away with a request's text."""
        self.size -= len(self._texts.pop(name, ()))

    def others(self, name: str) -> list[Text]:
        """All but that request's own, oldest first."""
        return [text for other, text in self._texts.items() if other != name]


def occurrences(suffix: Sequence[int], texts: Sequence[Text], longest: int) -> dict[int, list[Place]]:
    """Where the last 2, 3, ... `longest` tokens of `suffix` occurred with something behind them, by how many.

    Of a length that occurred as often as the next longer one only the longer is given. Later texts, and later places in
    each, come first.
    """
    if len(suffix) < SHORTEST:
        return {}
    pair = (suffix[-2], suffix[-1])
    places: list[Place] = []
    for text in reversed(texts):
        places += [(text, end) for end in text.ends(pair, MOST - len(places))]
    found: dict[int, list[Place]] = {}
    size = SHORTEST
    while places:
        longer = []
        if size < min(longest, len(suffix)):
            before = suffix[-size - 1]
            longer = [(text, end) for text, end in places if end > size and text.tokens[end - size - 1] == before]
        if len(longer) < len(places):
            found[size] = places
        places, size = longer, size + 1
    return found
