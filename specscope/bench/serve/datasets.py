"""Datasets that load benches use, from a file; the layout is recognised from its content.

A JSON array of conversations is ShareGPT's. JSON Lines may be SPEED-Bench's (`turns` or `messages`), Spec-Bench's
(`turns`), vLLM's custom layout (`prompt`, `output_tokens`) or specscope's own prompts (engine/prompts.py). Of several
turns only the first is asked, as vLLM and SGLang do. Anything else is plain text, a prompt a line.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from specscope.bench.prompts import unseen_prompts
from specscope.engine.prompts import MOST_PROMPTS, Conversation, Messages, Prompt, parse_line
from specscope.errors import UserError
from specscope.trace.checked import Text, checked, decoded
from specscope.trace.files import read_lines
from specscope.trace.params import MOST_TOKENS, PARAM_NAMES, SamplingParams

LARGEST_ARRAY = 2**30  # bytes; ShareGPT_V3_unfiltered_cleaned_split.json has 0.7 * 2^30
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in rows of SPEED-Bench before its prepare.py has filled them
CHARACTERS = 4  # to a token, roughly: there is no tokenizer here
# What vLLM's bench takes of ShareGPT, in tokens (its datasets.py, is_valid_sequence)
LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048

Turns = Annotated[list[Prompt], Meta(min_length=1, description="a list of texts, the first turn first")]
OutputTokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS, description="1 or more")]


@dataclass(frozen=True)
class LoadRequest:
    """One request, whatever server gets it."""

    prompt: str | Messages
    tokens: int | None = None  # output tokens at most, where the dataset says so
    params: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of its own

    def chat(self) -> Messages:
        """As the messages of a chat."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    def text(self) -> str:
        """As plain text. Raises UserError where it is a chat of several turns."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) > 1:
            raise UserError("--completions needs prompts of one turn, and the dataset has chats: use --chat")
        return self.prompt[0]["content"]


@dataclass(frozen=True)
class Dataset:
    """What a file holds."""

    layout: str  # in words
    asks: Sequence[LoadRequest]
    left_out: int = 0  # conversations that are too short or too long

    def take(self, count: int, seed: int) -> list[LoadRequest]:
        """So many in an order that the seed decides; each is used again only when all were used."""
        order = list(self.asks)
        random.Random(seed).shuffle(order)
        return list(islice(cycle(order), count))


def built_in() -> Dataset:
    """Prompts of five kinds that the default head was not trained on."""
    return Dataset("built in", [LoadRequest(prompt) for prompt in unseen_prompts()])


def read_dataset(path: str) -> Dataset:
    """The requests of a file. Raises UserError, with the number of the line."""
    found = _conversations(path) if _is_array(path) else _lines(path)
    if not found.asks:
        why = f" ({found.left_out} conversations are too short or too long)" if found.left_out else ""
        raise UserError(f"{path} has no prompts{why}")
    return found


def _is_array(path: str) -> bool:
    """Whether it is a file with one JSON array. Pipes are read as lines: they cannot be looked at twice."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError:
        return False  # said where it is read


class _Turn(msgspec.Struct):
    value: Text


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []
    conversation: list[_Turn] = []  # what SGLang also reads


def _conversations(path: str) -> Dataset:
    """ShareGPT: the first turn is the prompt, the second says how long the answer is."""
    try:
        if os.path.getsize(path) > LARGEST_ARRAY:
            raise UserError(f"{path} is larger than {LARGEST_ARRAY >> 20} MiB, the limit of a JSON array")
        data = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"cannot read the dataset {path}: {error.strerror}") from error
    try:
        items = decoded(data, list[msgspec.Raw])
    except ValueError as error:
        raise UserError(f"{path}, line {_broken_line(data, error)}: this is not JSON") from None
    asks, decoder, at = [], msgspec.json.Decoder(_Conversation), 0
    for item in items:
        piece = bytes(item)
        at = data.index(piece, at)
        try:
            found = decoder.decode(piece)
        except (ValueError, RecursionError):  # ValueError: of msgspec, and for text that is not Unicode
            line = data.count(b"\n", 0, at) + 1
            raise UserError(f'{path}, line {line}: no conversation: {{"conversations": [{{"value": text}}]}}') from None
        at += len(piece)
        turns = [turn.value for turn in found.conversations or found.conversation]
        if len(turns) > 1 and (tokens := _length(*turns[:2])):
            asks.append(LoadRequest(turns[0], tokens))
    return Dataset("ShareGPT", asks, len(items) - len(asks))


def _broken_line(data: bytes, error: Exception) -> int:
    """The line at which the parser gave up; the last one where the file is cut off."""
    told = re.search(r"\(byte (\d+)\)", str(error))
    return data.count(b"\n", 0, int(told[1]) if told else len(data.rstrip())) + 1


def _length(prompt: str, answer: str) -> int:
    """Output tokens of a conversation, roughly; 0 where vLLM's bench would leave it out."""
    asked, answered = len(prompt) // CHARACTERS, len(answer) // CHARACTERS
    fits = LEAST <= asked <= MOST_PROMPT and answered >= LEAST and asked + answered <= MOST_TOTAL
    return answered if fits else 0


def _lines(path: str) -> Dataset:
    """JSON Lines where the first line begins with `{`, else text."""
    asks: list[LoadRequest] = []
    layout = ""
    for number, line in read_lines(path, "the dataset"):
        if not line.strip():
            continue
        if len(asks) == MOST_PROMPTS:
            raise UserError(f"{path} has more than {MOST_PROMPTS} prompts: split it")
        try:
            if not asks and not line.lstrip().startswith("{"):
                layout = "text"
            name, ask = ("text", LoadRequest(checked(line, Prompt, "a line"))) if layout == "text" else parse_row(line)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        layout = layout or name
        asks.append(ask)
    return Dataset(layout, asks)


def parse_row(line: str) -> tuple[str, LoadRequest]:
    """The layout of a JSON line, and its request. Raises UserError."""
    try:
        values = decoded(line)
    except orjson.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg}, at column {error.colno})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    if "turns" in values:
        layout = "SPEED-Bench" if "multiturn" in values else "Spec-Bench"
        return layout, LoadRequest(_filled(checked(values["turns"], Turns, '"turns"')[0]))
    if "messages" in values and "question_id" in values:
        chat = checked(values["messages"], Conversation, '"messages"')
        until = next((at for at, message in enumerate(chat, 1) if message.role == "user"), len(chat))
        first = [{"role": message.role, "content": _filled(message.content)} for message in chat[:until]]
        return "SPEED-Bench", LoadRequest(first)
    if "prompt" in values and "output_tokens" in values:
        tokens = checked(values["output_tokens"], OutputTokens, '"output_tokens"')
        return "vLLM's custom layout", LoadRequest(checked(values["prompt"], Prompt, '"prompt"'), tokens)
    spec = parse_line(line, SamplingParams())
    given = {name: values[name] for name in PARAM_NAMES & set(values)}
    return "specscope's layout", LoadRequest(spec.prompt, given.pop("max_tokens", None), given)


def _filled(prompt: str) -> str:
    if PLACEHOLDER in prompt:
        raise UserError("this row of SPEED-Bench is a placeholder: fill the file in with SPEED-Bench's prepare.py")
    return prompt
