"""llama.cpp's log lines, and the `timings` of its answers, to the figures of each request.

With LLAMA_TRACE=1 there is a line for each draft, so a request's counts by position and the lengths of its drafts are
exact. Without, its last lines have sums alone: drafts are then worked out from the mean length, which is rounded. A
partial acceptance that ends in a restored checkpoint is followed by a line of the same tokens, and is not counted.

Lines that sum over the server (`statistics`) count nothing here. The clock of a log begins when the server does.

An answer has sums. With `timings_per_token`, each chunk of a stream has the sums until then: every draft is a
difference of two, as long as there is a chunk for each token.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from msgspec import Struct

from specscope.trace.record.aggregate import LENGTH, RESTORED, SYNTHETIC, Aggregate, full_chains
from specscope.watch.counts import (
    ENGINES,
    POSITIONS,
    Count,
    Drafts,
    ToldInterval,
    UnreadableError,
    by_depth,
    count,
    rates_of,
    sums,
    work_out,
)

SOURCE, RESPONSE = "llama.cpp log", "llama.cpp response"

BACK = 10**9  # nanoseconds that the clock goes back only where the server was started again

_TASK = re.compile(r"\btask (-?[0-9]{1,12})\s*\|\s*(.*)")
_CLOCK = re.compile(r"(?:^|\|)\s*([0-9]{1,9})\.([0-9]{2})\.([0-9]{3})\.([0-9]{3}) [A-Z] ")
_DRAFT = re.compile(r"accepted\s+([0-9]{1,9})/\s*([0-9]{1,9}) draft tokens(.*restore checkpoint)?")
_SUMS = re.compile(
    r"draft acceptance(?: rate)? = *[0-9.]{1,20} *\( *([0-9]{1,15}) accepted */ *([0-9]{1,15}) generated\)"
    r"(?:.{0,40}mean (?:acceptance )?len(?:gth)? = *([0-9]{1,9}\.[0-9]{1,9}))?"
)
_RATES = re.compile(r"(?:acc per pos|acceptance rate per position) = \(([0-9., ]*+)\)")
_TOKENS = re.compile(r"(?<!prompt )\beval time =.{1,40}?/ *([0-9]{1,15}) tokens")
_SYNTHETIC = "synthetic speculative acceptance is enabled"


@dataclass
class _Request:
    """What the lines of a request have said."""

    began: int  # nanoseconds
    ended: int = 0
    drafts: Drafts = field(default_factory=Counter)
    restored: int = 0
    emitted: int | None = None
    sums: tuple[int, int, str] | None = None  # accepted, drafted, mean length as written
    rates: tuple[str, ...] = ()

    def exact(self) -> tuple[int, int] | None:
        """(accepted, drafted) over its drafts; None where lines of drafts are missing."""
        over = sums(self.drafts)
        return None if self.sums is not None and self.sums[:2] != over else over


class LlamaLog:
    """Takes lines in order. A request's figures come when it ends; those of one cut off, with `rest(last=True)`."""

    words = "llama.cpp's log"

    def __init__(self, now: datetime) -> None:
        self._now = now
        self._start: int | None = None  # nanoseconds: when the server's clock was at zero
        self._since = 0  # that clock at the last line
        self._requests: dict[str, _Request] = {}
        self._undrafted: list[ToldInterval] = []  # requests before any draft: they count if there is one
        self._source = SOURCE
        self._block = ""  # the request that lines without one are about: servers until May 2026 ended it with a block
        self.any = False  # whether there was a line with drafts

    def ends_with(self, lines: Iterable[str]) -> None:
        """The last lines of a file: what was written when it was last changed."""
        for line in lines:
            if (since := _clock(line)) is not None:
                self._start = max(int(self._now.timestamp() * 1e9) - since, 0)

    def take(self, line: str, now: datetime | None = None) -> list[ToldInterval]:
        """The figures of the requests that this line ends. Raises UnreadableError."""
        self._now = now or self._now
        if _SYNTHETIC in line:
            self._source = f"{SOURCE}, {SYNTHETIC}"
        match = _TASK.search(line)
        if match is None:
            if self._block:
                self._line(self._block, line, line)
            return []
        self._block = ""
        if match[1].startswith("-"):
            return []
        name, text = match[1], match[2]
        if not text.strip():
            self._block = name
        if text.startswith("processing task"):
            begun = self._ended(name)
            self._request(name, line)
            return begun
        if text.startswith("stop processing"):
            return self._ended(name)
        self._line(name, text, line)
        return []

    def rest(self, *, last: bool = False) -> list[ToldInterval]:
        """The figures of requests whose sums are known: nothing comes for now. `last`: of all."""
        names = [name for name, request in self._requests.items() if last or request.sums is not None]
        return [interval for name in names for interval in self._ended(name)]

    def _request(self, name: str, line: str) -> _Request:
        if name not in self._requests and len(self._requests) >= ENGINES:
            del self._requests[next(iter(self._requests))]
        time = self._time(line)
        request = self._requests.setdefault(name, _Request(time))
        request.ended = max(time, request.began)
        return request

    def _line(self, name: str, text: str, line: str) -> None:
        if draft := _DRAFT.search(text):
            accepted, drafted = int(draft[1]), int(draft[2])
            if accepted > drafted or drafted > POSITIONS:
                raise UnreadableError(f"a draft with {accepted} of {drafted} tokens accepted")
            self.any = True
            request = self._request(name, line)
            if draft[3]:
                request.restored += 1
            elif drafted:
                request.drafts[accepted, drafted] += 1
        elif total := _SUMS.search(text):
            self.any = True
            pair = count(float(total[1]), "accepted"), count(float(total[2]), "generated")
            if pair[0] > pair[1]:
                raise UnreadableError(f"a request with {pair[0]} of {pair[1]} draft tokens accepted")
            request = self._request(name, line)
            request.sums = (*pair, total[3] or "")
            if rates := _RATES.search(text):
                request.rates = rates_of(rates[1], "draft acceptance")
        elif rates := _RATES.match(text):
            if name in self._requests:
                self._requests[name].rates = rates_of(rates[1], "acc per pos")
        elif tokens := _TOKENS.search(text):
            self._request(name, line).emitted = int(tokens[1])

    def _ended(self, name: str) -> list[ToldInterval]:
        request = self._requests.pop(name, None)
        if request is None or (request.emitted is None and not request.drafts and request.sums is None):
            return []
        interval = ToldInterval("", request.began, request.ended, self._aggregate(f"task {name}", request))
        if not self.any:
            self._undrafted = [*self._undrafted, interval][-ENGINES:]
            return []
        held, self._undrafted = self._undrafted, []
        return [*held, interval]

    def _aggregate(self, name: str, request: _Request) -> Aggregate:
        exact = request.exact()
        averages = {RESTORED: float(request.restored)} if request.restored else {}
        if exact is None:
            return self._from_sums(name, request, averages)
        accepted_at, proposed_at = by_depth(request.drafts)
        return Aggregate(
            source=self._source,
            request=name,
            drafts=request.drafts.total(),
            drafted=exact[1],
            accepted=exact[0],
            emitted=request.emitted,
            accepted_at=accepted_at,
            proposed_at=proposed_at,
            averages=averages,
        )

    def _from_sums(self, name: str, request: _Request, averages: dict[str, float]) -> Aggregate:
        """Without its drafts, or with some of them missing: the server's own sums."""
        assert request.sums is not None
        accepted, drafted, length = request.sums
        drafts, alone = work_out(accepted, drafted, length, request.rates) if length else (None, False)
        at_depth = () if drafts is None else tuple(round(float(rate) * drafts) for rate in request.rates)
        return Aggregate(
            source=self._source,
            request=name,
            drafts=drafts,
            drafted=drafted,
            accepted=accepted,
            emitted=request.emitted,
            accepted_at=at_depth,
            proposed_at=full_chains(drafts, drafted, len(at_depth)) if at_depth else (),
            averages={**averages, **({LENGTH: float(length)} if length else {})},
            rounded=drafts is not None and not alone,
        )

    def _time(self, line: str) -> int:
        """Nanoseconds. Of a pipe, the first line with the server's clock counts as read when it was written."""
        now, since = int(self._now.timestamp() * 1e9), _clock(line)
        if since is None:
            return now
        if self._start is None or since < self._since - BACK:  # another server writes to the same log
            self._start = max(now - since, 0)
        self._since = since
        return self._start + since


