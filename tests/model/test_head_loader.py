"""EAGLE heads on disk: every published way to write one is read alike, what does not fit is refused, what is saved
is what others read."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.heads.eagle_head import EagleHead
from specscope.model.heads.head_config import HeadConfig, Parallel
from specscope.model.heads.head_loader import load_head, save_head
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.kv_cache import BlockTable
from specscope.model.loader import load_model
from specscope.plans.heads import FLAGS, IN_SGLANG, LAYER_IDS, unread_layers
from specscope.trace.record.tree import DraftTree
from tests.heads import (
    CONFIG,
    DRAFT_VOCAB,
    VARIANTS,
    Reference,
    head_tensors,
    write_head,
    write_parallel_head,
    write_variant,
)

TOKENS = [5, 77, 5, 290, 31, 8, 8, 120]


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


def run(loaded, target, hidden, tokens=TOKENS):
    """(logits, hidden states) of every pair, through the runner."""
    runner = HeadRunner(loaded, target.vocab_size, target.max_context, blocks=2)
    table = BlockTable()
    runner.cache.reserve(table, len(tokens), 0)
    segment = Segment.of_tree(table, 0, tokens, DraftTree.empty(), logits=True)
    return runner.forward([dataclasses.replace(segment, wanted=range(len(tokens)))], hidden)


def features(loaded):
    width = loaded.head.config.target_width * len(loaded.head.config.aux_layers)
    return torch.randn(len(TOKENS), width, generator=torch.Generator().manual_seed(3))


def same_as_published(folder, target, told=None):
    """Load a head and hold one pass of it against plain torch on the tensors of the folder `told`."""
    loaded = load_head(str(folder), target)
    given = features(loaded)
    reference = Reference(told or folder, target.embedding.weight, target.output.weight)
    logits, hidden = reference.forward(TOKENS, reference.combine(given))
    got, state = run(loaded, target, loaded.head.combine(given))
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, hidden, rtol=1e-4, atol=1e-4)
    tokens = loaded.head.target_tokens()
    assert (torch.arange(len(logits[0])) if tokens is None else tokens).tolist() == reference.d2t.tolist()
    return loaded


@pytest.mark.parametrize("version", [3, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_gives_what_its_tensors_say(tmp_path, target, version, bias):
    loaded = same_as_published(write_head(tmp_path / "h", head_tensors(version, bias=bias)), target)
    assert loaded.name == "h"
    assert loaded.head.config.version == version
    assert loaded.head.config.aux_layers == ((2, 3, 4) if version == 3 else ("final",))
    assert loaded.embedding is target.embedding
    assert not any(p.requires_grad for p in loaded.head.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_config_says_of_the_arithmetic_is_computed(tmp_path, target, name):
    """And another head than without it; once more after it was saved."""
    loaded = same_as_published(write_variant(tmp_path / "h", name), target)
    plain = dict.fromkeys(VARIANTS[name])
    told = {key: value for key, value in CONFIG.items() if key in plain}
    tensors = load_file(tmp_path / "h" / "model.safetensors")
    tensors = {key: x for key, x in tensors.items() if not key.startswith(("input_norm", "fc_norm"))}
    without = load_head(str(write_head(tmp_path / "plain", tensors, **{**plain, **told})), target)
    same, other = (run(one, target, one.head.combine(features(one))) for one in (loaded, without))
    assert not torch.allclose(same[1], other[1], atol=1e-2)
    save_head(loaded.head, tmp_path / "again")
    same_as_published(tmp_path / "again", target)


def test_an_eagle_1_head_has_no_such_variant(tmp_path, target):
    folder = write_head(tmp_path / "h", head_tensors(version=1), norm_output=True)
    with pytest.raises(UserError, match="has `norm_output`, which an EAGLE-1 head has not"):
        load_head(str(folder), target)


def test_the_map_of_the_targets_tokens_follows_from_the_other(tmp_path, target):
    """NVIDIA's exporter writes d2t alone."""
    tensors = head_tensors()
    write_head(tmp_path / "whole", tensors)
    wanted = tensors.pop("t2d")
    loaded = same_as_published(write_head(tmp_path / "h", tensors), target)
    assert torch.equal(loaded.head.t2d, wanted)
    save_head(loaded.head, tmp_path / "again")
    same_as_published(tmp_path / "again", target)


