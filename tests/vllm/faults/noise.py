"""Faults in what is random: coins, and the noise that tokens are drawn with."""

from __future__ import annotations

import torch

from .rejection import SAMPLER
from .switch import fault

PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
kept: dict[str, list] = {"noise": []}


def probabilities(logits, sampling):
    """q as drafts are drawn from it."""
    return (logits / sampling.temperature.view(-1, 1)).softmax(-1, dtype=torch.float32)


@fault(f"{SAMPLER}:generate_uniform_probs", "coins")
def coins_of_a_request_shared(original, count, counts, generators, device):
    """All drafts of a request have one coin."""
    coins, first = original(count, counts, generators, device), 0
    for length in counts:
        coins[first : first + length] = coins[first : first + 1]
        first += length
    return coins


@fault(f"{SAMPLER}:generate_uniform_probs", "coins")
def coins_of_requests_shared(original, count, counts, generators, device):
    """All requests of a step have the same coins."""
    coins, first = original(count, counts, generators, device), 0
    row = coins[: max(counts)].clone() if counts else coins
    for length in counts:
        coins[first : first + length] = row[:length] if len(row) >= length else coins[first : first + length]
        first += length
    return coins


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token", "coins")
def noise_reused(original, logits, sampling, fp64=False):
    """The recovered token is drawn with the noise that drew the draft which was rejected."""
    if sampling.all_greedy:
        return original(logits, sampling, fp64)
    probs = probabilities(logits, sampling)
    noise = torch.empty_like(probs).exponential_()
    kept["noise"].append(noise)
    return (probs / noise).argmax(-1), probs


@fault(f"{RUNNER}.propose_draft_token_ids")
def noise_reused(original, self, *args, **kwargs):  # noqa: F811 - the same fault in another place
    """A step's noise, by depth."""
    kept["noise"] = []
    drafts = original(self, *args, **kwargs)
    kept["names"] = list(self.input_batch.req_ids)
    return drafts


@fault(f"{RUNNER}._sample")
def noise_reused(original, self, logits, metadata):  # noqa: F811
    """Whose rows the sampler gets."""
    kept["now"] = list(self.input_batch.req_ids)
    return original(self, logits, metadata)


@fault(f"{SAMPLER}:sample_recovered_tokens")
def noise_reused(original, longest, counts, ends, drafts, q, p, *rest):  # noqa: F811
    """The draw."""
    if q is None or not kept["noise"]:
        return original(longest, counts, ends, drafts, q, p, *rest)
    tokens, row = torch.empty_like(drafts), 0
    for name, count in zip(kept["now"], counts, strict=True):
        for depth in range(count):
            own = kept["noise"][depth][kept["names"].index(name)]
            tokens[row] = ((p[row] - q[row]).clamp_min(0) / own).argmax()
            row += 1
    return tokens
