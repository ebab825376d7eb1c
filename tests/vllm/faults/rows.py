"""Faults in the numbers that the sampler is given: rows of p, rows of q, and the rules of sampling."""

from __future__ import annotations

import torch

from .rejection import SAMPLER, chains
from .switch import fault

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


def of_next_request(rows, ends):
    """Each request's rows are the next one's, as far as those go."""
    told, out = list(chains(ends)), rows.clone()
    for (_, first, end), (_, other, last) in zip(told, told[1:] + told[:1], strict=True):
        count = min(end - first, last - other)
        out[first : first + count] = rows[other : other + count]
    return out


@fault(f"{SAMPLER}:apply_sampling_constraints")
def p_of_the_next_request(original):
    """A request's drafts are judged by the target's rows of the next request in the batch."""

    def apply(logits, ends, sampling):
        return original(of_next_request(logits, ends), ends, sampling)

    return apply


@fault(f"{SAMPLER}:apply_sampling_constraints")
def p_of_the_next_row(original):
    """A draft is judged by the row behind it, not by its parent's."""

    def apply(logits, ends, sampling):
        moved = logits.clone()
        for _, first, end in chains(ends):
            moved[first : end - 1] = logits[first + 1 : end]
        return original(moved, ends, sampling)

    return apply


@fault(f"{SAMPLER}:apply_sampling_constraints")
def temperature_left_out(original):
    """Drafts are judged at temperature 1, whatever was asked for; the bonus token is drawn as it should be."""

    def apply(logits, ends, sampling):
        if sampling.temperature is None:
            return original(logits, ends, sampling)
        from dataclasses import replace

        return original(logits, ends, replace(sampling, temperature=torch.ones_like(sampling.temperature)))

    return apply


@fault(f"{SAMPLER}:RejectionSampler._combine_outputs_with_spec_tokens")
def penalties_without_drafts(original):
    """Penalties at a draft's row do not count the drafts before it."""

    def combine(outputs, drafted=None):
        if drafted is None:
            return outputs
        return [output for output, own in zip(outputs, drafted, strict=False) for _ in own]

    return combine


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_of_another_request(original):
    """A request is judged with the next one's q."""

    def draft_probs(self, metadata):
        q = original(self, metadata)
        return q if q is None else of_next_request(q, metadata.cu_num_draft_tokens).contiguous()

    return draft_probs


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_shifted(original):
    """A draft is judged with the q of the draft behind it; the last with its own."""

    def draft_probs(self, metadata):
        q = original(self, metadata)
        if q is None:
            return q
        out = q.clone()
        for _, first, end in chains(metadata.cu_num_draft_tokens):
            out[first : end - 1] = q[first + 1 : end]
        return out

    return draft_probs


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_of_the_step_before(original):
    """Drafts are judged with the q of the step before, where its shape is the same."""
    kept = [None]

    def draft_probs(self, metadata):
        q = original(self, metadata)
        before, kept[0] = kept[0], q
        return before if before is not None and q is not None and before.shape == q.shape else q

    return draft_probs


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_dropped(original):
    """Drafts are sampled, and judged as if they were not: their distribution gets lost on the way."""
    return lambda self, metadata: None


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_at_another_temperature(original):
    """The q that judges is at a higher temperature than the one that drafts were drawn at."""

    def draft_probs(self, metadata):
        q = original(self, metadata)
        if q is None:
            return q
        flat = q.clamp_min(1e-30).pow(0.6)
        return (flat / flat.sum(-1, keepdim=True)).contiguous()

    return draft_probs


@fault(f"{RUNNER}._get_spec_decode_draft_probs")
def q_with_a_bias(original):
    """The q that judges has a bias for some tokens, which drafts were drawn without."""

    def draft_probs(self, metadata):
        q = original(self, metadata)
        if q is None:
            return q
        biased = q.clone()
        biased[:, ::3] *= 4.0
        return (biased / biased.sum(-1, keepdim=True)).contiguous()

    return draft_probs


@fault(f"{RUNNER}._sample")
def nan_now_and_then(original):
    """Every fifth step the target's logits of the first request are no numbers."""
    steps = [0]

    def _sample(self, logits, metadata):
        steps[0] += 1
        if steps[0] % 5 == 0 and logits is not None and metadata is not None:
            logits = logits.clone()
            logits[: metadata.num_draft_tokens[0] + 1] = float("nan")
        return original(self, logits, metadata)

    return _sample
