"""Faults for walks, each with the operation at which it must be located: of the target, of drafters, of DFlash heads.

Those of the target and of DFlash heads are in every engine that is built, so that the one that records and the one that
is run again both have them; the other drafters' are in the one that is run again.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from specscope.model import attention
from specscope.model.fast import decoder
from specscope.model.fast.decoder import FusedLayer
from specscope.model.heads.eagle_head import EagleHead
from specscope.speculate.drafters.base import Level
from specscope.speculate.drafters.eagle import Eagle
from tests.faults.fault import altered, replaced
from tests.faults.planted import drafter_kv, features
from tests.faults.planted.drafts import other_map
from tests.faults.planted.kv import chunks_from_zero, left_where_it_lay
from tests.model.test_architectures import build
from tests.tiny import write_tiny_model


@dataclass(frozen=True)
class Placed:
    """`place`: what the operation's name begins with; `looks`, `says`: parts of what it looks like and of its words."""

    install: Callable
    place: str
    looks: str = ""
    says: str = ""
    run: str = "plain"  # the drafter, or how the target is run
    family: str = ""  # of a target that is not the tests' own


def layers_of(engine):
    """The target's decoder layers, none of them compiled: what is planted into their steps is then computed."""
    model = engine.runner.loaded.model
    layers = list(getattr(model, model.base_model_prefix).layers)
    for layer in layers:
        if isinstance(layer.forward, FusedLayer):
            layer.forward.compiled = layer.forward.stack = None
    return layers


def targets(index):
    """One of the target's layers."""
    return lambda engine: [layers_of(engine)[index].forward]


def heads(engine):
    """All layers of a head."""
    return (engine.drafter.runner.layer, *engine.drafter.runner.further)


def varied(layers, change):
    """Attention in some layers is varied: fields that are `change` of what they are."""

    def install(patch, engine):
        for layer in layers(engine):
            patch.setattr(layer, "variant", dataclasses.replace(layer.variant, **change(layer.variant)))
            patch.setattr(layer, "compiled", None)

    return install


def scaled(variant):
    """1/sqrt(3) of the scale."""
    return {"scale": variant.scale / 3**0.5}


def narrow(variant):
    """A window that is one too narrow (of one that sees all: it sees 15)."""
    return {"window": (variant.window or 16) - 1}


def silent_head(cache_of, index, head):
    """In one layer an attention head gives nothing."""

    def install(patch, engine):
        layers_of(engine)
        cache = cache_of(engine)

        def zeroed(right, query, layer, given, batch, variant):
            out = right(query, layer, given, batch, variant)
            if given is cache and layer == index:
                out = out.clone()
                out[:, head] = 0
            return out

        replaced(decoder, "paged_attention")(zeroed)(patch, engine)

    return install


def rotary_scaled_late(patch, engine):
    """Rotary runs too fast past position 40."""
    layers_of(engine)
    rotary = engine.runner.loaded.model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(
        x, torch.where(position_ids > 40, 40 + (position_ids - 40) * 1.5, position_ids.float())
    )


def kv_in_fp8(patch, engine):
    """Keys and values are kept in eight bits."""
    layers_of(engine)
    cache = engine.runner.cache
    write = cache.write_rows
    cache.write_rows = lambda layer, slots, rows: write(layer, slots, rows.to(torch.float8_e4m3fn).to(rows.dtype))


def softmax_in_bfloat16(patch, engine):
    """The attention's softmax is computed in bfloat16."""
    layers_of(engine)

    def fused(query, key, value, reach, variant):
        scores = query @ key[:, None].transpose(2, 3) * variant.scale
        weights = scores.masked_fill(~reach.seen, -torch.inf).bfloat16().softmax(-1)
        return weights.to(value.dtype) @ value[:, None]

    patch.setattr(attention, "_fused", fused)


class Swapped(FusedLayer):
    """Adds the normed input where it should add its input."""

    def run(self, x, projected, rotation, batch, cache):
        normed = self.first_norm(x)
        x = self.out(self._attend(normed, rotation, batch, cache)).add_(normed)
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)


def residual_swapped(patch, engine):
    layers_of(engine)[2].forward.__class__ = Swapped


