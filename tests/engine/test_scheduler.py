"""Every running request gets its turn and its KV, nobody starves, what can never fit is refused with figures."""

import pytest

from specscope import SamplingParams
from specscope.errors import UserError
from tests.engines import HEAD, pressed, run_all, tiny_engine
from tests.heads import head_tensors, write_head

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
MANY = 64


def make(target, **how):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "dynamic:24"} | how
    return tiny_engine(target, kv_memory=0.05, max_batch=MANY, **how)


@pytest.fixture(scope="module")
def drafting(tiny):
    return make(tiny)


@pytest.fixture(scope="module")
def eagle(deep, tmp_path_factory):
    head = write_head(tmp_path_factory.mktemp("head"), head_tensors())
    return make(deep, drafter="eagle", draft_model=str(head))


def add(engine, count, params=PARAMS, prompt="abcabc {}"):
    return [engine.add(prompt.format(i), params) for i in range(count)]


def longest_waits(engine, records):
    """For each request the most steps in a row in which it held KV and was fed nothing; it has run to its end."""
    longest, waits = {}, {}
    for record in records:
        for name in record.preempted:
            waits.pop(name, None)
        for part in record.requests:
            waits[part.request] = -1
        for end in record.finished:
            waits.pop(end.info.id, None)
        for name in waits:
            waits[name] += 1
            longest[name] = max(longest.get(name, 0), waits[name])
    assert not waits
    return longest


@pytest.mark.every(2)
@pytest.mark.parametrize("prompt", ["abcabc {}", "x" * 40 + "{}"])
def test_every_request_makes_progress_and_none_holds_kv_without_its_turn(drafting, prompt):
    """64 trees of 24 nodes are more than three steps of 512 tokens."""
    names = add(drafting, MANY, SamplingParams(max_tokens=90, ignore_eos=True), prompt)
    records = run_all(drafting, 45)
    begun = {part.request for record in records for part in record.requests if part.emitted}
    assert begun == set(names)
    assert drafting.scheduler.running
    assert not drafting.scheduler.waiting
    served = [{part.request for part in record.requests} for record in records[-4:]]
    assert all(len(each) >= 20 for each in served)
    assert set.union(*served) >= set(drafting.requests)  # 64 * 25 / 512, rounded up
    drafting.cancel_all()
    assert max(longest_waits(drafting, records + run_all(drafting)).values()) <= 5
    assert drafting.runner.cache.pool.used == 0


def test_a_prompt_gets_its_turn_beside_decoding_requests(drafting):
    """Decoding requests that fill every step leave no tokens over: the prompt's chunks take turns with them."""
    add(drafting, 40, SamplingParams(max_tokens=90, ignore_eos=True))
    while drafting.scheduler.waiting:
        drafting.step()
    late = drafting.add("x" * 300, PARAMS)
    records = run_all(drafting, 12)
    assert any(part.request == late and part.emitted for record in records for part in record.requests)
    drafting.cancel_all()
    assert max(longest_waits(drafting, records + run_all(drafting)).values()) <= 4


def test_what_cannot_draft_is_charged_its_feed_alone(eagle):
    """A head drafts nothing right after the prompt: all 64 run at once."""
    add(eagle, MANY, prompt="ab {}")
    (record,) = run_all(eagle, 1)
    assert len(record.requests) == MANY
    assert record.blocks_used == MANY
    eagle.cancel_all()
    run_all(eagle)


def test_the_charge_is_never_less_than_the_draft(tiny, drafting, eagle):
    ngram = make(tiny, drafter="ngram", draft_model=None, tree="3x4", ngram_min=1)
    for engine in (ngram, drafting, eagle):
        add(engine, 3, SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True))
        drafted = 0
        while engine.busy:
            record = engine.phase()
            now = engine.current
            if now is None or [phase.name for phase in now.phases] != ["schedule", "draft"]:
                continue
            assert record is None
            for turn in now.turns:
                drafted += len(turn.draft.tree)
                assert len(turn.draft.tree) <= turn.nodes <= engine.drafter.max_nodes
        assert drafted


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


@pytest.mark.every(2)
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
