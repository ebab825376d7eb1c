"""DFlash heads: every published layout is read as vLLM reads it, what it says changes what is computed, and what is
not computed is refused by name."""

import json

import pytest
import torch

from specscope.errors import UserError
from specscope.model.heads.dflash import load_dflash
from specscope.model.heads.head_runner import load_head
from specscope.model.loader import load_model
from tests.dflash import dflash_tensors, write_dflash, write_speculators


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


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
