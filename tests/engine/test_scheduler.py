"""The schedule: every running request gets its turn, and is charged what it can really draft."""

import pytest

from specscope import Engine, SamplingParams
from tests.heads import head_tensors, write_head

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, ignore_eos=True)
MANY = 64


def make(target, **how):
    how = {"drafter": "draft_model", "draft_model": "self:2", "tree": "dynamic:24"} | how
    return Engine(target=str(target), dtype="float32", kv_memory=0.05, max_batch=MANY, **how)


@pytest.fixture(scope="module")
def drafting(tiny):
    return make(tiny)


@pytest.fixture(scope="module")
def eagle(deep, tmp_path_factory):
    head = write_head(tmp_path_factory.mktemp("head"), head_tensors())
    return make(deep, drafter="eagle", draft_model=str(head))


def add(engine, count, params=PARAMS, prompt="abcabc {}"):
    return [engine.add(prompt.format(i), params) for i in range(count)]


def run(engine, steps=1000):
    """The records of so many steps, or up to the end."""
    records = []
    while engine.busy and len(records) < steps:
        records.append(engine.step())
    return records


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
    records = run(drafting, 45)
    begun = {part.request for record in records for part in record.requests if part.emitted}
    assert begun == set(names)
    assert drafting.scheduler.running
    assert not drafting.scheduler.waiting
    served = [{part.request for part in record.requests} for record in records[-4:]]
    assert all(len(each) >= 20 for each in served)
    assert set.union(*served) >= set(drafting.requests)  # 64 * 25 / 512, rounded up
    drafting.cancel_all()
    assert max(longest_waits(drafting, records + run(drafting)).values()) <= 5
    assert drafting.runner.cache.pool.used == 0


def test_a_prompt_gets_its_turn_beside_decoding_requests(drafting):
    """Decoding requests that fill every step leave no tokens over: the prompt's chunks take turns with them."""
    add(drafting, 40, SamplingParams(max_tokens=90, ignore_eos=True))
    while drafting.scheduler.waiting:
        drafting.step()
    late = drafting.add("x" * 300, PARAMS)
    records = run(drafting, 12)
    assert any(part.request == late and part.emitted for record in records for part in record.requests)
    drafting.cancel_all()
    assert max(longest_waits(drafting, records + run(drafting)).values()) <= 4


def test_what_cannot_draft_is_charged_its_feed_alone(eagle):
    """A head drafts nothing right after the prompt: all 64 run at once."""
    add(eagle, MANY, prompt="ab {}")
    (record,) = run(eagle, 1)
    assert len(record.requests) == MANY
    assert record.blocks_used == MANY
    eagle.cancel_all()
    run(eagle)


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
