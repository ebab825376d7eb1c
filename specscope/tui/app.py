"""ScopeApp: the one screen, live and over a capture; with another first screen, a comparison or a location."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.command import CommandList, CommandPalette
from textual.containers import Container
from textual.screen import Screen
from textual.theme import Theme, ThemeProvider
from textual.timer import Timer

from specscope.analyze.why import Typical
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.keys import ASKING, KEYS, MAIN, Key, bound
from specscope.tui.look import Look
from specscope.tui.palette import DARK, LIGHT
from specscope.tui.screens.dialogs import Dialogs
from specscope.tui.screens.help import HelpScreen, Page, help_lines
from specscope.tui.screens.over import Hints, Over
from specscope.tui.screens.overlays import Overlays
from specscope.tui.screens.points_view import Typed
from specscope.tui.screens.request_view import TimelinePanel
from specscope.tui.standing import Standing
from specscope.tui.text import clean
from specscope.tui.widgets.bars import Banner, Slider, StatusBar
from specscope.tui.widgets.intervals import IntervalsPanel
from specscope.tui.widgets.lines import Goto, Panel
from specscope.tui.widgets.output import OutputPanel
from specscope.tui.widgets.prompt import TypedScreen
from specscope.tui.widgets.rates import LengthsPanel, RatesPanel
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel

READING = 0.01  # seconds between two pieces of a capture that is being read
PLAY_SHORTEST, PLAY_LONGEST = 0.05, 1.0  # seconds a step is shown in a replay that plays
COUNTED = 4000  # most engine steps of a run that are counted while the user waits
NOTICE_LINES = 6  # of a notice, at most
FRAME = 0.1  # seconds between two looks at an engine
THEME = "SPECSCOPE_THEME"
THEMES = {"dark": DARK, "light": LIGHT}


def chosen_theme() -> Theme:
    """The theme that the environment asks for. Raises UserError."""
    name = os.environ.get(THEME) or "dark"
    if name not in THEMES:
        raise UserError(f"{THEME} is {name!r}: use {' or '.join(THEMES)}")
    return THEMES[name]


class Palette(CommandPalette):
    """Textual's palette, with a fix: its Page Down fails where the terminal leaves the list no line."""

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).scrollable_content_region:
            super()._action_command_list(action)


class ScopeApp(App[None]):
    """Shows `viewer.history` at `viewer.position`; keys move the viewer, a timer lets it take in what is new."""

    TITLE = "specscope"
    CSS_PATH = "scope.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-mid"), (110, "-wide"), (160, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    BINDINGS = bound((*KEYS, Key("ctrl+c", "quit", "Quit")))

    def __init__(
        self,
        viewer: Viewer,
        *,
        title: str = "",
        theme: Theme | None = None,
        reference: str = "",
        start: str = "",
        first: Callable[[Look], Over] | None = None,
        page: Page = help_lines,
    ) -> None:
        """`theme`: None for the one that the environment asks for; `page`: of help, of the screen that `first` makes,
        which is shown in place of the main one. Raises UserError.
        """
        super().__init__()
        self.animation_level = "none"
        for each in THEMES.values():
            self.register_theme(each)
        self.theme = (theme or chosen_theme()).name
        self.ready: Callable[[], None] = lambda: None  # called when its loop runs
        self.viewer, self._first, self._page = viewer, first, page
        viewer.typical = Typical(lambda: viewer.history, COUNTED)
        self.scope_title = title
        self._start = start  # REQUEST@STEP[/NODE] to begin at, as soon as it has been read
        self.standing = Standing(viewer, self.look, self.say, self._names, reference)
        self.standing.pending.prompts += viewer.control.asked if viewer.control is not None else ()
        self.overlays = Overlays(self, self.standing, self._look)
        self.dialogs = Dialogs(self, self.standing, self.overlays.hear)
        for part in (self.dialogs, self.standing, self.overlays):  # Textual looks for actions among the app's methods
            for name in filter(lambda name: name.startswith("action_"), dir(part)):
                setattr(self, name, getattr(part, name))
        self.lost = ""
        self._due = 0.0  # when a playing replay moves on
        self._timer: Timer | None = None
        self._panels: tuple[Panel, ...] = ()

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
        if self._first is not None:
            self.push_screen(self._first(self._look()))
        self.theme_changed_signal.subscribe(self, lambda _: self.look())
        self._poll()
        self.look()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self.ready()
        self._begin_at()
        self._wait()

    def say(self, text: str) -> None:
        """Show a notice: the last one, for many would pile up."""
        self.clear_notifications()
        lines = text.splitlines()[:NOTICE_LINES]
        self.notify("\n".join(map(clean, lines)), timeout=3 * len(lines), markup=False)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own colour variables, for themes that are not ours."""
        return dict((DARK if self.current_theme.dark else LIGHT).variables)

    def action_next_theme(self) -> None:
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name

    async def on_key(self, event: events.Key) -> None:
        if isinstance(self.screen, TypedScreen) and await self.screen.typed(event):
            event.prevent_default()

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self._page))

    # -- the palette --------------------------------------------------------------------------------------------

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))

    def search_themes(self) -> None:
        self.push_screen(Palette([ThemeProvider], placeholder="Search for themes…"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every key is a command as well, except those for an engine that takes commands where there is none."""
        if isinstance(screen, Over) and self._first is not None:
            for key in screen.KEYS:
                if key.label and not key.action.startswith("app.focus"):
                    yield SystemCommand(key.command, f"key {key.label}", self._runner(key.action, screen))
        elif self._first is None:
            for key in KEYS:
                if key.action not in ASKING or self._look().asks:
                    yield SystemCommand(key.command, f"{key.help} ({key.label})", self._runner(key.action))
        for command in super().get_system_commands(screen):
            if command.title in ("Theme", "Screenshot"):
                yield command

    def _runner(self, action: str, screen: Screen[Any] | None = None) -> Callable[[], Awaitable[bool]]:
        return lambda: self.run_action(action, screen)

    # -- pictures -----------------------------------------------------------------------------------------------

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """The screen as SVG, whose spaces every renderer keeps: some cut those at the ends of texts."""
        svg = super().export_screenshot(title=title, simplify=simplify)
        return svg.replace("<text ", '<text xml:space="preserve" ')

    # -- time ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Look again after a frame; over a capture that stands still there is nothing to look for."""
        if self._timer is not None:
            return
        if self.viewer.reading and not self.lost:
            self._timer = self.set_timer(READING, self._tick)
        elif self.viewer.control is not None or self.standing.playing:
            self._timer = self.set_timer(FRAME, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._poll()
        self._play()
        self._begin_at()
        self.look()
        self._wait()

    def _begin_at(self) -> None:
        """Go to the step that the command line asked for, once it is there."""
        if not self._start:
            return
        try:
            place = Goto.found(self.viewer.history, self._start)
        except UserError as error:
            if self.viewer.reading:
                return
            self.say(str(error))
        else:
            position = self.viewer.position if place.position is None else place.position
            self.overlays.goto(Goto(position, place.request, place.node))
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

    # -- what is shown ------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Show the viewer as it stands; panels draw what changed for them."""
        if not self._panels or not self._panels[0].is_attached:  # not there yet, or being taken down
            return
        self.standing.pending.update(self.viewer.history)
        look = self._look()
        self._panels[0].screen.set_class(bool(look.error), "failed")
        control = self.viewer.control
        counts_only = self.viewer.history.counts_only or (control is not None and control.counts_only)
        self._lay_out("-counts", counts_only, IntervalsPanel)  # for an engine that tells counts only
        self._lay_out("-log", bool(look.log) and not look.steps, TreePanel)  # which shows what it has done so far
        for panel in self._panels:
            panel.show(look)
        for screen in self.screen_stack:
            if isinstance(screen, Over) and screen.is_mounted:
                screen.show(look)

    def _lay_out(self, name: str, wanted: bool, panel: type[Panel]) -> None:
        """The panels in a layout in which one matters most, or the usual ones."""
        screen = self._panels[0].screen
        if wanted != screen.has_class(name):
            screen.set_class(wanted, name)
            screen.query_one(panel if wanted else RequestsPanel).focus()

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

    # -- what panels ask for ------------------------------------------------------------------------------------

    def on_goto(self, place: Goto) -> None:
        if place.follow and (place.position or 0) >= len(self.viewer.history.steps) - 1:
            self.standing.action_last()
        else:
            self.overlays.goto(place)

    def on_typed(self, typed: Typed) -> None:
        self.dialogs.debug_line(typed.line)


class SignalEnd:
    def __init__(self, app: ScopeApp, lifetime: Lifetime) -> None:
        self._app, self._lifetime = app, lifetime
        self._loop: asyncio.AbstractEventLoop | None = None
        app.ready = self._ready

    def _ready(self) -> None:
        """From here on a signal can be told to the app's loop."""
        self._loop = asyncio.get_running_loop()

    def __call__(self, number: signal.Signals) -> None:
        """A signal's handler. After SIGHUP the terminal may take nothing any more."""
        if number is signal.SIGHUP:
            self._lifetime.hurry()
            driver = self._app._driver
            if (reading := getattr(driver, "exit_event", None)) is not None:
                with suppress(OSError):
                    driver._disable_mouse_support()  # type: ignore[union-attr] # it does so no more once this is set
                reading.set()  # else Textual's reader spins on a terminal that is gone
        if self._loop is None:
            raise SystemExit(128 + number)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._app.exit, None, 128 + number)


def run_app(viewer: Viewer, lifetime: Lifetime, *, title: str = "", reference: str = "", start: str = "") -> None:
    """Show a viewer, whose engine the caller ends. Raises UserError."""
    run(ScopeApp(viewer, title=title, reference=reference, start=start), lifetime)


def answer_app(
    title: str, first: Callable[[Look], Over], page: Page, vocabulary: Vocabulary, theme: Theme | None = None
) -> ScopeApp:
    """The screens about one answer, a comparison or a location, and their page of help. Raises UserError."""
    app = ScopeApp(Viewer(History(vocabulary=vocabulary)), theme=theme, first=first, page=page)
    app.title = title
    return app


def run(app: ScopeApp, lifetime: Lifetime) -> None:
    """Until the user leaves, or a signal ends it: SystemExit then."""
    # Not asyncio's own handlers: when its loop ends it leaves the signals' defaults, and the next one kills.
    with handled_by(SignalEnd(app, lifetime)):
        app.run()
    if app.return_code:
        sys.exit(app.return_code)
