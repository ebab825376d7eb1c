"""JSON documents in a file: one a line, or written over several lines, one after the other or in an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specscope.errors import UserError
from specscope.trace.kinds import TOKENS, is_array, looks_like_json

LARGEST = 32 * 2**20  # bytes of a line or a document: decoded it is up to twelve times larger; our lines have some MiB


def documents(lines: Iterable[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """(the number of its first line, the document) of each, from numbered lines.

    Gives lines where the first is not JSON, or is a whole document. The last may be cut off: then it has no line
    break. Raises UserError.
    """
    numbered = iter(lines)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (0, b""))
    start = first.decode("utf-8", "replace")
    splitter = _Splitter(name, outer=is_array(start))
    complete = splitter.take(number, first)
    if not looks_like_json(start) or splitter.is_line(complete):
        yield from [(number, first)] if first else ()
        yield from numbered
        return
    yield from complete
    for number, line in numbered:
        yield from splitter.take(number, line)
    yield from splitter.rest()


class _Splitter:
    """Finds where documents end. A JSON string never spans lines, so each line is scanned by itself."""

    def __init__(self, name: str, *, outer: bool) -> None:
        self._name = name
        self._outer = outer  # whether an array is around the documents
        self._depth = -1 if outer else 0  # brackets that are open, that array's left out
        self._parts: list[bytes] = []
        self._size = self._first = 0

    def is_line(self, complete: list[tuple[int, bytes]]) -> bool:
        """Whether the first line holds one document and no more."""
        return len(complete) == 1 and not self._parts and not self._outer

    def take(self, number: int, line: bytes) -> list[tuple[int, bytes]]:
        """The documents that end in a line."""
        complete: list[tuple[int, bytes]] = []
        start = 0 if self._parts else None
        for match in TOKENS.finditer(line):
            if match[0] in b"{[":
                if start is None and self._depth == 0:
                    start, self._first = match.start(), number
                self._depth += 1
            elif match[0] in b"}]":
                self._depth -= 1
                if self._depth == 0 and start is not None:
                    complete.append((self._first, b"".join([*self._parts, line[start : match.end()], b"\n"])))
                    self._parts, self._size, start = [], 0, None
        if start is not None:
            self._parts.append(line[start:])
            self._size += len(line)
            if self._size > LARGEST:
                raise UserError(
                    f"{self._name} has a JSON document of over {LARGEST >> 20} MiB: write one a line (jq -c .)"
                )
        return complete

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """The last document, where its end is missing."""
        if self._parts:
            yield self._first, b"".join(self._parts).rstrip()
