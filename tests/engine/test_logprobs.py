"""Log-probabilities are the model's own, of the context that each token was drawn in; the lean start changes none."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from tests.engines import DRAFTERS, PROMPTS, each_drafter, tiny_engine


@pytest.fixture(scope="module")
def model(deep):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(deep).eval()


@pytest.mark.every(5)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_they_are_the_raw_ones_of_each_tokens_own_context(engines, model, name, temperature):
    """Before bias, penalties, form, temperature and top-k: vLLM's raw_logprobs."""
    shaping = {"logit_bias": {70: 3.0}, "presence_penalty": 1.0, "top_k": 50, "min_tokens": 3}
    engine, asked = engines[name], SamplingParams(temperature=temperature, logprobs=3, max_tokens=16, **shaping)
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, [asked] * len(PROMPTS)), strict=True):
        tokens = engine.encode(prompt).tokens
        with torch.no_grad():
            logits = model(torch.tensor([[*tokens, *result.token_ids]])).logits[0]
        wanted = logits[len(tokens) - 1 : -1].log_softmax(-1)
        assert [one.token for one in result.logprobs] == result.token_ids
        for row, one in zip(wanted, result.logprobs, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
            best = row.topk(3)
            assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert all(p == pytest.approx(float(row[token]), abs=1e-4) for token, p in one.top)


def test_they_cost_nothing_where_nobody_asks(engines, monkeypatch):
    from specscope.engine import phases as module

    monkeypatch.setattr(module, "raw_logprobs", None)  # calling it would raise
    (result,) = engines["draft tree"].generate("abc", SamplingParams(max_tokens=4))
    assert result.logprobs is None
    assert all(step.logprobs is None for step in result.steps)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_a_record_that_is_kept_keeps_no_tensors(engines, name):
    """An array inside a tensor's memory, 500 bytes of it, kept the heap from ever shrinking: 180 kB a token."""
    records = []
    subscription = engines[name].bus.subscribe(records.append)
    engines[name].generate(PROMPTS[:1], [SamplingParams(logprobs=3, max_tokens=8)])
    subscription.flush()
    arrays = [array for record in records for array in arrays_in(record)]
    assert any(array.size for array in arrays)
    assert not [array for array in arrays if isinstance(owner_of(array), torch.Tensor)]


def arrays_in(value):
    if isinstance(value, np.ndarray):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from arrays_in(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from arrays_in(item)


def owner_of(array):
    while isinstance(array, np.ndarray):
        array = array.base
    return array


HEAVY = ["torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "scipy.optimize"]
START = """
import json, sys
from specscope.engine import lean
if sys.argv[2] == "another version":
    lean.UNUSED = ("is_there_no_such_function",)
from specscope.engine.config import EngineConfig
from specscope.live.start import start_engine
engine = start_engine(EngineConfig(target=sys.argv[1], dtype="float32", kv_memory=0.01, threads=1), lambda _: None)
from specscope import SamplingParams
(result,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
heavy = [name for name in sys.argv[3:] if name in sys.modules]
import torch, torch._dynamo
assert torch.compiler.disable.__module__ == "torch.compiler", "what was replaced is put back"
assert torch._dynamo.OptimizedModule, "the real one"
from transformers.utils import is_torch_distributed_available
assert is_torch_distributed_available() == torch.distributed.is_available()
print(json.dumps([heavy, result.token_ids]))
"""


def run(*words):
    how = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([sys.executable, *map(str, words)], **how)


@pytest.mark.parametrize("version", ["this version", pytest.param("another version", marks=pytest.mark.slow)])
def test_a_lean_start_gives_the_same_tokens(tiny, version):
    engine = tiny_engine(tiny, threads=1)
    (wanted,) = engine.generate(["abcabc"], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.close()
    done = run("-c", START, tiny, version, *HEAVY)
    assert done.returncode == 0, done.stderr
    heavy, tokens = json.loads(done.stdout)
    assert tokens == wanted.token_ids
    assert version == "another version" or heavy == []


@pytest.mark.slow
def test_every_architecture_works_after_a_lean_start():
    code = (
        "import sys, pytest; from specscope.engine.lean import import_transformers; import_transformers(); "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/model/test_architectures.py']))"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stdout
