"""A Hugging Face tokenizer's table of tokens as bytes."""

from __future__ import annotations

import re
from typing import Any

from specscope.trace.record.vocabulary import Vocabulary


def _byte_of_character() -> dict[str, int]:
    """GPT-2's map between bytes and printable characters: printable Latin-1 stays, the rest move to U+0100 on."""
    unmoved = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [b for b in range(256) if b not in unmoved]
    return {chr(b): b for b in unmoved} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTES = _byte_of_character()
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
