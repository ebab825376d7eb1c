"""The parent's side of an engine in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specscope.debug.answers import Answer, LineRefused, LookRefused, News, Notice, PromptRefused, Stopped
from specscope.debug.breakpoints import BreakpointInfo
from specscope.debug.forked import Forked
from specscope.debug.views import NodeView
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import NO_KWARGS, PromptSpec
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.live.messages import BreakpointList, Command, Failed, LastOutput, Loading, Ready, Status
from specscope.live.server import serve
from specscope.model.places import on_disk
from specscope.trace.checked import decoded
from specscope.trace.history.history import KEPT, History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Moved, StepRecord
from specscope.trace.wire.bus import Bus
from specscope.user_cache import LARGEST, place, store

# How far an engine has loaded, and how long it still takes: stage by stage, as last time on this machine. No torch.

USUAL = {"starting": 4.0, "loading": 6.0, "measuring": 12.0, "converting": 20.0, "compiling": 10.0, "capturing": 20.0}
COMING = ("starting", "loading")  # the stages of every start
READ = 3e8  # bytes of weights that are read in a second
ONCE = "once"  # marks, in its text, a stage that does not come back
LATE = 0.99  # shown while a stage takes longer than it should


class LoadClock:
    """Is told each stage as it begins. The stages' durations are kept for the next start of the same engine."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        names = ("target", "drafter", "draft_model", "dtype", "device", "backend", "graphs")
        about = {name: str(getattr(config, name)).rpartition("/")[2] for name in names}  # a model by its folder's name
        self._file = place("loading", about)
        self._last = self._read()  # seconds of each stage
        self._weights = 0.0 if self._last else weights_of(config)
        self._took: dict[str, float] = {}
        self._stage = "starting"
        self._began = self._stage_began = clock()

    def _read(self) -> Mapping[str, float]:
        with suppress(OSError, ValueError):
            if self._file.stat().st_size <= LARGEST:
                return decoded(self._file.read_bytes(), dict[str, float])
        return {}

    def enter(self, stage: str) -> None:
        """A stage begins; what follows a colon in its text is how far it is."""
        if _name(stage) != _name(self._stage):
            self._end()
        self._stage = stage

    def done(self) -> None:
        """The engine has loaded."""
        self._end()
        with suppress(OSError):
            store(self._file, {name: took for name, took in self._took.items() if ONCE not in name.split()})

    def _end(self) -> None:
        now = self._clock()
        name = _name(self._stage)
        self._took[name] = round(self._took.get(name, 0.0) + now - self._stage_began, 2)
        self._stage_began = now

    @property
    def progress(self) -> tuple[str, float, int | None]:
        """The stage, the share of the whole that is done, and the seconds that are left; None where it is late."""
        now, current = self._clock(), _name(self._stage)
        left = max(self._expected(current) - (now - self._stage_began), 0.0)
        passed = {*self._took, current}
        if self._last:
            left += sum(took for name, took in self._last.items() if name not in passed)
        else:
            kinds = {name.split()[0] for name in passed}
            left += sum(self._expected(kind) for kind in COMING if kind not in kinds)
        spent = now - self._began
        share = min(spent / (spent + left), LATE) if spent + left > 0 else 0.0
        return self._stage, round(share, 2), math.ceil(left) or None

    def _expected(self, name: str) -> float:
        """The expected seconds of a stage."""
        kind = name.split()[0]
        return self._last.get(name, USUAL.get(kind, 1.0) + (self._weights / READ if kind == "loading" else 0.0))


def weights_of(config: EngineConfig) -> float:
    """Bytes of the target's weights, where they are on this machine; the default model's are few."""
    with suppress(OSError):
        path = None if config.target is None else on_disk(config.target)
        if path is not None:
            files = [path] if path.is_file() else [*path.glob("*.safetensors")]
            return float(sum(file.stat().st_size for file in files))
    return 0.0


