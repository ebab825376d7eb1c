"""One ragged batch: the rows of every request laid end to end, and which slots each row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import FixedShape, Packed, Part, TreeBatch, put
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable
from specscope.model.places import Backend
from specscope.trace.record.tree import Bools, DraftTree

if TYPE_CHECKING:
    from specscope.kernels.cpu.flat_batch import FlatBatch

NO_TREE = DraftTree.empty()
TREE = "tree "  # begins the names of a TreeBatch's arrays beside a Batch's own


def pick(rows: Tensor, index: Sequence[int]) -> Tensor:
    """Rows [n, ...] of these numbers. An index as a list would make the host wait for its copy to a GPU."""
    return rows.index_select(0, put(np.asarray(index, np.int64), rows.device))


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
    def of_tree(
        table: BlockTable, context: int, tokens: list[int], tree: DraftTree = NO_TREE, *, logits: bool
    ) -> Segment:
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

    @property
    def part(self) -> Part:
        return Part(self.table.blocks, self.context, self.positions, self.mask)


@dataclass
class Reach:
    """What a sequence's M rows read of the cache in a layer: K slots. For the torch backend."""

    rows: slice  # of the batch
    slots: slice | Tensor  # int64 [K]; a slice where they lie side by side: keys and values are read in place then
    seen: Tensor  # bool [M, K]
    _bias: dict[tuple[torch.dtype, int], Tensor | None] = field(default_factory=dict)

    @staticmethod
    def of(segment: Segment, first: int, window: int | None, device: torch.device) -> Reach:
        """`first`: the segment's first row in the batch; `window`: how many positions a row looks back."""
        rows = len(segment.tokens)
        own = segment.positions[len(segment.positions) - rows :]
        start = 0 if window is None else min(max(int(own.min()) - window + 1, 0), segment.context)
        seen = np.concatenate([np.ones((rows, segment.context - start), np.bool_), segment.mask], axis=1)
        if window is not None:
            positions = np.concatenate([np.arange(start, segment.context), segment.positions])
            seen &= own[:, None] - positions < window
        slots: slice | Tensor
        blocks = np.asarray(segment.table.blocks[start // BLOCK_SIZE : -(-segment.length // BLOCK_SIZE)])
        if bool((np.diff(blocks) == 1).all()):
            begin = int(blocks[0]) * BLOCK_SIZE + start % BLOCK_SIZE
            slots = slice(begin, begin + segment.length - start)
        else:
            slots = put(segment.table.slots(start, segment.length), device)
        return Reach(slice(first, first + rows), slots, put(seen, device))

    def bias(self, dtype: torch.dtype, fold: int) -> Tensor | None:
        """Additive mask [1, 1, fold * M, K]: 0 where a row sees a slot, least where not; None where all is seen."""
        key = dtype, fold
        if key not in self._bias:
            bias = torch.zeros(self.seen.shape, dtype=dtype).masked_fill_(~self.seen, torch.finfo(dtype).min)
            self._bias[key] = None if self.seen.all() else bias.repeat(fold, 1)[None, None]
        return self._bias[key]


@dataclass
class Batch:
    """A forward pass over N rows. Read by the model and by the attention function."""

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    slots: Tensor  # int64 [N] slot mapping: where each row's KV is written
    wanted: Tensor  # int64 [R] rows whose logits are needed
    tree: TreeBatch | None = None  # for the triton backend
    segments: Sequence[Segment] = ()  # for the torch backend
    _reaches: dict[int | None, list[Reach]] = field(default_factory=dict)

    def reaches(self, window: int | None) -> list[Reach]:
        """What the rows of each sequence read in a layer that looks so far back."""
        if window not in self._reaches:
            first = np.cumsum([0] + [len(s.tokens) for s in self.segments]).tolist()
            own = zip(self.segments, first, strict=False)
            self._reaches[window] = [Reach.of(s, row, window, self.tokens.device) for s, row in own]
        return self._reaches[window]

    @cached_property
    def slabs(self) -> list[FlatBatch]:
        """The same for the CPU kernels."""
        from specscope.kernels.cpu.flat_batch import FlatBatch

        return FlatBatch.slabs([s.part for s in self.segments], self.slots.numpy())

    @staticmethod
    def build(segments: Sequence[Segment], device: torch.device, backend: Backend = Backend.TORCH) -> Batch:
        """Lay segments end to end. Each table must already have room (KVCache.reserve)."""
        if backend is Backend.TRITON:
            packed, sizes = Batch.pack(segments, device)
            return Batch.of(packed.put(), sizes)
        rows: dict[str, Any] = {name: put(array, device) for name, array in _rows(segments).items()}
        return Batch(**rows, segments=segments)

    @staticmethod
    def pack(
        segments: Sequence[Segment], device: torch.device, room: FixedShape | None = None, **further: NDArray[Any]
    ) -> tuple[Packed, dict[str, Any]]:
        """A batch of the triton backend in one buffer on the host, and its sizes: one copy takes it to the device.

        `room`: what every sequence is given room for, whatever it needs; `further`: arrays that go with it.
        """
        arrays, sizes = TreeBatch.lay_out([s.part for s in segments], room)
        tree = {f"{TREE}{name}": array for name, array in arrays.items()}
        return Packed({**_rows(segments), **tree, **further}, device), sizes

    @staticmethod
    def of(views: dict[str, Tensor], sizes: dict[str, Any]) -> Batch:
        """The batch over these views of the device's copy."""
        tree: dict[str, Any] = {name[len(TREE) :]: view for name, view in views.items() if name.startswith(TREE)}
        tokens, positions, slots, wanted = (views[name] for name in ("tokens", "positions", "slots", "wanted"))
        return Batch(tokens, positions, slots, wanted, TreeBatch(**tree, **sizes))


def _rows(segments: Sequence[Segment]) -> dict[str, NDArray[np.int64]]:
    """The arrays of a Batch."""
    first = np.cumsum([0] + [len(s.tokens) for s in segments])
    wanted = [row + np.asarray(s.wanted, np.int64) for s, row in zip(segments, first, strict=False)]
    return {
        "tokens": np.array([[t for s in segments for t in s.tokens]], dtype=np.int64),
        "positions": np.concatenate([s.positions[len(s.positions) - len(s.tokens) :] for s in segments])[None],
        "slots": np.concatenate([s.table.slots(s.length - len(s.tokens), s.length) for s in segments]),
        "wanted": np.concatenate(wanted),
    }
