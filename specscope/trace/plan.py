"""How to draft: what people write for --tree, and what it costs. No torch.

5, 3x4, [(0,), (1,), (0, 0)]      a static tree: sampled where the request is sampled, top tokens where it is greedy
sampled:3x4                       the same, spelled out
top:3x4                           a static tree of top tokens always: deterministic, and verified as such
dynamic:24,depth=6,top=4          EAGLE-2: the best 24 nodes of a search 6 deep and 4 wide; deterministic

and what other programs have (foreign_plan.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specscope.errors import UserError
from specscope.trace.checked import short
from specscope.trace.foreign_plan import translated
from specscope.trace.record.tree import MAX_NODES, TreeShape, parse_tree

MAX_DEPTH = 32
MAX_TOP = 32
DEFAULT_DEPTH = 5
DEFAULT_TOP = 4


@dataclass(frozen=True)
class StaticPlan:
    """Every step's tree has this shape."""

    shape: TreeShape
    top: bool = False  # True: top tokens at any temperature; False: sampled where the request is sampled

    @property
    def max_nodes(self) -> int:
        """Nodes of the tree that is verified."""
        return len(self.shape)

    @property
    def max_depth(self) -> int:
        """Levels of the tree, and passes of a drafter that is a model."""
        return self.shape.max_depth

    @property
    def max_fed(self) -> int:
        """Nodes that a drafter that is a model runs: those that have children."""
        return len({above for above in self.shape.parent if above >= 0})

    @property
    def is_chain(self) -> bool:
        """Whether no node has siblings."""
        return self.shape.is_chain

    def __str__(self) -> str:
        return f"top:{self.shape}" if self.top else str(self.shape)


@dataclass(frozen=True)
class DynamicPlan:
    """The tree follows the drafter's confidence (EAGLE-2, Li et al. 2024, section 4).

    At each depth the `top` nodes of highest cumulative probability are expanded by their `top` likeliest tokens; of
    all that were looked at, the `nodes` best are kept. Deterministic: q is a point mass.
    """

    nodes: int
    depth: int = DEFAULT_DEPTH
    top: int = DEFAULT_TOP

    @property
    def max_nodes(self) -> int:
        """Nodes of the tree that is verified."""
        return min(self.nodes, self.candidates)

    @property
    def max_depth(self) -> int:
        """Levels of the tree, and passes of the drafter."""
        return self.depth

    @property
    def max_fed(self) -> int:
        """Nodes that the drafter runs."""
        return self.top * (self.depth - 1)

    @property
    def is_chain(self) -> bool:
        """Whether no node has siblings."""
        return self.top == 1

    @property
    def candidates(self) -> int:
        """Nodes that re-ranking chooses from."""
        return self.top + (self.depth - 1) * self.top**2

    def __str__(self) -> str:
        return f"dynamic:{self.nodes},depth={self.depth},top={self.top}"


TreePlan = StaticPlan | DynamicPlan


def read_plan(text: str) -> TreePlan | None:
    """The tree that a capture names; None where it names none, or one that we cannot read."""
    try:
        return parse_plan(text) if text else None
    except UserError:
        return None


def parse_plan(text: str) -> TreePlan:
    """Read a --tree, including those of other programs. Raises UserError that says what is wrong."""
    text, _ = translated(text)
    kind, colon, rest = text.strip().partition(":")
    if kind == "dynamic" and colon:
        return _dynamic(rest, text)
    if kind in ("top", "sampled") and colon:
        return StaticPlan(parse_tree(rest), top=kind == "top")
    return StaticPlan(parse_tree(text))


def _dynamic(rest: str, text: str) -> DynamicPlan:
    form = r"(?P<nodes>[0-9]{1,6})(?:,depth=(?P<depth>[0-9]{1,6}))?(?:,top=(?P<top>[0-9]{1,6}))?"
    match = re.fullmatch(form, re.sub(r"\s*([,=])\s*", r"\1", rest.strip()))
    if match is None:
        raise UserError(
            f"cannot read the tree {short(text)}: write dynamic:NODES,depth=D,top=K; depth and top are optional"
        )
    nodes = int(match["nodes"])
    depth, top = int(match["depth"] or min(DEFAULT_DEPTH, max(nodes, 1))), int(match["top"] or DEFAULT_TOP)
    for name, value, limit in (("nodes", nodes, MAX_NODES), ("depth", depth, MAX_DEPTH), ("top", top, MAX_TOP)):
        if not 1 <= value <= limit:
            raise UserError(f"tree {short(text)}: {name} must be between 1 and {limit}, not {value}")
    if depth > nodes:
        raise UserError(f"tree {short(text)}: {nodes} nodes cannot be {depth} deep")
    return DynamicPlan(nodes, depth, top)
