"""Log lines to intervals: a reader for each engine's form, and one of each for every writer of a log.

What stands before an engine's own part of a line says who wrote it (`kubectl logs --prefix`, stern, compose, swarm,
`srun -l`, mpirun, Ray, llama.cpp's router, grep), or the line that `tail a b` puts above those of a file: its lines are
those of another engine. Times there are not a name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from specscope.trace.checked import decoded
from specscope.trace.record.aggregate import DEPTH, LENGTH, RESTORED, SYNTHETIC, Aggregate
from specscope.watch.counts import (
    ENGINES,
    POSITIONS,
    Drafts,
    ToldInterval,
    UnreadableError,
    load_of,
    make_room,
    of_drafts,
    rates_of,
    worked_out,
)
from specscope.watch.names import NOT_V0, V0_LINE

_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,9})?)"
_COLOUR = re.compile(r"\x1b?\[[0-9;]{0,20}m")  # a terminal's; pasted, they have lost their first character
# Of what stands before a line of an engine, what is no name: times, levels, loggers, pids, line numbers, streams
_NO_NAME = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ,]+\d\d:\d\d:\d\d\S*)?|\b[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d\S*|\b\d\d:\d\d:\d\d\S*"
    r"|\[ *\d+\.\d+\]|\[\d+\](?=:)|(?<![\w-])(?:@[0-9a-f]{24}|\d{10,19}(?:\.\d+)?)(?![\w-])[,\"]*|^\s*\d+\s"
    r"|(?:^|:)\d+[:-]$|\b\d\d/\d\d/\d{4}\b|\b[AP]M\b|\b(?:DEBUG|INFO|WARNING|ERROR)\b|\bvllm(?:\.\w+)+(?::\w+)*"
    r"|\[?\b\w+\.py:\d+\]?|\bstd(?:out|err)\b(?: [FP]\b)?"
)
_MARKS = re.compile(r"[\[\](){}<>|]|(?<!\S)[-:]|[-:](?!\S)")  # around a name
_FILE = re.compile(r"==> (.{1,500}) <==\s*$")  # above the lines of each file, by tail
_PROCESS = re.compile(r"\((\w{1,80}) pid=(\d{1,12})\)")  # of vLLM
LONGEST_PREFIX = 500  # characters
ALONE = 3  # intervals in a row, by which a second process is the first server, started again
TEXTS = ("log", "message", "msg", "MESSAGE")  # of a line of JSON, what was written; else its longest text
PODS = ("pod_name", "podName", "pod", "container_name", "CONTAINER_NAME", "hostname", "_HOSTNAME", "host")  # and who
STAMPS = ("time", "timestamp", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP")  # and when


class LogReader:
    """Takes the lines of one writer in order."""

    words = source = ""
    marks: tuple[str, ...] = ()  # of lines that it looks at
    own = synthetic = re.compile("$.")  # where its own part of a line begins; that verdicts are made up
    clock: re.Pattern[str] | None = None  # a time, which may stand before that part
    is_log = True  # else what an example prints at its end: its log has the same counts

    def __init__(self, now: datetime, tail: list[str]) -> None:
        self.any = False  # whether there was a line with drafts
        self.now = now  # the newest time that a line may be of
        self._ends: dict[str, int] = {}  # of each engine's last interval

    def _take(self, line: str) -> list[ToldInterval]:
        """The intervals of a line, and those held until now. Raises UnreadableError where it is cut or changed."""
        raise NotImplementedError

    def _rest(self, *, last: bool) -> list[ToldInterval]:
        """The intervals still held: there are no more lines (`last`), or none for now."""
        return []

    def _since(self, engine: str, end: int) -> int:
        """Where an engine's interval begins that ends then, if nothing else says so: at the end of the one before."""
        start = min(self._ends.get(engine, end), end)
        make_room(self._ends, engine)
        self._ends[engine] = end
        return start


@dataclass
class _Writer:
    before: str  # what stands before its lines
    process: str  # "pid 7" of another server than the first of those with the same before; else ""
    reader: LogReader
    held: list[ToldInterval] | None  # until it is known whether it is one, or the first server started again


