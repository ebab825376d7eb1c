"""The app's dialogs: for a step, a prompt, a line for the debugger, the words of a filter; and the order of a list."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from rich.text import Text
from textual.app import App, ComposeResult
from textual.widgets import Input

from specscope.debug.answers import News
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.debug.viewer import Control
from specscope.errors import UserError
from specscope.trace.checked import whole
from specscope.trace.history.history import RequestHistory
from specscope.trace.record.vocabulary import shell_word
from specscope.tui.keys import hidden
from specscope.tui.standing import Standing
from specscope.tui.text import clean
from specscope.tui.widgets.lines import Goto
from specscope.tui.widgets.listing import ListPanel
from specscope.tui.widgets.prompt import DebugPrompt, Line, TypedScreen


class Ask(TypedScreen[str | None]):
    """A dialog that returns what was typed, or None if it was cancelled."""

    BINDINGS = hidden(escape="dismiss(None)")

    def __init__(self, question: str, placeholder: str = "", value: str = "") -> None:
        super().__init__()
        self._question, self._placeholder, self._value = question, placeholder, value

    def compose(self) -> ComposeResult:
        """The question is the title of its input."""
        box = Line(self._value, placeholder=self._placeholder, select_on_focus=bool(self._value))
        box.cursor_blink = False
        box.border_title = Text(clean(self._question))
        box.border_subtitle = Text("Enter confirms, Esc cancels")
        yield box

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self.is_current:  # Enter may be pressed twice
            self.dismiss(event.value)


class Dialogs:
    """The actions of an app that ask the user something, and do what the answer says."""

    def __init__(self, app: App[None], standing: Standing, hear: Callable[[News], None]) -> None:
        """`hear`: shows what came from the engine or its debugger."""
        self._app, self._standing, self._hear = app, standing, hear
        self.viewer, self._say = standing.viewer, standing.say

    def _ask(self, question: str, example: str, then: Callable[[str], None], value: str = "") -> None:
        """Ask for a line; `then` gets what was typed, which may be nothing."""

        def answered(text: str | None) -> None:
            if text is not None:
                then(text)

        self._app.push_screen(Ask(question, example, value), answered)

    def _list(self) -> ListPanel | None:
        """The focused list, else the first that the screen shows."""
        focused = self._app.focused
        lists = (panel for panel in self._app.screen.query(ListPanel) if panel.region)
        return focused if isinstance(focused, ListPanel) else next(lists, None)

    def action_filter(self) -> None:
        panel = self._list()
        if panel is None:
            self._say("there is no list here to filter")
            return
        then = lambda text: panel.set_order(replace(panel.order, words=text.strip()))  # noqa: E731
        self._ask("Filter the list", "text to find; leave empty to show all", then, panel.order.words)

    def action_sort(self, way: int) -> None:
        panel = self._list()
        if panel is None:
            self._say("there is no list here to sort")
        else:
            panel.sort(way)

    def action_ask_step(self) -> None:
        """Go to a step by its number, to a request, or to a request's step: 17, r3, r3@17."""
        steps = self.viewer.history.steps
        if not steps:
            self._say("there are no steps yet")
            return

        def go(text: str) -> None:
            number = text.strip().replace(",", "")
            if not number or self._goto_request(number):
                return
            if whole(number) is None:
                self._say(f"{number!r} is neither a step nor a request: write 17, r3 or r3@17")
                return
            nearest = bisect_left(steps, int(number), key=lambda record: record.step)
            if nearest >= len(steps) or steps[nearest].step != int(number):
                self._say(f"there is no step {number}; this is the nearest")
            self._standing.goto(nearest)

        last = steps[-1].step
        self._ask(f"Go to step {steps[0].step} to {last}, or a request: r3, r3@17", str(last), go)

    def _goto_request(self, text: str) -> bool:
        """Choose the request of that name, and go to the step behind its @; False where it names none."""
        history = self.viewer.history
        if text not in history.requests and "@" not in text:
            return False
        try:
            self._app.post_message(Goto.found(history, text))
        except UserError as error:
            self._say(str(error))
        return True

    def action_ask_search(self) -> None:
        """Find a text in the current request's output: after the step that is looked at, then from the start."""
        request = self._standing.request()
        if request is None:
            return

        def search(text: str) -> None:
            here, matches = self.viewer.position, self._find(request, text) if text else []
            if text and not matches:
                self._say(f"no {text!r} in the output of {request.id}")
            if not matches:
                return
            position = next((match for match in matches if match > here), matches[0])
            if matches == [here]:
                self._say(f"this is the only {text!r} in the output of {request.id}")
            elif position <= here:
                self._say(f"no later {text!r}: wrapped around to the first of {request.id}")
            self._standing.goto(position)

        self._ask(f"Search the output of {request.id}", "text to find, after this step first", search)

    def _find(self, request: RequestHistory, text: str) -> list[int]:
        """The positions of the steps with which the text is complete."""
        vocabulary, out = self.viewer.history.vocabulary, ""
        matches: list[int] = []
        for step, position in zip(request.steps, request.engine_steps, strict=True):
            before = len(out)
            out += vocabulary.text(step.output())
            if text in out[max(before - len(text) + 1, 0) :]:
                matches.append(position)
        return matches

    def action_copy_reference(self) -> None:
        """Put what `specscope open` shows at this step into the clipboard."""
        current = self._standing.current
        part = self.viewer.history.part(current or "", self.viewer.position)
        if part is None:
            self._say(f"{current} has no step yet" if current else "there is no step to copy")
            return
        reference = f"{self._standing.reference}#{current}@{part[1].index}"
        plain = reference.replace("#", "")  # which a shell takes as it is inside of a word
        reference = reference if shell_word(plain) == plain else shell_word(reference)
        self._app.copy_to_clipboard(reference)
        self._say(f"copied {reference}")

    def action_next_engine(self) -> None:
        """Show the next of the engines that send spans here."""
        following = getattr(self.viewer.control, "next_engine", None)
        if following is None:
            self._say("there is one engine: specscope watch --listen shows several")
            return
        following()
        self._standing.show()

    def action_console(self) -> None:
        self._app.push_screen(DebugPrompt(self._standing.talk, self.debug_line, Commands(Session()).complete))

    def debug_line(self, line: str) -> None:
        """Give the debugger a line; a live engine answers when it can."""
        self._standing.playing = False
        self.viewer.debug(line, (self._standing.current or "") if self._standing.picked else "")
        while self.viewer.news:
            self._hear(self.viewer.news.popleft())
        self._standing.show()

    def action_ask_breakpoint(self) -> None:
        def add(text: str) -> None:
            known = text.split()[:1] in (["break"], ["watch"], ["b"])
            if text.strip():
                self.debug_line(text.strip() if known else f"break {text.strip()}")

        self._ask("Stop at EVENT [if EXPR], or watch EXPR", "reject if depth == 1 and p < 0.1", add)

    def _engine(self, what: str) -> Control | None:
        """The engine; without one, None and a notice why."""
        if self.viewer.engine is None:
            why = "the engine has ended" if not self.viewer.live else "this screen only listens to the engine"
            why = "this is a capture" if self.viewer.control is None else why
            self._say(f"{what}: {why}")
        return self.viewer.engine

    def action_ask_prompt(self) -> None:
        if self._engine("no new prompts") is None:
            return

        def submit(text: str) -> None:
            control = self._engine("no new prompts") if text else None
            if control is not None:
                control.ask("submit", text)
                self._standing.pending.submit(text, self.viewer.history)
                self._say("queued: it starts with the next step" if self.viewer.paused else "submitted")
                self._standing.show()

        self._ask("New prompt", "text for the model to continue or answer", submit)

    def action_cancel(self) -> None:
        control = self._engine("nothing to cancel")
        request = self._standing.request() if control is not None else None
        if control is None or request is None:
            return
        if request.end is not None:
            self._say(f"{request.id} has already ended ({request.state})")
        else:
            control.ask("cancel", request.id)
            self._standing.pending.cancels.add(request.id)
            when = "will be cancelled by the next step" if self.viewer.paused else "is cancelled"
            self._say(f"{request.id} {when}")
            self._standing.show()
