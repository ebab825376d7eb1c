"""The target once more under a named mistake: a request decoded step by step as recorded, in plain transformers.

What a mistake writes into the KV cache stays there, so that later steps differ too. So the steps follow one another as
they did in the run: each feeds the root and the recorded tree, and keeps the KV of the accepted path. Under a mistake
the mask, the positions or what is kept are those that it would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.model.causal import Causal, cached
from specscope.analyze.diagnose.case import Step
from specscope.analyze.diagnose.causes import Cause
from specscope.trace.record.tree import Bools, DraftTree

Mask = Callable[[DraftTree], Bools]  # [n, n] which nodes each node sees
Places = Callable[[DraftTree], "np.ndarray[Any, Any]"]  # [n] how far after the root each node is
Keep = Callable[[Sequence[int], DraftTree], Sequence[int]]  # which nodes' KV is kept for an accepted path
Text = Callable[[Step, int, int], Sequence[int]]  # positions of the text's tokens that a step feeds: from, to


@dataclass(frozen=True)
class TreeMistake:
    """How a tree is fed and kept, by mistake or as it should be."""

    name: str
    cause: Cause | None  # None: no mistake
    mask: Mask = lambda tree: tree.ancestors
    places: Places = lambda tree: tree.depth
    keep: Keep = lambda path, tree: path
    text: Text = lambda step, begin, end: range(begin, end)
    further: Callable[[Step], int] = lambda step: 0  # by which its nodes lie too far on
    fed: Callable[[Step], Sequence[int]] = lambda step: step.text  # the tokens of the text as they are fed
    unseen: int = 0  # first tokens that nothing behind them sees
    known: int | None = None  # the model chooses among this many first tokens only


def _from_its_chunk(step: Step, begin: int, end: int) -> Sequence[int]:
    """Positions that begin at 0 again in each prefill chunk; tokens outside prefill chunks lie where they should."""
    chunks = [part for part in step.visit.request.steps if part.index <= step.part.index and part.prefill_tokens]
    first = {
        place: part.context_len
        for part in chunks
        for place in range(part.context_len, part.position + (part.verdict is not None))
    }
    return [place - first.get(place, 0) for place in range(begin, end)]


def _decoding_for_long(step: Step) -> int:
    """1 in every step but the first two, for engines that draft the next tree at the end of a step.

    Such an engine drafts the tree of the second step while it feeds the prompt.
    """
    return int(step.last is not None and step.last.last is not None)


def _decoding(step: Step) -> int:
    """1 in every step but the first, which feeds the prompt."""
    return int(step.last is not None)


def _elder(tree: DraftTree) -> Bools:
    """Ancestors, and the elder siblings of all of them."""
    elder = (tree.parent[:, None] == tree.parent[None]) & np.tri(len(tree), dtype=np.bool_)
    return np.asarray(tree.ancestors | (tree.ancestors.astype(int) @ elder.astype(int) > 0))


def _own_elder(tree: DraftTree) -> Bools:
    """Ancestors, and the node's own elder siblings."""
    return np.asarray(tree.ancestors | ((tree.parent[:, None] == tree.parent[None]) & np.tri(len(tree), dtype=bool)))


def _level(tree: DraftTree) -> Bools:
    """Everything on its own level or above."""
    return np.asarray(tree.depth[None] <= tree.depth[:, None])


def _above(tree: DraftTree) -> Bools:
    """Everything on the levels above, and itself."""
    return np.asarray((tree.depth[None] < tree.depth[:, None]) | np.eye(len(tree), dtype=np.bool_))


def _other_parents(by: int) -> Mask:
    """Ancestors by way of parents that are `by` nodes off; the first level stays."""

    def mask(tree: DraftTree) -> Bools:
        seen = np.eye(len(tree), dtype=np.bool_)
        for node, parent in enumerate(tree.parent.tolist()):
            if parent >= 0:
                seen[node] |= seen[min(max(parent + by, 0), node - 1)]
        return seen

    return mask


