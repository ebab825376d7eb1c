"""History: the records of one run in memory, indexed the ways people look at them.

The live screen, replay and report are all fed from one of these, so they show the same thing. A run is a tree of
branches. `steps` is the path from the start to where the history stands; steps beside it and after it are known too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from specscope.errors import UserError
from specscope.trace.checked import short, whole
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.history.totals import Item, RunningTotals, Undrafted, why_undrafted
from specscope.trace.record.aggregate import RequestFigures
from specscope.trace.record.declared import made
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import Moved, Origin, RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.run.packed import PartStore, PartViews, part_weight

KEPT = 20_000  # most steps kept of a running engine, on its timeline and in each history of it; a capture keeps all
KEPT_BYTES = 512 * 2**20  # most bytes of those steps, roughly
SPEED_NS = 3_000_000_000  # tokens per second are measured over this much of the run
RECENT_BYTES = 64 * 2**20  # most bytes kept of an engine that nobody watches


def weight(record: StepRecord) -> int:
    """Bytes that a record takes in memory, roughly."""
    return _own_weight(record) + sum(map(part_weight, record.requests))


def _own_weight(record: StepRecord) -> int:
    aggregate = record.aggregate
    depths = 0 if aggregate is None else len(aggregate.accepted_at) + len(aggregate.proposed_at)
    size = 3000 + 40 * depths + 200 * (len(record.phases) + len(record.passes)) + 100 * len(record.preempted)
    size += sum(2000 + 2 * len(info.prompt) + 4 * len(info.prompt_tokens) for info in record.admitted)
    return size + sum(2000 + 2 * len(end.error) + 4 * len(end.output) for end in record.finished)


@dataclass(frozen=True)
class PlaceName:
    """A place in a run as people write it: r3, r3@17 or r3@17/4."""

    request: str
    index: int | None = None  # the request's own step
    node: int | None = None  # of that step's tree; the number of nodes is the final token


def read_place(text: str) -> PlaceName:
    """REQUEST@STEP or REQUEST@STEP/NODE; anything else is a request's name."""
    name, sign, rest = text.rpartition("@")
    index, slash, node = rest.partition("/")
    if not sign or not name or whole(index) is None or (slash and whole(node) is None):
        return PlaceName(text)
    return PlaceName(name, int(index), int(node) if slash else None)


class RecentSteps:
    """The newest records, within a number and within bytes: for a debugger that may come later."""

    def __init__(self, limit: int, limit_bytes: int = RECENT_BYTES) -> None:
        self._limit, self._limit_bytes = limit, limit_bytes
        self._records: deque[tuple[StepRecord, int]] = deque()
        self._bytes = 0

    def append(self, record: StepRecord) -> None:
        self._records.append((record, weight(record)))
        self._bytes += self._records[-1][1]
        while len(self._records) > self._limit or self._bytes > self._limit_bytes:
            self._bytes -= self._records.popleft()[1]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter([record for record, _ in self._records])

    def take(self) -> Iterator[StepRecord]:
        """All records, oldest first; the buffer is emptied."""
        every = iter(self)
        self._records, self._bytes = deque(), 0
        return every


