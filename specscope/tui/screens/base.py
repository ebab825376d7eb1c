"""The screens that are laid over the main one, and what they ask of it."""

from __future__ import annotations

from functools import partial

from specscope.debug.answers import Answer, LineRefused, LookRefused, News, Notice, PromptRefused, Stopped
from specscope.debug.show_stop import stop_text
from specscope.debug.stops import BreakpointHit, Stop
from specscope.tui.look import Look
from specscope.tui.screens.analysis_view import AnalysisScreen
from specscope.tui.screens.branches_view import BranchesScreen
from specscope.tui.screens.dialogs import Questions
from specscope.tui.screens.engine_view import EngineScreen
from specscope.tui.screens.fork_view import ForkScreen
from specscope.tui.screens.help import HelpScreen, help_lines
from specscope.tui.screens.over import Over
from specscope.tui.screens.points_view import PointsScreen
from specscope.tui.screens.request_view import RequestScreen
from specscope.tui.screens.step_view import StepScreen
from specscope.tui.screens.timeline_view import SpansScreen
from specscope.tui.widgets.prompt import DebugPrompt


class Screens(Questions):
    """The part of ScopeApp that opens them."""

    hit: BreakpointHit | None = None  # that stopped the run last

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

    def action_spans(self) -> None:
        """The current request's trace: its spans, and those of other services."""
        self._lay_over(SpansScreen)

    def action_analysis(self) -> None:
        """Questions over many steps."""
        self._lay_over(AnalysisScreen)

    def action_request(self) -> None:
        """The current request from its first step to its last."""
        self._lay_over(RequestScreen)

    def action_step(self) -> None:
        """The nodes of the current request's step, one of them in full."""
        self._lay_over(StepScreen)
        self.call_after_refresh(self._pick_hit)

    def action_breakpoints(self) -> None:
        """What a run stops at."""
        self._lay_over(PointsScreen)

    def action_branches(self) -> None:
        """The branches of an edited run."""
        self._lay_over(BranchesScreen)

    def action_fork(self) -> None:
        """The last fork beside its original."""
        forked = None if self.viewer.control is None else self.viewer.control.forked
        if forked is None:
            self._say("nothing was forked yet: with a live engine, type for example :fork temperature=0.7")
        else:
            self.push_screen(ForkScreen(self._look(), forked))

    def action_help(self) -> None:
        """Keys, colours, figures."""
        self.push_screen(HelpScreen(partial(help_lines, keymap=self.settings.keys)))

    def action_goto_position(self, position: int) -> None:
        """A place in the history."""
        self._goto(position)

    async def action_step_at(self, position: int, node: int) -> None:
        """The decisions of the current request's step at a place in the history, with a node picked."""
        self._goto(position)
        self._lay_over(StepScreen)
        screen = self.get_screen(StepScreen.__name__)
        if isinstance(screen, StepScreen):
            self.call_after_refresh(screen.pick_node, position, node)

    async def action_example(self, request: str, position: int, node: int | None) -> None:
        """The decisions of a request's step at a place in the history; a node picked, or the final token."""
        self._pick(request)
        part = self.viewer.history.part(request, position)
        if part is not None:
            await self.action_step_at(position, len(part[1].tree) if node is None else node)

    def _step_screen(self) -> StepScreen | None:
        """The step's screen, where it lies over the main one."""
        screens = (screen for screen in self.screen_stack if isinstance(screen, StepScreen))
        return next((screen for screen in screens if screen.is_mounted), None)

    def _hear(self, news: News, *, notice: bool = True) -> None:
        """Show what came from the engine or its debugger, each kind where it belongs."""
        match news:
            case Notice():
                self._say(news.text)
            case PromptRefused():
                self.pending.refused()
                self._say(news.why)
            case LookRefused():
                screen = self._step_screen()
                if screen is None or not screen.refuse(news):
                    self._say(news.why)
            case LineRefused():
                self._tell(news.why, notice)
            case Answer():
                self._tell(news.text, notice)
                self._arrive(news.stop)
            case Stopped():
                texts = [stop_text(news.stop, self.viewer.history), *(answer.text for answer in news.answers)]
                self._tell("\n".join(text for text in texts if text), notice)
                if self.viewer.follow:
                    self._arrive(news.last)

    def _tell(self, text: str, notice: bool) -> None:
        """Text of the debugger's: at its prompt where that is open, else kept there, and its first line as a notice."""
        if isinstance(self.screen, DebugPrompt):
            self.screen.hear(text)
            return
        self.talk.add(text)
        if text and notice:
            self._say(text.splitlines()[0])

    def _arrive(self, stop: Stop | None) -> None:
        """Show what a run stopped at: its request, and on the step's screen a breakpoint's node."""
        if stop is None or not stop.hits:
            if stop is not None and stop.request in self.viewer.history.requests:
                self._pick(stop.request)
            return
        self.hit = stop.hits[0]
        record = self._look().record
        if record is not None and record.step == self.hit.step:
            self._pick(self.hit.request)
            self._pick_hit()

    def _pick_hit(self) -> None:
        """Pick the node that a breakpoint stopped at last, where its step is shown."""
        screen, hit, look = self._step_screen(), self.hit, self._look()
        if screen is None or hit is None or hit.node is None or look.record is None:
            return
        if (look.record.step, look.current) == (hit.step, hit.request):
            screen.pick_node(look.at, hit.node)
