"""Sources: a server's /metrics, or a file or pipe whose content says what it is."""

from __future__ import annotations

import http.client
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import chain
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from specscope.errors import UserError, first_line
from specscope.remote.fetch import HttpClient, StatusError
from specscope.trace.checked import checked_url, decoded, without_login
from specscope.trace.compressed import BROKEN, is_compressed, open_plain, reason
from specscope.trace.history.faults import Faults
from specscope.trace.kinds import PAGES, STREAMS, WRAPPED, ReadAs, kind_of, looks_like_json, start_of
from specscope.trace.record.vocabulary import printable
from specscope.watch.counts import ToldInterval, UnreadableError
from specscope.watch.llamacpp import LlamaLog
from specscope.watch.metrics import Intervals, Reading, difference, engines, read_metrics
from specscope.watch.responses import Chunks, read_json
from specscope.watch.sglang import SglangLog
from specscope.watch.vllm import VllmLog

LARGEST = 64 * 2**20  # bytes of a page of metrics, of a JSON document
LONGEST = 16 * 2**20  # bytes of a line
TIMEOUT = 10.0  # seconds that a server may be silent
PATIENCE = 30.0  # seconds that its page may take in all
TAIL = 2**14  # bytes at a log's end that say when it ends
PIECE = 2**18  # bytes that are read at once
IDLE = ""  # instead of a line
LOOK = 0.25  # seconds between two checks of a file that may grow
WATCHED = "a log, a page of metrics or an answer of a server"
UNKNOWN = (
    "has nothing that watch recognises: a log with lines of acceptance (vLLM's `SpecDecoding metrics:`, SGLang's "
    "`accept len:`, llama.cpp's `draft acceptance`), llm.get_metrics() or responses as JSON, or a page of /metrics"
)
DIFFUSION = ". It serves a diffusion model: its denoising steps are no speculation"
# Lines of engines that have no drafts in them, and what to do
WITHOUT_DRAFTS = {
    "DiffusionDecoding metrics:": DIFFUSION,
    "currank_total_requests = ": ". TensorRT-LLM's log has no acceptance",
}


LOGS = (VllmLog, LlamaLog, SglangLog)  # the first that knows a line of a log reads the rest of it


class Left(str):
    """A notice of what was left out: a screen shows it at once, a table counts it at the end."""


class Source(Protocol):
    """Something to watch. `run` may block, and is called on a thread of its own."""

    name: str
    recognised: str  # in words, "" until it is known
    endless: bool  # whether it may never end
    faults: Faults

    def run(self, stop: threading.Event) -> Iterator[ToldInterval | str]:
        """Its intervals, and notices as text, until it ends or `stop` is set. Raises UserError."""


