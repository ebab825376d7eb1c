"""A user's file of training data, checked before a model is loaded. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.kinds import PROMPT_FILE, TEXTS, kind_of, start_of
from specscope.whole_file import LARGEST_DATA, check_whole, read_whole

HELD_OUT = 40  # one in 40 sequences is held out of training
SHAPES = 'give "text", "prompt" and "response", or "messages" that end with the assistant\'s'


def read_data(path: Path) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """(line, what it holds) of a file: a paragraph of text (line 0), or a JSON object of one of the shapes.

    Raises UserError that names the broken line.
    """
    try:
        content = read_whole(path, "the data", LARGEST_DATA).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the data {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserError(f"cannot read the data {path}: it is not UTF-8 text") from None
    if not content.strip():
        raise UserError(f"{path} holds no text")
    if not content.lstrip().startswith("{"):
        yield from ((0, part) for part in content.split("\n\n") if part.strip())
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield number, _object(line, f"{path}, line {number}")


def check_kind(path: Path) -> None:
    """Refuse a file that is not there or is something else, by its name. Raises UserError."""
    try:
        check_whole(str(path), "the data", LARGEST_DATA)
        kind = kind_of(start_of(path))
    except OSError as error:
        raise UserError(f"cannot read the data {path}: {error.strerror}") from error
    if kind not in (None, PROMPT_FILE, TEXTS):
        raise kind.refusal(str(path), "data to train on")


def check_data(path: Path) -> None:
    """Refuse data that `read_data` would refuse, or that is too little. Raises UserError."""
    check_enough(sum(1 for _ in read_data(path)))


def check_enough(sequences: int) -> None:
    """Refuse too few sequences to hold one out. Raises UserError."""
    if sequences < HELD_OUT:
        raise UserError(f"training needs at least {HELD_OUT} sequences, and there are {sequences}")


def conversation(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The turns of an object without "text"; [] where it has none."""
    if isinstance(values.get("prompt"), str) and isinstance(values.get("response"), str):
        turns = (("user", values["prompt"]), ("assistant", values["response"]))
        return [{"role": role, "content": content} for role, content in turns]
    messages: Any = values.get("messages")
    good = isinstance(messages, list) and len(messages) > 1 and all(isinstance(turn, dict) for turn in messages)
    return messages if good and messages[-1].get("role") == "assistant" else []


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        values = decoded(line)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{where}: this is not a JSON object")
    if not (isinstance(values.get("text"), str) and values["text"]) and not conversation(values):
        raise UserError(f"{where}: {SHAPES}")
    return values