def sharded(folder, tensors, name="model.safetensors", **config):
    """A head in two files and their index."""
    write_head(folder, tensors, **config)
    (folder / "model.safetensors").unlink()
    save, stem = (save_file if name.endswith("safetensors") else torch.save), name.partition(".")
    files = [f"{stem[0]}-0000{i}-of-00002.{stem[2]}" for i in (1, 2)]
    where = {key: files[i % 2] for i, key in enumerate(sorted(tensors))}
    for file in files:
        save({key: tensors[key] for key in where if where[key] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder, files


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_in_several_files(tmp_path, target, name):
    plain = write_head(tmp_path / "plain", head_tensors())
    folder, files = sharded(tmp_path / "h", head_tensors(), name)
    same_as_published(folder, target, plain)
    (folder / files[1]).unlink()
    with pytest.raises(UserError, match=rf"{name}.index.json names '{files[1]}', and there is no such file beside it"):
        load_head(str(folder), target)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{}", "does not say in `weight_map`"),
        (b'{"weight_map": {"fc.weight": 3}}', "does not say in `weight_map`"),
        (b'{"weight_map": {"fc.weight": "../h/other.safetensors"}}', "no such file beside it"),
        (b'{"weight_map": {"fc.weight": ".."}}', "no such file beside it"),
        (b"[", "index.json is not JSON"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, target, index, message):
    folder, _ = sharded(tmp_path / "h", head_tensors())
    (folder / "other.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(UserError, match=message):
        load_head(str(folder), target)


@pytest.mark.parametrize("unused", [False, True])
def test_a_head_of_several_layers(tmp_path, target, unused):
    """Those after the first are plain ones. vLLM's have a norm that they do not use."""
    tensors = head_tensors(layers=3)
    if unused:
        tensors["layers.2.hidden_norm.weight"] = torch.ones(48)
    folder = write_head(tmp_path / "h", tensors)
    loaded = same_as_published(folder, target)
    assert loaded.head.config.layers == 3
    save_head(loaded.head, tmp_path / "again")
    same_as_published(tmp_path / "again", target)
    with pytest.raises(UserError, match=r"lacks layers\.3\.input_layernorm"):
        load_head(str(write_head(tmp_path / "more", tensors, num_hidden_layers=4)), target)
    with pytest.raises(UserError, match=r"has layers\.2\."):
        load_head(str(write_head(tmp_path / "fewer", tensors, num_hidden_layers=2)), target)


def test_pytorch_model_bin_is_read_too(tmp_path, target):
    plain = write_head(tmp_path / "plain", head_tensors())
    write_head(tmp_path / "bin", head_tensors(), binary=True)
    assert not (tmp_path / "bin" / "model.safetensors").exists()
    same_as_published(tmp_path / "bin", target, plain)


@pytest.mark.parametrize("before", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("version", [3, 1])
def test_other_names_for_the_same_tensors(tmp_path, target, before, layer, version):
    plain = write_head(tmp_path / "plain", head_tensors(version))
    other = {before + name.replace("midlayer.", layer): x for name, x in head_tensors(version).items()}
    same_as_published(write_head(tmp_path / "other", other), target, plain)


def test_a_speculators_config_is_nested(tmp_path, target):
    plain = write_head(tmp_path / "plain", head_tensors(), norm_before_residual=True)
    told = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": CONFIG,
    }
    write_head(tmp_path / "nested", head_tensors())
    (tmp_path / "nested" / "config.json").write_text(json.dumps(told))
    assert same_as_published(tmp_path / "nested", target, plain).head.config.norm_before_residual


@pytest.mark.parametrize("version", [3, 1])
def test_an_embedding_of_its_own_is_used(tmp_path, target, version):
    own = torch.randn(300, 48, generator=torch.Generator().manual_seed(9))
    folder = write_head(tmp_path / "h", head_tensors(version) | {"embed_tokens.weight": own})
    assert same_as_published(folder, target).embedding is not target.embedding


def test_a_head_may_be_narrower_than_its_target_if_it_brings_an_embedding(tmp_path, target):
    sizes = {"hidden_size": 32, "target_hidden_size": 48}
    tensors = head_tensors(width=32)
    with pytest.raises(UserError, match=r"is 32 wide and .* 48: such a head needs embed_tokens of its own"):
        load_head(str(write_head(tmp_path / "without", tensors, **sizes)), target)
    own = torch.randn(300, 32, generator=torch.Generator().manual_seed(9))
    same_as_published(write_head(tmp_path / "with", tensors | {"embed_tokens.weight": own}, **sizes), target)


def test_an_unreduced_vocabulary_needs_no_map(tmp_path, target):
    assert same_as_published(write_head(tmp_path / "h", head_tensors(draft=300)), target).head.target_tokens() is None
    order = {"d2t": torch.arange(300).flip(0) - torch.arange(300), "t2d": torch.ones(300, dtype=torch.bool)}
    with pytest.raises(UserError, match=r"d2t in .* must be zeros: the vocabulary is not reduced"):
        load_head(str(write_head(tmp_path / "order", head_tensors(draft=300) | order)), target)
    # The authors write the maps all the same: zeros, and all True.
    maps = {"d2t": torch.zeros(300, dtype=torch.int64), "t2d": torch.ones(300, dtype=torch.bool)}
    same_as_published(write_head(tmp_path / "maps", head_tensors(draft=300) | maps), target)


@pytest.mark.parametrize(
    ("told", "aux_layers"),
    [
        ({}, (2, 3, 4)),  # the authors' rule for 7 layers
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}, (0, 3, 6)),  # vLLM: j enters layer j
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),  # SGLang: j leaves layer j
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": None}, (2, 3, 4)),
    ],
)
def test_which_layers_feed_the_head(tmp_path, target, told, aux_layers):
    assert (
        load_head(str(write_head(tmp_path / "h", head_tensors(), **told)), target).head.config.aux_layers == aux_layers
    )


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        ({LAYER_IDS: [1, 2, 3]}, "SGLang"),
        ({LAYER_IDS: [1, 2, 3], IN_SGLANG: {"use_aux_hidden_state": True}}, "SGLang"),
        ({IN_SGLANG: {LAYER_IDS: [0, 1, 2]}}, "vLLM"),
        ({LAYER_IDS: [1, 2, 3], IN_SGLANG: {LAYER_IDS: [0, 1, 2]}}, ""),
        ({}, ""),
    ],
)
def test_which_engine_would_not_read_the_layers(config, engine):
    assert unread_layers(config).partition(" would not read")[0] == engine


