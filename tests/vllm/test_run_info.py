"""What the plugin tells of vLLM's models."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from specscope.plans.model_digest import model_digest
from specscope.trace.record.params import SamplingParams
from specscope.vllm.run_info import run_info


@dataclasses.dataclass
class Speculative:
    method: str = "eagle3"
    model: str = ""
    num_speculative_tokens: int = 3


def runner(target, draft="", method="eagle3"):
    model = SimpleNamespace(
        served_model_name=None,
        model=str(target),
        revision=None,
        dtype=torch.float32,
        seed=0,
        max_model_len=64,
        hf_config=SimpleNamespace(eos_token_id=2),
        try_get_generation_config=dict,
    )
    cache = SimpleNamespace(num_gpu_blocks=8, block_size=16)
    speculative = Speculative(method, str(draft)) if method else None
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model, cache_config=cache, speculative_config=speculative)
    )


def write(folder, data):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.fixture
def models(tmp_path):
    return write(tmp_path / "target", b"t" * 100), write(tmp_path / "head", b"h" * 100)


def test_paths_and_digests_of_local_folders(models):
    target, head = models
    run = run_info(runner(target, head), "full")
    assert (run.target_path, run.draft_path) == (str(target), str(head))
    assert (run.target_digest, run.draft_digest) == (model_digest(target), model_digest(head))
    alone = run_info(runner(target, method=None), "full")
    assert (alone.draft_path, alone.draft_digest) == ("", "")
    ngram = run_info(runner(target, target, method="ngram"), "full")
    assert (ngram.draft_path, ngram.draft_digest) == ("", "")  # n-gram's `model` only repeats the target's


def test_hub_names_and_large_models_have_none(models, monkeypatch):
    target, _ = models
    run = run_info(runner("org/model", "org/head"), "full")
    assert (run.target_path, run.target_digest) == ("org/model", "")
    assert (run.draft_path, run.draft_digest) == ("org/head", "")
    monkeypatch.setattr("specscope.plans.model_digest.MOST_AT_START", 10)
    assert run_info(runner(target), "full").target_digest == ""


def test_what_shapes_the_drafter_is_a_fact_of_the_engine(models):
    run = run_info(runner(*models), "full")
    asked = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.3, min_tokens=4, logit_bias={3: 2.0})
    assert run.ways.drafter_params(asked) == SamplingParams(temperature=0.7)
    ours = dataclasses.replace(run, versions={"specscope": "0.1.0"})
    assert ours.ways.drafter_params(asked) == asked
    assert (run.ways.raw_is_masked, ours.ways.raw_is_masked) == (True, False)


def test_the_settings_that_shape_batches_are_told_as_vllm_takes_them(models):
    asked = runner(models[0], method=None)
    asked.vllm_config.scheduler_config = SimpleNamespace(max_num_batched_tokens=48, max_num_seqs=4, policy="fcfs")
    asked.vllm_config.cache_config.enable_prefix_caching = True
    told = run_info(asked, "full").settings
    assert told == {
        "runner": "V1",
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "block_size": 16,
        "max_model_len": 64,
    }
    asked.prepare_inputs = None  # only V2's runner has it
    assert run_info(asked, "full").settings["runner"] == "V2"