class Log:
    """The lines of one form of log, each writer's by itself. `tail`: the last lines of a file, written at `now`.

    A writer is what stands before a line, and vLLM's process. A second server's process is a name where nothing else
    is; several of one server (ApiServer_1) are not. A server that was started again is a process that speaks alone.
    """

    def __init__(self, form: type[LogReader], now: datetime, tail: list[str]) -> None:
        self.form, self._now, self._tail, self._file = form, now, tail, ""
        self._writers: dict[tuple[str, str], _Writer] = {}
        self._made_up: set[str] = set()  # those before whose lines it stands
        self.name = ""  # of an engine without one, where the log has another form before

    @property
    def any(self) -> bool:
        return any(writer.reader.any for writer in self._writers.values())

    def take(self, line: str, now: datetime | None = None) -> list[ToldInterval]:
        """The intervals of a line, and those held until now. Raises UnreadableError where it is cut or changed."""
        self._now = now or self._now
        if match := _FILE.match(line):
            self._file = f"{match[1]} "
        if not any(mark in line for mark in self.form.marks):
            return []
        within, line = self._split(line)
        before = f"{self._file}{within}".strip()
        if self.form.synthetic.search(line):
            self._made_up.add(before)
        key = before, match[0] if (match := _PROCESS.match(line)) else ""
        server = f"pid {match[2]}" if match and match[1] == "APIServer" else ""
        others = [writer for name, writer in self._writers.items() if name != key and name[0] == before]
        if key not in self._writers:
            make_room(self._writers, key)
            tail = [text for each, text in map(self._split, self._tail) if each == within]
            process = server if others else ""
            self._writers[key] = _Writer(before, process, self.form(self._now, tail), [] if process else None)
        writer, intervals = self._writers[key], list[ToldInterval]()
        for other in others if server else ():  # they write in turn
            intervals += self._decided(other, other.process)
        writer.reader.now = self._now
        told = writer.reader._take(line)
        if writer.held is None:
            return intervals + self._named(writer, told)
        writer.held += told
        return intervals + (self._decided(writer) if len(writer.held) >= ALONE else [])

    def rest(self, *, last: bool = False) -> list[ToldInterval]:
        """The intervals still held: there are no more lines (`last`), or none for now."""
        intervals = list[ToldInterval]()
        for writer in self._writers.values():
            intervals += self._decided(writer) if last and writer.held is not None else []
            intervals += self._named(writer, writer.reader._rest(last=last)) if writer.held is None else []
        return intervals

    def _decided(self, writer: _Writer, process: str = "") -> list[ToldInterval]:
        """What was held of a writer, of which it is known now whether it is a second server."""
        held, writer.held, writer.process = writer.held or [], None, process
        return self._named(writer, held)

    def _named(self, writer: _Writer, intervals: list[ToldInterval]) -> list[ToldInterval]:
        source = f"{self.form.source}, {SYNTHETIC}" if writer.before in self._made_up else ""
        named = [told.of(writer.before, told.aggregate.engine, writer.process, source=source) for told in intervals]
        return [told if told.aggregate.engine else told.of(self.name) for told in named]

    def _split(self, line: str) -> tuple[str, str]:
        """(who wrote a line, what the engine wrote)."""
        line = _COLOUR.sub("", line)
        match = self.form.own.search(line, 0, LONGEST_PREFIX)
        start = match.start() if match else 0
        before, own = line[:start], line[start:]
        time = None if (clock := self.form.clock) is None or clock.search(own) else clock.search(before)
        name = " ".join(_MARKS.sub(" ", _NO_NAME.sub(" ", before)).split())
        return name, own if time is None else f"{own.rstrip()} ({time[0]})"


