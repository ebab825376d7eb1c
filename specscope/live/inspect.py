"""The full distributions at a node of the step that an engine is in: too large for a trace, so looked at on demand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.engine.engine import Engine
from specscope.errors import UserError
from specscope.speculate.sampling import distributions, probabilities, shaped
from specscope.speculate.verify.distribution import Dense, Point
from specscope.trace.params import SamplingParams
from specscope.trace.tree import ROOT
from specscope.trace.vocabulary import Vocabulary

SHOWN = 8  # of the likeliest tokens
COLUMN = 18  # cells: three of them stand in half a screen


@dataclass(frozen=True)
class Look:
    """What the target and the drafter thought where a node's token was drawn. Probabilities are float32 [V]."""

    token: int
    raw: Tensor  # softmax of the target's logits as they are
    p: Tensor  # the target's, as it is sampled from
    q: Tensor | None  # the drafter's, as it was sampled from; None for deterministic drafts
    removed: list[tuple[str, int, float]]  # by each rule that shapes p: its name, tokens it removed, their mass


def look(engine: Engine, request: str, node: int) -> Look:
    """The distributions behind a node of the request. The engine must be past the forward phase of its step."""
    now = engine.current
    if now is None or not now.logits:
        raise UserError("the engine holds no logits now: it is not between forward and commit")
    at = next((i for i, part in enumerate(now.plan.parts) if part.request.id == request), None)
    if at is None or node >= len(now.drafts[at].tree):
        raise UserError(f"{request} has no node {node} in this step")
    scheduled, draft, tree = now.plan.parts[at].request, now.drafts[at], now.drafts[at].tree
    above = int(tree.parent[node])
    logits = now.logits[at][above + 1].float()
    params, counts = scheduled.params, scheduled.context.counts
    path = [] if above == ROOT else [int(tree.token[i]) for i in tree.path_to(above)]
    (found,) = distributions(logits[None], params, counts, [path], engine.runner.cache.backend)
    if isinstance(found, Point):
        p = torch.zeros_like(logits)
        p[found.token] = 1
    else:
        assert isinstance(found, Dense)
        p = found.probs
    q = draft.q.get(above)
    moved = shaped(logits[None], params, counts, [path])[0]
    return Look(
        token=int(tree.token[node]),
        raw=logits.softmax(-1),
        p=p,
        q=None if q is None else q.probs,
        removed=list(_removed(moved, params)),
    )


def _removed(logits: Tensor, params: SamplingParams) -> Iterator[tuple[str, int, float]]:
    """What each rule takes away, one after another."""
    if params.greedy:
        best = logits.softmax(-1)
        yield "temperature 0", len(logits) - 1, float(1 - best.max())
        return
    rows = (logits / params.temperature)[None]
    whole = rows.softmax(-1)[0]
    left = torch.ones_like(whole, dtype=torch.bool)
    for name, one in (
        (f"min-p {params.min_p}", {"min_p": params.min_p}),
        (f"top-k {params.top_k}", {"min_p": params.min_p, "top_k": params.top_k}),
        (f"top-p {params.top_p}", {"min_p": params.min_p, "top_k": params.top_k, "top_p": params.top_p}),
    ):
        kept = probabilities(rows, SamplingParams(temperature=params.temperature, **one))[0] > 0  # type: ignore[arg-type]
        gone = left & ~kept
        if bool(gone.any()):
            yield name, int(gone.sum()), float(whole[gone].sum())
        left = left & kept


def describe(found: Look, vocabulary: Vocabulary) -> str:
    """As text: top tokens side by side, entropies, distances, ranks."""
    lines = ["".join(f"{name:<{COLUMN}}" for name in ("target, raw", "sampled from", "drafter")).rstrip()]
    columns = [found.raw, found.p, found.q]
    tops = [None if x is None else x.topk(min(SHOWN, len(x))) for x in columns]
    for row in range(SHOWN):
        cells = []
        for top in tops:
            if top is None or row >= len(top.values) or float(top.values[row]) <= 0:
                cells.append(" " * COLUMN)
                continue
            token = int(top.indices[row])
            mark = "▸" if token == found.token else " "
            cells.append(f"{mark}{vocabulary.show(token)[:9]:<10}{float(top.values[row]):.4f}".ljust(COLUMN))
        lines.append("".join(cells).rstrip())
    lines += [f"{name} removed {count:,} tokens of mass {mass:.4g}" for name, count, mass in found.removed]
    rank = 1 + int((found.p > found.p[found.token]).sum())
    lines.append(
        f"rank of the drafted token in p: {rank}; entropy of p {_entropy(found.p):.4f}, raw {_entropy(found.raw):.4f}"
    )
    if found.q is not None:
        choice = int(found.p.argmax())
        q_rank = 1 + int((found.q > found.q[choice]).sum())
        both = (found.p > 0) & (found.q > 0)
        kl = float((found.p[both] * (found.p[both] / found.q[both]).log()).sum())
        if bool(((found.p > 0) & (found.q == 0)).any()):
            kl = float("inf")
        tv = float((found.p - found.q).abs().sum() / 2)
        lines.append(
            f"rank of the target's choice in q: {q_rank}; entropy of q {_entropy(found.q):.4f}; "
            f"KL(p, q) {kl:.4f}, total variation {tv:.4f} (accepted at best: {1 - tv:.4f})"
        )
    return "\n".join(line for line in lines if line)


def _entropy(probs: Tensor) -> float:
    """In nats."""
    some = probs[probs > 0]
    return abs(float((some * some.log()).sum()))
