"""The taps over a stand-in of vLLM's modules with the weights of a transformers model: its operations are the truth."""

from types import SimpleNamespace

import pytest
import torch

from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.model.reference import ModelPasses, ModelReference, relative
from specscope.errors import UserError
from specscope.measure.locate.tapped import read_taps
from specscope.trace.inside.settings import PluginSettings
from specscope.vllm import taps as module
from specscope.vllm.kv_layout import KvReader
from specscope.vllm.witness import BlockLists
from tests.vllm import stand_in
from tests.vllm.stand_in import BLOCK, Attention, GPUModelRunner, rows, scheduled

PROMPT, NEXT = [3, 17, 9, 40, 2, 8], [11]
INNER = (
    *("input_layernorm", "post_attention_layernorm:in", "post_attention_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "query", "key", "attention", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj:in", "down_proj")),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return stand_in.tiny(folder), ModelSource(str(folder), "tiny")


@pytest.fixture
def runner(model):
    return GPUModelRunner(model[0])


def tapped(runner, folder, **bounds):
    """The prompt in one step, one token in the next."""
    return stand_in.run(runner, [PROMPT, NEXT], folder, **bounds)


def right_of(model):
    names = {f"layers.{i}.{name}" for i in range(3) for name in (*INNER, "self_attn.value")}
    return ModelPasses(ModelReference(model[1]), PROMPT + NEXT, names).feed(0, 7, wanted=range(7)).taps


def test_every_operation_of_the_table_is_the_models_own(model, runner, tmp_path):
    guard = tapped(runner, tmp_path)
    assert guard.errors == 0
    made = read_taps(tmp_path)
    told = [(each.who, each.step, each.computed) for each in made.forwards]
    assert told == [("target", 0, [0]), ("target", 1, [6])]
    right = right_of(model)
    compared = [f"layers.{i}.{name}" for i in range(3) for name in INNER]
    compared += ["embedding", "norm", "layers.0", "layers.1", "layers.2"]
    for name in compared:
        ours = torch.cat([rows(each.tensors[name]) for each in made.forwards])
        assert float(relative(ours, right[name]).max()) < 1e-5, name
    for i in range(3):
        for kind, of in (("keys", "key"), ("values", "value")):
            read = rows(made.forwards[1].tensors[f"layers.{i}.self_attn.{kind} read.0"])
            assert float(relative(read, right[f"layers.{i}.self_attn.{of}"]).max()) < 1e-5
    logits, tokens = (made.forwards[1].tensors[name] for name in ("lm_head", "lm_head.tokens"))
    assert torch.allclose(right["lm_head"][-1][tokens[0]], logits[0], atol=1e-5)
    assert made.forwards[1].tensors["positions"].tolist() == [6]
    assert made.forwards[1].tensors["layers.0.self_attn.slots"].tolist() == [2 * BLOCK + 2]
    assert made.forwards[1].blocks == [[5, 2, 9]]


def test_a_cache_s_layout_is_learned_once(runner, tmp_path, monkeypatch):
    """It was learned again in each forward: a block was written and read for every layer of every step."""
    made = []
    monkeypatch.setattr(module, "KvReader", lambda attention: made.append(attention) or KvReader(attention))
    tapped(runner, tmp_path)
    assert len(made) == 3


def test_a_request_that_comes_back_has_other_blocks():
    """V1 says so by name: they were taken for further ones."""
    blocks, first = BlockLists(), scheduled(PROMPT, 0, [5, 2])
    blocks.update(first)
    held = blocks.of("r")
    again = scheduled(NEXT, 6)
    again.scheduled_cached_reqs.new_block_ids = [([7, 3],)]
    again.scheduled_cached_reqs.resumed_req_ids = {"r"}
    blocks.update(again)
    assert (held, blocks.of("r")) == ([5, 2], [7, 3])


def test_taps_change_nothing_and_off_nothing_is_hooked(model, runner, tmp_path):
    tapped(runner, tmp_path)
    plain = GPUModelRunner(model[0])
    with torch.inference_mode():
        without = plain.execute_model(scheduled(PROMPT, 0, [5])), plain.execute_model(scheduled(NEXT, 6))
    assert all(torch.equal(a, b) for a, b in zip(runner.logits, without, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in plain.model.modules())
    assert PluginSettings.read({}).taps is None


def test_borders_alone_and_the_layers_that_are_named(runner, tmp_path):
    tapped(runner, tmp_path, inside="target.1,drafter")
    tensors = read_taps(tmp_path).forwards[0].tensors
    inner = {name.split(".")[1] for name in tensors if name.startswith("layers.") and name.count(".") > 1}
    borders = {name for name in tensors if name.count(".") == 1 and name[-1].isdigit()}
    assert borders == {"layers.0", "layers.1", "layers.2"}
    assert {name for name in tensors if name.startswith("layers.0.")} == {"layers.0.self_attn.slots"}
    assert inner == {"0", "1"}  # of the first layer what attention was told, and nothing else


def test_no_failure_reaches_the_engine(model, runner, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no rows today")
        yield  # a generator, as the table's functions are

    monkeypatch.setattr(module, "TABLE", {**module.TABLE, "qkv_proj": fail})
    guard = tapped(runner, tmp_path)
    with torch.inference_mode():
        assert torch.equal(runner.logits[0], GPUModelRunner(model[0]).execute_model(scheduled(PROMPT, 0, [5])))
    assert guard.errors == 5
    assert guard.is_off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_layout_of_a_cache_is_learned(dtype):
    torch.manual_seed(1)
    attention = Attention("a", 4, 2, 6)
    attention.kv_cache = attention.kv_cache.to(dtype)
    keys, values = (torch.randn(11, 2, 6).to(dtype).float() for _ in range(2))
    table = torch.tensor([7, 3, 12])
    places = torch.arange(11)
    slots = table[places // BLOCK] * BLOCK + places % BLOCK
    attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)
    reader = KvReader(attention)
    assert reader.why == ""
    read = reader.read(table, 11)
    assert torch.equal(read[0].float(), keys)
    assert torch.equal(read[1].float(), values)


def test_a_cache_that_does_not_keep_what_it_is_given_is_not_read():
    attention = Attention("a", 4, 2, 6)
    attention.impl = SimpleNamespace(do_kv_cache_update=lambda *_: None)
    assert "changes keys and values" in KvReader(attention).why
    attention.impl = SimpleNamespace()
    assert "in a separate call" in KvReader(attention).why


def test_variables_that_cannot_be_used_are_named(tmp_path):
    read = PluginSettings.read({"SPECSCOPE_TAPS": str(tmp_path), "SPECSCOPE_TAPS_INSIDE": "target.3,drafter"})
    assert read.is_on
    assert read.taps.wants("target", "layers.3.mlp.down_proj")
    assert read.taps.wants("drafter", "layers.0.mlp.down_proj")
    assert read.taps.wants("target", "layers.2")
    assert not read.taps.wants("target", "layers.2.mlp.down_proj")
    read.check()
    with pytest.raises(UserError, match="SPECSCOPE_TAPS_INSIDE is 'layer 3': use all or layers"):
        PluginSettings.read({"SPECSCOPE_TAPS": "x", "SPECSCOPE_TAPS_INSIDE": "layer 3"}).check()
    with pytest.raises(UserError, match="SPECSCOPE_TAPS_MIB is '-1': use a number of MiB"):
        PluginSettings.read({"SPECSCOPE_TAPS": "x", "SPECSCOPE_TAPS_MIB": "-1"}).check()
