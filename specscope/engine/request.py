"""Request: one sequence on its way through the engine; and its turn in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.model.kv_cache import BlockTable
from specscope.speculate.allowed import Allowed
from specscope.speculate.drafters.base import NO_DRAFT, Context, Draft
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinishReason, Preceded, RequestEnd, RequestInfo, RequestStep, Verdict
from specscope.trace.record.vocabulary import Vocabulary

Slots = NDArray[np.int64]


@dataclass(eq=False)  # one is itself alone: it is looked for in lists in every step
class Request:
    """Live state of a request. The engine and its scheduler are the only writers."""

    id: str
    prompt: str  # the text that was tokenised, "" for a prompt of token ids
    prompt_tokens: list[int]
    params: SamplingParams
    labels: Mapping[str, str]
    arrival_ns: int
    title: str = ""  # for lists: the last chat message, where the prompt came as chat
    traceparent: str = ""  # the caller's span, as W3C trace context has it
    served: bool = False  # whether it came over HTTP
    tokens: list[int] = field(init=False)  # prompt and output; the last is the root
    computed: int = 0  # tokens whose KV is in the target's cache
    table: BlockTable = field(default_factory=BlockTable)
    steps: int = 0  # the request's own step counter
    admitted_ns: int = 0  # 0 until it first joined the batch
    finish: FinishReason | None = None
    stop: str = ""  # the stop string that matched
    error: str = ""
    preceded: Preceded = Preceded.PREFILL  # what came before its next decode step
    kv_life: int = 0  # rises whenever its KV is given up
    allowed: Allowed | None = None  # what its output may go on with, where not every token may
    refused: str = ""  # why it cannot run at all, where that was found after it came

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)

    @property
    def pending(self) -> int:
        """Tokens to feed before the next token can be drawn; 1 in plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        """Output tokens so far."""
        return self.tokens[len(self.prompt_tokens) :]

    @property
    def context(self) -> Context:
        """What drafters may know. The tokens are the live list: they read it before the step ends."""
        return Context(self.id, self.tokens, len(self.prompt_tokens), self.params, self.allowed)

    @property
    def info(self) -> RequestInfo:
        """The record of its arrival."""
        return RequestInfo(
            id=self.id,
            arrival_ns=self.arrival_ns,
            admitted_ns=self.admitted_ns,
            prompt=self.prompt,
            prompt_tokens=np.asarray(self.prompt_tokens, dtype=np.int32),
            params=self.params,
            labels=dict(self.labels),
            title=self.title,
            traceparent=self.traceparent,
            chat=bool(self.title),
            served=self.served,
        )

    def end(self, now_ns: int) -> RequestEnd:
        """The record of its end."""
        assert self.finish is not None
        output = np.asarray(self.output, dtype=np.int32)
        return RequestEnd(self.info, now_ns, self.finish, self.stop, output, self.error)

    def accept(self, tokens: Sequence[int], eos: Sequence[int], max_context: int, vocabulary: Vocabulary) -> int:
        """Append committed tokens until something ends the request; how many became output."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            made = len(self.tokens) - len(self.prompt_tokens)
            if token in eos and self.params.heeds_eos:
                self.finish = FinishReason.EOS
            elif token in self.params.stop_token_ids:
                self.finish = FinishReason.STOP
            elif made > self.params.min_tokens and (stop := self._stop_in_tail(vocabulary)):
                self.finish, self.stop = FinishReason.STOP, stop
            elif made >= self.params.max_tokens or len(self.tokens) >= max_context:
                self.finish = FinishReason.LENGTH
            elif self.allowed is not None and (why := self.allowed.stuck(self.output)):
                self.finish, self.error = FinishReason.ERROR, why
            if self.finish is not None:
                return count
        return len(tokens)

    def _stop_in_tail(self, vocabulary: Vocabulary) -> str:
        """The stop string that the newest token completed, or "". One that was complete before it is none."""
        if not self.params.stop:
            return ""
        ends, tail = {text: text.encode() for text in self.params.stop}, b""
        longest = max(map(len, ends.values()))
        newest = 0 if self.tokens[-1] in vocabulary.special else len(vocabulary.pieces.get(self.tokens[-1], b""))
        for index in range(len(self.tokens) - 1, len(self.prompt_tokens) - 1, -1):
            if self.tokens[index] not in vocabulary.special:
                tail = vocabulary.pieces.get(self.tokens[index], b"") + tail
            if len(tail) >= longest + newest:
                break
        return next((text for text, end in ends.items() if newest and end in tail[1 - newest - len(end) :]), "")


@dataclass
class Turn:
    """One request's turn in a step. The scheduler makes it, and each phase fills its part."""

    request: Request
    context: Context  # before the step: its tokens grow in commit
    feed: int  # pending tokens to feed
    decodes: bool  # whether the feed reaches the root, so that a token is drawn
    nodes: int = 0  # room for a draft; 0 where it does not draft
    draft: Draft = NO_DRAFT
    logits: Tensor | None = None  # [n + 1, V] of root and nodes; [0, V] where it only prefills
    features: Tensor | None = None  # [feed + n, F] where the drafter wants them
    verdict: Verdict | None = None
    moves: tuple[Slots, Slots] | None = None  # of the accepted path's KV, from and to, where it does not lie there
    step: RequestStep | None = None  # what became of it

    @property
    def cost(self) -> int:
        """Rows of the step that it may take."""
        return self.feed + self.nodes
