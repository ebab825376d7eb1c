"""Log-probabilities of output tokens: the model's own, of the context that each was drawn in, with any drafter."""

import dataclasses

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.engines import DRAFTERS, PROMPTS, each_drafter


@pytest.fixture(scope="module")
def model(deep):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(deep).eval()


def afresh(model, prompt, output):
    """[m, V] of a plain pass over prompt and output."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
def test_they_are_the_raw_ones_of_each_tokens_own_context(engines, model, name, temperature):
    """Before bias, penalties, form, temperature and top-k: vLLM's raw_logprobs."""
    shaping = {"logit_bias": {70: 3.0}, "presence_penalty": 1.0, "top_k": 50, "min_tokens": 3}
    engine, asked = engines[name], SamplingParams(temperature=temperature, logprobs=3, max_tokens=16, **shaping)
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, [asked] * len(PROMPTS)), strict=True):
        wanted = afresh(model, engine.tokenizer(prompt)["input_ids"], result.token_ids)
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


def test_a_capture_holds_them(engines, tmp_path):
    engine, path = engines["ngram"], tmp_path / "run.jsonl"
    writer = CaptureWriter(path, engine.run_info, engine.vocabulary)
    subscription = engine.subscribe(writer, lossless=True)
    form = {"regex": "[a-c]+"}
    (result,) = engine.generate("abcabc", SamplingParams(logprobs=2, max_tokens=6, structured_outputs=form))
    subscription.close()
    writer.close()
    read = [part for record in read_capture(path).history.steps for part in record.requests]
    assert [part.logprobs for part in read] == [part.logprobs for part in result.steps]
    assert [part.form for part in read] == [part.form for part in result.steps]
    assert any(part.form is not None and np.all(part.form.removed > 0) for part in read)


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
