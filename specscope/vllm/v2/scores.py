"""DraftLogits: what V2's drafter took its greedy drafts from, until the next step judges them.

vLLM itself keeps the logits of sampled drafts, because its rule needs them. Ours lie in a tensor of the same shape, and
are written where a CUDA graph records the drafter's work: no line of Python runs when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specscope.trace.inside.hooking import ErrorGuard, HookedCall, log, wrap

MOST = 2**27  # bytes that they may take; with more, they are left out


class DraftLogits:
    """`wanted` is asked once, when the drafter first runs. Methods with a sampler of their own (dspark) have none."""

    def __init__(self, guard: ErrorGuard, wanted: Callable[[], bool]) -> None:
        self._guard, self._wanted = guard, wanted
        self.tensor: Tensor | None = None  # [slots + 1, K, V]; the last one's are padding's, which has slot -1
        self._asked = False
        self._places: tuple[Tensor, Tensor] | None = None  # slot and depth of each row of logits that come next

    def sample_draft(self, call: HookedCall) -> Any:
        """Around the drafter's choice."""
        self._guard.safely(self._expect, call.given)
        try:
            return call()
        finally:
            self._places = None

    def _expect(self, given: dict[str, Any]) -> None:
        speculator = given["self"]
        if given["draft_logits"] is not None:
            return
        self._places = given["idx_mapping"].long(), given["draft_step"].long()

        def compute_draft_logits(call: HookedCall) -> Any:
            logits = call()
            self._guard.safely(self._keep, speculator, logits)
            return logits

        wrap(speculator, "compute_draft_logits", compute_draft_logits)  # of a subclass too

    def _keep(self, speculator: Any, logits: Tensor) -> None:
        if not self._asked:
            self._asked = True
            if self._wanted():
                self._make(speculator, logits)
        if self.tensor is not None and self._places is not None:
            slots, steps = self._places
            self.tensor.index_put_((slots, steps.expand_as(slots)), logits)

    def _make(self, speculator: Any, logits: Tensor) -> None:
        shape = speculator.max_num_reqs + 1, speculator.num_speculative_steps, logits.shape[1]
        size = shape[0] * shape[1] * shape[2] * logits.element_size()
        if size > MOST and logits.device.type != "cpu":
            log.warning("specscope: the drafter's scores are left out: they would take %d MiB", size >> 20)
            return
        # Not zeros: where this is first reached in a graph's capture, each replay would write them over the scores.
        self.tensor = torch.empty(shape, dtype=logits.dtype, device=logits.device)
