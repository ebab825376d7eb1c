"""Reading capture files: OTLP JSON Lines to a History, a piece at a time."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.files import BROKEN, is_being_written, open_plain, reason
from specscope.trace.history.history import History, read_place
from specscope.trace.history.wording import failures, plural
from specscope.trace.kinds import FileKind, ReadAs, kind_of, start_of
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, completed_here
from specscope.trace.record.records import StepRecord, decode_steps, missing_steps
from specscope.trace.record.vocabulary import printable
from specscope.trace.stored import CaptureSource, every_run
from specscope.trace.wire.codec import DamagedError
from specscope.trace.wire.otlp_json import Parts, ReadSpan, Spans, read_line
from specscope.trace.wire.schema import is_ours, newer, whole_objects
from specscope.trace.wire.unspan import OWN, Decoder, run_info
from specscope.trace.wire.unwrap import unwrapped

LEAST_READ = 0.01  # of a file, from which it is told how long the rest takes
NAMED = 3  # other services, at most
TOGETHER = 512  # spans that are decoded at once, at least: a capture's line may have few


class CaptureReader:
    """Reads a capture into `history`, a piece at a time, so that a screen can show the beginning at once.

    Raises UserError for a file that is none. What is damaged in one is left out, and so is a torn last line;
    `warnings` says what was, and how much is missing.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: bool = True) -> None:
        """Without `keep`, `history` has no steps: whoever takes those that were `passed` calls `tell_requests`."""
        self._keep, self.passed = keep, list[StepRecord]()
        self.source = CaptureSource.of(path)
        self.name = printable(str(self.source))
        self._other_runs = Counter[str]()  # that are left out, with their spans
        self._services: set[str] = set()  # that sent spans of other kinds: some of them
        self.warnings = [*self.source.notes]
        self.history = History()
        self._is_any = False  # whether a step was read
        self.done = False
        self.size = self._before = 0  # bytes of its files, and of those that have been read
        self._file: BinaryIO = BytesIO()  # that is being read
        self._plain = True  # it is not compressed
        self._began = time.monotonic()
        self._decoder = Decoder(patient=True)
        self._spans: list[ReadSpan | DamagedError] = []  # that wait to be decoded together
        self.history.vocabulary = self._decoder.vocabulary
        self._kinds = [self._checked(file) for file in self.source.files]
        self._lines = self._records()
        for records in self._lines:  # up to the run's resource: refuses what is no capture
            self._append(records)
            if self.history.run is not None:
                break

    def _checked(self, file: Path) -> FileKind | None:
        """The kind of a file. Raises UserError for one that is no capture."""
        try:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # a device may have no end
                raise UserError(f"cannot read {self.name}: a capture must be a regular file")
            kind = kind_of(start_of(file))
            if kind is not None and kind.reader is not ReadAs.CAPTURES:
                raise kind.refusal(str(file), "a capture")
            with open(file, "rb"):
                self.size += status.st_size
        except OSError as error:
            name, sign, step = str(file).rpartition("#")
            if sign and os.path.exists(name):
                raise UserError(
                    f"{self.name} names a place: give the whole capture, {printable(name)} (open or debug opens it at "
                    f"{printable(step)})"
                ) from None
            raise UserError(f"cannot read {self.name}: {error.strerror}") from error
        return kind

    def read(self, seconds: float | None = None) -> bool:
        """Read for about so long, or to the end; True where there is more."""
        stop = None if seconds is None else time.monotonic() + seconds
        for records in self._lines:
            self._append(records)
            if stop is not None and time.monotonic() > stop:
                return True
        if not self.done:
            self._finish()
        return False

    @property
    def progress(self) -> float:
        if self.done:
            return 1.0
        return (self._before + (0 if self._file.closed else self._file.tell())) / max(self.size, 1)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the speed so far; None where too little has been read."""
        share = self.progress
        return (time.monotonic() - self._began) * (1 - share) / share if share >= LEAST_READ else None

    def _append(self, records: Sequence[StepRecord]) -> None:
        self._is_any |= bool(records)
        self.passed += [] if self._keep else records
        for record in records if self._keep else ():
            self.history.append(record)

    def _records(self) -> Iterator[list[StepRecord]]:
        for number, line in self._documents():
            if isinstance(line, bytes) and not line.endswith(b"\n") and self._is_torn(number, line):
                break
            if not isinstance(line, bytes) or line.strip():
                self._take(number, line)
                yield self._fed() if len(self._spans) >= TOGETHER or not self._is_any else []
        yield [*self._fed(), *self._decoder.flush()]

    def _fed(self) -> list[StepRecord]:
        """The records that the spans complete which waited."""
        spans, self._spans = self._spans, []
        records = self._decoder.feed(*spans)
        self.history.run = self._decoder.run
        return records

    def _documents(self) -> Iterator[tuple[int, bytes | Parts]]:
        """Each line of OTLP JSON with its number, or what another form holds."""
        self._before = 0
        for file, kind in zip(self.source.files, self._kinds, strict=True):
            try:
                with open(file, "rb") as self._file, open_plain(self._file, str(file)) as content:
                    self._plain = content is self._file
                    yield from unwrapped(content, kind, self.name, self._leave_out)
                    self._before += self._file.tell()
            except BROKEN as error:
                if self.history.run is None or getattr(error, "strerror", None):
                    raise UserError(f"cannot read {self.name}: {reason(error)}") from error
                if not (isinstance(error, EOFError) and is_being_written(file)):  # all that was flushed is there
                    self.warnings.append(f"{self.name} was cut off: {reason(error)}")

    def _is_torn(self, number: int, line: bytes) -> bool:
        """Whether the last line is not whole. Raises UserError where nothing was read before it."""
        try:
            decoded(line)
            return False
        except ValueError as error:
            why = str(error)
        if number == 1 and self.history.run is None:
            raise UserError(f"{self.name} ends in its first line or document, so nothing can be read ({why})")
        lost = f"{len(line):,}{f' of {self.size:,}' if self._plain else ''} bytes are lost"
        self.warnings.append(f"{self.name} was cut off: its last line is incomplete, {lost}")
        return True

    def _take(self, number: int, line: bytes | Parts) -> None:
        """Keep the spans of a document. The first that is ours must tell of the run; others may be lost."""
        try:
            for resource, spans in read_line(line) if isinstance(line, bytes) else line:
                if is_ours(resource):
                    self._take_part(resource, spans)
                    continue
                self.history.others += len(spans)  # vLLM's own, SGLang's, a client's
                if len(self._services) < NAMED:
                    self._services.add(printable(str(resource.get("service.name") or "unnamed service"))[:200])
        except UserError as error:
            raise UserError(f"{self.name}, line {number}: {error}") from None
        except DamagedError as error:
            self._leave_out(number, str(error))

    def _leave_out(self, number: int, why: str) -> None:
        """Skip a line that cannot be read. Raises UserError where no line before it could be read either."""
        if self.history.run is None and not self.history.others:
            if "`resourceSpans`" in why:
                why = "its JSON has no `resourceSpans`, nor acceptance figures under names that report knows"
            raise UserError(f"{self.name} is not a capture: specscope capture writes them ({why})") from None
        self._decoder.faults.add(f"line {number}", why)

    def _take_part(self, resource: Mapping[str, Any], spans: Spans) -> None:
        run, known = resource.get("specscope.run.id"), self.history.run
        if known is not None and not isinstance(run, str):
            raise DamagedError("the resource names no run")
        if (wanted := self.source.run or (known and known.run_id)) and run != wanted:
            if not self.source.run and not self.source.first_run:
                runs = ", ".join(each.run[:12] for each in every_run(self.source) if isinstance(each, CaptureSource))
                raise UserError(
                    f"the file holds more than one run: add --run ID with one of {runs} (`report` shows each)"
                )
            self._other_runs[str(run)] += len(spans)
            return
        if known is None:
            self._decoder.run = run_info(resource)
            self._decoder.privacy = self._decoder.run.privacy
            self.warnings += [f"{self.name}: {words}"] if (words := newer(resource)) else []
            for name in whole_objects(resource)[1]:
                self._decoder.faults.add("the run", f"`{name}` was cut short")
        self._decoder.learn_vocabulary(resource.get(DRAFT_TOKENS))  # it is told once in a file, wherever that is
        self.history.run = self._decoder.run
        self._spans += spans

    def _finish(self) -> None:
        self.done = True
        decoder, history, run = self._decoder, self.history, self.history.run
        if run is None:
            services = f"holds only spans of other services ({', '.join(sorted(self._services))}) and no specscope run"
            why = services if history.others else "is not a capture: it is empty"
            others = f"has no run {self.source.run}; there are: {', '.join(self._other_runs)}"
            raise UserError(f"{self.name} {others if self._other_runs else why}")
        if decoder.summaries and not decoder.judged and not decoder.has_figures:
            raise UserError(
                f"{self.name} holds spans of level `steps`, and no request spans: open and report need them, or level "
                "`trees`"
            )
        several = f"the trace also holds requests of {plural(len(self._other_runs), 'other run')}"
        asked = f"a sample of its run ({printable(run.sampling)})"
        remarks = {
            f"{plural(decoder.summaries, 'decode step')} without evidence": decoder.summaries,
            run.privacy.lack: not run.tells_tokens,
            f"{asked}: figures cover the requests that were kept": run.sampling,
            f"{several}: only the first run is read": self._other_runs and not self.source.run,
        }
        self.warnings += [*decoder.faults.lines(), *(words for words, holds in remarks.items() if holds)]
        history.run, history.lost, history.in_part = completed_here(run), decoder.lost, decoder.in_part
        if self._keep:
            requests = history.requests.values()
            rows = [(each, len(each.rows), each.steps[-1].index + 1 if each.rows else 0) for each in requests]
            gaps = [missing_steps(last, n, each.acceptance.steps, decode_steps(each.end)) for each, n, last in rows]
            self.tell_requests(gaps, sum(request.end is None for request in requests))
            self.warnings += failures(request.end for request in requests)

    def tell_requests(self, gaps: Sequence[int], unfinished: int) -> None:
        """Warn of what is missing. `gaps`: steps of each request that are; `unfinished`: requests that did not end."""
        lost = f"without {plural(sum(gaps), 'step')} of {plural(sum(gap > 0 for gap in gaps), 'request')}"
        chosen = f"a part of its run, {lost}" if sum(gaps) else ""  # requests whose traces were chosen from a run
        if words := chosen if self._decoder.missing[OWN] else self._decoder.missing_text():
            self.warnings.append(words)
        if unfinished:
            self.warnings.append(f"{unfinished} of {plural(len(gaps), 'request')} did not end in this file")


def read_capture(path: str | os.PathLike[str], progress: Callable[[float], None] | None = None) -> CaptureReader:
    """Read a whole capture; the result has `history` and `warnings`."""
    reader = CaptureReader(path)
    while reader.read(0.2 if progress else None):
        if progress:
            progress(reader.progress)
    return reader


def split_reference(text: str) -> tuple[str, str]:
    """FILE#REQUEST[@STEP[/NODE]] as (FILE, the rest); a file's name alone gives "" for the second. Raises UserError."""
    file, place = split_file(text)
    if place and read_place(place).index is None and ("@" in place or not os.path.exists(file)):
        raise UserError(f"{text}: write a request and its step after #, such as run.jsonl#r3@17")
    return file, place


def split_file(text: str) -> tuple[str, str]:
    """FILE#REST as (FILE, REST); a file whose name has a # in it is one."""
    if isinstance(text, CaptureSource):
        return text, text.place
    file, sign, rest = text.rpartition("#")
    return (text, "") if not sign or os.path.exists(text) else (file, rest)