def unwrapped(line: str) -> str:
    """The log line inside a line of JSON, as docker, llama.cpp and others write it; any other line as it is."""
    try:
        value = decoded(line)
    except ValueError:
        return line
    if not isinstance(value, dict):
        return line
    time, resource = value.get("time"), value.get("resource")
    if isinstance(value.get("msg"), str) and isinstance(time, int) and 0 <= time < 2**60:  # llama.cpp's: microseconds
        digits = f"{time % (60 * 10**6):08}"
        return f"{time // (60 * 10**6)}.{digits[:2]}.{digits[2:5]}.{digits[5:]} I {value['msg']}"
    places = [
        value.get("kubernetes"),
        value.get("labels"),
        isinstance(resource, dict) and resource.get("labels"),
        value,
    ]
    pod = next((str(each[key]) for each in places if isinstance(each, dict) for key in PODS if key in each), "")
    longest = max((text for text in value.values() if isinstance(text, str)), key=len, default=line)
    text = next((text for key in TEXTS if isinstance(text := value.get(key), str)), longest)
    stamp = "" if _TIME.search(text) else next(filter(None, (_stamp(value.get(key)) for key in STAMPS)), "")
    return " ".join(filter(None, (stamp, pod and f"[{pod}]", text.rstrip())))


def _stamp(time: object) -> str:
    """When a line of JSON was written; "" for what is no time. Numbers may count parts of seconds."""
    text = str(time)
    try:
        if not re.fullmatch(r"\d{10,19}(?:\.\d{1,9})?", text):
            return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}"
        return f"{datetime.fromtimestamp(int(text[:10])):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return ""


def _ns(time: datetime) -> int:
    return max(int(time.timestamp() * 1e9), 0)


def _found(forms: Mapping[str, re.Pattern[str]], line: str) -> dict[str, str]:
    return {name: match[1] for name, form in forms.items() if (match := form.search(line))}


MARK = "SpecDecoding metrics:"
LOAD = "Avg generation throughput:"
BEHIND = "Avg Draft acceptance rate"  # the rates by position
_NAN = "nan"  # older versions write it for an interval in which nothing was drafted
_TIME = re.compile(r"\b(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)\b")
_FIELDS = {
    "length": re.compile(rf"Mean acceptance length: ({_NUMBER[1:-1]}|{_NAN})(?=,|\s|$)"),
    "accepted": re.compile(r"Accepted: ([0-9]{1,15}) tokens"),
    "drafted": re.compile(r"Drafted: ([0-9]{1,15}) tokens"),
    "rates": re.compile(r"Per-position acceptance rate: ([0-9na., ]++)(?:Avg|\(|\s*$)"),  # ++: never looked at twice
    "depth": re.compile(r"Current speculative depth: ([0-9]{1,4})\b"),
    "speed": re.compile(rf"Drafted throughput: {_NUMBER} tokens/s"),
}
_LOAD = {
    "engine": re.compile(r"\bEngine (\d{1,9}): "),
    "generation tokens/s": re.compile(rf"Avg generation throughput: {_NUMBER} tokens/s"),
    "prompt tokens/s": re.compile(rf"Avg prompt throughput: {_NUMBER} tokens/s"),
    "running": re.compile(r"Running: ([0-9]{1,9}) reqs"),
    "waiting": re.compile(r"Waiting: ([0-9]{1,9}) reqs"),
    "kv": re.compile(rf"KV cache usage: {_NUMBER}%"),
}


