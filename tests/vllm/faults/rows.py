"""Faults in the numbers that the sampler is given: rows of p, rows of q, and the rules of sampling."""

import dataclasses

import torch

from .noise import RUNNER
from .rejection import SAMPLER, chains
from .switch import every, fault

Q, P = f"{RUNNER}._get_spec_decode_draft_probs", f"{SAMPLER}:apply_sampling_constraints"
kept: dict[str, torch.Tensor | None] = {}


def of_next_request(rows, ends):
    """Each request's rows are the next one's, as far as those go."""
    told, out = list(chains(ends)), rows.clone()
    for (_, first, end), (_, other, last) in zip(told, told[1:] + told[:1], strict=True):
        count = min(end - first, last - other)
        out[first : first + count] = rows[other : other + count]
    return out


def of_next_row(rows, ends):
    """A row is the one behind it, but for the last of each request."""
    out = rows.clone()
    for _, first, end in chains(ends):
        out[first : end - 1] = rows[first + 1 : end]
    return out


@fault(P, "rows_swapped", "p_other_row")
def p_of_the_next_request(original, logits, ends, sampling):
    """A request's drafts are judged by the target's rows of the next request in the batch."""
    return original(of_next_request(logits, ends), ends, sampling)


@fault(P, "p_other_row")
def p_of_the_next_row(original, logits, ends, sampling):
    """A draft is judged by the row behind it, not by its parent's."""
    return original(of_next_row(logits, ends), ends, sampling)


@fault(P, "rules_wrong")
def temperature_left_out(original, logits, ends, sampling):
    """Drafts are judged at temperature 1, whatever was asked for; the bonus token is drawn as it should be."""
    if sampling.temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=torch.ones_like(sampling.temperature))
    return original(logits, ends, sampling)


@fault(f"{SAMPLER}:RejectionSampler._combine_outputs_with_spec_tokens", "rules_wrong")
def penalties_without_drafts(original, outputs, drafted=None):
    """Penalties at a draft's row do not count the drafts before it."""
    if drafted is None:
        return outputs
    return [output for output, own in zip(outputs, drafted, strict=False) for _ in own]


@fault(Q, "q_other_row")
def q_of_another_request(original, self, metadata):
    """A request is judged with the next one's q."""
    q = original(self, metadata)
    return q if q is None else of_next_request(q, metadata.cu_num_draft_tokens).contiguous()


@fault(Q, "q_other_row")
def q_shifted(original, self, metadata):
    """A draft is judged with the q of the draft behind it; the last with its own."""
    q = original(self, metadata)
    return q if q is None else of_next_row(q, metadata.cu_num_draft_tokens)


@fault(Q, "q_other_row")
def q_of_the_step_before(original, self, metadata):
    """Drafts are judged with the q of the step before, where its shape is the same."""
    q = original(self, metadata)
    before, kept["q"] = kept.get("q"), q
    return before if before is not None and q is not None and before.shape == q.shape else q


@fault(Q, "q_dropped")
def q_dropped(original, self, metadata):
    """Drafts are sampled, and judged as if they were not: their distribution gets lost on the way."""
    return


def judged_by(q, change):
    """Another q, normalised."""
    if q is None:
        return q
    other = change(q.clone())
    return (other / other.sum(-1, keepdim=True)).contiguous()


@fault(Q, "q_temperature")
def q_at_another_temperature(original, self, metadata):
    """The q that judges is at a higher temperature than the one that drafts were drawn at."""
    return judged_by(original(self, metadata), lambda q: q.clamp_min(1e-30).pow(0.6))


@fault(Q, "q_other_row")
def q_with_a_bias(original, self, metadata):
    """The q that judges has a bias for some tokens, which drafts were drawn without."""

    def change(q):
        q[:, ::3] *= 4.0
        return q

    return judged_by(original(self, metadata), change)


@fault(f"{RUNNER}._sample", "not_a_number")
def nan_now_and_then(original, self, logits, metadata):
    """Every fifth step the target's logits of the first request are no numbers."""
    if every(5, "nan_now_and_then") and logits is not None and metadata is not None:
        logits = logits.clone()
        logits[: metadata.num_draft_tokens[0] + 1] = float("nan")
    return original(self, logits, metadata)
