"""The logits of a drafting pass, and the likeliest tokens of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.model.backend import Backend
from specscope.speculate.likeliest import likeliest


@dataclass
class Level:
    """The logits of a drafting pass, of every request's nodes; what all need is computed once."""

    logits: Tensor  # [R, draft vocabulary]
    vocab_size: int  # the target's
    d2t: Tensor | None = None  # int64 [draft vocabulary] the target's token behind each; None where they are the same
    backend: Backend = Backend.TORCH
    compiles: bool = False  # whether our own kernel for processors looks for them
    _top: dict[int, tuple[list[list[int]], list[list[float]]]] = field(default_factory=dict)

    def top(self, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest `count` tokens of every row, as the target knows them, and their log probabilities."""
        if count not in self._top and self.compiles and self.backend is Backend.TORCH:
            from specscope.kernels.cpu.rows import likeliest as compiled  # numba is imported only where it runs

            columns, logs = compiled(self.logits.float(), count)
            self._top[count] = (columns if self.d2t is None else self.d2t.numpy()[columns]).tolist(), logs.tolist()
        elif count not in self._top:
            values, best = likeliest(self.logits.float().log_softmax(-1), min(count, self.logits.shape[-1]))
            tokens = best if self.d2t is None else self.d2t[best]
            both = torch.stack([tokens.double(), values.double()]).cpu()  # the pass's one read
            self._top[count] = both[0].long().tolist(), both[1].tolist()
        return self._top[count]

    def full(self, rows: slice) -> Tensor:
        """Rows as logits over the target's vocabulary, float32; least where the drafter does not know a token."""
        logits = self.logits[rows].float()
        if self.d2t is None:
            return logits
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.d2t, logits)
