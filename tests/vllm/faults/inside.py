"""Faults inside the models and in what their forwards are fed, for `specscope diagnose --only locate`."""

import dataclasses

import torch

from .drafts import KNOWN
from .rejection import SAMPLER
from .rows import of_next_request
from .switch import fault

ROTARY = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
V2_DRAFTER = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
ATTENTION = "vllm.model_executor.layers.attention.attention:Attention"
HEAD = "layers.6."  # the head's layer is counted behind the six of the target


@fault(f"{ROTARY}._compute_inv_freq")
def rotary_base(original, self, base):
    """The base of the rotary embedding is half as large again."""
    return original(self, base * 1.5)


@fault("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward")
def attention_scale(original, self, layer, query, *args, **kwargs):
    """The head's attention scales its scores by one over the head's size, not over its square root."""
    scale = self.scale
    self.scale = scale**2 if HEAD in layer.layer_name else scale
    try:
        return original(self, layer, query, *args, **kwargs)
    finally:
        self.scale = scale


@fault(f"{ATTENTION}.forward")
def head_zeroed(original, self, *args, **kwargs):
    """In layer 4 of the target the second attention head gives nothing."""
    out = original(self, *args, **kwargs)
    if "layers.4." in self.layer_name:
        out[:, self.head_size : 2 * self.head_size] = 0
    return out


@fault("vllm.model_executor.models.llama:LlamaForCausalLM.load_weights")
def norm_of_another_layer(original, self, weights):
    """Layer 3 norms before its MLP with the weights of layer 1."""
    loaded, layers = original(self, weights), self.model.layers
    if len(layers) > 3:
        layers[3].post_attention_layernorm.weight.data.copy_(layers[1].post_attention_layernorm.weight.data)
    return loaded


@fault(f"{SAMPLER}:rejection_sample")
def argmax_of_a_part(original, drafts, counts, longest, ends, q, logits, *rest, **kwargs):
    """The target's likeliest token is looked for among the first tokens of the vocabulary."""
    logits = logits.clone()
    logits[:, KNOWN:] = -torch.inf
    return original(drafts, counts, longest, ends, q, logits, *rest, **kwargs)


@fault(f"{SAMPLER}:rejection_sample")
def next_request_in_the_kernel(original, drafts, counts, longest, ends, q, logits, *rest, **kwargs):
    """Inside the kernel's call a request's drafts are judged by the rows of the next request."""
    return original(drafts, counts, longest, ends, q, of_next_request(logits, ends), *rest, **kwargs)


@fault("vllm.v1.sample.sampler:Sampler.sample")
def bonus_without_top_p(original, self, logits, sampling, *args, **kwargs):
    """The bonus token is drawn without top-p, which drafts are judged with."""
    return original(self, logits, dataclasses.replace(sampling, top_p=None), *args, **kwargs)


# V2's runner


def decoding_rows(batch):
    """Of each request that decodes: its row, and its rows of tokens."""
    for row in range(batch.num_reqs):
        if batch.num_computed_tokens_np[row] >= batch.prefill_len_np[row]:
            yield row, slice(int(batch.query_start_loc_np[row]), int(batch.query_start_loc_np[row + 1]))


@fault(f"{V2_RUNNER}.prepare_inputs")
def v2_positions_high_in_decode(original, *args, **kwargs):
    """The target's positions are one high while it decodes, and right in prompts."""
    batch = original(*args, **kwargs)
    for _, rows in decoding_rows(batch):
        batch.positions[rows] += 1
    return batch


@fault(f"{V2_RUNNER}.prepare_inputs")
def v2_too_many_keys(original, *args, **kwargs):
    """The target attends to two slots more than it has written while it decodes."""
    batch = original(*args, **kwargs)
    for row, _ in decoding_rows(batch):
        batch.seq_lens[row] += 2
    return batch


@fault(f"{V2_DRAFTER}.propose")
def v2_features_shifted(original, self, batch, metadata, slots, last, aux, *args, **kwargs):
    """The head is fed each position with the features of the previous position it."""
    return original(self, batch, metadata, slots, last, aux and [x.roll(1, 0) for x in aux], *args, **kwargs)


@fault(f"{V2_DRAFTER}.propose")
def v2_rejected_kv_attended(original, self, batch, metadata, slots, last, aux, sampled, rejected, *args, **kwargs):
    """While it drafts, the head counts rejected drafts among its keys."""
    batch.seq_lens += rejected[: len(batch.seq_lens)]
    return original(self, batch, metadata, slots, last, aux, sampled, rejected, *args, **kwargs)


@fault("vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft")
def v2_argmax_of_a_part(original, self, hidden, *args, **kwargs):
    """The drafter chooses among the first tokens of the vocabulary."""
    return self.model.compute_logits(hidden)[:, :KNOWN].argmax(-1)
