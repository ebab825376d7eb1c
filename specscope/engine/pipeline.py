"""Async scheduling: the next step runs while the last one is still being accounted for.

A worker thread plays the device. It takes launched steps in turn and runs each from schedule to commit, so that the
next step knows all that a synchronous one would: tokens, lengths, drafter state and blocks change on this thread alone,
in the order of the steps. What is left of a step then (what is noted beside its verdicts, its record, and whoever reads
that) changes nothing; the caller's thread does it one step late, while the worker already runs the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from specscope.engine.phases import StepState
from specscope.trace.record.records import StepRecord

AHEAD = 2  # steps at once: one is accounted for while one runs
Job = Callable[[bool], StepState | None]  # whether it is run where there is nothing to do; None where it was not
Account = Callable[[StepState, int, int], StepRecord]  # ... launched_ns, read_ns


class Pipeline:
    """Runs an engine's steps one ahead. One thread calls it."""

    def __init__(self, job: Job, account: Account) -> None:
        """`job` runs a step, on the worker; `account` makes its record, on the caller's thread."""
        self._job, self._account = job, account
        self._launched: deque[tuple[int, Future[StepState | None]]] = deque()  # when, in turn
        self._worker: ThreadPoolExecutor | None = None
        self._error: Exception | None = None

    @property
    def flying(self) -> int:
        """Steps that were launched, and are not accounted for."""
        return len(self._launched)

    def step(self) -> StepRecord:
        """Account for the next step, with the one after it launched behind it."""
        idle = False
        while True:
            while self.flying < AHEAD:
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
            self._worker.shutdown()
        self._worker = None
        self._launched.clear()

    def _launch(self, *, even_idle: bool) -> None:
        self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="specscope-steps")
        self._launched.append((time.time_ns(), self._worker.submit(self._run, even_idle)))

    def _run(self, even_idle: bool) -> StepState | None:
        """A step, on the worker. One that fails is the caller's to know of, and no further one runs."""
        if self._error is not None:
            raise self._error
        try:
            return self._job(even_idle)
        except Exception as error:
            self._error = error
            raise

    def _take(self) -> StepRecord | None:
        """Account for the step that was launched first; None where there was nothing to do."""
        launched_ns, step = self._launched.popleft()
        state = step.result()
        return None if state is None else self._account(state, launched_ns, time.time_ns())
