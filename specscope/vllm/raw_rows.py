"""RawRows: what target and drafter gave before any rule, read on the host for all requests of a batch at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specscope.trace.record.parents import Indices, RawRow
from specscope.trace.record.tree import Floats
from specscope.vllm.call import SamplerCall
from specscope.vllm.draft_vocabulary import DraftVocabulary


class RawRows:
    """Of one call of the sampler. Nothing here wakes torch's threads: they are slow to meet when cores are busy."""

    def __init__(self, call: SamplerCall, vocabulary: DraftVocabulary) -> None:
        self._logits, self._rows, self._vocabulary = call.logits, call.target_rows.tolist(), vocabulary
        self._row = torch.empty(call.logits.shape[1])
        self._passes: dict[int, tuple[Floats, Floats, Indices | None]] = {}  # by the tensor's id, which the call holds

    def target(self, draft: int) -> RawRow:
        """At the row that judges a draft; good until the next is asked for, which is put in its place."""
        torch.softmax(self._logits[self._rows[draft]].float(), 0, out=self._row)
        row = self._row.numpy()
        return RawRow(row, float(row.sum()))  # torch's own sum over a vocabulary is off by some 1e-5

    def drafter(self, logits: Tensor, row: int) -> tuple[RawRow, Indices | None]:
        """(A row of a drafter's pass [., V] over the tokens that the drafter knows, these; None where it knows all)."""
        if id(logits) not in self._passes:
            self._passes[id(logits)] = self._read(logits)
        weights, masses, known = self._passes[id(logits)]
        return RawRow(weights[row], float(masses[row])), known

    def _read(self, logits: Tensor) -> tuple[Floats, Floats, Indices | None]:
        """All rows of a pass at once."""
        weights, known = self._vocabulary.reduced(logits.float().numpy())
        weights = weights - weights.max(1, keepdims=True)
        np.exp(weights, out=weights)
        return weights, weights.sum(1), known


def of_draft(own: RawRow, known: Indices | None, token: Indices) -> float:
    """The drafter's probability of a token [1]; 0 of one that it does not know."""
    if known is None:
        return float(own.p(token)[0])
    place = np.searchsorted(known, token)
    return float(own.p(place)[0]) if place[0] < len(known) and known[place[0]] == token[0] else 0.0
