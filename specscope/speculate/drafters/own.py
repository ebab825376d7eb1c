"""A drafter of your own: a class, or a function that makes one, given to Engine or named as module:Class."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.errors import MISTAKES, UserError, failed
from specscope.model.loader import LoadedModel
from specscope.model.places import Backend
from specscope.plans.kinds import RUN_HERE
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Context, Draft, Drafter, Level
from specscope.speculate.drafters.tree_builder import grow_trees, start_tree
from specscope.trace.record.records import Verdict
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import MAX_NODES

NEAR_ONE = 1e-3  # a sum of probabilities is, of any float dtype


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter of your own is told when it is made."""

    target: LoadedModel  # its embedding and output modules; vocab_size, max_context, device, dtype
    tokenizer: Any  # of transformers
    plan: TreePlan  # of --tree; a chain of 5 where it was not given
    draft_model: str | None  # --draft-model, as it was given
    blocks: int  # KV blocks of 16 tokens that it may hold
    backend: Backend


def draft_tree(context: Context, plan: TreePlan, logits: Callable[[list[list[int]]], Tensor]) -> Draft:
    """A tree for one request, drawn or chosen as the plan and the request's sampling say, with the request's coins.

    `logits`: float [n, V] behind the request's tokens and each of n drafted paths; called once a level, at first with
    the empty path.
    """
    builder, levels = start_tree(context, plan), dict[tuple[int, ...], Level]()
    while builder.frontier:
        paths = [builder.path(node) for node in builder.frontier]
        level = logits(paths).to(torch.float32, copy=True)  # a drafter may fill its tensor again
        if level.ndim != 2 or len(level) != len(paths):
            raise ValueError(f"logits gave {list(level.shape)} for {len(paths)} paths, not [{len(paths)}, vocabulary]")
        if not level.logsumexp(1).isfinite().all():
            raise ValueError("the logits have NaN or +inf, or a row of -inf alone")
        levels |= {tuple(path): Level(row[None], len(row)) for path, row in zip(paths, level, strict=True)}
        grow_trees(Level(level, level.shape[1]), [(builder, range(len(paths)))])
    draft, _ = builder.finish()
    return Draft(draft.tree, draft.q, draft.notes, row=lambda path: levels.get(tuple(path)))


def _source(make: object) -> str:
    name = getattr(make, "__qualname__", "")
    try:
        text = Path(inspect.getsourcefile(make) or "").read_bytes()  # type: ignore[arg-type]
        return hashlib.sha256(text + f"\0{name}".encode()).hexdigest()
    except (OSError, TypeError):  # made in a console, for one
        return ""


def _lent(context: Context) -> Context:
    """A context whose tokens and parameters a drafter may write to: the request's own stay as they are."""
    return replace(context, tokens=list(context.tokens), params=deepcopy(context.params))


