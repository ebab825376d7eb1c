"""A process that receives spans of engines and sends their records down a pipe.

Decoding two thousand spans per second in the screen's process would block its interpreter while a key waits. So the
listener receives and decodes, and the screen gets finished records.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from specscope.errors import UserError
from specscope.lifetime import end_with_parent
from specscope.remote.receiver import Export, Receiver
from specscope.trace.history.history import weight
from specscope.trace.history.wording import Faults
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.wire.otlp_json import Parts, Spans
from specscope.trace.wire.schema import is_ours
from specscope.trace.wire.unspan import Decoder, run_info, with_vocabulary

WAITING = 50_000  # spans that may wait to be decoded before the oldest exports are dropped
WAITING_BYTES = 64 * 2**20  # and bytes of them, as they came
ENGINES = 64  # runs that are kept
HELD = 256 * 2**20  # bytes that their decoders may hold, roughly
LOOK = 0.2  # seconds after which a listener looks whether its screen is still there


@dataclass(frozen=True)
class Listening:
    """The ports are open, or why they are not. Sent once, first."""

    grpc_port: int = 0
    http_port: int | None = None
    error: str = ""


@dataclass(frozen=True)
class RunUpdate:
    """What has arrived from one engine since the last update."""

    run: str
    info: RunInfo | None  # the first time, and where more is known
    records: tuple[StepRecord, ...]
    pieces: dict[int, bytes] = field(default_factory=dict)  # of the vocabulary, those that are new
    special: frozenset[int] = frozenset()  # likewise
    lost: int = 0  # records and exports that are known to be missing, in all
    weight: int = 0  # bytes of the records, roughly


@dataclass(frozen=True)
class OtherUpdate:
    """Spans of other services: they are skipped."""

    count: int


@dataclass(frozen=True)
class Unreadable:
    """Spans that were left out, how many and why; of each kind of fault only when there are ten times as many."""

    text: str


class _RunDecoder:
    """A listener's state of one engine."""

    def __init__(self, info: RunInfo) -> None:
        self.info: RunInfo | None = info  # None once it was sent, until more is known of it
        self._run = info
        self.decoder = Decoder(info.privacy)
        self._told = 0  # pieces of the vocabulary that were sent
        self._special: frozenset[int] = frozenset()  # that were sent
        self._lost = 0
        self._summaries = False  # whether it was told that evidence is missing

    def feed(self, name: str, spans: Spans, dropped: int) -> RunUpdate | None:
        """Take spans of this run; gives the update for the screen, if there is one."""
        records = self.decoder.feed(*spans)
        packed, self.decoder.draft_tokens = self.decoder.draft_tokens, ""
        self._learn(packed)
        lost = self.decoder.lost + dropped
        if not records and self.info is None and lost == self._lost:
            return None
        pieces = self.decoder.vocabulary.pieces
        new = dict(islice(pieces.items(), self._told, None))
        special = frozenset(self.decoder.vocabulary.special) - self._special
        heard = RunUpdate(name, self.info, tuple(records), new, special, lost, sum(map(weight, records)))
        self.info, self._told, self._lost, self._special = None, len(pieces), lost, self._special | special
        return heard

    def _learn(self, packed: str) -> None:
        """Complete the run with its draft vocabulary, which comes with its first span."""
        run = with_vocabulary(self._run, packed, self.decoder.faults) if packed else self._run
        if run is not self._run:
            self.info = self._run = run

    def news(self) -> list[str]:
        """The news about spans that were left out."""
        lines = self.decoder.faults.news()
        if self.decoder.summaries and not self._summaries:
            self._summaries = True
            lines.append("decode steps without evidence: export at level `trees`")
        return lines


class _Listener:
    """The process's side: a receiver fills a queue, one loop decodes and sends."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._exports: deque[Export] = deque()
        self._waiting = 0  # spans in them
        self._bytes = 0  # of them
        self._dropped = 0  # exports
        self._refused: deque[str] = deque(maxlen=1000)  # why exports were refused, not reported yet
        self._changed = threading.Condition()  # guards the four
        self._runs: dict[str, _RunDecoder] = {}
        self._odd = Faults()  # of what belongs to no run

    def take(self, export: Export) -> None:
        """Queue an export, so that the receiver can answer. Called on its threads."""
        with self._changed:
            self._exports.append(export)
            self._waiting += export.count
            self._bytes += len(export.body)
            while self._waiting > WAITING or self._bytes > WAITING_BYTES:
                self._pop()
                self._dropped += 1
            self._changed.notify()

    def refuse(self, why: str) -> None:
        """Note that an export was refused. Called on the receiver's threads."""
        self._refused.append(why)

    def _pop(self) -> Export:
        export = self._exports.popleft()
        self._waiting -= export.count
        self._bytes -= len(export.body)
        return export

    def _next(self) -> Parts:
        """What is in the oldest export; nothing where none came for a while."""
        with self._changed:
            export = self._pop() if self._changed.wait_for(lambda: self._exports, LOOK) else None
        return () if export is None else export.parts()

    def run(self) -> None:
        """Decode and send until the screen closes the pipe."""
        while not self._pipe.poll():
            for resource, spans in self._next():
                try:
                    if is_ours(resource):
                        self._tell(resource, spans)
                    else:
                        self._pipe.send(OtherUpdate(len(spans)))
                except (EOFError, OSError):
                    raise
                except Exception as error:  # one bad export must not stop it
                    self._wonder("spans", f"{type(error).__name__}: {error}")
            while self._refused:
                self._wonder("an export", self._refused.popleft())

    def _tell(self, resource: Mapping[str, Any], spans: Spans) -> None:
        name = str(resource.get("specscope.run.id", ""))
        if name not in self._runs:
            try:
                info = run_info(resource)
            except UserError as error:
                self._wonder("spans", str(error))
                return
            if len(self._runs) >= ENGINES:
                del self._runs[next(iter(self._runs))]
            self._runs[name] = _RunDecoder(info)
        run = self._runs[name]
        heard = run.feed(name, spans, self._dropped)
        if heard is not None:
            self._pipe.send(heard)
        for text in run.news():
            self._pipe.send(Unreadable(text))
        while len(self._runs) > 1 and sum(each.decoder.held for each in self._runs.values()) > HELD:
            del self._runs[max(self._runs, key=lambda each: self._runs[each].decoder.held)]

    def _wonder(self, what: str, why: str) -> None:
        """Report spans that belong to no run."""
        self._odd.add(what, why)
        for text in self._odd.news():
            self._pipe.send(Unreadable(text))


def listen(pipe: Connection, host: str, grpc_port: int, http_port: int | None) -> None:
    """The listener process's main function. Says Listening, then RunUpdates, until the pipe closes."""
    with open(os.devnull, "w") as nowhere:  # the terminal is the screen's
        os.dup2(nowhere.fileno(), 2)
    end_with_parent()
    listener = _Listener(pipe)
    receiver = Receiver(listener.take, host=host, grpc_port=grpc_port, http_port=http_port, on_refused=listener.refuse)
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
