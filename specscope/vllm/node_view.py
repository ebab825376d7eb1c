"""The whole distributions of target and drafter where vLLM's sampler judged a draft."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specscope.debug.views import NodeView, Removed, contradiction, viewed
from specscope.trace.record.records import RequestStep
from specscope.trace.record.tree import Floats
from specscope.vllm.v1.call import SamplerCall


def view_node(call: SamplerCall, row: int, step: int, part: RequestStep, node: int, drafter: Tensor | None) -> NodeView:
    """`row`: the request's place in the batch; `drafter`: its logits [V] of this draft, where they are known."""
    draft, token = sum(call.drafted[:row]) + node, int(part.tree.token[node])
    logits = call.logits[int(call.target_rows[draft])]
    raw, p = _softmax(logits), _sampled_from(call, row, draft)
    thought = None if drafter is None else _softmax(drafter)
    q = None if call.greedy(row) or call.draft_probs is None else call.draft_probs[draft].float().cpu().numpy()
    return viewed(
        request=part.request,
        step=step,
        index=part.index,
        node=node,
        token=token,
        raw=raw,
        p=p,
        draft=thought,
        q=q,
        outside=thought is not None and not thought[token] > 0,
        removed=_removed(call, row, logits, p),
        notes=_contradictions(part, node, float(p[token])),
    )


def _sampled_from(call: SamplerCall, row: int, draft: int) -> Floats:
    """[V] p at a drafted row: one-hot where the request is greedy."""
    if not call.greedy(row):
        return call.target(draft)
    assert call.target_logits is not None
    p = np.zeros(call.target_logits.shape[1], np.float32)
    p[int(call.target_logits[draft].argmax())] = 1
    return p


def _softmax(logits: Tensor) -> Floats:
    return logits.float().softmax(-1).cpu().numpy()


def _removed(call: SamplerCall, row: int, logits: Tensor, p: Floats) -> tuple[Removed, ...]:
    """What vLLM's rules removed, all together: vLLM keeps only the row before and the row after them."""
    if call.greedy(row):
        return (Removed("temperature 0", len(p) - 1, float(1 - _softmax(logits).max())),)
    assert call.temperature is not None
    whole = _softmax(logits.float() / call.temperature[row])
    gone = (p == 0) & (whole > 0)
    rules = [] if call.top_k is None else [f"top-k {int(call.top_k[row])}"]
    rules += [] if call.top_p is None else [f"top-p {float(call.top_p[row]):g}"]
    rule = ", ".join(rules) or "masks"
    return (Removed(rule, int(gone.sum()), float(whole[gone].sum())),) if gone.any() else ()


def _contradictions(part: RequestStep, node: int, p: float) -> tuple[str, ...]:
    verdict = part.verdict
    if verdict is None or abs(p - float(verdict.p[node])) <= 1e-6:
        return ()
    return (contradiction(node, float(verdict.p[node]), p),)
