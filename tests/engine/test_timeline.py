"""Time travel: rewound to any step and run again, an engine makes the same tokens, verdicts and evidence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.errors import UserError
from tests.engines import DRAFTERS, PROMPTS, SMALL, build_engines, each_drafter, fresh
from tests.heads import head_tensors, write_head, write_parallel_head


@pytest.fixture(scope="module")
def engines(deep, tmp_path_factory):
    return build_engines(deep, tmp_path_factory.mktemp("head"))


def same(a, b):
    """Two records of one step; numbers to what float32 gives when a batch is cut otherwise."""
    assert (a.step, a.running, a.waiting, a.preempted) == (b.step, b.running, b.waiting, b.preempted)
    assert (a.blocks_used, a.blocks_free) == (b.blocks_used, b.blocks_free)
    assert [i.id for i in a.admitted] == [i.id for i in b.admitted]
    assert [(e.info.id, e.reason, e.output.tolist()) for e in a.finished] == [
        (e.info.id, e.reason, e.output.tolist()) for e in b.finished
    ]
    assert len(a.requests) == len(b.requests)
    for x, y in zip(a.requests, b.requests, strict=True):
        assert (x.request, x.index, x.context_len, x.prefill_tokens) == (
            y.request,
            y.index,
            y.context_len,
            y.prefill_tokens,
        )
        assert (x.drafter, x.emitted, x.tokens()) == (y.drafter, y.emitted, y.tokens())
        assert x.tree.token.tolist() == y.tree.token.tolist()
        assert x.tree.parent.tolist() == y.tree.parent.tolist()
        assert (x.verdict is None) == (y.verdict is None)
        if x.verdict is None:
            continue
        assert x.verdict.outcome.tolist() == y.verdict.outcome.tolist()
        assert (x.verdict.kind, x.verdict.path.tolist()) == (y.verdict.kind, y.verdict.path.tolist())
        assert x.verdict.coin.tolist() == y.verdict.coin.tolist()
        for name in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass"):
            np.testing.assert_allclose(getattr(x.verdict, name), getattr(y.verdict, name), atol=1e-5)


def fill(engine, seed):
    rng = np.random.default_rng(seed)
    for i in range(int(rng.integers(1, 5))):
        params = SamplingParams(max_tokens=int(rng.integers(1, 16)), temperature=float(rng.choice([0, 0.9])), seed=i)
        engine.add(PROMPTS[int(rng.integers(len(PROMPTS)))], params)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", each_drafter(DRAFTERS))
# Fixed examples: where two drafts are as likely but for rounding, a batch cut otherwise may order them otherwise
@settings(max_examples=10, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.sampled_from([SMALL, 60]),
    points=st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
def test_what_comes_again_is_the_same(engines, name, seed, blocks, points):
    """50 runs over the drafters, up to three points each; with few blocks requests are preempted."""
    engine = engines[name]
    fresh(engine, blocks)
    fill(engine, seed)
    records = []
    while engine.busy and len(records) < 40:
        if len(records) == 3:
            engine.add("late late la", SamplingParams(max_tokens=5, temperature=0.8))
        records.append(engine.step())
    for point in points:
        step = int(point * (len(records) - 1))
        engine.rewind(step)
        assert engine.steps == step
        for wanted in records[step:]:
            same(engine.step(), wanted)


def test_a_step_that_was_begun_is_given_up(engines):
    engine = engines["draft tree"]
    fresh(engine, 60)
    engine.add("abcabcabc", SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True))
    records = [engine.step() for _ in range(4)]
    for phases in (1, 2, 3, 4):
        for _ in range(phases):
            assert engine.phase() is None
        assert len(engine.current.phases) == phases
        engine.rewind(3)
        same(engine.step(), records[3])


def test_what_is_not_known_is_refused(engines):
    engine = engines["none"]
    fresh(engine, 60)
    engine.add("abc", SamplingParams(max_tokens=3))
    engine.step()
    with pytest.raises(UserError, match="cannot go back to"):
        engine.rewind(7)
    assert engine.steps == 1
    engine.timeline = None
    with pytest.raises(UserError, match="no timeline"):
        engine.rewind(0)


BY_MODELS = ("draft tree", "eagle", "eagle dynamic", "p-eagle dynamic")


@pytest.mark.parametrize("name", BY_MODELS)
def test_going_back_and_on_begins_no_branch(deep, tmp_path, name):
    """To the last bit, in bfloat16 too: what a request still holds is not computed again with other shapes."""
    how = DRAFTERS[name]
    heads = {"eagle": lambda: write_head(tmp_path, head_tensors()), "p-eagle": lambda: write_parallel_head(tmp_path)}
    kind = name.split()[0]
    extra = {"draft_model": str(heads[kind]())} if kind in heads else {}
    engine = Engine(target=str(deep), dtype="bfloat16", kv_memory=0.01, max_batch=3, max_step_tokens=24, **how, **extra)
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
            assert bits(engine.last.state.record(notes=False)) == bits(wanted)


def bits(record):
    """What was computed of each request in a step."""
    parts = [part for part in record.requests if part.verdict is not None]
    return [
        [getattr(part.verdict, field).tolist() for field in ("p", "p_trial", "q_trial", "accept_prob", "residual_mass")]
        + ([] if part.notes is None else [part.notes.score.tolist(), part.notes.fed_norms.tolist()])
        for part in parts
    ]
