"""The training target at each position, and a head's scores against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

DECAY = 0.8  # ratio of a depth's weight to that of the depth above, as in the EAGLE-3 authors' code


@dataclass(frozen=True)
class Padded:
    """Samples of one training step, padded on the right: B sequences of T tokens."""

    tokens: Tensor  # int64 [B, T]
    real: Tensor  # bool [B, T]
    learn: Tensor  # bool [B, T] False for tokens that were given to the target
    features: Tensor  # [B, T, aux_layers * target width]
    final: Tensor  # [B, T, target width]


@dataclass(frozen=True)
class BatchScores:
    """The scores of a batch by depth: loss, and sums over the positions that count."""

    loss: Tensor
    positions: list[int]
    first: list[int]  # the head's first choice is the target's
    among: list[int]  # the target's choice is among the head's first four
    by_step: list[float]  # mean loss


class TargetTensors:
    """The tensors that training needs of a target besides the data: embedding and the rows of its head."""

    def __init__(self, embedding: Tensor, rows: Tensor) -> None:
        self.embedding = embedding  # [V, width]
        self.rows = rows  # [draft vocabulary, width] of the target's head

    @torch.no_grad()
    def wanted(self, final: Tensor) -> Tensor:
        """The target's distribution after each token, float32 [..., draft vocabulary]; never in lower precision."""
        with torch.autocast(final.device.type, enabled=False):
            return (final @ self.rows.T).float().softmax(-1)


class DepthScores:
    """Collects depths: cross-entropy with the target's distribution, averaged over positions, weighted over depths."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._counts: list[tuple[int, int, int]] = []

    def add(self, logits: Tensor, p: Tensor) -> None:
        """One depth's positions that count: logits and the target's distribution, [N, draft vocabulary] each."""
        logits = logits.float()
        self._losses.append(-(p * logits.log_softmax(-1)).sum() / max(len(logits), 1))
        with torch.no_grad():
            top = logits.topk(4, dim=-1).indices == p.argmax(-1)[:, None]
        self._counts.append((len(logits), int(top[:, 0].sum()), int(top.sum())))

    def total(self) -> BatchScores:
        """All depths together; the loss is differentiable."""
        weights = [DECAY**depth for depth in range(len(self._losses))]
        loss = torch.stack([w * x for w, x in zip(weights, self._losses, strict=True)]).sum() / sum(weights)
        positions, first, among = (list(column) for column in zip(*self._counts, strict=True))
        return BatchScores(loss, positions, first, among, [float(x.detach()) for x in self._losses])


def ahead(x: Tensor, by: int) -> Tensor:
    """x [B, T, ...] shifted left by `by` positions; zeros at the end."""
    return functional.pad(x[:, by:], (0, 0) * (x.dim() - 2) + (0, min(by, x.shape[1])))


def mean_shares(all_scores: Sequence[BatchScores]) -> dict[str, list[float]]:
    """`first` and `among` of some batches together, as shares of the positions of each depth."""
    total = [sum(column) for column in zip(*(scores.positions for scores in all_scores), strict=True)]
    shares = {}
    for name in ("first", "among"):
        sums = [sum(column) for column in zip(*(getattr(scores, name) for scores in all_scores), strict=True)]
        shares[name] = [round(n / max(d, 1), 4) for n, d in zip(sums, total, strict=True)]
    return shares
