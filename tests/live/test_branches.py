"""One timeline: a run that went back and was changed has branches, told truly by its capture, under every rule."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from specscope import Engine, SamplingParams
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.errors import UserError
from specscope.live.inspect import _left
from specscope.live.local import EngineWhatIf, commands_over
from specscope.speculate.drafters.base import Draft
from specscope.speculate.verify import traversal
from specscope.speculate.verify.distribution import Residual
from specscope.trace.record.rules import MATCH, STANDARD
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.heads import head_tensors, write_head
from tests.speculate.verify.enumeration import batch_of, dense
from tests.support.commands import run_here

HOW = {"drafter": "draft_model", "draft_model": "self:2", "tree": "[(0,), (1,), (0, 0), (1, 0)]"}


@pytest.fixture
def engine(tiny):
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.02, **HOW)
    for seed, prompt in enumerate(["abcabcab", "the cat sat on the"]):
        engine.add(prompt, SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True))
    return engine


@pytest.fixture
def eagle(deep, tmp_path):
    head = write_head(tmp_path / "head", head_tensors())
    how = {"drafter": "eagle", "draft_model": str(head), "tree": "dynamic:6,depth=3,top=3"}
    engine = Engine(target=str(deep), dtype="float32", kv_memory=0.02, **how)
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
    assert history.requests["r1"].end.reason.value == "cancelled"
    assert history.steps[3].after == 2
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
    assert over.session.record.step == 7
    assert over.session.history.branch == 1
    (code, out, err), first = (run_here(["report", str(path), "--json", *of]) for of in ([], ["--branch", "0"]))
    assert (code, "has 2 branches: these figures are for branch 1" in out + err) == (0, True)
    steps = [json.loads(told)["captures"][0]["engine"]["steps"] for told in (out, first[1])]
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
    assert commands.session.history.steps == before
    assert commands.session.history.branch == 0


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
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.02, drafter="none")
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
