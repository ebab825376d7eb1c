"""Drafter: what the engine asks of anything that guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specscope.model.runner import AuxLayer
from specscope.speculate.allowed import Allowed
from specscope.speculate.sampling import LogitRows
from specscope.trace.record.notes import MethodNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import DraftNotes, Phase, Verdict
from specscope.trace.record.tree import DraftTree


@dataclass(frozen=True)
class Context:
    """What a drafter may know of a request. `tokens[-1]` is the root, whose KV nobody has computed yet."""

    request: str
    tokens: Sequence[int]  # prompt and output; grows between calls, earlier tokens never change
    prompt_len: int
    params: SamplingParams
    allowed: Allowed | None = None  # what may follow, where not every token may

    @property
    def position(self) -> int:
        """The root's position in the request: its coins follow from it."""
        return len(self.tokens) - 1

    def rows(self, logits: Tensor, paths: Callable[[], Sequence[Sequence[int]]]) -> LogitRows:
        """Logits [n, V] behind drafted paths, with what shapes them. `paths` is called only where they count."""
        if self.allowed is None and not self.params.penalised:
            return LogitRows(logits, self.params)
        drafted = paths()
        allowed = None if self.allowed is None else self.allowed.rows(self.tokens[self.prompt_len :], drafted)
        return LogitRows(logits, self.params, self.tokens, self.prompt_len, drafted, allowed)


@dataclass
class Level:
    """The logits of a drafting pass, of every request's nodes; what all need is computed once."""

    logits: Tensor  # [R, draft vocabulary]
    vocab_size: int  # the target's
    d2t: Tensor | None = None  # int64 [draft vocabulary] the target's token behind each; None where they are the same
    _top: dict[int, tuple[list[list[int]], list[list[float]]]] = field(default_factory=dict)

    def top(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest `count` tokens of every row, as the target knows them, and their log probabilities."""
        if count not in self._top:
            values, best = self.logits.float().log_softmax(-1).topk(min(count, self.logits.shape[-1]))
            tokens = best if self.d2t is None else self.d2t[best]
            both = torch.stack([tokens.double(), values.double()]).cpu()  # the pass's one read
            self._top[count] = both[0].long().tolist(), both[1].tolist()
        return self._top[count]

    def full(self, rows: Sequence[int] = (0,)) -> Tensor:
        """Float32 [n, V] of rows, in a row or one for all; minus infinity where the drafter does not know a token."""
        own = self.logits[rows[0] : rows[-1] + 1].float()
        if self.d2t is not None:
            own = own.new_full((len(own), self.vocab_size), -torch.inf).index_copy_(1, self.d2t, own)
        return own.expand(len(rows), -1)


@dataclass(frozen=True)
class Draft:
    """A drafted tree and, where tokens were sampled, the distributions that they were sampled from."""

    tree: DraftTree
    q: Mapping[int, Tensor] = field(default_factory=dict)  # [V], by parent node, ROOT for the first level
    notes: DraftNotes | None = None  # what a drafter that is a model thought of it
    method: MethodNotes | None = None  # what a method that looks into texts tells of it
    # Of a drafter that is a model: its one row of logits where it had drafted these tokens, none for the root; None
    # where it did not look.
    row: Callable[[Sequence[int]], Level | None] = lambda path: None
    pruned: int = 0  # nodes of a text that the request's form does not allow

    @staticmethod
    def chain(tokens: Sequence[int]) -> Draft:
        """These tokens, one behind another; deterministic."""
        return Draft(DraftTree.build(tokens, range(-1, len(tokens) - 1)))


NO_DRAFT = Draft(DraftTree.empty())


class Drafter:
    """Guesses the next tokens of requests; this one never does. A new drafter says what it does otherwise."""

    name = "none"
    max_nodes = 0  # the largest tree it may propose: so many rows and KV slots are kept for it
    max_depth = 0
    aux_layers: tuple[AuxLayer, ...] = ()  # the target's features that it wants to observe
    passes: tuple[Phase, ...] = ()  # the model passes of the last `propose`
    runner: Any = None  # of its model, where it has one: its weights (`loaded`), `graphs`, and `run_batch`, one pass
    rows_fed: tuple[int, ...] = ()  # of one request in a pass of its model: the usual numbers, for graphs
    d2t: Tensor | None = None  # int64 [draft vocabulary] the target's token behind each that it drafts; None: all are

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A draft for each request; NO_DRAFT where it has nothing to say."""
        return [NO_DRAFT] * len(contexts)

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """Learn what became of a draft, of an empty one too. `context`: as it was proposed for, before tokens grew."""

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        """The target's features at committed positions `start` on, [m, their widths]. Called with aux layers only.

        `tokens`: what is committed, the whole prompt at least; tokens[start] has the first of the features.
        """

    def rewind(self, request: str, tokens: int) -> bool:
        """Only the first `tokens` tokens are committed any more, all but the root computed. Called between steps.

        False where it needs all features of the target anew.
        """
        return True

    def release(self, request: str) -> None:
        """Forget a request: it ended, or it lost its place and will come back from its tokens alone."""
