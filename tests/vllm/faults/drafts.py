"""Faults in what is drafted, and in what becomes of a verdict."""

import os

import torch

from .noise import PROPOSER, RUNNER, probabilities
from .switch import every, fault

BASE = f"{PROPOSER}:SpecDecodeBaseProposer"
KNOWN = int(os.environ.get("FAULT_KNOWN", "2000"))  # tokens that the drafter chooses among


@fault(f"{RUNNER}.propose_draft_token_ids", "draft_position")
def one_late(original, *args, **kwargs):
    """Drafts are for one position further on: the first one of each is lost."""
    drafts = original(*args, **kwargs)
    if isinstance(drafts, list):
        return [tokens[1:] for tokens in drafts]
    return torch.cat([drafts[:, 1:], drafts[:, -1:]], dim=1)


@fault(f"{BASE}._greedy_sample", "draft_vocabulary")
def first_tokens_only(original, self, hidden):
    """The drafter chooses among the first tokens of the vocabulary."""
    return self.model.compute_logits(hidden)[:, :KNOWN].argmax(-1)


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token", "q_other_row")
def drawn_with_a_bias(original, logits, sampling, fp64=False):
    """Drafts are drawn with a bias for some tokens, which the q that judges does not have."""
    if sampling.all_greedy:
        return original(logits, sampling, fp64)
    probs = probabilities(logits, sampling)
    biased = probs.clone()
    biased[:, ::3] *= 4.0
    return torch.multinomial(biased, 1)[:, 0], probs


@fault(f"{PROPOSER}:compute_probs_and_sample_next_token", "q_temperature")
def drawn_at_another_temperature(original, logits, sampling, fp64=False):
    """Drafts are drawn at a higher temperature than q says."""
    if sampling.all_greedy:
        return original(logits, sampling, fp64)
    probs = probabilities(logits, sampling)
    return torch.multinomial(probs.pow(0.6), 1)[:, 0], probs


@fault(f"{RUNNER}.propose_draft_token_ids", "draft_placeholders")
def placeholders(original, self, *args, **kwargs):
    """Drafts are padded with token 0 to their full length, and the padding is judged."""
    drafts, length = original(self, *args, **kwargs), self.speculative_config.num_speculative_tokens
    if isinstance(drafts, list):
        return [tokens + [0] * (length - len(tokens)) for tokens in drafts]
    drafts = drafts.clone()
    drafts[:, length // 2 :] = 0
    return drafts


@fault(f"{RUNNER}._bookkeeping_sync", "token_lost")
def token_lost(original, *args, **kwargs):
    """Every sixth step the first request's last token is lost where it has more than one."""
    found = list(original(*args, **kwargs))
    tokens = found[3]
    if every(6, "token_lost") and tokens and len(tokens[0]) > 1:
        found[3] = [tokens[0][:-1], *tokens[1:]]
    return tuple(found)
