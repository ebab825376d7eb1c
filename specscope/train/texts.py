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
from specscope.trace.record.tree import DraftTree
from specscope.train.data import conversation, read_data
from specscope.train.shards import Sample, ShardWriter


@dataclass(frozen=True)
class TrainingText:
    """One sequence: what is given to the target, and what follows."""

    given: str  # not learnt; "" for plain text
    rest: str


def read_texts(path: Path, tokenizer: Any) -> Iterator[TrainingText]:  # noqa: ANN401
    """Paragraphs of a text file; or JSON Lines with `text`, `prompt` and `response`, or chat `messages`.

    Raises UserError that names the broken line.
    """
    for number, value in read_data(path):
        try:
            yield TrainingText("", value) if isinstance(value, str) else _text(value, tokenizer)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None


def _text(values: dict[str, Any], tokenizer: Any) -> TrainingText:  # noqa: ANN401
    if isinstance(values.get("text"), str) and values["text"]:
        return TrainingText("", values["text"])
    messages = conversation(values)
    if not tokenizer.chat_template and "messages" not in values:
        return TrainingText(values["prompt"], values["response"])
    if not tokenizer.chat_template:
        raise UserError("messages need a target with a chat template")
    try:
        whole: str = tokenizer.apply_chat_template(messages, tokenize=False)
        given: str = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise UserError(f"the chat template rejects these messages: {error}") from error
    return TrainingText(given, whole.removeprefix(given)) if whole.startswith(given) else TrainingText("", whole)


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
