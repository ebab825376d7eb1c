"""The rows of prompt files and data sets, whatever their layout; it is recognised from the content. No torch.

JSON Lines, an array or documents over several lines may hold ShareGPT's conversations, rows of SPEED-Bench (`turns` or
`messages`), Spec-Bench and MT-bench (`turns`, or a list as `prompt`), vLLM's custom layout (`prompt`, `output_tokens`),
SpecForge's conversations (`role`, `content`), what SGLang dumps of its requests, or specscope's own. Of several turns
only the first is asked, as the benches of vLLM and SGLang do. A table with a column `prompt` has a prompt a row.
Anything else is plain text, a prompt a line.
"""

from __future__ import annotations

import csv
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta

from specscope.errors import UserError, first_line
from specscope.trace.checked import Text, checked, checked_fields, decoded, short
from specscope.trace.files import BROKEN, open_plain, read_lines, reason
from specscope.trace.kinds import (
    PROMPT_TABLE,
    REQUEST_DUMP,
    SHAREGPT,
    ReadAs,
    documents,
    is_array,
    kind_of,
    looks_like_json,
    start_of,
)
from specscope.trace.record.params import MOST_TOKENS, PARAM_NAMES, SamplingParams
from specscope.trace.record.records import TEMPLATE

Messages = Sequence[Mapping[str, str]]
MOST_PROMPTS = 100_000
LARGEST_ARRAY = 2**30  # bytes; ShareGPT_V3_unfiltered_cleaned_split.json has 0.7 * 2^30
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in rows of SPEED-Bench before its prepare.py has filled them
CHARACTERS = 4  # to a token, roughly: there is no tokenizer here
# What vLLM's bench takes of ShareGPT, in tokens (its datasets.py, is_valid_sequence)
LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048
RENAMED = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}  # SGLang's names
ASKED = re.compile(r"(?:prompt|question|instruction|query)s?", re.IGNORECASE)  # a column of prompts
CATEGORIES = ("category", "sub_category", "difficulty")  # of a data set's row, which become labels
MESSAGES = 'a list of at most 10000 {"role": ..., "content": text}'

Prompt = Annotated[
    Text, Meta(min_length=1, title='"prompt"', description="text, not empty, of whole Unicode characters")
]
Turns = Annotated[list[Prompt], Meta(min_length=1, description="a list of texts, the first turn first")]
OutputTokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS, description="1 or more")]
Label = Annotated[Text, Meta(max_length=10_000, description="at most 10000 characters long")]
LabelName = Annotated[Text, Meta(max_length=200, description="a name of at most 200 characters")]
Template = Annotated[
    dict[str, Any], Meta(max_length=64, title=TEMPLATE, description='a JSON object, such as {"enable_thinking": false}')
]


class ChatTurn(msgspec.Struct):
    """One turn of a chat; other keys are left out."""

    role: Annotated[Text, Meta(min_length=1, max_length=100)]
    content: Text


Conversation = Annotated[
    list[ChatTurn], Meta(min_length=1, max_length=10_000, title='"messages"', description=MESSAGES)
]


class PromptLine(msgspec.Struct):
    """What a row of ours says besides sampling parameters (SamplingParams is their schema) and labels."""

    prompt: Prompt = ""  # one of the two is given
    messages: Conversation = []
    chat_template_kwargs: Template = {}


@dataclass(frozen=True)
class Row:
    """One request as a file has it."""

    prompt: str | Messages  # text, or chat messages
    given: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of its own, by name
    labels: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)  # chat_template_kwargs
    line: int = 0


@dataclass(frozen=True)
class PromptRows:
    """The rows of a file, and how many were left out."""

    rows: Sequence[Row]
    left_out: int  # conversations that are too short or too long


def read_rows(path: str) -> PromptRows:
    """The rows of a file, or of standard input for `-`. Raises UserError, with the number of the line."""
    start = start_of(path)
    kind = kind_of(start)
    if kind is not None and kind.reader is not ReadAs.PROMPTS:
        raise kind.refusal(path, "a file of prompts")
    if kind is REQUEST_DUMP and start[:1] == b"\x80":
        lines: Iterator[tuple[int, Any]] = enumerate(dumped_requests(path), 1)
    else:
        lines = (_array if is_array(start.decode("utf-8", "replace")) else _lines)(path)
    rows, left_out = [], 0
    for number, value in lines:
        try:
            row = parse_row(value, talks=kind is SHAREGPT)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        if row is None:
            left_out += 1
        else:
            rows.append(replace(row, line=number))
        if len(rows) > MOST_PROMPTS:
            raise UserError(f"{path} has more than {MOST_PROMPTS} prompts: split it")
    if not rows:
        why = f" ({left_out} conversations are too short or too long)" if left_out else ""
        raise UserError(f"{path} has no prompts{why}")
    return PromptRows(rows, left_out)


