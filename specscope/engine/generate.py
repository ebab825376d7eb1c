"""Whole runs: prompts to their ends, batched, at once or as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specscope.engine.prompt_encoder import Prompt
from specscope.errors import UserError
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.notes import OutputLogprob
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, Origin, RequestEnd, RequestStep
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary

if TYPE_CHECKING:
    from specscope.engine.engine import Engine

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None  # one for all, or one for each


@dataclass
class Result:
    """What a request came to. Filled by Engine.generate."""

    id: str
    prompt: str
    text: str  # the output, cut at a stop string
    token_ids: list[int]
    origins: list[Origin]  # where each output token came from
    finish: FinishReason
    counts: list[int]  # [drafts, accepted at depth 1, accepted at depth 2, ...]
    acceptance: Acceptance
    steps: list[RequestStep]  # the request's records, whole
    logprobs: list[OutputLogprob] | None = None  # of each output token; None where they were not asked for
    error: str = ""

    @staticmethod
    def of(end: RequestEnd, steps: list[RequestStep], vocabulary: Vocabulary) -> Result:
        """The result of a request that ended, from its records."""
        tokens = end.output.tolist()
        acceptance = measure(steps)
        logprobs = [each for step in steps if step.logprobs is not None for each in step.logprobs.each(step.output())]
        return Result(
            id=end.info.id,
            prompt=end.info.prompt,
            text=end.text(tokens if end.stop_token is None else tokens[:-1], vocabulary),
            token_ids=tokens,
            origins=[origin for step in steps if step.verdict for origin in step.verdict.origins()[: step.emitted]],
            finish=end.reason,
            counts=acceptance.counts,
            acceptance=acceptance,
            steps=steps,
            logprobs=None if end.info.params.logprobs is None else logprobs,
            error=end.error,
        )


@dataclass
class Chunk:
    """A piece of streamed output. Filled by Engine.stream."""

    request: str
    text: str  # the characters that these tokens complete
    token_ids: list[int]
    origins: list[Origin]
    finish: FinishReason | None  # set on the last one
    logprobs: list[OutputLogprob] | None = None  # of each of these tokens; None where they were not asked for

    @staticmethod
    def of(step: RequestStep, detokenizer: Detokenizer, finish: FinishReason | None) -> Chunk:
        """What one step adds to a request's output."""
        tokens = step.output()
        text = detokenizer.feed(tokens) + (detokenizer.flush() if finish else "")
        origins = step.verdict.origins()[: step.emitted] if step.verdict else []
        logprobs = None if step.logprobs is None else step.logprobs.each(tokens)
        return Chunk(step.request, text, tokens, origins, finish, logprobs)


def generate(engine: Engine, prompts: Prompts, params: Params) -> list[Result]:
    """Run prompts to their ends, batched; one Result each, in their order.

    `params`: one for all, or one for each. Requests that were added before run along.
    """
    names = _add_all(engine, prompts, params)
    records: dict[str, list[RequestStep]] = {name: [] for name in names}
    ended: dict[str, Result] = {}
    while len(ended) < len(names):
        record = engine.step()
        for part in record.requests:
            if part.request in records:
                records[part.request].append(part)
        for end in record.finished:
            if end.info.id in records:
                ended[end.info.id] = Result.of(end, records[end.info.id], engine.vocabulary)
    return [ended[name] for name in names]


def stream(engine: Engine, prompts: Prompts, params: Params) -> Iterator[Chunk]:
    """Run prompts and yield output as it is committed, requests interleaved. Closing the iterator cancels them."""
    names = _add_all(engine, prompts, params)
    left = {name: Detokenizer(engine.vocabulary) for name in names}
    try:
        while left:
            record = engine.step()
            ends = {end.info.id: end.reason for end in record.finished}
            for part in record.requests:
                if part.request in left and (part.emitted or part.request in ends):
                    yield Chunk.of(part, left[part.request], ends.get(part.request))
            for name in ends:
                left.pop(name, None)
    finally:
        for name in left:
            engine.cancel(name)


def _add_all(engine: Engine, prompts: Prompts, params: Params) -> list[str]:
    many: Sequence[Any] = [prompts] if _is_one(prompts) else prompts
    each = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(each) != len(many):
        raise UserError(f"{len(many)} prompts, but {len(each)} sampling parameters")
    names: list[str] = []
    try:
        for prompt, wanted in zip(many, each, strict=True):
            names.append(engine.add(prompt, wanted))
    except UserError:
        for name in names:
            engine.cancel(name)
        raise
    return names


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: text, token ids, or one conversation."""
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping))
