"""`specscope tui --listen`: engines in other processes, or on other machines, on the screen as they run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan

from specscope.debug.breakpoints import Point
from specscope.debug.forked import Forked
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.trace.history import History
from specscope.trace.params import SamplingParams
from specscope.trace.receive import Receiver
from specscope.trace.unspan import Decoder, run_info

WAITING = 4096  # exports that may wait to be decoded before the oldest are dropped
ENGINES = 64  # runs that are kept
MOST = 20_000  # steps of a run that are kept; a quarter of them goes when there are more


class _Run:
    """What has come of one engine."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.decoder = Decoder()
        history.vocabulary = self.decoder.vocabulary

    def feed(self, span: ReadableSpan, lost: int) -> None:
        """One span; `lost`: exports that were dropped before they could be decoded."""
        name, start, end = span.name, span.start_time or 0, span.end_time or 0
        for record in self.decoder.feed(name, start, end, span.attributes or {}):
            self.history.append(record)
        self.history.dropped = self.decoder.lost + lost

    def trim(self) -> int:
        """Let old steps go where there are too many; how many went."""
        before = len(self.history.steps)
        if before > MOST:
            self.history.keep_last(MOST * 3 // 4)
        return before - len(self.history.steps)


class Attached:
    """A Control that only hears: spans of any number of engines. One of them is on the screen."""

    obeys = False

    def __init__(self, host: str, port: int, http_port: int | None) -> None:
        self.notices: deque[str] = deque()
        self.points: tuple[Point, ...] = ()  # an engine elsewhere has no debugger here
        self.forked: Forked | None = None
        self.said: deque[str] = deque()
        self.error = ""
        self.viewer: Viewer | None = None
        self._runs: dict[str, _Run] = {}
        self._shown = ""
        self._spans: deque[Sequence[ReadableSpan]] = deque()
        self._lost = 0  # exports that were dropped here
        self._lock = threading.Lock()
        self._receiver = Receiver(self._take, host=host, grpc_port=port, http_port=http_port).start()
        self.where = f"{host}:{self._receiver.grpc_port} (gRPC)" + (
            f", {host}:{self._receiver.http_port} (HTTP)" if http_port is not None else ""
        )

    def _take(self, spans: list[ReadableSpan]) -> None:
        """On the receiver's threads: keep them, and let it answer."""
        with self._lock:
            if len(self._spans) >= WAITING:
                self._spans.popleft()
                self._lost += 1
            self._spans.append(spans)

    def poll(self, history: History) -> bool:
        """Decode what has come; True where there was anything."""
        changed = False
        while True:
            with self._lock:
                if not self._spans:
                    return changed
                spans = self._spans.popleft()
            changed = True
            for span in spans:
                self._feed(span, history)
            self._trim()

    def _trim(self) -> None:
        """Let old steps go; the screen stays at the step that it shows."""
        for run in self._runs.values():
            gone = run.trim()
            if gone and self.viewer is not None and self.viewer.history is run.history:
                self.viewer.position = max(self.viewer.position - gone, 0)
                self.notices.append(f"the oldest {gone:,} steps were let go")

    def _feed(self, span: ReadableSpan, history: History) -> None:
        resource = span.resource.attributes
        name = str(resource.get("specscope.run.id", ""))
        if name not in self._runs:
            try:
                info = run_info(resource)
            except UserError as error:
                if str(error) not in self.notices:
                    self.notices.append(str(error))
                return
            first = not self._runs
            if len(self._runs) >= ENGINES:
                del self._runs[next(iter(self._runs))]
            run = self._runs[name] = _Run(history if first else History())
            run.history.run = info
            if first:
                self._shown = name
            else:
                self.notices.append(f"another engine: {info.target}, {info.drafter} (e shows the next)")
        self._runs[name].feed(span, self._lost)

    def next_engine(self) -> None:
        """Put the next engine on the screen."""
        names = list(self._runs)
        if len(names) < 2 or self.viewer is None:
            self.notices.append("there is one engine" if names else "no engine has been heard of yet")
            return
        self._shown = names[(names.index(self._shown) + 1) % len(names)] if self._shown in names else names[0]
        self.viewer.show(self._runs[self._shown].history)

    def _only_heard(self) -> None:
        self.notices.append("this engine runs elsewhere: it can be watched, not commanded")

    def pause(self) -> None:
        """Not possible from here."""
        self._only_heard()

    def resume(self) -> None:
        """Not possible from here."""
        self._only_heard()

    def step(self) -> None:
        """Not possible from here."""
        self._only_heard()

    def debug(self, line: str) -> None:
        """Not possible from here; the viewer looks through the history instead."""
        self._only_heard()

    def submit(self, prompt: str, params: SamplingParams | None = None) -> None:
        """Not possible from here."""
        self._only_heard()

    def cancel(self, request: str) -> None:
        """Not possible from here."""
        self._only_heard()

    def close(self) -> None:
        """Stop listening."""
        self._receiver.close()

    @property
    def status(self) -> str:
        """`loading` until an engine was heard, then `attached`."""
        return "attached" if self._runs else "loading"

    @property
    def progress(self) -> tuple[str, float | None]:
        """Where it listens."""
        return f"listening on {self.where}", None


def run_attached(address: str, http_port: int | None) -> None:
    """Listen on HOST:PORT for gRPC, and on `http_port` (None: the port after it) for HTTP, and show what comes."""
    from specscope.tui.app import run_app

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65535:
        raise UserError(f"--listen {address}: write HOST:PORT, e.g. 127.0.0.1:4317")
    number = int(port)
    attached = Attached(host, number, http_port if http_port is not None else (number + 1 if number else 0))
    viewer = Viewer(control=attached)
    attached.viewer = viewer
    try:
        run_app(viewer, title=attached.where)
    finally:
        attached.close()
