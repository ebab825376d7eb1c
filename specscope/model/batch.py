"""One ragged batch: the rows of every request laid end to end, and which slots each row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.place import Packed, put
from specscope.kernels.tree_batch import Part, Room, TreeBatch
from specscope.model.backend import Backend
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.trace.tree import Bools, DraftTree

GATHER = 5  # what it takes to gather a slot, in rows that attend to it
FED, WANTED = "fed_index", "wanted_index"  # further arrays of a PackedBatch: which rows of a graph's outputs count
CALL = 1024  # what a call of its own takes, in slots times rows: less padding than that is cheaper


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
    """Segments whose attention is computed together, padded to the longest: B segments, M rows, K slots.

    K is a whole number of blocks, but for a `span`.
    """

    rows: Tensor | slice  # int64 [B * M] the batch's row behind each padded row; a slice where one follows the other
    real: Tensor | None  # int64: which padded rows are real, in the batch's order; None where all are
    into: Tensor | slice  # the batch's row of each real row
    size: int  # B
    blocks: Tensor  # int64 [B * K / 16] the KV blocks of each segment, padded with block 0
    span: tuple[int, int] | None  # (first slot, end) where B is 1 and the blocks are contiguous: no gather needed
    seen: Tensor  # bool [B, M, K]
    members: list[Segment]
    _bias: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)
    _scratch: dict[LayerShape, tuple[Tensor, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def bias(self, window: int | None, fold: int) -> Tensor | None:
        """Additive float32 mask [B, 1, fold * M, K]: 0 where a row sees a slot, least where not; None if all is seen.

        `fold` query heads share a key, one after another.
        """
        key = (window, fold)
        if key not in self._bias:
            seen = self.seen if window is None else self.seen & self._within(window)
            empty = torch.zeros((), device=seen.device)
            bias = torch.where(seen, empty, torch.finfo(torch.float32).min)
            self._bias[key] = None if bool(seen.all()) else bias.repeat(1, fold, 1)[:, None]
        return self._bias[key]

    def _within(self, window: int) -> Tensor:
        """Bool [B, M, K]: which slots lie less than `window` positions before a row. Padding lies nowhere, and is."""
        size, rows, keys = self.seen.shape
        first, position = np.full((size, rows), -window, dtype=np.int64), np.zeros((size, keys), dtype=np.int64)
        for b, s in enumerate(self.members):
            first[b, : len(s.tokens)] = s.positions[-len(s.tokens) :] - window
            position[b, : s.length] = np.concatenate([np.arange(s.context), s.positions])
        return torch.from_numpy(position[:, None] > first[:, :, None]).to(self.seen.device)

    def context(self, cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every segment, [B, heads, K, size] each; whole blocks are gathered at a time.

        Layers of one shape share a scratch tensor: what is returned is gone at the next call.
        """
        if self.span is not None:
            start, end = self.span
            key, value = cache.views[layer]
            return key.narrow(2, start, end - start), value.narrow(2, start, end - start)
        shape, rows = cache.layers[layer], cache.rows[layer]
        if shape not in self._scratch:
            out = rows.new_empty(len(self.blocks), BLOCK_SIZE * shape.width)
            self._scratch[shape] = (out, shape.split(out.view(self.size, -1, shape.width)))
        out, views = self._scratch[shape]
        torch.index_select(rows.view(-1, BLOCK_SIZE * shape.width), 0, self.blocks, out=out)
        return views


@dataclass
class Batch:
    """A forward pass over N rows. Read by the model and by the attention function."""

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    slots: Tensor  # int64 [N] slot mapping: where each row's KV is written
    wanted: Tensor  # int64 [R] rows whose logits are needed
    groups: list[Group]  # for the torch backend
    tree: TreeBatch | None  # for the triton backend

    @staticmethod
    def build(
        segments: Sequence[Segment],
        device: torch.device,
        backend: Backend = Backend.TORCH,
    ) -> Batch:
        """Lay segments end to end. Each table must already have room (KVCache.reserve)."""
        if backend is Backend.TRITON:
            packed = PackedBatch.lay_out(segments, device)
            return packed.batch(packed.packed.put())
        first = np.cumsum([0] + [len(s.tokens) for s in segments])
        fed = [slice(len(s.positions) - len(s.tokens), None) for s in segments]
        own = [s.table.slots(s.length - len(s.tokens), s.length) for s in segments]
        wanted = [int(start) + row for s, start in zip(segments, first, strict=False) for row in s.wanted]
        positions = [s.positions[part] for s, part in zip(segments, fed, strict=True)]
        return Batch(
            tokens=put(np.array([[t for s in segments for t in s.tokens]], dtype=np.int64), device),
            positions=put(np.concatenate(positions)[None], device),
            slots=put(np.concatenate(own), device),
            wanted=put(np.array(wanted, dtype=np.int64), device),
            groups=_groups(segments, first, device),
            tree=None,
        )


