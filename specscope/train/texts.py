"""Training data from a user's file: the target is run over its texts, and its features are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.model.runner import ModelRunner
from specscope.trace.checked import decoded
from specscope.trace.files import LARGEST_DATA, read_whole
from specscope.trace.tree import DraftTree
from specscope.train.shards import Sample, ShardWriter


@dataclass(frozen=True)
class Text:
    """One sequence: what is given, and what follows it."""

    given: str  # not learnt; "" for plain text
    rest: str


def read_texts(path: Path, tokenizer: Any) -> Iterator[Text]:  # noqa: ANN401
    """Paragraphs of a text file; or JSON Lines with `text`, `prompt` and `response`, or chat `messages`.

    Raises UserError that names the broken line.
    """
    try:
        content = read_whole(path, "the data", LARGEST_DATA).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the data {path}: {error}") from error
    if not content.strip():
        raise UserError(f"{path} holds no text")
    if not content.lstrip().startswith("{"):
        yield from (Text("", part) for part in content.split("\n\n") if part.strip())
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield _text(decoded(line), tokenizer)
            except (ValueError, UserError) as error:
                raise UserError(f"{path}, line {number}: {error}") from None


def _text(values: Any, tokenizer: Any) -> Text:  # noqa: ANN401
    if not isinstance(values, dict):
        raise UserError("this is not a JSON object")
    if isinstance(values.get("text"), str) and values["text"]:
        return Text("", values["text"])
    messages: Any = values.get("messages")
    if isinstance(values.get("prompt"), str) and isinstance(values.get("response"), str):
        messages = [
            {"role": "user", "content": values["prompt"]},
            {"role": "assistant", "content": values["response"]},
        ]
        if not tokenizer.chat_template:
            return Text(values["prompt"], values["response"])
    good = isinstance(messages, list) and len(messages) > 1 and all(isinstance(m, dict) for m in messages)
    if not good or messages[-1].get("role") != "assistant":
        raise UserError('give "text", "prompt" and "response", or "messages" that end with the assistant\'s')
    if not tokenizer.chat_template:
        raise UserError("messages need a target with a chat template")
    try:
        whole: str = tokenizer.apply_chat_template(messages, tokenize=False)
        given: str = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise UserError(f"the chat template rejects these messages: {error}") from error
    return Text(given, whole.removeprefix(given)) if whole.startswith(given) else Text("", whole)


def run_texts(
    runner: ModelRunner,
    tokenizer: Any,  # noqa: ANN401
    path: Path,
    writer: ShardWriter,
    progress: Callable[[int], None],
    longest: int,
) -> None:
    """Run the target over every text of a file, cut to `longest` tokens. `progress` gets the tokens of each."""
    width = runner.loaded.width
    for text in read_texts(path, tokenizer):
        given = tokenizer(text.given, add_special_tokens=False)["input_ids"] if text.given else []
        tokens = [*given, *tokenizer(text.rest, add_special_tokens=not text.given)["input_ids"]][:longest]
        if len(tokens) - len(given) < 4:
            continue
        table = BlockTable()
        runner.cache.reserve(table, len(tokens), 0)
        segment = Segment.of_tree(table, 0, tokens, DraftTree.empty(), logits=False)
        rows = runner.forward_with_features([segment])[1][0].bfloat16().cpu()
        runner.cache.truncate(table, 0)
        learn = torch.ones(len(tokens), dtype=torch.bool)
        learn[: len(given)] = False
        features, final = rows[:, :-width].contiguous(), rows[:, -width:].contiguous()
        writer.add(Sample(torch.tensor(tokens, dtype=torch.int32), learn, features, final))
        progress(len(tokens))
    writer.flush()
