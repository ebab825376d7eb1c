"""What the main screen asks the user: a step, a prompt, a line for the debugger."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from textual.app import App

from specscope.debug.answers import News
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.viewer import Control, Viewer
from specscope.trace.checked import whole
from specscope.trace.history import RequestHistory
from specscope.tui.ask import Ask
from specscope.tui.pending import Pending
from specscope.tui.widgets.listing import ListPanel
from specscope.tui.widgets.prompt import DebugPrompt, Talk


class Questions(App[None]):
    """The part of ScopeApp that opens other screens and takes their answers."""

    viewer: Viewer
    current: str | None
    playing: bool
    talk: Talk
    pending: Pending
    reference: str  # the file that is shown, "" for a live engine

    def look(self) -> None:
        """Show the viewer as it stands."""

    def _say(self, text: str) -> None:
        """Show a notice."""

    def _goto(self, position: int) -> None:
        """Look at a step."""

    def _pick(self, name: str) -> None:
        """Choose a request."""

    def _hear(self, news: News, *, notice: bool = True) -> None:
        """Show what came from the engine or its debugger."""

    def action_ask_step(self) -> None:
        """Go to a step by its number, to a request, or to a request's step: 17, r3, r3@17."""
        steps = self.viewer.history.steps
        if not steps:
            self._say("there are no steps yet")
            return

        def answered(text: str | None) -> None:
            number = (text or "").strip().replace(",", "")
            if not number or self._goto_request(number):
                return
            if whole(number) is None:
                self._say(f"{number!r} is neither a step nor a request: write 17, r3 or r3@17")
                return
            at = bisect_left(steps, int(number), key=lambda record: record.step)
            if at >= len(steps) or steps[at].step != int(number):
                self._say(f"there is no step {number}; this is the nearest")
            self._goto(at)

        last = steps[-1].step
        self.push_screen(Ask(f"Go to step {steps[0].step} to {last}, or a request: r3, r3@17", str(last)), answered)

    def _goto_request(self, text: str) -> bool:
        """Choose the request of that name, and go to the step behind its @; False where it names none."""
        name, _, index = text.partition("@")
        request = self.viewer.history.requests.get(name)
        if request is None:
            return False
        at = None if whole(index) is None else request.position_of(int(index))
        self._pick(name)
        if at is not None:
            self._goto(at)
        elif index:
            self._say(f"{name} has no step {index}")
        return True

    def _list(self) -> ListPanel | None:
        """The list that filter and sort are about: the focused one, else the screen's first."""
        focused = self.focused
        return focused if isinstance(focused, ListPanel) else next(iter(self.screen.query(ListPanel)), None)

    def action_filter(self) -> None:
        """Show what has a text, of the list on the screen."""
        panel = self._list()
        if panel is None:
            self._say("there is no list here to filter")
            return

        def answered(text: str | None) -> None:
            if text is not None:
                panel.set_order(replace(panel.order, words=text.strip()))

        self.push_screen(Ask("Filter the list", "text to find; leave empty to show all", panel.order.words), answered)

    def action_sort(self, way: int) -> None:
        """Sort the list on the screen: by its next column, or the other way round."""
        panel = self._list()
        if panel is None:
            self._say("there is no list here to sort")
        elif way > 0:
            panel.sort_next()
        else:
            panel.sort_reverse()

    def action_ask_search(self) -> None:
        """Find a text in the current request's output, after the step that is looked at."""
        request = self.viewer.history.requests.get(self.current or "")
        if request is None:
            self._say("there is no current request")
            return

        def answered(text: str | None) -> None:
            if not text:
                return
            at = self._find(request, text)
            if at is None:
                self._say(f"no {text!r} in the output of {request.id} after this step")
            else:
                self._goto(at)

        self.push_screen(Ask(f"Search the output of {request.id}", "text to find after this step"), answered)

    def _find(self, request: RequestHistory, text: str) -> int | None:
        """The position of the first later step with which the text is complete."""
        vocabulary, out = self.viewer.history.vocabulary, ""
        for step, at in zip(request.steps, request.engine_steps, strict=True):
            before = len(out)
            out += vocabulary.text(step.output())
            if at > self.viewer.position and text in out[max(before - len(text) + 1, 0) :]:
                return at
        return None

    def action_copy_reference(self) -> None:
        """Put what `specscope replay` opens at this step into the clipboard."""
        found = self.viewer.history.part(self.current or "", self.viewer.position)
        if found is None:
            self._say(f"{self.current} has no step yet" if self.current else "there is no step to copy")
            return
        reference = f"{self.reference}#{self.current}@{found[1].index}"
        self.copy_to_clipboard(reference)
        self._say(f"copied {reference}")

    def action_next_engine(self) -> None:
        """Another of the engines that are listened to."""
        following = getattr(self.viewer.control, "next_engine", None)
        if following is None:
            self._say("there is one engine: specscope tui --listen shows several")
            return
        following()
        self.look()

    def action_console(self) -> None:
        """The debugger's prompt."""
        self.push_screen(DebugPrompt(self.talk, self.action_debug_line, Commands(Session()).complete))

    def action_debug_line(self, line: str) -> None:
        """Give the debugger a line; a live engine answers when it can."""
        self.playing = False
        self.viewer.debug(line)
        while self.viewer.news:
            self._hear(self.viewer.news.popleft())
        self.look()

    def action_ask_breakpoint(self) -> None:
        """Set a breakpoint."""

        def answered(text: str | None) -> None:
            if text and text.strip():
                words = text.strip()
                known = words.split()[0] in ("break", "tbreak", "watch", "b", "tb")
                self.action_debug_line(words if known else f"break {words}")

        self.push_screen(Ask("Stop at EVENT [if EXPR], or watch EXPR", "reject if depth == 1 and p < 0.1"), answered)

    def _engine(self, what: str) -> Control | None:
        """The engine, or a word on why there is none."""
        control = self.viewer.control
        if control is not None and self.viewer.live and control.obeys:
            return control
        if control is None:
            why = "this is a replay"
        else:
            why = "the engine has ended" if not self.viewer.live else "this screen only listens to the engine"
        self._say(f"{what}: {why}")
        return None

    def action_ask_prompt(self) -> None:
        """Give the live engine a prompt."""
        if self._engine("no new prompts") is None:
            return

        def answered(text: str | None) -> None:
            control = self._engine("no new prompts") if text else None
            if control is not None and text:
                control.submit(text)
                self.pending.submit(text, self.viewer.history)
                self._say("queued: it begins with the next step" if self.viewer.paused else "submitted")
                self.look()

        self.push_screen(Ask("New prompt", "text for the model to continue or answer"), answered)

    def action_cancel(self) -> None:
        """End the current request."""
        control = self._engine("nothing to cancel")
        request = self.viewer.history.requests.get(self.current or "")
        if control is None:
            return
        if request is None:
            self._say("there is no current request")
        elif request.end is not None:
            self._say(f"{request.id} has already ended ({request.state})")
        else:
            control.cancel(request.id)
            self.pending.cancels.add(request.id)
            self._say(
                f"{request.id} will be cancelled by the next step"
                if self.viewer.paused
                else f"{request.id} is cancelled"
            )
            self.look()
