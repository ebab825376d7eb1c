"""A capture step by step, request by request: each decode step with the one before it and its place in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
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
    before: RequestStep | None  # the request's step before it; None for its first
    preempted: bool  # whether the request lost its KV between the two
    due: Preceded  # what came before a decode step, as it follows from the request's steps

    @property
    def preceded(self) -> Preceded:
        """What came before a decode step, as recorded; in older captures, as it follows from the steps."""
        return self.due if self.part.preceded is None else self.part.preceded

    @property
    def params(self) -> SamplingParams | None:
        """The request's sampling parameters; None where they are not known."""
        info = self.request.info
        return None if info is None or not info.params.is_known else info.params

    def reference(self, node: int | None = None) -> Reference:
        """Where to look."""
        return Reference(self.request.id, self.part.index, self.record.step, node)


def visits(history: History) -> Iterator[Visit]:
    """Every part of every step on the path, in the engine's order; prefill chunks among them."""
    last: dict[str, RequestStep] = {}
    due: dict[str, Preceded] = {}
    lost: set[str] = set()
    for record in history.steps:
        lost.update(record.preempted)
        due.update(dict.fromkeys(record.preempted, Preceded.PREEMPTION))
        for row, part in enumerate(record.requests):
            name, request = part.request, history.requests[part.request]
            if history.in_part and _began_anew(last.get(name), part):
                lost.add(name)
                due[name] = Preceded.PREEMPTION
            before = due.get(name, Preceded.PREFILL)
            yield Visit(request, record, part, row, last.get(name), name in lost, before)
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
        numbers: dict[str, int] = {}
        texts: list[list[int]] = []
        prompts, made = list[int](), list[int]()  # of each request: tokens of its prompt, and output tokens so far
        request, before = list[int](), list[int]()  # of each step: its request's number, and output tokens before it
        for visit in visits:
            asked, number = visit.request, numbers.setdefault(visit.request.id, len(texts))
            if number == len(texts):
                prompt = [] if asked.info is None else told_ids(asked.info.prompt_tokens) or []
                earlier, known = asked.earlier() or [], asked.steps[: asked.place_of(visit.part.index)]
                texts.append([*prompt, *earlier, *(token for token, _ in asked.output())])
                prompts.append(len(prompt))
                made.append(len(earlier) + sum(part.emitted for part in known))
            request.append(number)
            before.append(made[number])
            made[number] += visit.part.emitted
        sizes, numbered = np.array([len(text) for text in texts], np.int64), np.array(request, np.int64)
        ends = np.cumsum(sizes)
        outputs = ends - sizes + np.array(prompts, np.int64)
        text = np.array([token for text in texts for token in text], np.int64)
        behind = outputs[numbered] + np.array(before, np.int64)
        return Texts(numbered, text, ends - sizes, ends, outputs, behind)

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
