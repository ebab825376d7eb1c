"""The analysis screen: answers, sorting, filters, scope, and the way to an example and back."""

from pathlib import Path
from types import SimpleNamespace

from specscope.analyze.questions.answers import answer
from specscope.analyze.questions.evidence import COUNTS_ONLY
from specscope.debug.viewer import Viewer
from specscope.trace.wire.reading import read_capture
from specscope.tui.app import ScopeApp
from specscope.tui.screens import analysis_view
from specscope.tui.screens.analysis_view import AnalysisScreen
from specscope.tui.screens.step_view import NodesPanel, StepScreen
from specscope.tui.widgets.grid import GridPanel, RowPanel

from .sample import live, over, replay, running, text_of, until


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
