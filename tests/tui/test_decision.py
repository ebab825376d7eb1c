"""The decision drawn, and one meaning for p, q, p tried and q tried wherever they are shown."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specscope.debug.viewer import Viewer
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.tui.screens.step_view import NodePanel, NodesPanel, PlacePanel
from specscope.tui.text import line_width, probability
from specscope.tui.widgets.decision import decision, mark_line, place_lines
from specscope.tui.widgets.tree import TreePanel
from specscope.tui.widgets.tree_lines import tree_lines

from .sample import over, replay, running, text_of, told


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


@pytest.mark.parametrize("width", [60, 72, 110, 124])
def test_p_and_q_as_tried_are_shown_where_they_explain_a(width):
    viewer, step, verdict = sampled()
    head, lines, _ = tree_lines(step, verdict, viewer.history.vocabulary, width)
    heads = head[0][0]
    assert "p tried" in heads
    assert "q tried" in heads
    (row,) = (told([line]) for line in lines if "two" in told([line]))
    p, q, a = (float(values[1]) for values in (verdict.p_trial, verdict.q_trial, verdict.accept_prob))
    assert p / q == pytest.approx(a, rel=1e-6)
    for value in (p, q, a):
        assert probability(value) in row
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
    assert verdict.outcome[untried] == Outcome.UNTRIED
    assert verdict.p_trial[untried] == 0
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
