"""ScopeApp: the one screen, live and over a capture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual.app import ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Container
from textual.screen import Screen
from textual.timer import Timer

from specscope.analyze.why import Typical
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.lifetime import Lifetime
from specscope.tui.keys import ASKING, KEYS, bindings
from specscope.tui.look import Look
from specscope.tui.screens.dialogs import Dialogs, Lists
from specscope.tui.screens.moves import Moves
from specscope.tui.screens.over import MAIN, Hints, Over
from specscope.tui.screens.overlays import Overlays
from specscope.tui.screens.request_view import TimelinePanel
from specscope.tui.settings import Settings, read_settings
from specscope.tui.shell import Shell, run_to_the_end
from specscope.tui.standing import Standing
from specscope.tui.widgets.bars import Banner, StatusBar
from specscope.tui.widgets.intervals import IntervalsPanel
from specscope.tui.widgets.lengths import LengthsPanel
from specscope.tui.widgets.lines import Panel
from specscope.tui.widgets.output import OutputPanel
from specscope.tui.widgets.rates import RatesPanel
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.slider import Slider
from specscope.tui.widgets.tree import TreePanel

READING = 0.01  # seconds between two pieces of a capture that is being read
PLAY_SHORTEST, PLAY_LONGEST = 0.05, 1.0  # seconds a step is shown in a replay that plays


COUNTED = 4000  # most engine steps of a run that are counted while the user waits


class ScopeApp(Shell):
    """Shows `viewer.history` at `viewer.position`; keys move the viewer, a timer lets it take in what is new."""

    TITLE = "specscope"
    BINDINGS: ClassVar[list[BindingType]] = list(bindings())

    def __init__(
        self,
        viewer: Viewer,
        *,
        title: str = "",
        settings: Settings | None = None,
        reference: str = "",
        start: str = "",
    ) -> None:
        super().__init__(settings)
        self.viewer = viewer
        viewer.typical = Typical(lambda: viewer.history, COUNTED)
        self.scope_title = title
        self._start = start  # REQUEST@STEP[/NODE] to begin at, as soon as it has been read
        self.standing = Standing(viewer, self.look, self.say, reference)
        self.overlays = Overlays(self, self.standing, self._look)
        dialogs = Dialogs(self, self.standing, self.overlays.hear)
        self.moves = Moves(self.standing, self._names)
        self.take_actions(Lists(self, self.say), dialogs, self.moves, self.overlays)
        self.lost = ""
        self._due = 0.0  # when a playing replay moves on
        self._timer: Timer | None = None
        self._panels: tuple[Panel, ...] = ()
        self._stamp: object = None

    # -- the screen ---------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """All panels, whatever the size: the style sheet arranges and hides them."""
        yield StatusBar("status")
        yield Banner("banner")
        with Container(id="body"):
            yield RequestsPanel("requests")
            yield IntervalsPanel("intervals")
            yield TimelinePanel("timeline")
            yield TreePanel("tree")
            yield RatesPanel("rates")
            yield LengthsPanel("lengths")
            yield OutputPanel("output")
        yield Slider("slider")
        yield Hints(MAIN, "hints")

    def on_mount(self) -> None:
        """Show what there is, then begin to look for more."""
        self._panels = tuple(self.screen.query(Panel))
        self.screen.query_one(RequestsPanel).focus()
        self.theme_changed_signal.subscribe(self, lambda _: self.look())
        self._poll()
        self.look()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self.ready()
        self._begin_at()
        self._wait()

    def own_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every key, except those for an engine that takes commands where there is none."""
        for key in KEYS:
            if key.name not in ASKING or self._look().asks:
                text = f"{key.help} ({key.label})"
                yield SystemCommand(key.command, text, self.runner(key.action))

    # -- time ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Look again after a frame; over a capture that stands still there is nothing to look for."""
        if self._timer is not None:
            return
        if self.viewer.reading and not self.lost:
            self._timer = self.set_timer(READING, self._tick)
        elif self.viewer.control is not None or self.standing.playing:
            self._timer = self.set_timer(1 / self.settings.fps, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._poll()
        self._play()
        self._begin_at()
        if self._moved():
            self.look()
        self._wait()

    def _begin_at(self) -> None:
        """Go to the step that the command line asked for, once it is there."""
        if not self._start:
            return
        try:
            request, place = self.viewer.history.find(self._start)
            position = self.viewer.position if place.index is None else request.at(place.index)
        except UserError as error:
            if self.viewer.reading:
                return
            self.say(str(error))
        else:
            self.standing.current, self.standing.picked = request.id, True
            self.standing.goto(position)
            if place.node is not None:
                self.run_worker(self.overlays.action_step_at(position, place.node))
        self._start = ""

    def _poll(self) -> None:
        if self.lost:
            return
        try:
            self.viewer.poll()
            while self.viewer.news:
                news = self.viewer.news.popleft()
                self.overlays.hear(news, notice=not self.viewer.news)  # of several at once the last: they would pile up
        except Exception as error:  # an engine that cannot be heard must not take the records with it
            self.lost = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"

    def _play(self) -> None:
        """Advance a playing replay at the speed of the run."""
        steps, now = self.viewer.history.steps, time.monotonic()
        if not self.standing.playing or now < self._due:
            return
        position = self.viewer.position + 1
        if position >= len(steps):
            self.standing.playing = False
            return
        self.viewer.goto(position)
        took = (steps[position].end_ns - steps[position].start_ns) / 1e9 if steps[position].phases else 0.0
        self._due = now + min(max(took, PLAY_SHORTEST), PLAY_LONGEST)

    def _moved(self) -> bool:
        """Whether anything on the screen could have changed since the last look."""
        viewer, history = self.viewer, self.viewer.history
        control = viewer.control
        engine = (control.status, control.progress, control.error, control.log) if control is not None else None
        stamp = (
            *(len(history.steps), viewer.position, viewer.follow, history.rewinds, history.lost, len(history.requests)),
            *(
                engine,
                self.lost,
                self.standing.playing,
                viewer.points,
                id(viewer.node_view),
                self.standing.pending.shown,
                viewer.read_so_far,
            ),
        )
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True

    # -- what is shown ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Show the viewer as it stands; panels draw what changed for them."""
        if not self._panels or not self._panels[0].is_attached:  # not there yet, or being taken down
            return
        self.standing.pending.update(self.viewer.history)
        look = self._look()
        self._panels[0].screen.set_class(bool(look.error), "failed")
        counts_only = self.viewer.history.counts_only or getattr(self.viewer.control, "counts_only", False)
        self._lay_out(counts_only)
        self._give_room(look)
        for panel in self._panels:
            panel.show(look)
        for screen in self.screen_stack:
            if isinstance(screen, Over):
                screen.show(look)

    def _lay_out(self, counts_only: bool) -> None:
        """The panels for an engine that tells counts only, or the usual ones."""
        screen = self._panels[0].screen
        if counts_only != screen.has_class("-counts"):
            screen.set_class(counts_only, "-counts")
            screen.query_one(IntervalsPanel if counts_only else RequestsPanel).focus()

    def _give_room(self, look: Look) -> None:
        """To the log of an engine that has done nothing so far: the tree's panel shows it."""
        screen = self._panels[0].screen
        logs = bool(look.log) and not look.steps
        if logs != screen.has_class("-log"):
            screen.set_class(logs, "-log")
            screen.query_one(TreePanel if logs else RequestsPanel).focus()

    def _look(self) -> Look:
        standing = self.standing
        standing.settle()
        return Look(
            self.viewer,
            standing.current,
            standing.pooled,
            self.current_theme.dark,
            self.scope_title,
            standing.playing,
            self.lost,
            standing.pending.shown,
        )

    def _names(self) -> Sequence[str]:
        """The requests, in the order of the list."""
        return next((panel.names for panel in self.screen_stack[0].query(RequestsPanel)), ())

    # -- keys ---------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Pause or resume the engine; where there is none, play or stop."""
        if self.viewer.live:
            self.viewer.toggle_pause()
        elif not self.viewer.history.steps:
            self.say("nothing was recorded")
        else:
            self.standing.playing = not self.standing.playing
            if self.standing.playing and self.viewer.position >= len(self.viewer.history.steps) - 1:
                self.viewer.goto(0)
            self._due = 0.0
            self._wait()
        self.look()

    def action_scope(self) -> None:
        """Figures of all requests, or of the current one."""
        self.standing.pooled = not self.standing.pooled
        self.look()

    # -- mouse --------------------------------------------------------------------------------------------------

    def on_slider_moved(self, event: Slider.Moved) -> None:
        """The slider was clicked or dragged."""
        if event.position >= len(self.viewer.history.steps) - 1:
            self.moves.action_last()
        else:
            self.standing.goto(event.position)

    def on_requests_panel_picked(self, event: RequestsPanel.Picked) -> None:
        """A request was clicked."""
        self.standing.pick(event.name)


def run_app(viewer: Viewer, lifetime: Lifetime, *, title: str = "", reference: str = "", start: str = "") -> None:
    """Show a viewer until the user leaves, or a signal ends it: SystemExit then.

    Ending its engine is left to the caller. Raises UserError.
    """
    settings = read_settings()
    run_to_the_end(ScopeApp(viewer, title=title, settings=settings, reference=reference, start=start), lifetime)
