"""The prompts of a command line, and of files that it names, as tokens of a model. No torch.

A file's layout is recognised from its content. JSON Lines, an array or documents over several lines may hold ShareGPT's
conversations, rows of SPEED-Bench (`turns` or `messages`), Spec-Bench and MT-bench (`turns`, or a list as `prompt`),
SpecForge's conversations (`role`, `content`), what SGLang dumps of its requests, or specscope's own. Of several turns
only the first is asked, as the benches of vLLM and SGLang do. A table with a column `prompt` has a prompt a row.
Anything else is plain text, a prompt a line.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson
from msgspec import Meta

from specscope.engine import chat_template
from specscope.errors import UserError, first_line
from specscope.trace.checked import Text, checked, checked_fields, decoded, short
from specscope.trace.files import BROKEN, open_plain, read_lines, reason
from specscope.trace.history.wording import plural
from specscope.trace.kinds import (
    PROMPT_TABLE,
    REQUEST_DUMP,
    FileKind,
    ReadAs,
    documents,
    is_array,
    kind_of,
    looks_like_json,
    start_of,
)
from specscope.trace.record.params import PARAM_NAMES, SamplingParams
from specscope.trace.record.records import TEMPLATE

Messages = Sequence[Mapping[str, str]]
MOST_PROMPTS = 100_000
LARGEST = 2**30  # bytes of an array; ShareGPT_V3_unfiltered_cleaned_split.json has 0.7 * 2^30
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # in rows of SPEED-Bench before its prepare.py has filled them
RENAMED = {"max_new_tokens": "max_tokens", "output_tokens": "max_tokens", "sampling_seed": "seed"}  # SGLang's, vLLM's
UNSET: tuple[object, ...] = (None, -1, "", [])  # a parameter of SGLang's
ASKED = re.compile(r"(?:prompt|question|instruction|query)s?", re.IGNORECASE)  # a column of prompts
CATEGORIES = ("category", "sub_category", "difficulty")  # of a data set's row, which become labels
MESSAGES = 'a list of at most 10000 {"role": ..., "content": text}'
NO_KWARGS: Mapping[str, Any] = {}
Tell = Callable[[str], None]

PromptText = Annotated[
    Text, Meta(min_length=1, title='"prompt"', description="text, not empty, of whole Unicode characters")
]
Turns = Annotated[list[PromptText], Meta(min_length=1, description="a list of texts, the first turn first")]
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

    prompt: PromptText = ""  # one of the two is given
    messages: Conversation = []
    chat_template_kwargs: Template = {}


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
    def texts(self) -> list[str]:
        """Its text, or those of its messages."""
        return [self.prompt] if isinstance(self.prompt, str) else [turn["content"] for turn in self.prompt]


def prompt_specs(
    prompts: Sequence[str], file: str | None, given: PromptSpec, tell: Tell, *, words_are_files: bool = False
) -> list[PromptSpec]:
    """The prompts of a command line: its arguments, then those of its --file. Raises UserError.

    `given`: what is said for all of them. An argument that names a file stands for the prompts in it, and `tell` is
    given a line that says so. A single word that names none is a prompt, unless `words_are_files`.
    """
    if not all(prompts):
        raise UserError("a prompt is empty")
    specs, read = list[PromptSpec](), partial(read_prompts, given=given, tell=tell)
    for number, text in enumerate(prompts, 1):
        if _names_file(text):
            specs += (of_file := read(text))
            if not words_are_files:
                tell(f"{text} is a file: decoding the {plural(len(of_file), 'prompt')} in it")
        elif words_are_files and not any(map(str.isspace, text)):
            alone = "for a prompt of one word: echo WORD | specscope capture - -o FILE"
            raise UserError(f"cannot read the prompts {text}: there is no such file ({alone})")
        else:
            specs.append(dataclasses.replace(given, prompt=checked(text, PromptText, f"prompt {number}")))
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


def read_prompts(path: str, given: PromptSpec, tell: Tell = lambda _: None) -> list[PromptSpec]:
    """The prompts of a file, or of standard input for `-`. Raises UserError that names the broken line.

    A line without a seed of its own gets the given one plus its place in the file, so that lines do not share their
    coins.
    """
    specs, empty = list[PromptSpec](), 0
    for item, value in _values(path):
        place, seed = f"{path}, {item}", (given.params.seed + len(specs)) % 2**63
        try:
            params = dataclasses.replace(given.params, seed=seed)
            spec = parse_row(value, dataclasses.replace(given, params=params, place=place))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        specs += [] if spec is None else [spec]
        empty += spec is None
        if len(specs) > MOST_PROMPTS:
            raise UserError(f"{path} has more than {MOST_PROMPTS} prompts: split it")
    without = f"{plural(empty, 'conversation')} without text"
    if not specs:
        raise UserError(f"{path} has no prompts{f' ({without})' if empty else ''}")
    if empty:
        tell(f"{path}: {without} left out")
    return specs


def _values(path: str) -> Iterator[tuple[str, str | bytes | dict[str, Any]]]:
    """(its place, value) of each line with text, each item of an array, or each request of a dump."""
    start = start_of(path)
    if _of_prompts(kind_of(start), path) is REQUEST_DUMP and start[:1] == b"\x80":
        yield from ((f"request {number}", request) for number, request in enumerate(dumped_requests(path), 1))
    elif is_array(start.decode("utf-8", "replace")):
        yield from ((f"item {number}", item) for number, item in enumerate(_array(path), 1))
    else:
        yield from ((f"line {number}", line) for number, line in _lines(path))


def _lines(path: str) -> Iterator[tuple[int, str | bytes | dict[str, Any]]]:
    """(number, value) of each line with text, or of each JSON document where the first line begins one."""
    lines = ((number, line) for number, line in read_lines(path, "the prompts") if line.strip())
    for first in lines:
        every = chain([first], lines)
        if _of_prompts(kind_of(first[1].encode()), path) is PROMPT_TABLE:  # a pipe cannot be looked at before
            yield from _table(path, every)
        elif looks_like_json(first[1]):
            yield from documents(((number, line.encode() + b"\n") for number, line in every), path)
        else:
            yield from every


def _array(path: str) -> Iterator[str | bytes]:
    """The items of a file that is one JSON array."""
    try:
        with open(path, "rb") as raw, open_plain(raw, path) as file:
            data = file.read(LARGEST + 1).removeprefix(b"\xef\xbb\xbf")
    except BROKEN as error:
        raise UserError(f"cannot read the prompts {path}: {reason(error)}") from error
    if len(data) > LARGEST:
        raise UserError(f"{path} is larger than {LARGEST >> 20} MiB, the limit of a JSON array")
    try:
        items = map(bytes, decoded(data, list[msgspec.Raw]))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    yield from (decoded(item) if item.startswith(b'"') else item for item in items)


def _of_prompts(kind: FileKind | None, path: str) -> FileKind | None:
    """The kind of a file, which holds prompts. Raises UserError."""
    if kind is not None and kind.reader is not ReadAs.PROMPTS:
        raise kind.refusal(path, "a file of prompts")
    return kind


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


def parse_row(value: str | bytes | dict[str, Any], given: PromptSpec) -> PromptSpec | None:
    """Text, or a row as JSON, over what is `given` for all; None for a conversation without text. Raises UserError."""
    if isinstance(value, str):
        return dataclasses.replace(given, prompt=checked(value, PromptText, "a line"))
    try:
        values = value if isinstance(value, dict) else decoded(value)
    except orjson.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error.msg}, at column {error.colno})") from None
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    if (row := _as_ours(values)) is None:
        return None
    if ("prompt" in row) == ("messages" in row):
        if isinstance(value, bytes) and (kind := kind_of(value)) and kind.reader is not ReadAs.PROMPTS:
            raise UserError(f"this is {kind.words}, not a prompt")
        raise UserError('give either "prompt" or "messages"')
    params = {RENAMED.get(name, name): value for name, value in row.items() if RENAMED.get(name, name) in PARAM_NAMES}
    line = checked_fields(row, PromptLine)
    labels = {name: row[name] for name in row if name not in {*PARAM_NAMES, *RENAMED, *PromptLine.__struct_fields__}}
    if len(labels) > 64:
        raise UserError(f"a line may have 64 labels, not {len(labels)}")
    spec = dataclasses.replace(
        given,
        prompt=line.prompt or msgspec.to_builtins(line.messages),
        params=SamplingParams.from_dict({**given.params.to_dict(), **params}),
        labels={
            checked(name, LabelName, "a label"): _label(f"the label {short(name)}", labels[name]) for name in labels
        },
        template={**given.template, **line.chat_template_kwargs},
    )
    if any(PLACEHOLDER in text for text in spec.texts):
        raise UserError("this row of SPEED-Bench is a placeholder: fill the file with SPEED-Bench's prepare.py")
    return spec


def _label(name: str, value: object) -> str:
    """Any value as text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    except RecursionError:
        raise UserError(f"{name} is nested too deeply") from None
    return str(checked(text, Label, name))


