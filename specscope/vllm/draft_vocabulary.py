"""DraftVocabulary: vLLM spreads a reduced vocabulary over the target's, with minus infinity for unknown tokens."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specscope.trace.parents import Indices, RawRow
from specscope.vllm.call import raw_row


class DraftVocabulary:
    """Which tokens a drafter knows, found in its first logits. A head of 8,192 tokens is read five times as fast so."""

    def __init__(self) -> None:
        self._known: Indices | None = None

    def read(self, logits: Tensor) -> tuple[RawRow, Indices | None]:
        """(A row [V] over the tokens that the drafter knows, these tokens; None where it knows all)."""
        row = logits.numpy() if logits.dtype.is_floating_point and logits.element_size() == 4 else None
        if row is None:  # no float32: read as it is
            return raw_row(logits), None
        if self._known is None or len(self._known) != np.count_nonzero(np.isfinite(row)):
            self._known = np.flatnonzero(np.isfinite(row))
        if len(self._known) == len(row):
            return raw_row(logits), None
        return RawRow(row[self._known]), self._known
