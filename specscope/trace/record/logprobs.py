"""Log-probabilities of output tokens, where a request asks for them: the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from specscope.trace.record.declared import LogProbability, Token, Wire
from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.privacy import TokenIds
from specscope.trace.record.tree import Floats


@dataclass(frozen=True)
class OutputLogprob:
    """Of one output token, for both of OpenAI's layouts."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs, falling; the token may not be among them


@dataclass(frozen=True, eq=False)
class Logprobs(ArrayEq):
    """Of the tokens that a step emitted, each in the distribution behind the tokens before it.

    vLLM's raw_logprobs: the log-softmax of the logits, before bias, penalties, form, temperature and what follows.
    """

    logprob: Annotated[Floats, Wire("", LogProbability, "e")]  # of the token
    top: Annotated[TokenIds, Wire("", Token, "e,w")]  # the likeliest tokens
    top_logprob: Annotated[Floats, Wire("", LogProbability, "e,w")]  # theirs, falling

    def each(self, tokens: Sequence[int]) -> list[OutputLogprob]:
        """An OutputLogprob for each of the step's emitted tokens."""
        rows = zip(self.top.tolist(), self.top_logprob.tolist(), strict=True)
        both = zip(tokens, self.logprob.tolist(), rows, strict=True)
        return [OutputLogprob(token, logprob, tuple(zip(*row, strict=True))) for token, logprob, row in both]
