"""Log-probabilities of output tokens: from the records to the two forms in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary

LEAST = -9999.0  # for minus infinity, as in vLLM: JSON has none


@dataclass(frozen=True)
class TokenLogprobs:
    """One output token's log-probability, and those of the likeliest tokens at its position."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


def emitted_logprobs(part: RequestStep, vocabulary: Vocabulary) -> list[TokenLogprobs]:
    """Those of the tokens that a step emitted; empty where none were requested."""
    if part.logprobs is None:
        return []

    def piece(token: int) -> bytes:
        return vocabulary.pieces.get(token, b"")

    return [
        TokenLogprobs(piece(entry.token), entry.logprob, tuple((piece(token), value) for token, value in entry.top))
        for entry in part.logprobs.each(part.output())
    ]


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def completion_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Parallel lists. Likeliest tokens with the same text are one entry, as in OpenAI's form."""
    texts = [_text(entry.piece) for entry in entries]
    return {
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
        "token_logprobs": [max(entry.logprob, LEAST) for entry in entries],
        "tokens": texts,
        "top_logprobs": [
            {_text(piece): max(value, LEAST) for piece, value in ((entry.piece, entry.logprob), *entry.top)}
            for entry in entries
        ],
    }


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any]:

    def entry(piece: bytes, value: float) -> dict[str, Any]:
        return {"token": _text(piece), "logprob": max(value, LEAST), "bytes": list(piece)}

    each = (entry(one.piece, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]} for one in entries)
    return {"content": list(each)}
