"""One run: a load on a server, from one event loop whose own lag is measured as well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from specscope.bench.datasets import Load, LoadRequest, arrivals
from specscope.bench.endpoint import Endpoint, grown
from specscope.bench.stream import StreamedAnswer
from specscope.trace.bench_result import AVERAGE
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.aggregate import Aggregate

TICK = 0.01  # seconds between two measurements of how late the event loop is
LATE = 0.01  # seconds of lag beyond which the figures are doubtful
METRICS, RESPONSES = "the server's /metrics", "the responses"


@dataclass
class LoadRun:
    """The outcome of one load on one server. Times are in seconds."""

    server: Endpoint
    load: Load
    round: int
    asked: int  # requests that were to be sent
    burstiness: float = 1.0  # of their arrival at a rate
    answers: list[StreamedAnswer] = field(default_factory=list)
    start: float = 0.0
    duration: float = 0.0  # to the last answer
    processor: float = 0.0  # processor time of this process meanwhile
    peak: int = 0  # requests at once
    in_flight: int = 0  # at the end: those that Ctrl-C dropped
    lags: list[float] = field(default_factory=list)  # of the event loop, every TICK
    delays: list[float] = field(default_factory=lambda: [0.0])  # of requests after their arrival time
    acceptance: Acceptance | None = None
    average: float | None = None  # acceptance length, where the server reports nothing else
    source: str = ""  # of the acceptance
    cached: float | None = None  # share of the prompts' tokens that prefix caches held

    @property
    def good(self) -> list[StreamedAnswer]:
        """The requests that were answered."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def lag(self) -> float:
        """How late the client was, at the 99th percentile of the measurements and of the requests' arrivals."""
        return max(float(np.percentile(lags, 99)) if lags else 0.0 for lags in (self.lags, self.delays))

    @property
    def worst_lag(self) -> float:
        """How late the client was at worst."""
        return max((*self.lags, *self.delays))


async def drive(
    run: LoadRun, asks: Sequence[LoadRequest], stopped: Callable[[], bool], advance: Callable[[], None]
) -> LoadRun:
    """Send the requests and fill in the run. `stopped`: asked every TICK; once true, what is in flight is dropped.

    `advance` is called for each answer.
    """
    before = await run.server.page()
    run.start, processor = time.perf_counter(), time.process_time()
    await unless_stopped(_send(run, asks, advance), stopped, run.lags)
    run.duration, run.processor = time.perf_counter() - run.start, time.process_time() - processor
    _tell_acceptance(run, *grown(before, await run.server.page()))
    return run


async def unless_stopped(work: Coroutine[Any, Any, None], stopped: Callable[[], bool], lags: list[float]) -> None:
    """Do some work until it ends or is stopped. `lags` receives how late the event loop was, every TICK."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_watch(lags, stopped))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _send(run: LoadRun, asks: Sequence[LoadRequest], advance: Callable[[], None]) -> None:
    """Send the requests at their arrival times, or each when another is answered."""

    async def send(number: int) -> None:
        run.in_flight += 1
        run.peak = max(run.peak, run.in_flight)
        answer = await run.server.send(asks[number], number)
        run.in_flight -= 1
        run.answers.append(answer)
        advance()

    async def worker(numbers: Iterator[int]) -> None:
        for number in numbers:
            await send(number)

    async with asyncio.TaskGroup() as group:
        if run.load.rate is None:
            numbers = iter(range(len(asks)))  # all take from it
            for _ in range(min(run.load.concurrency or 1, len(asks))):
                group.create_task(worker(numbers))
            return
        for number, due in enumerate(arrivals(len(asks), run.load.rate, run.burstiness, run.server.request.seed)):
            await asyncio.sleep(max(run.start + due - time.perf_counter(), 0))
            run.delays.append(time.perf_counter() - run.start - due)
            group.create_task(send(number))


async def _watch(lags: list[float], stopped: Callable[[], bool]) -> None:
    """Until it is stopped, measure how much later than asked the event loop wakes this up."""
    while not stopped():
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - due)


def _tell_acceptance(run: LoadRun, aggregates: Sequence[Aggregate], cached: float | None) -> None:
    """Fill in the acceptance: from the responses if all report it, else from counters, which include other clients.

    llama.cpp's responses have no number of drafts, its counters have.
    """
    drafts = [answer.drafts for answer in run.good if answer.drafts is not None]
    counted = not aggregates or all(each.drafts is not None for each in drafts)
    if drafts and len(drafts) == len(run.good) and counted:
        run.acceptance, run.source = measure(drafts), RESPONSES
    elif aggregates:
        run.acceptance, run.source = measure(aggregates), METRICS
        if run.acceptance.tau is None and (
            lengths := [aggregate.length for aggregate in aggregates if aggregate.length is not None]
        ):
            run.average, run.source = mean(lengths), AVERAGE
    run.cached = cached
