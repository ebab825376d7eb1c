"""What the screen draws of a capture, without a terminal."""

from pathlib import Path

from specscope.debug.viewer import Viewer
from specscope.trace.wire.reading import read_capture
from specscope.tui.look import Look
from specscope.tui.screens.engine_view import EnginePanel
from specscope.tui.screens.request_view import TimelinePanel
from specscope.tui.screens.step_view import NodePanel, NodesPanel, PlacePanel
from specscope.tui.widgets.bars import Slider, StatusBar
from specscope.tui.widgets.intervals import IntervalsPanel
from specscope.tui.widgets.output import OutputPanel
from specscope.tui.widgets.rates import LengthsPanel, RatesPanel
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel
from tests.sweep import RAW


def look_at(path: Path) -> int:
    """Read it and draw all panels, at each step of each request, narrow and wide: the number of its steps."""
    history = read_capture(path).history
    session, nodes = Viewer(history=history), NodesPanel()
    panels = [TreePanel(), RequestsPanel(), RatesPanel(), LengthsPanel(), OutputPanel(), Slider(), EnginePanel()]
    place = PlacePanel(nodes)
    panels += [IntervalsPanel(), StatusBar("status"), TimelinePanel(), nodes, place, NodePanel(nodes, place)]
    for position in range(min(len(history.steps), 8)):
        session.goto(position)
        for current in [*list(history.requests)[:4], None]:
            look = Look(session, current, pooled=position % 2 == 0, title="capture")
            for width, height in ((100, 30), (24, 8)):
                for panel in panels:
                    panel.look = look
                    panel.OF(panel)
                    sheet = panel.draw(look, width, height)
                    for text in (text for line in [*sheet.lines, sheet.title] for text, _ in line):
                        assert RAW.search(text) is None, f"{type(panel).__name__}: {text!r}"
    return len(history.steps)
