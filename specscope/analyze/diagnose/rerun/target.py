"""A model once more under a named mistake: a request decoded step by step as recorded, in plain transformers.

What a mistake writes into the KV cache stays there, so that later steps differ too. So the steps follow one another as
they did in the run: each feeds the root and the recorded tree, and keeps the KV of the accepted path. Under a mistake
the mask, the positions or what is kept are those that it would give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.model.causal import Causal, cached
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.rerun.match import Match, at_parents, compare
from specscope.analyze.verify.case import Case, Step
from specscope.trace.record.tree import ROOT, Bools, DraftTree

Mask = Callable[[DraftTree], Bools]  # [n, n] which nodes each node sees
Places = Callable[[DraftTree], "np.ndarray[Any, Any]"]  # [n] how far after the root each node is
Keep = Callable[[Sequence[int], DraftTree], Sequence[int]]  # which nodes' KV is kept for an accepted path
Text = Callable[[Step, int, int], Sequence[int]]  # positions of the text's tokens that a step feeds: from, to


@dataclass(frozen=True)
class TreeMistake:
    """How a tree is fed and kept, by mistake or as it should be."""

    name: str
    cause: Cause
    mask: Mask = lambda tree: tree.ancestors
    places: Places = lambda tree: tree.depth
    keep: Keep = lambda path, tree: path
    text: Text = lambda step, begin, end: range(begin, end)
    further: Callable[[Step], int] = lambda step: 0  # by which its nodes lie too far on
    fed: Callable[[Step], Sequence[int]] = lambda step: step.text  # the tokens of the text as they are fed
    unseen: int = 0  # first tokens that nothing behind them sees
    known: int | None = None  # the model chooses among this many first tokens only
    late: bool = False  # each draft comes from the tokens without the last one


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
RIGHT = TreeMistake("as it should be", Cause.TARGET_KV)
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


def _first_run(path: Sequence[int], tree: DraftTree) -> list[int]:
    """As many nodes as were accepted and run, but the first ones that were run, in the order of their slots."""
    run = sorted({*tree.parent.tolist()} - {ROOT})
    return run[: sum(node in run for node in path)]


def _fed(keep: Keep) -> Keep:
    """A drafter keeps what it ran: nodes that have children."""
    return lambda path, tree: [node for node in keep(path, tree) if node in tree.parent]


def of_drafter(case: Case) -> Iterator[TreeMistake]:
    """The mistakes of a draft model: the target's, with the cause that they have in a drafter, and its own."""
    for mistake in MISTAKES:
        cause = Cause.DRAFTER_KV if mistake.cause is Cause.TARGET_KV else mistake.cause
        yield replace(mistake, cause=cause, keep=_fed(mistake.keep))
    yield TreeMistake("the first nodes that it ran kept, not the path's", Cause.DRAFTER_KV, keep=_first_run)
    yield TreeMistake("each draft from the tokens without the last one", Cause.DRAFT_POSITION, late=True)
    yield _behind_a_cached_prefix(case)


def _behind_a_cached_prefix(case: Case) -> TreeMistake:
    """A drafter whose KV at t comes from the token at t + 1, as an EAGLE head's does, and that has KV from the cache.

    The last cached slot then holds the token that followed in the request which filled the cache, and the first token
    is in no slot.
    """
    texts = {step.request: step.text for step in case.steps}
    fed: dict[str, Sequence[int]] = {}
    for number, (name, text) in enumerate(texts.items()):
        cached = case.history.requests[name].steps[0].context_len
        earlier = (texts[other] for other in list(texts)[:number])
        alike = next((other for other in earlier if len(other) > cached and other[:cached] == text[:cached]), None)
        if cached and alike is not None:
            fed[name] = [*text[:cached], alike[cached], *text[cached + 1 :]]
    return TreeMistake(
        "the token behind a cached prefix of the request that filled the cache, and without the first token",
        Cause.DRAFTER_KV,
        fed=lambda step: fed.get(step.request, step.text),
        unseen=1,
    )


class ModelAgain:
    """A target, or a draft model, asked about the first steps of requests."""

    right = RIGHT

    def __init__(self, model: Causal, case: Case, *, drafter: bool = False) -> None:
        self.model, self.dtype, self.drafter = model, case.dtype, drafter
        self._before: dict[tuple[str, int], Any] = {}  # by request and steps: a cache with what they left

    def ask(self, steps: Sequence[Step], mistake: TreeMistake, back: int | None) -> Match:
        """The last of some first steps, the mistake at work so many steps before it; None: in all of them."""
        from transformers import DynamicCache

        last = len(steps) - 1
        begin = 0 if back is None else last - back
        cache, match = DynamicCache() if back is None else self._after(steps[:begin]), Match()
        for place in range(begin, last + 1):
            here = mistake if back is None or place == begin else RIGHT
            for step, logits in decoded(self.model, [steps[place]], here, cache=cache):
                if place == last:
                    match = self._compared(step, logits, here)
        return match

    def step_by_step(self, steps: Sequence[Step]) -> Iterator[Match]:
        """Each of these steps without a mistake."""
        for step, logits in decoded(self.model, steps, RIGHT):
            yield self._compared(step, logits, RIGHT)

    def _compared(self, step: Step, logits: Tensor, mistake: TreeMistake) -> Match:
        rows = at_parents(step, logits, late=mistake.late)
        return compare(step, rows, self.dtype, drafter=self.drafter, known=mistake.known)

    def _after(self, steps: Sequence[Step]) -> Any:  # noqa: ANN401
        """A copy of the cache that these steps leave without a mistake."""
        from transformers import DynamicCache

        key = (steps[0].request, len(steps)) if steps else ("", 0)
        if key not in self._before:
            cache = self._after(steps[:-1]) if steps else DynamicCache()
            for _ in decoded(self.model, steps[-1:], RIGHT, cache=cache):
                pass
            self._before[key] = cache
        return copy.deepcopy(self._before[key])
