"""Faults in what is drafted."""

from __future__ import annotations

import os

import torch

from .noise import PROPOSER
from .switch import fault

BASE = f"{PROPOSER}:SpecDecodeBaseProposer"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
KNOWN = int(os.environ.get("FAULT_KNOWN", "2000"))  # tokens that the drafter chooses among


@fault(f"{RUNNER}.propose_draft_token_ids")
def one_late(original):
    """Drafts are for one position further on: the first one of each is lost."""

    def propose(self, *args, **kwargs):
        drafts = original(self, *args, **kwargs)
        if isinstance(drafts, list):
            return [tokens[1:] for tokens in drafts]
        return torch.cat([drafts[:, 1:], drafts[:, -1:]], dim=1)

    return propose


@fault(f"{BASE}._greedy_sample")
def first_tokens_only(original):
    """The drafter chooses among the first tokens of the vocabulary."""

    def sample(self, hidden):
        return self.model.compute_logits(hidden)[:, :KNOWN].argmax(-1)

    return sample


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token")
def drawn_with_a_bias(original):
    """Drafts are drawn with a bias for some tokens, which the q that judges does not have."""

    def compute(logits, sampling, fp64=False):
        if sampling.all_greedy:
            return original(logits, sampling, fp64)
        probs = (logits / sampling.temperature.view(-1, 1)).softmax(-1, dtype=torch.float32)
        biased = probs.clone()
        biased[:, ::3] *= 4.0
        return torch.multinomial(biased, 1)[:, 0], probs

    return compute


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token")
def drawn_at_another_temperature(original):
    """Drafts are drawn at a higher temperature than q says."""

    def compute(logits, sampling, fp64=False):
        if sampling.all_greedy:
            return original(logits, sampling, fp64)
        probs = (logits / sampling.temperature.view(-1, 1)).softmax(-1, dtype=torch.float32)
        return torch.multinomial(probs.pow(0.6), 1)[:, 0], probs

    return compute


@fault(f"{RUNNER}.propose_draft_token_ids")
def placeholders(original):
    """Drafts are padded with token 0 to their full length, and the padding is judged."""

    def propose(self, *args, **kwargs):
        drafts, length = original(self, *args, **kwargs), self.speculative_config.num_speculative_tokens
        if isinstance(drafts, list):
            return [tokens + [0] * (length - len(tokens)) for tokens in drafts]
        drafts = drafts.clone()
        drafts[:, length // 2 :] = 0
        return drafts

    return propose
