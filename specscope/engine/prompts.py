"""Prompt files: lines of text, or JSON Lines with sampling parameters and labels of their own. No torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specscope.errors import UserError
from specscope.trace.params import PARAM_NAMES, SamplingParams

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class PromptSpec:
    """One request as the user wrote it."""

    prompt: str | Messages  # text, or chat messages
    params: SamplingParams
    labels: Mapping[str, str] = field(default_factory=dict)  # unknown keys of a JSON line; reports group by them
    raw: bool = False  # True: the text goes to the model as it is; False: as a chat turn, where it has a template


def read_prompts(path: str, params: SamplingParams, *, raw: bool) -> list[PromptSpec]:
    """The prompts of a file, or of standard input for `-`. Raises UserError that names the broken line.

    A file whose first line begins with `{` is JSON Lines. A line without a seed of its own gets `params.seed` plus
    its place in the file, so that lines do not share their coins.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: this is not UTF-8 text") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no prompts")
    is_json = lines[0][1].lstrip().startswith("{")
    specs: list[PromptSpec] = []
    for number, line in lines:
        own = dataclasses.replace(params, seed=params.seed + len(specs))
        try:
            specs.append(parse_line(line, own, raw=raw) if is_json else PromptSpec(line, own, raw=raw))
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return specs


def parse_line(line: str, params: SamplingParams, *, raw: bool = False) -> PromptSpec:
    """One JSON line: `prompt` or `messages`, sampling parameters by their names, anything else a label."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"this is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    given = {name: values.pop(name) for name in PARAM_NAMES & set(values)}
    prompt = _prompt(values)
    merged = SamplingParams.from_dict({**params.to_dict(), **given})
    labels = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return PromptSpec(prompt, merged, labels, raw)


def _prompt(values: dict[str, Any]) -> str | Messages:
    """Take `prompt` or `messages` out of a line's values."""
    if ("prompt" in values) == ("messages" in values):
        raise UserError('give either "prompt" or "messages"')
    if "prompt" in values:
        prompt = values.pop("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise UserError('"prompt" must be text that is not empty')
        return prompt
    messages = values.pop("messages")
    good = isinstance(messages, list) and messages and all(_is_message(m) for m in messages)
    if not good:
        raise UserError('"messages" must be a list of {"role": ..., "content": text}')
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )
