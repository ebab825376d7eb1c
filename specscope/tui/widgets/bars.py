"""The rows above and below the panels: state of the run, what went wrong, and the time slider.

The slider is the screen's position in the run. Live, its right end follows the newest step.
"""

from __future__ import annotations

from operator import attrgetter

from textual import events

from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.text import NOTHING, Ink, Line, bar, clean, cut, fit, line_width, percent
from specscope.tui.widgets.lines import Goto, Panel, Sheet

STATES: dict[str, tuple[str, Ink]] = {
    "running": ("● running", "accepted-strong"),
    "paused": ("‖ paused", "recovered"),
    "idle": ("○ idle", "accent"),
    "loading": ("◌ loading", "accent"),
    "attached": ("● attached", "accepted-strong"),
    "ended": ("■ ended", "dim"),
    "reading": ("◌ reading", "accent"),
    "replay": ("◂▸ replay", "bonus"),
    "playing": ("▸ playing", "accepted-strong"),
}
READING_BAR = 12  # cells


class StatusBar(Panel, can_focus=False):
    """Tokens a second, batch, KV use, lost records, and why speculation is off where it is."""

    OF = attrgetter(
        *("look.position", "look.steps", "look.status", "look.error", "look.title", "look.viewer.read_so_far"),
        *("look.history.lost", "look.history.in_part", "look.history.branch", "look.history.name"),
    )

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """One line; the least useful goes first where it is narrow."""
        text, ink = STATES.get(look.status, (look.status, "dim"))
        if look.error:
            text, ink = "■ failed", "rejected"
        parts: list[tuple[int, Line]] = [(0, [(text, ink)])]
        if (read := look.viewer.read_so_far) is not None:
            parts.append((1, _reading(*read)))
        record = look.record
        if record is not None:
            speed_known = look.aggregate is None or look.history.acceptance.knows("emitted")
            speed = look.history.speed_at(look.position) if speed_known else None
            what = "step " if look.aggregate is None else "interval "
            parts.append((2, [(what, "dim"), (f"{record.step:,}", "strong")]))
            parts.append((3, [(f"{speed:.0f}" if speed is not None else "–", "strong"), (" tok/s", "dim")]))
            known = record.is_timed if look.aggregate is None else look.aggregate.running is not None
            batch: list[tuple[str, Ink]] = [("batch ", "dim"), (str(record.running) if known else NOTHING, "strong")]
            if record.waiting:
                batch.append((f" + {record.waiting} waiting", "warn"))
            if others := record.batch - len(record.requests):
                batch.append((f" ({others} left out)", "warn"))
            parts.append((4, batch))
            if look.aggregate is not None:
                parts.append((5, [("KV ", "dim"), (percent(look.aggregate.kv_usage), "strong")]))
            elif record.is_timed and record.blocks_used + record.blocks_free:  # engines without blocks tell none
                parts.append((5, _kv(record.blocks_used, record.blocks_used + record.blocks_free, width)))
            if not record.speculation:
                parts.append((1, [(cut(f"speculation off: {clean(record.speculation_off)}", 40), "warn")]))
        if look.history.name:
            parts.append((1, [(clean(look.history.name), "text")]))
        if len(look.history.branches) > 1:
            parts.append((2, [("branch ", "dim"), (f"{look.history.branch}/{max(look.history.branches)}", "warn")]))
        lost = look.history.lost
        if look.history.in_part:  # of a file: what it lacks was said when it was read
            parts.append((1, [("a part of its run", "warn")]))
        else:
            parts.append((1 if lost else 6, [(f"lost {lost:,}", "rejected" if lost else "dim")]))
        line = fit([(rank, part) for rank, part in parts], width - 2, "   ")
        return Sheet([[(" ", "text"), *line, *_right(look.title, width - 2 - line_width(line))]])


def _reading(share: float, seconds: int | None) -> Line:
    """A bar, the share as a percentage, and the time that is left where it is known."""
    done = round(min(max(share, 0.0), 1.0) * READING_BAR)
    left = "" if seconds is None else f"{max(seconds, 1)} s" if seconds < 100 else f"{round(seconds / 60)} min"
    bar: Line = [("━" * done, "accent"), ("─" * (READING_BAR - done), "rail"), (f" {share:.0%}", "dim")]
    return [*bar, (f"  {left} left" if left else "", "text")]


def _kv(used: int, total: int, width: int) -> Line:
    share = used / total if total else 0.0
    ink: Ink = "rejected" if share > 0.95 else "warn" if share > 0.8 else "strong"
    line: list[tuple[str, Ink]] = [("KV ", "dim")]
    if width >= 100:
        line += [(bar(share, 8), "bar"), ("·" * (8 - len(bar(share, 8))), "rail"), (" ", "dim")]
    line.append((percent(share), ink))
    if width >= 100:
        line.append((f" {used:,}/{total:,} blocks", "dim"))
    return line


def _right(title: str, room: int) -> Line:
    """The title at the right end, where there is room for a good part of it."""
    text = cut(clean(title), room - 3)
    if room < 15 or not text:
        return []
    return [(" " * (room - line_width([(text, "dim")])), "text"), (text, "dim")]


class Banner(Panel, can_focus=False):
    """One clear line when the engine failed."""

    OF = attrgetter("look.error", "look.steps")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The error, and that what was recorded is still there."""
        tail = "the recorded steps are below" if look.steps else ""
        text = clean(f"the engine ended: {look.error}")
        line = fit([(0, [(text, "rejected")]), (1, [(tail, "dim")])], width - 2)
        return Sheet([[(" ", "text"), *line]])


class Slider(Panel):
    """Click a place in the run; left and right step while it has the focus."""

    OF = attrgetter("look.position", "look.steps", "look.viewer.follow", "look.viewer.live", "has_focus")

    BINDINGS = hidden(left="app.backward", right="app.forward")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._track = (1, 1)  # first cell and cells of the track

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """Track, knob, and in words where it is."""
        words = _words(look)
        room = max(1, width - 4 - line_width(words))
        self._track = (1, room)
        cell = round(look.position / (look.steps - 1) * (room - 1)) if look.steps > 1 else room - 1
        cell = min(max(cell, 0), room - 1)
        knob: Ink = "accent" if self.has_focus or not look.viewer.follow else "text"
        track: Line = [("━" * cell, "bar"), ("●", knob), ("─" * (room - 1 - cell), "rail")]
        track = track if look.steps else [("─" * room, "rail")]
        return Sheet([[(" ", "text"), *track, ("  ", "text"), *words]])

    def on_focus(self) -> None:
        if self.look is not None:
            self.show(self.look)

    on_blur = on_focus

    def on_click(self, event: events.Click) -> None:
        begin, room = self._track
        if self.look is not None and self.look.steps:
            share = min(max((event.x - begin) / max(1, room - 1), 0), 1)
            self.post_message(Goto(round(share * (self.look.steps - 1)), follow=True))


def _words(look: Look) -> list[tuple[str, Ink]]:
    if not look.steps:
        return [("no steps", "faint")]
    last = f"{look.history.steps[-1].step:,}"
    record = look.record
    line: list[tuple[str, Ink]] = [
        (f"{record.step if record is not None else 0:,}".rjust(len(last)), "strong"),
        (f" / {last}", "dim"),
        (f"  {look.history.elapsed_at(look.position):.1f} s", "dim"),
    ]
    if look.viewer.live:
        line.append(("  following", "accepted") if look.viewer.follow else ("  looking back", "warn"))
    return line
