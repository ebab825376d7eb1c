"""The engine on a tiny real model: greedy equality, determinism, ends, cancellation, preemption."""

import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from specscope.trace.record.records import FinishReason
from tests.engines import PROMPTS


@pytest.fixture(scope="module")
def make(tiny):
    return lambda **how: Engine(target=str(tiny), dtype="float32", kv_memory=0.01, **how)


@pytest.fixture(scope="module")
def engines(make, tiny):
    return {
        "none": make(drafter="none"),
        "ngram tree": make(drafter="ngram", tree="3x3", ngram_min=1),
        "draft itself": make(drafter="draft_model", draft_model=str(tiny), tree="3"),
    }


def test_greedy_is_generates_own(engines, tiny):
    from transformers import AutoModelForCausalLM

    model, wanted = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), []
    for prompt in PROMPTS:
        ids = torch.tensor([engines["none"].encode(prompt).tokens])
        made = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted.append(made[0, ids.shape[1] :].tolist())
    for name in ("none", "draft itself"):
        results = engines[name].generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
        assert [r.token_ids for r in results] == wanted
        assert name == "none" or all(r.acceptance.tau == 4 for r in results)


def test_a_request_that_cannot_fit_alone_ends_with_an_error_and_the_rest_goes_on(make):
    engine = make(drafter="none")
    pool = engine.runner.cache.pool
    hidden = pool.take(pool.blocks - 4)
    long, short = engine.generate(["a" * 60, "b"], SamplingParams(max_tokens=10, ignore_eos=True))
    assert (long.finish, short.finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert "--kv-memory" in long.error
    assert pool.used == len(hidden)


def test_refused_prompts(engines):
    engine = engines["none"]
    for prompt, message in (
        ("", "empty"),
        ("a" * 512, "the limit is 511"),
        ([1, 2, 9999], "outside the vocabulary"),
        ([], "empty"),
    ):
        with pytest.raises(UserError, match=message):
            engine.add(prompt)
    with pytest.raises(UserError, match="2 prompts, but 1"):
        engine.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(UserError, match="the prompt is empty"):
        engine.generate(["fine", ""])
    engine.step()
    assert not engine.busy


def test_ends(engines):
    engine = engines["ngram tree"]
    (free,) = engine.generate("abcabc", SamplingParams(max_tokens=30, ignore_eos=True))
    assert (free.finish, len(free.token_ids)) == (FinishReason.LENGTH, 30)
    # At the context's limit, behind which no KV is needed
    (context,) = engine.generate("a" * 500, SamplingParams(max_tokens=1_000_000, ignore_eos=True))
    assert (context.finish, len(context.token_ids)) == (FinishReason.LENGTH, 12)
    # A stop string across tokens: text ends before it, tokens up to it stay.
    text = free.text
    stop = next(text[i : i + 2] for i in range(5, len(text) - 2) if "\ufffd" not in text[i : i + 2])
    (stopped,) = engine.generate("abcabc", SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert stopped.finish is FinishReason.STOP
    assert stopped.text == text[: text.index(stop)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.origins) == len(stopped.token_ids)


def test_emitted_and_accepted_are_two_figures(engines):
    (result,) = engines["draft itself"].generate("abc", SamplingParams(max_tokens=2, ignore_eos=True))
    (step,) = [s for s in result.steps if s.verdict]
    assert (step.verdict.accepted, step.emitted, len(result.token_ids)) == (3, 2, 2)


def test_chat_messages_and_turns(engines):
    engine = engines["none"]
    encoded = engine.encode([{"role": "user", "content": "hi"}])
    assert (encoded.text, encoded.title) == ("<|user|>hi<|a|>", "hi")
    assert engine.encode(engine.turn("hi")) == encoded
    assert engine.turn("hi", raw=True) == "hi"
