"""Who gets KV: nobody starves, nothing waits for ever, and what can never fit is refused at once with the figures."""

import pytest

from specscope import SamplingParams
from specscope.errors import UserError
from tests.engines import HEAD, pressed


@pytest.fixture
def small(engines):
    """An engine as new, with few blocks."""
    return lambda name="ngram", blocks=12: pressed(engines[name], blocks) or engines[name]


def params(tokens, **how):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **how)


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "slots"), [("none", 0), ("ngram", 9), ("draft tree", 4)])
def test_what_just_fits_runs_and_one_more_is_refused_at_once_with_the_figures(small, name, slots):
    """vLLM 39734: such a request waited for ever, and everyone behind it."""
    engine = small(name, blocks=6)
    room, prompt = 6 * 16, list(range(30, 60))
    most = room - slots - len(prompt) + 1  # the last token is never fed
    told = f"30 prompt tokens may grow to {30 + most + 1} tokens.*, which need 7 KV blocks, and the KV cache has 6"
    with pytest.raises(UserError, match=told) as refused:
        engine.add(prompt, params(most + 1))
    assert "\n" not in str(refused.value)
    assert not engine.requests
    first, second = engine.add(prompt, params(most)), engine.add(prompt, params(most))
    ends = {}
    while engine.busy:
        ends |= {end.info.id: end for end in engine.step().finished}
    assert [(len(ends[one].output), ends[one].error) for one in (first, second)] == [(most, "")] * 2


def test_the_drafter_s_cache_is_asked_too(small):
    engine = small("draft tree", blocks=20)
    pool = engine.drafter.cache.pool
    pool.__init__(5)
    with pytest.raises(UserError, match=r"need 7 KV blocks, and the drafter's KV cache has 5"):
        engine.add([40] * 60, params(40))
    pool.__init__(40)


@pytest.mark.parametrize("name", ["none", "ngram", "draft tree", "eagle dynamic"])
def test_nobody_starves(small, name):
    """A request that needs nearly all blocks is served though short ones come as long as it waits."""
    engine = small(name, blocks=10)
    for i in range(3):
        engine.add(f"short {i}", params(8))
    engine.step()
    long = engine.add("x" * 100, params(20))
    for steps in range(400):
        if len(engine.scheduler.waiting) < 4:
            engine.add(f"short {steps}", params(8))
        record = engine.step()
        if long in [end.info.id for end in record.finished]:
            break
    assert steps < 120
    engine.cancel_all()
    engine.step()


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["ngram", "draft tree", "eagle dynamic"])
def test_every_step_gets_somewhere(small, name):
    """vLLM 49674: under the worst pressure each step feeds somebody, and the first arrival always ends."""
    engine = small(name, blocks=8)
    names = [engine.add(HEAD[: 20 + 7 * i], params(40, temperature=0.8, seed=i)) for i in range(6)]
    ended, admitted, steps, preempted = [], [], 0, 0
    while engine.busy:
        record = engine.step()
        steps, preempted = steps + 1, preempted + len(record.preempted)
        admitted += [info.id for info in record.admitted]
        assert record.requests, "nobody was fed"
        assert names[len(ended)] not in record.preempted, "the first arrival lost its KV"
        ended += [end.info.id for end in record.finished]
        assert steps < 600
    assert sorted(ended) == sorted(names)
    assert admitted == names  # in the order of arrival
    assert preempted


def test_slots_for_drafts_are_given_back_before_anyone_loses_kv(small):
    engine = small("ngram", blocks=5)  # two of tokens for each, and one of drafts for one of them
    for at in (30, 130):
        engine.add(list(range(at, at + 30)), params(30))
    while min(request.computed for request in engine.requests.values()) < 30:
        engine.step()
    record = engine.step()
    assert (len(record.requests), record.preempted) == (1, ())
    assert min(request.computed for request in engine.requests.values()) >= 30  # the other keeps its KV, and waits
    engine.cancel_all()
    engine.step()
