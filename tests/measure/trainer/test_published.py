"""Checkpoints of speculators: its own class is the reference where it is installed, and one line where it is not."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file

from specscope.analyze.findings import Exit
from specscope.errors import UserError
from tests.faults.models import HEAD
from tests.heads import head_tensors, write_parallel_head
from tests.measure.trainer.runs import compared, head_copy, served

LAYER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
LAYER += ("rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_theta", "model_type")


def checkpoint(folder, **config):
    """The tiny head as speculators saves an EAGLE-3 one."""
    plain = json.loads((HEAD / "config.json").read_text())
    folder.mkdir()
    layout = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**{key: plain[key] for key in LAYER}, "num_hidden_layers": 1},
        "draft_vocab_size": plain["draft_vocab_size"],
        "target_hidden_size": plain["target_hidden_size"],
        "eagle_aux_hidden_state_layer_ids": plain["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": False,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(layout))
    tensors = load_file(HEAD / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "speculators", None)
    monkeypatch.setitem(sys.modules, "speculators.models", None)
    path = served(tmp_path / "run.jsonl", HEAD, requests=1, tokens=12)
    with pytest.raises(UserError, match="judged by that package's own forward: pip install speculators") as refused:
        compared(path, checkpoint(tmp_path / "trainer"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [{}, {"norm_output": True}, {"norm_before_residual": True}])
def test_its_forward_agrees_with_the_served_head(config, tmp_path):
    pytest.importorskip("speculators.models")
    trainer = checkpoint(tmp_path / "trainer", **config)
    audit = compared(served(tmp_path / "run.jsonl", head_copy(tmp_path / "head", config)), trainer)
    assert audit.exit is Exit.CONSISTENT, audit.verdict
    assert audit.reference.startswith("speculators' training forward")
    operations = {held.operation.name for held in audit.location.walks[-1].operations}
    assert {"depth.1.midlayer.residual", "depth.2.fed back", "depth.3.midlayer.self_attn.query"} <= operations
    assert all(rates.training.count == rates.served.count for rates in audit.rates)


def test_a_setting_that_serving_ignores(tmp_path):
    pytest.importorskip("speculators.models")
    trainer = checkpoint(tmp_path / "trainer", norm_output=True)
    audit = compared(served(tmp_path / "run.jsonl", HEAD), trainer)
    assert [located.operation.name for located in audit.location.located] == ["config: norm_output"]
    assert next(held.operation.name for held in audit.location.walks[-1].operations if held.differs) == (
        "depth.2.fed back"
    )


def test_a_one_pass_head_of_two_layers(tmp_path):
    pytest.importorskip("speculators.models")
    trainer = write_parallel_head(tmp_path / "trainer", head_tensors(parallel=True, layers=2, draft=300), depths=3)
    audit = compared(served(tmp_path / "run.jsonl", trainer), trainer)
    assert audit.exit is Exit.CONSISTENT, audit.verdict
    operations = {held.operation.name for held in audit.location.walks[-1].operations}
    assert {"depth.3.layers.1.self_attn.attention", "depth.3.lm_head"} <= operations
