"""One timeline: a run that went back and was changed has branches, told truly, and looking changes nothing."""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specscope import Engine, SamplingParams
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.live.inspect import _left
from specscope.live.local import EngineWhatIf, commands_over
from specscope.model.kv_cache import BLOCK_SIZE
from specscope.model.runner import decoder_layers
from specscope.speculate.drafters.base import Draft
from specscope.speculate.verify import traversal
from specscope.speculate.verify.distribution import Residual
from specscope.trace.history.history import History
from specscope.trace.record.rules import MATCH, STANDARD
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.engines import DRAFTERS, PROMPTS, SMALL, fresh, tiny_engine
from tests.heads import head_tensors, write_head
from tests.speculate.verify.enumeration import batch_of, dense
from tests.support.commands import run_here

HOW = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}


@pytest.fixture
def engine(tiny):
    engine = tiny_engine(tiny, kv_memory=0.02, **HOW)
    for seed, prompt in enumerate(["abcabcab", "the cat sat on the"]):
        engine.add(prompt, SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True))
    return engine


@pytest.fixture
def eagle(deep, tmp_path):
    head = write_head(tmp_path / "head", head_tensors())
    how = {"drafter": "eagle", "draft_model": str(head), "tree": "dynamic:6,depth=3,top=3"}
    engine = tiny_engine(deep, kv_memory=0.02, **how)
    engine.add("the cat sat on the", SamplingParams(max_tokens=20, ignore_eos=True))
    return engine


@contextmanager
def captured(engine, path):
    """The debugger over an engine whose run is captured, and ends here."""
    writer = CaptureWriter(path, engine.run_info, engine.vocabulary)
    engine.subscribe(writer, lossless=True)
    yield commands_over(engine)
    engine.close()
    writer.close()


def numbers(history):
    return [(record.step, record.branch) for record in history.steps]


def test_a_run_that_was_changed_is_recorded_with_its_branches_and_each_can_be_looked_at(engine, tmp_path):
    """Issue 12, item 2: what came after going back and cancelling was dropped as known, and two histories spliced."""
    path = tmp_path / "run.jsonl"
    with captured(engine, path) as commands:
        commands.run("next 6")
        commands.run("goto 2")
        engine.cancel("r1")
        commands.run("continue")
    history = read_capture(path).history
    assert numbers(history) == numbers(commands.session.history)
    assert numbers(history)[:4] == [(0, 0), (1, 0), (2, 0), (6, 1)]
    assert history.steps == commands.session.history.steps
    assert (history.requests["r1"].end.reason.value, history.steps[3].after) == ("cancelled", 2)
    history.show(0)
    assert numbers(history) == [(step, 0) for step in range(6)]
    assert history.requests["r1"].end is None
    assert b'"specscope.branch"' in path.read_bytes()
    over = Commands(Session(history=read_capture(path).history))
    said = over.run("info branches")
    assert "0" in said
    assert "step 6 follows step 2" in said
    over.run("branch 0")
    assert [record.step for record in over.session.history.steps] == list(range(6))
    over.run("goto 7")
    assert (over.session.record.step, over.session.history.branch) == (7, 1)
    (code, out, err), first = (run_here(["report", str(path), "--json", *of]) for of in ([], ["--branch", "0"]))
    assert (code, "has 2 branches: these figures are for branch 1" in out + err) == (0, True)
    steps = [json.loads(told)["captures"][0]["engine"]["steps"] for told in (out, first[1])]
    gated = json.loads(run_here(["report", str(path), "--json", "--branch", "0", "--fail-if", "output tokens < 1"])[1])
    assert gated["conditions"][0]["detail"] == f"not hit; it is {json.loads(first[1])['pooled']['emitted']}"
    assert steps == [len(numbers(read_capture(path).history)), 6]
    assert "no such branch; there are: 0, 1" in run_here(["report", str(path), "--branch", "7"])[2]


def test_what_came_between_two_phases_comes_there_again(engine):
    """Issue 12, item 2: it came one step early."""
    commands = commands_over(engine)
    commands.run("next 2")
    commands.run("step 2")
    engine.add("late late", SamplingParams(max_tokens=4))
    commands.run("next 4")
    before = list(commands.session.history.steps)
    admitted = [record.step for record in before if record.admitted]
    commands.run("goto 0")
    commands.run("next 5")
    assert [record.step for record in commands.session.history.steps if record.admitted] == admitted == [0, 3]
    assert (commands.session.history.steps, commands.session.history.branch) == (before, 0)