def test_a_huge_context_takes_no_memory(tmp_path, target):
    told = {"max_position_embeddings": 2**27}
    same_as_published(write_head(tmp_path / "h", head_tensors(), **told), target)


def test_the_authors_rule_needs_six_layers(tmp_path, tiny):
    shallow = load_model(str(tiny), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"the target has 3 layers; EAGLE-3 .* needs at least 6"):
        load_head(str(write_head(tmp_path / "h", head_tensors())), shallow)
    folder = write_head(tmp_path / "told", head_tensors(), eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    assert load_head(str(folder), shallow).head.config.aux_layers == (0, 1, 2)


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def one_of(tensor, value):
    """A tensor in which one number is spoiled."""
    tensor.view(-1)[7] = value
    return tensor


OUTSIDE = torch.arange(DRAFT_VOCAB) + 290  # the last one points to 290 + 2 * 59


@pytest.mark.parametrize(
    ("spoil", "told", "message"),
    [
        (None, {"hidden_size": 64}, "made for hidden states of 64, but .* has 48"),
        (None, {"target_hidden_size": 96}, "made for hidden states of 96, but .* has 48"),
        (None, {"vocab_size": 301}, "made for a vocabulary of 301, but .* has 300"),
        (None, {"hidden_size": None, "vocab_size": None}, "missing required field `hidden_size`"),
        (None, {"vocab_size": "300"}, r"Expected `int`, got `str` - at `\$.vocab_size`"),
        (None, {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, "asks for layer 7, but .* has 7 layers"),
        (
            None,
            {"eagle_aux_hidden_state_layer_ids": [1, -2, 3]},
            r">= 0 - at `\$.eagle_aux_\w+\[1\]`",
        ),
        (None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, "asks for layer 7"),
        (
            None,
            {"eagle_aux_hidden_state_layer_ids": [1, "x", 7]},
            r"got `str` - at `\$.eagle_aux_\w+\[1\]`",
        ),
        (None, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight in .* is \[48, 144\], .* makes it \[48, 96\]"),
        (None, {"intermediate_size": 96}, r"mlp.gate_proj.weight in .* is \[80, 48\], .* makes it \[96, 48\]"),
        (None, {"num_key_value_heads": 4}, r"self_attn.k_proj.weight in .* is \[24, 96\], .* makes it \[48, 96\]"),
        (None, {"draft_vocab_size": 61}, r"in .* is \[60.*\], .* makes it \[61"),
        (without("fc.weight"), {}, "lacks fc.weight"),
        (without("norm.weight"), {}, "lacks norm.weight"),
        (without("d2t"), {}, "lacks d2t"),
        (without("midlayer.self_attn.o_proj.weight"), {}, "lacks midlayer.self_attn.o_proj.weight"),
        (
            put("layers.1.mlp.up_proj.weight", torch.ones(2)),
            {"num_hidden_layers": 1},
            "has layers.1.mlp.* which an EAGLE-3 head has not",
        ),
        (put("fc2.weight", torch.ones(2)), {}, "has fc2.weight, which an EAGLE-3 head has not"),
        (put("fc.weight", torch.ones(48, 145)), {}, r"fc.weight in .* is \[48, 145\], .* makes it \[48, 144\]"),
        (put("d2t", OUTSIDE), {}, "d2t in .* points outside the target's vocabulary"),
        (put("d2t", -torch.arange(DRAFT_VOCAB) - 1), {}, "d2t in .* points outside the target's vocabulary"),
        (put("d2t", torch.full((DRAFT_VOCAB,), 2**63 - 1)), {}, "d2t in .* points outside the target's vocabulary"),
        (put("d2t", torch.zeros(DRAFT_VOCAB)), {}, r"d2t in .* is float32 \[60\]: it must be whole numbers, \[60\]"),
        (put("d2t", torch.zeros(DRAFT_VOCAB, dtype=torch.bool)), {}, "d2t in .* is bool"),
        (put("d2t", -torch.arange(DRAFT_VOCAB) + 7), {}, "d2t in .* gives two draft tokens the same token"),
        (put("t2d", torch.ones(300, dtype=torch.bool)), {}, "t2d in .* marks other tokens than d2t names"),
        (put("t2d", torch.ones(300)), {}, "t2d in .* is float32"),
        (put("fc.weight", torch.full((48, 144), torch.nan)), {}, "fc.weight holds NaN or infinite numbers"),
        (put("norm.weight", one_of(torch.ones(48), torch.inf)), {}, "norm.weight holds NaN or infinite numbers"),
        (put("lm_head.weight", one_of(torch.ones(60, 48), torch.nan)), {}, "lm_head.weight holds NaN or infinite"),
        (put("fc.weight", torch.zeros(48, 144)), {}, "fc.weight holds nothing but zeros"),
        (put("embed_tokens.weight", torch.full((300, 48), torch.nan)), {}, "embed_tokens.weight holds NaN"),
        (None, {"num_hidden_layers": 2}, r"lacks layers.1.input_layernorm"),
        (None, {"num_hidden_layers": 10**9}, r"<= 64 - at `\$.num_hidden_layers`"),
        (None, {"num_hidden_layers": 0}, r">= 1 - at `\$.num_hidden_layers`"),
        (None, {"head_dim": 0}, r">= 1 - at `\$.head_dim`"),
        (None, {"head_dim": 7}, "4 query and 2 key heads of 7"),
        (None, {"num_key_value_heads": 3}, "4 query and 3 key heads of 12"),
        (None, {"num_attention_heads": 64}, "64 query and 2 key heads of 0"),
        *[
            (None, {name: value}, rf"at `\$.{name}`")
            for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size")
            for value in (-1, 0, "48", 48.5, [48], True, 2**40, 10**30)
        ],
        *[(None, {"rms_norm_eps": value}, r"at `\$.rms_norm_eps`") for value in (0, -1e-5, "x", 1e300)],
        *[(None, {"rope_theta": value}, r"at `\$.rope_theta`") for value in (0, -1, "x", 1e300)],
        (None, {"hidden_act": "none such"}, "config.json has `hidden_act = none such`: it may change"),
        (None, {"hidden_act": 5}, "config.json has `hidden_act = 5`"),
        (None, {"rope_scaling": "twice"}, "config.json has `rope_scaling = twice`"),
        (None, {"rope_scaling": {"rope_type": "none such"}}, "config.json has `rope_type = none such`"),
        (None, {"rope_scaling": {"rope_type": "yarn"}}, "config.json does not describe a decoder layer"),
        (None, {"transformer_layer_config": [1]}, r"config.json has `transformer_layer_config = \[1\]`"),
        *[(None, {name: "yes"}, rf"at `\$.{name}`") for name in FLAGS],
        (None, {"eagle_config": 5}, "config.json has `eagle_config = 5`"),
        (None, {"norm_before_fc": True}, "lacks input_norm.weight"),
        (None, {"fc_norm": True}, "lacks fc_norm.0.weight"),
        (put("input_norm.weight", torch.ones(144)), {}, "has input_norm.weight, which an EAGLE-3 head has not"),
        (put("fc_norm.0.weight", torch.ones(48)), {}, "has fc_norm.0.weight, which an EAGLE-3 head has not"),
        *[(None, {"partial_rotary_factor": share}, "even number of the 12") for share in (0.25, 1.5, -1, "x", [0.5])],
        (None, {"rope_scaling": {"partial_rotary_factor": 0.1, "rope_type": "default"}}, "even number of the 12"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path, target, spoil, told, message):
    tensors = head_tensors()
    if spoil:
        spoil(tensors)
    folder = write_head(tmp_path / "h", tensors, **told)
    with pytest.raises(UserError, match=message) as error:
        load_head(str(folder), target)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def spoiled(name, content):
    def spoil(folder):
        (folder / name).write_bytes(content)

    return spoil


def torn(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def binary(value):
    def save(folder):
        (folder / "model.safetensors").unlink()
        torch.save(value, folder / "pytorch_model.bin")

    return save


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json: No such file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor pytorch_model.bin"),
        (spoiled("config.json", b'{"hidden_size": 48,'), "config.json is not JSON"),
        (spoiled("config.json", b"\xff\xfe"), "config.json is not JSON"),
        (spoiled("config.json", b"[1, 2]"), "config.json is not a JSON object"),
        (spoiled("config.json", b'{"a":' * 50_000), "nested too deep"),
        (torn, "cannot read .*model.safetensors"),
        (spoiled("model.safetensors", b""), "cannot read .*model.safetensors"),
        (spoiled("model.safetensors", b"\x00broken"), "cannot read .*model.safetensors"),
        (binary([1, 2]), "does not hold a state dict"),
        (binary({"fc.weight": "x"}), "does not hold a state dict"),
        (binary({"fc.weight": HeadConfig}), "cannot read .*pytorch_model.bin"),  # weights only: no code is run
    ],
)
def test_broken_folders_are_refused_in_one_line(tmp_path, target, spoil, message):
    folder = write_head(tmp_path / "h", head_tensors())
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        load_head(str(folder), target)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path, target):
    with pytest.raises(UserError, match=r"no EAGLE head at .*/nothing: give a folder with config.json"):
        load_head(str(tmp_path / "nothing"), target)


@pytest.mark.parametrize("share", range(0, 100, 5))
@pytest.mark.parametrize("zipped", [True, False])
def test_a_torn_bin_is_refused_in_one_line(tmp_path, target, share, zipped):
    """Cut anywhere, new and old format alike: torch raises half a dozen kinds of error, some without a word."""
    torch.save({"fc.weight": torch.ones(2, 2)}, tmp_path / "whole", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "whole").read_bytes()
    folder = write_head(tmp_path / "h", head_tensors(), binary=True)
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) * share // 100])
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model.bin") as error:
        load_head(str(folder), target)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"broken", b"\x80\x02.", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_bin_that_is_none_is_refused_in_one_line(tmp_path, target, content):
    folder = write_head(tmp_path / "h", head_tensors(), binary=True)
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*pytorch_model.bin"):
        load_head(str(folder), target)


def made(target, **more):
    """A head as training makes one, with weights that bfloat16 holds exactly."""
    layer = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "num_hidden_layers")}
    head = EagleHead(HeadConfig(3, layer, 48, DRAFT_VOCAB, (1, 3, 5), **more))
    generator = torch.Generator().manual_seed(1)
    for p in head.parameters():
        p.data.copy_((torch.randn(p.shape, generator=generator) * 0.2 + (p.dim() == 1)).bfloat16())
    head.set_vocabulary(torch.randperm(target.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values)
    return head


def test_what_is_saved_is_what_is_published(tmp_path, target):
    head = made(target)
    save_head(head, tmp_path / "a" / "head")
    told = json.loads((tmp_path / "a" / "head" / "config.json").read_text())
    wanted = {
        **{key: CONFIG[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
        **{key: CONFIG[key] for key in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "hidden_act")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "target_hidden_size": 48,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},  # the same, for SGLang
        "torch_dtype": "bfloat16",
    }
    assert wanted.items() <= told.items()
    h, mlp, tensors = 48, 80, load_file(tmp_path / "a" / "head" / "model.safetensors")
    shapes = {
        "fc.weight": [h, 3 * h],
        "midlayer.self_attn.q_proj.weight": [h, 2 * h],
        "midlayer.self_attn.k_proj.weight": [h // 2, 2 * h],
        "midlayer.self_attn.v_proj.weight": [h // 2, 2 * h],
        "midlayer.self_attn.o_proj.weight": [h, h],
        "midlayer.mlp.gate_proj.weight": [mlp, h],
        "midlayer.mlp.up_proj.weight": [mlp, h],
        "midlayer.mlp.down_proj.weight": [h, mlp],
        "midlayer.hidden_norm.weight": [h],
        "midlayer.input_layernorm.weight": [h],
        "midlayer.post_attention_layernorm.weight": [h],
        "norm.weight": [h],
        "lm_head.weight": [DRAFT_VOCAB, h],
        "d2t": [DRAFT_VOCAB],
        "t2d": [300],
    }
    assert {name: list(x.shape) for name, x in tensors.items()} == shapes
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(x.dtype is kinds.get(name, torch.bfloat16) for name, x in tensors.items())
    # Offsets: draft token i is the target's i + d2t[i], and those are the ones that t2d marks.
    assert (torch.arange(DRAFT_VOCAB) + tensors["d2t"]).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("more", [{}, {"norm_before_residual": True}])
def test_a_saved_head_comes_back_and_computes_the_same(tmp_path, target, more):
    head = made(target, **more)
    save_head(head, tmp_path / "head")
    back = same_as_published(tmp_path / "head", target)
    assert back.head.config.aux_layers == (1, 3, 5)
    assert back.head.config.norm_before_residual == head.config.norm_before_residual
    for name, tensor in head.state_dict().items():
        assert torch.equal(load_file(tmp_path / "head" / "model.safetensors")[name].to(tensor.dtype), tensor), name
    # And again: a head that was loaded can be saved.
    save_head(load_head(str(tmp_path / "head"), target).head, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "head" / "model.safetensors"
    ).read_bytes()


def test_a_p_eagle_head_is_read_as_speculators_write_it(tmp_path, target):
    """And computes what its tensors say: pairs as an EAGLE-3 head, and the feature of its mask rows through `fc`."""
    folder = write_parallel_head(tmp_path, mask_token=9, depths=5)
    loaded = same_as_published(folder, target)
    assert loaded.head.config.parallel == Parallel(mask_token=9, depths=5)
    reference = Reference(folder, target.embedding.weight)
    mask = loaded.head.combine(loaded.head.mask_features())
    torch.testing.assert_close(mask, reference.combine(reference.t["mask_hidden"].view(1, -1)))


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_a_p_eagle_head_in_the_authors_layout_is_read_too(tmp_path, target, name):
    """A flat config with any of the names that vLLM reads, and `mask_hidden` as vLLM holds it, [1, F]."""
    tensors = head_tensors(parallel=True)
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    loaded = same_as_published(write_head(tmp_path, tensors, **{name: 11}), target)
    assert loaded.head.config.parallel == Parallel(mask_token=11, depths=0)
    assert loaded.head.mask_hidden.shape == (1, 1, 3 * 48)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mask_token_id": None}, "names no mask token: a P-EAGLE head needs mask_token_id"),
        ({"mask_token_id": 300}, "names mask token 300 in a vocabulary of 300"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"mask_token_id": "x"}, "mask_token_id"),
        ({"speculators_config": {"proposal_methods": 3}}, "proposal_methods"),
    ],
)
def test_a_p_eagle_head_without_a_usable_mask_token_is_refused(tmp_path, target, told, message):
    folder = write_parallel_head(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**config, **told}.items() if v is not None}))
    with pytest.raises(UserError, match=message):
        load_head(str(folder), target)


