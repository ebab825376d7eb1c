"""Layers that are computed together: bit for bit what they give one by one, hooks and all."""

import pytest
import torch

from specscope.kernels.cpu.layer import CompiledLayers
from tests.model.test_fuse import SIZE, adopt, build, logits, segments

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
