"""`specscope tui --listen`: engines in other processes, or on other machines, on the screen as they run."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
from collections import Counter, deque

from specscope.debug.answers import Notice
from specscope.debug.viewer import Passive, Viewer
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.remote.listener import ENGINES, Listening, OtherUpdate, RunUpdate, Unreadable, listen
from specscope.trace.checked import is_loopback, short, whole
from specscope.trace.history.history import KEPT, History
from specscope.trace.history.wording import plural

WAITING = 20_000  # messages that may wait for the screen before records are lost
MOST = KEPT  # steps of a run; a quarter of them goes when there are more
BYTES = 512 * 2**20  # of all runs, roughly; the largest gives way
WAITING_BYTES = 128 * 2**20  # of the messages that wait


class _KeptRun:
    """The records of one engine."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._words = 0  # bytes of its vocabulary, roughly

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        return self.history.nbytes + self._words

    def take(self, heard: RunUpdate, lost: int) -> None:
        """Add new records; `lost`: how many were lost on the way."""
        self.history.run = heard.info or self.history.run
        self.history.vocabulary.pieces.update(heard.pieces)
        self.history.vocabulary.special.update(heard.special)
        self._words += sum(100 + len(piece) for piece in heard.pieces.values()) + 100 * len(heard.special)
        for record in heard.records:
            self.history.append(record)
        self.history.lost = heard.lost + lost

    def trim(self, crowded: bool) -> int:
        """Drop old steps where there are too many, or no room; returns how many."""
        before = len(self.history.steps)
        if before > MOST or (crowded and before > 1):
            self.history.keep_last(min(before, MOST) * 3 // 4)
        return before - len(self.history.steps)


class Attached(Passive):
    """A Control that only receives: records of any number of engines. One of them is on the screen."""

    def __init__(self, host: str, port: int, http_port: int | None) -> None:
        """Listen. Raises UserError where a port cannot be used."""
        super().__init__()
        self.viewer: Viewer | None = None
        self.runs: dict[str, _KeptRun] = {}
        self.others = 0  # spans of other services, which are skipped
        self._shown = ""
        self._heard: deque[RunUpdate | Unreadable] = deque()
        self._bytes = 0  # of the records in them, roughly
        self._lock = threading.Lock()  # guards it
        self._lost: Counter[str] = Counter()  # records of each run that were lost here
        self._closing = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=listen, args=(theirs, host, port, http_port), daemon=True)
        with ignore_terminal():
            self._process.start()
        theirs.close()
        try:
            self.listening: Listening = self._pipe.recv()
        except EOFError:
            self.listening = Listening(error="the listener's process ended")
        if self.listening.error:
            self._process.join(5)
            raise UserError(self.listening.error)
        self.where = f"{host}:{self.listening.grpc_port} (gRPC)" + (
            f", {host}:{self.listening.http_port} (HTTP)" if self.listening.http_port is not None else ""
        )
        self._open_to = "" if is_loopback(host) else ": any machine that reaches it may write here, without a password"
        if self._open_to:
            self.news.append(Notice(f"listening on {self.where}{self._open_to}"))
        self._reader = threading.Thread(target=self._read, name="specscope-listener-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Drain the pipe at once, so that a slow screen never makes the listener wait."""
        try:
            while True:
                message = self._pipe.recv()
                if isinstance(message, OtherUpdate):
                    self.others += message.count
                    continue
                if isinstance(message, RunUpdate):
                    if len(self._heard) >= WAITING or self._bytes + message.weight > WAITING_BYTES:
                        message = self._emptied(message)
                    with self._lock:
                        self._bytes += message.weight
                self._heard.append(message)
        except (EOFError, OSError):
            if not self._closing:
                self.error = "the listener's process ended"

    def _emptied(self, message: RunUpdate) -> RunUpdate:
        """A message stripped down because there is no room for it; what is dropped is counted."""
        self._lost[message.run] += len(message.records)
        return dataclasses.replace(message, records=(), weight=0)  # its tokens come only once

    def poll(self, history: History) -> bool:
        """Take in what has come; True where there was anything."""
        changed = False
        while self._heard:
            message = self._heard.popleft()
            changed = True
            if isinstance(message, Unreadable):
                self.news.append(Notice(message.text))
                continue
            with self._lock:
                self._bytes -= message.weight
            self._take(message, history)
        if changed:
            self._trim()
        return changed

    def _trim(self) -> None:
        """Drop old steps; the screen stays at its step."""
        crowded = sum(run.size for run in self.runs.values()) > BYTES
        largest = max(self.runs, key=lambda name: self.runs[name].size, default="")
        for name, run in list(self.runs.items()):
            gone = run.trim(crowded and name == largest)
            if gone and self.viewer is not None and self.viewer.history is run.history:
                self.news.append(Notice(f"lost the oldest {plural(gone, 'step')}"))
            if crowded and not gone and name == largest and name != self._shown:
                del self.runs[name]  # it has no steps left to drop

    def _take(self, heard: RunUpdate, history: History) -> None:
        if heard.run not in self.runs:
            if heard.info is None:
                return  # it was dropped for newer ones
            first = not self.runs
            if len(self.runs) >= ENGINES:
                del self.runs[next(iter(self.runs))]
            self.runs[heard.run] = _KeptRun(history if first else History())
            if first:
                self._shown = heard.run
            else:
                self.news.append(
                    Notice(f"another engine: {heard.info.target}, {heard.info.drafter} (e shows the next)")
                )
        self.runs[heard.run].take(heard, self._lost[heard.run])

    def next_engine(self) -> None:
        """Put the next engine on the screen."""
        names = list(self.runs)
        if len(names) < 2 or self.viewer is None:
            self.news.append(Notice("there is only one engine" if names else "no engine has sent anything yet"))
            return
        self._shown = names[(names.index(self._shown) + 1) % len(names)] if self._shown in names else names[0]
        self.viewer.show(self.runs[self._shown].history)

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._pipe.send("stop")
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()

    @property
    def status(self) -> str:
        """`loading` until an engine has sent something, then `attached`."""
        return "attached" if self.runs else "loading"

    @property
    def progress(self) -> str:
        """Where it listens, and what has arrived while no engine was among it."""
        others = f"; {plural(self.others, 'span')} of other services skipped" if self.others else ""
        return f"listening on {self.where}{self._open_to}{others}"


def checked_address(text: str, flag: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets. Raises UserError."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    number = whole(port)
    readable = bare.isprintable() and " " not in bare and (":" not in bare or bare != host)
    if not bare or not readable or number is None or number > 65535:
        raise UserError(f"{flag} {short(text)}: write HOST:PORT, e.g. 127.0.0.1:4317, with a port up to 65535")
    return bare, number
