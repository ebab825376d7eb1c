"""An engine in a process of its own, that publishes records and obeys commands.

A screen and an engine written in Python would fight for the interpreter lock in one process. So the engine runs
here, behind a pipe: records come out, commands go in, and the screen is up while the model still loads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from specscope.debug.breakpoints import Point
from specscope.debug.commands import Commands, find
from specscope.debug.forked import Forked
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec
from specscope.engine.start import start_engine
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.lifetime import end_with_parent
from specscope.trace.bus import Bus
from specscope.trace.history import History
from specscope.trace.params import SamplingParams
from specscope.trace.records import RunInfo, StepRecord
from specscope.trace.vocabulary import Vocabulary

if TYPE_CHECKING:
    from specscope.engine.engine import Engine


@dataclass(frozen=True)
class Ready:
    """The engine has loaded. Sent once."""

    run: RunInfo
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Word:
    """A line of news from the worker."""

    kind: str  # loading (text: the stage), status (text: running, paused, idle), refused or failed (text: why), said
    text: str


@dataclass(frozen=True)
class Rewound:
    """The engine went back: only the first `count` steps are any more."""

    count: int


@dataclass(frozen=True)
class Points:
    """The debugger's breakpoints, whenever they or their hits have changed."""

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Command:
    """What the parent asks."""

    verb: str  # submit, cancel, pause, resume, step, debug, watch, stop
    value: Any = None


class _Server:
    """The worker's side: one loop that obeys commands and steps the engine."""

    def __init__(self, commands: Connection, news: Connection, paused: bool) -> None:
        self.commands, self.news = commands, news
        self.lock = threading.Lock()  # records are sent from the bus's thread, news from the main one
        self.paused = paused
        self.ending = False  # after SIGTERM
        self.single = 0  # steps to run although paused
        self.status = ""
        self.sent = -1  # the last step whose record was sent
        self.points: tuple[Point, ...] = ()  # as they were sent last
        self.hits = 0  # of all of them, after the last step

    def send(self, message: object) -> None:
        with self.lock:
            self.news.send(message)

    def run(self, config: EngineConfig, prompts: Sequence[PromptSpec]) -> None:
        engine = start_engine(config, lambda stage: self.send(Word("loading", stage)))
        signal.signal(signal.SIGTERM, self._end)
        from specscope.engine.local import commands_over  # it needs torch, which is there only now

        self.send(Ready(engine.run_info, engine.vocabulary))
        self._watch(engine, True)
        commands = commands_over(engine)
        commands.many_lines = False
        session = commands.session
        session.on_step = lambda record: self._stepped(engine, record)
        session.on_rewind = lambda count: self._rewound(engine, count)
        session.interrupted = self.commands.poll
        for spec in prompts:
            self._submit(engine, spec)
        try:
            while self._obey(engine, commands):
                if engine.busy and (not self.paused or self.single):
                    self.single = max(self.single - 1, 0)
                    self._advance(commands)
            engine.cancel_all()
            while engine.busy:
                engine.step()
        finally:
            engine.close()

    def _advance(self, commands: Commands) -> None:
        """One step; at a breakpoint the engine pauses, and says why."""
        stop = commands.session.next()
        if stop.hits:
            self.paused, self.single = True, 0
            self.send(Word("said", commands.stopped(stop)))
        hits = sum(point.hits for point in commands.session.breakpoints.points.values())
        if stop.hits or hits != self.hits:  # hits that are let pass count as well
            self.hits = hits
            self._send_points(commands)

    def _stepped(self, engine: Engine, record: StepRecord) -> None:
        """The bus sends what is new; what comes again after going back is sent from here, behind all that was."""
        if record.step > self.sent:
            self.sent = record.step
        else:
            engine.bus.flush()
            self.send(record)

    def _rewound(self, engine: Engine, count: int) -> None:
        engine.bus.flush()
        self.send(Rewound(count))

    def _obey(self, engine: Engine, commands: Commands) -> bool:
        """Take all waiting commands; wait for one where there is nothing to do. False when told to stop."""
        idle = not engine.busy or (self.paused and not self.single)
        status = "paused" if self.paused else "running" if engine.busy else "idle"
        if status != self.status:
            self.status = status
            self.send(Word("status", status))
        while not self.ending and self.commands.poll(0.1 if idle else 0):
            idle = False
            command: Command = self.commands.recv()
            if command.verb == "stop":
                return False
            self._do(engine, commands, command)
        return not self.ending

    def _debug(self, commands: Commands, line: str) -> None:
        """A line of the debugger's. What moves or looks leaves the engine standing; what keeps books lets it run."""
        try:
            books, words = commands.keeps_books(line), line.split()
            if words and not books and find(words[0]).name == "continue":
                self.paused = False
                return
            if not books:
                self.paused, self.single = True, 0
            before = commands.forked
            self.send(Word("said", commands.run(line)))
            if commands.forked is not None and commands.forked is not before:
                self.send(commands.forked)
        except UserError as error:
            self.send(Word("said", str(error)))
        except Exception as error:  # a line that was typed must not end the run
            self.send(Word("said", f"the debugger failed: {type(error).__name__}: {error}"))
        self._send_points(commands)

    def _send_points(self, commands: Commands) -> None:
        points = commands.session.breakpoints.shown()
        if points != self.points:
            self.points = points
            self.send(Points(points))

    def _do(self, engine: Engine, commands: Commands, command: Command) -> None:
        if command.verb == "debug":
            self._debug(commands, command.value)
        elif command.verb == "submit":
            self._submit(engine, command.value)
        elif command.verb == "cancel":
            engine.cancel(command.value)
        elif command.verb == "step":
            self.single += 1
        elif command.verb == "watch":
            self._watch(engine, command.value)
        else:
            self.paused = command.verb == "pause"

    def _submit(self, engine: Engine, spec: PromptSpec) -> None:
        try:
            engine.add(engine.turn(spec.prompt, raw=spec.raw), spec.params, labels=spec.labels)
        except UserError as error:
            self.send(Word("refused", str(error)))

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.ending = True

    def _watch(self, engine: Engine, wanted: bool) -> None:
        """Send records, or stop sending them: an engine that nobody watches runs as if alone."""
        engine.bus.close()
        if wanted:
            engine.subscribe(self.send, lossless=True)


