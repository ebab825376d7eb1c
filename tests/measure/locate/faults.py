"""Faults of the target, planted into every engine that is built, so that the one that records and the one that is run
again both have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specscope.engine.engine import Engine
from specscope.model import attention
from specscope.model.fast.decoder import FusedLayer
from tests.faults.planted.kv import chunks_from_zero, left_where_it_lay
from tests.model.test_architectures import build
from tests.tiny import write_tiny_model

Install = Callable[[pytest.MonkeyPatch, Engine], None]


@dataclass(frozen=True)
class TargetFault:
    """One fault: how it is planted, and at which operation it must be located."""

    install: Install
    operation: str  # its name begins so
    looks: str = ""  # a part of what it must look like
    setting: str = "plain"
    family: str = "llama"
    says: str = ""  # a part of the sentence


def layers_of(engine: Engine) -> list:
    """The target's decoder layers, none of them compiled: what is planted into their steps is then computed."""
    model = engine.runner.loaded.model
    layers = list(getattr(model, model.base_model_prefix).layers)
    for layer in layers:
        if isinstance(layer.forward, FusedLayer):
            layer.forward.compiled = layer.forward.stack = None
    return layers


def scaled_attention(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """The attention scale of layer 2."""
    fused = layers_of(engine)[2].forward
    fused.variant = dataclasses.replace(fused.variant, scale=fused.variant.scale / 3**0.5)


def rotary_scaled_late(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Rotary runs too fast past position 40."""
    layers_of(engine)
    rotary = engine.runner.loaded.model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(
        x, torch.where(position_ids > 40, 40 + (position_ids - 40) * 1.5, position_ids.float())
    )


def kv_in_fp8(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Keys and values are kept in eight bits."""
    layers_of(engine)
    cache = engine.runner.cache
    write = cache.write_rows
    cache.write_rows = lambda layer, slots, rows: write(layer, slots, rows.to(torch.float8_e4m3fn).to(rows.dtype))


def narrow_window(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """The sliding window of layer 1 is one too narrow."""
    layer = layers_of(engine)[1]
    layer.forward.variant = dataclasses.replace(layer.forward.variant, window=layer.forward.variant.window - 1)


def softmax_in_bfloat16(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """The attention's softmax is computed in bfloat16."""
    layers_of(engine)

    def fused(query, key, value, reach, variant):
        scores = query @ key[:, None].transpose(2, 3) * variant.scale
        weights = scores.masked_fill(~reach.seen, -torch.inf).bfloat16().softmax(-1)
        return weights.to(value.dtype) @ value[:, None]

    patch.setattr(attention, "_fused", fused)


def head_zeroed(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """One head of layer 3 gives nothing."""
    layers_of(engine)
    from specscope.model.fast import decoder

    right = vars(decoder)["paged_attention"]

    def paged(query, layer, cache, batch, variant):
        out = right(query, layer, cache, batch, variant)
        if layer == 3 and cache is engine.runner.cache:
            out = out.clone()
            out[:, 2] = 0
        return out

    patch.setattr(decoder, "paged_attention", paged)


def residual_swapped(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Layer 2 adds the normed input where it should add its input."""
    fused = layers_of(engine)[2].forward

    class Swapped(FusedLayer):
        def run(self, x, projected, rotation, batch, cache):
            normed = self.first_norm(x)
            x = self.out(self._attend(normed, rotation, batch, cache)).add_(normed)
            gate, up = self.gate_up(self.second_norm(x)).chunk(2, dim=-1)
            return self.down(self.act(gate).mul_(up)).add_(x)

    fused.__class__ = Swapped


def wrong_expert(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """One expert of layer 1 holds another's weights."""
    experts = engine.runner.loaded.model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj[2] = experts.down_proj[1]


def overwritten(patch: pytest.MonkeyPatch, engine: Engine) -> None:
    """Before every fifth step the KV of a position that was committed long ago is written over."""
    right, count = engine.step, [0]

    def step():
        count[0] += 1
        for request in engine.scheduler.running if count[0] % 5 == 0 else ():
            if request.computed > 20:
                engine.runner.cache.key[1][:, request.table.slots(3, 4)] += 1
        return right()

    patch.setattr(engine, "step", step)


FAULTS = {
    "attention scale": TargetFault(scaled_attention, "layers.2.self_attn.scores", "a factor of 0.577"),
    "rotary past 40": TargetFault(rotary_scaled_late, "layers.0.self_attn.query", "40"),
    "KV in fp8": TargetFault(kv_in_fp8, "layers.0.self_attn.keys read", "float8"),
    "window": TargetFault(narrow_window, "layers.1.self_attn.scores", family="mistral_sliding"),
    "chunks from 0": TargetFault(chunks_from_zero, "positions", "-32", setting="chunks"),
    "softmax in bfloat16": TargetFault(softmax_in_bfloat16, "layers.0.self_attn.", "bfloat16"),
    "head zeroed": TargetFault(head_zeroed, "layers.3.self_attn.attention", "head 2"),
    "residual swapped": TargetFault(residual_swapped, "layers.2.post_attention_layernorm:in"),
    "expert": TargetFault(wrong_expert, "layers.1.mlp", family="qwen3_moe"),
    "not moved": TargetFault(left_where_it_lay, "layers.0.self_attn.keys read"),
    "overwritten": TargetFault(overwritten, "layers.1.self_attn.keys read", says="between steps r0@"),
}


def write_family(folder: Path, name: str) -> Path:
    """A tiny random model of an architecture, with a tokenizer."""
    write_tiny_model(folder)
    model = build(name)
    model.resize_token_embeddings(300)  # those of the tokenizer
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder
