"""What target and drafter gave at the parents that were tried, beside the verdict: likeliest tokens, entropies, ranks.

It decides nothing. The distributions are still there when a step has been judged; this keeps what a capture is put on
trial by. Only the rows that were reached are looked at, on the host, where numpy takes tens of microseconds for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify import host
from specscope.speculate.verify.inputs import VerifyBatch
from specscope.trace.records import FinalKind, ParentNotes, Verdict
from specscope.trace.tree import ROOT, DraftTree, Drawn, Floats

TOP = 4
TINY = 2.0**-126
Part = tuple[Context, Draft, Tensor]  # a request, its draft, the target's logits [n + 1, V]


def parent_notes(batch: VerifyBatch, verdicts: Sequence[Verdict], parts: Sequence[Part]) -> list[ParentNotes]:
    """One for each part of the batch that `step_batch` was made of."""
    tried = [_tried(one.tree, verdict) for one, verdict in zip(batch.inputs, verdicts, strict=True)]
    return [
        _notes(batch, i, verdicts[i], draft, nodes, [_Raw(logits[node + 1]) for node in nodes])
        for i, (nodes, (_, draft, logits)) in enumerate(zip(tried, parts, strict=True))
    ]


def _tried(tree: DraftTree, verdict: Verdict) -> list[int]:
    """The root and the accepted nodes, as far as they have children."""
    above = set(tree.parent.tolist())
    return [node for node in (ROOT, *verdict.path.tolist()) if node in above]


def _notes(
    batch: VerifyBatch, part: int, verdict: Verdict, draft: Draft, nodes: Sequence[int], raw: Sequence[_Raw]
) -> ParentNotes:
    """Of one part: the nodes whose children were tried, and what the target gave there, before any rule."""
    tree, k = draft.tree, len(nodes)
    found = _Notes(len(tree), k)
    for at, (node, row) in enumerate(zip(nodes, raw, strict=True)):
        children = tree.children(node)
        tokens = tree.token[children]
        found.target(at, row)
        found.node["raw_p"][children] = row.p(tokens)
        p = _p(batch, part, node)
        if isinstance(p, int):
            found.parent["choice"][at], found.parent["choice_p"][at] = p, 1
            found.node["rank"][children] = tokens == p
        else:
            best = int(p.argmax())
            found.parent["choice"][at], found.parent["choice_p"][at] = best, p[best]
            found.parent["entropy"][at], found.parent["varentropy"][at] = _spread(p)
            found.node["rank"][children] = _ranks(p, tokens)
        if tree.drawn[children[0]] != Drawn.DETERMINISTIC:
            q = _q(batch, part, node)
            found.parent["q_entropy"][at], found.parent["q_varentropy"][at] = _spread(q)
            found.node["q_rank"][children] = _ranks(q, tokens)
        found.drafter(at, draft, [] if node == ROOT else tree.token[tree.path_to(node)].tolist(), row)
    above = int(verdict.path[-1]) if len(verdict.path) else ROOT
    p = _p(batch, part, above)
    entropy, varentropy, share = 0.0, 0.0, float(verdict.final_p)
    if not isinstance(p, int):
        recovered = verdict.kind is FinalKind.RECOVERED
        entropy, varentropy = _spread(_residual(batch, part, above) if recovered else p)
        share = float(p[verdict.token])
    return ParentNotes(
        node=np.array(nodes, np.int32),
        **found.parent,
        **found.node,
        final_entropy=entropy,
        final_varentropy=varentropy,
        final_target_p=share,
    )


class _Notes:
    """A part's arrays while they are filled."""

    def __init__(self, nodes: int, parents: int) -> None:
        self.node: dict[str, NDArray[Any]] = {
            "raw_p": np.zeros(nodes, np.float32),
            "rank": np.zeros(nodes, np.int32),
            "q_rank": np.zeros(nodes, np.int32),
        }
        some = ("choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy", "choice_q", "outside")
        self.parent: dict[str, NDArray[Any]] = {name: np.zeros(parents, np.float32) for name in some}
        self.parent |= {name: np.zeros(parents, np.int32) for name in ("choice", "choice_rank")}
        self.parent |= {name: np.zeros((parents, 0), np.int32) for name in ("top", "draft_top")}
        self.parent |= {name: np.zeros((parents, 0), np.float32) for name in ("top_p", "draft_top_p")}

    def _keep(self, name: str, at: int, tokens: NDArray[Any], probs: Floats) -> None:
        """The likeliest tokens of a parent."""
        if not self.parent[name].shape[1]:
            parents = len(self.parent[name])
            self.parent[name] = np.zeros((parents, len(tokens)), np.int32)
            self.parent[name + "_p"] = np.zeros((parents, len(tokens)), np.float32)
        self.parent[name][at], self.parent[name + "_p"][at] = tokens, probs

    def target(self, at: int, row: _Raw) -> None:
        """The target's likeliest tokens."""
        self._keep("top", at, *row.top())

    def drafter(self, at: int, draft: Draft, path: Sequence[int], raw: _Raw) -> None:
        """The drafter's, where it is a model, and what the target's first choice has in its distribution."""
        row = draft.row(path)
        if row is None:
            return
        q = _Raw(row.logits)
        choice = int(self.parent["top"][at, 0])
        tokens, probs = q.top()
        place = np.array([choice])
        if row.d2t is not None:
            d2t = row.d2t.cpu().numpy()
            tokens, place = d2t[tokens], np.flatnonzero(d2t == choice)
            self.parent["outside"][at] = max(1 - float(raw.p(d2t).sum()), 0)
        self._keep("draft_top", at, tokens, probs)
        if len(place):
            self.parent["choice_rank"][at] = 1 + np.count_nonzero(q.weights > q.weights[place[0]])
            self.parent["choice_q"][at] = q.p(place)[0]


