"""Sources: a server's /metrics, or a file or pipe whose content says what it is."""

from __future__ import annotations

import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from urllib.parse import urlsplit

from specscope.errors import UserError, first_line
from specscope.remote.store import HttpClient, StatusError
from specscope.trace import kinds
from specscope.trace.checked import checked_url, decoded, without_login
from specscope.trace.files import BROKEN, is_compressed, open_plain, reason
from specscope.trace.history.wording import Faults
from specscope.trace.kinds import ReadAs, documents, is_array, kind_of, looks_like_json, start_of
from specscope.trace.record.vocabulary import STANDARD_INPUT, printable
from specscope.watch.counts import ToldInterval, UnreadableError
from specscope.watch.logs import LlamaLog, Log, SglangLog, VllmLog, unwrapped
from specscope.watch.pages import Intervals, Reading, continues, engines, read_metrics, saved
from specscope.watch.results import Printed, json_readings, read_json, read_table

LARGEST = 64 * 2**20  # bytes of a page of metrics, of a JSON document
LONGEST = 16 * 2**20  # bytes of a line
TIMEOUT = 10.0  # seconds that a server may be silent
PATIENCE = 30.0  # seconds that its page may take in all
TAIL = 2**14  # bytes at a log's end that say when it ends
PIECE = 2**18  # bytes that are read at once
STDIN = "/dev/stdin"
IDLE = ""  # instead of a line
LOOK = 0.25  # seconds between two checks of a file that may grow
WATCHED = "a log, a metrics page, a server's response or a tool's result"
UNKNOWN = (
    "holds nothing that watch recognises: a log with acceptance lines (vLLM's `SpecDecoding metrics:`, SGLang's "
    "`accept len:`, llama.cpp's `draft acceptance`), llm.get_metrics(), JSON responses or results, or a /metrics page"
)
_NOT_FINITE = re.compile(rb"(?<=[:\[,\s])-?(?:Infinity|NaN)(?=[,\]}\s])")  # which Python writes, and JSON has not
FIGURES = ('"timings"', '"speculative_decoding"', '"spec_')  # what an event of a stream that has some has
LOGS = (VllmLog, LlamaLog, SglangLog, Printed)


class Left(str):
    """A notice of what was left out: a screen shows it at once, a table counts it at the end."""


class Server:
    """A server's page of metrics, read every `seconds`."""

    endless = True

    def __init__(self, url: str, seconds: float, patience: float = PATIENCE) -> None:
        """`patience`: seconds that a page may take from its first byte to its last. Raises UserError."""
        self._given = metrics_url(url)
        self.url = without_login(self._given)  # all that is ever shown
        self.name = urlsplit(self.url).netloc
        self.recognised = ""  # in words, "" until it is known
        self.faults = Faults()
        self._client = HttpClient(TIMEOUT, patience)
        self._seconds = seconds
        self._intervals = Intervals()

    def open(self) -> None:
        """The first reading. Raises UserError that says what to do."""
        try:
            _, readings = self.read()
        except UnreadableError as error:
            raise UserError(f"{self.url}: {error}") from None
        if not readings:
            raise UserError(
                f"{self.url}: this server reports no speculation metrics; they need speculation turned on (vLLM: "
                "--speculative-config, without --disable-log-stats; SGLang: --enable-metrics; llama.cpp: --metrics)"
            )
        self.recognised = engines(readings)
        self._intervals.take(readings)

    def read(self) -> tuple[str, list[Reading]]:
        """The page, and what is in it. Raises UserError for none, UnreadableError for what is no page of any kind."""
        try:
            content = self._client.get(self._given, LARGEST + 1, {"Accept": "text/plain"})
        except StatusError as error:
            hint = ": is the path right?" if str(error).startswith("404") else ""
            raise UserError(f"{self.url}: the server answered {error}{hint}") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.url} cannot be reached: {first_line(error)}") from None
        if len(content) > LARGEST:
            raise UnreadableError(f"the page is larger than {LARGEST >> 20} MiB")
        page = content.decode("utf-8", "replace")
        if looks_like_json(page) and (kind := kind_of(page.encode())):
            raise UserError(f"{self.url} is {kind.words}, not a metrics page")
        return page, read_metrics(page, time.time_ns())

    def run(self, stop: threading.Event) -> Iterator[ToldInterval | str]:
        """Its intervals, and notices as text, until `stop` is set. While it is unreachable it is tried again."""
        due, away = time.monotonic() + self._seconds, False
        while not stop.wait(max(due - time.monotonic(), 0)):
            due = max(due + self._seconds, time.monotonic())
            try:
                intervals = self._intervals.take(self.read()[1])
            except (UserError, UnreadableError) as error:
                if isinstance(error, UnreadableError):
                    self.faults.add(self.name, str(error))
                if not away:
                    yield f"{error}; still trying" if isinstance(error, UserError) else f"{self.name}: {error}"
                away = True
                continue
            if away:
                yield f"{self.name} answers again"
            away = False
            yield from intervals


