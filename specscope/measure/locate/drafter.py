"""What watches a drafter that is a model: its passes, from what they are fed to the tokens that are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from specscope.analyze.audit.model.heads import head_of
from specscope.analyze.locate.located import FedRow, Stage
from specscope.analyze.locate.model.reference import ModelReference, ReferencePass
from specscope.errors import UserError
from specscope.measure.locate.features import TrueFeatures
from specscope.measure.locate.head_side import BlockSide, HeadSide, ModulesSide
from specscope.measure.locate.pairs import HeldPair
from specscope.measure.locate.watch import FedPart, Feeds, ModelSide, ModelWatch
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.speculate.drafters.tree_builder import Level, TreeBuilder
from specscope.trace.record.tree import ROOT

if TYPE_CHECKING:
    from specscope.analyze.audit.options import ModelSource
    from specscope.measure.locate.drive import Drive
    from specscope.measure.locate.question import WalkPlan

SIDES: Mapping[str, Any] = {"eagle": HeadSide, "dflash": BlockSide, "mtp": ModulesSide}
TIE = 1e-3  # nats: tokens that lie closer may take each other's place


def _chosen(drafting: Drafting, logits: Mapping[int, Tensor], *, one_pass: bool) -> Iterator[HeldPair]:
    """How far each token of a tree lies below the least likely of those that ought to be chosen.

    `logits`: the reference's [V] behind its nodes, by node; of a head that drafts all depths in one pass by depth.
    """
    tree, root = drafting.builder, drafting.context.position
    if tree.sampled or _shaped(tree):
        return
    rows, short = list[FedRow](), list[float]()
    for node in (ROOT, *range(len(tree.token))):
        children = [child for child, parent in enumerate(tree.parent) if parent == node]
        known = logits.get(node if not one_pass else 0 if node == ROOT else tree.depth[node])
        if known is not None and children:
            least = known.topk(len(children)).values[-1]
            short += [float(least - known[tree.token[child]]) for child in children]
            rows += [FedRow(root + tree.depth[child], tree.token[child], child) for child in children]
    gap = torch.tensor(short)[:, None]
    ours = torch.where(gap > TIE, gap, 0.0)
    yield HeldPair("chosen tokens", ours, torch.zeros_like(ours), tuple(rows), exact=True)


def _shaped(tree: TreeBuilder) -> bool:
    """Whether rules of sampling move the choice: those are searched by themselves."""
    params = tree.context.params
    return bool(params.penalised or params.logit_bias or tree.context.allowed is not None)


@contextmanager
def _following(feeds: Feeds, watch: ModelWatch) -> Iterator[None]:
    """Follow a drafter from pass to pass: compare its logits by the target's tokens, and what is chosen of them."""
    drafter, one_pass = feeds.drafter, watch.side.one_pass
    propose, run = drafter.propose, drafter.run_pass
    # Of the trees that grow now, by request: the reference's logits, as _chosen takes them
    grown: dict[str, tuple[Drafting, dict[int, Tensor]]] = {}

    def passed(feed: Callable[[Sequence[Drafting]], Level], drafting: Sequence[Drafting]) -> Level:
        feeds.drafting, feeds.grows, watch.right = drafting, feed == drafter.feed_frontier, {}
        level = run(feed, drafting)
        for g in drafting:
            name = g.context.request
            if name in watch.right and watch.wrong is None:
                pair = _by_target(level, *watch.right[name])
                if not watch.compare(name, [pair]):
                    _, known = grown.setdefault(name, (g, {}))
                    known |= enumerate(pair.right) if one_pass else zip(g.builder.frontier, pair.right, strict=True)
        feeds.drafting, feeds.grows = (), False
        return level

    def proposed(contexts: Any) -> Any:  # noqa: ANN401
        grown.clear()
        drafts = propose(contexts)
        for name, (g, logits) in grown.items():
            watch.compare(name, _chosen(g, logits, one_pass=one_pass))
        return drafts

    with patch.object(drafter, "propose", proposed), patch.object(drafter, "run_pass", passed):
        yield


def _by_target(level: Level, part: FedPart, right: ReferencePass) -> HeldPair:
    """The logits over the target's vocabulary, of which the tree's tokens are then chosen."""
    ours, taps = level.full(range(part.wanted.start, part.wanted.stop)).cpu(), right.taps
    width, rows, name = ours.shape[1], right.rows[-len(ours) :], "vocabulary" if level.d2t is None else "d2t"
    logits = taps.get("d2t", taps["lm_head"])[-len(ours) :, :width]
    logits = functional.pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
    return HeldPair(name, ours, logits, rows)


def drafter_watch(
    drive: Drive, plan: WalkPlan, target: ModelReference, draft: ModelSource, stack: ExitStack
) -> ModelWatch:
    """Watches the drafter of a drive, as long as the stack is open. Raises UserError."""
    drafter: Any = drive.engine.drafter
    texts = plan.texts
    feeds = Feeds(drafter)
    side: HeadSide | ModelSide
    if isinstance(drafter, HeadDrafter):
        head = head_of(draft, target.causal.model)
        if head.by_pairs and head.mask_token is not None:
            raise UserError("a head that drafts all depths in one pass is not walked: audit judges it")
        features = TrueFeatures(drive, target, texts, head.layers)
        of_head = side = SIDES[draft.kind](drafter.runner, feeds, head, texts, features)
        stack.enter_context(of_head.on())
    else:
        reference = ModelReference(draft)
        side = ModelSide(drafter.runner, reference, texts, feeds.fed)
    states = drafter.states
    watch = ModelWatch(Stage.DRAFTER, drive, plan, side, lambda name: states[name].table if name in states else None)
    stack.enter_context(watch.on())
    stack.enter_context(_following(feeds, watch))
    return watch
