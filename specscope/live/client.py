"""The parent's side of an engine in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from specscope.debug.answers import Answer, LookRefused, News, Notice, PromptRefused, Stop
from specscope.debug.forked import Forked
from specscope.debug.viewer import Control, Verb
from specscope.debug.views import NodeView
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import NO_KWARGS, PromptSpec
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.live.server import EngineState, Ready, serve
from specscope.live.start import Stages
from specscope.trace.history.history import KEPT, History
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Moved, StepRecord
from specscope.trace.wire.outputs import Bus

KEPT_BYTES = 4096  # of what the process prints


class Worker(Control):
    """The parent's side.

    Records are also published on `bus`, whose sinks are opened and closed by whoever gave `on_ready`.
    """

    obeys = True

    def __init__(
        self,
        config: EngineConfig,
        prompts: list[PromptSpec],
        params: SamplingParams,
        how: Mapping[str, Any] = NO_KWARGS,
        on_ready: Callable[[Ready], None] = lambda _: None,
        *,
        paused: bool = False,
    ) -> None:
        super().__init__()
        self.news = deque()  # none of them is dropped
        self.bus = Bus()
        self.ready: Ready | None = None
        self._params = params
        self.asked = tuple(p.prompt if isinstance(p.prompt, str) else p.prompt[-1]["content"] for p in prompts)
        self._how = how  # prompts become text
        self._on_ready = on_ready  # called on the reader's thread before the first record; opens sinks on the bus
        self._status = "loading"
        self._stages = Stages("starting the engine's process")
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
        self._printed = b""  # the end of it
        self._drain = threading.Thread(target=self._keep, args=(printed,), name="specscope-worker-output", daemon=True)
        self._drain.start()
        self._reader = threading.Thread(target=self._read, name="specscope-worker-reader", daemon=True)
        self._reader.start()

    @property
    def progress(self) -> str:
        """While loading: its stages, a line each, with the time that each took."""
        return "\n".join(self._stages.lines()) if self._status == "loading" else ""

    def _keep(self, pipe: Connection) -> None:
        """Drain what the process prints: the terminal is the screen's, so libraries' warnings and C++ code's last words
        go down a pipe. The last line is shown if the process dies.
        """
        with suppress(OSError):
            while data := os.read(pipe.fileno(), KEPT_BYTES):
                self._printed = (self._printed + data)[-KEPT_BYTES:]
        pipe.close()

    def _read(self) -> None:
        """Drain the pipe at once, so that a slow screen never slows the engine."""
        try:
            while True:
                self._hear(self._news.recv())
        except (EOFError, OSError):
            code = self._wait()
            if not self.error and not self._unloaded and code != 0:
                self._drain.join(1)
                lines = self._printed.decode("utf-8", "replace").strip().splitlines()
                self.error = "the engine's process "
                self.error += "does not end" if code is None else f"ended with code {code}"
                self.error += f": {lines[-1].strip()[:300]}" if lines else ""
        except UserError as error:
            self.error = str(error)
            self.ask("stop")
        self._status = "ended"

    def _hear(self, message: object) -> None:
        match message:
            case StepRecord() | Moved():
                self._arrived.append(message)
                self.bus.publish(message)
            case Forked():
                self.forked = message
            case NodeView():
                self.node_view = message
            case str():
                self._stages.begin(message)
            case Ready():
                self._on_ready(message)
                self.ready = message
            case EngineState():
                self._status, self.points = message.status, message.points
            case UserError():
                self.error = str(message)
            case Stop() | Answer() | LookRefused() | PromptRefused() | Notice():
                self._arrived.append(message)

    def poll(self, history: History) -> None:
        """Move new records into the history, and what came with them into `news`."""
        if history.run is None and self.ready is not None:
            history.run, history.vocabulary, history.limit = self.ready.run, self.ready.vocabulary, KEPT
        while self._arrived and history.run is not None:
            message = self._arrived.popleft()
            if isinstance(message, StepRecord | Moved):
                history.take(message)
            else:
                self.news.append(message)
        history.lost = self.bus.lost

    def ask(self, verb: Verb, value: Any = None) -> None:  # noqa: ANN401
        """As any Control. A prompt is text, decoded as all are, or a PromptSpec; watch: whether records are wanted."""
        if verb == "submit" and not isinstance(value, PromptSpec):
            value = PromptSpec(value, self._params, **self._how)
        try:
            self._commands.send((verb, value))
        except (OSError, ValueError):
            self._status = "ended"

    def close(self) -> None:
        """End the worker. A running engine ends its requests first, and their ends are on the bus after this."""
        if self.ready is None:
            self._unloaded = True
            self._process.terminate()  # it loads, and hears nothing until it has
        self.ask("stop")
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
        return self._process.pid

    @property
    def status(self) -> str:
        return self._status
