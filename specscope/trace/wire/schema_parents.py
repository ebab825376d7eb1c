"""What a step's notes on its parents must look like: the JSON of an attribute of decode_step. As schema.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.tree import MAX_NODES, ROOT
from specscope.trace.wire.schema import Count, DamagedError, Parent, PerNode, Piece, T, Token
from specscope.trace.wire.unfinite import Number

MOST_TOP = 16  # likeliest tokens of a parent
PER_TREE_NODE = ("raw_p", "rank", "q_rank")
Likeliest = Annotated[list[T], Meta(max_length=MOST_TOP)]


class Parents(Struct, frozen=True, kw_only=True):
    """What target and drafter gave at the parents that were tried (ParentNotes): k parents, in a tree of any size."""

    node: PerNode[Parent]
    top: PerNode[Likeliest[Token]]
    top_p: PerNode[Likeliest[Number]]
    choice: PerNode[Token]
    choice_p: PerNode[Number]
    entropy: PerNode[Number]
    varentropy: PerNode[Number]
    q_entropy: PerNode[Number]
    q_varentropy: PerNode[Number]
    draft_top: PerNode[Likeliest[Token]]
    draft_top_p: PerNode[Likeliest[Number]]
    choice_rank: PerNode[Count]
    choice_q: PerNode[Number]
    outside: PerNode[Number]
    raw_p: PerNode[Number]  # this and what follows over the nodes
    rank: PerNode[Count]
    q_rank: PerNode[Count]
    final_entropy: Number
    final_varentropy: Number
    final_target_p: Number
    # What the likeliest tokens stand for that are not in the tree: ParentNotes.named
    text: Annotated[list[Piece], Meta(max_length=2 * MOST_TOP * (MAX_NODES + 1))] = []

    def check(self, n: int) -> None:
        """That it belongs to a tree of n nodes. Raises DamagedError."""
        for name in self.__struct_fields__:
            values = getattr(self, name)
            if name == "text":
                continue
            wanted = n if name in PER_TREE_NODE else len(self.node)
            if isinstance(values, list) and len(values) != wanted:
                raise DamagedError(f"`specscope.parents`: {name} holds {len(values)} values, not {wanted}")
            if name in ("top", "top_p", "draft_top", "draft_top_p") and len({len(row) for row in values}) > 1:
                raise DamagedError(f"`specscope.parents`: {name} has rows of several lengths")
        for tokens, probs in ((self.top, self.top_p), (self.draft_top, self.draft_top_p)):
            if [len(row) for row in tokens] != [len(row) for row in probs]:
                raise DamagedError("`specscope.parents`: likeliest tokens without their probabilities")
        if max(self.node, default=ROOT) >= n:
            raise DamagedError(f"`specscope.parents` names node {max(self.node)} of {n}")


class NamelessParents(Parents, frozen=True, kw_only=True):
    """Those of a run that was recorded with --no-tokens."""

    top: PerNode[Likeliest[Token]] = []
    choice: PerNode[Token] = []
    draft_top: PerNode[Likeliest[Token]] = []

    def __post_init__(self) -> None:
        force_setattr(self, "choice", [NO_TOKEN] * len(self.node))
        for name in ("top", "draft_top"):
            force_setattr(self, name, [[NO_TOKEN] * len(row) for row in getattr(self, f"{name}_p")])
