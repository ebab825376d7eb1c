"""A part of a capture, as a capture: some requests or some of their steps, and nothing of the other requests.

Each step keeps what it says of the engine as a whole, which are numbers, and how many others took part. The engine
steps' own spans name the other requests, so they stay behind. What a request asked and how it ended go along.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from specscope.errors import UserError
from specscope.trace.files import Packer
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import plural
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import Absent, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.wire.capture import LINE_SPANS, line_json
from specscope.trace.wire.spans import Encoder, brief, resource_attributes
from specscope.whole_file import write_parts

STRETCH = re.compile(r"(.+)@([0-9]{1,19})(?:(:)([0-9]{1,19})?)?")  # REQUEST@STEP, REQUEST@FIRST:LAST, REQUEST@FIRST:


@dataclass(frozen=True)
class Extract:
    """A part of a run, as records that stand by themselves."""

    run: RunInfo
    records: tuple[StepRecord, ...]
    requests: tuple[str, ...]
    left_out: tuple[str, ...]  # in words

    @property
    def steps(self) -> int:
        return sum(len(record.requests) for record in self.records)


def part_of(history: History, places: Sequence[str], privacy: Privacy = Privacy.EVERYTHING) -> Extract:
    """What `places` name, on the path where the run stands, without more than `privacy` keeps. Raises UserError."""
    assert history.run is not None
    parts: defaultdict[int, set[str]] = defaultdict(set)  # of each step, the requests
    events: defaultdict[int, set[str]] = defaultdict(set)  # admissions and ends
    counts: dict[str, int] = {}  # of all steps of each request
    for place in places:
        request, positions = _found(history, place)
        counts[request.id] = len(request.steps)
        for position in positions:
            parts[history.steps[position].step].add(request.id)
        for record in history.steps:
            if any(info.id == request.id for info in (*record.admitted, *(end.info for end in record.finished))):
                events[record.step].add(request.id)
    records: list[StepRecord] = []
    branch = 0
    for record in history.steps:
        if record.step in parts or record.step in events:
            before = records[-1].step if records else -1
            after = None if record.branch == branch else before
            records.append(_alone(record, parts[record.step], events[record.step], after))
            branch = record.branch
    run = replace(history.run, privacy=max(history.run.privacy, privacy))
    return Extract(run, tuple(records), tuple(counts), _left_out(history, counts, records, run.privacy))


def _left_out(
    history: History, counts: Mapping[str, int], records: Sequence[StepRecord], privacy: Privacy
) -> tuple[str, ...]:
    """What a part lacks, in words. `counts`: steps of each request that is in it."""
    others = len(history.requests.keys() - counts.keys())
    rest = sum(counts.values()) - sum(len(record.requests) for record in records)
    whose = printable(next(iter(counts))) if len(counts) == 1 else "these requests"
    words = (
        plural(others, "other request") if others else "",
        plural(rest, f"other step of {whose}", f"other steps of {whose}") if rest else "",
        "the engine steps' own spans",
        "spans of other services" if history.others else "",
        ("", "text", "text and token ids")[privacy],
    )
    return tuple(filter(None, words))


def write_part(part: Extract, vocabulary: Vocabulary, path: str) -> int:
    """Write it as a capture, whole or not at all; returns its bytes. Raises UserError."""
    packer, encoder = Packer(path), Encoder(part.run, vocabulary)
    resource = resource_attributes(part.run, recorded=True)
    spans = [span for record in part.records for span in encoder.encode(record)]
    lines = [line_json(resource, [])]
    lines += (line_json(brief(resource), spans[n : n + LINE_SPANS]) for n in range(0, len(spans), LINE_SPANS))
    return write_parts(path, [*map(packer.add, lines), packer.close()])


def _found(history: History, place: str) -> tuple[RequestHistory, list[int]]:
    """A request, and the positions in History.steps of the steps that a place names. Raises UserError."""
    named = None if place in history.requests else STRETCH.fullmatch(place)
    request, of_node = history.find(named[1] if named else place)
    if of_node.index is not None:
        says = f"write a step, such as {printable(request.id)}@{of_node.index}"
        raise UserError(f"{printable(place)} names a node: {says}")
    steps = request.steps
    if named is None:
        return request, request.engine_steps
    first, last = int(named[2]), int(named[4] or (named[2] if not named[3] or not steps else steps[-1].index))
    for index in (first, last):
        if not (steps and steps[0].index <= index <= steps[-1].index):
            request.step(index)  # raises
    places = zip(steps, request.engine_steps, strict=True)
    there = [position for step, position in places if first <= step.index <= last]
    if not there:
        raise UserError(f"{printable(request.id)} has no steps from {first} to {last}")
    return request, there


def _alone(record: StepRecord, parts: Collection[str], events: Collection[str], after: int | None) -> StepRecord:
    requests = tuple(part for part in record.requests if part.request in parts)
    return replace(
        record,
        admitted=tuple(info for info in record.admitted if info.id in events),
        requests=requests,
        finished=tuple(end for end in record.finished if end.info.id in events),
        after=after,
        absent=Absent(record.batch - len(requests) if record.is_timed else None, engine=True),
        preempted=(),
        passes=(),
        device_ns=(),
        flight=None,
        left_out=None,
        aggregate=None,
    )
