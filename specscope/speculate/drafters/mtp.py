"""A target's own next-token modules (MTP) as its drafter.

The first module is iterated, as vLLM does (v1/spec_decode/llm_base_proposer.py): it drafts chains and trees as an EAGLE
head does, fed with the target's state at the root and with its own below.

Where a chain is no longer than there are modules, each drafts a token, as transformers' MTPCandidateGenerator does:
module k goes over the slots that module 0 was fed, with the tokens k places on, of which the last k are those drafted
before it. What it writes at the last slots thus hangs on guesses, so the last of them (one less than there are modules)
are always fed again, from the target's true states and the committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.heads.mtp import MtpRunner
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Draft, Level
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.trace.record.notes import MethodNotes


class Mtp(Eagle):
    """Drafts with a target's own modules."""

    name = "mtp"
    runner: MtpRunner

    def __init__(self, runner: MtpRunner, plan: TreePlan, max_context: int, **notes: bool) -> None:
        super().__init__(runner, plan, max_context, **notes)
        self.iterates = runner.modules == 1 or not plan.is_chain or plan.max_depth > runner.modules
        self.again = 0 if self.iterates else runner.modules - 1
        self._fed: dict[str, tuple[Segment, Tensor]] = {}  # of each request's last pass its rows, and their states

    def write(self, segments: list[Segment], features: Tensor) -> None:
        """Every module's KV; what those behind the first need of tokens that nobody knows yet comes again."""
        for module in range(1 if self.iterates else self.runner.modules):
            _, features = self.runner.forward(segments, features, module)
            segments = [_rolled(segment, segment.tokens[-1]) for segment in segments]

    def root_level(self, drafting: Sequence[Drafting], segments: list[Segment], features: Tensor) -> Level:
        if self.iterates:
            return super().root_level(drafting, segments, features)
        return self._pass(0, drafting, segments, features.split([len(segment.tokens) for segment in segments]))

    def feed_frontier(self, drafting: Sequence[Drafting]) -> Level:
        """The next module, over the rows of the one before it and the token that this one drafted."""
        if self.iterates:
            return super().feed_frontier(drafting)
        before = [self._fed[g.context.request] for g in drafting]
        drafted = [g.builder.token[g.builder.frontier[0]] for g in drafting]
        segments = [_rolled(segment, token) for (segment, _), token in zip(before, drafted, strict=True)]
        return self._pass(drafting[0].builder.depth[-1], drafting, segments, [states for _, states in before])

    def _pass(
        self, module: int, drafting: Sequence[Drafting], segments: list[Segment], states: Sequence[Tensor]
    ) -> Level:
        logits, out = self.runner.forward(segments, torch.cat(list(states)), module)
        parts = out.split([len(segment.tokens) for segment in segments])
        names = [g.context.request for g in drafting]
        self._fed = dict(zip(names, zip(segments, parts, strict=True), strict=True))
        return self.level_of(logits)

    def _finish(self, g: Drafting) -> Draft:
        draft = super()._finish(g)
        depth = draft.tree.depth.astype(np.int32)
        module = 0 * depth if self.iterates else depth - 1
        return replace(draft, method=MethodNotes(module=module)) if len(depth) else draft


def _rolled(segment: Segment, token: int) -> Segment:
    """The same slots with the tokens one place on; the last gets `token`."""
    return replace(segment, tokens=[*segment.tokens[1:], token])
