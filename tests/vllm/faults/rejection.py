"""Faults in vLLM's rejection sampler: what is accepted, by which numbers, and what is drawn then."""

import dataclasses

import torch

from .switch import every, fault

SAMPLER = "vllm.v1.sample.rejection_sampler"
kept: dict[str, torch.Tensor] = {}


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


def one_more(output, ends, drafts, instead, bonus, may):
    """Accept another draft of each request that may, and what comes behind it."""
    for request, first, end in chains(ends):
        count = accepted(output, request)
        if first + count < end and drafts[first + count] >= 0 and may(request):
            output[request, count] = drafts[first + count]
            behind = first + count + 1
            output[request, count + 1] = instead[behind] if behind < end else bonus[request, 0]


@fault(f"{SAMPLER}:_rejection_greedy_sample", "accepted_count", "ratio_test")
def one_more_greedy(original, output, ends, drafts, choices, bonus, is_greedy, *rest):
    """One draft more is accepted than is the target's choice."""
    original(output, ends, drafts, choices, bonus, is_greedy, *rest)
    one_more(output, ends, drafts, choices, bonus, lambda request: is_greedy is None or is_greedy[request])


@fault(f"{SAMPLER}:_rejection_random_sample", "accepted_count", "ratio_test")
def one_more_sampled(original, output, ends, drafts, q, p, bonus, recovered, *rest):
    """One draft more is accepted than its coin says."""
    original(output, ends, drafts, q, p, bonus, recovered, *rest)
    one_more(output, ends, drafts, recovered, bonus, lambda request: True)


@fault(f"{SAMPLER}:_rejection_greedy_sample", "p_not_used", "ratio_test")
def greedy_rejection_ignored(original, output, ends, drafts, choices, *rest):
    """At depth 1 every draft is accepted, whatever the target's choice is; what follows is judged as ever."""
    choices = choices.clone()
    for _, first, _ in chains(ends):
        choices[first] = drafts[first]
    return original(output, ends, drafts, choices, *rest)


@fault(f"{SAMPLER}:rejection_sample", "rows_swapped")
def counts_of_others(original, drafts, counts, longest, ends, q, logits, bonus, *rest, **kwargs):
    """Each request gets the count of accepted drafts of the next one in the batch, and its own tokens up to there."""
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


@fault(f"{SAMPLER}:_rejection_random_sample", "p_not_used")
def decided_by_another_p(original, output, ends, drafts, q, p, *rest):
    """What is handed on as p is right; what decides is p at another temperature."""
    flat = p.clamp_min(1e-30).pow(0.4)
    return original(output, ends, drafts, q, (flat / flat.sum(-1, keepdim=True)).contiguous(), *rest)


@fault(f"{SAMPLER}:_rejection_random_sample", "ratio_test")
def against_coins(original, output, ends, drafts, q, p, bonus, recovered, coins, *rest):
    """A draft is accepted where the coin is above the ratio by a little."""
    return original(output, ends, drafts, q, p, bonus, recovered, coins * 0.7, *rest)


@fault(f"{SAMPLER}:sample_recovered_tokens", "final_not_residual")
def final_from_p(original, longest, counts, ends, drafts, q, p, *rest):
    """The recovered token is drawn from p, not from what is left of it."""
    return torch.multinomial(p, 1)[:, 0].to(drafts.dtype)


@fault(f"{SAMPLER}:sample_recovered_tokens", "final_not_residual")
def final_from_q(original, longest, counts, ends, drafts, q, p, *rest):
    """The recovered token is drawn from q without p, not from p without q."""
    return original(longest, counts, ends, drafts, *((p, q) if q is not None else (q, p)), *rest)


@fault(f"{SAMPLER}:RejectionSampler.forward", "final_other_node")
def bonus_of_the_row_before(original, self, metadata, q, logits, sampling):
    """The bonus token is drawn from the row that judged the last draft."""
    rows = metadata.bonus_logits_indices
    rows = torch.where(torch.tensor(metadata.num_draft_tokens) > 0, rows - 1, rows)
    return original(self, dataclasses.replace(metadata, bonus_logits_indices=rows), q, logits, sampling)


@fault(f"{SAMPLER}:rejection_sample", "verdict_late")
def verdict_late(original, *args, **kwargs):
    """Every fourth step is given the output of the step before, where the batch is the same."""
    output = original(*args, **kwargs)
    before, kept["output"] = kept.get("output"), output.clone()
    if every(4, "verdict_late") and before is not None and before.shape == output.shape:
        longest = torch.tensor(args[1])[:, None] + 1  # never more tokens than were drafted, and one
        if bool(((before >= 0).sum(1, keepdim=True) <= longest).all()):
            return before
    return output


@fault(f"{SAMPLER}:rejection_sample", "rows_swapped")
def outputs_swapped(original, drafts, counts, *rest, **kwargs):
    """Every fourth step the first two requests are given each other's tokens."""
    output = original(drafts, counts, *rest, **kwargs)
    if every(4, "outputs_swapped") and len(counts) > 1 and counts[0] == counts[1]:
        output[[0, 1]] = output[[1, 0]]
    return output
