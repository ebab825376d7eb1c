"""The screens that are laid over the main one, and what they ask of it."""

from __future__ import annotations

from specscope.tui.look import Look
from specscope.tui.screens.dialogs import Questions
from specscope.tui.screens.engine_view import EngineScreen
from specscope.tui.screens.fork_view import ForkScreen
from specscope.tui.screens.help import HelpScreen
from specscope.tui.screens.over import Over
from specscope.tui.screens.points_view import PointsScreen
from specscope.tui.screens.request_view import RequestScreen
from specscope.tui.screens.step_view import StepScreen
from specscope.tui.settings import Settings
from specscope.tui.widgets.ledger import Ledger
from specscope.tui.widgets.prompt import DebugPrompt


class Screens(Questions):
    """The part of ScopeApp that opens them."""

    settings: Settings
    ledger: Ledger

    def _look(self) -> Look:
        """What is to be shown now."""
        raise NotImplementedError

    def _lay_over(self, kind: type[Over]) -> None:
        """Show a screen, which is made once and kept: making one takes longer than a key should."""
        name = kind.__name__
        if any(isinstance(screen, kind) for screen in self.screen_stack):
            return
        if not self.is_screen_installed(name):
            self.install_screen(kind(self._look()), name)
        self.push_screen(name)
        screen = self.get_screen(name)
        if screen.is_mounted and isinstance(screen, Over):
            screen.show(self._look())

    def action_engine(self) -> None:
        """Phases, batch, queue and KV over time."""
        self._lay_over(EngineScreen)

    def action_request(self) -> None:
        """The chosen request from its first step to its last."""
        self._lay_over(RequestScreen)

    def action_step(self) -> None:
        """The nodes of the chosen request's step, one of them in full."""
        self._lay_over(StepScreen)

    def action_breakpoints(self) -> None:
        """What a run stops at."""
        self._lay_over(PointsScreen)

    def action_fork(self) -> None:
        """The last fork beside its original."""
        forked = None if self.viewer.control is None else self.viewer.control.forked
        if forked is None:
            self._say("nothing was forked yet: type :fork temperature=0.7, say, over a live engine")
        else:
            self.push_screen(ForkScreen(self._look(), forked))

    def action_help(self) -> None:
        """Keys, colours, figures."""
        self.push_screen(HelpScreen(self.settings.keys))

    def action_request_step(self, way: int) -> None:
        """The chosen request's step before or after the one that is looked at."""
        look = self._look()
        if look.request is None or not look.request.steps:
            return
        place = (look.part[0] if look.part is not None else -1) + way
        steps = look.request.engine_steps
        self._goto(steps[min(max(place, 0), len(steps) - 1)])

    def action_goto_position(self, position: int) -> None:
        """A place in the history."""
        self._goto(position)

    def action_ask_node(self, node: int) -> None:
        """Ask the debugger for a node's distributions."""
        look = self._look()
        session = self.viewer
        if look.part is None:
            return
        waiting = self._waiting()
        if session.live and session.control is not None and session.control.obeys:
            step = look.history.steps[look.at].step
            why = ""
            if not session.paused:
                why = "the engine runs on: pause it first (space)"
            elif look.at != look.steps - 1:
                why = f"the engine is past this step: :goto {step} takes it back there"
            if why and waiting is not None:
                waiting.hear(why)
                return
        self.action_debug_line(f"request {look.chosen}")
        if waiting is not None:
            waiting.awaits = True
        self.action_debug_line(f"node {node}")

    def _waiting(self) -> StepScreen | None:
        """The step's screen, where it lies over the main one."""
        return next((screen for screen in self.screen_stack if isinstance(screen, StepScreen)), None)

    def _hear(self, text: str) -> None:
        """The debugger said something: where it was asked, else as a notice as well."""
        waiting = self._waiting()
        if isinstance(self.screen, DebugPrompt):
            self.screen.hear(text)
            return
        self.talk.add(text)
        if waiting is not None and waiting.awaits:
            if not text.startswith(("step ", "before ")):  # where the run stands: the request was chosen
                waiting.hear(text)
        elif text:
            self._say(text.splitlines()[0])
