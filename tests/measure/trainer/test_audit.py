"""`audit --trainer`: a healthy pair agrees; a weight, a map or a setting that differs is named by its key."""

import pytest
import torch

from specscope.analyze.findings import Exit
from tests.faults.models import HEAD
from tests.heads import head_tensors, write_parallel_head
from tests.measure.trainer.runs import compared, head_copy, served


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return served(tmp_path_factory.mktemp("healthy") / "run.jsonl", HEAD)


def names(audit):
    return [each.key for each in audit.differences]


def test_a_healthy_pair_agrees(healthy):
    audit = compared(healthy, HEAD)
    assert (audit.exit, audit.differences) == (Exit.CONSISTENT, ())
    assert audit.tensors > 10
    assert audit.settings > 10
    assert f"{audit.tensors} tensors and {audit.settings} settings compared, none differs" in audit.verdict


CONFIGS = {  # what is set in the trainer's config, and in the served one
    "rope base": ({}, {"rope_theta": 300.0}, "rope_theta"),
    "partial rotary forgotten": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    "norm before residual": ({}, {"norm_before_residual": True}, "norm_before_residual"),
    "layers one lower": ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "eagle_aux_hidden_state_layer_ids"),
    "norm_output ignored": ({"norm_output": True}, {}, "norm_output"),
    "sliding window": ({}, {"layer_types": ["sliding_attention"], "sliding_window": 16}, "sliding_window"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_setting_is_named_by_its_key(case, tmp_path):
    trained, serving_config, key = CONFIGS[case]
    trainer = head_copy(tmp_path / "trainer", trained)
    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", serving_config), requests=1, tokens=4)
    audit = compared(path, trainer)
    assert audit.exit is Exit.INCONSISTENT
    assert names(audit) == [f"config: {key}"]


def test_a_weight_that_differs_is_named_first_of_all(tmp_path):
    def nudged(tensors):
        up = tensors["midlayer.mlp.up_proj.weight"].float()
        noise = torch.randn(up.shape, generator=torch.Generator().manual_seed(0))
        return {**tensors, "midlayer.mlp.up_proj.weight": (up + 0.02 * up.std() * noise).bfloat16()}

    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", {"rope_theta": 300.0}, nudged))
    audit = compared(path, HEAD)
    assert names(audit) == ["weights: midlayer.mlp.up_proj.weight", "config: rope_theta"]
    assert "midlayer.mlp.up_proj.weight differs (relative 0.02), and 1 other difference" in audit.verdict


def test_an_embedding_of_its_own_that_was_not_exported(tmp_path):
    generator = torch.Generator().manual_seed(1)
    own = (torch.randn(300, 48, generator=generator) * 0.2).bfloat16()
    trainer = head_copy(tmp_path / "trainer", tensors=lambda tensors: {**tensors, "embed_tokens.weight": own})
    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head"))
    audit = compared(path, trainer)
    assert names(audit) == ["weights: embed_tokens.weight"]


def test_a_map_of_another_vocabulary(tmp_path):
    def other(tensors):
        """The first two draft tokens are each other's."""
        offsets = tensors["d2t"].clone()
        offsets[0], offsets[1] = tensors["d2t"][1] + 1, tensors["d2t"][0] - 1
        return {**tensors, "d2t": offsets}

    path = served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", tensors=other), requests=1, tokens=4)
    audit = compared(path, HEAD)
    assert names(audit)[0] == "weights: d2t"
    assert "d2t differs at 2 of" in audit.verdict


def test_a_one_pass_head(tmp_path):
    tensors = head_tensors(parallel=True, draft=300)
    trainer = write_parallel_head(tmp_path / "trainer", tensors, depths=3)
    path = served(tmp_path / "run.jsonl", trainer, requests=1, tokens=4)
    assert compared(path, trainer).exit is Exit.CONSISTENT
    other = write_parallel_head(tmp_path / "head", tensors, mask_token=9, depths=3)
    audit = compared(served(tmp_path / "other.jsonl", other, requests=1, tokens=4), trainer)
    assert names(audit) == ["config: mask_token_id"]
