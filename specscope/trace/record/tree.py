"""Draft trees: their shape, their drafted tokens, and the strings that people write for them."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.record.declared import MAX_NODES as MAX_NODES
from specscope.trace.record.declared import ROOT as ROOT
from specscope.trace.record.declared import Parent, Probability, Token, Wire
from specscope.trace.record.equal import same_values
from specscope.trace.record.privacy import TokenIds

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]

LONGEST = 100_000  # characters of a tree string
FORMS = "5 (a chain), 3x5, [(0,), (1,), (0, 0)], top:3x5, sampled:3x5 or dynamic:24,depth=6,top=4"


class Drawn(IntEnum):
    """How a node's token was chosen; it decides the rule of verification."""

    DETERMINISTIC = 0  # top-k, n-gram, re-ranked: q is a point mass at the token
    WITHOUT_REPLACEMENT = 1  # sampled; the next sibling's q has this token zeroed and is renormalised
    WITH_REPLACEMENT = 2  # sampled; every sibling has the same q


def depths(parent: Ints) -> Ints:
    """Depth of each node, the root's children at 1. `parent` int32 [n], parents before children."""
    depth = np.empty(len(parent), dtype=np.int32)
    for node, above in enumerate(parent.tolist()):
        depth[node] = 1 if above == ROOT else depth[above] + 1
    return depth


@dataclass(frozen=True)
class TreeShape:
    """A static tree without tokens: `parent` holds each node's parent, in draw order (breadth first)."""

    parent: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Depth of each node, the root's children at 1."""
        return tuple(depths(np.asarray(self.parent, np.int32)).tolist())

    @cached_property
    def max_depth(self) -> int:
        """The number of levels."""
        return max(self.depth, default=0)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Node indices by depth; `levels[0]` are the root's children."""
        return tuple(tuple(i for i, d in enumerate(self.depth) if d == level + 1) for level in range(self.max_depth))

    def children(self, node: int) -> list[int]:
        """The children of a node (or of ROOT), in draw order."""
        return [i for i, above in enumerate(self.parent) if above == node]

    @cached_property
    def is_chain(self) -> bool:
        """True where every node has one child."""
        return self.parent == tuple(range(-1, len(self.parent) - 1))

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """The child ranks from the root to each node."""
        ranks: list[tuple[int, ...]] = []
        for node, above in enumerate(self.parent):
            ranks.append((*(ranks[above] if above != ROOT else ()), self.parent[:node].count(above)))
        return ranks

    def __str__(self) -> str:
        if self.is_chain:
            return str(len(self))
        width = len(self.children(ROOT))
        fan = len(self) % width == 0 and self == TreeShape.fan(width, len(self) // width)
        return f"{width}x{len(self) // width}" if fan else str(self.paths)

    @staticmethod
    def fan(width: int, depth: int) -> TreeShape:
        """`width` chains of `depth` tokens from the root, in breadth-first order."""
        return TreeShape(tuple(ROOT if i < width else i - width for i in range(width * depth)))


def parse_tree(text: str) -> TreeShape:
    """Read a tree string: `5` (a chain), `3x4` (3 chains of 4), or paths: `[(0,), (1,), (0, 0)]`, `[[0], [1], [0, 0]]`.

    A path is child ranks from the root; vLLM writes tuples, EAGLE and Medusa lists. Raises UserError that says what is
    wrong.
    """
    text = text.strip()
    if match := re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]{1,6})", text):
        width, depth = int(match[1] or 1), int(match[2])
        _check_size(width * depth, text)
        return TreeShape.fan(width, depth)
    paths = sorted(_paths(text), key=lambda path: (len(path), path))
    _check_size(len(paths), text)
    index: dict[tuple[int, ...], int] = {(): ROOT}
    for node, path in enumerate(paths):
        if path in index:
            raise UserError(f"tree {short(text)}: {short(path)} appears twice")
        if path[:-1] not in index:
            raise UserError(f"tree {short(text)}: {short(path)} has no parent {short(path[:-1])}")
        if path[-1] > 0 and (earlier := (*path[:-1], path[-1] - 1)) not in index:
            raise UserError(f"tree {short(text)}: {short(path)} has no earlier sibling {short(earlier)}")
        index[path] = node
    return TreeShape(tuple(index[path[:-1]] for path in paths))


def _check_size(nodes: int, text: str) -> None:
    if nodes > MAX_NODES:
        raise UserError(f"tree {short(text)} has {nodes} nodes; the limit is {MAX_NODES}")
    if nodes == 0:
        raise UserError(f"tree {short(text)} has no nodes; use --drafter none to run without drafts")


def _paths(text: str) -> list[tuple[int, ...]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own remarks on the text are not for this user
            value = ast.literal_eval(text) if len(text) <= LONGEST else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        value = None
    if not isinstance(value, list | tuple) or not all(isinstance(path, tuple | list) for path in value):
        raise UserError(f"cannot read the tree {short(text)}: write {FORMS}")
    for path in value:
        if not path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise UserError(f"tree {short(text)}: {short(path)} is not a path of child ranks (0 and up)")
    return [tuple(path) for path in value]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Drafted tokens as arrays over nodes in draw order, parents before children. Filled by a drafter.

    The root (the last committed token) is not a node. A chain is a tree with one child a node.
    """

    token: Annotated[TokenIds, Wire("specscope.tree.token", Token, "n")]  # drafted token ids
    # index of the parent node; ROOT (-1) for the first level
    parent: Annotated[Ints, Wire("specscope.tree.parent", Parent, "n")]
    # the probability the drafter gave the token, as drawn; 1 for deterministic nodes
    q: Annotated[Floats, Wire("specscope.tree.q", Probability, "n")]
    drawn: Annotated[NDArray[np.uint8], Wire("specscope.tree.drawn", Drawn, "n")]  # a Drawn value each

    def __len__(self) -> int:
        return len(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and all(
            same_values(getattr(self, name), getattr(other, name)) for name in ("token", "parent", "q", "drawn")
        )

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def depth(self) -> Ints:
        """[n] depth of each node, the root's children at 1."""
        return depths(self.parent)

    @cached_property
    def max_depth(self) -> int:
        """The number of levels, 0 for the empty tree."""
        return int(self.depth.max()) if len(self) else 0

    @cached_property
    def is_sampled(self) -> bool:
        """Whether nodes were drawn from q."""
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
        """The children of a node (or of ROOT), in draw order."""
        return np.flatnonzero(self.parent == node).tolist()

    def path_to(self, node: int) -> list[int]:
        """Node indices from the first level down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def walk(self) -> Iterator[tuple[int, int]]:
        """(node, depth) depth first, siblings in draw order: the order in which a tree is drawn."""
        stack = [(node, 1) for node in reversed(self.children(ROOT))]
        while stack:
            node, depth = stack.pop()
            yield node, depth
            stack.extend((child, depth + 1) for child in reversed(self.children(node)))

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
            token=np.asarray(token, dtype=np.int32),
            parent=np.asarray(parent, dtype=np.int32),
            q=np.ones(n, dtype=np.float32) if q is None else np.asarray(q, dtype=np.float32),
            drawn=np.full(n, drawn, dtype=np.uint8),
        )

    @staticmethod
    def empty() -> DraftTree:
        """The tree of a step in which nothing was drafted."""
        return DraftTree.build([], [])
