"""Decisions where they are shown: drawn, in the tree and in words; greedy, sampled and under every rule."""

import dataclasses
import random

import numpy as np
import pytest

from specscope.analyze.report import build_report
from specscope.analyze.verify.trial import judge
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.viewer import Viewer
from specscope.speculate.verify import match, traversal
from specscope.trace.history.history import History
from specscope.trace.history.wording import about_draft, about_method
from specscope.trace.record.notes import SOURCES, MethodNotes
from specscope.trace.record.records import DraftNotes, FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.rules import MATCH, TRAVERSAL
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import draw_tree
from specscope.tui.app import ScopeApp
from specscope.tui.look import Look
from specscope.tui.screens.step_view import NodePanel, NodesPanel, PlacePanel
from specscope.tui.text import line_width, probability, show_token
from specscope.tui.widgets.decision import decision, mark_line, place_lines
from specscope.tui.widgets.node_view import node_facts
from specscope.tui.widgets.tree import TreePanel
from specscope.tui.widgets.tree_lines import tree_lines
from tests.speculate.verify.enumeration import batch_of, dense
from tests.trace.samples import records

from .sample import over, pressed, replay, running, text_of, told, until


def sampled() -> tuple[Viewer, RequestStep, Verdict]:
    """r1@4 of the sampled capture: two siblings at the root, the second tried against the residual of the first."""
    viewer = over("sampled")
    step = next(step for step in viewer.history.requests["r1"].steps if step.index == 4)
    return viewer, step, step.verdict


@pytest.mark.parametrize("width", [8, 9, 22, 60])
def test_the_coin_lies_on_the_part_that_it_decides_for(width):
    rng = random.Random(0)
    cases = [(0.0, 0.5), (1.0, 0.999), (1e-9, 1e-10), (0.5, 0.5), (1 - 1e-9, 1 - 1e-10), (1e-9, 0.9999999)]
    cases += [(rng.random(), rng.random()) for _ in range(300)]
    for a, coin in cases:
        line = mark_line(a, coin, width, "accepted")
        cells = "".join(text for text, _ in line)
        assert len(cells) == width
        at = cells.index("●")
        beside = cells[at + 1 : at + 2] or cells[at - 1]
        if coin < a:
            assert "─" not in cells[:at]  # below a, all that is left of the coin is thick
        else:
            assert "━" not in cells[at:]
        assert beside in "━─"


def test_where_the_bars_end_is_what_they_say():
    _, step, verdict = sampled()
    for width in (36, 60, 100):
        lines = decision(step, verdict, 1, width)
        assert max(map(line_width, lines)) <= width
        cells = sum(text.count("█") for text, ink in lines[1] if ink == "target")
        room = cells + sum(text.count("·") for text, _ in lines[1])
        assert abs(cells - float(verdict.p[1]) * room) <= 1


@pytest.mark.parametrize("width", [48, 60, 72, 110, 124])
def test_p_and_q_as_tried_are_shown_where_they_explain_a(width):
    viewer, step, verdict = sampled()
    head, lines, nodes = tree_lines(step, verdict, viewer.history.vocabulary, width)
    heads = head[0][0]
    assert "p tried" in heads
    assert "q tried" in heads
    (row,) = (told([line]) for line in lines if "two" in told([line]))
    p, q, a = (float(values[1]) for values in (verdict.p_trial, verdict.q_trial, verdict.accept_prob))
    assert p / q == pytest.approx(a, rel=1e-6)
    for value in (p, q, a):
        assert probability(value) in row
    p, q = float(verdict.p[3]), float(step.tree.q[3])  # of a node that was not tried: as drawn, whatever the columns
    row = told([lines[nodes.index(3)]])
    assert probability(p) in row
    assert probability(q) in row
    (row,) = (told([line]) for line in lines if "two" in told([line]))
    if width >= 72:  # and what they were before the trial
        assert probability(float(verdict.p[1])) in row
        assert probability(float(step.tree.q[1])) in row


def test_nothing_is_called_tried_where_it_says_nothing():
    viewer = over("ngram")  # greedy
    steps = [step for request in viewer.history.requests.values() for step in request.steps if step.verdict is not None]
    assert any(len(step.tree) for step in steps)
    for step in steps:
        head = tree_lines(step, step.verdict, viewer.history.vocabulary, 160)[0]
        assert "tried" not in told([head])
        for node in range(len(step.tree)):
            assert "tried" not in told(decision(step, step.verdict, node, 80))


