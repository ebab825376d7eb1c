"""What vLLM is told when it runs a capture's requests again."""

from dataclasses import replace

import pytest

from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError
from specscope.measure.locate.inside_vllm.again import Again, chosen, job_of
from specscope.trace.record.params import SamplingParams, StructuredOutputs
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


def test_what_was_not_asked_for_is_not_told():
    plain = {"params": SamplingParams().to_dict(), "tokens": 3, "seeded": False}
    assert not {"seed", "min_p", "logit_bias"} & set(arguments_of(plain))
    asked = SamplingParams(1.0, min_p=0.1, logit_bias={3: -2.0}, structured_outputs=StructuredOutputs(regex="a+"))
    values = arguments_of(plain | {"params": asked.to_dict(), "seeded": True})
    assert (values["min_p"], values["logit_bias"], values["structured_outputs"]) == (0.1, {3: -2.0}, {"regex": "a+"})


def test_requests_that_matter_come_first_and_keep_their_order():
    history = vllm_history(*(made.info(name, "", [5], labels) for name, labels in zip("abcd", [{}] * 4, strict=True)))
    assert [request.id for request in chosen(history, ("d",), 2)] == ["a", "d"]
    limited = vllm_history(made.info("a", "", [5], {"bad_words": "['x']"}), made.info("b", "", [5]))
    assert [request.id for request in chosen(limited, (), 8)] == ["b"]  # what its words forbid is not in the capture


def test_a_vllm_that_is_not_named_is_asked_for(monkeypatch):
    monkeypatch.delenv("SPECSCOPE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="name its Python, SPECSCOPE_VLLM_PYTHON="):
        Again.found()
    monkeypatch.setenv("SPECSCOPE_VLLM_PYTHON", "/opt/vllm/bin/python")
    assert Again.found().command[:2] == ("/opt/vllm/bin/python", "-P")
