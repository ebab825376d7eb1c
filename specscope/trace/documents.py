"""JSON documents in a file: one a line, or written over several lines, one after the other or in an array.

A document may be longer than fits in memory where it is one long list, as in `{"data": [...]}`: then each entry of the
list is found by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import msgspec

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.kinds import DEEPEST, is_array, looks_like_json

LARGEST = 32 * 2**20  # bytes of a line or a document: decoded it is up to twelve times larger; our lines have some MiB
# A string has an end, and is on one line. An object with no brackets in it is one token: most are, so this is quick.
_STRING = rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+'
_NO_BRACKETS = rb'[^"{}\[\]]*+'
TOKENS = re.compile(
    _STRING + rb'("?)|\{' + _NO_BRACKETS + rb"(?:" + _STRING + rb'"' + _NO_BRACKETS + rb")*+\}|[{}\[\]]"
)


class Document(NamedTuple):
    """A document, or an entry of a list."""

    number: int  # of its first line
    list_name: str  # the keys that lead to the list: result.resourceSpans; "" for a document
    text: bytes


def documents(lines: Iterable[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """(the number of its first line, the document) of each, from numbered lines.

    Gives lines where the first is not JSON, or is a whole document. The last may be cut off: then it has no line
    break. Raises UserError.
    """

    def refuse(number: int) -> None:
        raise UserError(f"{name} has a JSON document of over {LARGEST >> 20} MiB: write one a line (jq -c .)")

    numbered = iter(lines)
    number, first = next(((number, line) for number, line in numbered if line.strip()), (0, b""))
    start = first.decode("utf-8", "replace")
    if not looks_like_json(start) or is_whole(first):
        yield from [(number, first)] if first else ()
        yield from numbered
        return
    splitter = Splitter(refuse, outer=is_array(start))
    for at, line in chain([(number, first)], numbered):
        for document in splitter.take(at, line):
            yield document.number, document.text + b"\n"
    yield from splitter.rest()


def is_whole(line: bytes) -> bool:
    """Whether a line holds one object and no more."""
    with suppress(ValueError):
        return line.lstrip().startswith(b"{") and bool(decoded(line, msgspec.Raw))
    splitter = Splitter(lambda _: None)  # damaged, but whole
    found = [document.text[:1] for document in splitter.take(1, line)]
    return found == [b"{"] and not any(splitter.rest())


class Splitter:
    """Finds where documents end, and entries of lists, in text that comes in pieces."""

    def __init__(
        self, too_large: Callable[[int], None], *, outer: bool = False, lists: Container[str] = frozenset()
    ) -> None:
        """`too_large` hears of each that is left out, by its line.

        `outer`: an array is around the documents. `lists`: those whose entries are taken by themselves, by their keys.
        """
        self._too_large = too_large
        self._lists = lists
        self._least = self._depth = -1 if outer else 0  # brackets that are open, that array's left out
        self._items: int | None = 0  # the depth at which a document or an entry begins; None behind a list
        self._keys: list[str] = []  # of what is open, outside entries
        self._key = b'""'  # the last string
        self._list_name = ""
        self._in_string = b""  # the start of a string whose end is not there yet
        self._parts: list[bytes] = []  # of what has begun
        self._size = self._first = 0
        self._is_begun = False

    def take(self, number: int, piece: bytes) -> list[Document]:
        """What ends in a piece that begins in line `number`."""
        piece, self._in_string = self._in_string + piece, b""
        complete: list[Document] = []
        start = counted = 0
        for match in TOKENS.finditer(piece):
            token = match[0]
            if token in b"{[":
                if self._depth == self._items:
                    start, self._is_begun = match.start(), True
                    number += piece.count(b"\n", counted, start)
                    self._first, counted = number, start
                self._open(token)
            elif token in b"}]":
                if self._close() and self._is_begun:
                    self._keep(piece[start : match.end()])
                    if self._size <= LARGEST:
                        complete.append(Document(self._first, self._list_name, b"".join(self._parts)))
                    self._forget()
            elif token.startswith(b"{"):
                if self._depth == self._items and len(token) <= LARGEST:
                    number += piece.count(b"\n", counted, match.start())
                    counted = match.start()
                    complete.append(Document(number, self._list_name, token))
            elif not match[1] and piece[match.end() :] in (b"", b"\\"):
                self._in_string, piece = piece[match.start() :], piece[: match.start()]
            else:
                self._key = token
        if self._is_begun:
            self._keep(piece[start:])
        if len(self._in_string) > LARGEST:
            self._too_large(number)
            self._in_string = b""
        return complete

    def _open(self, bracket: bytes) -> None:
        if self._list_name == "" and 0 <= self._depth < DEEPEST and self._lists:
            self._keys[self._depth :] = [self._key.strip(b'"').decode("utf-8", "replace")]
            name = ".".join(self._keys[1:])
            if bracket == b"[" and name in self._lists:
                self._items, self._list_name = self._depth + 1, name
                self._forget()
        self._depth += 1

    def _close(self) -> bool:
        """Whether a document or an entry ends."""
        self._depth = max(self._depth - 1, self._least)
        if self._list_name and self._items is not None and self._depth < self._items:
            self._items, self._list_name = None, ""
        if self._depth <= 0 and self._items is None:
            self._items = 0
            return False
        return self._depth == self._items

    def _keep(self, part: bytes) -> None:
        """Keep a part of what has begun, unless that is too large."""
        was_small = self._size <= LARGEST
        self._size += len(part)
        if self._size <= LARGEST:
            self._parts.append(part)
        elif was_small:
            self._parts = []
            self._too_large(self._first)

    def _forget(self) -> None:
        self._parts, self._size, self._is_begun = [], 0, False

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """What has begun and has no end."""
        rest = b"".join([*self._parts, self._in_string]).rstrip()
        if self._depth > 0 or rest:
            yield self._first, rest or b"{"