def wrong_expert(patch, engine):
    """One expert of layer 1 holds another's weights."""
    experts = engine.runner.loaded.model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj[2] = experts.down_proj[1]


def overwritten(patch, engine):
    """Before every fifth step the KV of a position that was committed long ago is written over."""
    right, count = engine.step, [0]

    def step():
        count[0] += 1
        for request in engine.scheduler.running if count[0] % 5 == 0 else ():
            if request.computed > 20:
                engine.runner.cache.key[1][:, request.table.slots(3, 4)] += 1
        return right()

    patch.setattr(engine, "step", step)


def norm_left_out(name):
    """A norm of the head does nothing."""

    def install(patch, engine):
        parent, _, child = name.rpartition(".")
        patch.setitem(engine.drafter.runner.head.get_submodule(parent)._modules, child, nn.Identity())
        layer = engine.drafter.runner.layer
        if child == "post_attention_layernorm":
            patch.setattr(layer, "second_norm", nn.Identity())
        patch.setattr(layer, "compiled", None)

    return install


def stale_after_full(patch, engine):
    """After a full acceptance the last pair that was guessed stays in the head's cache."""
    full = set()

    def note(commit, self, context, tree, verdict):
        commit(self, context, tree, verdict)
        if len(tree) and len(verdict.path) == tree.max_depth:
            full.add(context.request)

    def skipping(pending, self, drafting, limit, *, logits):
        for g in drafting:
            if g.context.request in full and g.base - g.state.computed > 2:
                full.discard(g.context.request)
                self._features[g.context.request].take(1)
                g.state.computed += 1
        return pending(self, drafting, limit, logits=logits)

    replaced(Eagle, "commit")(note)(patch, engine)
    replaced(Eagle, "pending")(skipping)(patch, engine)


@replaced(Level, "__init__")
def missing_token(make, self, logits, *more, **named):
    """One token is missing in the draft vocabulary's mask."""
    logits = logits.clone()
    logits[:, 5] = -torch.inf
    make(self, logits, *more, **named)


def shifted_embedding(loaded):
    """The head looks up the row of the token before."""
    return dataclasses.replace(loaded, embedding=nn.Embedding.from_pretrained(loaded.embedding.weight.roll(1, 0)))


def no_head(patch, engine):
    """One attention head's output is zero behind attention."""
    mine = engine.drafter.runner.layer.linears

    def zeroed(attend, self, x, rotation, batch, cache):
        out = attend(self, x, rotation, batch, cache)
        if self.linears is mine:
            out[:, self.size : 2 * self.size] = 0
        return out

    replaced(FusedLayer, "_attend")(zeroed)(patch, engine)


@replaced(EagleHead, "leave")
def not_normed(leave, self, x):
    """A head of EAGLE-3.1 feeds back the state before its norm."""
    return self.norm(x), x


def joined_backwards(fc):
    """An EAGLE-1 head joins feature and embedding in the wrong order."""
    return lambda x: fc(torch.cat(x.chunk(2, -1)[::-1], -1))


