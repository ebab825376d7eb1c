"""What drafters that look into the text alone have in common: an index of each request's tokens, and no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specscope.speculate.allowed import allows
from specscope.speculate.drafters.base import Context, Draft, Drafter
from specscope.trace.record.tree import ROOT, DraftTree


def pruned(draft: Draft, context: Context) -> Draft:
    """The nodes that may come, each behind its own path. Of a tree without q: deterministic."""
    if context.allowed is None or not len(draft.tree):
        return draft
    output, tree = context.tokens[context.prompt_len :], draft.tree
    place, path = {ROOT: ROOT}, dict[int, list[int]]({ROOT: []})
    for node, (token, above) in enumerate(zip(tree.token.tolist(), tree.parent.tolist(), strict=True)):
        rows = context.allowed.rows(output, [path[above]]) if above in place else None
        if above in place and (rows is None or allows(rows[0], token)):
            place[node], path[node] = len(place) - 1, [*path[above], token]
    allowed = [node for node in place if node != ROOT]
    if len(allowed) == len(tree):
        return draft
    method = draft.method
    if method is not None and len(method.confidence):
        method = replace(method, confidence=method.confidence[allowed])
    left = DraftTree.build(tree.token[allowed].tolist(), [place[int(tree.parent[node])] for node in allowed])
    return replace(draft, tree=left, method=method if allowed else None, pruned=len(tree) - len(allowed))


class TextDrafter(Drafter, ABC):
    """Drafts what followed when the text's end occurred before. Deterministic: q is a point mass."""

    def __init__(self, nodes: int, depth: int) -> None:
        self.max_nodes, self.max_depth = nodes, depth
        self._indices: dict[str, Any] = {}  # by request, of its text as it was seen last

    @abstractmethod
    def _new_index(self) -> Any:  # noqa: ANN401
        """An index of an empty text."""

    @abstractmethod
    def _continue(self, context: Context, index: Any) -> Draft:  # noqa: ANN401
        """What followed the end of a text that the index has taken in."""

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A tree of continuations for each request."""
        drafts = []
        for context in contexts:
            index = self._indices.setdefault(context.request, self._new_index())
            index.grow(context.tokens)
            drafts.append(pruned(self._continue(context, index), context))
        return drafts

    def rewind(self, request: str, tokens: int) -> bool:
        """Forget a request's text: it is taken in anew."""
        self.release(request)
        return True

    def release(self, request: str) -> None:
        """Forget a request's text."""
        self._indices.pop(request, None)