def test_the_trials_beside_a_node_are_those_of_its_siblings_and_of_the_path_to_it():
    """With the same p as in the tree."""
    viewer, step, verdict = sampled()
    untried = 3
    assert (verdict.outcome[untried], verdict.p_trial[untried]) == (Outcome.UNTRIED, 0)
    said = told(place_lines(step, verdict, 2, viewer.history.vocabulary, 100))
    assert f"  {probability(float(verdict.p[untried]))}" in said
    assert "  0\n" not in f"{said}\n"
    steps = replay().history.requests["r1"].steps
    step = next(s for s in steps if s.verdict is not None and len(s.tree) and s.verdict.accepted >= 2)
    vocabulary = replay().history.vocabulary
    deep = int(np.argmax(step.tree.depth))
    said = told(place_lines(step, step.verdict, deep, vocabulary, 80))
    assert "path to it" in said
    for node in step.tree.path_to(deep)[:-1]:
        assert vocabulary.show(int(step.tree.token[node])) in said
    final = told(place_lines(step, step.verdict, len(step.tree), vocabulary, 80))
    assert final.count("accepted") >= step.verdict.accepted


async def test_the_room_below_the_tree_shows_the_decision_that_ended_the_path():
    viewer, step, verdict = sampled()
    viewer.goto(viewer.history.requests["r1"].engine_steps[4])
    async with running(viewer) as (app, pilot):
        await pilot.press("j")
        panel = app.query_one(TreePanel)
        assert panel.look.part[1] == step
        said = text_of(panel)
        assert said.count("●") == 3  # the root, and two coins
        assert said.count("rejected") == 2
        await pilot.press("d")
        app.screen.pick_node(app.screen.last.at, 1)
        nodes, node, place = (app.screen.query_one(kind) for kind in (NodesPanel, NodePanel, PlacePanel))
        assert nodes.node == 1
        assert "p tried" in text_of(node)
        assert "rejected" in text_of(place)
        assert probability(float(verdict.accept_prob[1])) in text_of(node)


TREE = DraftTree.build([0, 0, 1], [ROOT, 0, ROOT])
P = [dense([0.5, 0.5]), dense([0.9, 0.1]), dense([1.0, 0.0]), dense([0.5, 0.5])]
COINS = {TRAVERSAL: [0.5, 0.99, 0.4, 0.5], MATCH: [0.5, 0.7, 0.4, 0.1]}


@pytest.fixture(params=[TRAVERSAL, MATCH])
def step(request):
    verify = traversal.verify if request.param == TRAVERSAL else match.verify
    (verdict,), _ = verify(batch_of(TREE, P, {}, COINS[request.param]))
    return RequestStep("r0", 0, 5, 0, "ngram", TREE, verdict, emitted=1)


def test_a_tree_has_the_sign_of_how_it_was_decided(step):
    _, lines, _ = tree_lines(step, step.verdict, Vocabulary(), 120, [])
    signs = [next((sign for sign in "↓=≠<≥" if f"{sign} " in told([line])), "") for line in lines]
    assert [sign for sign in signs if sign] == (["↓", "<"] if step.rule == TRAVERSAL else ["≠", "="])
    drawn = draw_tree(step, Vocabulary()).splitlines()  # with the ratio of a path that was accepted from its end
    assert ("ratio=0.5000" in drawn[1]) is (step.rule == TRAVERSAL)
    assert ("ratio" in drawn[2]) is False


def test_a_coin_that_was_held_against_nothing_is_not_on_the_line(step):
    lines = [told(decision(step, step.verdict, node, 60)[:1]) for node in step.verdict.path]
    on_the_line = ["●" in line for line in lines]
    assert on_the_line == ([False, True] if step.rule == TRAVERSAL else [False])
    assert ("below ↓ a" in lines[0]) is (step.rule == TRAVERSAL)


def test_no_coin_is_shown_where_none_was_tossed():
    """Another engine tosses none for a greedy request."""
    parts = [part for record in records() for part in record.requests]
    step = next(part for part in parts if part.verdict is not None and len(part.tree))
    verdict = dataclasses.replace(step.verdict, coin=np.zeros(len(step.tree)), final_coin=0.0)
    bare = dataclasses.replace(step, verdict=verdict)
    tried = int(np.flatnonzero(verdict.outcome != Outcome.UNTRIED)[0])
    said = told(decision(bare, verdict, tried, 100))
    assert "●" not in said
    assert "none  a" in said
    head, lines, _ = tree_lines(bare, verdict, Vocabulary(), 110, [])
    text = told([head, *lines])
    assert "●" not in text
    assert " – " in text
    assert "u=" not in draw_tree(bare, Vocabulary())
    assert "u=" in draw_tree(step, Vocabulary())