def _clock(line: str) -> int | None:
    """The server's clock in a line, nanoseconds."""
    match = _CLOCK.search(line)
    if match is None:
        return None
    minutes, seconds, milli, micro = map(int, match.groups())
    return ((minutes * 60 + seconds) * 1000 + milli) * 10**6 + micro * 1000


class Timings(Struct, frozen=True):
    """Sums of a request until now. A request without drafts has neither of the last two."""

    predicted_n: Count  # output tokens
    draft_n: Count = 0
    draft_n_accepted: Count = 0


@dataclass
class ChunkDrafts:
    """The drafts of a stream, taken chunk by chunk."""

    drafts: Drafts = field(default_factory=Counter)
    exact: bool = True  # whether no chunk holds more than one step
    _last: Timings = field(default_factory=lambda: Timings(0))

    def take(self, timings: Timings) -> None:
        """The sums of the next chunk."""
        drafted = timings.draft_n - self._last.draft_n
        accepted = timings.draft_n_accepted - self._last.draft_n_accepted
        fits = 0 <= accepted <= drafted <= POSITIONS and 0 <= timings.predicted_n - self._last.predicted_n <= 1
        self.exact &= fits
        if fits and drafted:
            self.drafts[accepted, drafted] += 1
        self._last = timings


def of_llamacpp(timings: Timings, chunks: ChunkDrafts | None = None) -> Aggregate:
    """The counts of a request. Raises UnreadableError where they contradict each other."""
    accepted, drafted = timings.draft_n_accepted, timings.draft_n
    if accepted > drafted:
        raise UnreadableError(f"timings with {accepted} of {drafted} draft tokens accepted")
    known = chunks is not None and chunks.exact and sums(chunks.drafts) == (accepted, drafted)
    drafts = chunks.drafts if chunks is not None and known else Counter[tuple[int, int]]()
    accepted_at, proposed_at = by_depth(drafts)
    return Aggregate(
        source=RESPONSE,
        drafts=drafts.total() if known else None,
        drafted=drafted,
        accepted=accepted,
        emitted=timings.predicted_n,
        accepted_at=accepted_at,
        proposed_at=proposed_at,
    )
