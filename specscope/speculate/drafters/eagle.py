"""EAGLE heads as drafters: the target's features and the committed tokens give the next ones.

The head's cache holds pairs: slot t is the feature of position t with the token at t + 1. In a tree below the root a
node's pair is the hidden state that the head made at its parent, a guess, with the node's token; after the verdict
the target's true features take their place, so that nothing guessed is kept.

P-EAGLE heads give the distributions of all depths in one pass (Hui et al. 2026, arXiv 2602.01469, section 3; as vLLM's
`parallel_drafting`): behind the root's pair come depth - 1 mask rows, each of the mask token and the learned feature
`mask_hidden`. All is causal: row d gives the distribution of the tokens d deep, whatever path leads there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment, pick
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.heads.mtp import MtpRunner
from specscope.model.kv_cache import OutOfBlocksError
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Context, Level
from specscope.speculate.drafters.model_drafter import PREFILL_CHUNK, Drafting, ModelDrafter, State
from specscope.trace.record.tree import Floats

LARGEST = float(np.finfo(np.float32).max)


class Features:
    """The target's features of one request up to position `end`. The head was fed those before `start`."""

    def __init__(self, *, keeps: bool = False) -> None:
        """`keeps`: whether what was taken is kept too, so that the head can be fed it again."""
        self.start = self._first = 0
        self.keeps = keeps
        self._rows = torch.zeros(0)  # from position `first` on

    @property
    def end(self) -> int:
        """The first position whose feature is not known."""
        return self._first + len(self._rows)

    def put(self, start: int, features: Tensor) -> None:
        """Features from `start` on, [m, F]; they take the place of older ones of those positions."""
        assert start <= self.end, "features are missing"
        self.back(min(self.start, start), start)
        self._rows = torch.cat([self._rows, features]) if len(self._rows) else features

    def take(self, count: int, again: int = 0) -> Tensor:
        """The next `count` of them, [count, F], which are then forgotten, or kept for `back`.

        `again`: of these the last so many stay, to be taken once more.
        """
        taken = self._rows[self.start - self._first :][:count]
        self.start += count - again
        if not self.keeps:
            self._rows = self._rows[self.start - self._first :].clone()  # a view would keep all of them
            self._first = self.start
        return taken

    def back(self, start: int, end: int) -> None:
        """As it was when the head had been fed those before `start`, and those from `end` on were not known."""
        self.start, self._rows = start, self._rows[: max(end - self._first, 0)]
        self._first = min(self._first, start) if len(self._rows) else start


def layer_norms(features: Tensor, layers: int) -> Floats:
    """[rows, layers] the L2 norm of each layer's hidden state in features [rows, layers * width].

    One small operation and one copy for a whole batch. What is not finite comes out as the largest float32.
    """
    parts = features.view(len(features), layers, -1)
    norms: Floats = torch.linalg.vector_norm(parts, dim=-1, dtype=torch.float32).cpu().numpy()
    return np.nan_to_num(norms, nan=LARGEST)


