"""Calls of V1's rejection sampler as vLLM's metadata and its rule would leave them, from a seed."""

import numpy as np
import torch

from specscope.vllm.v1.call import SamplerCall


def cut(logits, top_k, top_p):
    """Top-p alone: the likeliest tokens that sum to it, the others minus infinity. In place, as vLLM's."""
    order = logits.sort(dim=-1)
    mass = order.values.softmax(-1).cumsum(-1)
    out = mass <= 1 - top_p[:, None]
    out[:, -1] = False
    return logits.masked_fill_(out.gather(1, order.indices.argsort(1)), -torch.inf)


def call(seed, drafted, temperatures, *, tokens=9, draft_probs=False, top_p=None, invalid=0.0):
    """B requests with so many drafts each. `invalid`: how many drafts are no draft, from some place in a chain on."""
    rng = torch.Generator().manual_seed(seed)
    count, requests = sum(drafted), len(drafted)
    logits = 2 * torch.randn(count + requests, tokens, generator=rng)
    of = torch.repeat_interleave(torch.arange(requests), torch.tensor(drafted))
    heat = torch.tensor(temperatures)
    greedy = bool((heat == 0).all())
    target_rows = torch.cat([torch.arange(n) + start for n, start in _spans(drafted)]).int()
    bonus_rows = torch.tensor([start + n for n, start in _spans(drafted)]).int()
    q = (2 * torch.randn(count, tokens, generator=rng)).softmax(1) if draft_probs and not greedy else None
    drafts = torch.randint(0, tokens, (count,), generator=rng) if q is None else _draw(q, rng)
    likely = torch.rand(count, generator=rng) < 0.5  # or greedy chains would be rejected at once
    drafts = torch.where(likely, logits[target_rows.long()].argmax(1), drafts).int()
    for n, start in zip(drafted, np.cumsum([0, *drafted[:-1]]), strict=True):
        if n and torch.rand(1, generator=rng) < invalid:
            drafts[start + int(torch.randint(0, n, (1,), generator=rng)) : start + n] = -1
    target = logits[target_rows.long()].clone()
    p = None
    if not greedy:
        scale = torch.where(heat == 0, 1, heat)
        target = target / scale[of][:, None]
        if top_p is not None and count:
            target = cut(target, None, torch.full((count,), top_p))
        p = target.softmax(1)
    made = SamplerCall(
        logits=logits,
        drafted=list(drafted),
        draft_tokens=drafts,
        draft_probs=q,
        target_rows=target_rows,
        bonus_rows=bonus_rows,
        temperature=None if greedy else heat,
        top_p=None if top_p is None else torch.full((requests,), top_p),
        top_k=None,
        cut=cut,
        bonus_logits=None if greedy else logits[bonus_rows.long()].clone(),
        target_logits=target,
        target_probs=p,
        coins=None if greedy else torch.rand(count, generator=rng, dtype=torch.float64),
    )
    made.output = _judge(made, heat, rng)
    return made


def _spans(drafted):
    """(drafts, first row of the logits) of each request."""
    start = 0
    for n in drafted:
        yield n, start
        start += n + 1


def _draw(p, rng):
    return torch.multinomial(p, 1, generator=rng)[:, 0] if len(p) else torch.zeros(0, dtype=torch.int64)


def _judge(made, heat, rng):
    """vLLM's rule, row by row."""
    longest = max(made.drafted, default=0)
    output = torch.full((len(made.drafted), longest + 1), -1, dtype=torch.int32)
    first = 0
    for request, n in enumerate(made.drafted):
        for at in range(n + 1):
            row, greedy = first + at, heat[request] == 0
            if at == n:
                behind = made.logits[made.bonus_rows[request]]
                p = None if greedy else made.bonuses(request, request + 1)[0]
                output[request, at] = behind.argmax() if greedy else _draw(p[None], rng)[0]
                break
            draft = int(made.draft_tokens[row])
            if greedy:
                output[request, at] = made.target_logits[row].argmax()
                if output[request, at] != draft:
                    break
                continue
            p = made.target_probs[row]
            q = torch.zeros_like(p) if made.draft_probs is None else made.draft_probs[row]
            if made.draft_probs is None and draft >= 0:
                q[draft] = 1
            if draft >= 0 and q[draft] > 0 and p[draft] / q[draft] >= made.coins[row]:
                output[request, at] = draft
                continue
            left = (p - q).clamp_min(0)
            output[request, at] = _draw((left if left.sum() > 0 else p)[None], rng)[0]
            break
        first += n
    return output
