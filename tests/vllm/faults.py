"""Faults planted in a process that runs vLLM, before the plugin is loaded: each is a few lines of a wrong engine.

Not a test: tests/vllm/offline.py plants them. FAULTS: by name, with the cause that `diagnose` is to name first.
"""

import torch


def final_from_p():
    """The recovered token is drawn from p, not from what is left of it."""
    import vllm.v1.sample.rejection_sampler as module

    def sample_recovered_tokens(
        longest, drafted, ends, draft_ids, draft_probs, target_probs, sampling, device, fp64=False
    ):
        tokens = torch.empty_like(draft_ids)
        for row in range(len(draft_ids)):
            request = int((ends <= row).sum())
            generator = sampling.generators.get(request)
            tokens[row] = torch.multinomial(target_probs[row], 1, generator=generator)[0]
        return tokens

    module.sample_recovered_tokens = sample_recovered_tokens


def q_dropped():
    """Drafts are sampled, and judged as if they were not: their distribution gets lost on the way."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner._get_spec_decode_draft_probs = lambda self, metadata: None


def one_late():
    """Drafts are for one position further on: the first one of each is lost."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids

    def propose_draft_token_ids(self, *args, **kwargs):
        return [tokens[1:] for tokens in original(self, *args, **kwargs)]

    GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids


def layers_one_lower():
    """The head is fed what enters each of its layers, not what leaves it."""
    from vllm.model_executor.models.llama import LlamaModel

    original = LlamaModel.forward

    def forward(self, *args, **kwargs):
        kept, self.aux_hidden_state_layers = (
            self.aux_hidden_state_layers,
            tuple(max(layer - 1, 0) for layer in self.aux_hidden_state_layers),
        )
        try:
            return original(self, *args, **kwargs)
        finally:
            self.aux_hidden_state_layers = kept

    LlamaModel.forward = forward


def features_missing():
    """The head is fed zeros for what the target computed."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = SpecDecodeBaseProposer.propose

    def propose(self, *args, **kwargs):
        if "target_hidden_states" in kwargs:
            kwargs["target_hidden_states"] = torch.zeros_like(kwargs["target_hidden_states"])
        return original(self, *args, **kwargs)

    SpecDecodeBaseProposer.propose = propose


FAULTS = {one.__name__: one for one in (final_from_p, q_dropped, one_late, layers_one_lower, features_missing)}