def test_looking_at_an_earlier_step_shows_a_fault_in_its_kv_and_does_not_heal_it(engine):
    """Issue 12, item 1."""
    commands = commands_over(engine)
    commands.run("next 6")
    session = commands.session
    request = engine.requests["r0"]
    part = session.history.steps[3].requests[0]
    node = 0
    clean = commands.what_if.look(session, 3, "r0", node)
    assert clean.computed
    assert clean.notes == ()
    slot = int(request.table.slots(2, 3)[0])
    for store in engine.runner.cache.stores:
        store[:, :, slot] += 3
    broken = [store.clone() for store in engine.runner.cache.stores]
    seen = commands.what_if.look(session, 3, "r0", node)
    assert any("was judged with p" in note for note in seen.notes)
    taken = request.table.slots(0, request.computed)
    for before, store in zip(broken, engine.runner.cache.stores, strict=True):
        assert before[:, :, taken].equal(store[:, :, taken])
    assert seen.token == part.tree.token[node]


def test_the_drafter_is_seen_in_a_dynamic_greedy_tree_and_forks_leave_no_hooks_and_load_nothing_again(
    eagle, monkeypatch
):
    """Issue 12, items 8 and 3: the drafter's column was empty, and ranks were those of a one-hot vector."""
    commands = commands_over(eagle)
    commands.run("next 4")
    for step in (3, 2):
        part = commands.session.history.steps[step].requests[0]
        for node in range(len(part.tree)):
            view = commands.what_if.look(commands.session, step, "r0", node)
            assert view.computed == (step == 2)
            assert view.draft.prob == pytest.approx(float(part.notes.prob[node]), abs=1e-5)
            assert view.q is None
            assert 0 <= view.kl < 100
            assert view.raw.rank is not None
            assert sum(one.prob for one in view.raw.top) < 1

    def hooks():
        model = eagle.runner.loaded.model
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    def load(*_):
        raise AssertionError("the head was loaded again")

    monkeypatch.setattr("specscope.engine.build.load_head", load)
    before = hooks()
    for _ in range(3):
        commands.run("fork temperature=0.9 tokens=5")
    assert hooks() == before


def test_a_fork_that_runs_out_of_blocks_says_so_and_keeps_none(tiny):
    """Issue 12, item 3."""
    engine = tiny_engine(tiny, kv_memory=0.02, drafter="none")
    engine.runner.cache.pool.__init__(4)
    engine.add("abcabcab", SamplingParams(max_tokens=50, ignore_eos=True))
    commands = commands_over(engine)
    commands.run("next 20")
    used = engine.runner.cache.pool.used
    with pytest.raises(UserError, match=r"ran out of KV blocks after \d+ tokens"):
        commands.run("fork temperature=0.7 tokens=60")
    assert engine.runner.cache.pool.used == used


def test_breakpoints_hold_at_the_same_steps_forward_and_back(engine):
    """Issue 12, item 4."""
    commands = commands_over(engine)
    commands.run("continue")
    over = Commands(Session(history=commands.session.history))
    over.run("watch accepted > 0")
    forward, back = [], []
    while "nothing is left" not in over.run("continue"):
        forward.append(over.session.record.step)
    last = over.session.record.step  # where the way back begins
    while over.session.position > 0:
        over.run("reverse-continue")
        back.append(over.session.record.step)
    assert len(forward) > 2
    assert [step for step in reversed(back) if step] == [step for step in forward if 0 < step < last]
    over.run("delete")
    over.run("break reject")
    over.run("goto 8")
    over.run("reverse-continue")
    assert over.session.breakpoints.points[2].hits == 0


@pytest.mark.parametrize(
    ("temperature", "changes"), [(0.0, ["temperature=0.7"]), (0.8, ["seed=9", "tree=3", "reject=0 reject=1"])]
)
def test_a_change_that_was_asked_for_explains_the_difference(tiny, temperature, changes):
    """In bfloat16 most draws are near ties: rounding was blamed for what the change had done."""
    engine = Engine(target=str(tiny), dtype="bfloat16", kv_memory=0.02, **HOW)
    engine.add("abcabcab", SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True))
    commands = commands_over(engine)
    commands.run("next 4")
    for words in changes:
        said = commands.run(f"fork {words} tokens=30")
        assert commands.forked.differ
        assert commands.forked.near_tie
        assert "rounding" not in said
        assert f": {commands.forked.changes} explains it" in said


def test_a_fork_is_compared_with_a_run_that_is_alone_as_it_is(engine):
    """Beside others a batch rounds otherwise, here a lot: what the change does is told all the same."""
    forward = engine.runner.forward_with_features

    def rounded(segments):
        logits, features = forward(segments)
        return ([2 * rows for rows in logits] if len(segments) > 1 else logits), features

    engine.runner.forward_with_features = rounded
    commands = commands_over(engine)
    commands.run("next 4")
    for words in ("temperature=1.4", "tree=3"):
        said = commands.run(f"fork {words} tokens=30")
        assert "the original here is the request run again alone; it differs from the record" in said
        assert f": {commands.forked.changes} explains it" in said
    same = commands.run("fork temperature=0.8 tokens=30")
    assert "the same tokens" in same


