"""Training data that a target writes itself: its own instructions, then its own answers.

A chat model continues its template's opening of a user turn with an instruction like those it was trained on (Xu et
al. 2024, Magpie), and then answers it. The features are kept while it writes, so that nothing is computed twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.model.runner import ModelRunner
from specscope.speculate.sampling import argmax
from specscope.trace.record.tree import DraftTree
from tools.train_head.shards import Sample, ShardWriter

INSTRUCTION_TEMPERATURES = (0.7, 0.9, 1.0)
ANSWER_TEMPERATURES = (0.0, 0.0, 0.8)  # two in three greedy
LONGEST_INSTRUCTION = 200  # tokens; a longer one is cut here, and answered
SHORTEST_INSTRUCTION = 4
LEAST_ROOM = 16  # tokens in addition to template and opener
OPENED = 0.6  # share of instructions that begin with one of OPENERS, each kind equally likely so that none is rare
OPENERS = {
    "instructions": (
        "Explain", "What is", "How do I", "List", "Give me", "Describe", "Name", "Compare", "Translate", "Suggest",
        "Write a short story about", "Write a poem about", "Write an email to", "What are the steps to",
        "Rewrite the following sentence", "Proofread", "Make a plan for", "Write a paragraph about",
    ),
    "code": (
        "Write a Python function that", "Write a function in JavaScript that", "Here is some code:", "Implement",
        "Fix the bug in this code:", "Create a class", "Write a SQL query", "Write a C program that",
        "Write a Python script that", "What does this code do?", "Write a bash script that", "In Python, how do I",
    ),
    "maths": (
        "Solve this problem:", "Calculate", "A train", "How many", "If I", "Find the", "Solve for x:", "A shop sells",
        "What is the area of", "A farmer has", "Simplify", "What is the sum of", "A rectangle", "How much",
    ),
    "summarising": (
        "Summarize the following text:\n\n", "Summarize this article in three sentences:\n\n",
        "Give a short summary of this text:\n\n", "What is the main point of this paragraph?\n\n",
        "Shorten this text:\n\n", "Read this passage and summarise it:\n\n", "Summarise this in one sentence: ",
    ),
    "chat": (
        "Hi! I", "Hello,", "Can you", "I have", "I feel", "Tell me about", "Why", "Help me", "What happens when",
        "What do you think about", "I want to", "My friend", "Do you", "I'm", "Should I", "What should I",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Turns:
    """The parts of a chat template. Empty `answer`: the model has no template, and simply continues `opening`."""

    opening: list[int]  # up to where the user speaks
    answer: list[int]  # from the end of the user's turn to where the assistant speaks
    ends: tuple[int, ...]  # tokens that end the answer

    @staticmethod
    def of(tokenizer: Any, eos: tuple[int, ...]) -> Turns:  # noqa: ANN401
        """Read a tokenizer's template."""
        if not tokenizer.chat_template:
            start = [t for t in (tokenizer.bos_token_id,) if t is not None] or list(eos[:1])
            if not start:
                raise UserError("the target has neither a chat template nor a first token to write from")
            return Turns(start, [], eos)
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        turn = [{"role": "user", "content": mark}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        if text.count(mark) != 1:
            raise UserError("the target's chat template repeats or drops the user's words")
        opening, answer = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(mark))
        return Turns(opening, answer, eos)


@dataclass
class _Writing:
    """One sequence while it is written."""

    table: BlockTable
    tokens: list[int]
    computed: int  # tokens whose KV and features are known
    temperature: float
    answering: bool
    given: int  # tokens at its beginning that it did not write
    features: list[Tensor] = field(default_factory=list)  # rows from the end of the opening on


