"""Prompt files: lines of text, or JSON Lines with sampling parameters and labels of their own. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import Text, checked, checked_fields, decoded, short
from specscope.trace.files import read_lines
from specscope.trace.params import PARAM_NAMES, SamplingParams
from specscope.trace.vocabulary import shell_word
from specscope.trace.wording import plural

Messages = Sequence[Mapping[str, str]]
MOST_PROMPTS = 100_000
CAPTURED = re.compile(r'\s*\{\s*"resource_?spans"\s*:', re.IGNORECASE)  # how a line of a capture begins
MESSAGES = 'a list of at most 10000 {"role": ..., "content": text}'

Prompt = Annotated[
    Text, Meta(min_length=1, title='"prompt"', description="text, not empty, of whole Unicode characters")
]
Label = Annotated[Text, Meta(max_length=10_000, description="at most 10000 characters long")]
LabelName = Annotated[Text, Meta(max_length=200, description="a name of at most 200 characters")]


class Message(msgspec.Struct):
    """One turn of a chat; other keys are left out."""

    role: Annotated[Text, Meta(min_length=1, max_length=100)]
    content: Text


Conversation = Annotated[list[Message], Meta(min_length=1, max_length=10_000, title='"messages"', description=MESSAGES)]


class PromptLine(msgspec.Struct):
    """What a JSON line says besides sampling parameters (SamplingParams is their schema) and labels."""

    prompt: Prompt = ""  # one of the two is given
    messages: Conversation = []


@dataclass(frozen=True)
class PromptSpec:
    """One request as the user wrote it."""

    prompt: str | Messages  # text, or chat messages
    params: SamplingParams
    labels: Mapping[str, str] = field(default_factory=dict)  # unknown keys of a JSON line; reports group by them
    raw: bool = False  # True: the text goes to the model as it is; False: as a chat turn, where it has a template


def prompt_specs(
    prompts: Sequence[str],
    file: str | None,
    params: SamplingParams,
    *,
    raw: bool = False,
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
            specs += (of_file := read_prompts(text, params, raw=raw))
            if not words_are_files:
                tell(f"{text} is a file: decoding the {plural(len(of_file), 'prompt')} in it")
        else:
            specs.append(PromptSpec(checked(text, Prompt, f"prompt {number}"), params, raw=raw))
    return specs if file is None else specs + read_prompts(file, params, raw=raw)


def _names_file(text: str) -> bool:
    """Whether a file is meant: it is there, or it is a word that ends as files of prompts do. Raises UserError."""
    path = text.rpartition("#")[0]
    if path and os.path.isfile(path) and not os.path.exists(text) and CAPTURED.match(_first_line(path)):
        raise UserError(_is_capture(path, text))
    if os.path.isdir(text) and not any(map(str.isspace, text)):
        raise UserError(f"{text} is a folder: give a file of prompts, or a prompt of more words")
    return os.path.exists(text) or text == "-" or re.fullmatch(r"\S+\.(txt|jsonl?)", text) is not None


def _first_line(path: str) -> str:
    return next((line for _, line in read_lines(path, "the prompts")), "")


def _is_capture(path: str, place: str) -> str:
    return (
        f"{path} is a capture, not a file of prompts: specscope replay {shell_word(place)} shows it, "
        f"specscope debug --over {shell_word(place)} debugs it"
    )


def read_prompts(path: str, params: SamplingParams, *, raw: bool) -> list[PromptSpec]:
    """The prompts of a file, or of standard input for `-`. Raises UserError that names the broken line.

    A file whose first line begins with `{` is JSON Lines. A line without a seed of its own gets `params.seed` plus
    its place in the file, so that lines do not share their coins.
    """
    specs: list[PromptSpec] = []
    is_json = False
    for number, line in read_lines(path, "the prompts"):
        if not line.strip():
            continue
        if CAPTURED.match(line):
            raise UserError(_is_capture(path, path))
        if not specs:
            is_json = line.lstrip().startswith("{")
        if len(specs) == MOST_PROMPTS:
            raise UserError(f"{path} has more than {MOST_PROMPTS} prompts: split it")
        own = dataclasses.replace(params, seed=(params.seed + len(specs)) % 2**63)
        try:
            specs.append(parse_line(line, own, raw=raw) if is_json else PromptSpec(line, own, raw=raw))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    if not specs:
        raise UserError(f"{path} has no prompts")
    return specs


def parse_line(line: str, params: SamplingParams, *, raw: bool = False) -> PromptSpec:
    """One JSON line: `prompt` or `messages`, sampling parameters by their names, anything else a label."""
    try:
        values = decoded(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg}, at column {error.colno})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    given = {name: values.pop(name) for name in PARAM_NAMES & set(values)}
    if "resourceSpans" in values:
        raise UserError("this is a capture, not a file of prompts: specscope replay shows it")
    if ("prompt" in values) == ("messages" in values):
        raise UserError('give either "prompt" or "messages"')
    said = checked_fields(values, PromptLine)
    merged = SamplingParams.from_dict({**params.to_dict(), **given})
    chat = [{"role": message.role, "content": message.content} for message in said.messages]
    return PromptSpec(said.prompt or chat, merged, _labels(values), raw)


def _labels(values: Mapping[str, Any]) -> dict[str, str]:
    """What is no prompt and no parameter, as text."""
    found = {key: value for key, value in values.items() if key not in PromptLine.__struct_fields__}
    if len(found) > 64:
        raise UserError(f"a line may have 64 labels, not {len(found)}")
    return {checked(key, LabelName, "a label"): _label(key, value) for key, value in found.items()}


def _label(key: str, value: object) -> str:
    name = f"the label {short(key)}"
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
    return str(checked(text, Label, name))
