"""Wrapper: wraps coloured output as it grows, without starting again for every token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Generic, TypeVar

from rich.cells import cell_len

Mark = TypeVar("Mark")


class Wrapper(Generic[Mark]):
    """Takes bytes and marks, inks for one; gives lines of at most `width` cells, broken at spaces where there are any.

    A character whose bytes come with several tokens takes the mark of the one that completes it.
    """

    def __init__(self, width: int, escaped: Mark) -> None:
        self.width = max(1, width)
        self._escaped = escaped  # the mark of escaped control characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._done: list[Sequence[tuple[str, Mark]]] = []
        self._row: list[tuple[str, Mark]] = []  # the line that is being filled, a character each
        self._cells = 0
        self._space = -1  # index after the last space in the row

    def feed(self, piece: bytes, mark: Mark) -> None:
        """Add the text of a token."""
        for char in self._decoder.decode(piece):
            self._put(char, mark)

    def note(self, text: str, mark: Mark) -> None:
        """Add text that is not the model's; bytes that wait for their rest are given up."""
        for char in self._decoder.decode(b"", True) + text:
            self._put(char, mark)
        self._decoder.reset()

    def _put(self, char: str, mark: Mark) -> None:
        if char == "\n":
            self._break(len(self._row))
            return
        if char == "\t":
            char = " "
        elif not char.isprintable():
            for part in repr(char)[1:-1]:
                self._put(part, self._escaped)
            return
        cells = cell_len(char)
        if self._cells + cells > self.width:
            if char == " ":
                self._break(len(self._row))
                return
            self._break(self._space if self._space > 0 else len(self._row))
        self._row.append((char, mark))
        self._cells += cells
        if char == " ":
            self._space = len(self._row)

    def _break(self, at: int) -> None:
        self._done.append(_runs(self._row[:at]))
        self._row = self._row[at:]
        self._cells = sum(cell_len(char) for char, _ in self._row)
        self._space = -1

    def lines(self) -> list[Sequence[tuple[str, Mark]]]:
        """All lines, the unfinished one last."""
        return [*self._done, _runs(self._row)] if self._row or not self._done else list(self._done)


def _runs(row: list[tuple[str, Mark]]) -> list[tuple[str, Mark]]:
    """Join neighbours of the same mark."""
    out: list[tuple[str, Mark]] = []
    for char, mark in row:
        if out and out[-1][1] == mark:
            out[-1] = (out[-1][0] + char, mark)
        else:
            out.append((char, mark))
    return out
