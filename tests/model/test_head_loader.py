"""Heads on disk, EAGLE and DFlash: published layouts are read alike, what does not fit is refused."""

import dataclasses
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.heads.dflash import load_dflash
from specscope.model.heads.eagle_head import EagleHead, HeadConfig
from specscope.model.heads.head_runner import HeadRunner, load_head, save_head
from specscope.model.kv_cache import BlockTable
from specscope.model.loader import load_model
from specscope.plans.kinds import FLAGS, IN_SGLANG, LAYER_IDS, unread_layers
from specscope.trace.record.tree import DraftTree
from tests.dflash import dflash_tensors, write_dflash, write_speculators
from tests.heads import (
    CONFIG,
    DRAFT_VOCAB,
    Reference,
    head_tensors,
    write_head,
    write_parallel_head,
)

TOKENS = [5, 77, 5, 290, 31, 8, 8, 120]


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


def run(loaded, target, hidden, tokens=TOKENS):
    """(logits, hidden states) of every pair, through the runner."""
    runner = HeadRunner(loaded, target, blocks=2)
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


def own_embedding(width=48):
    return {"embed_tokens.weight": torch.randn(300, width, generator=torch.Generator().manual_seed(9))}


def maps(order):
    return {"d2t": order - torch.arange(300), "t2d": torch.ones(300, dtype=torch.bool)}


def flat_parallel(folder, name):
    """A flat config with one of the names that vLLM reads, and `mask_hidden` as vLLM holds it, [1, F]."""
    tensors = head_tensors(parallel=True)
    return write_head(folder, tensors | {"mask_hidden": tensors["mask_hidden"][0]}, **{name: 11})


MASK_TOKENS = ("pard_token", "ptd_token_id", "mask_token_id")
NARROW = {"hidden_size": 32, "target_hidden_size": 48}
PUBLISHED = {
    "EAGLE-3": lambda folder: write_head(folder, head_tensors()),
    "EAGLE-1 with biases": lambda folder: write_head(folder, head_tensors(1, bias=True)),
    "P-EAGLE": write_parallel_head,
    **{f"P-EAGLE by {name}": lambda folder, name=name: flat_parallel(folder, name) for name in MASK_TOKENS},
    "several layers": lambda folder: write_head(folder, head_tensors(layers=3)),
    "vLLM's layers have a norm that they do not use": lambda folder: write_head(
        folder, head_tensors(layers=3) | {"layers.2.hidden_norm.weight": torch.ones(48)}
    ),
    "EAGLE-1 with one": lambda folder: write_head(folder, head_tensors(1) | own_embedding()),
    "narrower than its target": lambda folder: write_head(folder, head_tensors(width=32) | own_embedding(32), **NARROW),
    "the whole vocabulary, with maps": lambda folder: write_head(
        folder, head_tensors(draft=300) | maps(torch.arange(300))
    ),
    "NVIDIA's exporter writes d2t alone": lambda folder: write_head(
        folder, {name: x for name, x in head_tensors().items() if name != "t2d"}
    ),
    "a huge context takes no memory": lambda folder: write_head(folder, head_tensors(), max_position_embeddings=2**27),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_gives_what_its_tensors_say_and_again_once_it_was_saved(tmp_path, target, name):
    loaded = same_as_published(PUBLISHED[name](tmp_path / "h"), target)
    assert loaded.name == "h"
    assert not any(p.requires_grad for p in loaded.head.parameters())
    config = loaded.head.config
    if config.version == 3 and config.mask_token is None and loaded.embedding is target.embedding:
        save_head(loaded.head, tmp_path / "again")
        back = same_as_published(tmp_path / "again", target)
        assert back.head.config.aux_layers == loaded.head.config.aux_layers
        for key, tensor in back.head.state_dict().items():
            wanted = loaded.head.state_dict()[key]
            assert torch.equal(tensor, wanted.bfloat16().float() if tensor.is_floating_point() else wanted)


def sharded(folder, name):
    """A head in two files and their index."""
    tensors = head_tensors()
    write_head(folder, tensors)
    (folder / "model.safetensors").unlink()
    save, stem = (save_file if name.endswith("safetensors") else torch.save), name.partition(".")
    files = [f"{stem[0]}-0000{i}-of-00002.{stem[2]}" for i in (1, 2)]
    where = {key: files[i % 2] for i, key in enumerate(sorted(tensors))}
    for file in files:
        save({key: tensors[key] for key in where if where[key] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def renamed(version, before, layer):
    tensors = head_tensors(version).items()
    return lambda folder: write_head(folder, {before + name.replace("midlayer.", layer): x for name, x in tensors})


def nested(folder):
    """As vLLM's speculators write it."""
    told = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFT_VOCAB, "transformer_layer_config": CONFIG}
    (write_head(folder, head_tensors()) / "config.json").write_text(json.dumps(told | {"target_hidden_size": None}))
    return folder


@pytest.mark.parametrize(
    ("version", "write"),
    [
        (3, lambda folder: write_head(folder, head_tensors(), binary=True)),
        (3, lambda folder: sharded(folder, "model.safetensors")),
        (3, lambda folder: sharded(folder, "pytorch_model.bin")),
        (3, nested),
        *[(v, renamed(v, *how)) for v in (3, 1) for how in (("", "layers.0."), ("model.", "midlayer."))],
        (3, renamed(3, "model.", "layers.0.")),
    ],
)
def test_other_ways_to_write_the_same_head(tmp_path, target, version, write):
    same_as_published(write(tmp_path / "other"), target, write_head(tmp_path / "plain", head_tensors(version)))


@pytest.mark.parametrize(
    ("told", "aux_layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}, (0, 3, 6)),  # vLLM: j enters layer j
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),  # SGLang: j leaves layer j
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),  # the authors' rule for 7 layers
    ],
)
def test_which_layers_feed_the_head(tmp_path, target, told, aux_layers):
    loaded = load_head(str(write_head(tmp_path / "h", head_tensors(), **told)), target)
    assert loaded.head.config.aux_layers == aux_layers


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
    assert unread_layers(config).partition(" would not find")[0] == engine


