"""The tensors of one call of V1's rejection sampler, as the hooks come by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specscope.trace.record.tree import Floats


@dataclass
class SamplerCall:
    """T drafted rows of B requests, and V tokens. Tensors are vLLM's own: looked at, never changed."""

    logits: Tensor  # [T + B, V] the target's, before any rule but the grammar's mask
    drafted: list[int]  # [B] rows of each request
    draft_tokens: Tensor  # [T]; below 0 where a draft was found invalid
    draft_probs: Tensor | None  # float32 [T, V] what drafts were sampled from; None where they are deterministic
    target_rows: Tensor  # [T] the row of `logits` that judges each draft
    bonus_rows: Tensor  # [B] and the one behind each request's last
    temperature: Tensor | None  # [B]; None where all are greedy
    top_p: Tensor | None  # [B]
    top_k: Tensor | None  # [B]
    cut: Callable[[Tensor, Tensor | None, Tensor | None], Tensor] | None  # vLLM's top-k and top-p
    bonus_logits: Tensor | None = None  # float32 [B, V] after penalties and masks, before temperature and cuts
    target_logits: Tensor | None = None  # float32 [T, V] after every rule
    target_probs: Tensor | None = None  # float32 [T, V] the same, normalised; None where all are greedy
    coins: Tensor | None = None  # [T]; None where all are greedy
    output: Tensor | None = None  # [B, longest + 1] accepted tokens and the final one, then -1

    def greedy(self, request: int) -> bool:
        """Whether the request has temperature 0."""
        return self.temperature is None or float(self.temperature[request]) == 0

    def target(self, draft: int) -> Floats:
        """[V] p at a drafted row, after every rule."""
        if self.target_probs is not None:
            return self.target_probs[draft].numpy()
        assert self.target_logits is not None
        return _softmax(self.target_logits[draft])

    def bonus(self, request: int) -> Floats:
        """[V] p behind the last draft of a sampled request."""
        return _softmax(self._behind(request, request + 1)[0])

    def bonuses(self, low: int, high: int) -> Tensor:
        """[., V] p behind the last drafts of requests from..to; of no meaning for greedy ones."""
        return self._behind(low, high).softmax(1)

    def _behind(self, low: int, high: int) -> Tensor:
        """[., V] logits behind the last drafts of requests from..to, as vLLM's own sampler shapes them."""
        assert self.bonus_logits is not None
        assert self.temperature is not None
        temperature = self.temperature[low:high, None]
        rows = self.bonus_logits[low:high] / torch.where(temperature == 0, 1, temperature)
        k = None if self.top_k is None else self.top_k[low:high]
        p = None if self.top_p is None else self.top_p[low:high]
        return rows if self.cut is None or (k is None and p is None) else self.cut(rows, k, p)


def _softmax(logits: Tensor) -> Floats:
    """[V] in numpy, of a row that may hold minus infinities."""
    row: Floats = logits.numpy().astype(np.float32)
    row -= row.max()
    np.exp(row, out=row)
    row /= row.sum()
    return row
