"""Seconds of a step by rows, and of a drafting pass by width: measured on the engine itself while it decodes.

Engines with trees of several sizes, over one loaded model, decode the same prompts and step in turn. So the figures
include everything in a step: scheduling, attention at the prompts' lengths, verification, evidence and commit.
"""

from __future__ import annotations

import itertools
import math
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, pstdev

import torch

from specscope.engine.engine import Engine
from specscope.engine.prompts import Prompt
from specscope.engine.scheduler import Room
from specscope.live.fork import beside
from specscope.plans.costs import CostPoint, Costs, about_run
from specscope.plans.plan import DynamicPlan
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft, Drafter
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import StepRecord
from specscope.trace.record.tree import DraftTree
from specscope.user_cache import processor

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
        return Timed(
            seconds=seconds,
            drafting=sum(phase.end_ns - phase.start_ns for phase in record.phases if phase.name == "draft") / 1e9,
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
    return fmean(_kept(seconds))


def _kept(seconds: Sequence[float]) -> list[float]:
    out = len(seconds) // 10
    return sorted(seconds)[out : len(seconds) - out]


ROUNDS = 24  # at least
WARM = 2  # that do not count
SECONDS = 60.0  # after which no round is added to make the figures more certain
SURE = 0.02  # relative error that is certain enough
T = 2.1  # 95 % of a t distribution lie within, for 20 steps
# Nodes, depth and width of a search, so that there are costs of 2 to 32 rows, and of passes of 1 to 8 rows.
SEARCHES = ((1, 1, 1), (3, 3, 1), (5, 2, 2), (7, 2, 4), (11, 3, 4), (15, 3, 6), (23, 3, 6), (31, 3, 8))
LARGER = ((47, 3, 8), (63, 4, 8), (95, 4, 10), (127, 5, 12))
SIZES = (1, 3, 5, 7, 11, 15, 23, 31)  # nodes, for a drafter that is no model
PLAIN = {"drafter": "none", "draft_model": None, "tree": None}
Progress = Callable[[str, int, int], None]


class Filler(Drafter):
    """Drafts chains of random tokens: what a step costs does not depend on which they are."""

    name = "filler"

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self.max_nodes = self.max_depth = nodes
        self._draw = random.Random(nodes)
        self._vocab_size = vocab_size

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        parent = range(-1, self.max_nodes - 1)
        tokens = ([self._draw.randrange(self._vocab_size) for _ in parent] for _ in contexts)
        return [Draft(DraftTree.build(each, parent)) for each in tokens]


class CostLanes:
    """Lanes with a drafter of each size and one without a drafter, and the costs that follow from their steps."""

    def __init__(self, engine: Engine, run: Sequence[Lane], plans: Sequence[DynamicPlan], work: Sequence[Work]) -> None:
        """`plans`: those of all lanes but the first; empty where the drafter is not a model."""
        self.engine, self.run, self.plans = engine, run, plans
        self.context = round(median(len(engine.encode(prompt)[1]) for prompt, _ in work))
        for lane in run:
            lane.give(itertools.cycle(work))

    def counted(self, rounds: Rounds) -> list[list[Timed]]:
        """Each lane's steps, without those in which some request of a drafting lane had no drafts."""
        drafts = [lane.batch if lane.engine.drafter.max_nodes else 0 for lane in self.run]
        by_lane = zip(zip(*rounds, strict=True), drafts, strict=True)
        return [[step for step in steps if step and step.drafts == wanted] for steps, wanted in by_lane]

    def costs(self, rounds: Rounds) -> Costs:
        counted = self.counted(rounds)
        info, batch = self.engine.run_info, self.run[0].batch
        first, passes = _passes(self.plans, counted[1:], batch) if self.plans else ((), ())
        plain = _point(batch, [step.seconds for step in counted[0]])
        about = {**machine_info(info.dtype, torch.get_num_threads()), **about_run(info), "context": str(self.context)}
        return Costs(about, (plain, *_steps(counted[1:])), first, passes)


@contextmanager
def cost_lanes(engine: Engine, work: Sequence[Work], batch: int, most_nodes: int) -> Iterator[CostLanes]:
    """Lanes for steps with up to `most_nodes` nodes per request. `work`: prompts to decode meanwhile, repeatedly."""
    has_model = engine.scheduler.room.model is not None
    searches = [*SEARCHES, *(search for search in LARGER if search[0] < 2 * most_nodes)]
    plans = [DynamicPlan(*search) for search in searches] if has_model else []
    wanted: dict[str, dict[str, str | None]] = {"plain": PLAIN}
    wanted |= {str(plan): {"tree": str(plan)} for plan in plans} if has_model else {str(n): PLAIN for n in SIZES}
    with lanes(engine, wanted, batch) as run:
        for lane in run[1:] if not has_model else ():
            filler = Filler(int(lane.name), engine.runner.loaded.vocab_size)
            lane.engine.parts.drafter = filler
            lane.engine.scheduler.room = Room(lane.engine.runner, filler, lane.engine.max_context)
        yield CostLanes(engine, run, plans, work)


def measure_costs(engine: Engine, work: Sequence[Work], batch: int, most_nodes: int, progress: Progress) -> Costs:
    """Measure the costs, in a few seconds; longer where the machine is busy."""
    start, least = time.monotonic(), ROUNDS + WARM
    with cost_lanes(engine, work, batch, most_nodes) as measuring:
        for rounds in in_turn(measuring.run):
            progress("measuring step costs", min(len(rounds), least), least)
            counted = measuring.counted(rounds[WARM:]) if len(rounds) >= least else []
            if counted and min(map(len, counted)) >= ROUNDS // 2:
                points = [_point(0, [step.seconds for step in steps]) for steps in counted]
                error = max((point.high - point.low) / 2 / point.seconds for point in points)
                if error <= SURE or time.monotonic() - start >= SECONDS:
                    return measuring.costs(rounds[WARM:])
    raise AssertionError  # lanes have work for ever


def _steps(sizes: Sequence[Sequence[Timed]]) -> tuple[CostPoint, ...]:
    """The costs of steps without drafting, by rows: a size's rows are the mean over its steps."""
    by_rows = {round(fmean(step.rows for step in steps)): steps for steps in filter(None, sizes)}
    seconds = {rows: [step.seconds - step.drafting for step in steps] for rows, steps in by_rows.items()}
    return rising([_point(rows, seconds[rows]) for rows in sorted(seconds)])


def _passes(
    plans: Sequence[DynamicPlan], sizes: Sequence[Sequence[Timed]], batch: int
) -> tuple[tuple[CostPoint, ...], tuple[CostPoint, ...]]:
    """Drafting with one pass; and a later pass by its rows: what drafting takes beyond that, by pass."""
    whole = {plan: [step.drafting for step in steps] for plan, steps in zip(plans, sizes, strict=True) if steps}
    first = next(_point(batch, seconds) for plan, seconds in whole.items() if plan.depth == 1)
    by_rows: dict[int, list[float]] = {}
    for plan, seconds in whole.items():
        if plan.depth > 1:
            each = [max(drafting - first.seconds, 1e-6) / (plan.depth - 1) for drafting in seconds]
            by_rows.setdefault(batch * plan.top, []).extend(each)
    return (first,), rising([_point(rows, by_rows[rows]) for rows in sorted(by_rows)])


def _point(rows: int, seconds: Sequence[float]) -> CostPoint:
    """With the 95 % interval of `middle`: what it leaves out counts as the ends of what it keeps (Yuen 1974)."""
    kept, out = _kept(seconds), len(seconds) // 10
    error = T * pstdev([kept[0]] * out + kept + [kept[-1]] * out) * math.sqrt(len(seconds)) / len(kept)
    mean = fmean(kept)
    return CostPoint(rows, mean, max(mean - error, 0.0), mean + error)


def rising(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
    """The points made non-decreasing in rows: neighbours that fall become their mean (isotonic regression)."""
    y, all_ = [point.seconds for point in points], range(len(points))
    means = {(a, b): fmean(y[a : b + 1]) for a in all_ for b in all_[a:]}
    fitted = [max(min(means[a, b] for b in all_[i:]) for a in all_[: i + 1]) for i in all_]
    return tuple(CostPoint(p.rows, x, min(p.low, x), max(p.high, x)) for p, x in zip(points, fitted, strict=True))


def machine_info(dtype: str, threads: int) -> dict[str, str]:
    return {
        "cpu": processor(),
        "threads": f"{threads} threads",
        "dtype": dtype,
        "torch": f"torch {torch.__version__}",
        "python": f"python {platform.python_version()}",
    }
