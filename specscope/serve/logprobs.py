"""Log-probabilities of output tokens: from the records to the two forms in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Detokenizer

LEAST = -9999.0  # for minus infinity, as in vLLM: JSON has none


@dataclass(frozen=True)
class TokenLogprobs:
    """One output token's log-probability, and those of the likeliest tokens at its position."""

    piece: bytes
    offset: int  # characters of the choice's text before it
    logprob: float
    top: tuple[tuple[bytes, float], ...]


def emitted_logprobs(part: RequestStep, new: int, text: Detokenizer) -> list[TokenLogprobs]:
    """Those of the last `new` tokens that a step emitted, which `text` takes; empty where none were requested."""
    entries: list[TokenLogprobs] = []
    pieces = text.vocabulary.pieces
    for entry in list(part.logprobs.each(part.output()))[-new:] if part.logprobs is not None and new else ():
        top = tuple((pieces.get(token, b""), value) for token, value in entry.top)
        entries.append(TokenLogprobs(pieces.get(entry.token, b""), text.length, entry.logprob, top))
        text.feed([entry.token])
    return entries


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def completion_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Parallel lists. Likeliest tokens with the same text are one entry, as in OpenAI's form."""
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
        "tokens": [_text(entry.piece) for entry in entries],
        "top_logprobs": [
            {_text(piece): max(value, LEAST) for piece, value in ((entry.piece, entry.logprob), *entry.top)}
            for entry in entries
        ],
    }


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """An entry for each token, with its bytes and its likeliest tokens."""

    def entry(piece: bytes, value: float) -> dict[str, Any]:
        return {"token": _text(piece), "logprob": max(value, LEAST), "bytes": list(piece)}

    each = (entry(one.piece, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]} for one in entries)
    return {"content": list(each)}
