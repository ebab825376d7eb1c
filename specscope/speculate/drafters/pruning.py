"""Drafts from a text, less what the request's form does not allow: it would be rejected for certain."""

from __future__ import annotations

from dataclasses import replace

from specscope.speculate.allowed import allows
from specscope.speculate.drafters.base import Context, Draft
from specscope.trace.tree import ROOT, DraftTree


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
    kept = [node for node in place if node != ROOT]
    if len(kept) == len(tree):
        return draft
    method = draft.method
    if method is not None and len(method.confidence):
        method = replace(method, confidence=method.confidence[kept])
    left = DraftTree.build(tree.token[kept].tolist(), [place[int(tree.parent[node])] for node in kept])
    return replace(draft, tree=left, method=method if kept else None, pruned=len(tree) - len(kept))
