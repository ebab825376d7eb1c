"""Shell: what every screen has, a live one, a replay or a comparison: our colours, sizes, palette and pictures."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from pathlib import Path

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandList, CommandPalette
from textual.screen import Screen
from textual.theme import ThemeProvider

from specscope.errors import UserError
from specscope.interrupt import handled_by
from specscope.lifetime import Lifetime
from specscope.trace.files import keep_spaces
from specscope.tui.palette import DARK, LIGHT
from specscope.tui.settings import Settings
from specscope.tui.text import clean

KEY_NAMES = {"escape": "Esc", "enter": "Enter", "question_mark": "?", "slash": "/"}  # as people know them
NOTICE_LINES = 6  # of a notice, at most


def save_screenshot(app: App[None], folder: str) -> Path:
    """Write what the screen shows; the file. Raises UserError where it cannot be written."""
    path = Path(folder or ".").expanduser() / f"specscope-{datetime.now():%Y%m%d-%H%M%S-%f}.svg"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(app.export_screenshot())
    except OSError as error:
        raise UserError(
            f"cannot write a screenshot to {path.parent}: {error.strerror}; set screenshots in the settings"
        ) from error
    return path


class Palette(CommandPalette):
    """Textual's palette, with a fix: its Page Down fails where the terminal leaves the list no line."""

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).scrollable_content_region:
            super()._action_command_list(action)


class Shell(App[None]):
    """What every app has. Its keys do what its parts do; each app says which of them are commands of its own."""

    CSS_PATH = "scope.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-mid"), (110, "-wide"), (160, "-huge")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self.settings = settings or Settings()
        self.animation_level = "none"
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        self.theme = LIGHT.name if self.settings.theme == "light" else DARK.name

        self.ready: Callable[[], None] = lambda: None  # called when its loop runs

    def take_actions(self, *parts: object) -> None:
        """Textual looks for an action among an app's methods: these are its parts'."""
        for part in parts:
            for name in dir(part):
                if name.startswith("action_"):
                    setattr(self, name, getattr(part, name))

    def say(self, text: str) -> None:
        """Show a notice: the last one, for many would pile up."""
        self.clear_notifications()
        lines = text.splitlines()[:NOTICE_LINES]
        self.notify("\n".join(map(clean, lines)), timeout=3 * len(lines), markup=False)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our own colour variables, for themes that are not ours."""
        return dict((DARK if self.current_theme.dark else LIGHT).variables)

    # -- the palette --------------------------------------------------------------------------------------------

    def action_command_palette(self) -> None:
        """Open it."""
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))

    def search_themes(self) -> None:
        """The palette of themes."""
        self.push_screen(Palette([ThemeProvider], placeholder="Search for themes…"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every key is a command as well."""
        yield from self.own_commands(screen)
        for command in super().get_system_commands(screen):
            if command.title == "Theme":
                yield command
        yield SystemCommand("Screenshot", "save the screen as an SVG file", self.action_screenshot)

    def own_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys that do something over this screen."""
        raise NotImplementedError

    def commands_of(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The keys that a screen itself declares."""
        keys = [binding for binding in screen.BINDINGS if isinstance(binding, Binding)]
        for action, binding in {binding.action: binding for binding in keys}.items():  # of two keys the last
            if not action.startswith("app.focus"):
                key = binding.key.split(",")[0]
                text = f"key {KEY_NAMES.get(key, key)}"
                yield SystemCommand(binding.description, text, self.runner(action, screen))

    def runner(self, action: str, screen: Screen[object] | None = None) -> Callable[[], Awaitable[bool]]:
        """The callback that runs an action when its command is picked; a screen's action where one is given."""
        return lambda: self.run_action(action, screen)

    # -- pictures -----------------------------------------------------------------------------------------------

    def export_screenshot(self, *, title: str | None = None, simplify: bool = False) -> str:
        """The screen as SVG, whose spaces every renderer keeps."""
        return keep_spaces(super().export_screenshot(title=title, simplify=simplify))

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Save the screen as an SVG file."""
        try:
            self.say(f"saved {save_screenshot(self, path or self.settings.screenshots)}")
        except UserError as error:
            self.say(str(error))

    def action_next_theme(self) -> None:
        """Light or dark."""
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name


class SignalEnd:
    """Ends an app by a signal as the key for it does."""

    def __init__(self, app: Shell, lifetime: Lifetime) -> None:
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
            if (reading := getattr(self._app._driver, "exit_event", None)) is not None:
                reading.set()  # else Textual's reader spins on a terminal that is gone
        if self._loop is None:
            raise SystemExit(128 + number)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._app.exit, None, 128 + number)


def run_to_the_end(app: Shell, lifetime: Lifetime) -> None:
    """Show it until the user leaves, or a signal ends it: SystemExit then."""
    # Not asyncio's own handlers: when its loop ends it leaves the signals' defaults, and the next one kills.
    with handled_by(SignalEnd(app, lifetime)):
        app.run()
    if app.return_code:
        sys.exit(app.return_code)
