"""One sequence's part of a forward pass: the rows that it feeds, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specscope.model.kv_cache import BlockTable
from specscope.trace.record.tree import Bools, DraftTree


@dataclass
class Segment:
    """One sequence's part of a forward pass. Filled by the engine or a drafter.

    The sequence's first `context` slots are seen by every row. The window is what follows them: slots that
    rows see only where `mask` says so. The fed tokens are the window's last rows, and their KV is written there.
    """

    table: BlockTable
    tokens: list[int]  # [m] token ids to feed
    context: int
    positions: NDArray[np.int64]  # [w] rotary position of each slot of the window
    mask: Bools  # [m, w] True where a fed row sees a slot of the window
    wanted: Sequence[int]  # rows among the m whose logits are needed

    @property
    def length(self) -> int:
        """Slots in use when the pass has run."""
        return self.context + len(self.positions)

    @staticmethod
    def of_tree(table: BlockTable, context: int, tokens: list[int], tree: DraftTree, *, logits: bool) -> Segment:
        """Pending tokens (the last is the root) and the drafts below it: causal, then by ancestry.

        `logits`: whether the rows of root and nodes are wanted; False for a prefill chunk.
        """
        c, n = len(tokens), len(tree)
        mask = np.zeros((c + n, c + n), dtype=np.bool_)
        mask[:c, :c] = np.tri(c, dtype=np.bool_)
        mask[c:, :c] = True
        mask[c:, c:] = tree.ancestors
        chain = context + np.arange(c, dtype=np.int64)
        return Segment(
            table=table,
            tokens=tokens + tree.token.tolist(),
            context=context,
            positions=np.concatenate([chain, context + c - 1 + tree.depth]),
            mask=mask,
            wanted=range(c - 1, c + n) if logits else (),
        )
