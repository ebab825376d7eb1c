"""A debugger of the served engine: it stops between two steps, and clients wait. The socket is remote/'s.

While nobody is attached the engine keeps only its last records, within a limit in bytes. An attached debugger lets it
run until the first command that steps or inspects; `continue` runs to a breakpoint or Ctrl-C; when it detaches, the
engine runs on.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specscope.debug.answers import Stop, StopReason
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.remote.debug_socket import DebugServer
from specscope.serve.engine_thread import EngineThread
from specscope.trace.history.history import KEPT, History, RecentSteps
from specscope.trace.record.privacy import Privacy, strip
from specscope.trace.record.records import StepRecord
from specscope.trace.record.vocabulary import Vocabulary

if TYPE_CHECKING:
    from specscope.engine.timeline import Timeline


class ServedSession(Session):
    """A session that begins while the engine runs."""

    def pause(self) -> Stop:
        return self._stop(StopReason.STEP)


class ServedCommands(Commands):
    """A debugger's lines, each run on the engine's thread."""

    def __init__(self, debugger: ServedDebugger) -> None:
        from specscope.live.local import EngineWhatIf

        engine = debugger.thread.engine
        vocabulary = Vocabulary() if debugger.privacy else engine.vocabulary
        run = replace(engine.run_info, privacy=debugger.privacy)
        history = History(run=strip(run, run.privacy), vocabulary=vocabulary, limit=KEPT)
        for record in debugger.recent:
            history.append(record)
        session = ServedSession(history, debugger)
        super().__init__(session, EngineWhatIf(engine))
        session.interrupted = lambda: debugger.interrupted
        self._debugger = debugger

    def run(self, line: str) -> str:
        """The output of a command. The first command that is not passive stops the engine."""
        return self._debugger.thread.call(lambda: self._run_here(line)).result()

    def _run_here(self, line: str) -> str:
        debugger = self._debugger
        debugger.asked = False
        command = self.command_of(line)
        if command is not None and not command.passive:
            debugger.thread.held = True
        debugger.driven = True
        try:
            return super().run(line)
        finally:
            debugger.driven = False


class ServedDebugger:
    """What remote/debug_socket.py needs of a gate; and the engine as a debugger steps it (debug.session.Steppable):
    requests come and answers go meanwhile.
    """

    def __init__(self, thread: EngineThread, privacy: Privacy) -> None:
        self.thread, self.privacy = thread, privacy
        self.lock = threading.RLock()
        self.recent = RecentSteps(KEPT)
        self.asked = False  # whether the running command is to end
        self.driven = False  # whether a command is running: it appends to its history itself
        self._closed = True
        self._session: Session | None = None

    @property
    def withholds(self) -> bool:
        """Whether token ids are withheld."""
        return self.privacy >= Privacy.NO_TOKENS

    @property
    def interrupted(self) -> bool:
        """Whether a command is to stop waiting."""
        return self.asked or self._closed

    def told(self, record: StepRecord) -> None:
        """Take in a step that has run. Called on the engine's thread."""
        shown = self.shown(record)
        self.recent.append(shown)
        if self._session is not None and not self.driven:
            self._session.history.append(shown)

    def shown(self, record: StepRecord) -> StepRecord:
        """A record as a debugger sees it."""
        return strip(record, self.privacy)

    @property
    def steps(self) -> int:
        return self.thread.engine.steps

    @property
    def current(self) -> Any:  # noqa: ANN401
        """What exists so far of a step that was begun."""
        return None if self.withholds else self.thread.engine.current

    @property
    def busy(self) -> bool:
        """Whether there is something to run; waits for a request until interrupted."""
        return self.thread.wait_for_work(lambda: self.interrupted)

    def step(self) -> StepRecord:
        return self.shown(self.thread.advance())

    def phase(self) -> StepRecord | None:
        """Run one phase; a whole step where the state between two phases must not be seen."""
        if self.withholds:
            return self.step()
        record = self.thread.engine.phase()
        if record is not None:
            self.thread.tell(record)
        return None if record is None else self.shown(record)

    def rewind(self, step: int) -> None:
        """Go back. What clients have been sent stays sent; what is produced again is not sent again."""
        self.thread.engine.rewind(step)

    def keep_timeline(self) -> Timeline:
        """Keep what is needed to go back."""
        return self.thread.engine.keep_timeline()

    def commands(self) -> Commands:
        """The commands for one client, from now on."""

        def made() -> Commands:
            commands = ServedCommands(self)
            self._session = commands.session
            return commands

        return self.thread.call(made).result()

    def open(self) -> None:
        self._closed = self.asked = False

    def interrupt(self) -> None:
        self.asked = True

    def close(self) -> None:
        self._closed = True
        self.thread.call(self._release)

    def _release(self) -> None:
        if not self._closed:
            return  # another client has connected
        self.thread.held, self._session = False, None
        engine = self.thread.engine
        timeline = engine.timeline
        if timeline is not None and not (timeline.undone or timeline.ahead or timeline.rewound or timeline.branch):
            engine.timeline = engine.last = None  # nothing needs it any more, and it grows


def listen(path: str, thread: EngineThread, privacy: Privacy) -> tuple[ServedDebugger, DebugServer]:
    """Accept debuggers on a Unix socket that only this user can open. Raises OSError."""
    debugger = ServedDebugger(thread, privacy)

    def greeting() -> str:
        engine = thread.engine
        running = f"the engine is running, step {engine.steps} is next"
        line = f"serving {engine.run_info.target}; {running}: pause stops it"
        if engine.pipeline is None:
            return line
        return f"{line}; the step already launched is finished, and steps now run one at a time"

    server = DebugServer(Path(path), debugger, greeting, debugger.commands)
    return debugger, server
