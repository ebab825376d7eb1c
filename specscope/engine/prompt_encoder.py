"""PromptEncoder: prompts as tokens of a model, refused where it cannot run them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.engine import chat_template
from specscope.engine.prompts import NO_KWARGS
from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.record.records import TEMPLATE


class TooLargeError(UserError):
    """A prompt that this engine has no room for; others of the same run it may have."""


@dataclass(frozen=True)
class Encoded:
    """A prompt that Engine.encode has been over: a server does that beside the engine's thread."""

    text: str
    tokens: list[int]
    title: str = ""


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


@dataclass(frozen=True)
class PromptEncoder:
    """A model's tokenizer, and what it can take."""

    tokenizer: Any
    vocab_size: int
    max_context: int  # tokens
    longest: int  # bytes of a token

    def encode(self, prompt: Prompt, template: Mapping[str, Any] = NO_KWARGS) -> tuple[str, list[int]]:
        """(text, token ids) of a prompt: text as it is, chat messages through the model's template, or ids.

        `template`: chat_template_kwargs, variables of that template. Raises UserError.
        """
        check_length(prompt, self.max_context, self.longest)
        if template:
            self._check_template(prompt, template)
        if isinstance(prompt, str):
            return prompt, list(self.tokenizer(prompt)["input_ids"])
        if prompt and isinstance(prompt[0], Mapping):
            if not self.tokenizer.chat_template:
                raise UserError("chat messages need a model with a chat template: give the prompt as text")
            text = chat_template.render(self.tokenizer, prompt, template, self.max_context * self.longest)
            return text, list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens = [int(t) for t in prompt]  # type: ignore[arg-type]
        bad = next((t for t in tokens if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise UserError(f"token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return "", tokens

    def turn(self, prompt: Prompt, *, raw: bool = False) -> Prompt:
        """Text as a chat turn of the user, where the model has a chat template and `raw` is False."""
        if isinstance(prompt, str) and not raw and self.tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt

    def _check_template(self, prompt: Prompt, template: Mapping[str, Any]) -> None:
        """Refuse variables where there is no template, and those that would be arguments of transformers' function."""
        if not prompt or not isinstance(prompt[0], Mapping):
            raise UserError(f"{TEMPLATE} apply to chats: the prompt is plain, or this model has no chat template")
        known = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := sorted(set(template) & set(known)):
            raise UserError(f"{TEMPLATE}: {short(taken[0])} is not a variable of a chat template: leave it out")

    def check(self, tokens: list[int]) -> None:
        """Raise UserError for a prompt without tokens, or with too many for an output."""
        if not tokens:
            raise UserError("the prompt is empty: it has no tokens")
        if len(tokens) >= self.max_context:
            raise TooLargeError(f"the prompt has {len(tokens)} tokens; the limit is {self.max_context - 1}")


def check_length(prompt: Prompt, tokens: int, longest: int) -> None:
    """Refuse what cannot fit into so many tokens of at most `longest` bytes. Raises UserError.

    Asked before a tokenizer works on it: megabytes of text take it minutes and gigabytes.
    """
    if len(prompt) > tokens and not isinstance(prompt, str):
        raise TooLargeError(f"the prompt has {len(prompt)} parts; the limit is {tokens - 1} tokens")
    texts = [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt if isinstance(m, Mapping)]
    size = sum(map(len, texts))  # in characters, each of which is a byte at least
    if size > tokens * longest:
        raise TooLargeError(f"the prompt has {size} characters, too many for the limit of {tokens - 1} tokens")


def title_of(prompt: Prompt | Encoded) -> str:
    """The last message of a conversation."""
    if isinstance(prompt, Encoded):
        return prompt.title
    last = prompt[-1] if prompt and not isinstance(prompt, str) else ""
    return str(last.get("content", "")) if isinstance(last, Mapping) else ""
