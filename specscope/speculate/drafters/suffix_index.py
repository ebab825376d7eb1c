"""Where the last tokens of a text occurred before: the occurrences of its longest suffixes.

A suffix tree answers the same question, but takes a node or more a token and cannot be taken back. This keeps the
places of each pair of tokens, and compares backwards from the latest MOST of them. So memory is bounded by the length
of the text, a look by MOST, and undoing a token costs what taking it in did.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

SHORTEST = 2  # tokens of a suffix
MOST = 128  # occurrences of a pair that are looked at, the latest


def _pair(first: int, second: int) -> int:
    """Two token ids as one number."""
    return first << 32 | second


class Text:
    """A growing text, with the places of each pair of tokens in it as a linked list, latest first.

    A token takes 8 bytes, and a pair that was not there before some 100 in a dictionary.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self._before = array("i")  # [tokens] the place before this one of the pair that ends here; 0 for none
        self._last: dict[int, int] = {}  # by pair: the index past its last occurrence

    def __len__(self) -> int:
        return len(self.tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the whole text so far; it begins with what was taken in before."""
        length = len(self.tokens)
        self.tokens.extend(tokens[length:])
        if not length and self.tokens:
            self._before.append(0)
        for end in range(max(length, 1) + 1, len(self.tokens) + 1):
            pair = _pair(self.tokens[end - 2], self.tokens[end - 1])
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = end

    def cut(self, length: int) -> None:
        """Only the first `length` tokens are left."""
        for end in range(len(self.tokens), max(length, 1), -1):
            pair, before = _pair(self.tokens[end - 2], self.tokens[end - 1]), self._before[end - 1]
            if before:
                self._last[pair] = before
            else:
                del self._last[pair]
        del self.tokens[length:], self._before[length:]

    def ends(self, first: int, second: int, limit: int) -> list[int]:
        """The last places past a pair that something follows, latest first, at most `limit`."""
        places: list[int] = []
        end = self._last.get(_pair(first, second), 0)
        while end and len(places) < limit:
            if end < len(self.tokens):
                places.append(end)
            end = self._before[end - 1]
        return places

    def shared(self, end: int, suffix: array[int]) -> int:
        """How many of the last tokens of `suffix` the text has before `end`; its last two are known to be there."""
        low, high = SHORTEST, min(end, len(suffix))
        if self.tokens[end - high : end] == suffix[len(suffix) - high :]:
            return high
        while high - low > 1:  # `low` are the same, `high` are not
            middle = (low + high) // 2
            same = self.tokens[end - middle : end] == suffix[len(suffix) - middle :]
            low, high = (middle, high) if same else (low, middle)
        return low


def occurrences(text: Text, longest: int) -> dict[int, list[int]]:
    """Where its last 2, 3, ... `longest` tokens occurred with something behind them: by how many, the most first.

    A place is the index past the last of them. Of a length that occurred as often as the next longer one only the
    longer is given. Later places come first; MOST are looked at.
    """
    suffix = text.tokens[-longest:]
    if len(suffix) < SHORTEST:
        return {}
    places = text.ends(suffix[-2], suffix[-1], MOST)
    sizes = [text.shared(end, suffix) for end in places]
    return {
        least: [place for place, size in zip(places, sizes, strict=True) if size >= least]
        for least in sorted(set(sizes), reverse=True)
    }