class VllmLog(LogReader):
    """vLLM's, of one process. A line of metrics belongs to the engine that the line before it names.

    A log may begin between the two: then its intervals are held until the process names an engine for the second time.
    If it named only one, they are its own. A line rounds, and has no number of drafts: that is worked out.
    """

    words, source = "vLLM's log", "vLLM log"
    marks = (MARK, LOAD, V0_LINE, "rejection_sample_method")
    own = re.compile(
        r"(?:\((?:A[Pp][Ii]Server|EngineCore|Worker|DPCoordinator)\w* pid=\d+\) *)?(?:(?:DEBUG|INFO|WARNING|ERROR) "
        rf"(?:\d{{4}}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d|Engine \d+: |{MARK})"
    )
    clock = _TIME
    # Of the configuration that it prints when it starts
    synthetic = re.compile(r"rejection_sample_method['\"]?\s{0,4}[:=]\s{0,4}['\"]?synthetic\b")

    def __init__(self, now: datetime, tail: list[str]) -> None:
        super().__init__(now, tail)
        self._engine = ""  # of the line before
        self._load: Mapping[str, str] = {}  # of that line; used by one line of metrics
        self._engines: set[str] = set()  # all that it has named
        self._held: list[ToldInterval] | None = None  # from before it is known whether there are several
        self._unnamed: str | None = None  # the engine kept without a name: it was reported before it was named
        self._form = 0  # of its lines: 0 without rates by position, 1 with these last, 2 with more behind them
        self._lines: set[int] = set()  # hashes of those with a time, and their engine: a log may be there twice

    def _take(self, line: str) -> list[ToldInterval]:
        if MARK in line:
            return self._metrics(line)
        if V0_LINE in line:
            raise UnreadableError(NOT_V0)
        if LOAD not in line:
            return []
        self._load = _found(_LOAD, line)
        name = self._load.get("engine", "")
        if not self._engines and self.any and self._held is None:
            self._unnamed = name
        self._engine = "" if name == self._unnamed else name
        again = self._engine in self._engines
        if len(self._engines) < ENGINES:
            self._engines.add(self._engine)
        return self._rest(last=False) if again else []

    def _rest(self, *, last: bool) -> list[ToldInterval]:
        held, self._held = self._held or [], None
        only = next(iter(self._engines)) if len(self._engines) == 1 else ""
        return [interval.of(interval.aggregate.engine or only) for interval in held]

    def _metrics(self, line: str) -> list[ToldInterval]:
        interval = self._interval(line)
        is_first, self.any = not self.any, True
        form = (1 + (BEHIND in line)) * (_FIELDS["rates"].search(line) is not None)
        if form < self._form and interval.aggregate.drafted:
            raise UnreadableError(f"a `{MARK}` line that is cut off")
        self._form = max(self._form, form)
        if (known := hash((self._engine, line))) in self._lines:
            raise UnreadableError(f"a `{MARK}` line that the log has twice")
        if (self._engine or not self._engines) and interval.aggregate.drafted and _TIME.search(line):
            self._lines.add(known)  # else it may be of another engine
        self._load = {}
        if is_first and not self._engines:
            self._held = []
        if len(self._engines) > 1:
            self._engine = ""
        if self._held is None:
            return [interval]
        self._held.append(interval)
        waits = is_first or (self._engines and len(self._held) < ENGINES)
        return [] if waits else self._rest(last=False)  # nothing here names an engine

    def _interval(self, line: str) -> ToldInterval:
        counts, load = aggregate(line), self._load
        end = self._time(line)
        start = self._since(self._engine, end)
        if (match := _FIELDS["speed"].search(line)) and float(match[1]):
            start = max(end - int((counts.drafted or 0) / float(match[1]) * 1e9), 0)
        told = replace(
            counts,
            engine=self._engine,
            **load_of(load.get("running"), load.get("waiting"), float(load.get("kv", -1)) / 100),
            averages={**counts.averages, **{k: float(v) for k, v in load.items() if k.endswith("tokens/s")}},
        )
        return ToldInterval("", start, end, told)

    def _time(self, line: str) -> int:
        """Nanoseconds; the newest year in which the time has been. Now where the line has none."""
        match = _TIME.search(line)
        for year in range(self.now.year, self.now.year - 9, -1) if match else ():
            try:
                time = datetime(year, *map(int, match.groups()))  # type: ignore[union-attr,arg-type]
            except ValueError:  # the 29th of February, or no time at all
                continue
            if time <= self.now + timedelta(days=1):
                return _ns(time)
        return _ns(self.now)


