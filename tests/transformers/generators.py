"""generate() with each kind of candidate generator, and what it gave."""

from dataclasses import dataclass, field
from functools import cache

import torch

from tests.transformers.models import alike, prompt, tiny_llama

SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40}
GREEDY = {"do_sample": False}


@dataclass(frozen=True)
class Case:
    """`drafter`: assistant, or none of its own."""

    arguments: dict = field(default_factory=dict)
    assistant: bool = True


CASES = {
    "assistant, greedy": Case(GREEDY),
    "assistant, sampled": Case(SAMPLED | {"top_p": 0.95}),
    "assistant, plain": Case({"do_sample": True, "top_k": 0}),
    "ensemble, sampled": Case(SAMPLED | {"assistant_ensemble_weight": 0.5}),
    "ensemble, greedy": Case(GREEDY | {"assistant_ensemble_weight": 0.5}),
    "lookup, greedy": Case(GREEDY | {"prompt_lookup_num_tokens": 4}, False),
    "lookup, sampled": Case(SAMPLED | {"top_k": 3, "prompt_lookup_num_tokens": 4}, False),
    "early exit, greedy": Case(GREEDY | {"assistant_early_exit": 1}, False),
    "early exit, sampled": Case(SAMPLED | {"assistant_early_exit": 1}, False),
}


@cache
def models():
    """(A target, a drafter that is like it and drafts four tokens at once)."""
    target = tiny_llama(0)
    drafter = alike(target)
    drafter.generation_config.assistant_confidence_threshold = 0
    drafter.generation_config.num_assistant_tokens = 4
    return target, drafter


def generate(case, seed=7, tokens=32, **more):
    """(The tokens, the next random numbers)."""
    target, drafter = models()
    arguments = case.arguments | ({"assistant_model": drafter} if case.assistant else {}) | more
    torch.manual_seed(seed)
    # a text that repeats itself, for lookups
    ids = torch.cat([prompt(seed=seed)[:, :6]] * 2, dim=1)
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **arguments)
    return out[0].tolist(), torch.rand(3).tolist()
