"""Lists filter and sort, Enter drills, a click goes to its row or node; and the analysis screen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from specscope.analyze.questions.answers import answer
from specscope.analyze.questions.evidence import COUNTS_ONLY
from specscope.debug.viewer import Viewer
from specscope.trace.wire.reading import read_capture
from specscope.trace.words import RequestRow, request_row
from specscope.tui.app import ScopeApp
from specscope.tui.screens import analysis_view
from specscope.tui.screens.analysis_view import AnalysisScreen
from specscope.tui.screens.points_view import PointsPanel, PointsScreen
from specscope.tui.screens.request_view import RequestScreen, TimelinePanel
from specscope.tui.screens.step_view import NodesPanel, StepScreen
from specscope.tui.widgets.grid import GridPanel, RowPanel
from specscope.tui.widgets.listing import DOWN, UP, ListPanel, Order
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel

from .sample import Maker, answered, live, over, pressed, replay, running, text_of, until


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
        await pressed(pilot, "down", "x")
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
        await pressed(pilot, "r")
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


async def opened(app: ScopeApp, pilot) -> GridPanel:
    """The screen with its answers."""
    await pilot.press("a")
    panel = app.screen.query_one(GridPanel)
    await until(pilot, lambda: panel.grid is not None)
    return panel


async def test_the_question_is_answered_and_enter_opens_the_clearest_example_and_esc_comes_back():
    async with running(over("eagle")) as (app, pilot):
        panel = await opened(app, pilot)
        assert len(panel.shown) == len(answer(app.viewer.history).rejections.tokens)
        await pilot.press("down")
        for key, which in (("enter", "clearest"), ("f", "first")):
            example = getattr(panel.example, which)
            assert str(example) in text_of(app.screen.query_one(RowPanel))
            await pilot.press(key)
            await until(pilot, lambda: isinstance(app.screen, StepScreen))
            await pilot.pause()
            look = app.screen.last
            assert (look.current, look.part[1].index, look.record.step) == (
                example.request,
                example.index,
                example.step,
            )
            assert app.screen.query_one(NodesPanel).node == example.node
            await pilot.press("escape")
            assert isinstance(app.screen, AnalysisScreen)
            assert panel.picked == 1
        await pilot.press("a")
        assert not isinstance(app.screen, AnalysisScreen)


async def test_the_scope_is_all_requests_or_the_current_one():
    async with running(over("eagle")) as (app, pilot):
        panel = await opened(app, pilot)
        every = panel.grid.summary
        await pilot.press("s")
        await until(pilot, lambda: panel.grid.summary != every)
        alone = answer(app.viewer.history, app.standing.current).rejections.rejected
        assert panel.grid.summary.startswith(f"{alone.count:,} of {alone.total:,} nodes")
        assert app.standing.current in panel.over
        await pilot.press("j")
        other = app.standing.current
        await until(pilot, lambda: other in panel.over)
        await pilot.press("s")
        await until(pilot, lambda: panel.grid.summary == every)


async def test_a_live_engine_is_answered_again_but_not_at_every_step(monkeypatch):
    asked, clock = [], [0.0]
    work_out = analysis_view._work_out

    def counted(history, request):
        asked.append(len(history.steps))
        return work_out(history, request)

    monkeypatch.setattr(analysis_view, "_work_out", counted)
    monkeypatch.setattr(analysis_view, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(analysis_view, "LEAST", 0.01)
    viewer, engine = live(8, "running")
    async with running(viewer, (60, 20)) as (app, pilot):
        panel = await opened(app, pilot)
        steps = len(viewer.history.steps)
        await until(pilot, lambda: len(viewer.history.steps) > steps + 1)
        assert len(asked) == 1
        clock[0] += 1
        await until(pilot, lambda: len(asked) == 2)
        assert asked[0] < asked[1]  # over more steps
        engine.ask("pause")
        steps = len(viewer.history.steps)
        clock[0] += 1
        await until(pilot, lambda: panel.over == f"all requests, {steps} steps")  # the last steps are not forgotten
        asked.clear()
        clock[0] += 1
        app.look()
        await pilot.pause()
        assert not asked


async def test_a_failure_is_a_line_and_no_crash(monkeypatch):
    def broken(*_):
        raise ValueError("odd\x1b[31m")

    monkeypatch.setattr(analysis_view, "_work_out", broken)
    async with running(replay(5)) as (app, pilot):
        await pilot.press("a")
        await until(pilot, lambda: "cannot answer" in text_of(app.screen.query_one(GridPanel)))
        assert "\x1b" not in text_of(app.screen.query_one(GridPanel))


async def test_nothing_and_counts_only():
    async with running(Viewer()) as (app, pilot):
        await pilot.press("a", "enter", "f", "down", "o", "s")
        assert "no steps yet" in text_of(app.screen.query_one(GridPanel))
    counts = Viewer(read_capture(Path(__file__).parents[1] / "data" / "vllm" / "watched.jsonl").history)
    counts.goto_end()
    async with running(counts) as (app, pilot):
        panel = await opened(app, pilot)
        await pilot.press("enter", "f", "down")
        assert COUNTS_ONLY.split(":")[0] in text_of(panel)