def test_p_where_nothing_is_left_of_it_is_what_the_engine_drew_from():
    """p equals q below a node of ratio 0.4: the scaled p has nothing beyond q, and the rule goes back to p itself."""
    row, first = dense([0.5, 0.3, 0.2]), dense([0.2, 0.5, 0.3])
    tree = DraftTree.build([0, 0], [ROOT, 0], drawn=Drawn.WITH_REPLACEMENT)
    q = {ROOT: dense([0.5, 0.25, 0.25]), 0: row}
    (verdict,), (drawn_from,) = traversal.verify(batch_of(tree, [first, row, row], q, [0.5, 1e-9, 0.99]))
    assert verdict.path.tolist() in ([0], [])
    seen = SimpleNamespace(draft=Draft(tree, q), verdict=verdict, target=lambda above: Residual(row))
    left = _left(seen, 0)
    assert float(left.row.sum()) == pytest.approx(1)
    if verdict.path.tolist() == [0]:
        assert left.row.tolist() == pytest.approx(drawn_from.row.tolist())


def test_under_match_a_coin_is_given_to_the_sibling_that_has_it():
    part = SimpleNamespace(tree=DraftTree.build([1, 2, 3], [ROOT, ROOT, 0]))
    what_if = EngineWhatIf(SimpleNamespace(config=SimpleNamespace(rule=MATCH)))
    what_if._check_coins({"engine": {}, "coins": {(5, 0): 0.2, (5, 2): 0.1}}, part)
    with pytest.raises(UserError, match="siblings share the coin of node 0"):
        what_if._check_coins({"engine": {}, "coins": {(5, 1): 0.2}}, part)
    what_if._check_coins({"engine": {"rule": STANDARD}, "coins": {(5, 1): 0.2}}, part)


FORKS = [
    "",
    "seed=5 temperature=1.4",
    "temperature=0",
    "drafter=ngram tree=2x3",
    "drafter=none",
    "tree=2",
    "reject=0",
    "accept=1",
    "token=65",
    "coin=0:0.999",
    "max_tokens=3",
]


