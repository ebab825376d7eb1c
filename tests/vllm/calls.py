"""Calls of vLLM's rejection sampler as its hooks gather them, from plain numbers."""

import torch

from specscope.vllm.v1.call import SamplerCall

V = 11


def call(drafts, *, temperature, probabilistic=False, seed=0, vocabulary=V):
    """`drafts`: each request's tokens; `temperature`: of each. What vLLM would sample is worked out as it does it."""
    generator = torch.Generator().manual_seed(seed)
    rows, requests = sum(map(len, drafts)), len(drafts)
    logits = torch.randn(rows + requests, vocabulary, generator=generator) * 2
    bonus = [sum(len(one) + 1 for one in drafts[: at + 1]) - 1 for at in range(requests)]
    target = [row for row in range(rows + requests) if row not in bonus]
    of = [at for at, one in enumerate(drafts) for _ in one]
    warm = torch.tensor([1.0 if t == 0 else t for t in temperature])
    target_logits = logits[target] / (warm[of][:, None] if rows else 1)
    all_greedy = not any(temperature)
    one = SamplerCall(
        logits=logits,
        drafted=[len(tokens) for tokens in drafts],
        draft_tokens=torch.tensor([token for tokens in drafts for token in tokens], dtype=torch.int32),
        draft_probs=torch.randn(rows, vocabulary, generator=generator).softmax(-1) if probabilistic else None,
        target_rows=torch.tensor(target, dtype=torch.int32),
        bonus_rows=torch.tensor(bonus, dtype=torch.int32),
        temperature=None if all_greedy else torch.tensor([float(t) for t in temperature]),
        top_p=None,
        top_k=None,
        cut=None,
        bonus_logits=None if all_greedy else logits[bonus].clone(),
        target_logits=target_logits,
        target_probs=None if all_greedy else target_logits.softmax(-1),
        coins=None if all_greedy else torch.rand(rows, generator=generator, dtype=torch.float64),
    )
    one.output = _sampled(one, drafts, temperature, generator)
    return one


def _sampled(one, drafts, temperature, generator):
    """vLLM's rule: greedy rows accept the likeliest token, others by ratio; then the recovered or the bonus token."""
    output = torch.full((len(drafts), max(map(len, drafts), default=0) + 1), -1, dtype=torch.int32)
    row = 0
    for at, tokens in enumerate(drafts):
        first, done = row, False
        row += len(tokens)
        for place, token in enumerate(tokens):
            here = first + place
            if temperature[at] == 0:
                choice = int(one.target_logits[here].argmax())
                output[at, place], done = choice, choice != token
            else:
                p = one.target_probs[here]
                q = one.draft_probs[here] if one.draft_probs is not None else torch.eye(len(p))[max(token, 0)]
                done = token < 0 or not p[token] / q[token] >= one.coins[here]
                left = (p - q).clamp(min=0)
                output[at, place] = int(torch.multinomial(left, 1, generator=generator)) if done else token
            if done:
                break
        if not done:
            bonus = one.logits[one.bonus_rows[at]]
            warm = bonus / (temperature[at] or 1)
            drawn = torch.multinomial(warm.softmax(-1), 1, generator=generator)
            output[at, len(tokens)] = int(bonus.argmax()) if temperature[at] == 0 else int(drawn)
    return output
