"""The viewer: a history with a position, and the debugger over it."""

from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History
from tests.trace.samples import records


def viewer():
    history = History()
    for record in records():
        history.append(record)
    shown = Viewer(history=history)
    shown.goto_end()
    return shown


def test_goto_start_searches_the_first_step_too():
    """A screen has no place before the first step, and the debugger has."""
    shown = viewer()
    shown.debug("break step if step == 0")
    shown.debug("continue")
    assert "goto start goes before the first" in shown.news[-1].text
    shown.debug("goto start")
    assert (shown.news[-1].text, shown.position) == ("before the first step", 0)
    shown.debug("continue")
    assert shown.news[-1].text.startswith("breakpoint 1 (break step if step == 0) at step 0")


def test_moving_the_screen_moves_the_debugger_from_the_start():
    shown = viewer()
    shown.debug("goto start")
    shown.goto(1)
    shown.debug("where")
    assert shown.news[-1].text.startswith("step 1")
