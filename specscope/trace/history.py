"""History: the records of one run in memory, indexed the ways people look at them.

The live screen, replay and report are all fed from one of these, so they show the same thing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from specscope.trace.records import Origin, RequestEnd, RequestInfo, RequestStep, RunInfo, StepRecord
from specscope.trace.stats import Acceptance
from specscope.trace.vocabulary import Vocabulary


def weight(record: StepRecord) -> int:
    """Bytes that a record takes in memory, roughly."""
    size = 3000 + 200 * (len(record.phases) + len(record.passes)) + 100 * len(record.preempted)
    for part in record.requests:
        size += 3000 + 60 * len(part.tree)
        size += 0 if part.notes is None else 12 * len(part.notes.dropped_token)
    for info in record.admitted:
        size += 2000 + 2 * len(info.prompt) + 4 * len(info.prompt_tokens)
    return size + sum(2000 + 2 * len(end.error) + 4 * len(end.output) for end in record.finished)


@dataclass
class RequestHistory:
    """One request: what it asked, what it did, how it ended."""

    id: str
    info: RequestInfo | None = None  # None until its admission was seen (it may have been dropped on the way)
    end: RequestEnd | None = None  # None while it runs
    steps: list[RequestStep] = field(default_factory=list)
    engine_steps: list[int] = field(default_factory=list)  # the position in History.steps of each of `steps`
    acceptance: Acceptance = field(default_factory=Acceptance)
    preempted: int = 0  # times its KV was taken

    @property
    def state(self) -> str:
        """`running`, or the reason it finished."""
        return self.end.reason.value if self.end else "running"

    def output(self, upto: int | None = None) -> list[tuple[int, Origin]]:
        """Output tokens with their origins, from the first `upto` of its steps (all by default)."""
        out: list[tuple[int, Origin]] = []
        for step in self.steps[:upto]:
            if step.verdict is not None:
                out += list(zip(step.tokens(), step.verdict.origins(), strict=True))[: step.emitted]
        return out

    def position_of(self, index: int) -> int | None:
        """The position in History.steps of its own step of that number; None where it is not known."""
        return next((at for at, step in zip(self.engine_steps, self.steps, strict=True) if step.index == index), None)

    def before(self, place: int, most: int) -> list[int]:
        """The last tokens before the step at `place` in `steps`, at most `most`: the prompt's, and the output so far.

        Where the first steps are not known, what came between the prompt and the rest is not either: no prompt then.
        """
        whole = self.info is not None and self.steps[0].index == 0
        prompt = self.info.prompt_tokens[-most:].tolist() if whole and self.info is not None else []
        return [*prompt, *(token for token, _ in self.output(place))][-most:]

    def output_text(self, vocabulary: Vocabulary) -> str:
        """The output as text, cut at the stop string where one matched."""
        text = vocabulary.text(token for token, _ in self.output())
        return text if self.end is None else self.end.cut(text)


@dataclass
class History:
    """All of a run that is known so far. `append` is called on one thread; readers see a growing list."""

    run: RunInfo | None = None
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestHistory] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=Acceptance)
    dropped: int = 0  # records or spans known to be missing
    rewinds: int = 0  # times that steps were taken back

    def near_ties(self, step: RequestStep) -> list[int]:
        """The decisions of a step that rounding could flip (Verdict.near_ties); none where the dtype is not known."""
        return [] if self.run is None or step.verdict is None else step.verdict.near_ties(self.run.dtype)

    def append(self, record: StepRecord) -> None:
        """Take one more step."""
        at = len(self.steps)
        self.steps.append(record)
        for info in record.admitted:
            self.request(info.id).info = info
        for part in record.requests:
            request = self.request(part.request)
            request.steps.append(part)
            request.engine_steps.append(at)
            request.acceptance.add(part)
            self.acceptance.add(part)
        for name in record.preempted:
            self.request(name).preempted += 1
        for end in record.finished:
            request = self.request(end.info.id)
            request.end = end
            request.info = request.info or end.info

    def truncate(self, count: int) -> None:
        """Keep the first `count` steps, as if the others had never been."""
        self._keep(self.steps[:count])

    def keep_last(self, count: int) -> None:
        """Let the older steps go; figures are of what is left. What is known of requests that go on stays."""
        self._keep(self.steps[len(self.steps) - count :])

    def _keep(self, kept: list[StepRecord]) -> None:
        self.rewinds += 1
        infos = {name: request.info for name, request in self.requests.items()}
        self.steps.clear()
        self.requests.clear()
        self.acceptance = Acceptance()
        for record in kept:
            self.append(record)
        for name, request in self.requests.items():
            request.info = request.info or infos[name]

    def request(self, name: str) -> RequestHistory:
        """The request of that id, made where it is new."""
        if name not in self.requests:
            self.requests[name] = RequestHistory(name)
        return self.requests[name]

    def part(self, name: str, position: int) -> tuple[int, RequestStep] | None:
        """The request's last step at or before `position` in `steps`: (its place among its steps, the step)."""
        request = self.requests.get(name)
        if request is None:
            return None
        at = bisect_right(request.engine_steps, position) - 1
        return (at, request.steps[at]) if at >= 0 else None
