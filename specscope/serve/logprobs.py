"""Log-probabilities of output tokens: from the records to the two forms in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specscope.serve.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
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


def completion_logprobs(entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
    """Parallel lists. Likeliest tokens with the same text are one entry, as in OpenAI's form."""
    offsets, offset = [], 0
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.piece))
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[max(entry.logprob, LEAST) for entry in entries],
        tokens=[_text(entry.piece) for entry in entries],
        top_logprobs=[
            {_text(piece): max(value, LEAST) for piece, value in ((entry.piece, entry.logprob), *entry.top)}
            for entry in entries
        ],
    )


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """A list with one entry for each token."""
    return ChatLogprobs(
        [
            TokenLogprob(
                _text(entry.piece),
                max(entry.logprob, LEAST),
                list(entry.piece),
                [TopLogprob(_text(piece), max(value, LEAST), list(piece)) for piece, value in entry.top],
            )
            for entry in entries
        ]
    )
