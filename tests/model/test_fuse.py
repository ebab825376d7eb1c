"""Every cheaper part, and layers together, give what the plain ones give; what does not match is left alone."""

import copy

import numpy as np
import pytest
import torch
import transformers as t
from torch import nn

from specscope.kernels.cpu.layer import CompiledLayers
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer, FusedRMSNorm, looks_alike
from specscope.model.fast.linear import PackedLinear, disabled
from specscope.model.kv_cache import BlockTable, KVCache
from specscope.model.loader import adopt
from specscope.trace.record.tree import DraftTree
from tests.fast_paths import machine_without, without
from tests.model.test_architectures import SIZE, build

pytestmark = pytest.mark.skipif("fuse" in disabled(), reason="SPECSCOPE_DISABLE takes away what is tested here")
ROWS = [1, 2, 5, 9, 33, 64]
DTYPES = [torch.float32, torch.bfloat16]
WHOLLY_FUSED = ["llama", "qwen2", "qwen3", "mistral_sliding"]
LEFT_ALONE = ["gemma2_softcap", "olmo2", "phi3", "cohere2", "gpt_neox", "gpt_oss_sinks", "mixtral_sliding"]


def close(got, wanted):
    """To the accuracy of the dtype; float32 may sum in another order."""
    assert got.dtype is wanted.dtype
    assert got.shape == wanted.shape
    tolerance = 2e-6 if wanted.dtype is torch.float32 else torch.finfo(wanted.dtype).eps
    return (got.double() - wanted.double()).norm() <= tolerance * wanted.double().norm()


def layers_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith(("DecoderLayer", "GPTNeoXLayer"))]