def test_the_authors_rule_needs_six_layers(tmp_path, tiny):
    shallow = load_model(str(tiny), torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"the target has 3 layers; EAGLE-3 .* needs at least 6"):
        load_head(str(write_head(tmp_path / "h", head_tensors())), shallow)


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def torn(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def binary(value):
    def save(folder):
        (folder / "model.safetensors").unlink()
        torch.save(value, folder / "pytorch_model.bin")

    return save


def plain_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def torn_binary(share, zipped):
    """Cut anywhere, new and old format alike: torch raises half a dozen kinds of error, some without a word."""

    def cut(folder):
        (folder / "model.safetensors").unlink()
        torch.save({"fc.weight": torch.ones(2, 2)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        whole = (folder / "pytorch_model.bin").read_bytes()
        (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) * share // 100])

    return cut


def index(content):
    def write(folder):
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_bytes(content)

    return write


def parallel(**told):
    def write(folder):
        config = json.loads((write_parallel_head(folder) / "config.json").read_text()) | told
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return write


def mask_hidden(folder):
    tensors = head_tensors(parallel=True)
    write_parallel_head(folder, tensors | {"mask_hidden": tensors["mask_hidden"][..., :48]})


OTHERS = "d2t in .* must give each of (60|300) draft tokens another one"
OUTSIDE = torch.arange(DRAFT_VOCAB) + 290  # the last one points to 290 + 2 * 59
QUANTISED = (torch.int8, torch.float8_e4m3fn)
IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size")
BROKEN = [  # what its config says (None: nothing), a tensor (None: it is not there), or what happens to its folder
    ({"target_hidden_size": 96}, "made for hidden states of 96, but .* has 48"),
    ({"vocab_size": 301}, "made for a vocabulary of 301, but .* has 300"),
    ({"hidden_size": None, "vocab_size": None}, "missing required field `hidden_size`"),
    ({"eagle_config": {IDS: [1, 2, 6]}}, "asks for layer 7, but .* has 7 layers"),
    ({IDS: [1, -2, 3]}, r">= 0 - at `\$.eagle_aux_\w+\[1\]`"),
    ({IDS: [1, 2]}, r"fc.weight in .* is \[48, 144\], .* makes it \[48, 96\]"),
    ({"draft_vocab_size": 61}, r"in .* is \[60.*\], .* makes it \[61"),
    ({"num_hidden_layers": 2}, r"lacks layers.1.input_layernorm"),
    ({"num_hidden_layers": 10**9}, r"<= 64 - at `\$.num_hidden_layers`"),
    ({"num_key_value_heads": 3}, "4 query and 3 key heads of 12"),
    *[({name: value}, rf"at `\$.{name}`") for name in SIZES for value in (-1, "48", 48.5)],
    *[({name: value}, rf"at `\$.{name}`") for name in ("rms_norm_eps", "rope_theta") for value in (0, 1e300)],
    ({"hidden_act": "none such"}, "config.json has `hidden_act = none such`: it may change"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "config.json does not describe a decoder layer"),
    *[({name: "yes"}, rf"at `\$.{name}`") for name in FLAGS],
    ({"eagle_config": 5}, "config.json has `eagle_config = 5`"),
    ({"norm_before_fc": True}, "lacks input_norm.weight"),
    ({"partial_rotary_factor": 0.5}, "config.json has `partial_rotary_factor = 0.5`: it may change"),
    *[((name, None), f"lacks {name}") for name in ("fc.weight", "d2t", "midlayer.hidden_norm.weight")],
    (("fc2.weight", torch.ones(2)), "has fc2.weight, which an EAGLE-3 head does not have"),
    *[(("d2t", order), OTHERS) for order in (OUTSIDE, -torch.arange(DRAFT_VOCAB) - 1)],
    (("d2t", torch.zeros(DRAFT_VOCAB)), r"d2t in .* is float32 \[60\]: it must be whole numbers, \[60\]"),
    (("t2d", torch.ones(300, dtype=torch.bool)), "t2d in .* is bool"),
    (("fc.weight", torch.full((48, 144), torch.nan)), "fc.weight contains NaN or infinite numbers"),
    (("fc.weight", torch.zeros(48, 144)), "fc.weight contains only zeros"),
    *[(("fc.weight", torch.ones(48, 144).to(dtype)), f"fc.weight in .* is {dtype}: a head") for dtype in QUANTISED],
    (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json: No such file"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has neither model.safetensors nor pytorch_model.bin"),
    (file("config.json", b"[1, 2]"), "config.json is not a JSON object"),
    (torn, "cannot read .*model.safetensors"),
    (binary([1, 2]), "does not hold a state dict"),
    (plain_pickle, "cannot read .*bin: "),
    (binary({"fc.weight": HeadConfig}), "bin: it holds Python objects, which specscope never loads: save its tensors"),
    *[(torn_binary(share, zipped), "cannot read .*bin") for share in (0, 30, 90) for zipped in (True, False)],
    (index(b'{"weight_map": {"fc.weight": 3}}'), "does not say in `weight_map`"),
    (index(b'{"weight_map": {"fc.weight": "../h/other.safetensors"}}'), "which is not in its folder"),
    (lambda folder: write_head(folder, head_tensors(1), norm_output=True), "has `norm_output`, which an EAGLE-1 head"),
    (lambda folder: write_head(folder, head_tensors(1), **{IDS: [1, 2, 3]}), f"has `{IDS}`, which an EAGLE-1 head"),
    (lambda folder: write_head(folder, head_tensors(1), draft_vocab_size=60), "has `draft_vocab_size`, which an"),
    ({IDS: [1, 3, 5], "eagle_config": {IDS: [0, 2, 3]}}, r"`.*ids = \[1, 3, 5\] beside \[0, 2, 3\] in eagle_config"),
    (("layers.0.mlp.up_proj.weight", torch.ones(80, 48)), r"by two names: midlayer\. and layers\.0\."),
    (lambda folder: write_head(folder, head_tensors(width=32), **NARROW), "is 32 wide and .* 48: it needs its own emb"),
    (parallel(mask_token_id=None), "names no mask token: a P-EAGLE head needs mask_token_id"),
    (parallel(mask_token_id=300), "names mask token 300 in a vocabulary of 300"),
    (mask_hidden, r"mask_hidden in .* is \[1, 1, 48\], but config.json makes it \[1, 1, 144\]"),
    (lambda folder: folder.rename(folder.parent / "gone"), "no head at .*/h: give a folder with config.json"),
]


@pytest.mark.parametrize(("what", "message"), BROKEN)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, target, what, message, recwarn):
    tensors = head_tensors()
    if isinstance(what, tuple):
        tensors = {name: tensor for name, tensor in (tensors | dict([what])).items() if tensor is not None}
    folder = write_head(tmp_path / "h", tensors, **(what if isinstance(what, dict) else {}))
    if callable(what):
        what(folder)
    with pytest.raises(UserError, match=message) as error:
        load_head(str(folder), target)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    assert not recwarn.list


def test_rotations_that_are_no_numbers_are_refused(tmp_path, target):
    scaling = {"rope_type": "linear", "factor": 0}
    loaded = load_head(str(write_head(tmp_path / "h", head_tensors(), rope_scaling=scaling)), target)
    with pytest.raises(UserError, match="rotations that are no numbers"):
        HeadRunner(loaded, target, blocks=2)


def test_what_is_saved_is_what_is_published(tmp_path, target):
    """A head as training makes one, with weights that bfloat16 holds exactly; one that was loaded is saved alike."""
    layer = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "num_hidden_layers")}
    head = EagleHead(HeadConfig(3, layer, 48, DRAFT_VOCAB, (1, 3, 5)))
    generator = torch.Generator().manual_seed(1)
    for p in head.parameters():
        p.data.copy_((torch.randn(p.shape, generator=generator) * 0.2 + (p.dim() == 1)).bfloat16())
    head.set_vocabulary(torch.randperm(target.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values)
    save_head(head, tmp_path / "a" / "head")
    told = json.loads((tmp_path / "a" / "head" / "config.json").read_text())
    wanted = {
        **{key: value for key, value in CONFIG.items() if key != "max_position_embeddings"},
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "target_hidden_size": 48,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},  # the same, for SGLang
        "torch_dtype": "bfloat16",
    }
    assert wanted.items() <= told.items()
    saved = load_file(tmp_path / "a" / "head" / "model.safetensors")
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in head_tensors().items()}
    # Offsets: draft token i is the target's i + d2t[i], and those are the ones that t2d marks.
    assert (torch.arange(DRAFT_VOCAB) + saved["d2t"]).tolist() == saved["t2d"].nonzero()[:, 0].tolist()
    save_head(load_head(str(tmp_path / "a" / "head"), target).head, tmp_path / "again")
    whole = [folder / "model.safetensors" for folder in (tmp_path / "again", tmp_path / "a" / "head")]
    assert whole[0].read_bytes() == whole[1].read_bytes()


