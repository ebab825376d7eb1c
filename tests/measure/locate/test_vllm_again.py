"""What vLLM is told when it runs a capture's requests again."""

from dataclasses import replace

import pytest

from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError
from specscope.measure.locate.vllm import Again, job_of
from specscope.trace.record.params import SamplingParams
from specscope.vllm.again import arguments_of
from tests.analyze import histories
from tests.support import records as made

SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3, "prompt_lookup_max": 0, "draft_sample_method": "greedy"}
SETTINGS = {"runner": "V2", "max_num_batched_tokens": 48, "max_num_seqs": 4, "cache_dtype": "auto"}
TARGET, HEAD = ModelSource("/models/target", "target"), ModelSource("/models/head", "head")


def vllm_history(*infos):
    run = replace(
        histories.RUN,
        backend="vllm",
        speculation=SPECULATION,
        settings=SETTINGS,
        draft_path="/gone",
        versions={"vllm": "0.32.0"},
    )
    parts = [replace(histories.step(info.id), emitted=2) for info in infos]
    return histories.history([made.record(0, parts, admitted=infos)], run)


def test_the_job_is_the_captures_own_configuration_in_float32():
    history = vllm_history(made.info("a", "", [5, 6], params=SamplingParams(temperature=0.7, seed=4)))
    job = job_of(history.run, list(history.requests.values()), TARGET, HEAD)
    assert job["v2"]
    assert (job["model"], job["speculation"]["model"]) == ("/models/target", "/models/head")
    assert job["speculation"] == {"method": "eagle3", "num_speculative_tokens": 3, "draft_sample_method": "greedy"} | {
        "model": "/models/head"
    }
    assert job["engine"]["dtype"] == "float32"
    assert job["engine"]["max_num_batched_tokens"] == 48
    (request,) = job["requests"]
    assert (request["prompt"], request["tokens"], request["seeded"]) == ([5, 6], 2, True)
    values = arguments_of(request)
    assert (values["temperature"], values["seed"], values["max_tokens"]) == (0.7, 4, 2)
    assert values["structured_outputs"] is None


def test_a_vllm_that_is_not_named_is_asked_for(monkeypatch):
    monkeypatch.delenv("SPECSCOPE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="name its Python with SPECSCOPE_VLLM_PYTHON="):
        Again.found()
    monkeypatch.setenv("SPECSCOPE_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert Again.found().command[:2] == ("/opt/vllm/bin/python", "-P")