class Server:
    """A server's page of metrics, read every `seconds`."""

    def __init__(self, url: str, seconds: float, patience: float = PATIENCE) -> None:
        """`patience`: seconds that a page may take from its first byte to its last. Raises UserError."""
        self._given = metrics_url(url)
        self.url = without_login(self._given)  # all that is ever shown
        self.name = urlsplit(self.url).netloc
        self._client = HttpClient(TIMEOUT, patience)
        self.recognised = ""
        self.endless = True
        self.faults = Faults()
        self._seconds = seconds
        self._intervals = Intervals()

    def open(self) -> None:
        """The first reading. Raises UserError that says what to do."""
        try:
            page = self._page()
            readings = self._readings(page)
        except UnreadableError as error:
            raise UserError(f"{self.url}: {error}") from None
        if not readings:
            raise UserError(
                f"{self.url}: this server reports no speculation metrics; is speculation on (vLLM: "
                "--speculative-config, without --disable-log-stats; SGLang: --enable-metrics; llama.cpp: --metrics)?"
                + (DIFFUSION if "vllm:diffusion_" in page else "")
            )
        self.recognised = engines(readings)
        self._intervals.take(readings)

    def _page(self) -> str:
        try:
            page = self._client.get(self._given, LARGEST + 1, {"Accept": "text/plain"})
        except StatusError as error:
            hint = ": is the path right?" if str(error).startswith("404") else ""
            raise UserError(f"{self.url}: the server answers {error}{hint}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"{self.url} cannot be reached: {first_line(error)}") from None
        if len(page) > LARGEST:
            raise UnreadableError(f"the page is larger than {LARGEST >> 20} MiB")
        return page.decode("utf-8", "replace")

    def _readings(self, page: str) -> list[Reading]:
        """Raises UserError for another file, UnreadableError for what is no file of any kind."""
        kind = kind_of(page.encode()) if looks_like_json(page) else None
        if kind is not None:
            raise UserError(f"{self.url} is {kind.words}, not a page of metrics")
        return read_metrics(page, time.time_ns())

    def run(self, stop: threading.Event) -> Iterator[ToldInterval | str]:
        """One interval after the other. While a server is unreachable it is tried again."""
        due, away = time.monotonic(), False
        while True:
            due = max(due + self._seconds, time.monotonic())
            if stop.wait(max(due - time.monotonic(), 0)):
                return
            try:
                intervals = self._intervals.take(self._readings(self._page()))
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

    def __init__(self, path: str, *, follow: bool) -> None:
        self.name = "standard input" if path == "-" else printable(path)
        self.recognised = ""
        self.faults = Faults()
        self._path, self._follow = path, follow
        self._hint = ""  # why a log has no figures
        try:
            status = os.fstat(0) if path == "-" else os.stat(path)
        except OSError as error:
            raise UserError(f"cannot read {self.name}: {error.strerror}; a server is http://HOST:PORT") from None
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"cannot read {self.name}: it is a folder")
        self._regular = stat.S_ISREG(status.st_mode)
        self.endless = follow or not self._regular
        self._time = datetime.fromtimestamp(status.st_mtime) if self._regular else None

    def run(self, stop: threading.Event) -> Iterator[ToldInterval | str]:
        """The intervals of each line, or of the whole file."""
        kind = kind_of(start_of(self._path)) if self._regular else None
        if kind is not None and kind.reader is not ReadAs.WATCH:
            raise kind.refusal(self._path, WATCHED)
        first, number = "", -1
        try:
            number = 0 if self._path == "-" else os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            lines = (
                self._unpacked()
                if self._regular and is_compressed(os.pread(number, 4, 0))
                else self._lines(number, stop)
            )
            first = next((line for line in lines if line.strip()), "")
            yield from self._content(first, lines)
        except BROKEN as error:
            raise UserError(f"cannot read {self.name}: {reason(error)}") from None
        finally:
            if number > 0:
                os.close(number)
        if not self.recognised and not stop.is_set():
            raise UserError(f"{self.name} {UNKNOWN if first else 'is empty'}{self._hint}")

    def _content(self, first: str, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        kind = kind_of(first.encode())
        if kind is not None and kind.reader is not ReadAs.WATCH:  # of a pipe, which cannot be looked at before
            raise kind.refusal(self.name, WATCHED)
        if kind in WRAPPED:
            yield from self._log(map(unwrapped, chain([first], lines)))
        elif looks_like_json(first):
            yield from self._json(first, filter(None, lines))
        elif kind in STREAMS:
            yield from self._stream(first, filter(None, lines))
        elif kind in PAGES:
            yield from self._page(first + "".join(self._all(lines)))
        else:
            yield from self._log(chain([first], lines))

    def _lines(self, number: int, stop: threading.Event) -> Iterator[str]:
        """Each line, and IDLE where there is none for now; for a log that is followed also lines that come later.

        Never blocks for longer than LOOK.
        """
        part, other = b"", None
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
            if other is None and (other := self._renamed(number)) is not None:
                continue  # what was written to the old one meanwhile is read first
            cut = os.fstat(number).st_size < os.lseek(number, 0, os.SEEK_CUR)
            if other is not None or cut:
                yield from [part.decode("utf-8", "replace")] if part else ()
                part = b""
            if other is not None:
                os.dup2(other, number, inheritable=False)
                os.close(other)
                other = None
            elif cut:  # it was truncated, and is written again
                os.lseek(number, 0, os.SEEK_SET)
            yield IDLE
            stop.wait(LOOK)
        if other is not None:
            os.close(other)
        if part:
            yield part.decode("utf-8", "replace")

    def _renamed(self, number: int) -> int | None:
        """Another file that now has the name and is not empty, opened: logrotate has renamed the old one.

        Until then the writer may still write to the old one.
        """
        try:
            status = os.stat(self._path)
            if not status.st_size or os.path.samestat(status, os.fstat(number)):
                return None
            return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # between its rename and the next
            return None

    def _unpacked(self) -> Iterator[str]:
        """Each line of a compressed file, which no longer grows."""
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
        self._follow = False
        size = 0
        for line in lines:
            size += len(line)
            if size > LARGEST:
                raise UserError(f"{self.name} is larger than {LARGEST >> 20} MiB, the limit")
            yield line

    def _log(self, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        readers = [reader(self._time or datetime.now()) for reader in LOGS]
        for reader in readers:
            if isinstance(reader, LlamaLog):
                reader.ends_with(map(unwrapped, self._tail()))
        number = 0
        for line in lines:
            if line == IDLE:
                yield from (interval for reader in readers for interval in reader.rest())
                continue
            number += 1
            if mark := next((mark for mark in WITHOUT_DRAFTS if mark in line), None):
                self._hint = WITHOUT_DRAFTS[mark]
                self.faults.add(f"line {number}", f"`{mark}` lines have no drafts")
            now = None if self._time and not self._follow else datetime.now()
            for reader in readers:
                intervals: list[ToldInterval] = []
                try:
                    intervals = reader.take(line, now)
                except UnreadableError as error:
                    self.faults.add(f"line {number}", str(error))
                    yield from self._news()
                if reader.any and not self.recognised:
                    self.recognised = reader.words
                    yield f"{self.name}: {self.recognised}"
                yield from intervals
            if self.recognised and len(readers) > 1:
                readers = [reader for reader in readers if reader.any][:1]
        yield from (interval for reader in readers for interval in reader.rest(last=True))

    def _json(self, first: str, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        """One document, or one a line."""
        try:
            value = decoded(first)
        except orjson.JSONDecodeError:
            text = first + "".join(self._all(lines))
            try:
                value, lines = decoded(text), iter(())
            except orjson.JSONDecodeError as error:
                raise UserError(f"{self.name} is no JSON: {error}") from None
        yield from self._values(value, 1)
        for number, line in enumerate(lines, 2):
            if line.strip():
                yield from self._document(line, number)
        self._finish()

    def _stream(self, first: str, lines: Iterator[str]) -> Iterator[ToldInterval | str]:
        """Server-sent events: the last one before `[DONE]` has the figures, or each has those until then."""
        chunks = Chunks()
        number = 0
        for number, line in enumerate(chain([first], lines), 1):
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                yield from self._read(f"line {number}", chunks.end)
            elif '"timings"' in data:
                yield from self._document(data, number, chunks)
            elif '"speculative_decoding"' in data or '"spec_' in data:
                yield from self._document(data, number)
        yield from self._read(f"line {number}", chunks.end)
        self._finish()

    def _finish(self) -> None:
        """Raise UserError with the reason, where nothing could be read."""
        if not self.recognised and self.faults.total:
            why, self.faults = self.faults.lines()[0], Faults()
            raise UserError(f"{self.name} has no speculation figures; {why}")

    def _document(self, line: str, number: int, chunks: Chunks | None = None) -> Iterator[ToldInterval | str]:
        """A line of JSON, or a chunk with the sums until then."""
        try:
            value = decoded(line)
        except orjson.JSONDecodeError as error:
            self.faults.add(f"line {number}", f"no JSON ({error})")
            yield from self._news()
            return
        if chunks is None:
            yield from self._values(value, number)
        else:
            yield from self._read(f"line {number}", lambda _: chunks.take(value))

    def _values(self, value: object, number: int) -> Iterator[ToldInterval | str]:
        """The intervals of a JSON value; in a list, responses that cannot be read are left out."""
        single = not isinstance(value, list) or all(isinstance(item, dict) and "name" in item for item in value)
        for index, item in enumerate([value] if single else value):  # type: ignore[arg-type,var-annotated]
            place = f"line {number}" if single else f"item {index}"
            yield from self._read(place, lambda time_ns, item=item: read_json(item, time_ns))  # type: ignore[misc]

    def _read(self, place: str, read: Callable[[int], list[ToldInterval]]) -> Iterator[ToldInterval | str]:
        """What `read` returns at this time; where it raises, a fault of that place."""
        try:
            intervals = read(time.time_ns())
        except UnreadableError as error:
            self.faults.add(place, str(error))
            yield from self._news()
            return
        if intervals and not self.recognised:
            self.recognised = intervals[0].aggregate.source
            yield f"{self.name}: {self.recognised}"
        yield from intervals

    def _news(self) -> Iterator[Left]:
        """Notices of what was left out, for a screen to show now."""
        yield from (Left(f"{self.name}: {line}") for line in self.faults.news())

    def _page(self, text: str) -> Iterator[ToldInterval | str]:
        """A page of metrics that was saved: what its counters count since they began."""
        try:
            readings = read_metrics(text, int((self._time or datetime.now()).timestamp() * 1e9))
        except UnreadableError as error:
            raise UserError(f"{self.name}: {error}") from None
        if not readings:
            raise UserError(f"{self.name} has no speculation metrics; was speculation on?")
        self.recognised = engines(readings)
        yield f"{self.name}: {self.recognised}, since the counters began"
        yield from (difference(None, reading) for reading in readings)


def unwrapped(line: str) -> str:
    """The log line inside a line of JSON, as docker, llama.cpp and others write it; any other line as it is."""
    try:
        value = decoded(line)
    except ValueError:
        return line
    if not isinstance(value, dict):
        return line
    time = value.get("time")
    if isinstance(value.get("msg"), str) and isinstance(time, int) and 0 <= time < 2**60:  # llama.cpp's: microseconds
        minutes, micro = divmod(time, 60 * 10**6)
        seconds, micro = divmod(micro, 10**6)
        return f"{minutes}.{seconds:02}.{micro // 1000:03}.{micro % 1000:03} I {value['msg']}"
    return next((text for key in ("log", "message") if isinstance(text := value.get(key), str)), line)


def open_source(text: str, seconds: float, *, follow: bool) -> Source:
    """A URL or a file. Raises UserError."""
    return Server(text, seconds) if "://" in text else File(text, follow=follow)


def metrics_url(text: str) -> str:
    """http://HOST:PORT or https://..., with /metrics where it has no path. Raises UserError."""
    parts = checked_url(text, "{} is no address of a server: write http://HOST:PORT/metrics")
    return text if parts.path.strip("/") else f"{text.rstrip('/')}/metrics"