def serve(
    commands: Connection, news: Connection, config: EngineConfig, prompts: Sequence[PromptSpec], paused: bool
) -> None:
    """The worker process's main function."""
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # while it loads
    server = _Server(commands, news, paused)
    try:
        server.run(config, prompts)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except UserError as error:
        server.send(Word("failed", str(error)))
    except Exception as error:
        server.send(Word("failed", f"the engine failed: {type(error).__name__}: {str(error).splitlines()[:1]}"))
    news.close()
    os._exit(0)  # an interpreter that holds torch takes a second to take down, and there is nothing left to save


class Worker:
    """The parent's side; implements debug.viewer.Control.

    Records are also published on `bus`, whose sinks are opened and closed by whoever gave `on_ready`.
    """

    def __init__(
        self,
        config: EngineConfig,
        prompts: list[PromptSpec],
        params: SamplingParams,
        *,
        raw: bool = False,
        paused: bool = False,
        on_ready: Callable[[Ready], None] = lambda _: None,
    ) -> None:
        self.bus = Bus()
        self.obeys = True
        self.ready: Ready | None = None
        self.notices: deque[str] = deque()  # refusals, for the screen to show
        self.said: deque[str] = deque()  # what the debugger says
        self.points: tuple[Point, ...] = ()  # its breakpoints
        self.forked: Forked | None = None  # the last fork that it ran
        self._published = -1  # the last step that went to the bus
        self._params = params
        self._raw = raw
        self._on_ready = on_ready  # called on the reader's thread before the first record; opens sinks on the bus
        self._status = "loading"
        self._stage = "starting"
        self._error = ""
        self._records: deque[StepRecord | Rewound] = deque()
        context = multiprocessing.get_context("spawn")
        # Two pipes of one way each: a socket that is closed with commands unread would lose the records behind it.
        commands, self._commands = context.Pipe(duplex=False)
        self._news, news = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(commands, news, config, prompts, paused), daemon=True)
        with ignore_terminal():
            self._process.start()
        commands.close()
        news.close()
        self._reader = threading.Thread(target=self._read, name="specscope-worker-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Drain the pipe at once, so that a slow screen never slows the engine."""
        try:
            while True:
                message = self._news.recv()
                if isinstance(message, Rewound):
                    self._records.append(message)
                elif isinstance(message, StepRecord):
                    self._records.append(message)
                    if message.step > self._published:  # what comes again was recorded the first time
                        self._published = message.step
                        self.bus.publish(message)
                elif isinstance(message, Points):
                    self.points = message.points
                elif isinstance(message, Forked):
                    self.forked = message
                elif isinstance(message, Ready):
                    self._on_ready(message)
                    self.ready = message
                else:
                    self._hear(message)
        except (EOFError, OSError):
            self._process.join(5)
            if not self._error and self._process.exitcode != 0:
                self._error = f"the engine's process ended with code {self._process.exitcode}"
        except UserError as error:
            self._error = str(error)
            self._send("stop")
        self._status = "ended"

    def _hear(self, word: Word) -> None:
        if word.kind == "loading":
            self._stage = word.text
        elif word.kind == "status":
            self._status = word.text
        elif word.kind == "refused":
            self.notices.append(word.text)
        elif word.kind == "said":
            self.said.append(word.text)
        else:
            self._error = word.text

    def _send(self, verb: str, value: object = None) -> None:
        try:
            self._commands.send(Command(verb, value))
        except (OSError, ValueError):
            self._status = "ended"

    def poll(self, history: History) -> bool:
        """Move new records into the history; True where there were any."""
        changed = False
        if history.run is None and self.ready is not None:
            history.run, history.vocabulary = self.ready.run, self.ready.vocabulary
            changed = True
        while self._records and history.run is not None:
            record = self._records.popleft()
            if isinstance(record, Rewound):
                history.truncate(record.count)
            else:
                history.append(record)
            changed = True
        history.dropped = self.bus.dropped
        return changed

    def pause(self) -> None:
        """Stop before the next step."""
        self._send("pause")

    def resume(self) -> None:
        """Go on."""
        self._send("resume")

    def step(self) -> None:
        """Run one step, then stay paused."""
        self._send("step")

    def debug(self, line: str) -> None:
        """A line for the debugger; the answer comes in `said`."""
        self._send("debug", line)

    def submit(self, prompt: str, params: SamplingParams | None = None) -> None:
        """Add a request; a refusal comes back in `notices`."""
        self._send("submit", PromptSpec(prompt, params or self._params, raw=self._raw))

    def cancel(self, request: str) -> None:
        """End a request."""
        self._send("cancel", request)

    def watch(self, wanted: bool) -> None:
        """Ask for records, or for none."""
        self._send("watch", wanted)

    def close(self) -> None:
        """End the worker. A running engine ends its requests first, and their ends are on the bus after this."""
        if self.ready is None:
            self._process.terminate()  # it loads, and hears nothing until it has
        self._send("stop")
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        self._reader.join(5)

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return self._process.pid

    @property
    def status(self) -> str:
        """`loading`, `running`, `paused`, `idle` or `ended`."""
        return self._status

    @property
    def progress(self) -> tuple[str, float | None]:
        """While loading: the stage."""
        return self._stage, None

    @property
    def error(self) -> str:
        """Why it ended, where it ended badly."""
        return self._error