class Synthesiser:
    """Writes sequences, `rows` of them at a time."""

    def __init__(self, runner: ModelRunner, tokenizer: Any, *, rows: int, longest: int, seed: int) -> None:  # noqa: ANN401
        self.runner = runner
        self.turns = Turns.of(tokenizer, runner.loaded.eos)
        self.rows = rows
        self.longest = longest
        self.width = runner.loaded.width
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.openers: list[list[list[int]]] = [
            [tokenizer(text, add_special_tokens=False)["input_ids"] for text in kind] for kind in OPENERS.values()
        ]
        longest_opener = max(len(opener) for kind in self.openers for opener in kind)
        room = longest - len(self.turns.opening) - len(self.turns.answer) - longest_opener
        if room < LEAST_ROOM:
            raise UserError(f"--longest {longest} leaves room for {room} tokens after the chat template: raise it")
        self._opening = _Writing(BlockTable(), list(self.turns.opening), 0, 1.0, False, len(self.turns.opening))
        self._opening_features = self._feed([self._opening])[1][0]

    def write(self, tokens: int, writer: ShardWriter, progress: Callable[[int], None]) -> None:
        """Write until `tokens` are kept. `progress` is called with how many are new."""
        running = [self._begin() for _ in range(self.rows)]
        written = 0
        while written < tokens:
            logits, features = self._feed(running)
            chosen = self._choose(running, torch.cat(logits))
            for place, (writing, token, rows) in enumerate(zip(list(running), chosen, features, strict=True)):
                writing.features.append(rows)
                if not self._goes_on(writing, token):
                    sample = self._sample(writing)
                    if sample is not None:
                        writer.add(sample)
                        written += len(sample.tokens)
                        progress(len(sample.tokens))
                    self.runner.cache.truncate(writing.table, 0)
                    running[place] = self._begin()
        writer.flush()

    def _begin(self) -> _Writing:
        """A new sequence after the common opening, whose KV it shares. The opening's last token is fed again."""
        table = self.runner.cache.fork(self._opening.table)
        computed = len(self.turns.opening) - 1
        tokens = list(self.turns.opening)
        if self.random.random() < OPENED:
            tokens += self.random.choice(self.random.choice(self.openers))
        how = INSTRUCTION_TEMPERATURES if self.turns.answer else (*ANSWER_TEMPERATURES, 1.0)
        return _Writing(table, tokens, computed, self.random.choice(how), not self.turns.answer, len(tokens))

    def _feed(self, running: list[_Writing]) -> tuple[list[Tensor], list[Tensor]]:
        """Feed each sequence's pending tokens: logits of the last, [1, V] each, and the features of all."""
        segments = []
        for writing in running:
            self.runner.cache.reserve(writing.table, len(writing.tokens), writing.computed)
            pending = writing.tokens[writing.computed :]
            segment = Segment.of_tree(writing.table, writing.computed, pending, DraftTree.empty(), logits=True)
            segments.append(segment)
            writing.computed = len(writing.tokens)
        logits, features = self.runner.forward_with_features(segments)
        return logits, [rows.bfloat16() for rows in features]

    def _choose(self, running: list[_Writing], logits: Tensor) -> list[int]:
        """The next token of each sequence, at its own temperature. logits [rows, V]."""
        chosen: list[int] = argmax(logits).tolist()
        drawn = [i for i, writing in enumerate(running) if writing.temperature > 0]
        if drawn:
            heat = torch.tensor([running[i].temperature for i in drawn], device=logits.device)
            probs = (logits[drawn].float() / heat[:, None]).softmax(-1).cpu()
            ends = probs.cumsum(-1)  # drawn where this passes a coin: multinomial takes ten times as long
            coins = torch.rand(len(drawn), 1, generator=self.generator) * ends[:, -1:]
            tokens = torch.searchsorted(ends, coins, right=True)[:, 0].clamp(max=probs.shape[-1] - 1).tolist()
            for i, token in zip(drawn, tokens, strict=True):
                chosen[i] = token
        return chosen

    def _goes_on(self, writing: _Writing, token: int) -> bool:
        """Append a token; returns whether the sequence goes on."""
        writing.tokens.append(token)
        if writing.answering:
            return token not in self.turns.ends and len(writing.tokens) < self.longest
        written = len(writing.tokens) - len(self.turns.opening)
        ended = token == self.turns.answer[0]
        if ended or written >= LONGEST_INSTRUCTION:
            writing.tokens += self.turns.answer[ended:]
            writing.temperature = self.random.choice(ANSWER_TEMPERATURES)
            writing.answering = True
            return written > SHORTEST_INSTRUCTION and len(writing.tokens) < self.longest
        return len(writing.tokens) + len(self.turns.answer) < self.longest and token not in self.turns.ends

    def _sample(self, writing: _Writing) -> Sample | None:
        """The sequence as a sample, without tokens that were never fed; None where it was abandoned."""
        least = len(self.turns.opening) + SHORTEST_INSTRUCTION + len(self.turns.answer)
        if not writing.answering or writing.computed < least:
            return None
        rows = torch.cat([self._opening_features[:-1], *writing.features])
        learn = torch.ones(len(rows), dtype=torch.bool)
        learn[: writing.given] = False
        return Sample(
            tokens=torch.tensor(writing.tokens[: len(rows)], dtype=torch.int32),
            learn=learn,
            features=rows[:, : -self.width].contiguous(),
            final=rows[:, -self.width :].contiguous(),
        )
