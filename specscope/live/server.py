"""An engine in a process of its own, that publishes records and obeys commands.

A screen and an engine written in Python would fight for the interpreter lock in one process. So the engine runs
here, behind a pipe: records come out, commands go in, and the screen is up while the model still loads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from specscope.debug.answers import Answer, LookRefused, News, Notice, PromptRefused
from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.commands import Commands, goes_on_text
from specscope.debug.session import Session
from specscope.debug.viewer import Verb
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.errors import UserError
from specscope.lifetime import end_with_parent
from specscope.live.start import start_engine
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import Vocabulary

if TYPE_CHECKING:
    from specscope.engine.engine import Engine


# What the process and its parent say to each other, over one pipe each way. From the engine come a stage of its start
# as text, Ready once, EngineState, the bus's records, debug.answers.News, Forked and NodeView; last, a UserError where
# it failed.
Command = tuple[Verb, Any]  # of the parent


@dataclass(frozen=True)
class Ready:
    run: RunInfo
    vocabulary: Vocabulary


@dataclass(frozen=True)
class EngineState:
    """Whenever it changes."""

    status: str  # running, paused or idle
    points: tuple[BreakpointInfo, ...]  # the debugger's breakpoints, with their hits


class _Server:
    """The worker's side: one loop that obeys commands and steps the engine."""

    engine: Engine
    debugger: Commands
    session: Session

    def __init__(self, commands: Connection, news: Connection, paused: bool) -> None:
        self.commands, self.news = commands, news
        self.lock = threading.Lock()  # records are sent from the bus's thread, news from the main one
        self.paused = paused
        self.ending = False  # after SIGTERM
        self.single = 0  # steps to run although paused
        self.waiting: deque[Command] = deque()  # commands that were received before their turn
        self.state: EngineState | None = None  # as it was sent last

    def send(self, message: object) -> None:
        with self.lock:
            self.news.send(message)

    def load(self, config: EngineConfig) -> None:
        from tqdm import tqdm

        # Before a library draws a bar: tqdm's own lock would be a named semaphore, which Python's resource tracker
        # warns of where a process ends at once
        tqdm.set_lock(threading.RLock())
        engine = start_engine(config, self.send)
        signal.signal(signal.SIGTERM, self._end)
        from specscope.live.local import commands_over  # it needs torch, which is there only now

        self.send(Ready(engine.run_info, engine.vocabulary))
        self.debug_with(engine, commands_over(engine))
        self._watch(True)

    def debug_with(self, engine: Engine, debugger: Commands) -> None:
        self.engine, self.debugger, self.session = engine, debugger, debugger.session
        self.session.interrupted = lambda: bool(self.waiting) or self.commands.poll()
        debugger.what_if.interrupted = self._is_told_to_end

    def _is_told_to_end(self) -> bool:
        """Whether an end waits among the commands, which come while a fork runs."""
        while self.commands.poll():
            self.waiting.append(self.commands.recv())
        return self.ending or any(verb == "stop" for verb, _ in self.waiting)

    def run(self, prompts: Sequence[PromptSpec]) -> None:
        for spec in prompts:
            self._submit(spec)
        try:
            while self._obey():
                if self.engine.busy and (not self.paused or self.single):
                    self.single = max(self.single - 1, 0)
                    self.advance()
            self.engine.cancel_all()
            while self.engine.busy:
                self.engine.step()
        finally:
            self.engine.close()

    def advance(self) -> None:
        """Run one step; at a breakpoint the engine pauses and says why."""
        stop = self.session.advance()
        if stop is not None:
            self.paused, self.single = True, 0
            self.debugger.reach(stop)
            self._tell(stop)

    def _tell(self, news: News) -> None:
        """Send news that may be about a step, after that step's record."""
        self.engine.bus.flush()
        self.send(news)

    def _obey(self) -> bool:
        """Take all waiting commands; wait for one where there is nothing to do. False when told to stop."""
        idle = not self.engine.busy or (self.paused and not self.single)
        status = "paused" if self.paused else "running" if self.engine.busy else "idle"
        state = EngineState(status, self.session.breakpoints.shown())
        if state != self.state:
            self.state = state
            self.send(state)
        while not self.ending and (self.waiting or self.commands.poll(0.1 if idle else 0)):
            idle = False
            command: Command = self.waiting.popleft() if self.waiting else self.commands.recv()
            if command[0] == "stop":
                return False
            self._do(*command)
        return not self.ending

    def _do(self, verb: Verb, value: Any) -> None:  # noqa: ANN401
        match verb:
            case "debug":
                self._debug(*value)
            case "look":
                self._look(*value)
            case "submit":
                self._submit(value)
            case "cancel":
                self.engine.cancel(value)
            case "step":
                self.single += 1
            case "watch":
                self._watch(value)
            case _:
                self.paused = verb == "pause"

    def _debug(self, line: str, viewed: int | None = None, request: str = "") -> None:
        """A line for the debugger. One that moves or looks pauses the engine; others let it run."""
        with self._answering(lambda why: Answer(line, why)):
            command = self.debugger.command_of(line)
            if command is not None and command.name == "continue":
                self.paused = False
                if viewed is not None:
                    self.send(Notice(goes_on_text(self.session.history.last_step, viewed)))
                return
            if command is not None and not command.passive:
                self.paused, self.single = True, 0
            before = self.debugger.forked
            self._tell(self.debugger.answer(line, viewed, request))
            if self.debugger.forked is not None and self.debugger.forked is not before:
                self.send(self.debugger.forked)

    @contextmanager
    def _answering(self, refused: Callable[[str], News]) -> Iterator[None]:
        """Refuse a question that cannot be answered: it must not end the run."""
        try:
            yield
        except UserError as error:
            self.send(refused(str(error)))
        except Exception as error:
            self.send(refused(f"the debugger failed: {type(error).__name__}: {error}"))

    def _look(self, step: int, request: str, node: int | None) -> None:
        """Answer with a NodeView, wherever the engine is. It goes on as it was."""
        with self._answering(lambda why: LookRefused(step, request, node, why)):
            self.send(self.debugger.what_if.look(self.session, step, request, node))

    def _submit(self, spec: PromptSpec) -> None:
        try:
            self.engine.add_spec(spec)
        except UserError as error:
            self.send(PromptRefused(str(error)))

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ending = True

    def _watch(self, wanted: bool) -> None:
        """Start or stop sending records: an engine that nobody watches runs as if alone."""
        self.engine.bus.close()
        self.engine.verifier.notes = wanted and self.engine.run_info.evidence == "full"
        if wanted:
            self.engine.bus.subscribe(self.send, lossless=True, moves=True)


def serve(
    commands: Connection,
    news: Connection,
    output: Connection,
    config: EngineConfig,
    prompts: Sequence[PromptSpec],
    paused: bool,
) -> None:
    """The worker process's main function. `output`: where what libraries print goes."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # while it loads
    server = _Server(commands, news, paused)
    try:
        server.load(config)
        server.run(prompts)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except UserError as error:
        server.send(UserError(str(error)))
    except Exception as error:
        server.send(UserError(f"the engine failed: {type(error).__name__}: {str(error).splitlines()[:1]}"))
    news.close()
    os._exit(0)  # an interpreter that holds torch takes a second to take down, and there is nothing left to save
