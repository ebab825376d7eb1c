"""The prefix cache: what may be found and when. Faults that others had are planted, and caught."""

import numpy as np
import pytest

from specscope import SamplingParams
from specscope.engine.phases import Phases
from specscope.engine.room import Room
from specscope.engine.scheduler import Schedule, Scheduled, Scheduler
from specscope.model import prefix
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.speculate.drafters.combined import model_of
from specscope.speculate.drafters.eagle import Eagle
from specscope.trace.history.same import same_step
from tests.engine.cached import HEAD, finish, pressed, watched, wrong_blocks
from tests.engines import build_engines, each_drafter

MODELS = ["draft tree", "eagle", "eagle dynamic", "suffix+eagle"]


@pytest.fixture(scope="module")
def engines(deep, tmp_path_factory):
    return build_engines(deep, tmp_path_factory.mktemp("head"))


@pytest.fixture
def cached(engines):
    """An engine as new, with a prefix cache."""

    def make(name="ngram", blocks=60):
        pressed(engines[name], blocks, cached=True)
        return engines[name]

    return make


def add(engine, prompt=HEAD, tokens=20, name=None, **params):
    return engine.add(prompt, SamplingParams(max_tokens=tokens, **({"ignore_eos": True} | params)), name=name)


def outputs(records):
    return {end.info.id: end.output.tolist() for record in records for end in record.finished}


def found(records):
    return {part.request: part.found for record in records for part in record.requests if part.found}


def verdicts(records):
    parts = [part for record in records for part in record.requests if part.verdict is not None]
    return [(part.tree.token.tolist(), part.verdict.path.tolist(), part.verdict.token) for part in parts]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_hit_leaves_no_hole_in_target_or_drafter(cached, name):
    """SGLang 19897, vLLM 47930: KV that was never written under the drafter. All of it is as computed afresh."""
    engine = cached(name)
    for i in range(4):
        add(engine, HEAD + "abc" * i, name=f"first {i}", temperature=0.8, seed=i)
    finish(engine)
    for i in range(3):
        add(engine, HEAD + "abc" * i, name=f"again {i}", temperature=0.8, seed=i)
    records, wrong = finish(engine, check=True)
    assert min(found(records).values()) >= 48 - BLOCK_SIZE
    assert len(found(records)) == 3
    assert not wrong


@pytest.mark.parametrize("name", ["none", "ngram", "draft tree", "eagle dynamic"])
def test_every_published_block_holds_what_it_says(cached, name):
    engine = cached(name)
    with watched(engine) as wrong:
        for i in range(4):
            add(engine, HEAD + "x" * i, temperature=0.8, seed=i)
        finish(engine)
    assert not wrong
    assert wrong_blocks(engine)[1] > 4


# Planted


def hashed_at_reserve(patch, engine):
    """vLLM 41838: blocks are found as soon as they are reserved, before they are written."""
    reserve = Scheduler._reserve

    def early(self, part, *, drafts=True):
        fits = reserve(self, part, drafts=drafts)
        if fits:
            request = part.request
            self.room.cache.publish(request.table, request.tokens, request.computed + part.feed)
        return fits

    patch.setattr(Scheduler, "_reserve", early)


def hashed_with_rejected_tokens(patch, engine):
    """All rows of a step are published, as if every draft had been accepted."""
    forward = Phases.forward

    def eager(self, now):
        forward(self, now)
        for part, draft in zip(now.plan.parts, now.drafts, strict=True):
            tokens = [*part.request.tokens[: part.request.computed + part.feed], *draft.tree.token.tolist()]
            engine.runner.cache.publish(part.request.table, tokens, len(tokens))

    patch.setattr(Phases, "forward", eager)


def published_before_the_move(patch, engine):
    """The accepted path still lies where the tree lay."""
    cache, commit = engine.runner.cache, Phases.commit
    move = cache.move

    def early(self, now):
        def late(paths):
            self.scheduler.publish(now.plan)
            move(paths)

        patch.setattr(cache, "move", late)
        commit(self, now)

    patch.setattr(Phases, "commit", early)


@pytest.mark.parametrize("fault", [hashed_at_reserve, hashed_with_rejected_tokens, published_before_the_move])
def test_a_fault_is_seen_in_what_is_published(cached, monkeypatch, fault):
    engine = cached("draft tree")
    fault(monkeypatch, engine)
    with watched(engine) as wrong:
        for i in range(4):
            add(engine, HEAD + "x" * i, tokens=40, temperature=1.2, seed=i)
        finish(engine)
    assert wrong


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_a_block_is_hashed_after_it_is_written(cached, monkeypatch, planted):
    """vLLM 41838: a request is aborted before its forward pass, and a second one with its prompt comes."""
    engine = cached("none")
    add(engine)
    wanted = outputs(finish(engine)[0])
    engine = cached("none")
    if planted:
        hashed_at_reserve(monkeypatch, engine)
    for part in [*engine.runner.cache.key, *engine.runner.cache.value]:
        part.fill_(7.0)
    engine.keep_timeline()
    lost = add(engine)
    assert engine.phase() is None  # it has its blocks, and nothing was written
    engine.rewind(0)
    engine.cancel(lost)
    assert engine.scheduler.running == []
    add(engine, name="second")
    records, _ = finish(engine)
    assert (found(records) == {}) is not planted
    assert (outputs(records)["second"] == next(iter(wanted.values()))) is not planted


