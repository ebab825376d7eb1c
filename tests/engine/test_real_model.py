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
    "ngram, chain": {"drafter": "ngram", "tree": "6"},
    "ngram, tree": {"drafter": "ngram", "tree": "3x4"},
    "draft model, chain": {"draft_model": "self:27", "tree": "4"},
    "draft model, tree": {"draft_model": "self:27", "tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"},
    "head, static": {
        "drafter": "eagle",
        "tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)]",
    },
    "head, dynamic": {"drafter": "eagle", "tree": "dynamic:16"},
    "head, as it comes": {"drafter": "auto"},
}


def make(name):
    drafting = ENGINES[name] if "drafter" in ENGINES[name] else {"drafter": "draft_model", **ENGINES[name]}
    return Engine(dtype="float32", **drafting)


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    from specscope.model.bundled import bundled_model

    assert len(PROMPTS) == 20
    engine = make("none")
    prompts = [engine.encode(engine.turn(prompt))[1] for prompt in PROMPTS]
    model = AutoModelForCausalLM.from_pretrained(bundled_model(print), dtype=torch.float32)
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        out.append(made[0, len(prompt) :].tolist())
    return prompts, out


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_greedy_output_is_generates_own(reference, name):
    prompts, wanted = reference
    results = make(name).generate(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert [r.token_ids for r in results] == wanted
    assert not name.startswith("head") or sum(r.acceptance.accepted for r in results) > 500


def test_the_default_model_speaks():
    engine = Engine(dtype="float32", tree="3x4")
    prompt = engine.turn("Repeat after me: the sea is wide, the sea is deep. The sea is wide")
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=24))
    assert "sea" in result.text
    assert result.acceptance.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_a_batch_makes_another_token_the_decision_was_a_near_tie(dtype):
    """Issue 11, item 13: a row's numbers depend on its batch in the last digits, and a coin may lie between them."""
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=i) for i in range(100, 124)]
    engines = [Engine(dtype=dtype, drafter="none", max_batch=size) for size in (1, 4)]
    turn = engines[0].turn("Count from one to ten in words, one per line.")
    alone, four = (engine.generate([turn] * len(params), params) for engine in engines)
    for one, other in zip(alone, four, strict=True):
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None:
            decided = [step.verdict for step in one.steps if step.verdict is not None][at]
            assert decided.near_ties(dtype), (dtype, at, decided.final_margin)
