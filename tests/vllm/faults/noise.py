"""Faults in what is random: coins, and the noise that tokens are drawn with."""

import zlib

import torch

from .rejection import SAMPLER
from .switch import fault

PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
kept = {"steps": 0}


def probabilities(logits, sampling):
    """q as drafts are drawn from it."""
    return (logits / sampling.temperature.view(-1, 1)).softmax(-1, dtype=torch.float32)


@fault(f"{SAMPLER}:generate_uniform_probs", "coins")
def coins_of_a_request_shared(original, count, counts, generators, device):
    """All drafts of a request have one coin."""
    coins = original(count, counts, generators, device)
    return torch.cat([own[:1].expand(len(own)) for own in coins.split(counts)] or [coins])


@fault(f"{SAMPLER}:generate_uniform_probs", "coins")
def coins_of_requests_shared(original, count, counts, generators, device):
    """All requests of a step have the same coins."""
    coins = original(count, counts, generators, device)
    row = coins[: max(counts, default=0)]
    return torch.cat([row[: len(own)] if len(row) >= len(own) else own for own in coins.split(counts)] or [coins])


def noise_of(q):
    """[N, V] exponential noise, which follows from the rows and the step: whoever has a row has its noise."""
    rows = [(row, zlib.crc32(row.numpy().tobytes()) + kept["steps"]) for row in q]
    return torch.stack([row.clone().exponential_(generator=torch.Generator().manual_seed(seed)) for row, seed in rows])


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token", "coins")
def noise_reused(original, logits, sampling, fp64=False):
    """The recovered token is drawn with the noise that drew the draft which was rejected."""
    if sampling.all_greedy:
        return original(logits, sampling, fp64)
    probs = probabilities(logits, sampling)
    return (probs / noise_of(probs)).argmax(-1), probs


@fault(f"{SAMPLER}:sample_recovered_tokens")
def noise_reused(original, longest, counts, ends, drafts, q, p, *rest):  # noqa: F811 - the same fault in another place
    """The other draw; then a step begins."""
    if q is None:
        return original(longest, counts, ends, drafts, q, p, *rest)
    tokens = ((p - q).clamp_min(0) / noise_of(q)).argmax(-1)
    kept["steps"] += 1
    return tokens.to(drafts.dtype)