def test_rejected_tokens_are_never_hashed(cached):
    """Whatever was drafted: known contents are prefixes of what was committed."""
    engine = cached("draft tree")
    for i in range(4):
        add(engine, HEAD + "x" * i, tokens=40, temperature=1.2, seed=i)
    records, _ = finish(engine)
    assert any((part.verdict.outcome == 2).any() for r in records for part in r.requests if part.verdict is not None)
    ends = [end for record in records for end in record.finished]
    committed = [[*end.info.prompt_tokens.tolist(), *end.output.tolist()] for end in ends]
    contents = [content for _, content in engine.runner.cache.pool.prefixes._blocks.values()]
    places = [(tokens[at : at + 16]) for tokens in committed for at in range(0, len(tokens), 16)]
    assert len(contents) > 8
    assert all(list(content.tokens) in places for content in contents)


def test_eos_inside_a_path_cuts_the_hash(cached):
    """The KV of the whole path is there, but what lies behind the end is no token of the request."""
    engine = cached("none")
    request = engine.requests[add(engine, "a" * 40)]
    engine.runner.cache.reserve(request.table, 50, 0)
    request.computed = 50  # the path went on for ten tokens more
    engine.scheduler.publish(Schedule(parts=[Scheduled(request, 1, 0, True)]))
    contents = [content for _, content in engine.runner.cache.pool.prefixes._blocks.values()]
    assert [content.tokens for content in contents] == [tuple(request.tokens[at : at + 16]) for at in (0, 16)]
    engine.scheduler.retire(request)
    engine.requests.clear()


def test_a_prefix_of_the_same_step_is_not_found(cached):
    """vLLM 29387: what is computed in this step is no hit in it."""
    engine = cached("none")
    engine.scheduler.max_step_tokens = 512
    try:
        first, second = add(engine, name="a"), add(engine, name="b")
        record = engine.step()
        assert [(part.request, part.found) for part in record.requests] == [(first, 0), (second, 0)]
        add(engine, name="c")
        assert found([engine.step()]) == {"c": 48}
        records, _ = finish(engine)
        assert len({tuple(tokens) for tokens in outputs(records).values()}) == 1
    finally:
        engine.scheduler.max_step_tokens = 24


def test_one_token_is_always_fed(cached):
    """A prompt of whole blocks that is all there: the root gives the logits."""
    engine = cached("none")
    tokens = engine.encode(HEAD * 2)[1][:64]
    wanted = []
    for name in ("first", "second"):
        add(engine, tokens, name=name)
        records, _ = finish(engine)
        wanted.append(outputs(records)[name])
    assert found(records) == {"second": 48}
    assert wanted[0] == wanted[1]


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("name", ["eagle", "suffix+eagle"])
def test_an_eagle_hit_needs_the_next_token(cached, monkeypatch, name, planted):
    """vLLM 50438: prompts that part exactly behind a block have other KV in the block's last slot in the head."""
    if planted:
        monkeypatch.setattr(Eagle, "ahead", 0)
    head = list(range(40, 40 + 32))
    engine = cached(name)
    add(engine, [*head, 100, 101, 102], name="first")
    finish(engine)
    add(engine, [*head, 200, 201, 202], name="second")
    records, wrong = finish(engine, check=True)
    assert found(records) == {"second": 32 if planted else 16}
    assert bool(wrong) is planted
    assert all("drafter" in one.model for one in wrong)


def test_features_that_are_missing_are_no_hit(cached, monkeypatch):
    """SGLang 19897, planted: the target takes its hit though the head has none."""
    monkeypatch.setattr(Room, "needs_features", False, raising=False)
    engine = cached("eagle")
    add(engine)
    finish(engine)
    pool = engine.drafter.cache.pool
    pool.__init__(pool.blocks)
    engine.scheduler.room.needs_features = False
    add(engine)
    try:
        with pytest.raises(AssertionError, match="features are missing"):
            finish(engine)
    finally:
        engine.scheduler.room.needs_features = True
        engine.current = None


