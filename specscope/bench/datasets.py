"""The prompts of a load bench: the rows of a file (engine/prompt_rows.py), or those built in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

from specscope.engine.prompt_rows import Messages, Row, read_rows
from specscope.errors import UserError
from specscope.measure.prompts import unseen_prompts
from specscope.trace.record.records import TEMPLATE

# How requests arrive: at a rate, however long answers take, or a fixed number at once.


@dataclass(frozen=True)
class Load:
    """A rate of requests, or a number of requests at once."""

    rate: float | None = None  # requests a second, on average
    concurrency: int | None = None  # requests at once: the next one is sent when one is answered

    @property
    def name(self) -> str:
        """The load in words."""
        return f"rate {self.rate:g}/s" if self.rate is not None else f"concurrency {self.concurrency}"

    @property
    def size(self) -> float:
        """The number that a sweep varies."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Seconds from the start at which requests are sent, so that `count` of them take count / rate seconds.

    The gaps have a gamma distribution with the shape `burstiness`: 1 is a Poisson process, less is burstier, more is
    more even. They are scaled so that the last request comes at count / rate, as in vLLM's bench: the rate is then the
    same for every seed.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    seconds = np.cumsum(gaps)
    scaled: list[float] = (seconds * (count / rate / seconds[-1])).tolist()
    return scaled


@dataclass(frozen=True)
class LoadRequest:
    """One request, to be sent to any server."""

    prompt: str | Messages
    tokens: int | None = None  # output tokens at most, where the dataset says so
    params: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters of its own

    def chat(self) -> Messages:
        """The prompt as the messages of a chat."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    def text(self) -> str:
        """The prompt as plain text. Raises UserError where it is a chat of several turns."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) > 1:
            raise UserError("--completions needs prompts of one turn, and the dataset has chats: use --chat")
        return self.prompt[0]["content"]


@dataclass(frozen=True)
class Dataset:
    """The requests of a file, or the built-in ones."""

    layout: str  # in words
    asks: Sequence[LoadRequest]
    left_out: int = 0  # conversations that are too short or too long

    def take(self, count: int, seed: int) -> list[LoadRequest]:
        """`count` requests in an order that the seed decides; none is used twice before all were used."""
        order = list(self.asks)
        random.Random(seed).shuffle(order)
        return list(islice(cycle(order), count))


def built_in() -> Dataset:
    """Prompts of five kinds that the default head was not trained on."""
    return Dataset("built in", [LoadRequest(prompt) for prompt in unseen_prompts()])


def read_dataset(path: str) -> Dataset:
    """The requests of a file. Raises UserError, with the number of the line."""
    content = read_rows(path, "the dataset")
    return Dataset(content.layout, [_request(row) for row in content.rows], content.left_out)


def _request(row: Row) -> LoadRequest:
    given = dict(row.given)
    tokens = given.pop("max_tokens", row.tokens)
    return LoadRequest(row.prompt, tokens, given | ({TEMPLATE: row.template} if row.template else {}))
