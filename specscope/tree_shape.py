"""The shape of a draft tree, and the strings that people write for one that is the same in every step."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specscope.errors import UserError, short

ROOT = -1  # the parent of the first drafted level: the last committed token, which is no node of the tree
MAX_NODES = 256
LONGEST = 100_000  # characters of a tree string
FORMS = "5 (a chain), 3x5, [(0,), (1,), (0, 0)], top:3x5, sampled:3x5 or dynamic:24,depth=6,top=4"


def depths(parent: Sequence[int]) -> list[int]:
    """Depth of each node, the root's children at 1. Parents come before children."""
    depth: list[int] = []
    for above in parent:
        depth.append(1 if above == ROOT else depth[above] + 1)
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
        return tuple(depths(self.parent))

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
