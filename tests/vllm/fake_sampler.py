"""vLLM's V1 rejection sampler in plain torch: the names, arguments and order of the real one, which needs its kernels.

Loaded afresh for each engine (fakes.py), since the plugin's hooks are put into it.
"""

import torch


class Sampler:
    """Samples the bonus token."""

    def sample(self, logits, sampling_metadata):
        sampling = sampling_metadata
        if sampling.all_greedy:
            return logits.argmax(-1, keepdim=True)
        probs = logits.div_(sampling.temperature.clamp(min=1e-5)[:, None]).softmax(-1)
        return torch.multinomial(probs, 1, generator=sampling.generators[0])


class RejectionSampler:
    def __init__(self):
        self.sampler = Sampler()

    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        sampling = sampling_metadata
        bonus = self.sampler.sample(logits[metadata.bonus_logits_indices], sampling)
        target = logits[metadata.target_logits_indices].float()
        if not sampling.all_greedy:
            counts = torch.tensor(metadata.num_draft_tokens)
            target = target / torch.repeat_interleave(sampling.temperature, counts)[:, None]
        output = rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            max(metadata.num_draft_tokens),
            torch.tensor(metadata.num_draft_tokens).cumsum(0),
            draft_probs,
            target,
            bonus,
            sampling,
        )
        return type("SamplerOutput", (), {"sampled_token_ids": output})()


def generate_uniform_probs(count, num_draft_tokens, generators, device):
    return torch.rand(count, dtype=torch.float64, generator=generators[0])


def sample_recovered_tokens(
    longest, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, sampling, device
):
    left = target_probs.clone()
    if draft_probs is None:
        left[torch.arange(len(left)), draft_token_ids.long()] = 0
    else:
        left = (left - draft_probs).clamp(min=0)
    noise = torch.empty_like(left).exponential_(generator=sampling.generators[0])
    return (left / noise).argmax(-1).int()


def rejection_sample(
    drafts, counts, longest, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling
):
    output = torch.full((len(counts), longest + 1), -1, dtype=torch.int32)
    choices = target_logits.argmax(-1)
    if not sampling.all_greedy:
        coins = generate_uniform_probs(len(drafts), counts, sampling.generators, "cpu")
        probs = target_logits.softmax(-1)
        recovered = sample_recovered_tokens(
            longest, counts, cu_num_draft_tokens, drafts, draft_probs, probs, sampling, "cpu"
        )
    row = 0
    for request, count in enumerate(counts):
        for at in range(count):
            token = int(drafts[row + at])
            if sampling.all_greedy:
                accepted, instead = int(choices[row + at]) == token, int(choices[row + at])
            else:
                q = 1.0 if draft_probs is None else draft_probs[row + at, token]
                accepted = q > 0 and probs[row + at, token] / q >= coins[row + at].float()
                instead = int(recovered[row + at])
            output[request, at] = token if accepted else instead
            if not accepted:
                break
        else:
            output[request, count] = bonus_token_ids[request, 0]
        row += count
    return output
