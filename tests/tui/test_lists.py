"""Lists filter and sort, Enter drills, and a click goes to its row or node."""

import pytest

from specscope.debug.viewer import Viewer
from specscope.trace.words import RequestRow, request_row
from specscope.tui.screens.points_view import PointsPanel, PointsScreen
from specscope.tui.screens.request_view import RequestScreen, TimelinePanel
from specscope.tui.screens.step_view import NodesPanel, StepScreen
from specscope.tui.widgets.listing import DOWN, UP, ListPanel, Order
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel

from .sample import Maker, answered, replay, running, until


async def test_requests_are_filtered_and_all_shown_again():
    async with running(replay(20)) as (app, pilot):
        panel = app.query_one(RequestsPanel)
        await answered(pilot, "slash", "summar")
        assert panel.names == ["r3"]
        assert "1 of 4" in "".join(text for text, _ in panel.sheet.title)
        await pilot.press("down")
        assert app.standing.current == "r3"
        await answered(pilot, "slash", "")
        assert panel.names == ["r0", "r1", "r2", "r3"]
        await pilot.press("slash", *"zzz", "escape")
        assert panel.names == ["r0", "r1", "r2", "r3"]


async def test_requests_are_sorted_by_key():
    async with running(replay(20)) as (app, pilot):
        panel = app.query_one(RequestsPanel)

        def row(name: str) -> RequestRow:
            return request_row(app.viewer.history.requests[name], 20, app.viewer.history.vocabulary)

        columns = {"tokens": lambda name: row(name).tokens, "kind": lambda name: row(name).kind}
        for column, value in columns.items():
            while panel.order.column != column:
                await pilot.press("o")
            assert panel.names == sorted(panel.names, key=value)
            await pilot.press("O")
            assert [value(name) for name in panel.names] == sorted(map(value, panel.names), reverse=True)
        while panel.order.column != "tau":
            await pilot.press("o")
        taus = [app.viewer.history.requests[name].acceptance_at(20).tau for name in panel.names]
        known = [tau for tau in taus if tau is not None]
        assert known == sorted(known)
        assert taus[-1] is None  # r2 drafts nothing: it stands last
        below = panel.names[panel.names.index(app.standing.current) + 1 :][:1]
        await pilot.press("down")
        assert [app.standing.current] == (below or [panel.names[-1]])


async def test_breakpoints_are_added_filtered_sorted_and_taken_away():
    viewer = replay(4)
    viewer.debug("break reject")
    async with running(viewer) as (app, pilot):
        await pilot.press("b")
        await answered(pilot, "a", "bonus")
        await pilot.press("a", *"watch", "escape")
        assert isinstance(app.screen, PointsScreen)
        assert [point.text for point in app.viewer.points] == ["break reject", "break bonus"]
        viewer.debug("watch tau < 2")
        await pilot.press("O")
        panel = app.screen.query_one(PointsPanel)
        assert [point.number for point in panel.shown] == [3, 2, 1]
        await answered(pilot, "slash", "break")
        assert [point.number for point in panel.shown] == [2, 1]
        await pilot.press("down", "x")
        await pilot.pause()
        assert [point.number for point in app.viewer.points] == [2, 3]
        await pilot.press("up", "enter")
        await until(pilot, lambda: not isinstance(app.screen, PointsScreen))
        assert app.viewer.position > 4  # it went on to the next stop


async def test_enter_and_a_click_drill_from_the_request_to_its_steps_and_to_a_node():
    async with running(replay(14)) as (app, pilot):
        await pilot.press("j", "enter")
        assert isinstance(app.screen, RequestScreen)
        await pilot.press("enter")
        assert isinstance(app.screen, StepScreen)
        await pilot.press("escape", "escape", "tab", "enter")
        assert isinstance(app.screen, StepScreen)
        await pilot.press("escape")
        panel = app.query_one(TreePanel)
        await pilot.click(TreePanel, offset=(10, panel.gutter.top + panel.sheet.head + 3))
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.screen, StepScreen)
        nodes = app.screen.query_one(NodesPanel)
        assert nodes.picked == 3
        assert app.screen.last.current == "r1"


def many(count: int = 20) -> Viewer:
    """A replay of so many requests, opened at its end."""
    made = Maker()
    for number in range(count):
        text = " ".join(["some words that are drafted and judged"] * (1 + number % 5))
        made.add(f"r{number}", "chat", "a prompt", text, "3")
    history = made.run(batch=3)
    return Viewer(history, position=len(history.steps) - 1)


def first_shown(panel):
    """The text of the first line below the head that is in view."""
    return "".join(text for text, _ in panel.sheet.lines[panel.sheet.head + panel.scroll_offset.y])


async def test_a_sorted_list_shows_its_top():
    async with running(many(), (80, 24)) as (app, pilot):
        panel = app.query_one(RequestsPanel)
        await pilot.pause()
        assert panel.scroll_offset.y > 0  # the current request stands at the end
        while panel.order.column != "tau":
            await pilot.press("o")
        assert panel.names[0] in first_shown(panel)
        await pilot.press("O")
        assert panel.names[0] in first_shown(panel)
        for _ in range(8):  # the picked one comes into view as soon as another is picked
            await pilot.press("k")
        at = panel.names.index(app.standing.current) - panel.scroll_offset.y
        assert 0 <= at < panel.area.height - panel.sheet.head
        app.standing.pick(panel.names[0])
        await pilot.press("r")
        await pilot.pause()
        steps = app.screen.query_one(TimelinePanel)
        await pilot.press("o", "o", "O")
        assert steps.scroll_offset.y == 0


HEADS = [
    [("", ""), ("name", "request"), ("tokens", "tokens"), ("steps", "steps"), ("tau", "    τ")],
    [("step", " step"), ("depth", "depth         "), ("nodes", "nodes ")],
    [("n", "   n"), ("hits", "  hits"), ("stops at", "stops at  ")],
    [("token", "token"), ("share", "share")],
]


@pytest.mark.parametrize("cells", HEADS, ids=lambda cells: cells[-1][0])
def test_the_arrow_moves_no_column(cells):
    panel, begin = ListPanel(), 0
    plain = "".join(text for text, _ in panel.head(cells))
    for column, name in cells:
        for reverse in (False, True):
            panel.order = Order(column, reverse)
            text = "".join(part for part, _ in panel.head(cells))
            assert len(text) == len(plain)
            assert text.count(DOWN if reverse else UP) == (1 if column else 0)
            assert name.strip() in text[max(begin - 1, 0) : begin + len(name) + 1]
        begin += len(name) + 2
