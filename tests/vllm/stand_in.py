"""A model as vLLM lays one out: fused projections, norms that add the residual, a paged cache of its own layout.

Its weights are those of a transformers Llama, so that what the taps read of it can be held against that. Not a test.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from specscope.trace.inside.hooking import ErrorGuard
from specscope.trace.inside.settings import TapSettings
from specscope.vllm import taps
from tests.transformers.models import tiny_llama

BLOCK = 4


class Norm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x, residual=None):
        joint = x if residual is None else x + residual
        out = self.weight * joint * torch.rsqrt(joint.square().mean(-1, keepdim=True) + self.eps)
        return out if residual is None else (out, joint)


class Linear(nn.Module):
    """Gives its bias beside its rows."""

    def __init__(self, *parts):
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight for part in parts]))

    def forward(self, x):
        return functional.linear(x, self.weight), None


class Cached:
    """Keys lie transposed in a block, as a kernel may want them; values follow."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        heads, size = layer.num_kv_heads, layer.head_size
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block = cache[slot // BLOCK].view(2, -1)
                block[0].view(heads, size, BLOCK)[:, :, slot % BLOCK] = key[row].to(cache.dtype)
                block[1].view(BLOCK, heads, size)[slot % BLOCK] = value[row].to(cache.dtype)


class Attention(nn.Module):
    """Of one request."""

    def __init__(self, name, heads, kv_heads, size, blocks=16):
        super().__init__()
        self.layer_name, self.num_heads, self.num_kv_heads, self.head_size = name, heads, kv_heads, size
        self.kv_cache, self.impl, self.context = torch.zeros(blocks, 2 * BLOCK * kv_heads * size), Cached(), None
        self.scale = size**-0.5

    def forward(self, query, key, value):
        told, slots = self.context.attn_metadata[self.layer_name], self.context.slot_mapping[self.layer_name]
        q, k, v = (x.view(len(x), -1, self.head_size) for x in (query, key, value))
        self.impl.do_kv_cache_update(self, k, v, self.kv_cache, slots)
        keys, values = self.read(told.block_table[0], int(told.seq_lens[0]))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        ahead = torch.ones_like(scores).bool().triu(len(keys) - len(q) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values).flatten(1)

    def read(self, table, length):
        """Each for all query heads that ask it."""
        places, shape = torch.arange(length), (self.num_kv_heads, self.head_size)
        blocks = self.kv_cache[table[places // BLOCK]].unflatten(1, (2, -1))
        keys = blocks[:, 0].unflatten(1, (*shape, BLOCK))[places, :, :, places % BLOCK]
        values = blocks[:, 1].unflatten(1, (BLOCK, *shape))[places, places % BLOCK]
        return (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (keys, values))


class SelfAttention(nn.Module):
    def __init__(self, name, attention, config, rotary):
        super().__init__()
        self.qkv_proj = Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.attn = Attention(name, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        for each in ("num_heads", "num_kv_heads", "head_size"):
            setattr(self.qkv_proj, each, getattr(self.attn, each))
        self.o_proj, self.rotary = Linear(attention.o_proj), rotary

    def forward(self, positions, hidden_states):
        qkv, _ = self.qkv_proj(hidden_states)
        heads, size = self.attn.num_heads * self.attn.head_size, self.attn.num_kv_heads * self.attn.head_size
        q, k, v = qkv.split([heads, size, size], dim=-1)
        cos, sin = (x[0][:, None] for x in self.rotary(hidden_states, positions[None]))
        q, k = (self.turned(x.unflatten(-1, (-1, self.attn.head_size)), cos, sin).flatten(1) for x in (q, k))
        return self.o_proj(self.attn(q, k, v))[0]

    @staticmethod
    def turned(x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Mlp(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(mlp.gate_proj, mlp.up_proj), Linear(mlp.down_proj)

    def forward(self, x):
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)[0]


class Layer(nn.Module):
    def __init__(self, number, layer, config, rotary):
        super().__init__()
        self.self_attn = SelfAttention(f"model.layers.{number}.self_attn.attn", layer.self_attn, config, rotary)
        self.mlp, self.input_layernorm = Mlp(layer.mlp), Norm(layer.input_layernorm)
        self.post_attention_layernorm = Norm(layer.post_attention_layernorm)

    def forward(self, positions, hidden, residual):
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Base(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed_tokens, self.norm = deepcopy(model.embed_tokens), Norm(model.norm)
        layers = (Layer(i, layer, model.config, model.rotary_emb) for i, layer in enumerate(model.layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens, positions):
        hidden, residual = self.embed_tokens(tokens), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class Logits(nn.Module):
    def forward(self, head, hidden):
        return head(hidden)


class Model(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.logits_processor = Base(model.model), deepcopy(model.lm_head), Logits()

    def forward(self, input_ids, positions):
        return self.model(input_ids, positions)

    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden)


class GPUModelRunner:
    """One request, without drafts: it feeds what it is told to. `off`: by how much it errs while it decodes."""

    def __init__(self, model):
        self.model, self.drafter = Model(model), None
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK))
        self.input_batch = SimpleNamespace(req_ids=["r"])
        self.blocks, self.computed, self.context = [5, 2, 9], 0, None
        self.logits: list[Tensor] = []  # of each step, where `run` ran it
        self.off = {"tokens": 0, "positions": 0, "slots": 0, "keys seen": 0}

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        tokens, start = scheduler_output.tokens, self.computed
        off = self.off if start else dict.fromkeys(self.off, 0)
        positions = torch.arange(start, start + len(tokens))
        table = torch.tensor([self.blocks])
        slots = table[0][positions // BLOCK] * BLOCK + positions % BLOCK + off["slots"]
        seen, starts = torch.tensor([start + len(tokens) + off["keys seen"]]), torch.tensor([0, len(tokens)])
        told = SimpleNamespace(block_table=table, seq_lens=seen, query_start_loc=starts)
        names = [layer.self_attn.attn for layer in self.model.model.layers]
        self.context = SimpleNamespace(
            attn_metadata={each.layer_name: told for each in names},
            slot_mapping={each.layer_name: slots for each in names},
        )
        for each in names:
            each.context = self.context
        fed = torch.tensor(tokens) + off["tokens"]
        hidden = self.model(input_ids=fed, positions=positions + off["positions"])
        self.computed += len(tokens)
        return self.model.compute_logits(hidden[-1:])


def scheduled(tokens: list[int], computed: int, blocks: list[int] | None = None) -> SimpleNamespace:
    """vLLM's SchedulerOutput, with the tokens to feed."""
    first = SimpleNamespace(req_id="r", num_computed_tokens=0, block_ids=[blocks])
    again = {"req_ids": ["r"], "num_computed_tokens": [computed], "new_block_ids": [None]}
    cached = again if blocks is None else {name: [] for name in again}
    return SimpleNamespace(
        tokens=tokens,
        total_num_scheduled_tokens=len(tokens),
        num_scheduled_tokens={"r": len(tokens)},
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[] if blocks is None else [first],
        scheduled_cached_reqs=SimpleNamespace(**cached, resumed_req_ids=set()),
        finished_req_ids=set(),
    )


def tiny(folder) -> LlamaForCausalLM:
    """A random model of three layers, each norm with weights of its own, saved in a folder too."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = tiny_llama(5, layers=3, vocabulary=48, head_dim=6, tie_word_embeddings=False, **sizes)
    with torch.no_grad():
        for name, values in made.named_parameters():
            if "norm" in name:
                values.add_(torch.randn_like(values) * 0.3)
    made.save_pretrained(folder)
    return made


def run(runner: GPUModelRunner, steps: list[list[int]], folder, *, inside: str = "all", mib: str = "64") -> ErrorGuard:
    """The steps of one request, tapped; the class's own functions are put back."""
    ends: list[Callable[[], object]] = []
    guard, kind = ErrorGuard(), type(runner)
    context = ModuleType("vllm.forward_context")
    context.get_forward_context = lambda: runner.context  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm.forward_context", context)
        patch.setattr(taps, "rank_of_worker", lambda: 0)
        patch.setattr(taps, "at_exit", ends.append)
        patch.setattr(kind, "execute_model", kind.execute_model)
        taps.VllmTaps(guard, TapSettings(str(folder), inside, mib)).install(SimpleNamespace(GPUModelRunner=kind))
        with torch.inference_mode():
            for number, tokens in enumerate(steps):
                step = scheduled(tokens, runner.computed, None if number else runner.blocks)
                runner.logits.append(runner.execute_model(step))
        for end in ends:
            end()
    return guard


def rows(tensor: Tensor) -> Tensor:
    return tensor.float().flatten(1)
