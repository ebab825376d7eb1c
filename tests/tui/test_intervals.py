"""The figures on the screen, and the screen over an engine that tells counts only."""

import re
from dataclasses import replace

import pytest

from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import StepRecord
from specscope.tui.look import Look
from specscope.tui.screens.engine_view import EnginePanel
from specscope.tui.widgets.bars import StatusBar
from specscope.tui.widgets.intervals import IntervalsPanel
from specscope.tui.widgets.lines import Lines, Panel
from specscope.tui.widgets.rates import LengthsPanel, RatesPanel
from specscope.tui.widgets.tree import TreePanel
from tests.analyze import histories as made
from tests.trace.record.test_aggregate import GAUGES, interval
from tests.trace.strategies import RUN

from .sample import pressed, running, text_of, told


def over(*records: StepRecord) -> Viewer:
    history = History(run=RUN)
    for record in records:
        history.append(record)
    return Viewer(history=history)


def vllm(steps: int = 40) -> Viewer:
    """Of the second half fewer are accepted."""
    records = []
    for step in range(steps):
        good = 60 if step < 20 else 30
        at = (good, good // 2, good // 4)
        counts = {"drafts": 100, "drafted": 300, "accepted": sum(at), "emitted": 100 + sum(at)}
        more = {"accepted_at": at, "proposed_at": (100,) * 3, "running": step % 5, "waiting": 0, "kv_usage": 0.5}
        records.append(interval(step, Aggregate("vLLM /metrics", "0", **counts, **more)))
    return over(*records)


SIZES = [(60, 20), (120, 40)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_every_size_shows_rates_by_position_and_what_is_missing(size):
    async with running(vllm(), size, title="w") as (app, pilot):
        await pressed(pilot, "end")
        panel = app.screen.query_one(IntervalsPanel)
        assert panel.display
        assert not app.screen.query_one(TreePanel).display
        shown = text_of(panel)
        assert "0.300" in shown
        assert "0.150" in shown
        assert "vLLM /metrics does not report trees" in shown
        assert "engine 0" in str(panel.border_title)
        head, *lines = shown.splitlines()
        rows = [line for line in lines if re.match(r"\d\d:\d\d:\d\d", line)]
        assert len(rows) >= 5
        assert all(len(line) <= panel.area.width for line in lines)
        column = head.index("length") + len("length")
        assert all(line[:column].endswith("1.52") for line in rows if "0.070" in line)  # 1 + (30 + 15 + 7) / 100
        assert "τ" in text_of(app.screen.query_one(RatesPanel))
        for one in app.screen.query(Lines):
            assert "cannot draw" not in text_of(one)


async def test_figures_of_all_intervals_or_of_one_and_a_click_and_the_keys_move():
    async with running(vllm()) as (app, pilot):
        await pressed(pilot, "end")
        panel = app.screen.query_one(IntervalsPanel)
        rows = [at for at, line in enumerate(text_of(panel).splitlines()) if re.match(r"\d\d:\d\d", line)]
        assert panel.sheet.cursor == rows[-1]
        rates = app.screen.query_one(RatesPanel)
        assert "1.79" in text_of(rates)  # 20 intervals of 2.05 and 20 of 1.52
        assert "4,000 drafts" in text_of(rates)
        await pilot.press("s")
        assert "1.52" in text_of(rates)
        assert "100 drafts" in text_of(rates)
        await pilot.click(IntervalsPanel, offset=(10, 1 + rows[-3]))
        await pilot.pause()
        assert app.viewer.position == 37
        await pilot.press("comma", "comma")
        assert app.viewer.position == 35
        assert "interval 35" in text_of(app.screen.query_one(StatusBar))
        await pilot.press("v")
        shown = text_of(app.screen.query_one(EnginePanel))
        assert "phases and KV blocks are not reported" in shown
        assert re.search(r"length +1\.52", shown)
        assert re.search(r"KV usage +50%", shown)
        await pilot.press("escape", "home")
        assert "2.05" in text_of(rates)


def drawn(panel: Panel, viewer: Viewer, width: int = 60) -> tuple[str, str]:
    """The title and the text of a panel at the end of a run."""
    viewer.goto_end()
    sheet = panel.draw(Look(viewer), width, 20)
    return told([sheet.title]), told(sheet.lines)


def test_a_rate_by_depth_carries_its_n_and_a_depth_that_nothing_proposed_is_blank():
    few = Aggregate("x", drafts=80, drafted=82, accepted=14, accepted_at=(13, 1, 0), proposed_at=(80, 2, 0))
    lines = drawn(RatesPanel(), over(interval(0, few)))[1].splitlines()
    rates = [["0.163", "of", "80", "–"], ["0.500", "of", "2", "–"], ["3", "–", "–"]]
    assert [line.split()[-4:] for line in lines[-3:]] == rates
    assert "corrected" in lines[-4]


def test_what_an_interval_does_not_report_is_a_dash_and_no_kinds_of_final_tokens_are_counted():
    told = Aggregate("x", drafts=80, drafted=82, accepted=14, running=3, accepted_at=(13,), proposed_at=(80,))
    viewer = over(interval(0, told), interval(1, replace(told, running=None)))
    assert re.search(r"running +–", drawn(EnginePanel(), viewer, 80)[1])
    assert "final token" not in drawn(RatesPanel(), viewer)[1]


async def test_no_key_is_a_crash_and_the_other_screens_say_what_is_missing():
    keys = "v escape d escape r escape b escape B escape n N j k y f e i escape x space s z z F escape slash escape o O"
    async with running(vllm(5)) as (app, pilot):
        for key in [*keys.split(), "question_mark", "escape", "g"]:
            await pressed(pilot, key)
            for panel in app.screen.query(Lines):
                assert "cannot draw" not in text_of(panel), key
        await pilot.press("escape", "d")
        assert any("vLLM /metrics reports only sums" in text_of(panel) for panel in app.screen.query(Lines))


def test_gauges_are_shown_as_averages():
    viewer = over(*(interval(step, GAUGES) for step in range(6)))
    (title, rates), (_, lengths) = (drawn(kind(), viewer) for kind in (RatesPanel, LengthsPanel))
    shown = drawn(IntervalsPanel(), viewer, 118)[1]
    assert re.search(r"sglang:spec_accept_length +2\.31", rates)
    assert "Averages" in title
    assert "one column: 1 interval" in lengths
    assert "█" in lengths
    assert "the number of drafts" in shown
    assert "drafts" not in shown.splitlines()[0]  # a column of dashes alone is left out


async def test_names_from_outside_stay_where_they_are_printed():
    bad = "\x1b[2J\u202eevil\n"
    one = Aggregate(bad, bad, bad, drafts=1, drafted=1, accepted=1, accepted_at=(1,), averages={bad: 1.0})
    async with running(over(interval(0, one))) as (app, pilot):
        await pilot.press("end")
        for panel in app.screen.query(Lines):
            assert text_of(panel).replace("\n", "").isprintable()
        await pilot.press("d")
        for panel in app.screen.query(Lines):
            assert text_of(panel).replace("\n", "").isprintable()


def adaptive() -> Viewer:
    """Eight steps: two drafts, five that did not pay, one that was off."""
    run = replace(made.RUN, drafter="suffix+eagle", costs="66d9d06db774")
    parts = [made.step(tree="2", path=(0, 1)), made.step(tree="2")]
    parts += [replace(made.step(), sizing="no draft pays")] * 5
    records = [made.record(at, [replace(part, index=at)]) for at, part in enumerate(parts)]
    records[0] = replace(records[0], admitted=(made.info("a"),))
    last = made.record(7, [replace(made.step(), index=7)], speculation=False, speculation_off="set to off")
    return Viewer(history=made.history([*records, last], run))


@pytest.mark.parametrize("size", [(120, 40), (200, 60)], ids=["120x40", "200x60"])
async def test_a_stranger_sees_that_most_steps_drafted_nothing_and_why(size):
    async with running(adaptive(), size, title="x") as (app, pilot):
        await pressed(pilot, "end")
        shown = text_of(app.screen.query_one(RatesPanel))
        assert "τ 2.00 of 2 drafts  1.25 tok/step" in shown
        assert "no draft in 6 of 8 steps  adaptive" in shown
        assert "83% no draft would pay" in shown
        assert "17% drafting was off" in shown
        if size[1] == 60:
            assert "recovered 12%  bonus 12%  target 75%" in shown
        await pressed(pilot, "v")
        engine = text_of(app.screen.query_one(EnginePanel))
        assert "no draft in 6 of 8 steps  adaptive" in engine
        assert "83% no draft would pay" in engine
