"""A capture step by step, request by request: each decode step with the one before it and its place in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specscope.analyze.evidence.arrays import Indices, numbered
from specscope.analyze.findings import Reference
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.stats import StepCounts
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import Preceded, RequestStep, StepRecord, followed_by
from specscope.trace.record.tree import Bools, Doubles


@dataclass(frozen=True)
class Visit:
    """A request's part in a step, and what lies around it."""

    request: RequestHistory
    record: StepRecord
    part: RequestStep
    row: int  # its place in the batch
    before: RequestStep | None  # the request's previous step it; None for its first
    preempted: bool  # whether the request lost its KV between the two
    due: Preceded  # what came before a decode step, as it follows from the request's steps
    number: int  # among all visits

    @property
    def preceded(self) -> Preceded:
        """What came before a decode step, as recorded; in older captures, as it follows from the steps."""
        return self.due if self.part.preceded is None else self.part.preceded

    @property
    def params(self) -> SamplingParams | None:
        """The request's sampling parameters; None where they are not known."""
        info = self.request.info
        return None if info is None or not info.params.is_known else info.params

    @property
    def tells_rules(self) -> bool:
        """Whether all is known that shapes the request's p."""
        return self.params is not None and (self.request.info is None or self.request.info.tells_rules)

    def reference(self, node: int | None = None) -> Reference:
        return Reference(self.request.id, self.part.index, self.record.step, node)


def visits(history: History) -> Iterator[Visit]:
    """Every part of every step on the path, in the engine's order; prefill chunks among them."""
    last: dict[str, RequestStep] = {}
    due: dict[str, Preceded] = {}
    lost: set[str] = set()
    numbers = count()
    for record in history.steps:
        lost.update(record.preempted)
        due.update(dict.fromkeys(record.preempted, Preceded.PREEMPTION))
        for row, part in enumerate(record.requests):
            name, request = part.request, history.requests[part.request]
            if history.in_part and _began_anew(last.get(name), part):
                lost.add(name)
                due[name] = Preceded.PREEMPTION
            before = due.get(name, Preceded.PREFILL)
            yield Visit(request, record, part, row, last.get(name), name in lost, before, next(numbers))
            last[name] = part
            lost.discard(name)
            if (counts := StepCounts.of(part)) is not None:
                due[name] = followed_by(counts.kind, counts.drafted, counts.accepted)


def _began_anew(before: RequestStep | None, part: RequestStep) -> bool:
    """Whether a request lost its KV before this step, where engine steps, which say so, may not be in the file."""
    if before is None or part.index != before.index + 1:
        return False
    if before.verdict is None:  # once more, while its tokens were fed again
        return part.prefill_tokens > 0 and part.context_len == part.found
    return part.verdict is None or part.preceded is Preceded.PREEMPTION


@dataclass(frozen=True)
class Texts:
    """The texts of R requests end to end, prompts and outputs, and where each step's root is in them."""

    request: Indices  # [S] the number of its request
    text: Indices  # [T] all tokens
    begins: Indices  # [R] where each request's text begins
    ends: Indices  # [R] and where it ends
    outputs: Indices  # [R] where its output begins
    behind: Indices  # [S] the place of the token after the root

    @staticmethod
    def of(visits: Sequence[Visit]) -> Texts:
        """The texts of all requests among these visits."""
        request = numbered(visit.request.id for visit in visits)
        firsts = [visits[first] for first in np.unique(request, return_index=True)[1].tolist()]
        texts, prompts, made = list[list[int]](), list[int](), list[int]()  # `made`: output tokens so far
        for visit in firsts:
            asked = visit.request
            prompt = [] if asked.info is None else told_ids(asked.info.prompt_tokens) or []
            earlier, known = asked.earlier() or [], asked.steps[: asked.place_of(visit.part.index)]
            texts.append([*prompt, *earlier, *(token for token, _ in asked.output())])
            prompts.append(len(prompt))
            made.append(len(prompt) + len(earlier) + sum(part.emitted for part in known))
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        begins = ends - np.array([len(text) for text in texts], np.int64)
        behind = list[int]()
        for visit, number in zip(visits, request.tolist(), strict=True):
            behind.append(made[number])
            made[number] += visit.part.emitted
        text = np.array([token for text in texts for token in text], np.int64)
        outputs = begins + np.array(prompts, np.int64)
        return Texts(request, text, begins, ends, outputs, begins[request] + np.array(behind, np.int64))

    def token_at(self, step: Indices, depth: Indices) -> Indices:
        """The text's token at a depth below the root of each step, the first at 1; -1 outside of its text."""
        place = self.behind[step] + depth - 1
        number = self.request[step]
        inside = (place >= self.begins[number]) & (place < self.ends[number])
        return np.where(inside, self.text[np.where(inside, place, 0)] if len(self.text) else -1, -1)

    def by_request(self, hits: Bools, step: Indices) -> tuple[Doubles, Doubles]:
        """[R] hits and totals, of items in these steps."""
        number, requests = self.request[step], len(self.begins)
        total = np.bincount(number, minlength=requests).astype(np.float64)
        return np.bincount(number, hits, requests).astype(np.float64), total
