"""A process that hears engines and sends what it heard down a pipe.

Decoding two thousand spans a second in the screen's process would hold its interpreter while a key waits. So a listener
receives and decodes, and the screen takes in records that are ready.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection

from opentelemetry.sdk.trace import ReadableSpan

from specscope.errors import UserError
from specscope.lifetime import end_with_parent
from specscope.trace.receive import Receiver
from specscope.trace.records import RunInfo, StepRecord
from specscope.trace.unspan import Decoder, run_info

WAITING = 50_000  # spans that may wait to be decoded before the oldest exports are dropped
ENGINES = 64  # runs that are kept
LOOK = 0.2  # seconds after which a listener looks whether its screen is still there


@dataclass(frozen=True)
class Listening:
    """The ports are open. Sent once, first; or why they are not."""

    grpc_port: int = 0
    http_port: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Heard:
    """What has come of one engine since the last time."""

    run: str
    info: RunInfo | None  # the first time
    records: tuple[StepRecord, ...]
    pieces: dict[int, bytes] = field(default_factory=dict)  # of the vocabulary, those that are new
    special: frozenset[int] = frozenset()
    lost: int = 0  # records and exports that are known to be missing, in all


@dataclass(frozen=True)
class Odd:
    """Spans that are no engine's of this version; why."""

    text: str


class _Run:
    """What a listener keeps of one engine."""

    def __init__(self, info: RunInfo) -> None:
        self.info: RunInfo | None = info
        self.decoder = Decoder()
        self._told = 0  # pieces of the vocabulary that were sent
        self._lost = 0

    def feed(self, name: str, spans: Sequence[ReadableSpan], dropped: int) -> Heard | None:
        """Spans of this run; what there is to tell."""
        records: list[StepRecord] = []
        for span in spans:
            records += self.decoder.feed(span.name, span.start_time or 0, span.end_time or 0, span.attributes or {})
        lost = self.decoder.lost + dropped
        if not records and self.info is None and lost == self._lost:
            return None
        pieces = self.decoder.vocabulary.pieces
        new = dict(islice(pieces.items(), self._told, None))
        heard = Heard(name, self.info, tuple(records), new, frozenset(self.decoder.vocabulary.special), lost)
        self.info, self._told, self._lost = None, len(pieces), lost
        return heard


class _Listener:
    """The process's side: a receiver fills a queue, one loop decodes and sends."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._exports: deque[list[ReadableSpan]] = deque()
        self._waiting = 0  # spans in them
        self._dropped = 0  # exports
        self._changed = threading.Condition()  # guards the three
        self._runs: dict[str, _Run] = {}
        self._odd: set[str] = set()

    def take(self, spans: list[ReadableSpan]) -> None:
        """On the receiver's threads: keep them, and let it answer."""
        with self._changed:
            self._exports.append(spans)
            self._waiting += len(spans)
            while self._waiting > WAITING:
                self._waiting -= len(self._exports.popleft())
                self._dropped += 1
            self._changed.notify()

    def _next(self) -> list[ReadableSpan]:
        """The eldest export; an empty one where none came for a while."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._exports, LOOK):
                return []
            spans = self._exports.popleft()
            self._waiting -= len(spans)
            return spans

    def run(self) -> None:
        """Until the screen closes the pipe."""
        while not self._pipe.poll():
            by_run: dict[str, list[ReadableSpan]] = {}
            for span in self._next():
                by_run.setdefault(str(span.resource.attributes.get("specscope.run.id", "")), []).append(span)
            for name, its in by_run.items():
                try:
                    self._tell(name, its)
                except (EOFError, OSError):
                    raise
                except Exception as error:  # one odd export must not deafen it for the others
                    self._wonder(f"spans that cannot be read: {type(error).__name__}: {error}")

    def _tell(self, name: str, spans: Sequence[ReadableSpan]) -> None:
        if name not in self._runs:
            try:
                info = run_info(spans[0].resource.attributes)
            except UserError as error:
                self._wonder(str(error))
                return
            if len(self._runs) >= ENGINES:
                del self._runs[next(iter(self._runs))]
            self._runs[name] = _Run(info)
        heard = self._runs[name].feed(name, spans, self._dropped)
        if heard is not None:
            self._pipe.send(heard)

    def _wonder(self, text: str) -> None:
        """Tell of something odd, once."""
        if text not in self._odd:
            self._odd.add(text)
            self._pipe.send(Odd(text))


def listen(pipe: Connection, host: str, grpc_port: int, http_port: int | None) -> None:
    """The listener process's main function. Says Listening, then Heard and Odd, until the pipe's other end closes."""
    end_with_parent()
    listener = _Listener(pipe)
    receiver = Receiver(listener.take, host=host, grpc_port=grpc_port, http_port=http_port)
    try:
        receiver.start()
    except UserError as error:
        pipe.send(Listening(error=str(error)))
        return
    try:
        pipe.send(Listening(receiver.grpc_port or 0, receiver.http_port))
        listener.run()
    except (EOFError, OSError):
        return  # the screen is gone
    finally:
        receiver.close()
