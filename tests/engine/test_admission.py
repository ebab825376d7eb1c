"""Who gets KV: nobody starves, nothing waits for ever, and what can never fit is refused at once with the figures."""

import pytest

from specscope import SamplingParams
from specscope.engine.request import Request
from specscope.engine.scheduler import Room, Scheduler
from specscope.errors import UserError
from specscope.speculate.drafters.base import Drafter
from tests.engines import HEAD, pressed

NODES = 16


@pytest.fixture
def small(engines):
    """An engine as new, with few blocks."""

    def make(name="ngram", blocks=12):
        pressed(engines[name], blocks)
        return engines[name]

    return make


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


def test_a_request_ends_at_the_context_s_limit_and_needs_no_room_behind_it(small, engines):
    engine = small("none", blocks=12)
    before, room = engine.max_context, engine.scheduler.room
    engine.parts.max_context = room.max_context = 64
    try:
        name = engine.add([40] * 50, params(100_000))
        while engine.busy:
            ends = engine.step().finished
        assert [(end.info.id, len(end.output)) for end in ends] == [(name, 14)]
    finally:
        engine.parts.max_context = room.max_context = before


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
    ended, steps, preempted = [], 0, 0
    while engine.busy:
        record = engine.step()
        steps, preempted = steps + 1, preempted + len(record.preempted)
        assert record.requests, "nobody was fed"
        assert names[len(ended)] not in record.preempted, "the first arrival lost its KV"
        ended += [end.info.id for end in record.finished]
        assert steps < 600
    assert sorted(ended) == sorted(names)
    assert preempted


class Toy:
    """A scheduler over real bookkeeping, and a runner that runs nothing."""

    def __init__(self, cache, **how):
        runner = type("Runner", (), {"cache": cache})()
        self.room = Room(runner, Drafter(), 4096)
        self.scheduler = Scheduler(self.room, how.pop("max_batch", 4), how.pop("tokens", 512))
        self.count = 0

    def add(self, tokens, at=None):
        self.count += 1
        name = f"r{self.count}"
        one = Request(name, "", list(tokens), SamplingParams(max_tokens=999), {}, at or self.count)
        self.scheduler.waiting.append(one)
        return one

    def step(self):
        """Schedule, and commit one token for everyone who decodes."""
        plan = self.scheduler.schedule(1, drafts=True)
        for turn in plan.turns:
            turn.request.computed += turn.feed
            if turn.decodes:
                turn.request.tokens.append(7)
        return plan


@pytest.fixture
def toy():
    import torch

    from specscope.model.kv_cache import KVCache, LayerShape

    def make(blocks, **how):
        return Toy(KVCache([LayerShape(1, 4, 4)], blocks, torch.float32, torch.device("cpu")), **how)

    return make


def test_slots_for_drafts_are_given_back_before_anyone_loses_kv(toy):
    made = toy(6)
    first, second = made.add(range(30)), made.add(range(100, 130))
    made.room.max_nodes = NODES
    made.step()
    assert made.room.cache.pool.free == 0  # two blocks of tokens, and one of drafts, for each
    for _ in range(3):  # 33 tokens: the first one's tree needs a fourth block
        plan = made.step()
    assert [turn.request for turn in plan.turns] == [first]
    assert plan.held_back == [second]
    assert not plan.preempted
    assert second.computed >= 30
    assert [turn.nodes for turn in plan.turns] == [NODES]  # nobody's tree is cut


def test_those_who_wait_come_in_the_order_of_arrival(toy):
    made = toy(9, max_batch=8)
    every = [made.add([i] * 40) for i in range(6)]
    order = []
    for _ in range(400):
        plan = made.step()
        for turn in plan.turns:
            if len(turn.request.tokens) >= 60:
                order.append(turn.request)
                made.scheduler.retire(turn.request)
        if len(order) == 6:
            break
    assert order == every
    assert made.room.cache.pool.used == 0
