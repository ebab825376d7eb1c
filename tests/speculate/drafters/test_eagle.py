"""EAGLE heads through the engine: losslessness, and that nothing which the head guessed outlives the verdict."""

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.speculate.drafters import eagle
from tests.engines import PROMPTS, tiny_engine
from tests.heads import head_tensors, write_head

DYNAMIC = "dynamic:12,depth=4,top=3"
# Random models never agree. Under this bias, which moves both alike, four tokens are left and they agree now and then.
# They are among what the EAGLE-3 head can draft.
KNOWN = (head_tensors()["d2t"] + torch.arange(60)).tolist()
BIAS = dict.fromkeys((KNOWN[11], KNOWN[23], KNOWN[37], KNOWN[48]), 1000)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Folders of heads by name."""
    at = tmp_path_factory.mktemp("heads")
    return {
        "eagle3": write_head(at / "eagle3", head_tensors()),
        "eagle1": write_head(at / "eagle1", head_tensors(version=1, bias=True)),
        "one aux_layer": write_head(
            at / "one", head_tensors(aux_layers=1, draft=300), eagle_aux_hidden_state_layer_ids=[3]
        ),
    }


@pytest.fixture(scope="module")
def make(deep, heads):
    def make(head, tree, **more):
        drafting = {"drafter": "eagle", "draft_model": str(heads[head]), "tree": tree}
        return tiny_engine(deep, **drafting, **more)

    return make


def greedy(bias=False, **more):
    return SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=BIAS if bias else {}, **more)


def most_held(engine, prompt, params):
    """The most numbers of features that were kept of a prompt's request, in rows, and its drafts."""
    engine.add(prompt, params, name="long")
    most, trees = 0, []
    while engine.requests:
        record = engine.step()
        trees += [part.tree.token.tolist() for part in record.requests]
        if "long" in engine.drafter._features:
            rows = engine.drafter._features["long"]._rows
            most = max(most, rows.untyped_storage().nbytes() // (rows.shape[1] * rows.element_size()))
    return most, trees


@pytest.mark.parametrize("head", ["eagle3", "eagle1"])
def test_a_long_prompts_features_are_fed_chunk_by_chunk(make, monkeypatch, head):
    """Never more than a chunk is kept, as memory and not as a view; and the drafts are what they were."""
    monkeypatch.setattr(eagle, "PREFILL_CHUNK", 16)
    prompt, params = "the cat sat on the mat, " * 6, greedy(bias=True)
    engine = make(head, DYNAMIC, max_step_tokens=24)
    most, trees = most_held(engine, prompt, params)
    assert 0 < most <= 16
    assert engine.drafter.cache.pool.used == 0
    assert engine.drafter.states == engine.drafter._features == {}
    whole = make(head, DYNAMIC, max_step_tokens=24)
    keep = lambda self, name, start, rows, _: self._features.setdefault(name, eagle.Features()).put(start, rows)  # noqa: E731
    monkeypatch.setattr(eagle.Eagle, "observe", keep)
    all_of_them, same = most_held(whole, prompt, params)
    assert all_of_them > 100
    assert trees == same
    assert sum(map(len, trees)) > 20


def test_no_room_for_a_draft_costs_the_draft_alone(make, engines):
    engine = make("eagle3", DYNAMIC)
    pool = engine.drafter.cache.pool
    pool.take(pool.blocks - 6)
    results = engine.generate(PROMPTS, greedy(bias=True))
    plain = engines["none"].generate(PROMPTS, greedy(bias=True))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    sizes = [len(step.tree) for r in results for step in r.steps if step.verdict]
    assert 0 < sum(size > 0 for size in sizes) < len(sizes)


@pytest.fixture(scope="module")
def hugging(deep):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(deep, dtype=torch.float32)


@pytest.mark.parametrize("head", ["eagle3", "eagle1", "one aux_layer"])
def test_the_notes_say_what_fed_the_head(make, hugging, head):
    """Each row of the first pass once, in order, with the norms of what transformers says of its position."""
    engine = make(head, "3x3", max_step_tokens=16)
    results = engine.generate(PROMPTS, greedy())
    for prompt, result in zip(PROMPTS, results, strict=True):
        tokens = engine.encode(prompt)[1] + result.token_ids
        with torch.inference_mode():
            states = hugging(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        layers = [states[-1 if layer == "final" else layer][0] for layer in engine.drafter.aux_layers]
        wanted = torch.stack([layer.norm(dim=-1) for layer in layers], dim=-1)
        notes = [step.notes for step in result.steps if len(step.tree)]
        position = np.concatenate([one.fed_position for one in notes])
        assert position.tolist() == list(range(len(position)))
        assert np.concatenate([one.fed_token for one in notes]).tolist() == tokens[1 : len(position) + 1]
        assert [len(one.fed_token) for one in notes] == [one.rows[0] for one in notes]
        assert np.concatenate([one.fed_norms for one in notes]) == pytest.approx(wanted[position].numpy(), rel=1e-4)


def test_norms_of_what_is_not_finite_are_finite():
    features = torch.tensor([[3.0, 4.0, 0.0, 0.0], [torch.nan, 0.0, torch.inf, 1.0]])
    norms = eagle.layer_norms(features, 2)
    assert norms.tolist() == [[5.0, 0.0], [torch.finfo(torch.float32).max] * 2]
    assert eagle.layer_norms(features.bfloat16(), 1).dtype == np.float32