class OwnDrafter(Drafter):
    """Asks a drafter of your own, and checks what it says: a mistake is named, and where it is."""

    def __init__(self, make: Callable[[DrafterSetup], Any], named: str, setup: DrafterSetup) -> None:
        """`named`: module:Class. Raises UserError where what `make` makes is no drafter."""
        self._flag, self._vocabulary = f"--drafter {named}", setup.target.vocab_size
        self.source = _source(make)  # a digest of its file and its name there: another one is another drafter
        if isinstance(make, type) and not hasattr(make, "propose"):
            raise UserError(f"{self._flag} has no propose: derive it from specscope.Drafter")
        theirs = self._theirs = self._asked("calling it with a DrafterSetup", make, setup)
        if missing := [name for name in ("max_nodes", "max_depth", "propose") if not hasattr(theirs, name)]:
            raise UserError(f"{self._flag} has no {missing[0]}: derive it from specscope.Drafter")
        name = str(getattr(theirs, "name", Drafter.name))
        self.name = named if name == Drafter.name else name
        if self.name in RUN_HERE:
            raise UserError(f"{self._flag}: specscope has a drafter named {self.name}: give it another name")
        counts = lambda: (int(theirs.max_nodes), int(theirs.max_depth))  # noqa: E731
        self.max_nodes, self.max_depth = self._asked("max_nodes or max_depth", counts)
        if not 1 <= self.max_depth <= self.max_nodes <= MAX_NODES:
            sizes = f"max_nodes is {self.max_nodes} and max_depth {self.max_depth}"
            raise UserError(f"{self._flag}: {sizes}: give 1 <= max_depth <= max_nodes <= {MAX_NODES}")
        self.aux_layers = self._asked("aux_layers", tuple, getattr(theirs, "aux_layers", ()))
        layers = len(setup.target.layers)
        if wrong := [j for j in self.aux_layers if j != "final" and (type(j) is not int or not 0 <= j < layers)]:
            raise UserError(f'{self._flag}: aux_layers has {wrong[0]!r}: give "final" or layers from 0 to {layers - 1}')
        self._device = setup.target.device
        self._held: set[str] = set()  # requests that it has heard of

    def _asked(self, what: str, ask: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return ask(*arguments)
        except MISTAKES as error:
            raise failed(f"{self._flag}: {what} failed", error) from error

    def _told(self, name: str, *arguments: object) -> Any:  # noqa: ANN401
        """What its method gives; the base class's, where it derives from nothing and has none."""
        return self._asked(name, getattr(self._theirs, name, getattr(super(), name)), *arguments)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """Its drafts. Raises UserError where one cannot be verified."""
        drafts: list[Draft] = self._asked("propose", self._proposed, contexts)
        return drafts

    def _proposed(self, contexts: Sequence[Context]) -> list[Draft]:
        self._held |= {context.request for context in contexts}
        drafts = self._theirs.propose([_lent(context) for context in contexts])
        self.passes = tuple(getattr(self._theirs, "passes", ()))
        if not isinstance(drafts, Iterable):
            raise UserError(f"{self._flag}: propose returned {drafts!r}, not a draft for each request")
        if len(drafts := list(drafts)) != len(contexts):
            raise UserError(f"{self._flag}: propose returned {len(drafts)} drafts for {len(contexts)} requests")
        for context, draft in zip(contexts, drafts, strict=True):
            if wrong := self._wrong(draft):
                raise UserError(f"{self._flag}: the draft for {context.request} {wrong}")
        return [self._copied(draft) for draft in drafts]

    def _wrong(self, draft: Draft) -> str:
        if not isinstance(draft, Draft):
            return f"is a {type(draft).__name__}: propose must return a specscope.Draft, such as Draft.chain(tokens)"
        tree, n = draft.tree, len(draft.tree)
        if not n == len(tree.parent) == len(tree.q) == len(tree.drawn):
            return f"has {n} tokens and {len(tree.parent)} parents, {len(tree.q)} q and {len(tree.drawn)} drawn"
        parents, kinds = tree.parent.tolist(), [Drawn(kind) for kind in tree.drawn.tolist()]
        if any(not ROOT <= above < node for node, above in enumerate(parents)):
            return "has a node before its parent"
        if n > self.max_nodes or tree.max_depth > self.max_depth:
            return f"has {n} nodes, {tree.max_depth} deep; max_nodes is {self.max_nodes} and max_depth {self.max_depth}"
        if n and not 0 <= int(tree.token.min()) <= int(tree.token.max()) < self._vocabulary:
            return f"has tokens outside the target's vocabulary of {self._vocabulary}"
        levels = (draft.row(tree.token[tree.path_to(parent)].tolist()) for parent in {*parents})
        if wide := [level.vocab_size for level in levels if level and level.vocab_size != self._vocabulary]:
            return f"has logits over {wide[0]} tokens, but the target's vocabulary is {self._vocabulary}"
        if len({*zip(parents, kinds, strict=True)}) > len({*parents}):
            return "has siblings that were drawn in different ways"
        pairs = [*zip(parents, tree.token.tolist(), strict=True)]
        once = [pair for pair, kind in zip(pairs, kinds, strict=True) if kind is not Drawn.WITH_REPLACEMENT]
        if len({*once}) < len(once):
            return "has one token twice behind one parent"
        sampled = (tree.drawn != Drawn.DETERMINISTIC).nonzero()[0].tolist()
        for parent, node in {parents[node]: node for node in sampled}.items():
            row = draft.q.get(parent)
            if not isinstance(row, Tensor) or row.shape != torch.Size([self._vocabulary]):
                return f"has the sampled node {node} without q [{self._vocabulary}] at its parent"
            if not (row.min() >= 0 and abs(row.sum(dtype=torch.float64) - 1) < NEAR_ONE):  # NaN compares false
                return f"has a q that is no distribution at node {node}: it sums to {float(row.sum()):.6g}"
        return ""

    def _copied(self, draft: Draft) -> Draft:
        """The same in memory that the drafter does not hold: it may fill its own again."""
        tree, sampled = draft.tree, draft.tree.parent[draft.tree.drawn != Drawn.DETERMINISTIC].tolist()
        held = DraftTree.build(tree.token, tree.parent, tree.q.copy())  # type: ignore[arg-type]
        q = {parent: draft.q[parent].to(self._device, torch.float32, copy=True) for parent in {*sampled}}
        return replace(draft, tree=replace(held, drawn=tree.drawn.astype(np.uint8)), q=q)

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        self._told("commit", _lent(context), deepcopy(tree), deepcopy(verdict))

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        self._held.add(request)
        self._told("observe", request, start, features, list(tokens))

    def rewind(self, request: str, tokens: int) -> bool:
        return request not in self._held or self._told("rewind", request, tokens) is not False

    def release(self, request: str) -> None:
        if request in self._held:
            self._held.remove(request)
            self._told("release", request)