def _groups(segments: Sequence[Segment], first: NDArray[np.int64], device: torch.device) -> list[Group]:
    """Segments together with those that are about as long, so that padding is never more than the segments are."""
    groups: list[list[int]] = []
    sizes: list[tuple[int, int]] = []  # rows and slots of each
    for i in sorted(range(len(segments)), key=lambda i: -segments[i].length):
        rows, slots = len(segments[i].tokens), segments[i].length
        for g, (m, k) in enumerate(sizes):
            wider = max(m, rows)
            more = (len(groups[g]) + 1) * _work(wider, k) - len(groups[g]) * _work(m, k) - _work(rows, slots)
            if more <= CALL:
                groups[g].append(i)
                sizes[g] = (wider, k)
                break
        else:
            groups.append([i])
            sizes.append((rows, slots))
    return [_group(sorted(members), segments, first, device) for members in groups]


def _work(rows: int, slots: int) -> int:
    """What a segment's attention takes."""
    return (rows + GATHER) * slots


def _group(members: list[int], segments: Sequence[Segment], first: NDArray[np.int64], device: torch.device) -> Group:
    """Pad the segments `members` into one group."""
    chosen = [segments[i] for i in members]
    rows = max(len(s.tokens) for s in chosen)
    longest = max(s.length for s in chosen)
    per_segment = -(-longest // BLOCK_SIZE)
    size = len(members)
    contiguous = size == 1 and bool((np.diff(chosen[0].table.blocks[:per_segment]) == 1).all())
    keys = longest if contiguous else per_segment * BLOCK_SIZE
    row_of = np.zeros((size, rows), dtype=np.int64)
    is_real = np.zeros((size, rows), dtype=np.bool_)
    block_of = np.zeros((size, per_segment), dtype=np.int64)
    seen = np.zeros((size, rows, keys), dtype=np.bool_)
    seen[:, :, 0] = True  # a padded row sees one slot, so that its softmax is finite; its result is not read
    for b, (i, s) in enumerate(zip(members, chosen, strict=True)):
        m, end = len(s.tokens), s.length
        row_of[b, :m] = first[i] + np.arange(m)
        is_real[b, :m] = True
        used = s.table.blocks[:per_segment]
        block_of[b, : len(used)] = used
        seen[b, :m, : s.context] = True
        seen[b, :m, s.context : end] = s.mask
    real = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real.ravel())).to(device)
    start = int(block_of[0, 0]) * BLOCK_SIZE
    return Group(
        rows=_rows(row_of.ravel(), device),
        real=real,
        into=_rows(row_of[is_real], device),
        size=size,
        blocks=torch.from_numpy(block_of.ravel()).to(device),
        span=(start, start + keys) if contiguous else None,
        seen=torch.from_numpy(seen).to(device),
        members=chosen,
    )


def _rows(rows: NDArray[np.int64], device: torch.device) -> Tensor | slice:
    """Rows of the batch; a slice where one follows the other."""
    if bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


@dataclass(frozen=True)
class PackedBatch:
    """A batch of the triton backend in one buffer on the host: one copy takes it to where its kernels read."""

    packed: Packed
    sizes: dict[str, int]  # of the TreeBatch

    @staticmethod
    def lay_out(
        segments: Sequence[Segment],
        device: torch.device,
        room: Room | None = None,
        further: dict[str, NDArray[Any]] | None = None,
    ) -> PackedBatch:
        """`room`: what every sequence is given room for, whatever it needs; `further`: arrays that go with it."""
        fed = [slice(len(s.positions) - len(s.tokens), None) for s in segments]
        own = [s.table.slots(s.length - len(s.tokens), s.length) for s in segments]
        first = np.cumsum([0] + [len(s.tokens) for s in segments])
        wanted = [int(start) + row for s, start in zip(segments, first, strict=False) for row in s.wanted]
        parts = [Part(s.table.blocks, s.context, s.positions, s.mask) for s in segments]
        arrays = {
            "tokens": np.array([[t for s in segments for t in s.tokens]], dtype=np.int64),
            "positions": np.concatenate([s.positions[at] for s, at in zip(segments, fed, strict=True)])[None],
            "slots": np.concatenate(own),
            "wanted": np.array(wanted, dtype=np.int64),
        }
        tree = {f"tree {name}": array for name, array in TreeBatch.arrays(parts, room).items()}
        return PackedBatch(Packed({**arrays, **tree, **(further or {})}, device), TreeBatch.sizes(parts, room))

    def batch(self, views: dict[str, Tensor]) -> Batch:
        """The batch whose numbers lie there."""
        tree = {name.removeprefix("tree "): view for name, view in views.items() if name.startswith("tree ")}
        rows = {name: views[name] for name in ("tokens", "positions", "slots", "wanted")}
        return Batch(**rows, groups=[], tree=TreeBatch.of(tree, self.sizes))