TARGET = {
    "attention scale": Placed(varied(targets(2), scaled), "layers.2.self_attn.scores", "a factor of 0.577"),
    "rotary past 40": Placed(rotary_scaled_late, "layers.0.self_attn.query", "40"),
    "KV in fp8": Placed(kv_in_fp8, "layers.0.self_attn.keys read", "float8"),
    "window": Placed(varied(targets(1), narrow), "layers.1.self_attn.scores", family="mistral_sliding"),
    "chunks from 0": Placed(chunks_from_zero, "positions", "-32", run="chunks"),
    "softmax in bfloat16": Placed(softmax_in_bfloat16, "layers.0.self_attn.", "bfloat16"),
    "head zeroed": Placed(
        silent_head(lambda engine: engine.runner.cache, 3, 2), "layers.3.self_attn.attention", "head 2"
    ),
    "residual swapped": Placed(residual_swapped, "layers.2.post_attention_layernorm:in"),
    "expert": Placed(wrong_expert, "layers.1.mlp", family="qwen3_moe"),
    "not moved": Placed(left_where_it_lay, "layers.0.self_attn.keys read"),
    "overwritten": Placed(overwritten, "layers.1.self_attn.keys read", says="between steps r0@"),
}
SCORES, READ, FED = "midlayer.self_attn.scores", "layers.0.self_attn.keys read", "features layer 2"
CHAIN, TREE, MODEL = (partial(Placed, run=name) for name in ("eagle chain", "eagle tree", "model chain"))
MODEL_TREE, LATER, WINDOW = (partial(Placed, run=name) for name in ("model tree", "eagle 3.1", "window"))
embedded = altered("drafter.runner.loaded", shifted_embedding)
joined = altered("drafter.runner.head.fc.forward", joined_backwards)
last_narrow = varied(lambda engine: heads(engine)[-1:], narrow)
DRAFTER = {
    "no hidden norm": TREE(norm_left_out("midlayer.hidden_norm"), "midlayer.hidden_norm"),
    "no input norm": CHAIN(norm_left_out("midlayer.input_layernorm"), "midlayer.input_layernorm"),
    "no second norm": CHAIN(norm_left_out("midlayer.post_attention_layernorm"), "midlayer.post_attention_layernorm"),
    "no norm": Placed(norm_left_out("norm"), "norm", run="eagle dynamic"),
    "no norm of a layer's features": LATER(norm_left_out("fc_norm.1"), "fc_norm.1"),
    "scale": CHAIN(varied(heads, scaled), SCORES, "0.577"),
    "rotary base": CHAIN(drafter_kv.other_base(500.0), "midlayer.self_attn.query"),
    "layers reversed": CHAIN(features.backwards, FED),
    "layers lower": Placed(features.one_lower, FED, run="eagle dynamic"),
    "features one late": CHAIN(features.one_late, FED, "the position 1 before"),
    "features by index": TREE(features.rows_by_index, FED),
    "no features": CHAIN(features.nothing, FED, "zero"),
    "stale KV": CHAIN(stale_after_full, "midlayer.self_attn.keys read"),
    "missing token": TREE(missing_token, "d2t", "cannot"),
    "first tokens": CHAIN(drafter_kv.first_tokens_only(20), "d2t", "first"),
    "d2t off by a row": CHAIN(other_map(lambda d2t: d2t.roll(1)), "d2t", "row of d2t"),
    "window": CHAIN(last_narrow, SCORES),
    "embedding shifted": TREE(embedded, "embedding"),
    "no attention head": CHAIN(no_head, "midlayer.self_attn.o_proj:in", "head 1"),
    "positions of nodes": TREE(drafter_kv.nodes_one_further, "positions", "+1"),
    # Other kinds of heads
    "fed back before the norm": LATER(not_normed, "fed back"),
    "feature first": Placed(joined, "fc", run="eagle 1"),
    "second layer's window": WINDOW(last_narrow, "layers.1.self_attn.scores", "11"),
    # Draft models
    "no attention head in layer 1": MODEL(
        silent_head(lambda engine: engine.drafter.cache, 1, 1), "layers.1.self_attn.attention", "head 1"
    ),
    "positions below the root": MODEL_TREE(drafter_kv.nodes_one_further, "positions", "+1"),
    "leaf taken for run": MODEL(drafter_kv.leaf_taken_for_run, READ),
    "KV not moved": MODEL_TREE(drafter_kv.not_moved, READ),
    "spoiled after rejections": MODEL(drafter_kv.spoiled_after_rejections, READ, "zero"),
    "first model tokens": MODEL(drafter_kv.first_tokens_only(75), "vocabulary", "first 75"),
}
BLOCK = {
    "features of other layers": Placed(features.one_lower, "features layer 2"),
    "norm left out": Placed(drafter_kv.no_norm, "hidden_norm"),
    "wrong mask token": Placed(drafter_kv.other_mask, "tokens"),
    "block positions off by one": Placed(drafter_kv.one_further, "positions"),
    "stale KV": Placed(drafter_kv.stale_root, "midlayer.self_attn.context key"),
    "context written from the wrong row": Placed(drafter_kv.row_before, "midlayer.self_attn.context key"),
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
