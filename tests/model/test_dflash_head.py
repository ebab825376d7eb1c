"""DFlash heads: every published layout is read as vLLM reads it, what it says changes what is computed, and what is
not computed is refused by name."""

import json

import pytest
import torch

from specscope.errors import UserError
from specscope.model.batch import Segment
from specscope.model.heads.dflash import DFlashRunner, block_segment, load_dflash
from specscope.model.heads.head_runner import load_head
from specscope.model.kv_cache import BlockTable
from specscope.model.loader import load_model
from specscope.plans.model_digest import model_digest
from specscope.trace.record.tree import DraftTree
from tests.dflash import BLOCK, VARIANTS, DFlashReference, dflash_tensors, write_dflash, write_speculators

CONTEXT, ROOT = 23, 41  # more than a block of the cache


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


def features(loaded, rows=CONTEXT, seed=3):
    width = loaded.head.fc.in_features
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def runner_of(loaded, target):
    return DFlashRunner(loaded, target, blocks=8)


def drafted(runner, given, depths, cuts=(CONTEXT,)):
    """The logits of one pass over the blocks of several requests, each behind features [T, F], written in pieces."""
    config, tables = runner.head.config, [BlockTable() for _ in given]
    blocks = []
    for table, each, depth in zip(tables, given, depths, strict=True):
        rows, start = config.rows(depth), 0
        runner.cache.reserve(table, len(each) + rows, 0)
        for size in cuts:
            piece = each[start : start + size]
            context = Segment.of_tree(table, start, [0] * len(piece), DraftTree.empty(), logits=False)
            runner.write_context([context], runner.combine(piece))
            start += size
        blocks.append(block_segment(table, len(each), ROOT, rows, config))
    logits = runner.forward(blocks).split(depths)
    for table in tables:
        runner.cache.truncate(table, 0)
    return logits


def full(runner, logits):
    """Over the target's vocabulary."""
    if runner.d2t is None:
        return logits
    return logits.new_full((len(logits), runner.vocab_size), -torch.inf).index_copy_(1, runner.d2t, logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_gives_what_its_tensors_and_its_config_say(tmp_path, target, name):
    folder = VARIANTS[name](tmp_path / "h")
    loaded = load_dflash(str(folder), target)
    assert loaded.name == "h"
    runner, given = runner_of(loaded, target), features(loaded)
    longest = loaded.head.config.longest
    assert longest == BLOCK - (not loaded.head.config.from_anchor)
    reference = DFlashReference(folder, target.embedding, target.output.weight)
    for depth in (longest, 2, 1):
        wanted = reference.drafts(given, ROOT, depth)
        for cuts in ((CONTEXT,), (16, 1, 6)):
            (logits,) = drafted(runner, [given], [depth], cuts)
            torch.testing.assert_close(full(runner, logits), wanted, rtol=1e-4, atol=1e-4)


OTHERS = ["causal", "every layer with a window", "full and sliding", "a mask embedding", "yarn", "no rotary base"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_config_says_changes_what_is_computed(tmp_path, target, name):
    """So a test of the arithmetic cannot pass where the key is not read."""
    made = []
    for how in ("z-lab", name):
        loaded = load_dflash(str(VARIANTS[how](tmp_path / how)), target)
        made.append(drafted(runner_of(loaded, target), [features(loaded)], [4])[0])
    assert not torch.allclose(*made, atol=1e-2)


UNKNOWN = {
    "conv_kernel_size": {"conv_kernel_size": 3},
    "partial_rotary_factor = 0.5": {"partial_rotary_factor": 0.5},
    "is_neox_style = False": {"is_neox_style": False},
    "use_aux_hidden_state = False": {"inside": {"use_aux_hidden_state": False}},
    "attention_sink_bias": {"inside": {"attention_sink_bias": True}},
    "attention_value_scale": {"inside": {"attention_value_scale": 0.5}},
    "norm_before_fc": {"norm_before_fc": True},
    "logit_scale = 0.5": {"logit_scale": 0.5},
    "rope_type = dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
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
    "has markov.weight, which a DFlash head does not have": lambda f: write_dflash(
        f, dflash_tensors() | {"markov.weight": torch.ones(2)}
    ),
    r"fc.weight in .* is \[48, 96\], but config.json makes it \[48, 144\]": lambda f: write_dflash(
        f, dflash_tensors(aux=2)
    ),
    "made for a vocabulary of 301": lambda f: write_dflash(f, vocab_size=301),
    "made for hidden states of 64": lambda f: write_dflash(f, target_hidden_size=64),
    "asks for layer 7, but .* has 7 layers": lambda f: write_dflash(f, leaving=(1, 3, 6)),
    "names mask token 300 in a vocabulary of 300": lambda f: write_dflash(f, inside={"mask_token_id": 300}),
    "mask embedding of 47 numbers": lambda f: write_dflash(f, mask=torch.ones(47)),
    "embedding of token 9, but the config's mask_token_id is 7": lambda f: write_dflash(
        f, mask={"mask_token_id": 9, "embedding": torch.ones(48)}
    ),
    "lacks lm_head.weight": lambda f: write_dflash(
        f, dflash_tensors() | {"d2t": torch.zeros(60, dtype=torch.int64)}, draft_vocab_size=60
    ),
    "has no target_layer_ids": lambda f: write_dflash(f, leaving=()),
    "has no block_size of at least 2": lambda f: write_dflash(f, block=None),
    "mask_token_id": lambda f: write_speculators(f, mask_token_id=None),
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


def test_a_mask_embedding_is_part_of_the_heads_digest(tmp_path):
    one, other, same = (
        model_digest(write_dflash(tmp_path / name, mask=torch.full((48,), value)))
        for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0))
    )
    assert one == same
    assert len({one, other, model_digest(write_dflash(tmp_path / "d"))}) == 3


def test_a_mask_embedding_that_runs_code_is_not_loaded(tmp_path, target):
    folder = write_dflash(tmp_path)
    torch.save(json.JSONDecoder, folder / "mask_embedding.pt")
    with pytest.raises(UserError, match=r"cannot read .*mask_embedding\.pt"):
        load_dflash(str(folder), target)
