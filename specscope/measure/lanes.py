"""Lanes: engines over one loaded model that step in turn, so that other load on the machine affects all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from specscope.engine.engine import Engine
from specscope.engine.prompts import Prompt
from specscope.live.fork import beside
from specscope.speculate.changes import Changes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import StepRecord

Work = tuple[Prompt, SamplingParams]


@dataclass(frozen=True)
class Timed:
    """A step in which a full batch decoded and nothing else ran."""

    seconds: float
    drafting: float  # seconds of the step spent drafting
    rows: int  # that the target ran
    tokens: int  # committed
    drafts: int  # requests for which something was drafted
    accepted: int


class Lane:
    """One engine, with `batch` requests at a time as long as there is work. Closed when the `with` of `lanes` ends."""

    def __init__(self, name: str, engine: Engine, batch: int) -> None:
        self.name, self.engine, self.batch = name, engine, batch
        self.done = False  # whether it has run all that it was given
        self.every = 1  # it steps in each round whose number is a multiple of this
        self.part = (0, 1)  # which part of the KV cache is its own, of how many: in_turn sets it
        if (model := engine.scheduler.room.model) is not None:
            model.cache.pool.keep_apart(batch)
        self.work: Iterator[Work] = iter(())  # that is not begun

    def give(self, work: Iterator[Work]) -> None:
        """Set the work to run after what is running now."""
        self.work, self.done = work, False

    def step(self) -> Timed | None:
        """Run one step; None where it did not decode a full batch, or where all work is done."""
        self.engine.runner.cache.pool.keep_apart(self.batch, *self.part)
        while len(self.engine.requests) < self.batch and (work := next(self.work, None)) is not None:
            self.engine.add(*work)
        self.done = not self.engine.busy
        if self.done:
            return None
        start = time.perf_counter()
        record = self.engine.step()
        return self._timed(record, time.perf_counter() - start)

    def _timed(self, record: StepRecord, seconds: float) -> Timed | None:
        parts = record.requests
        if len(parts) != self.batch or any(part.prefill_tokens or part.verdict is None for part in parts):
            return None
        drafting = sum(phase.end_ns - phase.start_ns for phase in record.phases if phase.name == "draft") / 1e9
        return Timed(
            seconds=seconds,
            drafting=drafting,
            rows=sum(1 + len(part.tree) for part in parts),
            tokens=sum(len(part.tokens()) for part in parts),
            drafts=sum(len(part.tree) > 0 for part in parts),
            accepted=sum(part.verdict.accepted for part in parts if part.verdict is not None),
        )


@contextmanager
def lanes(engine: Engine, wanted: Mapping[str, Mapping[str, str | None]], batch: int) -> Iterator[list[Lane]]:
    """Lanes over an engine's model. `wanted`: by name, what each changes of drafter, draft_model and tree."""
    made: list[Lane] = []
    try:
        for name, changes in wanted.items():
            made.append(Lane(name, beside(engine, Changes(engine=changes)), batch))
        yield made
    finally:
        for lane in made:
            lane.engine.current = None
            lane.engine.cancel_all()
            while lane.engine.busy:
                lane.engine.step()
            lane.engine.runner.close()
        engine.runner.cache.pool.keep_apart(engine.config.max_batch)


Rounds = list[list[Timed | None]]  # by round and lane; None where a step does not count


def in_turn(run: Sequence[Lane]) -> Iterator[Rounds]:
    """Let each lane take a step in turn, round after round; gives all rounds so far, before each.

    Each round has an order of its own: what a lane finds in the processor's caches depends on the one before it.
    """
    for place, lane in enumerate(run):
        lane.part = (place, len(run))
    orders, rounds = random.Random(0), list[list[Timed | None]]()
    while True:
        yield rounds
        steps: list[Timed | None] = [None] * len(run)
        for place in orders.sample(range(len(run)), len(run)):
            steps[place] = None if len(rounds) % run[place].every else run[place].step()
        rounds.append(steps)


def middle(seconds: Sequence[float]) -> float:
    """The mean without the fastest and the slowest tenth: a step in which something else ran has no weight."""
    out = len(seconds) // 10
    return fmean(sorted(seconds)[out : len(seconds) - out])