class _Raw:
    """A model's distribution after some tokens, before any rule. Not divided by its mass: few of its tokens are read.

    In numpy: torch would wake its threads for each row, and wait for them.
    """

    def __init__(self, logits: Tensor) -> None:
        row = logits.cpu()
        if row.dtype is torch.bfloat16:  # the upper half of a float32
            weights = (row.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
        else:
            weights = row.numpy().astype(np.float32)
        weights -= weights.max()
        np.exp(weights, out=weights)
        self.weights = weights  # [V] e^(logit - the highest logit)
        self._mass = weights.sum()

    def p(self, tokens: NDArray[Any]) -> Floats:
        """Their probabilities."""
        probs: Floats = self.weights[tokens] / self._mass
        return probs

    def top(self) -> tuple[NDArray[Any], Floats]:
        """The likeliest tokens, likeliest first, and their probabilities."""
        row, count = self.weights, min(TOP, len(self.weights))
        tokens, weights = np.zeros(count, np.int64), np.zeros(count, np.float32)
        for place in range(count):  # four times argmax is a third of numpy's partition, and an eighth of torch's topk
            tokens[place] = best = row.argmax()
            weights[place], row[best] = row[best], -1
        row[tokens] = weights  # as it was
        return tokens, weights / self._mass


def _p(batch: VerifyBatch, part: int, node: int) -> Floats | int:
    """The target's distribution below a node, as it is sampled from; of a greedy request its choice alone."""
    behind = int(batch.trees.p_row[int(batch.trees.root[part]) + node + 1])
    if batch.trees.greedy[part]:
        return int(batch.target.choices[behind])
    return batch.target.p[behind].cpu().numpy()


def _q(batch: VerifyBatch, part: int, node: int) -> Floats:
    """The distribution that a node's children were drawn from."""
    behind = int(batch.trees.q_row[int(batch.trees.root[part]) + node + 1])
    return batch.q[behind].float().cpu().numpy()


def _residual(batch: VerifyBatch, part: int, node: int) -> Floats:
    """What a recovered token was drawn from."""
    return host.residual(batch, int(batch.trees.root[part]) + node + 1).cpu().numpy()


def _spread(row: Floats) -> tuple[float, float]:
    """Entropy and varentropy of a row [V], in nats."""
    logs = np.log(np.maximum(row, TINY))
    entropy = -float(row @ logs)
    logs *= logs
    return max(entropy, 0.0), max(float(row @ logs) - entropy * entropy, 0.0)


def _ranks(row: Floats, tokens: NDArray[Any]) -> NDArray[Any]:
    """The rank of each token in a row [V], from 1; 0 where its probability is 0."""
    values = row[tokens]
    above = np.sort(row[row > values.min()])  # one pass over the row, however many tokens
    return np.where(values > 0, 1 + len(above) - np.searchsorted(above, values, "right"), 0)
