"""The two forms of an answer: a text completion and a chat. Both are sent whole, or piece by piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from specscope.serve.calls import Call, ChoicePiece, OutputChoice
from specscope.serve.figures import RequestMetrics
from specscope.serve.logprobs import TokenLogprobs, chat_logprobs, completion_logprobs
from specscope.serve.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    Finish,
    Message,
    Usage,
)


class Form(ABC):
    """How one call's output is sent."""

    def __init__(self, call: Call, model: str, prompts: int, *, logprobs: bool = False) -> None:
        """`prompts`: tokens of all prompts, each counted once."""
        self.call, self.model, self.prompts, self.logprobs = call, model, prompts, logprobs
        self.created = int(time.time())

    @property
    def _head(self) -> dict[str, Any]:
        return {"id": self.call.name, "created": self.created, "model": self.model}

    def usage(self) -> Usage:
        """Tokens so far."""
        made = sum(len(choice.tokens) for choice in self.call.choices)
        return Usage(self.prompts, self.prompts + made, made)

    @abstractmethod
    def whole(self, metrics: RequestMetrics | None) -> msgspec.Struct:
        """The answer, when all choices have ended."""

    @abstractmethod
    def begin(self) -> Sequence[msgspec.Struct]:
        """The events before the first output."""

    @abstractmethod
    def piece(self, piece: ChoicePiece, usage: Usage | UnsetType = UNSET) -> msgspec.Struct:
        """The event of a piece."""

    @abstractmethod
    def last(self, metrics: RequestMetrics | None) -> msgspec.Struct:
        """The event with the usage, without choices."""


class CompletionForm(Form):
    """/v1/completions."""

    def whole(self, metrics: RequestMetrics | None) -> Completion:
        """The texts."""
        choices = [self._choice(c, c.text, c.logprobs, c.finish) for c in self.call.choices]
        return Completion(**self._head, choices=choices, usage=self.usage(), metrics=metrics)

    def begin(self) -> Sequence[Completion]:
        """Nothing."""
        return ()

    def piece(self, piece: ChoicePiece, usage: Usage | UnsetType = UNSET) -> Completion:
        """A piece of text."""
        choice = self._choice(piece.choice, piece.text, piece.logprobs, piece.finish)
        return Completion(**self._head, choices=[choice], usage=usage)

    def last(self, metrics: RequestMetrics | None) -> Completion:
        """The usage."""
        return Completion(**self._head, choices=[], usage=self.usage(), metrics=metrics)

    def _choice(
        self, c: OutputChoice, text: str, logprobs: Sequence[TokenLogprobs], finish: Finish | None
    ) -> CompletionChoice:
        converted = completion_logprobs(logprobs) if self.logprobs else None
        return CompletionChoice(c.index, text, converted, finish, c.stop if finish else None)


class ChatForm(Form):
    """/v1/chat/completions."""

    def whole(self, metrics: RequestMetrics | None) -> ChatCompletion:
        """The messages."""
        choices = [
            ChatChoice(c.index, Message("assistant", c.text), self._logprobs(c.logprobs), c.finish or "stop", c.stop)
            for c in self.call.choices
        ]
        return ChatCompletion(**self._head, choices=choices, usage=self.usage(), metrics=metrics)

    def begin(self) -> Sequence[ChatChunk]:
        """The role, for each choice."""
        return [
            ChatChunk(**self._head, choices=[ChunkChoice(c.index, Delta("assistant", ""), None, None)])
            for c in self.call.choices
        ]

    def piece(self, piece: ChoicePiece, usage: Usage | UnsetType = UNSET) -> ChatChunk:
        """A piece of a message."""
        choice, finish = piece.choice, piece.finish
        logprobs, stop = self._logprobs(piece.logprobs), choice.stop if finish else None
        chunk_choice = ChunkChoice(choice.index, Delta(None, piece.text), logprobs, finish, stop)
        return ChatChunk(**self._head, choices=[chunk_choice], usage=usage)

    def last(self, metrics: RequestMetrics | None) -> ChatChunk:
        """The usage."""
        return ChatChunk(**self._head, choices=[], usage=self.usage(), metrics=metrics)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs) if self.logprobs else None