@dataclass
class RequestHistory:
    id: str
    info: RequestInfo | None = None  # None until its admission was seen (it may have been dropped on the way)
    end: RequestEnd | None = None  # None while it runs
    rows: list[int] = field(default_factory=list, compare=False, repr=False)  # of its steps in `parts`
    parts: PartStore = field(default_factory=PartStore, compare=False, repr=False)  # the run's
    totals: RunningTotals = field(default_factory=RunningTotals, compare=False)  # after each of `steps`, or of `sums`
    first: int = 0  # the position in History.steps at which it was first seen
    ended: int | None = None  # that at which it ended
    preemptions: list[int] = field(default_factory=list)  # those at which its KV was taken
    sums: RequestFigures | None = None  # where it ended and none of its steps is known: what its own span tells

    @property
    def steps(self) -> PartViews:
        return PartViews(self.parts, self.rows)

    @property
    def engine_steps(self) -> list[int]:
        """The position in History.steps of each of `steps`."""
        return self.totals.positions if self.sums is None else self.totals.positions[1:]  # that of `sums` is first

    @property
    def acceptance(self) -> Acceptance:
        return self.totals.total

    @property
    def state(self) -> str:
        """`running`, or the reason it finished."""
        return self.end.reason.value if self.end else "running"

    def count_at(self, position: int) -> int:
        """How many of `steps` it had made by a position in History.steps."""
        return max(self.totals.count(position) - (self.sums is not None), 0)

    def acceptance_at(self, position: int) -> Acceptance:
        return self.totals.upto(position)

    def state_at(self, position: int) -> str:
        """Its state at a position: `later`, `prefill`, `running`, `preempted`, or why it ended."""
        if self.first > position:
            return "later"
        if self.ended is not None and self.ended <= position:
            return self.state
        count = self.count_at(position)
        taken = bisect_right(self.preemptions, position)
        if taken and self.preemptions[taken - 1] >= (self.engine_steps[count - 1] if count else -1):
            return "preempted"
        return "running" if count and self.steps[count - 1].is_judged else "prefill"

    def place_of(self, index: int) -> int | None:
        """The place in `steps` of the request's step of that number; None where it is not known."""
        place = bisect_left(self.rows, index, key=lambda row: self.parts[row].index)
        return place if place < len(self.rows) and self.steps[place].index == index else None

    def at(self, index: int) -> int:
        return self.engine_steps[self._place(index)]

    def step(self, index: int) -> RequestStep:
        return self.steps[self._place(index)]

    def _place(self, index: int) -> int:
        place = self.place_of(index)
        if place is None:
            known = f"{self.steps[0].index} to {self.steps[-1].index}" if self.steps else "none yet"
            raise UserError(f"{short(self.id)} has no step {index}; its steps: {known}")
        return place

    def output(self, upto: int | None = None) -> list[tuple[int, Origin]]:
        """Output tokens with their origins, from the first `upto` of its steps (all by default)."""
        out: list[tuple[int, Origin]] = []
        for step in self.steps[:upto]:
            if tokens := step.tokens():
                origins = [Origin.ACCEPTED] * (len(tokens) - 1) + [Origin(step.told("verdict", "kind").value)]
                out += [*zip(tokens, origins, strict=True)][: step.emitted]
        return out

    @property
    def found(self) -> int:
        """Tokens whose KV it found in a prefix cache."""
        return sum(step.found for step in self.steps)

    def before(self, place: int, limit: int) -> list[int]:
        """At most `limit` tokens before the step at `place` in `steps`; not the prompt's where a gap follows it."""
        tail: list[int] = []
        while place > 0 and len(tail) < limit:
            place -= 1
            tail = [*self.steps[place].output(), *tail]
        if len(tail) < limit and self.info is not None and (earlier := self.earlier()) is not None:
            tail = [*earlier, *tail]
            tail = [*self.info.prompt_tokens[-max(limit - len(tail), 1) :].tolist(), *tail]
        return tail[-limit:]

    def earlier(self) -> list[int] | None:
        """The output before the first of `steps`, from what its end tells; None where it is not known."""
        if not self.steps or not self.steps[0].index:
            return []
        first = next((step for step in self.steps if step.verdict is not None), None)
        output = None if self.end is None else told_ids(self.end.output)
        if first is None or self.info is None or not len(self.info.prompt_tokens) or output is None:
            return None
        count = first.position + 1 - len(self.info.prompt_tokens)
        return output[:count] if count >= 0 and output[count : count + first.emitted] == first.output() else None

    def output_text(self, vocabulary: Vocabulary) -> str:
        tokens = [token for token, _ in self.output()]
        return vocabulary.text(tokens) if self.end is None else self.end.text(tokens, vocabulary)


@dataclass(frozen=True)
class Branch:
    number: int  # 0 is what ran first
    first: int  # its first step
    after: int  # the step that it follows, on another branch; -1 for none

    def begins(self) -> str:
        if not self.number:
            return "the original run"
        return f"step {self.first:,} follows {f'step {self.after:,}' if self.after >= 0 else 'the start'}"


