"""The screen as people see it, at the sizes it is laid out for."""

import pytest
from textual.pilot import Pilot

from specscope.debug.viewer import Viewer
from specscope.tui.app import ScopeApp

from .sample import forked, live, maker, replay, running

USUAL = (120, 40)
TITLE = "SmolLM2-135M-Instruct · run.otlp.jsonl"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=["80x24", "120x40"])
def test_replay(snap_compare, size):
    assert snap_compare(ScopeApp(replay(14), title=TITLE), terminal_size=size, press=["j"])


def test_console(snap_compare):
    async def typed(pilot: Pilot[None]) -> None:
        await pilot.press("colon")
        for line in (
            "break reject if depth == 1",
            "goto 3",
            "continue",
            "info breakpoints",
            "break reject if dept < 1",
        ):
            pilot.app.screen.query_one("#line").value = line
            await pilot.press("enter")
        await pilot.pause()

    assert snap_compare(ScopeApp(replay(14), title=TITLE), terminal_size=USUAL, run_before=typed)


def test_step(snap_compare):
    assert snap_compare(ScopeApp(replay(14), title=TITLE), terminal_size=USUAL, press=["j", "d", "down", "down"])


def test_fork(snap_compare):
    viewer, engine = live(40, "paused")
    engine.forked = forked()
    assert snap_compare(ScopeApp(viewer, title=TITLE), terminal_size=USUAL, press=["f"])


def test_engine(snap_compare):
    assert snap_compare(ScopeApp(replay(40), title=TITLE), terminal_size=USUAL, press=["v"])


def test_light(snap_compare):
    app = ScopeApp(replay(21), title=TITLE)
    assert snap_compare(app, terminal_size=(120, 40), press=["t", "j", "tab", "s"])


def test_the_log_of_an_engine_that_was_started_for_the_screen(snap_compare):
    viewer, engine = live(0, "ended")
    engine.progress = "watching vLLM 0.32.0 (process 7, V1 runner, eagle3, evidence full); lacking nothing"
    engine.log = tuple(f"INFO 11-26 21:06:{second} [model.py:733] Loaded block {second} of 59" for second in range(60))
    engine.log += ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",)
    engine.error = "exit code 1: safetensors.SafetensorError: Error while deserializing header: header too small"
    assert snap_compare(ScopeApp(viewer, title="vLLM · its output: /tmp/vllm.log"), terminal_size=(80, 24))


async def test_live_and_replay_show_the_same():
    """The panels' text is the same for the same records and position, whoever made them."""
    made = maker()
    viewer, _ = live(20)
    for _ in range(20):
        made.history.append(made.step())
    recorded = Viewer(made.history)
    recorded.goto_end()
    shown = []
    for each in (viewer, recorded):
        async with running(each) as (app, _):
            panels = [panel for panel in app._panels if panel.id in ("requests", "tree", "rates", "lengths", "output")]
            shown.append([panel.sheet for panel in panels])
    assert shown[0] == shown[1]
    assert len(shown[0]) == 5