def aggregate(line: str) -> Aggregate:
    """The counts of one line of vLLM. Raises UnreadableError."""
    values = _found(_FIELDS, line)
    needed = ("accepted", "drafted", *("length",) * ("Mean acceptance" in line))  # vLLM 0.8.3 has none
    if missing := next((name for name in needed if name not in values), None):
        raise UnreadableError(f"a `{MARK}` line without its {missing}: it is cut off or of another version")
    accepted, drafted, length = int(values["accepted"]), int(values["drafted"]), values.get("length", "")
    if length == _NAN and (accepted or drafted):
        raise UnreadableError(f"a `{MARK}` line that drafted tokens and whose length is not a number")
    rates = rates_of(values["rates"], MARK) if "rates" in values and length != _NAN else ()
    over = sum(map(float, rates)) - float(length) + 1 if rates and length and BEHIND not in line else 0
    if abs(over) > 0.0051 + 0.0005 * len(rates):  # the length is 1 + all of them, and each is rounded
        raise UnreadableError(f"a `{MARK}` line that is cut off")
    shown, depth = POSITIONS, {}
    if "depth" in values:  # vLLM has a rate of 0 at the depths that it no longer drafts
        shown = max(int(values["depth"]), sum(float(rate) > 0 for rate in rates))
        depth = {DEPTH: float(values["depth"])}
    if length == _NAN:
        return Aggregate(VllmLog.source, drafts=0, drafted=0, accepted=0, averages=depth)
    told = worked_out(VllmLog.source, accepted, drafted, length, rates, shown)
    return replace(told, averages={**told.averages, **depth})


_HEAD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]{2}\d{1,6})*)\]")
_ROUNDED = r"([0-9]{1,15}\.[0-9]{2,9})"  # to two digits: with fewer it is cut off
_AVERAGES = {
    "sglang:spec_accept_length": re.compile(rf"\baccept len: {_ROUNDED}"),
    "sglang:spec_accept_rate": re.compile(rf"\baccept rate: {_ROUNDED}"),
    "sglang:spec_cap_length": re.compile(rf"\bcap len: {_ROUNDED}"),
    "sglang:spec_block_accept_length": re.compile(rf"\bblock accept len: {_ROUNDED}"),
    "sglang:gen_throughput": re.compile(rf"\bgen throughput \(token/s\): {_ROUNDED}"),
}
_BATCH = {
    "running": re.compile(r"#running-req: ([0-9]{1,9})"),
    "waiting": re.compile(r"#queue-req: ([0-9]{1,9})"),
    "usage": re.compile(rf"\btoken usage: {_ROUNDED}"),
}


class SglangLog(LogReader):
    """SGLang's, of averages alone. Each rank that writes its own lines is an engine, tensor parallel ranks apart."""

    words, source = "SGLang's log", "SGLang log"
    marks = ("Decode batch",)
    own = re.compile(rf"{_HEAD.pattern}|\bDecode batch\b")
    _whole = False  # whether a line had what its lines end with

    def _take(self, line: str) -> list[ToldInterval]:
        if "Decode batch" not in line or "accept len: " not in line:
            return []
        averages = {name: float(value) for name, value in _found(_AVERAGES, line).items()}
        head, batch = _HEAD.search(line), _found(_BATCH, line)
        if "sglang:spec_accept_length" not in averages or (self._whole and "waiting" not in batch):
            raise UnreadableError("a `Decode batch` line that is cut off")
        self.any, self._whole = True, "waiting" in batch
        engine = " ".join(rank for rank in head[2].split() if rank.startswith("DP")) if head else ""
        try:
            end = _ns(datetime.fromisoformat(head[1]) if head else self.now)
        except ValueError:
            end = _ns(self.now)
        counts = Aggregate(
            self.source,
            engine,
            **load_of(batch.get("running"), batch.get("waiting"), float(batch.get("usage", -1))),
            averages=averages,
        )
        return [ToldInterval("", self._since(engine, end), end, counts)]


