"""Trace sampling: a sink before a sink, that hands on the requests that are kept and leaves the others out.

It decides on records, on the sink's own thread. Without a condition a request is decided when it is first seen, and
nothing is held. With one it is decided when it ends: until then its steps are held, and every later step waits behind
them, so that what goes on is in order and says of each step what was left out of it. What is held is bounded in bytes:
where it would be more, the oldest undecided request is decided by what is known of it. It keeps all of its steps or
none, for they are still held then, and those to come follow the decision; so do parts that come after its end.

On a run that goes back, the condition is asked of the steps on the branch on which the request ends; those that it left
behind share its fate. A request that ended on one branch is not decided again on another. Records that are not kept
may be where a branch begins: `after` names the last step before it that is.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specscope.trace.history.history import KEPT, end_weight, frame_weight, info_weight, part_weight
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord
from specscope.trace.record.trace_sampling import LeftOut, Reason, Sampled, TraceSampling, ratio_keeps
from specscope.trace.request_words import RequestFacts
from specscope.trace.wire.spans import own_trace

MARGIN = 1.3  # factor on the rough weights of records, so that the memory used never exceeds the count
REMEMBERED = 20_000  # decisions that are kept for parts that come late, or on another branch


@dataclass
class Decisions:
    """How many requests were decided, and how. Written on the sink's thread, read anywhere."""

    kept: Counter[Reason] = field(default_factory=Counter)
    left_out: int = 0
    early: int = 0  # of both, before their end: the buffer was full, or the run was over
    left_out_undecided: int = 0  # of those, those that were left out

    def add(self, sampled: Sampled | None, *, early: bool) -> None:
        """Count one."""
        self.early += early
        if sampled is None:
            self.left_out += 1
            self.left_out_undecided += early
        else:
            self.kept[sampled.reason] += 1

    def text(self) -> str:
        """`kept 12 of 400 requests (4 by ratio, 8 by outcome)`."""
        total = sum(self.kept.values())
        how = ", ".join(f"{count:,} by {reason.value}" for reason in Reason if (count := self.kept[reason]))
        return f"kept {total:,} of {plural(total + self.left_out, 'request')}" + (f" ({how})" if how else "")

    def early_text(self, buffer: int) -> str:
        """A remark on requests that were decided before their end; "" where there are none."""
        if not self.early:
            return ""
        what = f"{plural(self.early, 'request')} decided before the end, {self.left_out_undecided:,} of them left out"
        return f"{what}: the buffer of {buffer / 2**20:,.0f} MiB was full (--keep-buffer), or the run ended first"


@dataclass
class _Step:
    """A step that waits. What its requests told is by request, so that one of them can be taken out."""

    frame: StepRecord  # without them
    number: int
    weight: int  # bytes, roughly
    infos: dict[str, RequestInfo] = field(default_factory=dict)
    parts: dict[str, RequestStep] = field(default_factory=dict)
    preempted: dict[str, None] = field(default_factory=dict)  # a set in order
    ends: dict[str, RequestEnd] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    is_left_behind: bool = False  # the run went back past it and took another branch

    @staticmethod
    def of(record: StepRecord) -> _Step:
        """All of a record."""
        frame = dataclasses.replace(record, admitted=(), requests=(), preempted=(), finished=())
        step = _Step(frame, record.step, int(MARGIN * frame_weight(record)))
        step.infos = {info.id: info for info in record.admitted}
        step.parts = {part.request: part for part in record.requests}
        step.preempted = dict.fromkeys(record.preempted)
        step.ends = {end.info.id: end for end in record.finished}
        step.weight += sum(map(step.weight_of, step.names))
        return step

    @property
    def names(self) -> dict[str, None]:
        """Its requests."""
        return dict.fromkeys((*self.infos, *self.parts, *self.preempted, *self.ends))

    def weight_of(self, name: str) -> int:
        """Bytes of a request's part in it."""
        size = 0 if (part := self.parts.get(name)) is None else part_weight(part)
        size += 0 if (info := self.infos.get(name)) is None else info_weight(info)
        size += 0 if (end := self.ends.get(name)) is None else end_weight(end)
        return int(MARGIN * size)

    def leave_out(self, name: str) -> None:
        """Drop a request, except for its counts."""
        self.weight -= self.weight_of(name)
        part = self.parts.pop(name, None)
        self.infos.pop(name, None)
        self.preempted.pop(name, None)
        self.ends.pop(name, None)
        if part is None:
            return
        self.left_out.update(
            requests=1,
            prefill_tokens=part.prefill_tokens,
            drafted=len(part.tree),
            accepted=0 if part.verdict is None else part.verdict.accepted,
            emitted=part.emitted,
        )

    @property
    def is_kept(self) -> bool:
        """Whether it goes on: with one of its requests, or the counts of an engine that tells no more."""
        return self.frame.aggregate is not None or bool(self.names)


@dataclass
class _Request:
    """A request that is undecided, with the steps that tell of it."""

    name: str
    info: RequestInfo | None = None
    steps: list[_Step] = field(default_factory=list)


@dataclass
class _Decided:
    """What became of a request."""

    sampled: Sampled | None
    branch: int | None = None  # the branch on which it ended


