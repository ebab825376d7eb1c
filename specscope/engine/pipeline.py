"""Async scheduling: the next step runs while the last one is still being accounted for.

A worker thread plays the device. It takes launched steps in turn and runs each from schedule to commit, so that the
next step knows all that a synchronous one would: tokens, lengths, drafter state and blocks change on this thread alone,
in the order of the steps. What is left of a step then (what is noted beside its verdicts, its record, and whoever reads
that) changes nothing; the caller's thread does it one step late, while the worker already runs the next one.

What is noted reads the target's probabilities, which a step writes to memory that is used again. So there are two such
memories, and one step has each from its launch until it was accounted for:

    Launched --worker--> its state --caller--> StepRecord, and its memory is free again
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from specscope.engine.phases import StepState
from specscope.speculate.sampling import Memory
from specscope.trace.record.records import StepRecord

AHEAD = 2  # steps at once: one is accounted for while one runs


@dataclass
class Launched:
    """A step that the worker runs. Made by the caller; the worker says what became of it."""

    memory: Memory
    launched_ns: int
    even_idle: bool  # whether it is run where there is nothing to do
    state: StepState | None = None  # None: there was nothing to do
    error: Exception | None = None


Job = Callable[[Memory, bool], StepState | None]
Account = Callable[[StepState, int, int], StepRecord]  # ... launched_ns, read_ns


class Pipeline:
    """Runs an engine's steps one ahead. One thread calls it."""

    def __init__(self, job: Job, account: Account) -> None:
        """`job` runs a step, on the worker; `account` makes its record, on the caller's thread."""
        self._job, self._account = job, account
        self.free = [Memory() for _ in range(AHEAD)]
        self._jobs: SimpleQueue[Launched | None] = SimpleQueue()
        self._done: SimpleQueue[Launched] = SimpleQueue()
        self._worker: threading.Thread | None = None

    @property
    def flying(self) -> int:
        """Steps that were launched, and are not accounted for."""
        return AHEAD - len(self.free)

    def step(self) -> StepRecord:
        """Account for the next step, with the one after it launched behind it."""
        idle = False
        while True:
            while self.free:
                self._launch(even_idle=idle or not self.flying)
                idle = False
            record = self._take()
            if record is not None:
                return record
            idle = True  # what was launched ahead had nothing to do: an idle engine's step is an empty one

    def drain(self) -> list[StepRecord]:
        """Wait for what was launched, and account for it. No step runs when this returns."""
        taken = [self._take() for _ in range(self.flying)]
        return [record for record in taken if record is not None]

    def close(self) -> None:
        """Wait for what was launched and end the worker. What has run is not accounted for."""
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join()
        self._worker, self.free = None, [Memory() for _ in range(AHEAD)]

    def _launch(self, *, even_idle: bool) -> None:
        self._jobs.put(Launched(self.free.pop(), time.time_ns(), even_idle))
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="specscope-steps", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        """The worker's loop. A step that fails is the caller's to know of, and no further one runs."""
        error: Exception | None = None
        while (launched := self._jobs.get()) is not None:
            if error is None:
                try:
                    launched.state = self._job(launched.memory, launched.even_idle)
                except Exception as raised:
                    error = raised
            launched.error = error
            self._done.put(launched)

    def _take(self) -> StepRecord | None:
        """Account for the step that was launched first; None where there was nothing to do."""
        run = self._done.get()
        read_ns = time.time_ns()
        try:
            if run.error is not None:
                raise run.error
            if run.state is None:
                return None
            return self._account(run.state, run.launched_ns, read_ns)
        finally:
            self.free.append(run.memory)
