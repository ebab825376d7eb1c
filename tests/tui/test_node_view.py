"""A NodeView as lines, and how one is asked for."""

import math

import pytest

from specscope.debug.answers import Answer, LookRefused
from specscope.debug.views import DistributionView, TopToken
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.screens.step_view import NodesPanel, PlacePanel, StepScreen
from specscope.tui.text import line_width, probability
from specscope.tui.widgets.node_view import node_view_lines

from .sample import live, node_view, notes, replay, running, text_of, told, until

NAMES = ("target, raw", "target, as sampled", "drafter, raw", "drafter, as sampled")


def vocabulary() -> Vocabulary:
    return replay().history.vocabulary


@pytest.mark.parametrize("width", [24, 55, 97, 200])
@pytest.mark.parametrize("height", [8, 20, 58])
def test_all_four_are_there_at_any_size(width, height):
    view = node_view(notes=("the judged p was 0.4, this one says 0.47",))
    lines = node_view_lines(view, vocabulary(), width, height)
    assert max(map(line_width, lines)) <= width
    said = told(lines)
    for name in NAMES:
        assert said.count(name) == 1
    assert "KL(target‖drafter)" in said
    assert "! the judged p was" in said


def test_tokens_are_whole_numbers_are_the_views_and_bars_as_long_as_the_probability():
    words = Vocabulary({at: f" extraordinary{at}".encode() for at in range(100)})
    view = node_view()
    said = told(node_view_lines(view, words, 97, 58))
    for column in (view.raw, view.p, view.draft, view.q):
        assert f"{probability(column.prob)}, rank {column.rank}" in said
        for top in column.top[:8]:
            assert f"␣extraordinary{top.token} " in said
            assert probability(top.prob) in said
    lines = node_view_lines(view, vocabulary(), 50, 60)
    line = next(line for line in lines if "0.800" in told([line]) and "rank" not in told([line]))
    full = next(text for text, ink in line if ink == "bonus")
    track = len(full) + len(line[line.index((full, "bonus")) + 1][0])
    assert full.count("█") == pytest.approx(0.8 * track, abs=1)


def test_what_is_not_there_says_why():
    bare = node_view(draft=None, q=None, kl=None, tv=None, choice_rank=None)
    said = told(node_view_lines(bare, vocabulary(), 60, 40))
    assert "deterministic" in said
    assert "no draft model" in said
    assert "KL" not in said
    outside = DistributionView((TopToken(1, 1.0),), 0.0, 0.0, None, outside=True)
    none = DistributionView((TopToken(1, 1.0),), 0.0, 0.0, None)
    said = told(node_view_lines(node_view(draft=outside, p=none, kl=math.inf), vocabulary(), 60, 40))
    assert "outside the draft" in said
    assert "▸ 0: excluded" in said
    assert "∞" in said


@pytest.mark.parametrize("computed", [False, True])
def test_rules_say_what_they_removed_and_whether_the_numbers_are_the_steps_own(computed):
    said = told(node_view_lines(node_view(computed=computed), vocabulary(), 60, 40))
    assert ("recomputed in" in said) == computed
    assert ("the tensors that the step used" in said) == (not computed)
    assert "top-k 20 removes 49,132 tokens, 0.081 of the mass" in said
    assert "top-p 0.95 removes 1 token, 4e-05 of the mass" in said


@pytest.mark.parametrize("status", ["paused", "running"])
async def test_enter_shows_the_distributions_wherever_the_engine_is(status):
    viewer, engine = live(12, status)
    async with running(viewer) as (app, pilot):
        await pilot.press(",", ",", ",", "j", "d", "up", "enter")
        place, step = app.screen.query_one(PlacePanel), app.screen.last.history.steps[app.screen.last.at].step
        assert engine.looked == [(step, "r1", app.screen.query_one(NodesPanel).node)]
        await shown(pilot, place)
        assert engine.lines == []


async def shown(pilot, place: PlacePanel) -> None:
    await until(pilot, lambda: NAMES[0] in text_of(place))
    assert all(name in text_of(place) for name in NAMES)


async def test_an_answer_is_shown_for_the_node_that_was_asked_about_and_no_other():
    viewer, engine = live(12, "paused")
    engine.answers = False
    async with running(viewer) as (app, pilot):
        await pilot.press("j", "d", "enter")
        place = app.screen.query_one(PlacePanel)
        await pilot.pause()
        assert "asking the engine" in text_of(place)
        step, name, node = engine.looked[-1]
        engine.node_view = node_view(name, step + 1, node)  # of another step
        app.look()
        assert NAMES[0] not in text_of(place)
        engine.node_view = node_view(name, step, node)
        await shown(pilot, place)
        await pilot.press("down")
        assert NAMES[0] not in text_of(place)
        viewer.history.rewinds += 1  # the step was taken back: what was answered is not of the one that came instead
        await pilot.press("up")
        assert NAMES[0] not in text_of(place)


async def test_a_refusal_stands_where_the_answer_would():
    viewer, engine = live(12, "paused")
    engine.answers = False
    async with running(viewer) as (app, pilot):
        await pilot.press("j", "d", "enter")
        place = app.screen.query_one(PlacePanel)
        step, name, node = engine.looked[-1]
        engine.news.append(Answer("where", "step 3  r1@2"))  # nothing that only comes meanwhile is a refusal
        engine.news.append(LookRefused(step - 1, name, node, "another step is gone"))
        await until(pilot, lambda: not engine.news)  # they were heard
        assert "asking" in text_of(place)
        engine.news.append(LookRefused(step, name, node, "r1 is gone: its step cannot be computed again"))
        await until(pilot, lambda: "is gone" in text_of(place))
        assert "r1 is gone" in text_of(place)
        assert "asking" not in text_of(place)


async def test_over_a_capture_the_screen_says_so_and_shows_what_the_record_has():
    async with running(replay(14)) as (app, pilot):
        await pilot.press("j", "d", "enter")
        assert isinstance(app.screen, StepScreen)
        place = app.screen.query_one(PlacePanel)
        said = " ".join(text_of(place).split())
        assert "distributions need a live engine" in said
        assert "rejected" in said or "accepted" in said
        assert not notes(app)


@pytest.mark.parametrize("size", [(60, 20), (80, 24)])
async def test_where_there_is_no_room_beside_the_node_it_stands_below(size):
    viewer, _ = live(12, "paused")
    async with running(viewer, size) as (app, pilot):
        await pilot.press("j", "d", "enter")
        panel = app.screen.query_one("#node")
        await until(pilot, lambda: NAMES[0] in text_of(panel))
        assert all(name in text_of(panel) for name in NAMES)
        top = "".join(text for text, _ in panel.sheet.lines[panel.scroll_offset.y])
        assert "KL(target" in top
