"""One ragged batch: the rows of every request laid end to end, and which slots each row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.tree_batch import FixedShape, Packed, Part, TreeBatch, put
from specscope.model.groups import AttentionGroup, build_groups
from specscope.model.places import Backend
from specscope.model.segment import Segment

if TYPE_CHECKING:
    from specscope.kernels.cpu.flat_batch import FlatBatch

__all__ = ["FED", "WANTED", "Batch", "PackedBatch", "Segment"]
FED, WANTED = "fed_index", "wanted_index"  # further arrays of a PackedBatch: which rows of a graph's outputs count


def pick(rows: Tensor, index: Sequence[int]) -> Tensor:
    """Rows [n, ...] of these numbers. An index as a list would make the host wait for its copy to a GPU."""
    return rows.index_select(0, put(np.asarray(index, np.int64), rows.device))


@dataclass
class Batch:
    """A forward pass over N rows. Read by the model and by the attention function."""

    tokens: Tensor  # int64 [1, N]
    positions: Tensor  # int64 [1, N]
    slots: Tensor  # int64 [N] slot mapping: where each row's KV is written
    wanted: Tensor  # int64 [R] rows whose logits are needed
    tree: TreeBatch | None  # for the triton backend
    segments: Sequence[Segment] = ()  # for the torch backend: in the order of the rows
    order: Tensor | None = (
        None  # int64 [N] each row's place among the fed tokens as given; None where rows are in order
    )

    @cached_property
    def groups(self) -> list[AttentionGroup]:
        """How the torch backend's attention reads the contexts."""
        first = np.cumsum([0] + [len(s.tokens) for s in self.segments])
        return build_groups(self.segments, first, self.tokens.device)

    @cached_property
    def slabs(self) -> list[FlatBatch]:
        """The same for the CPU kernels."""
        from specscope.kernels.cpu.flat_batch import FlatBatch

        parts = [Part(s.table.blocks, s.context, s.positions, s.mask) for s in self.segments]
        return FlatBatch.slabs(parts, self.slots.numpy())

    @staticmethod
    def build(
        segments: Sequence[Segment],
        device: torch.device,
        backend: Backend = Backend.TORCH,
    ) -> Batch:
        """Lay segments end to end. Each table must already have room (KVCache.reserve).

        The torch backend lays them in the order in which they lie in the cache: attention then reads and writes a
        group's rows side by side, in every layer. `wanted` is in the order of the segments all the same.
        """
        if backend is Backend.TRITON:
            packed = PackedBatch.lay_out(segments, device)
            return packed.batch(packed.packed.put())
        given = np.cumsum([0] + [len(s.tokens) for s in segments])
        places = sorted(range(len(segments)), key=lambda i: segments[i].table.blocks[0])
        in_order = places == list(range(len(segments)))
        wanted = np.concatenate([given[i] + np.asarray(s.wanted, np.int64) for i, s in enumerate(segments)])
        order = None
        if not in_order:
            order = np.concatenate([np.arange(given[i], given[i + 1]) for i in places])
            wanted = np.argsort(order)[wanted]
            segments = [segments[i] for i in places]
        fed = [slice(len(s.positions) - len(s.tokens), None) for s in segments]
        fed_slots = [s.table.slots(s.length - len(s.tokens), s.length) for s in segments]
        positions = [s.positions[part] for s, part in zip(segments, fed, strict=True)]
        return Batch(
            tokens=put(np.array([[t for s in segments for t in s.tokens]], dtype=np.int64), device),
            positions=put(np.concatenate(positions)[None], device),
            slots=put(np.concatenate(fed_slots), device),
            wanted=put(wanted, device),
            tree=None,
            segments=segments,
            order=None if order is None else put(order, device),
        )

    def as_given(self, rows: Tensor) -> Tensor:
        """What a pass made of each row, [N, ...], in the order of the fed tokens as given."""
        return rows if self.order is None else torch.empty_like(rows).index_copy_(0, self.order, rows)

    def as_laid_out(self, tokens: Tensor) -> Tensor:
        """Values of each fed token, [N, ...], in the order of the rows."""
        return tokens if self.order is None else tokens[self.order]


@dataclass(frozen=True)
class PackedBatch:
    """A batch of the triton backend in one buffer on the host: one copy takes it to where its kernels read."""

    packed: Packed
    sizes: dict[str, int]  # of the TreeBatch

    @staticmethod
    def lay_out(
        segments: Sequence[Segment],
        device: torch.device,
        room: FixedShape | None = None,
        further: dict[str, NDArray[Any]] | None = None,
    ) -> PackedBatch:
        """`room`: what every sequence is given room for, whatever it needs; `further`: arrays that go with it."""
        fed = [slice(len(s.positions) - len(s.tokens), None) for s in segments]
        fed_slots = [s.table.slots(s.length - len(s.tokens), s.length) for s in segments]
        first = np.cumsum([0] + [len(s.tokens) for s in segments])
        wanted = [int(start) + row for s, start in zip(segments, first, strict=False) for row in s.wanted]
        parts = [Part(s.table.blocks, s.context, s.positions, s.mask) for s in segments]
        arrays = {
            "tokens": np.array([[t for s in segments for t in s.tokens]], dtype=np.int64),
            "positions": np.concatenate([s.positions[part] for s, part in zip(segments, fed, strict=True)])[None],
            "slots": np.concatenate(fed_slots),
            "wanted": np.array(wanted, dtype=np.int64),
        }
        tree = {f"tree {name}": array for name, array in TreeBatch.arrays(parts, room).items()}
        return PackedBatch(Packed({**arrays, **tree, **(further or {})}, device), TreeBatch.sizes(parts, room))

    def batch(self, views: dict[str, Tensor]) -> Batch:
        """The batch over these views of the device's copy."""
        tree = {name.removeprefix("tree "): view for name, view in views.items() if name.startswith("tree ")}
        tokens, positions, slots, wanted = (views[name] for name in ("tokens", "positions", "slots", "wanted"))
        return Batch(tokens, positions, slots, wanted, TreeBatch.of(tree, self.sizes))