MASK, PLACE = Cause.MASK_SIBLINGS, Cause.POSITIONS
RIGHT = TreeMistake("as it should be", None)
MISTAKES = (
    TreeMistake("a mask that shows elder siblings of all ancestors", MASK, mask=_elder),
    TreeMistake("a mask that shows a node's elder siblings", MASK, mask=_own_elder),
    TreeMistake("a mask that shows all nodes before", MASK, mask=lambda tree: np.tri(len(tree), dtype=np.bool_)),
    TreeMistake("a mask that shows a node's whole level", MASK, mask=_level),
    TreeMistake("a mask that shows all levels above", MASK, mask=_above),
    TreeMistake("a mask that shows all nodes", MASK, mask=lambda tree: np.ones((len(tree), len(tree)), np.bool_)),
    TreeMistake("a mask whose parents are one node too early", MASK, mask=_other_parents(-1)),
    TreeMistake("a mask whose parents are one node too late", MASK, mask=_other_parents(1)),
    TreeMistake(
        "a mask that hides the nodes from one another", MASK, mask=lambda tree: np.eye(len(tree), dtype=np.bool_)
    ),
    TreeMistake("positions by index", PLACE, places=lambda tree: 1 + np.arange(len(tree))),
    TreeMistake("every node at the first level's position", PLACE, places=lambda tree: np.ones(len(tree), np.int32)),
    TreeMistake("every node one position too far", PLACE, places=lambda tree: tree.depth + 1),
    TreeMistake("every node at its parent's position", PLACE, places=lambda tree: tree.depth - 1),
    TreeMistake(
        "every token one position too far while decoding",
        PLACE,
        text=lambda step, begin, end: range(begin + _decoding(step), end + _decoding(step)),
        further=_decoding,
    ),
    TreeMistake(
        "every token one position too far behind the first draft",
        PLACE,
        text=lambda step, begin, end: range(begin + _decoding_for_long(step), end + _decoding_for_long(step)),
        further=_decoding_for_long,
    ),
    TreeMistake("later prefill chunks at positions from 0", Cause.TARGET_KV, text=_from_its_chunk),
    TreeMistake("the first slots kept, not the path's", Cause.TARGET_KV, keep=lambda path, tree: range(len(path))),
)


@torch.inference_mode()
def decoded(
    model: Causal,
    steps: Sequence[Step],
    mistake: TreeMistake,
    *,
    states: bool = False,
    cache: Any = None,  # noqa: ANN401
) -> Iterator[tuple[Step, Tensor]]:
    """Some first steps of a request in order, each with the target's logits at the root and at each node [n + 1, V].

    With `states` what enters each layer there, [n + 1, layers, width], in place of the logits. `cache`: a DynamicCache
    with what the steps before left, to go on from.
    """
    from transformers import DynamicCache

    cache = DynamicCache() if cache is None else cache
    for step in steps:
        done = cache.get_seq_length()
        root = step.after - 1
        pending = list(mistake.fed(step)[done : root + 1])
        tree, c, n = step.tree, len(pending), len(step.tree)
        seen = torch.ones(c + n, done + c + n, dtype=torch.bool)
        seen[:, done:] = False
        seen[:c, done : done + c] = torch.ones(c, c, dtype=torch.bool).tril()
        seen[c:, done : done + c] = True
        seen[max(mistake.unseen - done, 0) :, : mistake.unseen] = False
        places = [*mistake.text(step, done, root + 1)]
        if n:
            seen[c:, done + c :] = torch.from_numpy(mistake.mask(tree))
            places += (root + mistake.further(step) + mistake.places(tree)).tolist()
        added = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
        out = model.model(
            input_ids=torch.tensor([[*pending, *tree.token.tolist()]], device=model.device),
            position_ids=torch.tensor([places], device=model.device),
            attention_mask=added[None, None].to(model.device),
            output_hidden_states=states,
            **cached(model.model, cache),
        )
        rows = torch.stack([x[0] for x in out.hidden_states[:-1]], dim=1) if states else out.logits[0]
        yield step, rows[c - 1 :].float().cpu()
        _keep(cache, done + c, list(mistake.keep(step.verdict.path.tolist(), tree)))


def _keep(cache: Any, committed: int, nodes: Sequence[int]) -> None:  # noqa: ANN401
    """Of the tree's slots keep only those of these nodes."""
    places = torch.tensor([*range(committed), *(committed + node for node in nodes)])
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, places.to(layer.keys.device)]
        layer.values = layer.values[:, :, places.to(layer.values.device)]