class HeadDrafter(ModelDrafter):
    """Drafts with a head over the target's features. Subclasses say how they run it."""

    behind = 1  # by how many positions a slot's token lies behind its feature

    def __init__(self, runner: Any, plan: TreePlan, max_context: int, *, notes_features: bool = True) -> None:  # noqa: ANN401
        """`runner`: a HeadRunner, or what is that to a head of another kind.

        `notes_features`: whether each draft says what fed the head: rows, and the norms of their features.
        """
        super().__init__(plan, runner.cache, max_context)
        self.runner, self.d2t, self.aux_layers = runner, runner.d2t, runner.aux_layers
        self.notes_features = notes_features
        self._features: dict[str, Features] = {}

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Keep features until the next `propose`; of a long prompt no more than a chunk, the others are fed here."""
        held = self._features.setdefault(request, Features(keeps=self.can_go_back))
        held.put(start, features)
        pairs = min(held.end, len(tokens) - 1)
        while pairs - held.start > PREFILL_CHUNK and self._feed(request, held, tokens):
            pass

    def _feed(self, request: str, held: Features, tokens: Sequence[int]) -> bool:
        """Feed a chunk of pairs; False where there is no room for it now: there may be when the request drafts."""
        state, end = self.states.setdefault(request, State()), held.start + PREFILL_CHUNK
        try:
            self.cache.reserve(state.table, end, held.start)
        except OutOfBlocksError:
            return False
        segment, features = self._next(held, state, tokens, end, logits=False)
        self.write([segment], features)
        return True

    def _next(
        self, held: Features, state: State, tokens: Sequence[int], end: int, *, logits: bool
    ) -> tuple[Segment, Tensor]:
        """The next pairs up to `end` with the target's features; they count as fed but for those that come again."""
        start, state.computed = state.computed, max(end - self.again, state.computed)
        segment = Segment.of_tree(state.table, start, list(tokens[start + 1 : end + 1]), logits=logits)
        return segment, held.take(end - start, end - state.computed)

    def known(self, context: Context, state: State) -> int:
        """A pair for every token but the first: its feature is of the token before it.

        The prompt's last token is not drafted from: how the prompt was cut into chunks would decide whether it can be.
        """
        if len(context.tokens) == context.prompt_len:
            return -1
        features = self._features.get(context.request)
        pairs = len(context.tokens) - 1
        return pairs if features is not None and features.end >= pairs > state.computed else -1

    def note(self, drafting: Sequence[Drafting], segments: Sequence[Segment], features: Tensor) -> None:
        if not self.notes_features:
            return
        norms, ends = layer_norms(features, len(self.aux_layers)), np.cumsum([len(s.tokens) for s in segments])
        for g, segment, own in zip(drafting, segments, np.split(norms, ends[:-1]), strict=True):
            g.first, g.norms = segment, own.copy()  # a record keeps them: not the tensor of all

    def pending(self, drafting: Sequence[Drafting], limit: int, *, logits: bool) -> tuple[list[Segment], Tensor]:
        pairs = []
        for g in drafting:
            held, end = self._features[g.context.request], min(g.base, g.state.computed + limit)
            pairs.append(self._next(held, g.state, g.context.tokens, end, logits=logits))
        return [segment for segment, _ in pairs], torch.cat([features for _, features in pairs])

    def level_of(self, logits: Tensor) -> Level:
        return Level(logits, self.runner.vocab_size, self.runner.d2t)

    def rewind(self, request: str, tokens: int) -> bool:
        """Feed the head again what it was fed then, from the features that are kept."""
        held = self._features.get(request)
        if held is None or not held.keeps or held.end < tokens - 1 or not super().rewind(request, tokens):
            return False
        state = self.states.get(request)
        held.back(0 if state is None else state.computed, tokens - 1)
        return True

    def release(self, request: str) -> None:
        super().release(request)
        self._features.pop(request, None)


class Eagle(HeadDrafter):
    """Drafts with an EAGLE or EAGLE-3 head."""

    name = "eagle"
    runner: HeadRunner | MtpRunner
    _hidden: Tensor  # [R, width] of the last pass

    def write(self, segments: list[Segment], features: Tensor) -> None:
        self.runner.forward(segments, self.runner.combine(features))

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        return self._level(segments, self.runner.combine(features))

    def feed_frontier(self, drafting: Sequence[Drafting]) -> Level:
        """Each node's token with the hidden state made at its parent."""
        hidden = pick(self._hidden, [g.rows[row] for g in drafting for row in g.builder.origin])
        return self._level([g.builder.segment(g.state.table, g.base) for g in drafting], hidden)

    def _level(self, segments: list[Segment], hidden: Tensor) -> Level:
        logits, self._hidden = self.runner.forward(segments, hidden)
        return self.level_of(logits)


class ParallelEagle(Eagle):
    """Drafts with a P-EAGLE head. Its name in records is an EAGLE head's; their notes say that it was one pass."""

    runner: HeadRunner
    ahead: int

    def __init__(self, runner: HeadRunner, plan: TreePlan, max_context: int, **notes: bool) -> None:
        super().__init__(runner, plan, max_context, **notes)
        self.ahead = plan.max_depth - 1
        self.rows_fed = (plan.max_depth, 2 * plan.max_depth)  # what was committed, with a row for each further depth
        self.mask_token = runner.head.config.mask_token or 0
        with torch.inference_mode():
            self._mask_hidden = runner.combine(runner.head.mask_hidden.view(1, -1))  # [1, width]

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        """The pass over the committed pairs, with the mask rows of each request behind its own."""
        true = self.runner.combine(features).split([len(segment.tokens) for segment in segments])
        masks = self._mask_hidden.expand(self.ahead, -1)
        both = [x for rows in true for x in (rows, masks)]
        masked = [with_masks(segment, self.ahead, self.mask_token) for segment in segments]
        return self._level(masked, torch.cat(both))


def with_masks(segment: Segment, count: int, mask_token: int) -> Segment:
    """Pending pairs with `count` mask rows behind them; the rows of the root's pair and of the masks are wanted."""
    last, tokens = len(segment.tokens) - 1, segment.tokens + [mask_token] * count
    causal = Segment.of_tree(segment.table, segment.context, tokens, logits=False)
    return replace(causal, wanted=range(last, len(tokens)))
