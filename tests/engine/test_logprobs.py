"""Log-probabilities of output tokens: the model's own, of the context that each was drawn in, with any drafter."""

import dataclasses

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from tests.engines import DRAFTERS, PROMPTS, each_drafter


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
