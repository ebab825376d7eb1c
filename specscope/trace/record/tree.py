"""Draft trees: drafted tokens and how they hang together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.declared import ArrayEq, Parent, Probability, Token, Wire
from specscope.trace.record.privacy import TokenIds
from specscope.tree_shape import ROOT as ROOT
from specscope.tree_shape import depths

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
NodeProbs = Annotated[Floats, Wire(Probability, "n")]
NodeDoubles = Annotated[Doubles, Wire(Probability, "n")]
DrawDoubles = Annotated[Doubles, Wire(Probability, "n?")]


class Drawn(IntEnum):
    """How a node's token was chosen; it decides the rule of verification."""

    DETERMINISTIC = 0  # top-k, n-gram, re-ranked: q is a point mass at the token
    WITHOUT_REPLACEMENT = 1  # sampled; the next sibling's q has this token zeroed and is renormalised
    WITH_REPLACEMENT = 2  # sampled; every sibling has the same q


@dataclass(frozen=True, eq=False)
class DraftTree(ArrayEq):
    """Drafted tokens as arrays over nodes in draw order, parents before children. Filled by a drafter."""

    PREFIX: ClassVar = "specscope.tree."
    token: Annotated[TokenIds, Wire(Token, "n")]  # drafted token ids
    parent: Annotated[Ints, Wire(Parent, "n")]  # index of the parent node; ROOT (-1) for the first level
    q: NodeProbs  # the probability the drafter gave the token, as drawn; 1 for deterministic nodes
    drawn: Annotated[NDArray[np.uint8], Wire(Drawn, "n")]  # a Drawn value each

    def __len__(self) -> int:
        return len(self.token)

    @cached_property
    def depth(self) -> Ints:
        """[n] depth of each node, the root's children at 1."""
        return np.array(depths(self.parent.tolist()), np.int32)

    @cached_property
    def max_depth(self) -> int:
        return int(self.depth.max()) if len(self) else 0

    @cached_property
    def is_sampled(self) -> bool:
        return bool((self.drawn != Drawn.DETERMINISTIC).any())

    @cached_property
    def ancestors(self) -> Bools:
        """[n, n] True where the column's node is the row's node or one of its ancestors."""
        mask = np.eye(len(self), dtype=np.bool_)
        for node, above in enumerate(self.parent.tolist()):
            if above != ROOT:
                mask[node] |= mask[above]
        return mask

    def children(self, node: int) -> list[int]:
        return np.flatnonzero(self.parent == node).tolist()

    def path_to(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    @staticmethod
    def build(
        token: Sequence[int],
        parent: Sequence[int],
        q: Sequence[float] | None = None,
        drawn: Drawn = Drawn.DETERMINISTIC,
    ) -> DraftTree:
        """A tree from plain lists, every node drawn the same way; `q` defaults to 1 (deterministic)."""
        n = len(token)
        return DraftTree(
            token=np.array(array("i", token)),  # refuses fractions, and numbers of more than 32 bits
            parent=np.array(array("i", parent)),
            q=np.ones(n, dtype=np.float32) if q is None else np.asarray(q, dtype=np.float32),
            drawn=np.full(n, drawn, dtype=np.uint8),
        )

    @staticmethod
    def empty() -> DraftTree:
        return DraftTree.build([], [])
