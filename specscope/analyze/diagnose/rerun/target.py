"""A model once more under a named mistake: a request decoded step by step as recorded, in plain transformers.

Each step feeds the root and the recorded tree; what a mistake writes into the KV cache stays there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from specscope.analyze.audit.model.causal import Causal, cached
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.verify.trial import Case, Step
from specscope.trace.record.tree import ROOT, Bools, DraftTree, Ints

Mask = Callable[[DraftTree], Bools]  # [n, n] which nodes each node sees
Keep = Callable[[Sequence[int], DraftTree], Sequence[int]]  # the nodes whose KV is kept, of an accepted path
Rows = dict[int, Tensor]  # logits [V] by node


@dataclass(frozen=True)
class TreeMistake:
    """How a tree is fed and kept, by mistake or as it should be."""

    name: str
    cause: Cause
    mask: Mask = lambda tree: tree.ancestors
    depth: Callable[[DraftTree], Ints] = lambda tree: tree.depth  # how far after the root
    moved: Callable[[Step, Indices], Indices] = lambda step, places: places  # the positions of all rows of a step
    keep: Keep = lambda path, tree: path
    fed: Callable[[Step], Sequence[int]] = lambda step: step.text  # the tokens of the text as they are fed
    unseen: int = 0  # first tokens that nothing behind them sees
    rootless: bool = False  # nodes do not see the root
    known: int | None = None  # the model chooses among this many first tokens only
    late: bool = False  # each draft comes from the tokens without the last one


def _from_its_chunk(step: Step, places: Indices) -> Indices:
    """Positions that begin at 0 again in each prefill chunk; tokens outside prefill chunks lie where they should."""
    for part in step.visit.request.steps:
        if part.prefill_tokens and part.index <= step.part.index:
            inside = (places >= part.context_len) & (places < part.position + (part.verdict is not None))
            places = np.where(inside, places - part.context_len, places)
    return places


def _elder(tree: DraftTree) -> Bools:
    return np.asarray((tree.parent[:, None] == tree.parent[None]) & np.tri(len(tree), dtype=np.bool_))


def _other_parents(tree: DraftTree, by: int) -> Bools:
    """Ancestors by way of parents that are `by` nodes off; the first level stays."""
    seen = np.eye(len(tree), dtype=np.bool_)
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            seen[node] |= seen[min(max(parent + by, 0), node - 1)]
    return seen


MASKS: dict[str, Mask] = {
    "shows elder siblings of all ancestors": lambda tree: tree.ancestors | (tree.ancestors @ _elder(tree)),
    "shows a node's elder siblings": lambda tree: tree.ancestors | _elder(tree),
    "shows all nodes before": lambda tree: np.tri(len(tree), dtype=np.bool_),
    "shows a node's whole level": lambda tree: tree.depth <= tree.depth[:, None],
    "shows all levels above": lambda tree: (tree.depth < tree.depth[:, None]) | np.eye(len(tree), dtype=np.bool_),
    "shows all nodes": lambda tree: np.ones((len(tree), len(tree)), np.bool_),
    "whose parents are one node too early": lambda tree: _other_parents(tree, -1),
    "whose parents are one node too late": lambda tree: _other_parents(tree, 1),
    "hides the nodes from one another": lambda tree: np.eye(len(tree), dtype=np.bool_),
    "hides a node's ancestors but for its parent": lambda tree: tree.ancestors & (tree.depth[:, None] - tree.depth < 2),
}
PLACE, KV = Cause.ROTARY_POSITIONS, Cause.TARGET_KV
RIGHT = TreeMistake("as it should be", KV)
MISTAKES = (
    *(
        TreeMistake(f"a mask {'' if how.startswith('whose') else 'that '}{how}", Cause.MASK_SIBLINGS, mask)
        for how, mask in MASKS.items()
    ),
    TreeMistake("a mask that hides the root from all nodes", Cause.MASK_SIBLINGS, rootless=True),
    TreeMistake("positions by index", PLACE, depth=lambda tree: np.arange(1, len(tree) + 1, dtype=np.int32)),
    TreeMistake("every node at the first level's position", PLACE, depth=lambda tree: np.ones_like(tree.depth)),
    TreeMistake("every node one position too far", PLACE, depth=lambda tree: tree.depth + 1),
    TreeMistake("every node at its parent's position", PLACE, depth=lambda tree: tree.depth - 1),
    TreeMistake("every node's depth counted twice", PLACE, depth=lambda tree: 2 * tree.depth),
    TreeMistake(
        "every token one position too far while decoding",
        PLACE,
        moved=lambda step, places: places + (step.last is not None),
    ),
    TreeMistake(  # of engines that draft the tree of the second step while they feed the prompt
        "every token one position too far after the first draft",
        PLACE,
        moved=lambda step, places: places + (step.last is not None and step.last.last is not None),
    ),
    TreeMistake("later prefill chunks at positions from 0", KV, moved=_from_its_chunk),
    TreeMistake("the first slots kept, not the path's", KV, keep=lambda path, tree: range(len(path))),
)


@torch.inference_mode()
def decoded(model: Causal, step: Step, mistake: TreeMistake, cache: Any, layers: Sequence[int] = ()) -> Tensor:  # noqa: ANN401
    """The target's logits at the root and at each node of a step [n + 1, V], or what enters `layers` there. `cache`: a
    DynamicCache with what the steps before left; this step's path is added to it.
    """
    done, root, tree = cache.get_seq_length(), step.after - 1, step.tree
    pending = list(mistake.fed(step)[done : root + 1])
    c, n = len(pending), len(tree)
    seen = torch.ones(c + n, done + c + n, dtype=torch.bool).tril(done)
    seen[max(mistake.unseen - done, 0) :, : mistake.unseen] = False
    seen[c:, done + c - 1] = not mistake.rootless
    seen[c:, done + c :] = torch.from_numpy(mistake.mask(tree))
    places = torch.from_numpy(mistake.moved(step, np.append(np.arange(done, root + 1), root + mistake.depth(tree))))
    logits, states = model.forward(
        [*pending, *tree.token.tolist()],
        [*range(c - 1, c + n)],
        layers,
        position_ids=places[None],
        attention_mask=model.masks(seen, places[:, None] - torch.cat([torch.arange(done), places])),
        **cached(model.model, cache),
    )
    path = (done + c + node for node in mistake.keep(step.verdict.path.tolist(), tree))
    kept = torch.tensor([*range(done + c), *path])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    return logits if states is None else states[c - 1 :].reshape(n + 1, len(layers), -1)


def _ran(keep: Keep, path: Sequence[int], tree: DraftTree) -> list[int]:
    """Of the nodes that are kept those that a drafter ran: with children."""
    return [node for node in keep(path, tree) if node in tree.parent]


def of_drafter(case: Case) -> Iterator[TreeMistake]:
    """The mistakes of a draft model: the target's, with the cause that they have in a drafter, and its own."""
    for mistake in MISTAKES:
        yield replace(
            mistake,
            cause=Cause.DRAFTER_KV if mistake.cause is KV else mistake.cause,
            keep=partial(_ran, mistake.keep),
        )
    yield TreeMistake(
        "the first nodes that it ran kept, not the path's",
        Cause.DRAFTER_KV,
        keep=lambda path, tree: sorted({*tree.parent.tolist()} - {ROOT})[: len(_ran(RIGHT.keep, path, tree))],
    )
    yield TreeMistake("each draft from the tokens without the last one", Cause.DRAFT_POSITION, late=True)
    yield _behind_a_cached_prefix(case)