def _lines(path: str) -> Iterator[tuple[int, str | bytes | dict[str, Any]]]:
    """(number, value) of each line with text, or of each JSON document where the first line begins one."""
    lines = ((number, line) for number, line in read_lines(path, "the prompts") if line.strip())
    first = next(lines, None)
    if first is None:
        return
    line = first[1]
    if (kind := kind_of(line.encode())) is not None and kind.reader is not ReadAs.PROMPTS:
        raise kind.refusal(path, "a file of prompts")  # of a pipe, which cannot be looked at before
    if kind is PROMPT_TABLE:
        yield from _table(path, chain([first], lines))
        return
    if not looks_like_json(line):
        yield first
        yield from lines
        return
    yield from documents(((line_number, text.encode() + b"\n") for line_number, text in chain([first], lines)), path)


def _table(path: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a table as values of ours: its other columns are sampling parameters or labels."""
    number, header = next(lines)
    delimiter = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter))]
    names[next(index for index, name in enumerate(names) if ASKED.fullmatch(name))] = "prompt"
    rows = csv.reader((f"{line}\n" for _, line in lines), delimiter=delimiter)
    for row in rows:
        cells = {name: cell for name, cell in zip(names, row, strict=False) if name and (cell or name == "prompt")}
        try:
            yield number + rows.line_num, {n: decoded(c) if n in PARAM_NAMES else c for n, c in cells.items()}
        except ValueError:
            raise UserError(f"{path}, line {number + rows.line_num}: a parameter that is not a number") from None


def _array(path: str) -> Iterator[tuple[int, str | bytes]]:
    """The items of a file that is one JSON array, with their lines."""
    try:
        with open(path, "rb") as raw, open_plain(raw, path) as file:
            data = file.read(LARGEST_ARRAY + 1).removeprefix(b"\xef\xbb\xbf")
    except BROKEN as error:
        raise UserError(f"cannot read the prompts {path}: {reason(error)}") from error
    if len(data) > LARGEST_ARRAY:
        raise UserError(f"{path} is larger than {LARGEST_ARRAY >> 20} MiB, the limit of a JSON array")
    try:
        items = decoded(data, list[msgspec.Raw])
    except ValueError as error:
        raise UserError(f"{path}, line {_broken_line(data, error)}: this is not JSON") from None
    line, before = 1, 0
    for item in items:
        piece = bytes(item)
        begin = data.index(piece, before)
        line += data.count(b"\n", before, begin)
        before = begin
        yield line, decoded(piece) if piece.startswith(b'"') else piece


def _broken_line(data: bytes, error: Exception) -> int:
    """The line at which the parser gave up; the last one where the file is cut off."""
    position = re.search(r"\(byte (\d+)\)", str(error))
    return data.count(b"\n", 0, int(position[1]) if position else len(data.rstrip())) + 1


def parse_row(value: str | bytes | Mapping[str, Any], *, talks: bool = False) -> Row | None:
    """Text, or a JSON document; None for a conversation that vLLM's bench would leave out. Raises UserError.

    `talks`: ShareGPT's data set, where rows without a conversation are such.
    """
    if isinstance(value, str):
        return Row(checked(value, Prompt, "a line"))
    try:
        values = value if isinstance(value, Mapping) else decoded(value)
    except orjson.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg}, at column {error.colno})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    if isinstance(asked := values.get("obj"), dict) and "sampling_params" in asked | values:
        return _dumped(asked)
    if isinstance(value, Mapping):
        return _own(values)
    said = values.get("conversations") or values.get("conversation")
    if isinstance(said, list) and said and isinstance(said[0], dict) and "role" in said[0]:  # SpecForge's
        return _first_turn(said, {})
    if talks or ({"conversations", "conversation"} & set(values) and not {"prompt", "messages"} & set(values)):
        return _conversation(value)
    if "turns" in values or isinstance(values.get("prompt"), list):
        return _turns(values)
    if "messages" in values and "question_id" in values:
        return _first_turn(values["messages"], _categories(values))
    if "prompt" in values and "output_tokens" in values:
        tokens = checked(values["output_tokens"], OutputTokens, '"output_tokens"')
        prompt = checked(values["prompt"], Prompt, '"prompt"')
        return Row(prompt, {"max_tokens": tokens}, _categories(values))
    if not {"prompt", "messages"} & set(values) and (kind := kind_of(value)) and kind.reader is not ReadAs.PROMPTS:
        raise UserError(f"this is {kind.words}, not a prompt")
    return _own(values)


def _first_turn(messages: object, labels: Mapping[str, str]) -> Row:
    """A chat, to what its user says first."""
    chat = _said(checked(messages, Conversation, '"messages"'))
    until = next((count for count, message in enumerate(chat, 1) if message["role"] == "user"), len(chat))
    for message in chat[:until]:
        _filled(message["content"])
    return Row(chat[:until], labels=labels)


def _said(chat: list[ChatTurn]) -> list[dict[str, str]]:
    return [msgspec.to_builtins(message) for message in chat]


def _dumped(asked: Mapping[str, Any]) -> Row:
    """A request as SGLang dumps it, or logs it as JSON: its text, and what it was sampled with."""
    if not isinstance(asked.get("text"), str):
        raise UserError("this SGLang request has token ids and no text: its prompt is unknown")
    params = asked.get("sampling_params")
    named = {RENAMED.get(name, name): value for name, value in (params if isinstance(params, dict) else {}).items()}
    given = {name: value for name, value in named.items() if name in PARAM_NAMES and value not in (None, -1, "", [])}
    given |= {"stop": [given["stop"]]} if isinstance(given.get("stop"), str) else {}
    SamplingParams.from_dict({**SamplingParams().to_dict(), **given})  # what is wrong is said with its line
    return Row(checked(asked["text"], Prompt, '"text"'), given)


class Opaque:
    """Stands for every class in a pickle: none is imported, and nothing of it is run."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.state: object = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Of a mapping: left out."""

    def append(self, value: object) -> None:
        """Of a list: left out."""

    extend = append


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[Opaque]:
        return Opaque


def dumped_requests(path: str) -> Iterator[dict[str, Any]]:
    """The requests in a file that SGLang dumped (its request dump, a crash dump), as JSON would have them."""
    try:
        with open(path, "rb") as raw, open_plain(raw, path) as file:
            whole = _Plain(file).load()
        items = [*(whole["requests"] if isinstance(whole, dict) and "requests" in whole else whole)]
    except Exception as error:  # of a damaged pickle: anything
        raise UserError(f"{path} is a dump of SGLang's requests that cannot be read ({first_line(error)})") from None
    for item in items:
        asked = item[0] if isinstance(item, tuple | list) and item else item
        state = asked.state if isinstance(asked, Opaque) else asked
        yield {"obj": state if isinstance(state, dict) else {}, "sampling_params": None}


class _Turn(msgspec.Struct):
    value: Text


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []
    conversation: list[_Turn] = []  # what SGLang also reads


_read_conversation = msgspec.json.Decoder(_Conversation).decode


def _conversation(value: bytes) -> Row | None:
    """ShareGPT: the first turn is the prompt. A conversation that vLLM's bench would leave out is None."""
    try:
        conversation = _read_conversation(value)
    except (ValueError, RecursionError):  # ValueError: of msgspec, and for text that is not Unicode
        raise UserError('no conversation: {"conversations": [{"value": text}]}') from None
    turns = [turn.value for turn in conversation.conversations or conversation.conversation][:2]
    if len(turns) < 2:
        return None
    asked, answered = (len(turn) // CHARACTERS for turn in turns)
    fits = LEAST <= asked <= MOST_PROMPT and answered >= LEAST and asked + answered <= MOST_TOTAL
    return Row(turns[0]) if fits else None


def _turns(values: Mapping[str, Any]) -> Row:
    key = "turns" if "turns" in values else "prompt"
    return Row(_filled(checked(values[key], Turns, f'"{key}"')[0]), labels=_categories(values))


def _filled(prompt: str) -> str:
    if PLACEHOLDER in prompt:
        raise UserError("this row of SPEED-Bench is a placeholder: fill the file with SPEED-Bench's prepare.py")
    return prompt


def _categories(values: Mapping[str, Any]) -> dict[str, str]:
    named = {key: values[key] for key in CATEGORIES if isinstance(values.get(key), str) and values[key]}
    return {key: _label(key, value) for key, value in named.items()}


def _own(values: Mapping[str, Any]) -> Row:
    """`prompt` or `messages`, sampling parameters by their names, anything else a label."""
    given = {name: values[name] for name in PARAM_NAMES & set(values)}
    rest = {name: value for name, value in values.items() if name not in given}
    if ("prompt" in rest) == ("messages" in rest):
        raise UserError('give either "prompt" or "messages"')
    prompt_line = checked_fields(rest, PromptLine)
    SamplingParams.from_dict({**SamplingParams().to_dict(), **given})  # what is wrong is said with its line
    return Row(
        prompt_line.prompt or _said(prompt_line.messages), given, _labels(rest), prompt_line.chat_template_kwargs
    )


def _labels(values: Mapping[str, Any]) -> dict[str, str]:
    """Everything that is neither prompt nor parameter, as text."""
    labels = {key: value for key, value in values.items() if key not in PromptLine.__struct_fields__}
    if len(labels) > 64:
        raise UserError(f"a line may have 64 labels, not {len(labels)}")
    return {checked(key, LabelName, "a label"): _label(key, value) for key, value in labels.items()}


def _label(key: str, value: object) -> str:
    name = f"the label {short(key)}"
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
    return str(checked(text, Label, name))