UNKNOWN = {
    "conv_kernel_size": {"conv_kernel_size": 3},
    "partial_rotary_factor = 0.5": {"partial_rotary_factor": 0.5},
    "attention_sink_bias": {"inside": {"attention_sink_bias": True}},
    "sliding attention without swa_window_size": {"inside": {"use_swa": True}},
    "layer_types of 1 layers": {"layer_types": ["full_attention"]},
    "something_new = 3": {"something_new": 3},
}


@pytest.mark.parametrize("key", UNKNOWN)
def test_a_key_that_is_not_computed_is_refused_by_name(tmp_path, target, key):
    with pytest.raises(UserError, match=key):
        load_dflash(str(write_dflash(tmp_path, **UNKNOWN[key])), target)


def without(name):
    return {key: x for key, x in dflash_tensors().items() if key != name}


MISFITS = {
    "lacks layers.1.self_attn.k_norm.weight": lambda f: write_dflash(f, without("layers.1.self_attn.k_norm.weight")),
    r"fc.weight in .* is \[48, 96\], but config.json makes it \[48, 144\]": lambda f: write_dflash(
        f, dflash_tensors(aux=2)
    ),
    "made for hidden states of 64": lambda f: write_dflash(f, target_hidden_size=64),
    "asks for layer 7, but .* has 7 layers": lambda f: write_dflash(f, leaving=(1, 3, 6)),
    "names mask token 300 in a vocabulary of 300": lambda f: write_dflash(f, inside={"mask_token_id": 300}),
    "embedding of token 9, but the config's mask_token_id is 7": lambda f: write_dflash(
        f, mask={"mask_token_id": 9, "embedding": torch.ones(48)}
    ),
    "lacks lm_head.weight": lambda f: write_dflash(
        f, dflash_tensors() | {"d2t": torch.zeros(60, dtype=torch.int64)}, draft_vocab_size=60
    ),
    "has no target_layer_ids": lambda f: write_dflash(f, leaving=()),
    "has no block_size of at least 2": lambda f: write_dflash(f, block=None),
    "d2t in .* must give each of 60 draft tokens another one": lambda f: write_speculators(
        f, dflash_tensors(draft=60) | {"d2t": torch.full((60,), 300)}
    ),
    "of the kind DFlash2": lambda f: write_dflash(f, architectures=["DFlash2DraftModel"]),
}


@pytest.mark.parametrize("wrong", MISFITS)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path, target, wrong):
    with pytest.raises(UserError, match=wrong) as refused:
        load_dflash(str(MISFITS[wrong](tmp_path)), target)
    assert "\n" not in str(refused.value)


def test_it_is_no_eagle_head(tmp_path, target):
    with pytest.raises(UserError, match=r"holds no EAGLE head: it is for --drafter dflash"):
        load_head(str(write_dflash(tmp_path)), target)


def test_a_mask_embedding_that_runs_code_is_not_loaded(tmp_path, target):
    folder = write_dflash(tmp_path)
    torch.save(json.JSONDecoder, folder / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"cannot read .*mask_embedding\.pt"):
        load_dflash(str(folder), target)
