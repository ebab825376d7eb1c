"""Prompt files: lines of text, or JSON Lines with sampling parameters and labels of their own. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from specscope.errors import UserError
from specscope.trace.checked import Text, checked, checked_fields, short
from specscope.trace.files import read_lines
from specscope.trace.params import PARAM_NAMES, SamplingParams

Messages = Sequence[Mapping[str, str]]
MOST_PROMPTS = 100_000
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
    prompts: Sequence[str], file: str | None, params: SamplingParams, *, raw: bool = False
) -> list[PromptSpec]:
    """The prompts of a command line: its arguments, then those of its --file. Raises UserError."""
    if not all(prompts):
        raise UserError("a prompt is empty")
    specs = [PromptSpec(checked(text, Prompt, f"prompt {i}"), params, raw=raw) for i, text in enumerate(prompts, 1)]
    return specs if file is None else specs + read_prompts(file, params, raw=raw)


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
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg}, at column {error.colno})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    given = {name: values.pop(name) for name in PARAM_NAMES & set(values)}
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
