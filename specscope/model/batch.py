"""One ragged batch: the rows of every request laid end to end, and who may see whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.model.kv_cache import BlockTable
from specscope.trace.tree import Bools, DraftTree

PADDED_ROWS = 64  # segments up to this many rows are padded into one attention group; longer ones stand alone


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


@dataclass
class Group:
    """Segments whose attention is computed together, padded to the longest. B segments, M rows, K slots."""

    rows: Tensor | None  # int64 [B * M] the batch's row behind each padded row; None where they are all rows in order
    real: Tensor | None  # int64: which padded rows are real, in the batch's order; None where all are
    size: int  # B
    slots: Tensor  # int64 [B * K]
    span: tuple[int, int] | None  # (first slot, end) where B is 1 and the slots are contiguous: no gather needed
    seen: Tensor  # bool [B, M, K]
    distance: Tensor  # int64 [B, M, K] query position minus key position, for sliding windows
    _bias: dict[tuple[int | None, torch.dtype], Tensor | None] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [1, B, 1, M, K]: 0 where a row sees a slot, -inf elsewhere; None where all is seen."""
        key = (window, dtype)
        if key not in self._bias:
            seen = self.seen if window is None else self.seen & (self.distance < window)
            empty = torch.zeros((), dtype=dtype, device=seen.device)
            bias = torch.where(seen, empty, torch.finfo(dtype).min)
            self._bias[key] = None if bool(seen.all()) else bias[None, :, None]
        return self._bias[key]


@dataclass
class Batch:
    """A forward pass over N rows. Read by the model and by the attention function."""

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    slots: Tensor  # int64 [N] slot mapping: where each row's KV is written
    wanted: Tensor  # int64 [R] rows whose logits are needed
    wanted_per_segment: list[int]  # how many of the R belong to each segment
    groups: list[Group]

    @staticmethod
    def build(segments: Sequence[Segment], device: torch.device) -> Batch:
        """Lay segments end to end. Each table must already have room (KVCache.reserve)."""
        first = np.cumsum([0] + [len(s.tokens) for s in segments])
        fed = [slice(len(s.positions) - len(s.tokens), None) for s in segments]
        slots = [s.table.slots(0, s.length) for s in segments]
        own = [all_slots[s.context :][part] for s, all_slots, part in zip(segments, slots, fed, strict=True)]
        wanted = [int(start) + row for s, start in zip(segments, first, strict=False) for row in s.wanted]
        positions = [s.positions[part] for s, part in zip(segments, fed, strict=True)]
        short = [i for i, s in enumerate(segments) if len(s.tokens) <= PADDED_ROWS]
        long = [[i] for i, s in enumerate(segments) if len(s.tokens) > PADDED_ROWS]
        groups = [_group(part, segments, slots, first, device) for part in ([short] if short else []) + long]
        return Batch(
            tokens=torch.tensor([[t for s in segments for t in s.tokens]], dtype=torch.int64, device=device),
            positions=torch.from_numpy(np.concatenate(positions)[None]).to(device),
            slots=torch.from_numpy(np.concatenate(own)).to(device),
            wanted=torch.tensor(wanted, dtype=torch.int64, device=device),
            wanted_per_segment=[len(s.wanted) for s in segments],
            groups=groups,
        )


def _group(
    members: list[int],
    segments: Sequence[Segment],
    slots: Sequence[NDArray[np.int64]],
    first: NDArray[np.int64],
    device: torch.device,
) -> Group:
    """Pad the segments `members` into one group."""
    rows = max(len(segments[i].tokens) for i in members)
    keys = max(segments[i].length for i in members)
    size = len(members)
    row_of = np.zeros((size, rows), dtype=np.int64)
    is_real = np.zeros((size, rows), dtype=np.bool_)
    slot_of = np.zeros((size, keys), dtype=np.int64)
    seen = np.zeros((size, rows, keys), dtype=np.bool_)
    seen[:, :, 0] = True  # a padded row sees one slot, so that its softmax is finite; its result is not read
    distance = np.zeros((size, rows, keys), dtype=np.int64)
    for b, i in enumerate(members):
        s = segments[i]
        m, end = len(s.tokens), s.length
        row_of[b, :m] = first[i] + np.arange(m)
        is_real[b, :m] = True
        slot_of[b, :end] = slots[i]
        seen[b, :m, : s.context] = True
        seen[b, :m, s.context : end] = s.mask
        key_positions = np.concatenate([np.arange(s.context), s.positions])
        distance[b, :m, :end] = s.positions[-m:, None] - key_positions
    everything = size == len(segments) and bool(is_real.all())
    real = np.flatnonzero(is_real.ravel())
    contiguous = size == 1 and bool((np.diff(slot_of[0]) == 1).all())
    return Group(
        rows=None if everything else torch.from_numpy(row_of.ravel()).to(device),
        real=None if len(real) == is_real.size else torch.from_numpy(real).to(device),
        size=size,
        slots=torch.from_numpy(slot_of.ravel()).to(device),
        span=(int(slot_of[0, 0]), int(slot_of[0, -1]) + 1) if contiguous else None,
        seen=torch.from_numpy(seen).to(device),
        distance=torch.from_numpy(distance).to(device),
    )