def _behind_a_cached_prefix(case: Case) -> TreeMistake:
    """A drafter whose KV at t comes from the token at t + 1, and that has KV from the cache: the last cached slot holds
    the token that followed in the request which filled the cache, and the first token is in no slot.
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
        "the token after a cached prefix, of the request that filled the cache, and without the first token",
        Cause.DRAFTER_KV,
        fed=lambda step: fed.get(step.request, step.text),
        unseen=1,
    )


class ModelAgain:
    """A target, or a draft model, asked about the first steps of requests."""

    right = RIGHT

    def __init__(self, model: Causal) -> None:
        self.model = model
        self._left_by: dict[tuple[str, int], Any] = {}  # by request and steps: a cache with what they left

    def rows(
        self, steps: Sequence[Step], mistake: TreeMistake, back: int | None, *, every: bool
    ) -> Iterator[tuple[Step, Rows]]:
        """The last of some first steps, or every one, with its logits at root and nodes. `back`: as of a head."""
        begin = 0 if back is None else len(steps) - 1 - back
        cache = self._left(steps[:begin])
        for place, step in enumerate(steps[begin:]):
            here = mistake if back is None or not place else RIGHT
            rows = decoded(self.model, step, here, cache)
            if every or step is steps[-1]:
                late = {node: rows[above + 1] for node, above in enumerate(step.tree.parent.tolist())}
                yield step, late if here.late else dict(enumerate(rows, ROOT))

    def _left(self, steps: Sequence[Step]) -> Any:  # noqa: ANN401
        """A copy of the cache that these steps leave without a mistake."""
        if not steps:
            return DynamicCache()
        key = steps[0].request, len(steps)
        if key not in self._left_by:
            self._left_by[key] = self._left(steps[:-1])
            decoded(self.model, steps[-1], RIGHT, self._left_by[key])
        return copy.deepcopy(self._left_by[key])
