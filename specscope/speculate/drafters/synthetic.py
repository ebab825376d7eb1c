"""A drafter whose drafts are accepted at given rates: throughput at a known acceptance, with no head to train.

Its tokens mean nothing and its verdicts are forced, so what comes out is not the target's text. Every verdict says so
(Verdict.forced), and so does every step (the drafter's name).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specscope.model.features import AuxLayer
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.drafters.suffix_index import Shelf
from specscope.trace.plan import StaticPlan
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.records import Phase, Verdict
from specscope.trace.record.tree import ROOT, DraftTree


class Synthetic:
    """Drafts a tree of a given shape; the first child at depth d is accepted in `rates[d - 1]` of all drafts."""

    name = "synthetic"
    aux_layers: tuple[AuxLayer, ...] = ()
    passes: tuple[Phase, ...] = ()
    shelf: Shelf | None = None

    def __init__(self, plan: StaticPlan, rates: Sequence[float], vocab_size: int) -> None:
        self.shape = plan.shape
        self.vocab_size = vocab_size
        self.max_nodes, self.max_depth = plan.max_nodes, plan.max_depth
        # Given that its parent was accepted: r_d / r_{d-1}. Deeper than the rates go, nothing is.
        self.given_parent = [r / before if before else 0.0 for before, r in zip([1.0, *rates], rates, strict=False)]

    def most_nodes(self, context: Context) -> int:
        """The whole shape, always."""
        return self.max_nodes

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """The same shape for every request."""
        return [self._draft(context) for context in contexts]

    def _draft(self, context: Context) -> Draft:
        token = [(context.tokens[-1] + 1 + node) % self.vocab_size for node in range(len(self.shape))]
        tree = DraftTree.build(token, self.shape.parent)
        coin = coins(context.params.seed, Stream.DRAFT, context.position, self.max_depth)
        forced: dict[int, bool] = {}
        node, depth = ROOT, 0
        while children := self.shape.children(node):
            accepted = depth < len(self.given_parent) and bool(coin[depth] < self.given_parent[depth])
            forced |= dict.fromkeys(children, False)
            if not accepted:
                break
            forced[children[0]] = True
            node, depth = children[0], depth + 1
        return Draft(tree, forced=forced)

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        """Nothing to learn."""

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        """Nothing to see."""

    def rewind(self, request: str, tokens: int) -> None:
        """It keeps nothing between steps."""

    def release(self, request: str) -> None:
        """Nothing to forget."""
