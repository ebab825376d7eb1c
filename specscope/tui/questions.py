"""What the main screen asks the user: a step, a prompt, a line for the debugger."""

from __future__ import annotations

from bisect import bisect_left

from textual.app import App

from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.viewer import Control, Viewer
from specscope.tui.ask import Ask
from specscope.tui.console import Console, Talk


class Questions(App[None]):
    """The part of ScopeApp that opens other screens and takes their answers."""

    session: Viewer
    chosen: str | None
    playing: bool
    talk: Talk

    def look(self) -> None:
        """Show the session as it stands."""

    def _say(self, text: str) -> None:
        """Show a notice."""

    def _goto(self, position: int) -> None:
        """Look at a step."""

    def _hear(self, text: str) -> None:
        """The debugger said something."""

    def action_ask_step(self) -> None:
        """Go to a step by its number."""
        steps = self.session.history.steps
        if not steps:
            self._say("there are no steps yet")
            return

        def answered(text: str | None) -> None:
            number = (text or "").strip().replace(",", "")
            if not number:
                return
            if not number.isascii() or not number.isdigit():
                self._say(f"{number!r} is not a step number")
                return
            at = bisect_left(steps, int(number), key=lambda record: record.step)
            if at >= len(steps) or steps[at].step != int(number):
                self._say(f"there is no step {number}; this is the nearest")
            self._goto(at)

        self.push_screen(Ask(f"Go to step {steps[0].step} to {steps[-1].step}", str(steps[-1].step)), answered)

    def action_next_engine(self) -> None:
        """Another of the engines that are listened to."""
        following = getattr(self.session.control, "next_engine", None)
        if following is None:
            self._say("there is one engine: specscope tui --listen shows several")
            return
        following()
        self.look()

    def action_console(self) -> None:
        """The debugger's prompt."""

        def run(line: str) -> None:
            self.playing = False
            self.session.debug(line)
            while self.session.said:
                self._hear(self.session.said.popleft())
            self.look()

        self.push_screen(Console(self.talk, run, Commands(Session()).complete))

    def _engine(self, what: str) -> Control | None:
        """The engine, or a word on why there is none."""
        if self.session.live:
            return self.session.control
        self._say(f"{what}: the engine has ended" if self.session.control is not None else f"{what}: this is a replay")
        return None

    def action_ask_prompt(self) -> None:
        """Give the live engine a prompt."""
        if self._engine("no new prompts") is None:
            return

        def answered(text: str | None) -> None:
            control = self._engine("no new prompts") if text else None
            if control is not None and text:
                control.submit(text)
                self._say("submitted")

        self.push_screen(Ask("New prompt", "what the model is to go on from"), answered)

    def action_cancel(self) -> None:
        """End the chosen request."""
        control = self._engine("nothing to cancel")
        request = self.session.history.requests.get(self.chosen or "")
        if control is None:
            return
        if request is None:
            self._say("no request is chosen")
        elif request.end is not None:
            self._say(f"{request.id} has already ended ({request.state})")
        else:
            control.cancel(request.id)
            self._say(f"cancelling {request.id}")