class SamplingSink:
    """Call it with each StepRecord. `sink` gets those that are kept, in order; its `flush` is handed on."""

    def __init__(self, sink: Callable[[StepRecord], None], run: RunInfo, sampling: TraceSampling) -> None:
        self.decisions = Decisions()
        self.held = 0  # bytes of steps that wait, roughly: never more than sampling.buffer
        self._sink = sink
        self._run_id = run.run_id
        self._sampling = sampling
        self._waiting: deque[_Step] = deque()
        self._undecided: dict[str, _Request] = {}  # the oldest first
        self._decided: dict[str, _Decided] = {}  # the last used at the end
        self._path: list[int] = []  # steps that were handed on, on the branch of the last of them
        self._skipped = 0  # steps since then that did not
        self._turned = self._rewound = (
            False  # what the first of them recorded: that a branch begins; that the run went back
        )

    @property
    def failed(self) -> int:
        """Spans that the exporter behind it refused."""
        return int(getattr(self._sink, "failed", 0))

    @property
    def left_out_undecided(self) -> int:
        """Requests that were left out before their end."""
        return self.decisions.left_out_undecided

    def flush(self) -> None:
        """Let the sink export what it has gathered; what is undecided stays."""
        getattr(self._sink, "flush", lambda: None)()

    def close(self) -> None:
        """The run is over: requests that have not ended are decided by what is known of them."""
        try:
            while self._undecided:
                self._decide(next(iter(self._undecided)), None)
            self._send()
        finally:
            getattr(self._sink, "close", lambda: None)()

    def __call__(self, record: StepRecord) -> None:
        """Take one more step."""
        step = _Step.of(record)
        if record.after is not None:
            for held in self._waiting:
                held.is_left_behind |= held.number > record.after
        self._waiting.append(step)
        self.held += step.weight
        for name in step.names:
            self._place(name, step)
        for name, end in list(step.ends.items()):
            if name in self._undecided:
                self._decide(name, end)
            if name in self._decided:
                self._decided[name].branch = record.branch
        self._send()
        while self.held > self._sampling.buffer and self._undecided:
            self._decide(next(iter(self._undecided)), None)
            self._send()

    def _place(self, name: str, step: _Step) -> None:
        """A request's part in a step follows the decision on the request, or waits for it."""
        known = self._decided.pop(name, None)
        if known is not None and name in step.infos and known.branch == step.frame.branch:
            known = None  # it ended on this very branch: this is another request of the same name
        if known is not None:
            self._decided[name] = known
            if known.sampled is None:
                self._leave_out(name, step)
            elif name in step.ends:
                step.ends[name] = dataclasses.replace(step.ends[name], sampled=known.sampled)
            return
        request = self._undecided.setdefault(name, _Request(name))
        request.info = step.infos.get(name, request.info)
        request.steps.append(step)
        step.undecided.add(name)
        if self._sampling.keep is None:
            self._decide(name, step.ends.get(name))

    def _leave_out(self, name: str, step: _Step) -> None:
        before = step.weight
        step.leave_out(name)
        self.held += step.weight - before

    def _decide(self, name: str, end: RequestEnd | None) -> None:
        """Decide a request for good. `end`: None where it has not ended."""
        request = self._undecided.pop(name)
        early = end is None and self._sampling.keep is not None
        sampled = self._judge(request, end, early=early)
        self.decisions.add(sampled, early=early)
        self._decided[name] = _Decided(sampled)
        if len(self._decided) > REMEMBERED:
            del self._decided[next(iter(self._decided))]
        for step in request.steps:
            step.undecided.discard(name)
            if sampled is None:
                self._leave_out(name, step)
            elif name in step.ends:
                step.ends[name] = dataclasses.replace(step.ends[name], sampled=sampled)

    def _judge(self, request: _Request, end: RequestEnd | None, *, early: bool) -> Sampled | None:
        """Why its spans are kept. The outcome comes first: of those for which it holds none is left out."""
        keep, ratio, info = self._sampling.keep, self._sampling.ratio, request.info
        if info is None and end is not None:
            info = end.info
        if keep is not None:
            path = [step for step in request.steps if not step.is_left_behind]
            parts = [(step.parts[request.name], step.frame.end_ns) for step in path if request.name in step.parts]
            preempted = sum(request.name in step.preempted for step in path)
            if keep(RequestFacts(request.name, info, parts, preempted, end).values()):
                return Sampled(Reason.OVERFLOW if early else Reason.OUTCOME, 1.0, early)
        if ratio is None:
            return None
        caller = "" if info is None else info.traceparent
        reason = ratio_keeps(own_trace(self._run_id, request.name), caller, ratio)
        return None if reason is None else Sampled(reason, ratio if reason is Reason.RATIO else 0.0, early)

    def _send(self) -> None:
        """Hand on the steps at the front that are decided."""
        while self._waiting and not self._waiting[0].undecided:
            step = self._waiting.popleft()
            self.held -= step.weight
            self._hand_on(step)

    def _hand_on(self, step: _Step) -> None:
        frame = step.frame
        if frame.after is not None:
            del self._path[bisect_right(self._path, frame.after) :]
            self._turned = True
        self._rewound |= frame.rewound
        if not step.is_kept:
            self._skipped += 1
            return
        left_out = LeftOut(steps=self._skipped, **step.left_out)
        after = None
        if self._turned:
            after = self._path[-1] if self._path else -1
        record = dataclasses.replace(
            frame,
            admitted=tuple(step.infos.values()),
            requests=tuple(step.parts.values()),
            preempted=tuple(step.preempted),
            finished=tuple(step.ends.values()),
            after=after,
            rewound=self._rewound,
            left_out=left_out if left_out != LeftOut() else None,
        )
        self._skipped, self._turned, self._rewound = 0, False, False
        self._path.append(step.number)
        if len(self._path) > KEPT:
            del self._path[: KEPT // 4]
        self._sink(record)
