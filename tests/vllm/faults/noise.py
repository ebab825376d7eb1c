"""Faults in what is random: coins, and the noise that tokens are drawn with."""

from __future__ import annotations

import torch

from .rejection import SAMPLER
from .switch import fault

PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
kept: dict[str, list[torch.Tensor]] = {"noise": []}


@fault(f"{SAMPLER}:generate_uniform_probs")
def coins_of_a_request_shared(original):
    """All drafts of a request have one coin."""

    def generate(count, counts, generators, device):
        coins, first = original(count, counts, generators, device), 0
        for length in counts:
            coins[first : first + length] = coins[first : first + 1]
            first += length
        return coins

    return generate


@fault(f"{SAMPLER}:generate_uniform_probs")
def coins_of_requests_shared(original):
    """All requests of a step have the same coins."""

    def generate(count, counts, generators, device):
        coins, first = original(count, counts, generators, device), 0
        row = coins[: max(counts)].clone() if counts else coins
        for length in counts:
            coins[first : first + length] = row[:length] if len(row) >= length else coins[first : first + length]
            first += length
        return coins

    return generate


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token")
def noise_reused(original):
    """The recovered token is drawn with the noise that drew the draft which was rejected."""

    def compute(logits, sampling, fp64=False):
        if sampling.all_greedy:
            return original(logits, sampling, fp64)
        probs = (logits / sampling.temperature.view(-1, 1)).softmax(-1, dtype=torch.float32)
        noise = torch.empty_like(probs).exponential_()
        kept["noise"].append(noise)
        return (probs / noise).argmax(-1), probs

    return compute


@fault("vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids")
def noise_reused(original):  # noqa: F811 - the same fault in another place
    """A step's noise, by depth."""

    def propose(self, *args, **kwargs):
        kept["noise"] = []
        drafts = original(self, *args, **kwargs)
        kept["names"] = list(self.input_batch.req_ids)
        return drafts

    return propose


@fault("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample")
def noise_reused(original):  # noqa: F811
    """Whose rows the sampler gets."""

    def _sample(self, logits, metadata):
        kept["now"] = list(self.input_batch.req_ids)
        return original(self, logits, metadata)

    return _sample


@fault(f"{SAMPLER}:sample_recovered_tokens")
def noise_reused(original):  # noqa: F811
    """The draw."""

    def sample_recovered_tokens(longest, counts, ends, drafts, q, p, sampling, device, fp64=False):
        if q is None or not kept["noise"]:
            return original(longest, counts, ends, drafts, q, p, sampling, device, fp64)
        tokens, row = torch.empty_like(drafts), 0
        for name, count in zip(kept["now"], counts, strict=True):
            for depth in range(count):
                own = kept["noise"][depth][kept["names"].index(name)]
                tokens[row] = ((p[row] - q[row]).clamp_min(0) / own).argmax()
                row += 1
        return tokens

    return sample_recovered_tokens
