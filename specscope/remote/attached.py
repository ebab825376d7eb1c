"""Engines in other processes, or on other machines, on the screen as they run: those that send to `--listen`, and the
one that `specscope vllm --screen` starts: what its log says while it loads, and how it ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from specscope.debug.answers import Notice
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.remote.engines import Engines
from specscope.remote.listener import Listening, RunUpdate, listen
from specscope.trace.checked import is_loopback, short, whole
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural

AT_ONCE = 256  # messages that are taken in between two pictures, at most


class Attached(Engines):
    """Records of any number of engines, from a listener's process."""

    def __init__(self, host: str, port: int, http_port: int | None) -> None:
        super().__init__()
        self.others = 0  # spans of other services, which are skipped
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
        self._open_to = "" if is_loopback(host) else ": any machine that reaches it can send, without a password"
        if self._open_to:
            self.news.append(Notice(f"listening on {self.where}{self._open_to}"))

    def poll(self, history: History) -> None:
        """Take in what has come. While the screen takes none, the listener waits."""
        changed, gone = False, history.gone
        try:
            for _ in range(AT_ONCE):
                if self.error or not self._pipe.poll():
                    break
                message = self._pipe.recv()
                if isinstance(message, int):
                    self.others += message
                elif isinstance(message, str):
                    self.news.append(Notice(message))
                else:
                    self._take(message, history)
                changed |= not isinstance(message, int)
        except (EOFError, OSError):
            self.error = "the listener's process ended"
        if changed:
            self.trim(history, gone)

    def _take(self, heard: RunUpdate, shown: History) -> None:
        if heard.info is None and heard.run not in self.runs:
            return  # it was dropped for newer ones
        words = "" if heard.info is None else f"{heard.service}: {heard.info.target}, {heard.info.drafter}"
        history = self.history(heard.run, words, shown)
        history.name = heard.service
        history.run = heard.info or history.run
        history.vocabulary.pieces.update(heard.pieces)
        history.vocabulary.special.update(heard.special)
        self.beside[heard.run] += sum(100 + len(piece) for piece in heard.pieces.values()) + 100 * len(heard.special)
        for record in heard.records:
            history.append(record)
        history.lost = heard.lost

    def close(self) -> None:
        self._pipe.close()
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


KEPT_LINES = 200
PIECE = 2**18  # bytes of a log that are read at once
LONGEST = 2000  # characters of a line that are kept
NOTICED = 4  # lines that a notice has room for
OURS = "specscope: "  # how the plugin's own lines begin
WATCHING = "watching "  # and that which says that vLLM has loaded
PROCESS = re.compile(r"^\(\w+ pid=\d+\) ")  # vLLM begins its lines with their process
ERROR = re.compile(r"(?:^|\] )((?:\w+\.)*\w+(?:Error|Exception): .+)")  # the end of a traceback, however it was logged
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class EngineLog:
    def __init__(self, path: Path) -> None:
        self.lines: tuple[str, ...] = ()  # the last ones that are not empty
        self.ours = ""  # the plugin's last line
        self.error = ""  # the first that it told: those after it mostly follow from it
        self._path, self._read = path, 0
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""  # of a line that has not ended

    def read(self) -> bool:
        with self._path.open("rb") as file:
            file.seek(self._read)
            piece = file.read(PIECE)
        self._read += len(piece)
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in whole:
            self._take(_text(line))
        if piece:
            self.lines = (*self._kept, *filter(None, [_text(self._rest)]))
        return bool(piece)

    def _take(self, line: str) -> None:
        if not line.strip():
            return
        self._kept.append(line)
        if line.startswith(OURS):
            self.ours = line.removeprefix(OURS)
        if not self.error and (found := ERROR.search(line)) is not None:
            self.error = found[1]


def _text(line: bytes) -> str:
    """A line without its process and colours; of a progress bar, which writes over itself, what stands there last."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
    return PROCESS.sub("", COLOURS.sub("", text))[:LONGEST]


class LaunchedEngine(Attached):
    """An engine that runs beside the screen and sends to it; its output goes to a file."""

    def __init__(self, name: str) -> None:
        super().__init__("127.0.0.1", 0, 0)
        self._name = name
        self._engine: subprocess.Popen[bytes] | None = None
        self._log: EngineLog | None = None
        self._ended = False

    def follow(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._engine, self._log = process, EngineLog(output)

    def poll(self, history: History) -> None:
        ended = self._engine is not None and self._engine.poll() is not None
        super().poll(history)
        while self._log is not None and self._log.read():
            self.log = self._log.lines
        if ended and not self._ended:
            self._end(history)

    def _end(self, history: History) -> None:
        self._ended = True
        assert self._engine is not None
        if self._engine.returncode:
            first = self._log.error if self._log is not None else ""
            self.error = ": ".join(filter(None, [end_of(self._engine.returncode), first]))
        if history.steps:  # otherwise the screen has room for more of them
            self.news.append(Notice("\n".join([f"{self._name} ended: its last lines", *self.log[-NOTICED:]])))

    @property
    def status(self) -> str:
        """`loading`; `idle` from when the plugin watches it, `attached` from its first step on; `ended`."""
        if self._ended:
            return "ended"
        watched = self._log is not None and self._log.ours.startswith(WATCHING)
        return "idle" if watched and not self.runs else super().status

    @property
    def progress(self) -> str:
        ours = self._log.ours if self._log is not None else ""
        return ours or f"{self._name} is starting"


def end_of(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def last_lines(output: Path, count: int) -> Sequence[str]:
    """Of a log that nobody writes any more."""
    log = EngineLog(output)
    while log.read():
        pass
    return log.lines[-count:]
