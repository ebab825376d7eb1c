"""Token ids to bytes to text. Bytes, because one token may hold half of a character."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.trace.record.privacy import NO_TOKEN


def token_id(token: int) -> str:
    return "#?" if token == NO_TOKEN else f"#{token}"


@dataclass
class Vocabulary:
    """What each token id stands for: of a live run all, of a capture those that appeared in it."""

    pieces: dict[int, bytes] = field(default_factory=dict)  # id -> bytes; filled by model/loader or a reader
    special: set[int] = field(default_factory=set)  # ids that are markup, not text: shown, but not part of output

    def show(self, token: int) -> str:
        """The token for people: one line, quotes off, control and broken characters escaped, spaces visible."""
        piece = self.pieces.get(token)
        if piece is None:
            return token_id(token)
        if not piece:
            return "∅"
        text = piece.decode("utf-8", "backslashreplace")
        if text.isprintable():
            return text.replace(" ", "␣")
        return "".join(_VISIBLE.get(c) or (c if c.isprintable() else repr(c)[1:-1]) for c in text)

    def text(self, tokens: Iterable[int]) -> str:
        """Output text of a token sequence: special tokens left out, broken UTF-8 replaced."""
        return b"".join(self.pieces.get(t, b"") for t in tokens if t not in self.special).decode("utf-8", "replace")


_VISIBLE: Mapping[str, str] = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}


def stop_begins(text: str, before: int, stop: str) -> int:
    """The index of the stop string that the last token of a text completed; the text's length where there is none.

    `before`: characters without that token. An earlier match is possible: min_tokens let it pass. Other engines may
    end later than at that token: then the first one counts.
    """
    begin = text.find(stop, max(before - len(stop) + 1, 0))
    begin = text.find(stop) if begin < 0 else begin
    return len(text) if begin < 0 else begin


class Detokenizer:
    """Text of a growing token sequence, character by whole character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.length = vocabulary, 0  # characters so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        pieces, special = self.vocabulary.pieces, self.vocabulary.special
        text = self._decoder.decode(b"".join(pieces.get(t, b"") for t in tokens if t not in special))
        self.length += len(text)
        return text

    def flush(self) -> str:
        """What is left at the end, replacement characters for a broken tail."""
        return self._decoder.decode(b"", True)


def printable(text: str, keep: str = "") -> str:
    r"""The text with control and format characters as escapes, so that it can neither move a cursor nor turn a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or c == "\u200d" else repr(c)[1:-1] for c in text)


STANDARD_INPUT = "standard input"  # in messages


def shell_word(text: str) -> str:
    """The text as a word of a suggested shell command: nothing in it is run. FILE is what came through a pipe."""
    place = text.removeprefix(STANDARD_INPUT)
    return printable(shlex.quote(text if place == text else f"FILE{place}"))


def escape(piece: bytes) -> str:
    r"""Bytes as a valid Unicode string, reversibly: a byte that is no UTF-8 becomes `\xNN`, a backslash `\\`."""
    return piece.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


_ESCAPED = re.compile(rb"\\(x.{0,2}|.?)", re.DOTALL)


def unescape(text: str) -> bytes:
    """The bytes that `escape` was given. Raises ValueError."""
    return _ESCAPED.sub(lambda match: bytes([int(match[1][1:], 16)]) if match[1][:1] == b"x" else b"\\", text.encode())


# GPT-2's map between bytes and printable characters: printable Latin-1 stays, the rest move to U+0100 on
_UNMOVED = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_MOVED = [byte for byte in range(256) if byte not in _UNMOVED]
_BYTES = {chr(byte): byte for byte in _UNMOVED} | {chr(256 + place): byte for place, byte in enumerate(_MOVED)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode("utf-8", "replace")


def _sentence_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


def read_vocabulary(tokenizer: Any) -> Vocabulary:  # noqa: ANN401
    """Every token's bytes. Byte-level BPE and SentencePiece-like tables are understood; added tokens are literal."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is None or "ByteLevel" in repr(backend.decoder) or "ByteLevel" in repr(backend.pre_tokenizer)
    convert = _byte_level if byte_level else _sentence_piece
    pieces = {index: convert(token) for token, index in tokenizer.get_vocab().items()}
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    pieces |= {index: content.encode("utf-8", "replace") for index, content in added.items()}
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return Vocabulary(pieces=pieces, special=special | set(tokenizer.all_special_ids))