def fused_layers(model):
    return [isinstance(layer.forward, FusedLayer) for layer in layers_of(model)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_norm_equals_transformers_own(dtype, scale):
    torch.manual_seed(0)
    plain = t.models.llama.modeling_llama.LlamaRMSNorm(48, eps=1e-5).to(dtype).requires_grad_(False)
    nn.init.normal_(plain.weight)
    x = (torch.randn(2, 9, 48) * scale).to(dtype)
    norm = FusedRMSNorm(plain.weight, plain.variance_epsilon)
    assert close(norm(x), plain(x))
    assert norm(torch.zeros(1, 48, dtype=dtype)).eq(0).all()


def logits(model, layers, segments):
    cache = KVCache(layers, 64, next(model.parameters()).dtype, torch.device("cpu"))
    batch = Batch.build(segments, torch.device("cpu"))
    with torch.inference_mode():
        out = model(
            input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, batch=batch, pages=cache
        ).logits
    return out, cache


def segments(rows):
    """Requests of `rows` rows in all, of different lengths, with a tree, in blocks that are apart."""
    tree = DraftTree.build([5, 6, 7], [-1, -1, 0])
    lengths = [rows] if rows < 8 else [rows // 2, rows - rows // 2 - 3]
    return [
        Segment.of_tree(
            BlockTable(np.arange(i, 12 + i, 2).tolist()),
            0,
            [(3 * n + i) % 190 + 3 for n in range(length)],
            tree if i else DraftTree.empty(),
            logits=True,
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", WHOLLY_FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiles", [True, False], ids=["compiled", "plain"])
def test_fused_models_equal_plain_ones(name, dtype, compiles, monkeypatch):
    monkeypatch.setattr("specscope.model.fast.decoder.compiled_rows", lambda _: 128 if compiles else 0)
    model = fused_equals_plain(name, dtype, fused=True)
    layers = [m.forward.compiled for m in model.modules() if looks_alike(m) or isinstance(m.forward, FusedLayer)]
    assert [layer is not None for layer in layers] == [compiles] * len(layers)


@pytest.mark.parametrize("what", ["numbers", "activation"])
def test_a_compiled_layer_that_gives_something_else_is_not_used(what, monkeypatch):
    monkeypatch.setattr("specscope.model.fast.decoder.compiled_rows", lambda _: 128)
    right, gelu = CompiledLayers.__call__, t.LlamaForCausalLM(t.LlamaConfig(**{**SIZE, "hidden_act": "gelu"})).eval()
    if what == "numbers":
        monkeypatch.setattr(CompiledLayers, "__call__", lambda *given: right(*given) * 1.001)
    model = build("llama") if what == "numbers" else gelu
    adopt(model, "llama")
    assert all(fused_layers(model))
    assert not any(layer.forward.compiled for layer in model.model.layers)


@pytest.mark.every(6)
@without
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_models_equal_plain_ones_whatever_is_missing(how, names, dtype):
    with machine_without(how, names):
        fused_equals_plain("qwen3", dtype, fused="fuse" not in names)


def fused_equals_plain(name, dtype, fused):
    plain = build(name).to(dtype).requires_grad_(False)
    for bias in (parameter for key, parameter in plain.named_parameters() if key.endswith("bias")):
        nn.init.normal_(bias, std=0.2)
    cheap = copy.deepcopy(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specscope.model.loader.fuse", lambda *_: None)
        layers = adopt(plain, name).layers
    adopt(cheap, name)
    assert not any(fused_layers(plain))
    assert fused_layers(cheap) == [fused] * SIZE["num_hidden_layers"]
    for rows in ROWS:
        (wanted, plain_cache), (got, cheap_cache) = (logits(m, layers, segments(rows)) for m in (plain, cheap))
        tolerance = 1e-5 if dtype is torch.float32 else 16 * torch.finfo(dtype).eps
        assert (got.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()
        for a, b in zip(cheap_cache.stores, plain_cache.stores, strict=True):
            assert (a.float() - b.float()).norm() <= tolerance * b.float().norm()
    return cheap


def granite():
    """Its layers have the same parts, but scale what they add."""
    model = t.AutoModelForCausalLM.from_config(t.GraniteConfig(**SIZE, residual_multiplier=0.5)).eval()
    assert looks_alike(model.model.layers[0])
    return model


@pytest.mark.parametrize("name", [*LEFT_ALONE, "granite scaled", "smollm3"])
def test_layers_of_another_shape_are_left_alone(name):
    """SmolLM3's, where they do not rotate."""
    model = granite() if name == "granite scaled" else build(name)
    rotates = [name == "smollm3" and bool(layer.self_attn.use_rope) for layer in layers_of(model)]
    adopt(model, name)
    assert fused_layers(model) == rotates
    assert name != "smollm3" or 0 < sum(rotates) < len(rotates)


def test_a_layer_that_treats_distant_positions_otherwise_is_left_alone(monkeypatch):
    model = build("llama")
    layer = model.model.layers[1].self_attn

    def forward(hidden_states, *, position_embeddings, position_ids, **kwargs):
        scaled = hidden_states * torch.where(position_ids > 100, 1.5, 1.0)[..., None]
        return type(layer).forward(layer, scaled, position_embeddings, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(layer, "forward", forward)
    adopt(model, "llama")
    assert fused_layers(model) == [True, False, True, True]


def test_tied_embeddings_stay_tied():
    model = t.LlamaForCausalLM(t.LlamaConfig(**{**SIZE, "tie_word_embeddings": True})).eval()
    adopt(model, "tied")
    assert isinstance(model.lm_head, PackedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight


LAYERS = SIZE["num_hidden_layers"]


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call of the kernel went through."""
    seen = []
    right = CompiledLayers.__call__
    monkeypatch.setattr(CompiledLayers, "__call__", lambda self, *given: seen.append(self.count) or right(self, *given))
    monkeypatch.setattr("specscope.model.fast.decoder.compiled_rows", lambda _: 1000)
    return seen


def stacked(name, dtype=torch.float32):
    model = build(name).to(dtype).requires_grad_(False)
    return model, adopt(model, name).layers


def one_by_one(model):
    for layer in model.model.layers:
        layer.forward.stack = None


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16)])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("at", [None, 0, LAYERS - 1])
def test_together_they_give_the_same_and_what_a_hook_changes_goes_into_those_behind_it(calls, name, dtype, rows, at):
    model, layers = stacked(name, dtype)
    if at is not None:
        model.model.layers[at].register_forward_hook(lambda _layer, _given, out: out + 1)
    calls.clear()
    together, cache = logits(model, layers, segments(rows))
    assert calls == [LAYERS] + [1] * (0 if at is None else LAYERS - at - 1)
    one_by_one(model)
    alone, other = logits(model, layers, segments(rows))
    assert torch.equal(together, alone)
    assert all(torch.equal(a, b) for a, b in zip(cache.stores, other.stores, strict=True))
