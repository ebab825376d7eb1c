"""Faults in vLLM's rejection sampler: what is accepted, by which numbers, and what is drawn then."""

from __future__ import annotations

import dataclasses

import torch

from .switch import fault

SAMPLER = "vllm.v1.sample.rejection_sampler"


def chains(ends):
    """(request, its first row, the row behind its last) of each request with drafts. `ends`: their running sum."""
    first = 0
    for request, end in enumerate(ends.tolist()):
        if end > first:
            yield request, first, end
        first = end


def accepted(output, request):
    """How many of a request's drafts are accepted in the sampler's output."""
    return int((output[request] >= 0).sum()) - 1


@fault(f"{SAMPLER}:_rejection_greedy_sample")
def one_more_greedy(original):
    """One draft more is accepted than was judged to be right."""

    def sample(output, ends, drafts, choices, bonus, is_greedy, *rest):
        original(output, ends, drafts, choices, bonus, is_greedy, *rest)
        for request, first, end in chains(ends):
            count = accepted(output, request)
            if first + count >= end or (is_greedy is not None and not is_greedy[request]) or drafts[first + count] < 0:
                continue
            output[request, count] = drafts[first + count]
            behind = first + count + 1
            output[request, count + 1] = choices[behind] if behind < end else bonus[request, 0]

    return sample


@fault(f"{SAMPLER}:_rejection_random_sample")
def one_more_sampled(original):
    """Likewise of sampled requests."""

    def sample(output, ends, drafts, q, p, bonus, recovered, *rest):
        original(output, ends, drafts, q, p, bonus, recovered, *rest)
        for request, first, end in chains(ends):
            count = accepted(output, request)
            if first + count < end and drafts[first + count] >= 0:
                output[request, count] = drafts[first + count]
                behind = first + count + 1
                output[request, count + 1] = recovered[behind] if behind < end else bonus[request, 0]

    return sample


@fault(f"{SAMPLER}:_rejection_greedy_sample")
def greedy_rejection_ignored(original):
    """At depth 1 every draft is accepted, whatever the target's choice is; what follows is judged as ever."""

    def sample(output, ends, drafts, choices, bonus, is_greedy, *rest):
        choices = choices.clone()
        for _, first, _ in chains(ends):
            choices[first] = drafts[first]
        return original(output, ends, drafts, choices, bonus, is_greedy, *rest)

    return sample


@fault(f"{SAMPLER}:rejection_sample")
def counts_of_others(original):
    """Each request gets the count of accepted drafts of the next one in the batch, and its own tokens up to there."""

    def rejection_sample(drafts, counts, longest, ends, q, logits, bonus, *rest, **kwargs):
        output = original(drafts, counts, longest, ends, q, logits, bonus, *rest, **kwargs)
        told = list(chains(ends))
        of = [accepted(output, request) for request, _, _ in told]
        for (request, first, end), count in zip(told, of[1:] + of[:1], strict=True):
            own, count = accepted(output, request), min(count, end - first)
            if count > own:
                output[request, own:count] = drafts[first + own : first + count].to(output.dtype)
                behind = first + count
                output[request, count] = logits[behind].argmax() if behind < end else bonus[request, 0]
            output[request, count + 1 :] = -1
        return output

    return rejection_sample


@fault(f"{SAMPLER}:_rejection_random_sample")
def decided_by_another_p(original):
    """What is handed on as p is right; what decides is p at another temperature."""

    def sample(output, ends, drafts, q, p, *rest):
        flat = p.clamp_min(1e-30).pow(0.4)
        return original(output, ends, drafts, q, (flat / flat.sum(-1, keepdim=True)).contiguous(), *rest)

    return sample


@fault(f"{SAMPLER}:_rejection_random_sample")
def against_coins(original):
    """A draft is accepted where the coin is above the ratio by a little."""

    def sample(output, ends, drafts, q, p, bonus, recovered, coins, *rest):
        return original(output, ends, drafts, q, p, bonus, recovered, coins * 0.7, *rest)

    return sample


@fault(f"{SAMPLER}:sample_recovered_tokens")
def final_from_p(original):
    """The recovered token is drawn from p, not from what is left of it."""

    def sample_recovered_tokens(longest, counts, ends, drafts, q, p, sampling, device, fp64=False):
        return torch.multinomial(p, 1)[:, 0].to(drafts.dtype)

    return sample_recovered_tokens


@fault(f"{SAMPLER}:sample_recovered_tokens")
def final_from_q(original):
    """The recovered token is drawn from q without p, not from p without q."""

    def sample_recovered_tokens(longest, counts, ends, drafts, q, p, sampling, device, fp64=False):
        return original(
            longest, counts, ends, drafts, p if q is not None else q, q if q is not None else p, sampling, device, fp64
        )

    return sample_recovered_tokens


@fault(f"{SAMPLER}:RejectionSampler.forward")
def bonus_of_the_row_before(original):
    """The bonus token is drawn from the row that judged the last draft."""

    def forward(self, metadata, q, logits, sampling):
        rows = metadata.bonus_logits_indices
        rows = torch.where(torch.tensor(metadata.num_draft_tokens) > 0, rows - 1, rows)
        return original(self, dataclasses.replace(metadata, bonus_logits_indices=rows), q, logits, sampling)

    return forward


@fault(f"{SAMPLER}:rejection_sample")
def verdict_late(original):
    """Every fourth step is given the output of the step before, where the batch is the same."""
    kept = {"output": None, "step": 0}

    def rejection_sample(*args, **kwargs):
        output = original(*args, **kwargs)
        before, kept["output"] = kept["output"], output.clone()
        kept["step"] += 1
        if kept["step"] % 4 == 0 and before is not None and before.shape == output.shape:
            longest = torch.tensor(args[1])[:, None] + 1  # never more tokens than were drafted, and one
            if bool(((before >= 0).sum(1, keepdim=True) <= longest).all()):
                return before
        return output

    return rejection_sample


@fault(f"{SAMPLER}:rejection_sample")
def outputs_swapped(original):
    """Every fourth step the first two requests are given each other's tokens."""
    steps = [0]

    def rejection_sample(drafts, counts, *rest, **kwargs):
        output = original(drafts, counts, *rest, **kwargs)
        steps[0] += 1
        if steps[0] % 4 == 0 and len(counts) > 1 and counts[0] == counts[1]:
            output[[0, 1]] = output[[1, 0]]
        return output

    return rejection_sample