BACK = 10**9  # nanoseconds that llama.cpp's clock goes back only where the server was started again
_CLOCK = r"([0-9]{1,9})\.([0-9]{2})\.([0-9]{3})\.([0-9]{3}) [A-Z] "
_TASK = re.compile(r"\btask (-?[0-9]{1,12})\s*\|\s*(.*)")
_DRAFT = re.compile(r"accepted\s+([0-9]{1,9})/\s*([0-9]{1,9}) draft tokens(.*restore checkpoint)?")
_SUMS = re.compile(
    r"draft acceptance(?: rate)? = *[0-9.]{1,20} *\( *([0-9]{1,15}) accepted */ *([0-9]{1,15}) generated\)"
    rf"(?:.{{0,40}}mean (?:acceptance )?len(?:gth)? = *{_ROUNDED})?"
)
_RATES = re.compile(r"(?:acc per pos|acceptance rate per position) = \(([0-9., ]*+)\)")
_TOOK = re.compile(r"\beval time = *([0-9]{1,12}\.[0-9]{1,9}) ms")  # for the prompt, and for the answer
_TOKENS = re.compile(r"(?<!prompt )\beval time =.{1,40}?/ *([0-9]{1,15}) tokens")
_SERVER = re.compile(  # of each drafter: drafts that it made, tokens accepted
    r"\bstatistics +([\w.-]{1,60}): .{0,200}?#gen drafts = *([0-9]{1,15}),.{0,150}?#acc tokens = *([0-9]{1,15}),"
)


@dataclass
class _Request:
    began: int  # nanoseconds
    ended: int = 0
    drafts: Drafts = field(default_factory=Counter)
    took: int = 0  # nanoseconds, as its lines say: where it began may not be among them
    restored: int = 0
    emitted: int | None = None
    sums: tuple[int, int, str] | None = None  # accepted, drafted, mean length as written
    rates: tuple[str, ...] = ()


