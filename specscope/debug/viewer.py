"""Viewer: a history, and with a live engine the means to run it.

The screens know this and nothing else; replay gives a history alone, a live run adds a control.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from specscope.debug.answers import Answer, News, Notice
from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.commands import Commands
from specscope.debug.forked import Forked
from specscope.debug.session import Session
from specscope.debug.views import NodeView
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.record.records import RequestStep

if TYPE_CHECKING:
    from specscope.trace.wire.reading import CaptureReader

NOTICES = 100  # news that wait to be shown
READ_SECONDS = 0.08  # of reading between two looks at the keyboard
Verb = Literal["pause", "resume", "step", "debug", "look", "submit", "cancel", "watch", "stop"]


class Control:
    """An engine on the screen, in a worker process or one elsewhere, which can only be watched and refuses to obey."""

    obeys = False  # whether it takes commands
    counts_only = False  # how the screen is laid out before anything has been reported

    def __init__(self) -> None:
        self.news: deque[News] = deque(maxlen=NOTICES)  # the oldest first; the viewer takes them out
        self.points: tuple[BreakpointInfo, ...] = ()  # its breakpoints
        self.forked: Forked | None = None  # the last fork that it ran
        self.node_view: NodeView | None = None  # the last answer to `look`
        self.asked: tuple[str, ...] = ()  # the prompts that it was started with
        self.error = ""  # why it failed; empty where it did not
        self.log: Sequence[str] = ()  # its last lines, where it was started for this screen

    def poll(self, history: History) -> None:
        """Move what the engine has published into the history. Never blocks."""
        raise NotImplementedError

    def ask(self, verb: Verb, value: Any = None) -> None:  # noqa: ANN401
        """Pause before the next step, resume, run one step, submit a prompt, or cancel a request by its name.

        debug: a line, and the number of the step in view where that is not the last. look: the distributions behind
        (step, request, node), None for the final token; the answer comes in `node_view`, a refusal in `news`.
        """
        self.news.append(Notice("this engine runs elsewhere: it can be watched, but not controlled"))

    def close(self) -> None:
        """End it, or stop listening."""

    @property
    def status(self) -> str:
        """`loading`, `running`, `paused`, `idle`, `attached` or `ended`."""
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """While loading: a line for each stage; before an engine is heard, what is waited for."""
        return ""


@dataclass
class Viewer:
    """One run on the screen. `position` indexes `history.steps`; it follows the newest step while `follow`."""

    history: History = field(default_factory=History)
    control: Control | None = None  # None over a capture
    reader: CaptureReader | None = None  # None over a live engine
    position: int = -1
    follow: bool = True
    news: deque[News] = field(default_factory=deque)  # to be shown once; the screen takes them out
    typical: Callable[[RequestStep, int], Sequence[str]] = lambda part, node: ()  # Session.typical: a screen puts it
    _commands: Commands | None = None  # over a capture; a live engine has its own
    _before_first: bool = False  # whether the debugger stands before the first step, which the screen shows

    def debug(self, line: str, request: str = "") -> None:
        """Send the debugger a line: the live engine's, or one over the history. Its answer arrives in `news`.

        `request`: the one that was chosen on the screen; "" for none.
        """
        if self._commands is None:
            self._commands = Commands(Session(history=self.history))
            self._commands.session.typical = self.typical
        if (engine := self.engine) is not None:
            with suppress(UserError):  # the engine's debugger reports unknown commands
                command = self._commands.command_of(line)
                self.follow = self.follow or not (command is None or command.passive or command.looks)
            steps, last = self.history.steps, len(self.history.steps) - 1
            engine.ask("debug", (line, steps[self.position].step if 0 <= self.position < last else None, request))
            return
        session = self._commands.session
        if not self._before_first:
            session.position = self.position
        try:
            self.news.append(self._commands.answer(line, request=request))
        except UserError as error:
            self.news.append(Answer(line, str(error)))
        except Exception as error:  # a typed line must not end the screen
            self.news.append(Answer(line, f"the debugger failed: {type(error).__name__}: {error}"))
        if session.position != self.position:
            self.goto(session.position)
            self._before_first = session.position < 0

    def view_node(self, request: str, node: int | None) -> bool:
        """Ask for the distributions behind a node of a request's step at the position; None: the final token.

        The answer arrives in `node_view`. False where there is no engine to ask, or no such step.
        """
        part, engine = self.history.part(request, self.position), self.engine
        if part is None or engine is None:
            return False
        position = self.history.requests[request].engine_steps[part[0]]
        engine.ask("look", (self.history.steps[position].step, request, node))
        return True

    @property
    def node_view(self) -> NodeView | None:
        """The last answer to `view_node`; it says of which step and node it is."""
        return None if self.control is None else self.control.node_view

    @property
    def points(self) -> tuple[BreakpointInfo, ...]:
        if self.engine is not None:
            return self.engine.points
        return () if self._commands is None else self._commands.session.breakpoints.shown()

    def show(self, history: History) -> None:
        self.history, self._commands = history, None
        self.goto_end()

    @staticmethod
    def over(reader: CaptureReader) -> Viewer:
        """A viewer over a capture, which may still have more to read."""
        viewer = Viewer(history=reader.history, reader=reader)
        viewer._warn()
        return viewer

    def _warn(self) -> None:
        if self.reader is not None and self.reader.done and self.reader.warnings:
            self.news.append(Notice("\n".join(self.reader.warnings)))

    @property
    def reading(self) -> bool:
        return self.reader is not None and not self.reader.done

    @property
    def read_so_far(self) -> tuple[float, int | None] | None:
        """While a capture is read: the share of it, 0 to 1, and the seconds that are left where they can be told."""
        if self.reader is None or self.reader.done:
            return None
        left = self.reader.seconds_left
        return round(self.reader.progress, 2), None if left is None else math.ceil(left)

    @property
    def live(self) -> bool:
        return self.control is not None and self.control.status != "ended"

    @property
    def engine(self) -> Control | None:
        """The engine, where there is one that takes commands."""
        return self.control if self.control is not None and self.live and self.control.obeys else None

    @property
    def paused(self) -> bool:
        return self.control is not None and self.control.status == "paused"

    def poll(self) -> None:
        """Take in what is new."""
        gone = self.history.gone
        if self.control is not None:
            self.control.poll(self.history)
        while self.control is not None and self.control.news:
            self.news.append(self.control.news.popleft())
        self.position = max(self.position - (self.history.gone - gone), min(self.position, 0))
        self.position = min(self.position, len(self.history.steps) - 1)  # steps may have been taken back
        if self.reader is not None and not self.reader.done:
            self.reader.read(READ_SECONDS)
            self._warn()
            if self.position >= 0 and not self.reader.done:
                return  # stay where the first piece ended: following the reading would cost more than it
        if self.follow:
            self.position = len(self.history.steps) - 1

    def toggle_pause(self) -> None:
        """Pause or go on; over a capture, stop or start following its end."""
        if self.control is None or not self.live:
            self.follow = not self.follow
        elif self.paused:
            self.control.ask("resume")
            self.follow = True
        else:
            self.control.ask("pause")

    def forward(self) -> None:
        """The next step: of the history, or of the paused engine where the history ends."""
        if self.position < len(self.history.steps) - 1:
            self.goto(self.position + 1)
        elif self.control is not None and self.live:
            self.follow = True
            self.control.ask("step")

    def goto(self, position: int) -> None:
        """Show the step at `position` (kept within the history) and stay there."""
        self.position = max(min(position, len(self.history.steps) - 1), 0 if self.history.steps else -1)
        self.follow = self._before_first = False

    def goto_end(self) -> None:
        self.position = len(self.history.steps) - 1
        self.follow, self._before_first = True, False
