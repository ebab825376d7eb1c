"""`specscope tui --listen`: engines in other processes, or on other machines, on the screen as they run."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
from collections import Counter, deque

from specscope.debug.answers import Notice
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.remote.engines import Engines
from specscope.remote.listener import Listening, RunUpdate, listen
from specscope.trace.checked import is_loopback, short, whole
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural

WAITING, WAITING_BYTES = 20_000, 128 * 2**20  # messages that may wait for the screen before records are lost


class Attached(Engines):
    """Records of any number of engines, from a listener's process."""

    def __init__(self, host: str, port: int, http_port: int | None) -> None:
        super().__init__()
        self.others = 0  # spans of other services, which are skipped
        self._heard: deque[RunUpdate | str] = deque()
        self._bytes = 0  # of the records in them, roughly
        self._lock = threading.Lock()  # guards it
        self._lost = Counter[str]()  # records of each run that were lost here
        self._closing = False
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=listen, args=(theirs, host, port, http_port), daemon=True)
        with ignore_terminal():
            self._process.start()
        theirs.close()
        first: Listening | str = "the listener's process ended"
        with contextlib.suppress(EOFError):
            first = self._pipe.recv()
        if isinstance(first, str):
            self._process.join(5)
            raise UserError(first)
        self.listening = first
        by_http = "" if first.http_port is None else f", {host}:{first.http_port} (HTTP)"
        self.where = f"{host}:{first.grpc_port} (gRPC){by_http}"
        self._open_to = "" if is_loopback(host) else ": any machine that reaches it may write here, without a password"
        if self._open_to:
            self.news.append(Notice(f"listening on {self.where}{self._open_to}"))
        threading.Thread(target=self._read, name="specscope-listener-reader", daemon=True).start()

    def _read(self) -> None:
        """Drain the pipe at once, so that a slow screen never makes the listener wait."""
        try:
            while True:
                message = self._pipe.recv()
                if isinstance(message, int):
                    self.others += message
                    continue
                if isinstance(message, RunUpdate):
                    if len(self._heard) >= WAITING or self._bytes + message.weight > WAITING_BYTES:
                        self._lost[message.run] += len(message.records)
                        message = dataclasses.replace(message, records=(), weight=0)  # its tokens come only once
                    with self._lock:
                        self._bytes += message.weight
                self._heard.append(message)
        except (EOFError, OSError):
            if not self._closing:
                self.error = "the listener's process ended"

    def poll(self, history: History) -> bool:
        """Take in what has come; True where there was anything."""
        changed, gone = bool(self._heard), history.gone
        while self._heard:
            message = self._heard.popleft()
            if isinstance(message, str):
                self.news.append(Notice(message))
                continue
            with self._lock:
                self._bytes -= message.weight
            self._take(message, history)
        if changed:
            self.trim(history, gone)
        return changed

    def _take(self, heard: RunUpdate, shown: History) -> None:
        if heard.info is None and heard.run not in self.runs:
            return  # it was dropped for newer ones
        words = "" if heard.info is None else f"{heard.info.target}, {heard.info.drafter}"
        history = self.history(heard.run, words, shown)
        history.run = heard.info or history.run
        history.vocabulary.pieces.update(heard.pieces)
        history.vocabulary.special.update(heard.special)
        self.beside[heard.run] += sum(100 + len(piece) for piece in heard.pieces.values()) + 100 * len(heard.special)
        for record in heard.records:
            history.append(record)
        history.lost = heard.lost + self._lost[heard.run]

    def close(self) -> None:
        """Stop listening."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._pipe.send("stop")
        self._process.join(5)
        if self._process.is_alive():
            self._process.terminate()

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