def test_mask_features_of_another_size_are_refused(tmp_path, target):
    tensors = head_tensors(parallel=True)
    tensors["mask_hidden"] = tensors["mask_hidden"][..., :48]
    with pytest.raises(UserError, match=r"mask_hidden in .* is \[1, 1, 48\], but config.json makes it \[1, 1, 144\]"):
        load_head(str(write_parallel_head(tmp_path, tensors)), target)


def test_a_saved_p_eagle_head_comes_back_and_computes_the_same(tmp_path, target):
    first = load_head(str(write_parallel_head(tmp_path / "one", mask_token=9, depths=5)), target)
    save_head(first.head, tmp_path / "two")
    second = load_head(str(tmp_path / "two"), target)
    assert second.head.config.parallel == first.head.config.parallel
    for name, tensor in second.head.state_dict().items():
        wanted = first.head.state_dict()[name]
        assert torch.equal(tensor, wanted.bfloat16().float() if wanted.is_floating_point() else wanted)
    same_as_published(tmp_path / "two", target)


def test_a_mask_token_alone_makes_no_p_eagle_head(tmp_path, target):
    """Configs carry mask tokens for other reasons; `mask_hidden` is what decides."""
    loaded = load_head(str(write_head(tmp_path, head_tensors(), mask_token_id=3)), target)
    assert loaded.head.config.parallel is None