class File:
    """A file, a named pipe or standard input: a log that may grow, or JSON, or a page of metrics."""

    def __init__(self, path: str, *, follow: bool, since: Sequence[Reading] = ()) -> None:
        """`since`: an earlier page of the same server, from which metrics go on. Raises UserError."""
        self.name = STANDARD_INPUT if path == "-" else printable(path)
        self.recognised = ""  # in words, "" until it is known
        self.faults = Faults()
        self.note = ""  # on what its figures are of
        self._path, self._follow, self._since = path, follow, since
        try:
            status = os.fstat(0) if path == "-" else os.stat(path)
        except OSError as error:
            raise UserError(f"cannot read {self.name}: {error.strerror}; a server is http://HOST:PORT") from None
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"cannot read {self.name}: it is a folder")
        self._regular = stat.S_ISREG(status.st_mode)
        self.endless = follow or not self._regular
        if self._regular and path == "-":
            self._path = STDIN  # a file that was redirected is looked at more than once
        self._changed = datetime.fromtimestamp(status.st_mtime) if self._regular else None
        self._at_end = False  # of a file that is followed: what comes now was not there before

    @property
    def _now(self) -> datetime:
        """When what is read now was written."""
        return datetime.now() if self._changed is None or (self._follow and self._at_end) else self._changed

    def run(self, stop: threading.Event) -> Iterator[ToldInterval | str]:
        """Its intervals, and notices as text, until it ends or `stop` is set. Raises UserError."""
        kind = self._checked(start_of(self._path)) if self._regular else None
        first, number = "", -1
        try:
            number = 0 if self._path == "-" else os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            is_packed = self._regular and is_compressed(os.pread(number, 4, 0))
            lines = self._unpacked() if is_packed else self._lines(number, stop)
            first = next((line for line in lines if line.strip()), "").removeprefix("\ufeff")
            yield from self._content(kind or self._checked(first.encode()), first, lines)
        except BROKEN as error:
            raise UserError(f"cannot read {self.name}: {reason(error)}") from None
        finally:
            if number > 0:
                os.close(number)
        if not self.recognised and self.faults.total:
            why, self.faults = self.faults.lines()[0], Faults()
            raise UserError(f"{self.name} has no speculation figures; {why}")
        if not self.recognised and not stop.is_set():
            raise UserError(f"{self.name} {UNKNOWN if first else 'is empty'}")

    def _checked(self, start: bytes) -> kinds.FileKind | None:
        kind = kind_of(start)
        if kind is not None and kind.reader is not ReadAs.WATCH:
            raise kind.refusal(self.name if self._path in ("-", STDIN) else self._path, WATCHED)
        return kind

    def _content(self, kind: kinds.FileKind | None, first: str, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        every = chain([first], lines)
        if kind in kinds.WRAPPED or (kind in kinds.LOGS and looks_like_json(first)):
            wrapped = documents(((0, line.encode()) for line in every), self.name)
            yield from self._log(unwrapped(text.decode()) for _, text in wrapped)
        elif kind is kinds.TABLE:
            yield from self._read("table", lambda now: read_json(read_table(self._all(every)), now))
        elif looks_like_json(first) and is_array(first):  # it may be one of metrics
            yield from self._document("".join(self._all(every)), 1)
        elif looks_like_json(first):
            numbered = ((number, line.encode()) for number, line in enumerate(filter(None, every), 1))
            for number, document in documents(numbered, self.name):
                yield from self._document(document, number) if document.strip() else ()
        elif kind in kinds.STREAMS:
            yield from self._stream(filter(None, every))
        elif kind in kinds.PAGES:
            yield from self._page("".join(self._all(every)))
        else:
            yield from self._log(every)

    def _lines(self, number: int, stop: threading.Event) -> Iterator[str]:
        """Each line, and IDLE where there is none for now; for a log that is followed also lines that come later.

        JSON needs no newline at its end. Never blocks for longer than LOOK.
        """
        part = waiting = b""
        while not stop.is_set():
            if not select.select([number], [], [], LOOK)[0]:
                yield IDLE
                continue
            piece = os.read(number, PIECE)
            *whole, part = (part + piece).split(b"\n")
            yield from (f"{line.decode('utf-8', 'replace')}\n" for line in whole)
            if len(part) > LONGEST:
                raise UserError(f"{self.name} has a line of more than {LONGEST >> 20} MiB")
            if piece:
                continue
            if not (self._follow and self._regular):
                break
            if part == waiting and part[:1] in b"{[}]" and part.rstrip()[-1:] in (b"}", b"]"):
                yield part.decode("utf-8", "replace")
                part = b""
            waiting, self._at_end = part, self._at_end or not part
            yield IDLE
            stop.wait(LOOK)
        if part:
            yield part.decode("utf-8", "replace")

    def _unpacked(self) -> Iterator[str]:
        with open(self._path, "rb") as raw, open_plain(raw, self._path) as file:
            while line := file.readline(LONGEST):
                yield line.decode("utf-8", "replace")

    def _tail(self) -> list[str]:
        """The last lines of a file that is not compressed; the first of them may be cut."""
        if not self._regular:
            return []
        with open(self._path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
            return file.read(TAIL).decode("utf-8", "replace").splitlines()

    def _all(self, lines: Iterator[str]) -> Iterator[str]:
        self._follow, size = False, 0
        for line in lines:
            size += len(line)
            if size > LARGEST:
                raise UserError(f"{self.name} is larger than {LARGEST >> 20} MiB, the limit")
            yield line

    def _log(self, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        tail = [*map(unwrapped, self._tail())]
        readers, number = [Log(form, self._changed or self._now, tail) for form in LOGS], 0
        for line in lines:
            if line == IDLE:
                yield from (interval for reader in readers for interval in reader.rest())
                continue
            number += 1
            for reader in readers:
                intervals: list[ToldInterval] = []
                try:
                    intervals = reader.take(line, self._now)
                except UnreadableError as error:
                    yield from self._fault(f"line {number}", error)
                if reader.any and reader.form.words not in self.recognised:
                    self.recognised = " and ".join(filter(None, (self.recognised, reader.form.words)))
                    yield f"{self.name}: {self.recognised}"
                    readers = [each for each in readers if each is reader or (each.form.is_log and reader.form.is_log)]
                    for each in readers:
                        each.name = each.name if each.any else each.form.source
                yield from intervals
        yield from (interval for reader in readers for interval in reader.rest(last=True))

    def _stream(self, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        """Server-sent events: the last one before `[DONE]` that has figures has those of the request."""
        last = ""
        for number, line in enumerate(chain(lines, ["data: [DONE]"]), 1):
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and any(word in data for word in FIGURES):
                last = data
            elif data == "[DONE]" and last:
                yield from self._document(last, number)
                last = ""

    def _document(self, text: str | bytes, number: int) -> Iterator[ToldInterval | str]:
        """The intervals of a JSON value. In a list, responses that cannot be read are left out."""
        try:
            value = decoded(_NOT_FINITE.sub(b"null", text.encode() if isinstance(text, str) else text))
        except ValueError as error:
            yield from self._fault(f"line {number}", f"not JSON ({error})")
            return
        is_list = isinstance(value, list) and not all(isinstance(item, dict) and "name" in item for item in value)
        for index, item in enumerate(value if is_list else [value]):
            yield from self._read(
                f"item {index}" if is_list else f"line {number}", partial(read_json, item, since=self._since)
            )

    def _read(self, place: str, read: Callable[[int], list[ToldInterval]]) -> Iterator[ToldInterval | str]:
        """What `read` returns at this time; where it raises, a fault of that place."""
        try:
            intervals = read(int(self._now.timestamp() * 1e9))
        except UnreadableError as error:
            yield from self._fault(place, error)
            return
        if intervals and not self.recognised:
            self.recognised = intervals[0].aggregate.source
            yield f"{self.name}: {self.recognised}"
        yield from intervals

    def _fault(self, place: str, why: object) -> Iterator[Left]:
        """Count what was left out; notices of it, for a screen to show now."""
        self.faults.add(place, str(why))
        yield from (Left(f"{self.name}: {line}") for line in self.faults.news())

    def _page(self, text: str) -> Iterator[ToldInterval | str]:
        """A page of metrics that was saved: what its counters count since they began, or between its readings."""
        try:
            readings = read_metrics(text, int(self._now.timestamp() * 1e9))
        except UnreadableError as error:
            raise UserError(f"{self.name}: {error}") from None
        if not readings:
            raise UserError(f"{self.name} has no speculation metrics")
        self.recognised = engines(readings)
        told, since = list(saved(readings, self._since)), "since the counters began"
        if len(told) < len(readings):
            since, self.note = ("between its readings", f"{self.name} has several readings: figures are the difference")
        yield f"{self.name}: {self.recognised}, {since}"
        yield from told


Source = Server | File


def continued(path: str, since: str) -> list[Reading]:
    """The last readings in a saved page `since`, where every engine of another goes on from there; else none.

    Raises UserError where it is the other way about.
    """
    last = {reading.key: reading for reading in _saved_readings(since)}
    first = {reading.key: reading for reading in reversed(_saved_readings(path))}
    dated = first and all(key in last and "created" in last[key].gauges for key in first)
    if dated and all(continues(first[key], last[key]) for key in first):
        raise UserError(f"{printable(path)} was read before {printable(since)}, from the same server: give it first")
    goes_on = first and all(key in last and continues(last[key], first[key]) for key in first)
    return [*last.values()] if goes_on else []


def _saved_readings(path: str) -> list[Reading]:
    """The readings in a page of metrics, or in metrics as JSON; none in another file."""
    try:
        with open(path, "rb") as raw, open_plain(raw, path) as file:
            text = file.read(LARGEST).decode("utf-8-sig", "replace")
        return (json_readings(decoded(text), 0) or []) if looks_like_json(text) else read_metrics(text, 0)
    except (*BROKEN, ValueError, UserError):
        return []  # reported where it is read


def open_source(text: str, seconds: float, *, follow: bool, patience: float = PATIENCE) -> Source:
    """A URL or a file. Raises UserError. `patience`: as a server has it, and no more than the usual one."""
    return Server(text, seconds, min(patience, PATIENCE)) if "://" in text else File(text, follow=follow)


def metrics_url(text: str) -> str:
    """http://HOST:PORT or https://..., with /metrics where it has no path. Raises UserError."""
    parts = checked_url(text, "{} is not a server's address: write http://HOST:PORT/metrics")
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/metrics"