def _as_ours(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row of a data set, or a request of SGLang's, as a row of ours; None for a conversation without text."""
    if isinstance(asked := row.get("obj"), dict) and "sampling_params" in asked | row:
        return _dumped(asked)
    about = {key: row[key] for key in CATEGORIES if isinstance(row.get(key), str) and row[key]}
    said = row.get("conversations", row.get("conversation"))
    if isinstance(said, list) and not {"prompt", "messages"} & set(row):
        first = said[0] if said and isinstance(said[0], dict) else {}
        if "role" in first:  # SpecForge's
            return {"messages": _asked(said)}
        return {"prompt": first["value"]} if first.get("value") else None
    if "turns" in row or isinstance(row.get("prompt"), list):
        key = "turns" if "turns" in row else "prompt"
        return about | {"prompt": checked(row[key], Turns, f'"{key}"')[0]}
    if "messages" in row and "question_id" in row:
        return about | {"messages": _asked(row["messages"])}
    return row


def _asked(messages: Any) -> Any:  # noqa: ANN401
    """A chat, to what its user says first."""
    chat = checked(messages, Conversation, '"messages"')
    return chat[: next((count for count, turn in enumerate(chat, 1) if turn.role == "user"), len(chat))]


def _dumped(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A request as SGLang dumps it, or logs it as JSON: its text, and what it was sampled with."""
    if not isinstance(asked.get("text"), str):
        raise UserError("this SGLang request has token ids and no text: its prompt is unknown")
    params = asked.get("sampling_params")
    named = params.items() if isinstance(params, dict) else ()
    given = {n: value for n, value in named if RENAMED.get(n, n) in PARAM_NAMES and value not in UNSET}
    return {"prompt": asked["text"], **given}


class Opaque(dict[Any, Any]):
    """Stands for every class in a pickle, with its attributes: none is imported, and nothing of it is run."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        self.update(state if isinstance(state, dict) else {})

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
        yield {"obj": asked if isinstance(asked, dict) else {}, "sampling_params": None}


def template_label(template: Mapping[str, Any]) -> dict[str, str]:
    """chat_template_kwargs as the label that records them. Raises UserError."""
    return {TEMPLATE: _label(TEMPLATE, template)} if template else {}


def read_template(text: str) -> Mapping[str, Any]:
    """chat_template_kwargs as a flag gives them. Raises UserError."""
    try:
        kwargs = checked(decoded(text), Template, "--chat-template-kwargs")
    except ValueError as error:
        raise UserError(f"--chat-template-kwargs {short(text)} is not JSON ({first_line(error)})") from None
    template_label(kwargs)
    return dict(kwargs)


class TooLargeError(UserError):
    """A prompt that this engine has no room for; others of the same run it may have."""


class Encoded(NamedTuple):
    """What Engine.encode makes of a prompt: a server does that beside the engine's thread."""

    text: str  # as it was tokenised; "" for token ids
    tokens: list[int]
    title: str = ""  # the last message of a conversation


Prompt = str | Sequence[int] | Messages  # text, token ids, or chat messages


@dataclass(frozen=True)
class PromptEncoder:
    """A model's tokenizer, and what it can take."""

    tokenizer: Any
    vocab_size: int
    max_context: int  # tokens
    longest: int  # bytes of a token

    def encode(self, prompt: Prompt, template: Mapping[str, Any] = NO_KWARGS) -> Encoded:
        """Text as it is, chat messages through the model's template, or token ids.

        `template`: chat_template_kwargs, variables of that template. Raises UserError.
        """
        most = f"{self.max_context - 1} tokens"  # a tokenizer takes minutes and gigabytes for megabytes of text
        if len(prompt) > self.max_context and not isinstance(prompt, str):
            raise TooLargeError(f"the prompt has {len(prompt)} parts; the limit is {most}")
        turns = [{"content": prompt}] if isinstance(prompt, str) else [x for x in prompt if isinstance(x, Mapping)]
        size = sum(len(str(turn.get("content"))) for turn in turns)  # in characters, each of which is a byte at least
        if size > self.max_context * self.longest:
            raise TooLargeError(f"the prompt has {size} characters, too many for the limit of {most}")
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        if template and not is_chat:
            raise UserError(f"{TEMPLATE} apply to chats: the prompt is plain, or this model has no chat template")
        if isinstance(prompt, str):
            return Encoded(prompt, list(self.tokenizer(prompt)["input_ids"]))
        if is_chat:
            if not self.tokenizer.chat_template:
                raise UserError("chat messages need a model with a chat template: give the prompt as text")
            known = inspect.signature(self.tokenizer.apply_chat_template).parameters
            if taken := sorted({*template} & {*known}):
                raise UserError(f"{TEMPLATE}: {short(taken[0])} is not a variable of a chat template: leave it out")
            chat: Any = prompt
            text = chat_template.render(self.tokenizer, chat, template, self.max_context * self.longest)
            tokens = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return Encoded(text, tokens, str(chat[-1].get("content", "")))
        tokens = [int(t) for t in prompt]  # type: ignore[arg-type]
        for bad in [t for t in tokens if not 0 <= t < self.vocab_size][:1]:
            raise UserError(f"token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return Encoded("", tokens)

    def turn(self, prompt: Prompt, *, raw: bool = False) -> Prompt:
        """Text as a chat turn of the user, where the model has a chat template and `raw` is False."""
        if isinstance(prompt, str) and not raw and self.tokenizer.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt

    def check(self, tokens: list[int]) -> None:
        """Raise UserError for a prompt without tokens, or with too many for an output."""
        if not tokens:
            raise UserError("the prompt is empty: it has no tokens")
        if len(tokens) >= self.max_context:
            raise TooLargeError(f"the prompt has {len(tokens)} tokens; the limit is {self.max_context - 1}")
