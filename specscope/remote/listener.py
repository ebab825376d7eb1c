"""A process that receives spans of engines and sends their records down a pipe.

Decoding takes half of a core at 200 steps a second: in the screen's process a key would wait for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from specscope.errors import UserError
from specscope.lifetime import end_with_parent
from specscope.remote.engines import ENGINES
from specscope.remote.receiver import Export, Receiver
from specscope.trace.history.wording import Faults
from specscope.trace.record.records import RunInfo, StepRecord
from specscope.trace.wire.otlp_json import Spans
from specscope.trace.wire.schema import is_ours
from specscope.trace.wire.unspan import Decoder, run_info

WAITING, WAITING_BYTES = 50_000, 24 * 2**20  # spans that may wait to be decoded, and bytes of them as they came
HELD = 256 * 2**20  # bytes that the decoders of all runs may hold, roughly
LATE = 10.0  # seconds after which a step is shown without the spans that have not come: collectors hold some back
LOOK = 0.2  # seconds after which a listener looks whether its screen is still there
SUMMARIES = "decode steps without evidence: export at level `trees`"


@dataclass(frozen=True)
class Listening:
    """The ports are open. Sent once, first; else why they are not, as text."""

    grpc_port: int
    http_port: int | None


@dataclass(frozen=True)
class RunUpdate:
    """What has arrived from one engine since the last update."""

    run: str
    service: str  # the name under which it sends
    info: RunInfo | None  # the first time, and where more is known
    records: tuple[StepRecord, ...]
    pieces: dict[int, bytes]  # of the vocabulary, those that are new
    special: frozenset[int]  # likewise
    lost: int  # records and exports that are known to be missing, in all


class _Run:
    """A listener's state of one engine, and what of it was sent."""

    def __init__(self, info: RunInfo, service: str) -> None:
        self._service = service
        self.decoder = Decoder(info.privacy)
        self.decoder.run = info
        self._sent: tuple[RunInfo | None, int] = None, 0  # the run, and what was lost
        self._pieces = 0
        self._special: frozenset[int] = frozenset()
        self._news = iter((SUMMARIES,))  # told once

    def feed(self, name: str, spans: Spans, dropped: int) -> RunUpdate | None:
        """Take spans of this run; gives the update for the screen, if there is one."""
        records = (*self.decoder.feed(*spans), *self.decoder.overdue(time.monotonic() - LATE))
        before, self._sent = self._sent, (self.decoder.run, self.decoder.lost + dropped)
        info = None if before[0] is self.decoder.run else self.decoder.run
        if not records and before[1] == self._sent[1] and info is None:
            return None
        pieces, special = self.decoder.vocabulary.pieces, frozenset(self.decoder.vocabulary.special)
        new, more = dict(islice(pieces.items(), self._pieces, None)), special - self._special
        self._pieces, self._special = len(pieces), special
        return RunUpdate(name, self._service, info, records, new, more, self._sent[1])

    def news(self) -> list[str]:
        """The news about spans that were left out: of each kind of fault only when there are ten times as many."""
        return [*self.decoder.faults.news(), *(self._news if self.decoder.summaries else ())]


class _Listener:
    """The process's side: a receiver fills a queue, one loop decodes and sends."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._exports: deque[Export] = deque()
        self._spans = self._bytes = 0  # in them
        self._dropped = 0  # exports
        self._changed = threading.Condition()  # guards these
        self.refused: deque[str] = deque(maxlen=1000)  # why exports were refused, not reported yet
        self._runs: dict[str, _Run] = {}
        self._odd = Faults()  # of what belongs to no run

    def take(self, export: Export) -> None:
        """Queue an export, so that the receiver can answer; the oldest give way. Called on its threads."""
        with self._changed:
            self._exports.append(export)
            self._spans, self._bytes = self._spans + export.spans, self._bytes + len(export.body)
            while self._spans > WAITING or self._bytes > WAITING_BYTES:
                self._pop()
                self._dropped += 1
            self._changed.notify()

    def _pop(self) -> Export:
        export = self._exports.popleft()
        self._spans, self._bytes = self._spans - export.spans, self._bytes - len(export.body)
        return export

    def run(self) -> None:
        """Decode and send until the screen closes the pipe."""
        while not self._pipe.poll():
            with self._changed:
                export = self._pop() if self._changed.wait_for(lambda: self._exports, LOOK) else None
            for resource, spans in () if export is None else export.parts:
                try:
                    self._decode(resource, spans)
                except (EOFError, OSError):
                    raise
                except Exception as error:  # one bad export must not stop it
                    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                    self._leave_out("spans", f"{kind}{error}")
            for name in self._runs:
                self._tell(name, ())
            while self.refused:
                self._leave_out("an export", self.refused.popleft())

    def _leave_out(self, what: str, why: str) -> None:
        self._odd.add(what, why)
        for text in self._odd.news():
            self._pipe.send(text)

    def _decode(self, resource: Mapping[str, Any], spans: Spans) -> None:
        """Send what these spans of one service give: of another's, only how many they are."""
        if not is_ours(resource):
            self._pipe.send(len(spans))
            return
        name = str(resource.get("specscope.run.id", ""))
        if name not in self._runs:
            run = _Run(run_info(resource), str(resource.get("service.name", "")))
            if len(self._runs) >= ENGINES:
                del self._runs[next(iter(self._runs))]
            self._runs[name] = run
        self._tell(name, spans)
        while len(self._runs) > 1 and sum(each.decoder.held for each in self._runs.values()) > HELD:
            del self._runs[max(self._runs, key=lambda each: self._runs[each].decoder.held)]

    def _tell(self, name: str, spans: Spans) -> None:
        """Send what a run's spans, and those that have waited for others, give."""
        run = self._runs[name]
        for message in (run.feed(name, spans, self._dropped), *run.news()):
            if message is not None:
                self._pipe.send(message)


def listen(pipe: Connection, host: str, grpc_port: int, http_port: int | None) -> None:
    """The listener process's main function: says Listening or why not, then what comes, until the pipe closes."""
    with open(os.devnull, "w") as nowhere:  # the terminal is the screen's
        os.dup2(nowhere.fileno(), 2)
    end_with_parent()
    listener = _Listener(pipe)
    on_refused = listener.refused.append
    try:
        with Receiver(listener.take, host, grpc_port, http_port, on_refused=on_refused) as receiver:
            pipe.send(Listening(receiver.grpc_port or 0, receiver.http_port))
            listener.run()
    except UserError as error:
        pipe.send(str(error))
    except (EOFError, OSError):
        return  # the screen is gone
