"""A batch of the triton backend in one buffer: laid out on the host, and in one copy where its kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.kernels.place import Packed
from specscope.kernels.tree_batch import Part, Room, TreeBatch
from specscope.model.batch import Batch, Segment

FED, WANTED = "fed_index", "wanted_index"


@dataclass(frozen=True)
class PackedBatch:
    """Segments end to end, on the host. Their tables must already have room (KVCache.reserve)."""

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