def _name(stage: str) -> str:
    return stage.partition(":")[0]


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
        template: Mapping[str, Any] = NO_KWARGS,
        paused: bool = False,
        on_ready: Callable[[Ready], None] = lambda _: None,
    ) -> None:
        self.bus = Bus()
        self.obeys = True
        self.ready: Ready | None = None
        self.news: deque[News] = deque()  # for the screen to show
        self.points: tuple[BreakpointInfo, ...] = ()  # its breakpoints
        self.forked: Forked | None = None  # the last fork that it ran
        self.node_view: NodeView | None = None  # the last answer to `look`
        self.log: Sequence[str] = ()  # it has none: what it prints is passed on
        self._params = params
        self._how: Mapping[str, Any] = {"raw": raw, "template": template}  # how prompts become text
        self._on_ready = on_ready  # called on the reader's thread before the first record; opens sinks on the bus
        self._status = "loading"
        self._loading = LoadClock(config)
        self._error = ""
        self._unloaded = False  # whether it was ended before it had loaded
        self._arrived: deque[StepRecord | Moved | News] = deque()  # in order: news may be about a record before it
        context = multiprocessing.get_context("spawn")
        # Two pipes of one way each: a socket that is closed with commands unread would lose the records behind it.
        commands, self._commands = context.Pipe(duplex=False)
        self._news, news = context.Pipe(duplex=False)
        printed, output = context.Pipe(duplex=False)
        arguments = (commands, news, output, config, prompts, paused)
        self._ending = threading.Lock()
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        with ignore_terminal():
            self._process.start()
        commands.close()
        news.close()
        output.close()
        self._output = LastOutput(printed)
        self._reader = threading.Thread(target=self._read, name="specscope-worker-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Drain the pipe at once, so that a slow screen never slows the engine."""
        try:
            while True:
                self._hear(self._news.recv())
        except (EOFError, OSError):
            code = self._wait()
            if not self._error and not self._unloaded and code != 0:
                printed = self._output.last_line()
                self._error = "the engine's process "
                self._error += "does not end" if code is None else f"ended with code {code}"
                self._error += f": {printed}" if printed else ""
        except UserError as error:
            self._error = str(error)
            self._send("stop")
        self._status = "ended"

    def _hear(self, message: object) -> None:
        match message:
            case StepRecord() | Moved():
                self._arrived.append(message)
                self.bus.publish(message)
            case BreakpointList():
                self.points = message.breakpoints
            case Forked():
                self.forked = message
            case NodeView():
                self.node_view = message
            case Loading():
                self._loading.enter(message.stage)
            case Ready():
                self._loading.done()
                self._on_ready(message)
                self.ready = message
            case Status():
                self._status = message.name
            case Failed():
                self._error = message.why
            case Stopped() | Answer() | LineRefused() | LookRefused() | PromptRefused() | Notice():
                self._arrived.append(message)

    def _send(self, verb: str, value: object = None) -> None:
        try:
            self._commands.send(Command(verb, value))
        except (OSError, ValueError):
            self._status = "ended"

    def poll(self, history: History) -> bool:
        """Move new records into the history, and what came with them into `news`; True where there was any."""
        changed = False
        if history.run is None and self.ready is not None:
            history.run, history.vocabulary, history.limit = self.ready.run, self.ready.vocabulary, KEPT
            changed = True
        while self._arrived and history.run is not None:
            message = self._arrived.popleft()
            if isinstance(message, StepRecord | Moved):
                history.take(message)
            else:
                self.news.append(message)
            changed = True
        history.lost = self.bus.lost
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
        """A line for the debugger; the answer comes in `news`."""
        self._send("debug", line)

    def look(self, step: int, request: str, node: int | None) -> None:
        """Ask for a node's distributions; the answer comes in `node_view`."""
        self._send("look", (step, request, node))

    def submit(self, prompt: str, params: SamplingParams | None = None) -> None:
        """Add a request; a refusal comes back in `news`."""
        self._send("submit", PromptSpec(prompt, params or self._params, **self._how))

    def cancel(self, request: str) -> None:
        """End a request."""
        self._send("cancel", request)

    def watch(self, wanted: bool) -> None:
        """Start or stop receiving records."""
        self._send("watch", wanted)

    def close(self) -> None:
        """End the worker. A running engine ends its requests first, and their ends are on the bus after this."""
        if self.ready is None:
            self._unloaded = True
            self._process.terminate()  # it loads, and hears nothing until it has
        self._send("stop")
        if self._wait() is None:
            self._process.kill()
            self._wait()
        self._reader.join(5)

    def _wait(self) -> int | None:
        """The code with which the process ends in the next seconds, None where it does not. One thread at a time: to
        another it would seem to run on, since the system tells of an end only once."""
        with self._ending:
            self._process.join(5)
            return self._process.exitcode

    @property
    def pid(self) -> int | None:
        """The id of the engine's process."""
        return self._process.pid

    @property
    def status(self) -> str:
        """`loading`, `running`, `paused`, `idle` or `ended`."""
        return self._status

    @property
    def progress(self) -> tuple[str, float | None, float | None]:
        """While loading: the stage, the share that is done, the seconds that are left."""
        return self._loading.progress

    @property
    def error(self) -> str:
        """Why it ended, where it ended badly."""
        return self._error
