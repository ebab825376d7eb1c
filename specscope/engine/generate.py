"""What whole runs give: a result for each prompt, or its output piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specscope.engine.prompt_encoder import Prompt
from specscope.errors import UserError
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.notes import OutputLogprob
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, Origin, RequestEnd, RequestStep
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary

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


def paired(prompts: Prompts, params: Params) -> list[tuple[Any, SamplingParams | None]]:
    """Each prompt with its parameters. Raises UserError where they are not as many."""
    is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int | Mapping))
    many: Sequence[Any] = [prompts] if is_one else prompts
    each = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(each) != len(many):
        raise UserError(f"{len(many)} prompts, but {len(each)} sampling parameters")
    return list(zip(many, each, strict=True))