@dataclass
class History:
    """All of a run that is known so far. `append` is called on one thread; readers see a growing list."""

    run: RunInfo | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestHistory] = field(default_factory=dict)  # as of the last of `steps`
    parts: PartStore = field(default_factory=PartStore, compare=False, repr=False)  # of all that is known
    totals: RunningTotals = field(default_factory=RunningTotals, compare=False, repr=False)  # after each of `steps`
    branches: dict[int, Branch] = field(default_factory=lambda: {0: Branch(0, 0, -1)})
    lost: int = 0  # steps, and parts of steps, known to be missing
    name: str = ""  # of the service that sends it, on a screen that several may send to
    in_part: bool = False  # somebody may have chosen which spans of the run are here: Decoder.in_part
    rewinds: int = 0  # how many times steps were taken back
    limit: int | None = None  # most steps kept; beyond that the oldest quarter is dropped
    limit_bytes: int = KEPT_BYTES  # with a limit, and of them, roughly
    gone: int = 0  # steps that were dropped so
    others: int = field(default=0, compare=False)  # spans of other services, of which nothing is kept
    _known: dict[int, StepRecord] = field(default_factory=dict, repr=False)  # on every branch, by number
    _last: dict[int, int] = field(default_factory=dict, repr=False)  # the last known step of each branch
    _bytes: int = field(default=0, repr=False, compare=False)  # of the steps, without their requests' parts

    def __post_init__(self) -> None:
        if not self.totals.positions:  # else it is another history's, of which this is a copy
            self.totals = RunningTotals(self._of_step)

    @property
    def acceptance(self) -> Acceptance:
        return self.totals.total

    def near_ties(self, step: RequestStep) -> list[int]:
        """The decisions of a step that rounding could flip (Verdict.near_ties); none where the dtype is not known."""
        return [] if self.run is None or step.verdict is None else step.verdict.near_ties(self.run.dtype)

    def near_draws(self, step: RequestStep) -> list[int]:
        return [] if self.run is None else step.near_draws(self.run.dtype)

    @property
    def counts_only(self) -> bool:
        """Whether the run holds only counts of intervals: its engine reports nothing about single requests."""
        return bool(self.acceptance.aggregates) and not self.requests

    @property
    def without_steps(self) -> int:
        return sum(request.sums is not None for request in self.requests.values())

    @property
    def figures_only(self) -> bool:
        """Whether no step of any request is known, only what requests' own spans tell."""
        return self.without_steps > 0 and not any(request.steps for request in self.requests.values())

    @property
    def tells_preempted(self) -> bool:
        return all(step.tells_preempted for step in self.steps)

    @property
    def figures_note(self) -> str:
        """A remark on requests without steps; "" for none."""
        count, requests = self.without_steps, len(self.requests)
        alone = "requests" if self.figures_only else f"{count:,} of {requests:,} requests"
        lacks = "no steps, so no trees, phases, text or questions"
        return f"figures of {alone}, from their request spans only: {lacks}" if count else ""

    @property
    def branch(self) -> int:
        return self.steps[-1].branch if self.steps else 0

    @property
    def nbytes(self) -> int:
        return self._bytes + self.parts.nbytes

    @property
    def last_step(self) -> int:
        """The number of the last of `steps`; -1 for none."""
        return self.steps[-1].step if self.steps else -1

    def append(self, record: StepRecord) -> None:
        """Take one more step, which may begin a branch: then the history goes back to where that does."""
        known = self._known.get(record.step)  # a step that comes out again is equal
        record = known or self._stored(record)
        if known is None:
            if record.after is not None:
                self.branches[record.branch] = Branch(record.branch, record.step, record.after)
            self._last[record.branch] = record.step
        if record.after is not None and self.last_step != record.after:
            self.move(record.after)
        self._push(record)
        crowded = len(self.steps) > 1 and self.nbytes > self.limit_bytes
        if self.limit is not None and (crowded or len(self.steps) > self.limit):
            self.keep_last(min(len(self.steps), self.limit) * 3 // 4)

    def replace_last(self, record: StepRecord) -> None:
        """Replace the last step: it was published while it ran, and more is known of it now."""
        self._pop()
        self._push(self._stored(record))

    def _stored(self, record: StepRecord) -> StepRecord:
        """The record with its request steps among those of the run, known from now on."""
        rows = [self.parts.append(part) for part in record.requests]
        stored: StepRecord = made(StepRecord, {**vars(record), "requests": PartViews(self.parts, rows)})
        self._known[record.step] = stored
        self._bytes += _own_weight(record)
        return stored

    def take(self, message: StepRecord | Moved) -> None:
        if isinstance(message, Moved):
            self.move(message.step)
        else:
            self.append(message)

    def move(self, step: int) -> None:
        """Move to just after a step, on any branch; -1: before the first. An unknown step changes nothing."""
        ahead: list[StepRecord] = []
        while step >= 0 and self.position_of(step) is None:
            record = self._known.get(step)
            if record is None:
                return
            ahead.append(record)
            step = record.before
        self.truncate(0 if step < 0 else (self.position_of(step) or 0) + 1)
        for record in reversed(ahead):
            self._push(record)

    def show(self, branch: int) -> None:
        self.move(self._last.get(branch, -1))

    def position_of(self, step: int) -> int | None:
        """The position in `steps` of the engine's step of that number; None where it is not on this path."""
        position = bisect_left(self.steps, step, key=lambda record: record.step)
        return position if position < len(self.steps) and self.steps[position].step == step else None

    def knows(self, step: int) -> StepRecord | None:
        return self._known.get(step)

    @property
    def known(self) -> list[StepRecord]:
        return list(self._known.values())

    def _push(self, record: StepRecord) -> None:
        position = len(self.steps)
        for info in record.admitted:
            self.request(info.id).info = info
        for part, row in zip(record.requests, _rows(record), strict=True):
            request = self.request(part.request)
            request.rows.append(row)
            request.totals.positions.append(position)
        for name in record.preempted:
            self.request(name).preemptions.append(position)
        for end in record.finished:
            request = self.request(end.info.id)
            request.end, request.ended = end, position
            request.info = request.info if request.info and request.info.params.is_known else end.info
            if not request.steps and end.figures is not None:
                request.sums = end.figures
                request.totals.positions.append(position)
        self.steps.append(record)
        self.totals.positions.append(position)

    def _of_step(self, position: int) -> Item:
        """What is counted of an engine step: its requests' steps, and the sums of requests that end without any."""
        record = self.steps[position]
        undrafted = [why_undrafted(self.run, record, part) for part in record.requests]
        ended = ((end.figures, self.requests[end.info.id].sums) for end in record.finished)
        alone = [figures for figures, sums in ended if figures is not None and figures is sums]
        for sums in alone:
            for name, count in sums.undrafted.items():  # a later version may have written others
                undrafted += [Undrafted(name) if name in set(Undrafted) else Undrafted.UNKNOWN] * count
        return (*record.counted, *alone), undrafted

    def _of_request(self, request: RequestHistory, number: int) -> Item:
        """What is counted of a request: its sums where it ended before any step was seen, then each of its steps."""
        if number == 0 and request.sums is not None:
            return (request.sums,), ()
        part, at = request.steps[number - (request.sums is not None)], request.totals.positions[number]
        return (part,), (why_undrafted(self.run, self.steps[at], part),)

    def _pop(self) -> None:
        record = self.steps.pop()
        self.totals.take_back()
        for end in record.finished:
            request = self.requests[end.info.id]
            if request.sums is not None:
                request.totals.take_back()
            request.end = request.ended = request.sums = None
        for name in record.preempted:
            self.requests[name].preemptions.pop()
        for part in record.requests:
            self.requests[part.request].totals.take_back()
            self.requests[part.request].rows.pop()
        while self.requests and next(reversed(self.requests.values())).first == len(self.steps):
            self.requests.popitem()  # they are in the order in which they were seen

    def truncate(self, count: int) -> None:
        """Keep the first `count` steps on the path, as if the others had never been. They stay known."""
        if len(self.steps) > count:
            self.rewinds += 1
        while len(self.steps) > count:
            self._pop()

    def keep_last(self, count: int) -> None:
        """Drop the older steps; figures then cover what is left. What is known of requests that go on stays."""
        self.rewinds += 1
        self.gone += len(self.steps) - count
        remaining = self.steps[len(self.steps) - count :]
        infos = {name: request.info for name, request in self.requests.items()}
        self.steps.clear()
        self.requests.clear()
        self.totals = RunningTotals(self._of_step)
        first = remaining[0].step if remaining else 0
        self._known = {step: record for step, record in self._known.items() if step >= first}
        for branch in [branch for branch, last in self._last.items() if last < first]:
            del self._last[branch], self.branches[branch]
        for record in remaining:
            self._push(record)
        self._bytes = sum(map(_own_weight, self._known.values()))
        self.parts.forget(min((row for record in self._known.values() for row in _rows(record)), default=0))
        for name, request in self.requests.items():
            request.info = request.info or infos[name]

    def request(self, name: str) -> RequestHistory:
        if name not in self.requests:
            self.requests[name] = request = RequestHistory(name, parts=self.parts, first=len(self.steps))
            request.totals = RunningTotals(partial(self._of_request, request))
        return self.requests[name]

    def find(self, reference: str) -> tuple[RequestHistory, PlaceName]:
        """What REQUEST, REQUEST@STEP or REQUEST@STEP/NODE names. Raises UserError where there is no such request."""
        place = PlaceName(reference) if reference in self.requests else read_place(reference)
        if place.request in self.requests:
            return self.requests[place.request], place
        if reference.rpartition("@")[0] in self.requests:
            how = "write a step number after @ and a node number after /, such as r3@17/4"
            raise UserError(f"{short(reference)}: {how}")
        known = ", ".join([*map(short, list(self.requests)[:4]), *(["..."] if len(self.requests) > 4 else [])])
        raise UserError(f"there is no request {short(place.request)}; there are: {known or 'none'}")

    def part(self, name: str, position: int) -> tuple[int, RequestStep] | None:
        """The request's last step at or before `position` in `steps`: (its place among its steps, the step)."""
        request = self.requests.get(name)
        count = 0 if request is None else request.count_at(position)
        return (count - 1, request.steps[count - 1]) if request is not None and count else None

    # What the run came to by a position in `steps`

    def acceptance_at(self, position: int, request: str | None) -> Acceptance:
        """Counts up to and with it: of one request, or of all."""
        return self._totals(request).upto(position)

    def undrafted_at(self, position: int, request: str | None) -> Counter[Undrafted]:
        totals = self._totals(request)
        return totals.undrafted_upto(totals.count(position))

    def _totals(self, request: str | None) -> RunningTotals:
        if request is None:
            return self.totals
        return self.requests[request].totals if request in self.requests else RunningTotals()

    def mean_tau_at(self, position: int) -> tuple[float | None, int]:
        """The mean over requests of each one's tau, and how many requests have one."""
        each = [request.acceptance_at(position) for request in self.requests.values()]
        return mean_tau(each), sum(sums.tau is not None for sums in each)

    def lengths_at(self, position: int, request: str | None, width: int) -> tuple[list[float | None], int]:
        """Mean acceptance length in at most `width` buckets, and the steps in each: a power of two, so they stay."""
        totals = self._totals(request)
        count = totals.count(position)
        if count <= 0 or width <= 0:
            return [], 1
        size = 1 << (-(-count // width) - 1).bit_length()
        ranges = [(start, min(start + size, count)) for start in range(0, count, size)]
        taus = [totals.tau(*each) for each in ranges]
        for place, each in enumerate(ranges if request is None and self.counts_only else ()):
            if taus[place] is None:  # the source tells lengths and no counts: the mean of what it reported
                told = (step.aggregate.length for step in self.steps[slice(*each)] if step.aggregate is not None)
                known = [length for length in told if length is not None]
                taus[place] = sum(known) / len(known) if known else None
        return taus, size

    def speed_at(self, position: int) -> float | None:
        """Output tokens a second over the last seconds before it."""
        if not 0 <= position < len(self.steps):
            return None
        last = self.steps[position].end_ns
        begin = bisect_right(self.steps, last - SPEED_NS, hi=position, key=lambda record: record.end_ns)
        elapsed, emitted = last - self.steps[begin].start_ns, self.totals.emitted
        return (emitted(position + 1) - emitted(begin)) * 1e9 / elapsed if elapsed > 0 else None

    def elapsed_at(self, position: int) -> float:
        known = 0 <= position < len(self.steps)
        return max(self.steps[position].end_ns - self.steps[0].start_ns, 0) / 1e9 if known else 0.0


def _rows(record: StepRecord) -> Sequence[int]:
    assert isinstance(record.requests, PartViews)
    return record.requests.rows
