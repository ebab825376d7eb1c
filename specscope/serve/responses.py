"""The bodies of answers, in the order and with the names of OpenAI and vLLM."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from specscope.serve.figures import RequestMetrics

Finish = Literal["stop", "length"]


class Usage(msgspec.Struct):
    """Token counts. A prompt's tokens count once, whatever `n` is."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over the output's tokens."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(msgspec.Struct):
    """One text, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None  # null in all pieces but the last
    stop_reason: str | int | None


class Completion(msgspec.Struct, kw_only=True):
    """/v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET  # in a stream on the last event, where it was asked for
    metrics: RequestMetrics | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """An output token's log-probability, with those of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of each output token."""

    content: list[TokenLogprob]


class Message(msgspec.Struct):
    """The model's answer."""

    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """/v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """What a piece adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of the stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET


class Model(msgspec.Struct, kw_only=True):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specscope"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    """/v1/models."""

    data: list[Model]
    object: Literal["list"] = "list"


class Version(msgspec.Struct):
    """/version."""

    version: str
