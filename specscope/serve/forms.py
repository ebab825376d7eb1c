"""Answers in the order and with the names of OpenAI and vLLM, a text completion's and a chat's: whole, or in pieces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specscope.serve.calls import Call, ChoicePiece, Finish, OutputChoice
from specscope.serve.logprobs import TokenLogprobs, chat_logprobs, completion_logprobs

Body = dict[str, Any]  # as it is sent


class Form:
    """How one call's output is sent: as a chat's (/v1/chat/completions), or a text completion's (/v1/completions)."""

    def __init__(self, call: Call, model: str, prompts: int, *, chat: bool, logprobs: bool = False) -> None:
        """`prompts`: tokens of all prompts, each counted once."""
        self.call, self.model, self.prompts, self.chat, self.logprobs = call, model, prompts, chat, logprobs
        self.created = int(time.time())

    def usage(self) -> Body:
        """Tokens so far. A prompt's tokens count once, whatever `n` is."""
        made = sum(len(choice.tokens) for choice in self.call.choices)
        return {"prompt_tokens": self.prompts, "total_tokens": self.prompts + made, "completion_tokens": made}

    def whole(self) -> Body:
        choices = [
            self._choice(choice, self._message(choice.text), choice.logprobs, choice.finish or "stop")
            for choice in self.call.choices
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return self._body(kind, choices, usage=self.usage())

    def begin(self) -> Sequence[Body]:
        """The events before the first output: of a chat the role, for each choice."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(choice, delta, None, None)]) for choice in self.call.choices if self.chat]

    def piece(self, piece: ChoicePiece) -> Body:
        """The event of a piece."""
        text = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self._chunk([self._choice(piece.choice, text, piece.logprobs, piece.finish)])

    def last(self) -> Body:
        """The event with the usage, without choices."""
        return self._chunk([], usage=self.usage())

    def _message(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}

    def _chunk(self, choices: Sequence[Body], **more: object) -> Body:
        return self._body("chat.completion.chunk" if self.chat else "text_completion", choices, **more)

    def _body(self, kind: str, choices: Sequence[Body], **more: object) -> Body:
        head = {"id": self.call.name, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}

    def _choice(
        self, choice: OutputChoice, text: Body, logprobs: Sequence[TokenLogprobs] | None, finish: Finish | None
    ) -> Body:
        """`finish`: null in all pieces but the last."""
        form = chat_logprobs if self.chat else completion_logprobs
        told = form(logprobs) if self.logprobs and logprobs is not None else None
        ended = {"finish_reason": finish, "stop_reason": choice.stop if finish else None}
        return {"index": choice.index, **text, "logprobs": told, **ended}
