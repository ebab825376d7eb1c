"""The screens over the main one, and the actions that open them."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import App

from specscope.debug.answers import Answer, LookRefused, News, Notice, PromptRefused, Stop
from specscope.debug.show import stop_text
from specscope.tui.look import Look
from specscope.tui.screens.analysis_view import AnalysisScreen
from specscope.tui.screens.beside import BesideScreen, fork_beside
from specscope.tui.screens.engine_view import EngineScreen
from specscope.tui.screens.over import Over
from specscope.tui.screens.points_view import PointsScreen
from specscope.tui.screens.request_view import RequestScreen
from specscope.tui.screens.step_view import StepScreen
from specscope.tui.standing import Standing
from specscope.tui.widgets.lines import Goto
from specscope.tui.widgets.prompt import DebugPrompt

SCREENS: dict[str, type[Over]] = {
    "analysis": AnalysisScreen,
    "breakpoints": PointsScreen,
    "engine": EngineScreen,
    "request": RequestScreen,
}


class Overlays:
    """The actions of an app that lay other screens over the main one, and what those tell of the engine's news."""

    def __init__(self, app: App[None], standing: Standing, look: Callable[[], Look]) -> None:
        """`look`: what is to be shown now."""
        self._app, self._standing, self._look = app, standing, look
        self.viewer = standing.viewer

    def _lay_over(self, kind: type[Over]) -> None:
        """Show a screen. It is made once and kept: making one is too slow for a key press."""
        name = kind.__name__
        if any(isinstance(screen, kind) for screen in self._app.screen_stack):
            return
        if not self._app.is_screen_installed(name):
            self._app.install_screen(kind(self._look()), name)
        self._app.push_screen(name)
        screen = self._app.get_screen(name)
        if screen.is_mounted and isinstance(screen, Over):
            screen.show(self._look())

    def action_open(self, name: str) -> None:
        self._lay_over(SCREENS[name])

    def action_step(self) -> None:
        """The nodes of the current request's step, one of them in full."""
        self._lay_over(StepScreen)
        self._app.call_after_refresh(self._pick_hit)

    def action_fork(self) -> None:
        forked = None if self.viewer.control is None else self.viewer.control.forked
        if forked is None:
            self._standing.say("nothing was forked yet: on a live engine, type for example :fork temperature=0.7")
        else:
            beside = fork_beside(forked, self.viewer.history.vocabulary)
            self._app.push_screen(BesideScreen(self._look(), beside))

    def goto(self, place: Goto) -> None:
        """A place in the history; the decisions of the current request's step there, where a node of it is named."""
        if place.request is not None:
            self._standing.pick(place.request)
        if place.position is not None:
            self._standing.goto(place.position)
        if place.position is not None and place.node is not None:
            self._lay_over(StepScreen)
            screen = self._app.get_screen(StepScreen.__name__)
            if isinstance(screen, StepScreen):
                self._app.call_after_refresh(screen.pick_node, place.position, place.node)

    def _step_screen(self) -> StepScreen | None:
        """The step's screen, where it lies over the main one."""
        screens = (screen for screen in self._app.screen_stack if isinstance(screen, StepScreen))
        return next((screen for screen in screens if screen.is_mounted), None)

    def hear(self, news: News, *, notice: bool = True) -> None:
        """Show what came from the engine or its debugger, each kind where it belongs."""
        match news:
            case Notice():
                self._standing.say(news.text)
            case PromptRefused():
                self._standing.pending.refused()
                self._standing.say(news.why)
            case LookRefused():
                screen = self._step_screen()
                if screen is None or not screen.refuse(news):
                    self._standing.say(news.why)
            case Answer():
                self._tell(news.text, notice)
                if news.request in self.viewer.history.requests and news.request != self._standing.current:
                    self._standing.pick(news.request)
                self._arrive(news.stop)
            case Stop():
                self._tell(stop_text(news, self.viewer.history), notice)
                if self.viewer.follow:
                    self._arrive(news)

    def _tell(self, text: str, notice: bool) -> None:
        """Text from the debugger: shown at its prompt if that is open; else kept for it, the first line as a notice."""
        if isinstance(self._app.screen, DebugPrompt):
            self._app.screen.hear(text)
            return
        self._standing.talk.add(text)
        if text and notice:
            self._standing.say(text.splitlines()[0])

    def _arrive(self, stop: Stop | None) -> None:
        """Show where a run stopped: the request, and on the step's screen the breakpoint's node."""
        if stop is None or not stop.hits:
            return
        self._standing.hit = stop.hits[0]
        record = self._look().record
        if record is not None and record.step == self._standing.hit.step:
            self._standing.pick(self._standing.hit.request)
            self._pick_hit()

    def _pick_hit(self) -> None:
        """Pick the node that a breakpoint stopped at last, where its step is shown."""
        screen, hit, look = self._step_screen(), self._standing.hit, self._look()
        if screen is None or hit is None or hit.node is None or look.record is None:
            return
        if (look.record.step, look.current) == (hit.step, hit.request):
            screen.pick_node(look.at, hit.node)
