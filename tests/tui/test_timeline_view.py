"""The timeline of a trace: other services' spans beside ours, keys, and what it says is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from specscope.debug.viewer import Viewer
from specscope.trace.wire.engine_spans import engine_span
from specscope.trace.wire.reading import CaptureReader
from specscope.tui.app import ScopeApp
from specscope.tui.screens.dialogs import Ask
from specscope.tui.screens.step_view import StepScreen
from specscope.tui.screens.timeline_view import SpansScreen
from specscope.tui.widgets.lines import Lines
from specscope.tui.widgets.spans import axis

from .sample import replay
from .test_keys import running, text_of

DATA = Path(__file__).parents[1] / "data" / "vllm"
TITLE = "smollm2 · spans.jsonl"


def opened(name: str) -> Viewer:
    """A replay of spans of several services, read to its end."""
    reader = CaptureReader(DATA / name, others_alone=True)
    while reader.read():
        pass
    viewer = Viewer.over(reader)
    viewer.goto(0)
    return viewer


def rows(app: ScopeApp) -> str:
    return text_of(app.screen.query_one("#spans"))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_vllm_beside_ours(snap_compare, size):
    assert snap_compare(ScopeApp(opened("spans.jsonl"), title=TITLE), terminal_size=size, press=["w"])


def test_attributes(snap_compare):
    app = ScopeApp(opened("spans.jsonl"), title=TITLE)
    assert snap_compare(app, terminal_size=(120, 40), press=["w", "enter"])


def test_sglang_alone(snap_compare):
    app = ScopeApp(opened("sglang_spans.jsonl"), title="sglang_spans.jsonl")
    assert snap_compare(app, terminal_size=(80, 24), press=["w", "down", "down"])


async def test_no_other_service():
    async with running(replay(14), (80, 24)) as (app, pilot):
        await pilot.press("j", "w")
        await pilot.pause()
        assert rows(app).startswith("No spans of other services in this trace.")


async def test_enter_goes_to_a_step_and_opens_the_attributes_of_any_other_row():
    async with running(opened("spans.jsonl")) as (app, pilot):
        await pilot.press("w", "enter")
        await pilot.pause()
        shown = text_of(app.screen.query_one("#span"))
        assert "gen_ai.usage.completion_tokens" in shown
        assert "4bf92f3577b34da6a3ce929d0e0e4736" in shown
        await pilot.press("enter")
        await pilot.pause()
        assert not app.screen.query_one("#span").display
        await pilot.press(*["down"] * 8, "enter")
        await pilot.pause()
        assert isinstance(app.screen, StepScreen)
        assert app.viewer.history.part(app.standing.current, app.viewer.position)[1].index == 3
        await pilot.press("escape")
        assert isinstance(app.screen, SpansScreen)
        assert "▸   @3" in rows(app)
        await pilot.press("w")
        assert not isinstance(app.screen, SpansScreen)


async def test_filter_and_sort():
    async with running(opened("spans.jsonl")) as (app, pilot):
        await pilot.press("w", "slash")
        assert isinstance(app.screen, Ask)
        await pilot.press(*"unknown_service", "enter")
        await pilot.pause()
        assert "llm_request" in rows(app)
        assert "specscope" not in rows(app)
        await pilot.press("slash", "ctrl+u", "enter", *"oooo")
        await pilot.pause()
        took = [row.took_ns for row in app.screen.query_one("#spans").shown]
        assert len(took) == 17
        assert took == sorted(took)
        assert "took ▲" not in rows(app)
        assert "▲took ms" in rows(app)


async def test_the_next_request_and_the_traces_without_one():
    async with running(opened("spans.jsonl")) as (app, pilot):
        await pilot.press("w", "j")
        await pilot.pause()
        assert "The client sent no traceparent" in rows(app)
        await pilot.press("right")
        await pilot.pause()
        assert "EngineCoreProc init" in rows(app)
        assert "No specscope records belong to this trace" in rows(app)
        await pilot.press("k")
        await pilot.pause()
        assert "request chatcmpl-b70" in rows(app)
        assert "traceparent" not in rows(app)


async def test_a_span_that_comes_while_the_screen_is_open_is_shown():
    """And the picked row stays picked."""
    viewer = opened("spans.jsonl")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with running(viewer) as (app, pilot):
        await pilot.press("w", "down")
        picked = app.screen.query_one("#spans").item
        start = viewer.history.others.of(trace)[0].start_ns
        ids = (trace, "00f067aa0ba902b7", "")
        client = engine_span(ids, "POST /chat", {"service.name": "shop"}, "", (start - 9_000_000, start + 10**10), {})
        viewer.history.others.add(client)
        app.look()
        await pilot.pause()
        assert app.screen.query_one("#spans").item.id == picked.id
        assert [line[2:22].rstrip() for line in rows(app).splitlines()[1:4]] == [
            "POST /chat",
            " llm_request",
            " request chatcmpl-b7",
        ]


@pytest.mark.parametrize("keys", ["w", "w enter", "w right left", "w down up o O slash escape j k n"])
async def test_nothing_to_show_is_no_crash(keys):
    async with running(Viewer()) as (app, pilot):
        await pilot.press(*keys.split())
        await pilot.pause()
        assert "No request and no spans yet." in rows(app)
        assert all("cannot draw" not in text_of(panel) for panel in app.screen.query(Lines))


async def test_names_from_outside_stay_where_they_are_printed():
    viewer = Viewer()
    bad = "\x1b[2J\u202eevil\n[b]"
    made = engine_span(("1" * 32, "2" * 16, ""), bad, {"service.name": bad}, bad, (1, 2), {bad: bad})
    viewer.history.others.add(made)
    async with running(viewer) as (app, pilot):
        await pilot.press("w", "enter")
        await pilot.pause()
        for panel in app.screen.query(Lines):
            assert text_of(panel).replace("\n", "").isprintable()
        assert "[b]" in rows(app)


@pytest.mark.parametrize("width", [4, 17, 40, 150])
@pytest.mark.parametrize("span_ns", [1, 1_000, 93_100_000, 10**12, 2**62])
def test_the_axis_has_round_numbers_where_they_belong(width, span_ns):
    line = axis(span_ns, width)
    assert len(line) == width
    assert line.startswith("0")
    for word in line.replace(" ms", "").split():
        value = float(word.replace(",", ""))
        assert abs(line.index(word) - value * 1e6 / span_ns * width) < 1.001 or value == 0