def steps(name):
    history = over(name).history
    for request in history.requests.values():
        yield from ((history, step) for step in request.steps if step.verdict is not None and len(step.tree))


@pytest.mark.parametrize("name", ["eagle", "ngram"])
def test_a_greedy_tree_shows_raw_p_and_no_coin(name):
    for history, step in steps(name):
        head, lines, order = tree_lines(step, step.verdict, history.vocabulary, 100)
        assert "raw p" in head[0][0]
        assert not any(word in head[0][0] for word in ("coin", " a ", "residual"))
        rows = ["".join(text for text, _ in line) for line in lines]
        raw = [float(p) for p, node in zip(step.parents.raw_p, step.tree.parent, strict=True)
               if int(node) in step.parents.node.tolist()]  # fmt: skip
        assert all(any(probability(p) in row for row in rows) for p in raw)
        end = int(step.verdict.path[-1]) if len(step.verdict.path) else -1
        if end in step.parents.node.tolist():  # the final token has the target's p of its own
            row = step.parents.node.tolist().index(end)
            assert probability(float(step.parents.top_p[row, 0])) in rows[order.index(len(step.tree))]
        drawn = draw_tree(step, history.vocabulary)
        assert "raw p=" in drawn
        assert " u=" not in drawn
        assert " a=" not in drawn


@pytest.mark.parametrize("width", [40, 100])
@pytest.mark.parametrize("name", ["eagle", "evidence"])
def test_the_first_screen_begins_with_what_the_target_wanted(width, name):
    """Of the last rejection of a replay, at every size: what was wanted, and what was drafted in its place."""
    viewer = over(name)
    request = viewer.history.requests["r2"]
    rejected = [
        (step, position)
        for step, position in zip(request.steps, request.engine_steps, strict=True)
        if step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
    ]
    step, position = rejected[-1]
    viewer.goto(position)
    said = " ".join(told(TreePanel().draw(Look(viewer, "r2"), width, 12).lines).split())
    end = int(step.verdict.path[-1]) if len(step.verdict.path) else -1
    wanted = int(step.parents.choice[step.parents.node.tolist().index(end)])
    assert said.startswith(f"Target wanted ‘{show_token(viewer.history.vocabulary, wanted)}’ (")
    assert ", drafted " in said


async def test_a_node_of_a_greedy_replay_tells_what_both_models_thought():
    viewer = over("eagle")
    viewer.goto(viewer.history.requests["r2"].at(24))
    async with running(viewer, (120, 40)) as (app, pilot):
        app.standing.pick("r2")
        await pressed(pilot, "d")
        nodes = app.screen.query_one(NodesPanel)
        node, place = (text_of(app.screen.query_one(panel)) for panel in (NodePanel, PlacePanel))
        assert nodes.node == 0
        assert node.startswith("Target wanted ‘␣for’ (raw p 0.921")
        assert not any(word in node for word in ("coin  ", "min(1", "residual"))
        assert "The drafter ranks ‘␣for’ 15th here" in " ".join(node.split())
        for token, p in (("␣for", "0.921"), ("␣and", "0.035"), (",", "0.263"), ("␣source", "0.031")):
            assert any(token in line and p in line for line in place.splitlines())
        assert "␣for is the drafter's 15th choice" in place


def test_the_console_lists_the_likeliest_of_both():
    commands = Commands(Session(history=over("eagle").history))
    commands.run("goto r2@24")
    said = commands.run("node 0")
    assert "target's likeliest, raw: ␣for 0.921, ␣and 0.035, , 0.029, ␣in 0.009" in said
    assert "drafter's likeliest: , 0.263, ␣and 0.122, . 0.053, ␣source 0.031" in said
    assert "coins of" not in said
    assert "residual" not in said


async def test_a_reference_with_a_node_opens_at_that_node():
    """As `y` copies it, and as reports name their examples: FILE#r2@24/3."""
    app = ScopeApp(over("eagle"), start="r2@24/3")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: [panel.node for panel in app.screen.query(NodesPanel)] == [3])
        await pilot.pause()
        assert text_of(app.screen.query_one(NodePanel)).startswith("Target wanted ‘␣for’")


