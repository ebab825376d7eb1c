"""The bundled model and its head in float32: greedy output is generate()'s for 20 prompts."""

import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.measure.prompts import COPYING, PLAIN

TOKENS = 128
PROMPTS = [
    *PLAIN,
    *COPYING,
    "Count from one to forty in words.",
    "List the capitals of ten European countries, one on each line.",
    "Write a haiku about rain.",
    "What is 12 times 12? Show your work.",
    "Translate into French: the cat sleeps on the chair.",
    "Write an SQL query that finds the ten largest orders.",
    "Tell me a joke about compilers.",
]
ENGINES = {
    "none": {"drafter": "none"},
    "ngram, tree": {"drafter": "ngram", "tree": "3x4"},
    "draft model": {
        "drafter": "draft_model",
        "draft_model": "self:27",
        "tree": "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]",
    },
    "head, dynamic": {"drafter": "eagle", "tree": "dynamic:16"},
    "head, as it comes": {"drafter": "auto"},
}


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    from specscope.model.places import bundled_model

    assert len(PROMPTS) == 20
    engine = Engine(dtype="float32", drafter="none")
    prompts = [engine.encode(engine.turn(prompt))[1] for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(bundled_model(print), dtype=torch.float32)
    how = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    every = [torch.tensor([prompt]) for prompt in prompts]
    made = [model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :] for ids in every]
    return prompts, [tokens.tolist() for tokens in made]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_greedy_output_is_generates_own(reference, name):
    prompts, wanted = reference
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    results = Engine(dtype="float32", **ENGINES[name]).generate(prompts, params)
    assert [r.token_ids for r in results] == wanted
    assert not name.startswith("head") or sum(r.acceptance.accepted for r in results) > 500


def test_the_default_model_speaks():
    engine = Engine(dtype="float32", tree="3x4")
    prompt = engine.turn("Repeat after me: the sea is wide, the sea is deep. The sea is wide")
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=24))
    assert "sea" in result.text
    assert result.acceptance.accepted > 0
