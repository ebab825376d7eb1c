"""Whole runs: prompts to their ends, batched, at once or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.engine.result import Chunk, Result
from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestStep, StepRecord
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary


@dataclass(frozen=True)
class Encoded:
    """A prompt that Engine.encode has been over: a server does that beside the engine's thread."""

    text: str
    tokens: list[int]
    title: str = ""


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]  # text, token ids, or chat messages


class GenerateMixin(ABC):
    """What an engine can do with nothing but its requests and its steps."""

    vocabulary: Vocabulary

    @abstractmethod
    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> str:
        """Queue a request and return its id."""

    @abstractmethod
    def cancel(self, name: str) -> None:
        """End a request."""

    @abstractmethod
    def step(self) -> StepRecord:
        """Run one step over all requests."""

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Run prompts to their ends, batched; one Result each, in their order.

        `params`: one for all, or one for each. Requests that were added before run along.
        """
        names = self._add_all(prompts, params)
        records: dict[str, list[RequestStep]] = {name: [] for name in names}
        ended: dict[str, Result] = {}
        while len(ended) < len(names):
            record = self.step()
            for part in record.requests:
                if part.request in records:
                    records[part.request].append(part)
            for end in record.finished:
                if end.info.id in records:
                    ended[end.info.id] = Result.of(end, records[end.info.id], self.vocabulary)
        return [ended[name] for name in names]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Chunk]:
        """Run prompts and yield output as it is committed, requests interleaved. Closing the iterator cancels them."""
        names = self._add_all(prompts, params)
        left = {name: Detokenizer(self.vocabulary) for name in names}
        try:
            while left:
                record = self.step()
                ends = {end.info.id: end.reason for end in record.finished}
                for part in record.requests:
                    if part.request in left and (part.emitted or part.request in ends):
                        yield Chunk.of(part, left[part.request], ends.get(part.request))
                for name in ends:
                    left.pop(name, None)
        finally:
            for name in left:
                self.cancel(name)

    def _add_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[str]:
        many: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise UserError(f"{len(many)} prompts, but {len(each)} sampling parameters")
        names: list[str] = []
        try:
            for prompt, wanted in zip(many, each, strict=True):
                names.append(self.add(prompt, wanted))
        except UserError:
            for name in names:
                self.cancel(name)
            raise
        return names


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: text, token ids, or one conversation."""
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping))


def check_length(prompt: Prompt, tokens: int, longest: int) -> None:
    """Refuse what cannot fit into so many tokens of at most `longest` bytes. Raises UserError.

    Asked before a tokenizer works on it: megabytes of text take it minutes and gigabytes.
    """
    if len(prompt) > tokens and not isinstance(prompt, str):
        raise UserError(f"the prompt has {len(prompt)} parts; the limit is {tokens - 1} tokens")
    texts = [prompt] if isinstance(prompt, str) else [str(m.get("content")) for m in prompt if isinstance(m, Mapping)]
    size = sum(map(len, texts))  # in characters, each of which is a byte at least
    if size > tokens * longest:
        raise UserError(f"the prompt has {size} characters, too many for the limit of {tokens - 1} tokens")


def title_of(prompt: Prompt | Encoded) -> str:
    """The last message of a conversation."""
    if isinstance(prompt, Encoded):
        return prompt.title
    last = prompt[-1] if prompt and not isinstance(prompt, str) else ""
    return str(last.get("content", "")) if isinstance(last, Mapping) else ""
