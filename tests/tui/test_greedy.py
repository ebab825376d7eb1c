"""Why a token was rejected, on the screen: a greedy step shows raw p and no coin, a sampled one its coin."""

from __future__ import annotations

import pytest

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.trace.record.records import FinalKind
from specscope.trace.words import draw_tree
from specscope.tui.app import ScopeApp
from specscope.tui.look import Look
from specscope.tui.screens.step_view import NodePanel, NodesPanel, PlacePanel
from specscope.tui.text import probability, show_token
from specscope.tui.widgets.tree import TreePanel
from specscope.tui.widgets.tree_lines import tree_lines

from .sample import over, running, text_of, told, until


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
        await pilot.press("d")
        await pilot.pause()
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
