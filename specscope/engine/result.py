"""What a request comes to: whole, or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.logprobs import OutputLogprob
from specscope.trace.record.records import FinishReason, Origin, RequestEnd, RequestStep
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary


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
            logprobs=_joined(steps, asked=end.info.params.logprobs is not None),
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


def _joined(steps: list[RequestStep], *, asked: bool) -> list[OutputLogprob] | None:
    told = [one for step in steps if step.logprobs is not None for one in step.logprobs.each(step.output())]
    return told if asked else None
