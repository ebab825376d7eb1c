"""The prompts of a command line, and of files that it names, as tokens of a model. No torch."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specscope.engine import chat_template
from specscope.engine.prompt_rows import Label, Messages, PromptText, Template, read_rows
from specscope.errors import UserError, first_line
from specscope.trace.checked import checked, decoded, short
from specscope.trace.history.wording import plural
from specscope.trace.kinds import ReadAs, kind_of, start_of
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import TEMPLATE

NO_KWARGS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class PromptSpec:
    """One request as the user wrote it."""

    prompt: str | Messages  # text, or chat messages
    params: SamplingParams
    labels: Mapping[str, str] = field(default_factory=dict)  # unknown keys of a JSON line; reports group by them
    raw: bool = False  # True: the text goes to the model as it is; False: as a chat turn, where it has a template
    template: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs: variables of that template
    place: str = ""  # the file and the line that it was read from

    @property
    def bytes(self) -> int:
        """The length of its text."""
        texts = [self.prompt] if isinstance(self.prompt, str) else [turn["content"] for turn in self.prompt]
        return sum(len(text.encode()) for text in texts)


def template_label(template: Mapping[str, Any]) -> dict[str, str]:
    """chat_template_kwargs as the label that records them. Raises UserError."""
    if not template:
        return {}
    try:
        return {TEMPLATE: checked(json.dumps(template, sort_keys=True), Label, TEMPLATE)}
    except RecursionError:
        raise UserError(f"{TEMPLATE} are nested too deeply") from None


def read_template(text: str) -> Mapping[str, Any]:
    """chat_template_kwargs as a flag gives them. Raises UserError."""
    try:
        kwargs = checked(decoded(text), Template, "--chat-template-kwargs")
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs {short(text)} is not JSON ({first_line(error)})") from None
    template_label(kwargs)
    return dict(kwargs)


def prompt_specs(
    prompts: Sequence[str],
    file: str | None,
    params: SamplingParams,
    *,
    raw: bool = False,
    template: Mapping[str, Any] = NO_KWARGS,
    words_are_files: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> list[PromptSpec]:
    """The prompts of a command line: its arguments, then those of its --file. Raises UserError.

    An argument that names a file stands for the prompts in it, and `tell` is given a line that says so. A single word
    that names none is a prompt, unless `words_are_files`.
    """
    if not all(prompts):
        raise UserError("a prompt is empty")
    specs, read = list[PromptSpec](), partial(read_prompts, params=params, raw=raw, template=template, tell=tell)
    for number, text in enumerate(prompts, 1):
        if _names_file(text):
            specs += (of_file := read(text))
            if not words_are_files:
                tell(f"{text} is a file: decoding the {plural(len(of_file), 'prompt')} in it")
        elif words_are_files and not any(map(str.isspace, text)):
            alone = "for a prompt of one word: echo WORD | specscope capture - -o FILE"
            raise UserError(f"cannot read the prompts {text}: there is no such file ({alone})")
        else:
            specs.append(PromptSpec(checked(text, PromptText, f"prompt {number}"), params, raw=raw, template=template))
    return specs if file is None else specs + read(file)


def _names_file(text: str) -> bool:
    """Whether a file is meant: it is there, or it is a word that ends as files of prompts do. Raises UserError."""
    path = text.rpartition("#")[0]
    if path and os.path.isfile(path) and not os.path.exists(text):
        kind = kind_of(start_of(path))
        if kind is not None and kind.reader is ReadAs.CAPTURES:
            raise kind.refusal(path, "a file of prompts", place=text)
    if os.path.isdir(text) and not any(map(str.isspace, text)):
        raise UserError(f"{text} is a folder: give a file of prompts, or a prompt of several words")
    return os.path.exists(text) or text == "-" or re.fullmatch(r"\S+\.(txt|jsonl?)", text) is not None


def read_prompts(
    path: str,
    params: SamplingParams,
    *,
    raw: bool,
    template: Mapping[str, Any] = NO_KWARGS,
    tell: Callable[[str], None] = lambda _: None,
) -> list[PromptSpec]:
    """The prompts of a file, or of standard input for `-`. Raises UserError that names the broken line.

    A line without a seed of its own gets `params.seed` plus its place in the file, so that lines do not share their
    coins.
    """
    rows, left_out = read_rows(path)
    if left_out:
        tell(f"{path}: {plural(left_out, 'conversation')} left out: too short or too long")
    specs = []
    for place, row in enumerate(rows):
        line_params = dataclasses.replace(params, seed=(params.seed + place) % 2**63)
        line = f"{path}, line {row.line}"
        try:
            merged = SamplingParams.from_dict({**line_params.to_dict(), **row.given})
        except UserError as error:
            raise UserError(f"{line}: {error}") from None
        specs.append(PromptSpec(row.prompt, merged, row.labels, raw, {**template, **row.template}, line))
    return specs


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
        for bad in [t for t in tokens if not 0 <= t < self.vocab_size][:1]:
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
