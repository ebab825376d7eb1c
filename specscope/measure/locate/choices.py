"""Whether the tokens of a tree that is not drawn are the likeliest ones of the drafter's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow
from specscope.measure.locate.pairs import HeldPair
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.speculate.drafters.tree_builder import TreeBuilder
from specscope.trace.record.tree import ROOT

TIE = 1e-3  # nats: tokens that lie closer may take each other's place


@dataclass
class Choices:
    """The reference's logits behind the nodes of one request's tree, and the tree that grew."""

    builder: TreeBuilder | None = None
    root: int = 0  # its position
    logits: dict[int, Tensor] = field(default_factory=dict)  # [V] by node
    depths: Tensor | None = None  # [depths, V] of a head that drafts all depths in one pass

    def see(self, drafting: Drafting, logits: Tensor, *, one_pass: bool) -> None:
        """The logits of a frontier, [nodes, V]; of a head that drafts in one pass those of each depth."""
        self.builder, self.root = drafting.builder, drafting.context.position
        if one_pass:
            self.depths = logits
        else:
            self.logits |= zip(drafting.builder.frontier, logits, strict=True)

    def compared(self, code: str) -> Iterator[HeldPair]:
        """How far each chosen token lies below the least likely of those that ought to be chosen."""
        tree = self.builder
        if tree is None or tree.sampled or _shaped(tree):
            return
        rows, short, below = list[FedRow](), list[float](), list[tuple[int, int]]()
        for node in (ROOT, *range(len(tree.token))):
            children = [child for child, parent in enumerate(tree.parent) if parent == node]
            logits = self._logits(node)
            if logits is None or not children:
                continue
            best = logits.topk(len(children))
            for child in children:
                token = tree.token[child]
                short.append(float(best.values[-1] - logits[token]))
                rows.append(FedRow(self.root + tree.depth[child], token, child))
                if short[-1] > TIE:
                    chosen = {tree.token[other] for other in children}
                    missed = next(t for t in best.indices.tolist() if t not in chosen)
                    below.append((max(chosen), missed))
        gap = torch.tensor(short)[:, None]
        ours, zeros = torch.where(gap > TIE, gap, 0.0), torch.zeros(len(rows), 1)
        yield HeldPair("chosen tokens", ours, zeros, tuple(rows), code=code, exact=True, looks=_looks(below))

    def _logits(self, node: int) -> Tensor | None:
        if self.depths is None:
            return self.logits.get(node)
        assert self.builder is not None
        depth = 0 if node == ROOT else self.builder.depth[node]
        return self.depths[depth] if depth < len(self.depths) else None


def _shaped(tree: TreeBuilder) -> bool:
    """Whether rules of sampling move the choice: those are searched by themselves."""
    params = tree.context.params
    return bool(params.penalised or params.logit_bias or tree.context.allowed is not None)


def _looks(below: list[tuple[int, int]]) -> str:
    """below: of each wrong choice the highest token that was chosen, and the likeliest that was passed over."""
    if not below:
        return ""
    highest, lowest = max(chosen for chosen, _ in below), min(missed for _, missed in below)
    if highest < lowest:
        return f"the likeliest among the first tokens of the vocabulary: {highest} is chosen, {lowest} and beyond never"
    tokens = {missed for _, missed in below}
    return f"token {lowest} is never chosen" if len(tokens) == 1 else ""
