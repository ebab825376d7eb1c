"""The engine on a tiny real model: greedy equality, ends, preemption; when steps draft; time travel; its warm-up."""

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.engine.build import warm_up
from specscope.engine.scheduler import SpeculationGate
from specscope.errors import UserError
from specscope.kernels import launch
from specscope.trace.record.records import FinishReason
from tests.engine.test_reads import RUNS
from tests.engines import PROMPTS, run_all, tiny_engine
from tests.kernels.variants import H100, watched


@pytest.fixture(scope="module")
def plain(tiny):
    return lambda **how: tiny_engine(tiny, **how)


@pytest.fixture(scope="module")
def own(plain, tiny):
    return {
        "none": plain(drafter="none"),
        "ngram tree": plain(drafter="ngram", tree="3x3", ngram_min=1),
        "draft itself": plain(drafter="draft_model", draft_model=str(tiny), tree="3"),
    }


def test_greedy_is_generates_own(own, tiny):
    from transformers import AutoModelForCausalLM

    model, wanted = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), []
    for prompt in PROMPTS:
        ids = torch.tensor([own["none"].encode(prompt).tokens])
        made = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted.append(made[0, ids.shape[1] :].tolist())
    for name in ("none", "draft itself"):
        results = own[name].generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
        assert [r.token_ids for r in results] == wanted
        assert name == "none" or all(r.acceptance.tau == 4 for r in results)


def test_a_request_that_cannot_fit_alone_ends_with_an_error_and_the_rest_goes_on(plain):
    engine = plain(drafter="none")
    pool = engine.runner.cache.pool
    hidden = pool.take(pool.blocks - 4)
    long, short = engine.generate(["a" * 60, "b"], SamplingParams(max_tokens=10, ignore_eos=True))
    assert (long.finish, short.finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert "--kv-memory" in long.error
    assert pool.used == len(hidden)


def test_refused_prompts(own):
    engine = own["none"]
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


def test_ends(own):
    engine = own["ngram tree"]
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


def test_emitted_and_accepted_are_two_figures(own):
    (result,) = own["draft itself"].generate("abc", SamplingParams(max_tokens=2, ignore_eos=True))
    (step,) = [s for s in result.steps if s.verdict]
    assert (step.verdict.accepted, step.emitted, len(result.token_ids)) == (3, 2, 2)


def test_chat_messages_and_turns(own):
    engine = own["none"]
    encoded = engine.encode([{"role": "user", "content": "hi"}])
    assert (encoded.text, encoded.title) == ("<|user|>hi<|a|>", "hi")
    assert (engine.encode(engine.turn("hi")), engine.turn("hi", raw=True)) == (encoded, "hi")


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["draft tree", "eagle", "eagle dynamic", "p-eagle dynamic"])
def test_going_back_and_on_begins_no_branch(make, name):
    """To the last bit, in bfloat16 too: what a request still holds is not computed again with other shapes."""
    engine = make(name, dtype="bfloat16")
    engine.keep_timeline()
    for seed, prompt in enumerate(PROMPTS[:3]):
        engine.add(prompt, SamplingParams(max_tokens=60, temperature=0.9, seed=seed, ignore_eos=True))
    records = [engine.step() for _ in range(8)]
    for step in (5, 2, 0, 3):
        engine.rewind(step)
        for wanted in records[step:]:
            record = engine.step()
            assert record == wanted
            assert record is wanted or record.branch == 0
            assert bits(engine.last.record(notes=False)) == bits(wanted)


def bits(record):
    """What was computed of each request in a step."""
    parts = [part for part in record.requests if part.verdict is not None]
    return [
        [getattr(part.verdict, field).tolist() for field in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass")]
        + ([] if part.notes is None else [part.notes.score.tolist(), part.notes.fed_norms.tolist()])
        for part in parts
    ]


def test_it_does_not_flap():
    """Load that swings by one request around the limit changes it once (vLLM 49548: at every step)."""
    gate = SpeculationGate(disable_above=8)
    swing = [7, 8, 9, 8, 9, 7, 8, 9, 8, 7, 9]
    assert [bool(gate.why_off(n)) for n in swing] == [False, False] + [True] * 9
    assert (gate.why_off(9), gate.why_off(7)) == ("decoding requests above 8", "decoding requests still above 6")
    assert not gate.why_off(6)
    assert [bool(gate.why_off(n)) for n in (7, 8, 7, 8)] == [False] * 4


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft tree", "eagle", "p-eagle dynamic"])
def test_it_goes_off_under_load_and_says_why(make, engines, name):
    engine = make(name, disable_above=1)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_tokens=20, seed=i, ignore_eos=True))
    records = run_all(engine)
    ends = {end.info.id: end.output.tolist() for record in records for end in record.finished}
    plain = engines["none"].generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [ends[f"r{i}"] for i in range(len(PROMPTS))] == [result.token_ids for result in plain]
    for record in records:
        drafted = any(len(part.tree) for part in record.requests)
        assert not (drafted and not record.speculation)
        assert record.speculation == (not record.speculation_off)
    why = {record.speculation_off for record in records}
    assert {"", "decoding requests above 1"} <= why
    last = [record for record in records if record.speculation][-5:]
    assert any(len(part.tree) for record in last for part in record.requests)  # on again for the last request


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["draft tree", "eagle", "p-eagle", "ngram", "suffix"])
def test_a_drafter_is_caught_up_when_drafting_returns(make, name):
    """TensorRT-LLM 16888: acceptance stayed low for the rest of the request. Here the trees are those of no gap."""
    trees = []
    for gap in (range(0), range(6, 19)):
        engine = make(name)
        engine.add("hello hello hel", SamplingParams(max_tokens=60, ignore_eos=True))
        by_place = {}
        while engine.busy:
            engine.gate.chosen = engine.steps not in gap
            for part in engine.step().requests:
                assert not (len(part.tree) and not engine.gate.chosen)
                if part.verdict is not None and len(part.tree):
                    notes = () if part.notes is None else part.notes.prob.tolist()
                    by_place[part.position] = (part.tree.token.tolist(), part.tree.parent.tolist(), notes)
        trees.append(by_place)
    whole, gapped = trees
    common = [place for place in gapped if place in whole and place > 40]
    assert len(common) > 3
    for place in common:
        assert gapped[place][:2] == whole[place][:2]
        assert np.allclose(gapped[place][2], whole[place][2], atol=1e-5)


UNEVEN = ["long " * 7, "the"]
PARAMS = [SamplingParams(max_tokens=2, temperature=0.9, ignore_eos=True, repetition_penalty=r) for r in (1.0, 1.3)]


SLOW = (("none", "float32"), ("ngram", "bfloat16"), ("draft tree", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "dtype"), [("eagle dynamic", "float32"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_run_compiles_nothing_that_was_not_compiled_at_its_start(make, monkeypatch, name, dtype):
    """As it would be launched on an H100, with contexts that are worth splitting."""
    monkeypatch.setattr(launch, "limits", lambda _: H100)
    monkeypatch.setattr(launch, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(launch, "BUFFERS", ((16, 2),))
    more = {"kv_memory": 0.02, "backend": "triton", "device": "cpu", "max_step_tokens": 16, "max_batch": 8}
    engine = make(name, tree=RUNS[name][0], dtype=dtype, **more)
    with watched(dry=True) as known:
        warm_up(engine.runner, engine.drafter, engine.max_context)
    with watched() as launched:
        engine.generate(UNEVEN, PARAMS)
    assert launched <= known, "\n".join(map(repr, launched - known))
    assert {dict(one.constants).get("SPLIT") for one in launched} >= {True, False}
    assert len(known) < 32
