"""Log-probabilities of output tokens: from the records to the two forms in which they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specscope.serve.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary

LEAST = -9999.0  # for minus infinity, as in vLLM: JSON has none


@dataclass(frozen=True)
class TokenLogprobs:
    """One output token's, and those of the likeliest tokens at its place."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


def emitted_logprobs(part: RequestStep, vocabulary: Vocabulary) -> list[TokenLogprobs]:
    """Of the tokens that a step emitted; nothing where none were asked for."""
    if part.logprobs is None:
        return []

    def piece(token: int) -> bytes:
        return vocabulary.pieces.get(token, b"")

    return [
        TokenLogprobs(piece(one.token), one.logprob, tuple((piece(token), value) for token, value in one.top))
        for one in part.logprobs.each(part.output())
    ]


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def completion_logprobs(told: Sequence[TokenLogprobs]) -> CompletionLogprobs:
    """Parallel lists. Likeliest tokens of one text are one entry, as in OpenAI's form."""
    offsets, at = [], 0
    for one in told:
        offsets.append(at)
        at += len(_text(one.piece))
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[max(one.logprob, LEAST) for one in told],
        tokens=[_text(one.piece) for one in told],
        top_logprobs=[
            {_text(piece): max(value, LEAST) for piece, value in ((one.piece, one.logprob), *one.top)} for one in told
        ],
    )


def chat_logprobs(told: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """A list with one entry for each token."""
    return ChatLogprobs(
        [
            TokenLogprob(
                _text(one.piece),
                max(one.logprob, LEAST),
                list(one.piece),
                [TopLogprob(_text(piece), max(value, LEAST), list(piece)) for piece, value in one.top],
            )
            for one in told
        ]
    )
