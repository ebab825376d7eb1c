"""One run: a load on a server, from one event loop whose own lag is measured beside."""

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
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.aggregate import Aggregate

TICK = 0.01  # seconds between two looks at how late the event loop is
LATE = 0.01  # seconds of lag beyond which its figures are doubtful
METRICS, RESPONSES = "the server's /metrics", "the responses"
AVERAGE = "an average in the server's /metrics"  # SGLang's: of an interval of its own, without counts


@dataclass
class LoadRun:
    """What came of one load on one server. Seconds."""

    server: Endpoint
    load: Load
    round: int
    asked: int  # requests that were to be sent
    burstiness: float = 1.0  # of their arrival at a rate
    answers: list[StreamedAnswer] = field(default_factory=list)
    start: float = 0.0
    duration: float = 0.0  # to the last answer
    processor: float = 0.0  # that this process took meanwhile
    peak: int = 0  # requests at once
    in_flight: int = 0  # at the end: those that Ctrl-C dropped
    lags: list[float] = field(default_factory=list)  # of the event loop, every TICK
    delays: list[float] = field(default_factory=lambda: [0.0])  # of requests after their arrival time
    acceptance: Acceptance | None = None
    average: float | None = None  # acceptance length, where the server tells nothing but that
    source: str = ""  # of the acceptance
    cached: float | None = None  # share of the prompts' tokens that prefix caches held

    @property
    def good(self) -> list[StreamedAnswer]:
        """The requests that were answered."""
        return [answer for answer in self.answers if not answer.error]

    @property
    def lag(self) -> float:
        """How late the client was at all but the worst hundredth of the looks, and of the requests' arrivals."""
        return max(float(np.percentile(lags, 99)) if lags else 0.0 for lags in (self.lags, self.delays))

    @property
    def worst_lag(self) -> float:
        """At the worst moment."""
        return max((*self.lags, *self.delays))


async def drive(
    run: LoadRun, asks: Sequence[LoadRequest], stopped: Callable[[], bool], advance: Callable[[], None]
) -> LoadRun:
    """Send the requests and fill the run in. `stopped`: asked every TICK; where it is so, what is in flight is dropped.

    `advance` is called for each answer.
    """
    before = await run.server.page()
    run.start, processor = time.perf_counter(), time.process_time()
    await unless_stopped(_send(run, asks, advance), stopped, run.lags)
    run.duration, run.processor = time.perf_counter() - run.start, time.process_time() - processor
    _tell_acceptance(run, *grown(before, await run.server.page()))
    return run


async def unless_stopped(work: Coroutine[Any, Any, None], stopped: Callable[[], bool], lags: list[float]) -> None:
    """Do some work until its end, or until it is stopped. `lags`: how late the event loop was, every TICK."""
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
    """At their times, or each when another is answered."""

    async def one(number: int) -> None:
        run.in_flight += 1
        run.peak = max(run.peak, run.in_flight)
        answer = await run.server.send(asks[number], number)
        run.in_flight -= 1
        run.answers.append(answer)
        advance()

    async def worker(numbers: Iterator[int]) -> None:
        for number in numbers:
            await one(number)

    async with asyncio.TaskGroup() as group:
        if run.load.rate is None:
            numbers = iter(range(len(asks)))  # all take from it
            for _ in range(min(run.load.concurrency or 1, len(asks))):
                group.create_task(worker(numbers))
            return
        for number, at in enumerate(arrivals(len(asks), run.load.rate, run.burstiness, run.server.request.seed)):
            await asyncio.sleep(max(run.start + at - time.perf_counter(), 0))
            run.delays.append(time.perf_counter() - run.start - at)
            group.create_task(one(number))


async def _watch(lags: list[float], stopped: Callable[[], bool]) -> None:
    """Until it is stopped: how much later than asked the event loop wakes this up."""
    while not stopped():
        due = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - due)


def _tell_acceptance(run: LoadRun, told: Sequence[Aggregate], cached: float | None) -> None:
    """From the responses where each tells its own, else from the counters, which also count what others asked."""
    own = [answer.drafts for answer in run.good if answer.drafts is not None]
    if own and len(own) == len(run.good):
        run.acceptance, run.source = measure(own), RESPONSES
    elif told:
        run.acceptance, run.source = measure(told), METRICS
        if run.acceptance.tau is None and (lengths := [one.length for one in told if one.length is not None]):
            run.average, run.source = mean(lengths), AVERAGE
    run.cached = cached
