"""The prompts of a command line: its words, and the files that they name. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specscope.engine.prompt_rows import Label, Messages, Prompt, Template, read_rows
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
    specs: list[PromptSpec] = []
    for number, text in enumerate(prompts, 1):
        is_file = _names_file(text)
        if words_are_files and not is_file and not any(map(str.isspace, text)):
            is_file = os.path.exists(text)  # a folder, which is refused as one
            if not is_file:
                alone = "for a prompt of one word: echo WORD | specscope capture - -o FILE"
                raise UserError(f"cannot read the prompts {text}: there is no such file ({alone})")
        if is_file:
            specs += (of_file := read_prompts(text, params, raw=raw, template=template, tell=tell))
            if not words_are_files:
                tell(f"{text} is a file: decoding the {plural(len(of_file), 'prompt')} in it")
        else:
            specs.append(PromptSpec(checked(text, Prompt, f"prompt {number}"), params, raw=raw, template=template))
    return specs if file is None else specs + read_prompts(file, params, raw=raw, template=template, tell=tell)


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
    file_rows = read_rows(path)
    if file_rows.left_out:
        tell(f"{path}: {plural(file_rows.left_out, 'conversation')} left out: too short or too long")
    specs = []
    for place, row in enumerate(file_rows.rows):
        line_params = dataclasses.replace(params, seed=(params.seed + place) % 2**63)
        line = f"{path}, line {row.line}"
        try:
            merged = SamplingParams.from_dict({**line_params.to_dict(), **row.given})
        except UserError as error:
            raise UserError(f"{line}: {error}") from None
        specs.append(PromptSpec(row.prompt, merged, row.labels, raw, {**template, **row.template}, line))
    return specs