def test_contents_are_compared_where_hashes_collide(cached, monkeypatch):
    engine = cached("none")
    add(engine, "a" * 40)
    add(engine, "b" * 40)
    wanted = outputs(finish(engine)[0])
    engine = cached("none")
    monkeypatch.setattr(prefix, "digest", lambda parent, tokens: b"one for all" + bytes([len(parent) > 0]))
    got = {}
    for prompt in ("a" * 40, "b" * 40):
        add(engine, prompt)
        records, _ = finish(engine)
        assert found(records) == {}
        got |= outputs(records)
    assert sorted(got.values()) == sorted(wanted.values())


# Going back


@pytest.mark.every(2)
@pytest.mark.parametrize("blocks", [8, 60])
@pytest.mark.parametrize(
    "name", each_drafter(["ngram", "draft tree", "eagle dynamic", "suffix+eagle adaptive", "suffix+eagle"])
)
def test_what_comes_again_is_the_same(cached, name, blocks):
    """A step that is run again finds what it found then, whatever is cached by now."""
    engine = cached(name, blocks)
    engine.keep_timeline()
    prompts = [HEAD, HEAD + "x", HEAD + "abc", "abcabcabcabcabcabcabc", HEAD]
    records = []
    while engine.busy or prompts:
        if len(records) % 3 == 0 and prompts:
            add(engine, prompts.pop(0), tokens=24, temperature=0.8, seed=len(prompts))
        records.append(engine.step())
    assert found(records)
    assert any(record.preempted for record in records) or blocks > 8
    rng = np.random.default_rng(blocks)
    for step in (len(records) - 2, 0, *rng.integers(0, len(records), 3).tolist()):
        engine.rewind(step)
        for wanted in records[step:]:
            again = engine.step()
            assert same_step(wanted, again, "float32")
            assert again is wanted
    assert engine.timeline.branches == 1


def test_a_rewind_into_a_known_block_writes_where_nobody_finds_it(cached):
    """21: going on otherwise, the request writes over its tail; those who share it keep theirs."""
    engine = cached("none")
    engine.keep_timeline()
    add(engine, tokens=30, name="a")
    for _ in range(20):
        engine.step()
    pool = engine.runner.cache.pool
    known = len(pool.prefixes)
    add(engine, list(engine.requests["a"].tokens[:65]), tokens=8, name="sharer")
    engine.step()
    assert max(pool.refs) == 2
    engine.rewind(4)
    assert len(pool.prefixes) == known  # nothing was written yet
    add(engine, HEAD, tokens=12, name="other", temperature=2.0, seed=9)
    engine.requests["a"].params = SamplingParams(max_tokens=30, temperature=2.0, seed=5, ignore_eos=True)
    _, wrong = finish(engine, check=True)
    assert engine.timeline.branches == 2
    assert not wrong
    assert not wrong_blocks(engine)[0]


def test_a_fork_changes_nothing_that_is_cached(cached):
    from specscope.live.local import commands_over

    engine = cached("draft tree")
    commands = commands_over(engine)
    add(engine, tokens=30, temperature=0.8)
    for _ in range(4):
        commands.run("next")
    index = engine.runner.cache.pool.prefixes
    before = dict(index._blocks)
    assert before
    commands.run("fork seed=5 temperature=1.4 tokens=20")
    assert index._blocks == before
    assert not wrong_blocks(engine)[0]


# Blocks


def test_what_was_given_back_first_is_forgotten_first(cached):
    engine = cached("none", blocks=9)
    for name, prompt in (("a", "a" * 40), ("b", "b" * 40), ("c", "c" * 40)):
        add(engine, prompt, tokens=3, name=name)
        finish(engine)
    assert engine.runner.cache.pool.cached == 6
    for name, prompt in (("b again", "b" * 40), ("d", "d" * 90), ("b at last", "b" * 40), ("a again", "a" * 40)):
        add(engine, prompt, tokens=3, name=name)
        assert found(finish(engine)[0]) == ({name: 32} if name.startswith("b") else {})


def test_hits_and_queries_are_counted(cached):
    engine = cached("none")
    add(engine, name="a")
    add(engine, "zz", name="b")
    finish(engine)
    assert engine.runner.cache.pool.cached > 3
    add(engine, name="c")
    record = engine.step()
    prompt = len(engine.requests["c"].prompt_tokens)
    assert (record.queried, found([record])) == (prompt, {"c": 48})
    assert record.blocks_cached == 2  # one of each that ended; the other three are held
    finish(engine)


def test_a_model_part_takes_up_what_the_target_does(cached):
    engine = cached("eagle")
    add(engine)
    finish(engine)
    add(engine, name="again")
    engine.phase()
    state = model_of(engine.drafter).states["again"]
    assert state.computed == engine.requests["again"].computed == 48
    finish(engine)