class LlamaLog(LogReader):
    """llama.cpp's. A request's figures come when it ends; those of one cut off, with `rest(last=True)`.

    With LLAMA_TRACE=1 there is a line for each draft, else sums alone. A partial acceptance that ends in a restored
    checkpoint is followed by a line of the same tokens, and is not counted. A server's sums are told beside a request.

    Its clock begins with the server: the last line of a file was written when that was last changed, the first of a
    pipe when it was read. A line without it is of the time of the one before.
    """

    words, source = "llama.cpp's log", "llama.cpp log"
    marks = ("task ", " time =", "draft acceptance", "acc per pos", "statistics ", "synthetic speculative")
    synthetic = re.compile("synthetic speculative acceptance is enabled")
    own = re.compile(
        rf"(?<![\d.]){_CLOCK}|\b(?:slot|srv|statistics|(?:prompt )?eval time|total time|draft acceptance|acc per pos)\b"
    )
    _clock = re.compile(_CLOCK)

    def __init__(self, now: datetime, tail: list[str]) -> None:
        super().__init__(now, tail)
        self._start: int | None = None  # nanoseconds: when the server's clock was at zero
        self._last = 0  # that clock at the last line
        self._requests: dict[str, _Request] = {}
        self._undrafted: list[ToldInterval] = []  # requests before any draft: they count if there is one
        self._server: dict[str, tuple[int, int]] = {}  # by drafter: drafts, accepted tokens
        self._block = ""  # the request that lines without one are about: servers until May 2026 ended it with a block
        self._alone = 1  # the number of such a block without its request's
        for line in filter(self._clock.match, tail):
            self._start = None
            self._tick(line)
        self._last = 0

    def _take(self, line: str) -> list[ToldInterval]:
        self._tick(line)
        if server := _SERVER.search(line):
            make_room(self._server, server[1])
            self._server[server[1]] = int(server[2]), int(server[3])
        match = _TASK.search(line)
        if match is None:
            return self._bare(line)
        if match[1].startswith("-"):
            return []
        name, text = f"task {match[1]}", match[2]
        self._block = "" if text.strip() else name
        self._line(name, text)
        ended = self._ended(name) if text.startswith(("processing task", "stop processing")) else []
        if text.startswith("processing task"):
            self._request(name)
        return ended

    def _bare(self, line: str) -> list[ToldInterval]:
        """A line of a block. One that was pasted may lack its request's line, and goes from a prompt to the sums."""
        name = self._block or f"request {self._alone}"
        ended = [] if self._block or "prompt eval time" not in line else self._ended(name)
        self._line(name, line)
        if self._block or name not in self._requests or self._requests[name].sums is None:
            return ended
        self._alone += 1
        return [*ended, *self._ended(name)]

    def _rest(self, *, last: bool) -> list[ToldInterval]:
        # The requests whose sums are known, or all; but that of the last line may have drafts that are cut off
        cut, requests = next(reversed(self._requests), ""), self._requests.items()
        names = [name for name, each in requests if each.sums or (last and (each.drafts or name != cut))]
        return [interval for name in names for interval in self._ended(name)]

    def _tick(self, line: str) -> None:
        if match := self._clock.match(line):
            minutes, seconds, milli, micro = map(int, match.groups())
            time = ((minutes * 60 + seconds) * 1000 + milli) * 10**6 + micro * 1000
            if self._start is None or time < self._last - BACK:  # another server writes to the same log
                self._start = max(_ns(self.now) - time, 0)
            self._last = time

    def _request(self, name: str) -> _Request:
        make_room(self._requests, name)
        time = _ns(self.now) if self._start is None else self._start + self._last
        self._requests[name] = request = self._requests.pop(name, _Request(time))  # the last one now
        request.ended = max(time, request.began)
        return request

    def _line(self, name: str, text: str) -> None:
        draft, total, rates = _DRAFT.search(text), _SUMS.search(text), _RATES.search(text)
        whole = (("draft acceptance", total), ("generated),", total and total[3]), ("per pos", rates))
        if any(start in text and not found for start, found in whole):
            self._request(name).emitted = None  # it did not go without drafts
            raise UnreadableError("a `draft acceptance` line that is cut off")
        if counted := draft or total:
            accepted, drafted = int(counted[1]), int(counted[2])
            if accepted > drafted or (draft and drafted > POSITIONS):
                what = "draft" if draft else "request"
                raise UnreadableError(f"a {what} with {accepted} of {drafted} draft tokens accepted")
            self.any = True
            request = self._request(name)
            if draft is None:
                request.sums = accepted, drafted, counted[3] or ""
            elif draft[3]:
                request.restored += 1
            elif drafted:
                request.drafts[accepted, drafted] += 1
        if rates and draft is None and name in self._requests:
            self._requests[name].rates = rates_of(rates[1], "acc per pos")
        if self._start is not None and (took := _TOOK.search(text)):  # else they may have been at once
            self._request(name).took += int(float(took[1]) * 1e6)
        if tokens := _TOKENS.search(text):
            self._request(name).emitted = int(tokens[1])

    def _ended(self, name: str) -> list[ToldInterval]:
        request = self._requests.pop(name, None)
        if request is None or (request.emitted is None and not request.drafts and request.sums is None):
            return []
        began = max(min(request.began, request.ended - request.took), 0)
        interval = ToldInterval("", began, request.ended, self._aggregate(name, request))
        if not self.any:
            self._undrafted = [*self._undrafted, interval][-ENGINES:]
            return []
        held, self._undrafted = self._undrafted, []
        return [*held, interval]

    def _aggregate(self, name: str, request: _Request) -> Aggregate:
        """Without its drafts, or with some of them missing: from the server's own sums."""
        told = Aggregate(self.source, **of_drafts(request.drafts))
        if request.sums is not None and request.sums[:2] != (told.accepted, told.drafted):
            told = worked_out(self.source, *request.sums, request.rates)
        averages = {**told.averages, **({RESTORED: float(request.restored)} if request.restored else {})}
        drafts, accepted = (sum(each[side] for each in self._server.values()) for side in (0, 1))
        if drafts:  # what the server has told of all its requests: its mean length, and each drafter's share in it
            averages[f"server so far: {LENGTH}"] = 1 + accepted / drafts
            shares = {name: tokens / accepted for name, (_, tokens) in self._server.items() if accepted}
            averages |= {f"server so far: share of accepted tokens by {name}": part for name, part in shares.items()}
        return replace(told, request=name, emitted=request.emitted, averages=averages)
