"""Everything that looks at a capture, without a terminal: reader, report, debugger, and what the screen draws."""

import io
import re
from pathlib import Path

import orjson
from rich.console import Console

from specscope.analyze.report import build_report
from specscope.analyze.text import render_text
from specscope.cli.run import over_capture
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.page.write import PageRun
from specscope.page.write import page as page_of
from specscope.trace.history.history import History
from specscope.trace.wire.reading import CaptureReader
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

# What could move a cursor, colour what follows or turn a line: nothing of it may come from a capture.
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def look_at(path: Path, *, page: bool = False) -> int:
    """Read, report, debug and draw. Raises UserError for what is no capture; the number of its steps."""
    reader = CaptureReader(path)
    while reader.read(1):
        pass
    history = reader.history
    plain("warnings", *reader.warnings)
    report = build_report(history, source=str(path), warnings=reader.warnings)
    orjson.dumps(report.to_dict())
    out = io.StringIO()
    render_text(report, Console(file=out, width=120))
    plain("report", out.getvalue())
    if page:
        plain("page", b"".join(page_of([PageRun(str(path), history, reader.warnings)])).decode())
    if not history.counts_only:
        debug(path, history)
    draw(reader)
    return len(history.steps)


def plain(what: str, *texts: str) -> None:
    """Raises AssertionError where a text would not stay where it is printed."""
    for text in texts:
        found = RAW.search(text)
        assert found is None, f"{what}: {found.group()!r} in {text[max(found.start() - 40, 0) : found.end() + 40]!r}"


def debug(path: Path, history: History) -> None:
    """Every command that shows something, at each step."""
    commands = over_capture(str(path))
    lines = ["where", "tree", "requests", "info step", "info kv", "info request", "node 0", "node 1", "info branch"]
    lines += [f"request {name}" for name in list(history.requests)[:3] if name.split() == [name]]
    obey(commands, "break reject if p > 0.1")
    obey(commands, "continue")
    obey(commands, "goto 0")
    for _ in range(min(len(history.steps), 8)):
        for line in lines:
            obey(commands, line)
        obey(commands, "next")
    obey(commands, "reverse-continue")


def obey(commands, line: str) -> None:
    """What it says is plain; a line that it refuses is no matter."""
    try:
        plain(line, commands.run(line))
    except UserError as error:
        plain(line, str(error))


def draw(reader: CaptureReader) -> None:
    """All panels, at each step of each request, narrow and wide."""
    session = Viewer.over(reader)
    nodes = NodesPanel()
    panels = [TreePanel(), RequestsPanel(), RatesPanel(), LengthsPanel(), OutputPanel(), Slider(), EnginePanel()]
    place = PlacePanel(nodes)
    panels += [IntervalsPanel(), StatusBar("status")]
    panels += [TimelinePanel(), nodes, place, NodePanel(nodes, place)]
    for position in range(min(len(reader.history.steps), 8)):
        session.goto(position)
        for current in [*list(reader.history.requests)[:4], None]:
            look = Look(session, current, pooled=position % 2 == 0, title="capture")
            for width, height in ((100, 30), (24, 8)):
                for panel in panels:
                    panel.look = look
                    panel.OF(panel)
                    sheet = panel.draw(look, width, height)
                    for line in [*sheet.lines, sheet.title]:
                        plain(type(panel).__name__, *(text for text, _ in line))
