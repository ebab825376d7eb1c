"""Faults inside the models and in what their forwards are fed, for `specscope locate`."""

from __future__ import annotations

import torch

from .drafts import BASE, KNOWN, RUNNER
from .features import changed
from .rejection import SAMPLER
from .rows import of_next_request
from .switch import fault

ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
V2_DRAFTER = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
ATTENTION = "vllm.model_executor.layers.attention.attention:Attention"
HEAD = "layers.6."  # the head's layer is counted behind the six of the target


@fault(f"{ROTARY}._compute_inv_freq")
def rotary_base(original):
    """The base of the rotary embedding is half as large again."""
    return lambda self, base: original(self, base * 1.5)


@fault("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward")
def attention_scale(original):
    """The head's attention scales its scores by one over the head's size, not over its square root."""

    def forward(self, layer, query, *args, **kwargs):
        scale = self.scale
        self.scale = scale**2 if HEAD in layer.layer_name else scale
        try:
            return original(self, layer, query, *args, **kwargs)
        finally:
            self.scale = scale

    return forward


@fault(f"{ATTENTION}.forward")
def head_zeroed(original):
    """In layer 4 of the target the second attention head gives nothing."""

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if "layers.4." in self.layer_name:
            out[:, self.head_size : 2 * self.head_size] = 0
        return out

    return forward


@fault("vllm.model_executor.models.llama:LlamaForCausalLM.load_weights")
def norm_of_another_layer(original):
    """Layer 3 norms before its MLP with the weights of layer 1."""

    def load_weights(self, weights):
        loaded = original(self, weights)
        layers = self.model.layers
        if len(layers) > 3:
            layers[3].post_attention_layernorm.weight.data.copy_(layers[1].post_attention_layernorm.weight.data)
        return loaded

    return load_weights


@fault(f"{BASE}.propose")
def rejected_kv_attended(original):
    """While it drafts, the head attends to the KV of rejected drafts."""
    return changed("num_rejected_tokens_gpu", lambda _, __: None)(original)


@fault(f"{RUNNER}._prepare_inputs")
def rejected_kv_attended_by_target(original):
    """Behind a step in which drafts were rejected the target attends to as many slots more."""
    kept = {}

    def prepare(self, scheduled, *args, **kwargs):
        found = original(self, scheduled, *args, **kwargs)
        for row, name in enumerate(self.input_batch.req_ids):
            now = int(self.input_batch.num_computed_tokens_cpu[row])
            before, fed = kept.get(name, (now, 0))
            kept[name] = now, len(scheduled.scheduled_spec_decode_tokens.get(name, ())) + 1
            if fed > 1 and now - before < fed:
                self.seq_lens[row] += fed - (now - before)
        return found

    return prepare


@fault(f"{RUNNER}._prepare_inputs")
def target_positions_high_in_decode(original):
    """The target's positions are one high while it decodes, and right in prompts."""

    def prepare(self, scheduled, *args, **kwargs):
        found = original(self, scheduled, *args, **kwargs)
        first = 0
        for row, name in enumerate(self.input_batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            if self.input_batch.num_computed_tokens_cpu[row] >= self.input_batch.num_prompt_tokens[row]:
                self.positions[first : first + count] += 1
            first += count
        return found

    return prepare


@fault(f"{SAMPLER}:rejection_sample")
def argmax_of_a_part(original):
    """The target's likeliest token is looked for among the first tokens of the vocabulary."""

    def rejection_sample(drafts, counts, longest, ends, q, logits, *rest, **kwargs):
        logits = logits.clone()
        logits[:, KNOWN:] = -torch.inf
        return original(drafts, counts, longest, ends, q, logits, *rest, **kwargs)

    return rejection_sample


@fault(f"{SAMPLER}:rejection_sample")
def next_request_in_the_kernel(original):
    """Inside the kernel's call a request's drafts are judged by the rows of the next request."""

    def rejection_sample(drafts, counts, longest, ends, q, logits, *rest, **kwargs):
        return original(drafts, counts, longest, ends, q, of_next_request(logits, ends), *rest, **kwargs)

    return rejection_sample


@fault("vllm.v1.sample.sampler:Sampler.sample")
def bonus_without_top_p(original):
    """The bonus token is drawn without top-p, which drafts are judged with."""

    def sample(self, logits, sampling, *args, **kwargs):
        import dataclasses

        return original(self, logits, dataclasses.replace(sampling, top_p=None), *args, **kwargs)

    return sample


# V2's runner


def v2_changed(function, change):
    """A function of V2 whose InputBatch is changed when it has been made."""

    def made(self, *args, **kwargs):
        batch = function(self, *args, **kwargs)
        change(batch)
        return batch

    return made


def decoding_rows(batch):
    """Of each request that decodes: its rows."""
    for row in range(batch.num_reqs):
        if batch.num_computed_tokens_np[row] >= batch.prefill_len_np[row]:
            yield row, slice(int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1]))


@fault(f"{V2_RUNNER}.prepare_inputs")
def v2_positions_high_in_decode(original):
    """The target's positions are one high while it decodes, and right in prompts."""

    def change(batch):
        for _, rows in decoding_rows(batch):
            batch.positions[rows] += 1

    return v2_changed(original, change)


@fault(f"{V2_RUNNER}.prepare_inputs")
def v2_too_many_keys(original):
    """The target attends to two slots more than it has written while it decodes."""

    def change(batch):
        for row, _ in decoding_rows(batch):
            batch.seq_lens[row] += 2

    return v2_changed(original, change)


@fault(f"{V2_DRAFTER}:TargetDependentARSpeculator.propose")
def v2_features_shifted(original):
    """The head is fed each position with the features of the position before it."""

    def propose(self, batch, metadata, slots, last, aux, *args, **kwargs):
        return original(self, batch, metadata, slots, last, aux and [x.roll(1, 0) for x in aux], *args, **kwargs)

    return propose


@fault(f"{V2_DRAFTER}:TargetDependentARSpeculator.propose")
def v2_rejected_kv_attended(original):
    """While it drafts, the head counts rejected drafts among its keys."""

    def propose(self, batch, metadata, slots, last, aux, sampled, rejected, *args, **kwargs):
        batch.seq_lens += rejected[: len(batch.seq_lens)]
        return original(self, batch, metadata, slots, last, aux, sampled, rejected, *args, **kwargs)

    return propose


@fault("vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft")
def v2_argmax_of_a_part(original):
    """The drafter chooses among the first tokens of the vocabulary."""
    return lambda self, hidden, *args, **kwargs: self.model.compute_logits(hidden)[:, :KNOWN].argmax(-1)