WIDTH = 160


def noted(part):
    """The same step as a block drafter under a lossy rule would have it."""
    if part.verdict is None or not len(part.tree):
        return part
    n = len(part.tree)
    rows = {"confidence": np.linspace(0.9, 0.5, n).astype(np.float32), "module": np.arange(n, dtype=np.int32)}
    match = {"match_length": 5, "match_count": 3, "match_source": "the prompt"}
    method = MethodNotes(**rows, **match, one_pass=True, unverified=2)
    return dataclasses.replace(part, verdict=dataclasses.replace(part.verdict, rule="lossy:fly"), method=method)


@pytest.fixture(scope="module")
def histories():
    """(As our own engine made it, with notes of a method and a lossy rule)."""
    plain = replay().history
    other = History(run=plain.run, vocabulary=plain.vocabulary)
    for record in plain.steps:
        other.append(dataclasses.replace(record, requests=tuple(map(noted, record.requests))))
    return plain, other


def look_at(history):
    """At the last step with a tree."""
    viewer = Viewer(history)
    at, part = next(
        (at, part)
        for at in range(len(history.steps) - 1, -1, -1)
        for part in history.steps[at].requests
        if part.verdict is not None and len(part.tree) > 1
    )
    viewer.position = at
    return Look(viewer, part.request), part


def shown(history):
    look, part = look_at(history)
    tree = told(TreePanel().draw(look, WIDTH, 40).lines)
    return tree, told(node_facts(look, part, part.verdict, 1, WIDTH, 60))


def test_the_tree_and_the_node_tell_it_and_nothing_of_what_is_not_told(histories):
    for said in shown(histories[0]):
        for word in ("lossless", "one pass", "not verified", "match of", "chance of", "module"):
            assert word not in said
    tree, node = shown(histories[1])
    assert "lossy:fly: not lossless" in tree
    assert "all depths in one pass · 2 drafts not verified · a match of 5 tokens, 3 times, in the prompt" in tree
    _, part = look_at(histories[1])
    assert f"confidence {float(part.method.confidence[1]):.3f}, module 1" in node
    assert "lossy:fly: not lossless" in node


def test_report_and_verify_tell_what_is_not_lossless(histories):
    plain, other = (build_report(history, source="x") for history in histories)
    parts = [part for step in histories[1].steps for part in step.requests if part.verdict is not None]
    lossy = [part for part in parts if part.method is not None]
    assert any(
        line.startswith(f"{len(lossy)} of {len(parts)} verdicts under a rule that is not lossless (lossy:fly)")
        for line in other.warnings
    )
    assert f"{2 * len(lossy)} drafts not verified" in "\n".join(other.warnings)
    assert not any("lossless" in line or "not verified" in line for line in plain.warnings)
    plain, other = (judge(history, source="x") for history in histories)
    assert "a lossy rule's output does not follow the target's p: it is not judged" in other.notes
    assert not any("lossy" in line for line in plain.notes)
    assert {check.name: check.tested for check in other.checks}["accept probability"] == 0


def combined():
    """A step of the sample, as if a text had drafted its nodes beside a model."""
    steps = (part for record in replay().history.steps for part in record.requests)
    step = next(part for part in steps if part.verdict is not None and len(part.tree) > 3)
    n = len(step.tree)
    tree = dataclasses.replace(step.tree, drawn=np.full(n, Drawn.DETERMINISTIC, np.uint8), q=np.ones(n, np.float32))
    source = (np.arange(n) % len(SOURCES)).astype(np.int32)
    prob, nothing = np.where(source == 1, 0, 0.25).astype(np.float32), np.zeros(0, np.int32)
    return dataclasses.replace(
        step,
        tree=tree,
        notes=DraftNotes(prob, prob, nothing, nothing, np.zeros(0, np.float32)),
        method=MethodNotes(source=source, confidence=prob, match_length=7, match_count=2),
    )


def test_the_text_has_no_probability_of_its_own_and_the_sources_are_said_in_words():
    step = combined()
    drawn = draw_tree(step, replay().history.vocabulary)
    for line in drawn.splitlines():
        assert ("from text" in line) == ("q=" in line and "draft p=" not in line)
    method = step.method
    counts = np.bincount(method.source, minlength=3)
    assert about_method(method)[0] == f"from model {counts[0]}, text {counts[1]}, both {counts[2]}"
    assert [about_draft(method, node)[1] for node in range(3)] == ["from the model", "from the text", "from both"]
