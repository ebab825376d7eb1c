"""A drafter of your own: a class, or a function that makes one, given to Engine or named as module:Class."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError, failed
from specscope.model.loader import LoadedModel
from specscope.model.places import Backend
from specscope.plans.kinds import RUN_HERE
from specscope.plans.plan import TreePlan
from specscope.speculate.drafters.base import Context, Draft, Drafter, Level
from specscope.speculate.drafters.tree_builder import grow_trees, start_tree
from specscope.trace.record.records import Verdict
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.tree_shape import MAX_NODES


@dataclass(frozen=True)
class DrafterSetup:
    """What a drafter of your own is told when it is made."""

    target: LoadedModel  # its `model` is the transformers model; vocab_size, max_context, device, dtype
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
        level = logits(paths).float()
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
        self.max_nodes, self.max_depth = int(theirs.max_nodes), int(theirs.max_depth)
        if not 1 <= self.max_depth <= self.max_nodes <= MAX_NODES:
            sizes = f"max_nodes is {self.max_nodes} and max_depth {self.max_depth}"
            raise UserError(f"{self._flag}: {sizes}: they must be at least 1, and at most {MAX_NODES} nodes")
        self.aux_layers = tuple(getattr(theirs, "aux_layers", ()))

    def _asked(self, what: str, ask: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return ask(*arguments)
        except Exception as error:
            raise failed(f"{self._flag}: {what} failed", error) from error

    def _told(self, name: str, *arguments: object) -> Any:  # noqa: ANN401
        """What its method gives; the base class's, where it derives from nothing and has none."""
        return self._asked(name, getattr(self._theirs, name, getattr(super(), name)), *arguments)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """Its drafts. Raises UserError where one cannot be verified."""
        self.passes = ()
        drafts = list(self._asked("propose", self._theirs.propose, contexts))
        self.passes = tuple(getattr(self._theirs, "passes", ()))
        if len(drafts) != len(contexts):
            raise UserError(f"{self._flag}: propose returned {len(drafts)} drafts for {len(contexts)} requests")
        for context, draft in zip(contexts, drafts, strict=True):
            if wrong := self._wrong(draft):
                raise UserError(f"{self._flag}: the draft for {context.request} {wrong}")
        return drafts

    def _wrong(self, draft: Draft) -> str:
        if not isinstance(draft, Draft):
            return f"is a {type(draft).__name__}: propose must return a specscope.Draft, such as Draft.chain(tokens)"
        tree, n = draft.tree, len(draft.tree)
        if any(not ROOT <= above < node for node, above in enumerate(tree.parent.tolist())):
            return "has a node before its parent"
        if n > self.max_nodes or tree.max_depth > self.max_depth:
            return f"has {n} nodes, {tree.max_depth} deep; max_nodes is {self.max_nodes} and max_depth {self.max_depth}"
        if n and not 0 <= int(tree.token.min()) <= int(tree.token.max()) < self._vocabulary:
            return f"has tokens outside the target's vocabulary of {self._vocabulary}"
        for node in (tree.drawn != Drawn.DETERMINISTIC).nonzero()[0].tolist():
            row = draft.q.get(int(tree.parent[node]))
            if row is None or row.shape != torch.Size([self._vocabulary]):
                return f"has the sampled node {node} without q [{self._vocabulary}] at its parent"
        return ""

    def commit(self, context: Context, tree: DraftTree, verdict: Verdict) -> None:
        self._told("commit", context, tree, verdict)

    def observe(self, request: str, start: int, features: Tensor, tokens: Sequence[int]) -> None:
        self._told("observe", request, start, features, tokens)

    def rewind(self, request: str, tokens: int) -> bool:
        return bool(self._told("rewind", request, tokens))

    def release(self, request: str) -> None:
        self._told("release", request)