class Travel(RuleBasedStateMachine):
    engines = None

    @initialize(name=st.sampled_from(list(DRAFTERS)), blocks=st.sampled_from([SMALL, 30]), greedy=st.booleans())
    def begin(self, name, blocks, greedy):
        self.engine, self.greedy = self.engines[name], greedy
        fresh(self.engine, blocks)
        self.commands = commands_over(self.engine)
        self.session = self.commands.session
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "run.jsonl"
        self.writer = CaptureWriter(self.path, self.engine.run_info, self.engine.vocabulary)
        self.follower = History(self.engine.run_info, self.engine.vocabulary)
        self.published = []
        self.engine.subscribe(self.published.append, lossless=True)
        self.engine.subscribe(self.writer, lossless=True)
        self.engine.bus.subscribe(self.follower.take, lossless=True, moves=True)

    @rule(prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 14), seed=st.integers(0, 9))
    def add(self, prompt, tokens, seed):
        temperature = 0 if self.greedy else 0.8
        self.engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed))

    @precondition(lambda self: self.engine.requests)
    @rule(index=st.integers(0, 5))
    def cancel(self, index):
        self.engine.cancel(list(self.engine.requests)[index % len(self.engine.requests)])

    @rule(line=st.sampled_from(["next", "next 3", "step", "step 3", "until accepted > 0", "finish"]))
    def forward(self, line):
        self.obey(line)

    @rule(line=st.sampled_from(["reverse-next", "reverse-next 3", "reverse-continue"]))
    def back(self, line):
        self.obey(line)

    @precondition(lambda self: self.session.history.steps)
    @rule(share=st.floats(0, 1))
    def goto(self, share):
        steps = self.session.history.steps
        self.obey(f"goto {steps[int(share * (len(steps) - 1))].step}")

    @rule(line=st.sampled_from(["break reject", "break bonus", "watch accepted > 0", "delete"]))
    def breakpoint(self, line):
        self.looks(lambda: self.obey(line))

    @rule(share=st.floats(0, 1), of=st.integers(0, 3), node=st.integers(-1, 3))
    def look(self, share, of, node):
        steps = self.session.history.steps
        record = steps[int(share * (len(steps) - 1))] if steps else None
        if record is None or not record.requests:
            return
        part = record.requests[of % len(record.requests)]
        if part.verdict is None or node >= len(part.tree):
            return
        self.looks(lambda: self.view(record, part, None if node < 0 else node))

    def view(self, record, part, node):
        try:
            view = self.commands.what_if.look(self.session, record.step, part.request, node)
        except UserError as error:
            if "too few free KV blocks" not in str(error):
                raise
            return
        assert not [note for note in view.notes if "was judged" in note]
        assert view.token == (part.verdict.token if node is None else part.tree.token[node])
        judged = part.verdict.final_p if node is None else part.verdict.p[node]
        assert view.p.prob == pytest.approx(float(judged), abs=2e-5)
        assert view.computed == (self.engine.last is None or self.engine.last.known is not record)
        if node is not None and part.tree.parent[node] == ROOT and part.notes is not None and view.draft is not None:
            assert view.draft.prob == pytest.approx(float(part.notes.prob[node]), abs=1e-4) or not self.greedy

    @rule(line=st.sampled_from(["tree", "info kv", "info requests", "info step", "where", "node 0", "print tau"]))
    def say(self, line):
        self.looks(lambda: self.obey(line))

    @rule(words=st.sampled_from(FORKS))
    def fork(self, words):
        if self.session.phase == "":
            self.looks(lambda: self.obey(f"fork {words} tokens=6"))

    def obey(self, line):
        try:
            return self.commands.run(line)
        except UserError:
            return ""

    def looks(self, what):
        """What only looks leaves tokens, KV, books, hooks, records and the capture as they are."""
        before = self.state()
        what()
        after = self.state()
        assert before == after

    def state(self):
        engine = self.engine
        engine.bus.flush()
        cache = engine.runner.cache
        held = []
        for request in engine.requests.values():
            slots = torch.from_numpy(request.table.slots(0, request.computed))
            held.append((request.id, list(request.tokens), request.computed, list(request.table.blocks), request.steps))
            held.append([part[:, slots].double().sum().item() for part in [*cache.key, *cache.value]])
        drafter = getattr(engine.drafter, "cache", None)
        states = {name: (s.computed, list(s.table.blocks)) for name, s in getattr(engine.drafter, "states", {}).items()}
        layers = decoder_layers(engine.runner.loaded.model)
        hooks = sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers)
        return (
            held,
            list(cache.pool.refs),
            None if drafter is None else list(drafter.pool.refs),
            states,
            hooks,
            (engine.steps, engine.current and len(engine.current.phases), id(engine.last)),
            [id(record) for record in self.session.history.steps],
            len(self.published),
        )

    @invariant()
    def books(self):
        """No block leaks, none is used twice, and every count of holders is right."""
        pool = self.engine.runner.cache.pool
        tables = [request.table for request in self.engine.requests.values()]
        held = [block for table in tables for block in table.blocks]
        assert len(set(held)) == len(held)
        assert [pool.refs[block] for block in range(pool.blocks)] == [held.count(b) for b in range(pool.blocks)]
        for request in self.engine.requests.values():
            assert request.computed <= len(request.tokens)
            assert len(request.table.blocks) * BLOCK_SIZE >= request.computed
        drafter = getattr(self.engine.drafter, "cache", None)
        if drafter is not None:
            held = [block for state in self.engine.drafter.states.values() for block in state.table.blocks]
            assert drafter.pool.refs == [held.count(block) for block in range(drafter.pool.blocks)]
            assert set(self.engine.drafter.states) <= set(self.engine.requests)

    @invariant()
    def followed(self):
        """Who follows the bus stands where the session stands."""
        self.engine.bus.flush()
        assert self.follower.steps == self.session.history.steps

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.session.breakpoints.delete()
        self.obey("next 200")
        self.engine.close()
        self.writer.close()
        replayed = read_capture(self.path)
        assert replayed.warnings == []
        history = replayed.history
        assert set(history.branches) == set(self.follower.branches)
        assert sorted(record.step for record in self.published) == list(range(len(self.published)))
        ours = self.session.history.steps
        for branch in self.follower.branches:
            for side in (history, self.follower):
                side.show(branch)
            assert history.steps == self.follower.steps
            self.outputs(history)
        self.follower.move(ours[-1].step if ours else -1)
        history.move(ours[-1].step if ours else -1)
        assert history.steps == ours
        self.folder.cleanup()

    def outputs(self, history):
        """What ended has the output of its steps on that branch."""
        for request in history.requests.values():
            if request.end is not None:
                assert request.end.output.tolist() == [token for token, _ in request.output()]


def travel(engines, examples, steps):
    Travel.engines = engines
    Travel.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, phases=[Phase.explicit, Phase.generate]
    )  # shrinking takes minutes; the steps of a failure are printed all the same
    Travel.TestCase().runTest()


def test_looking_changes_nothing_and_the_capture_is_what_happened(engines):
    travel(engines, 8, 25)


@pytest.mark.slow
def test_two_thousand_commands(engines):
    """Issue 12, shown 2."""
    travel(engines, 50, 40)
