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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median

import torch

from specscope.engine.engine import Engine
from specscope.engine.scheduler import Room
from specscope.measure.lanes import Lane, Rounds, Timed, Work, in_turn, lanes, middle
from specscope.plans.costs import CostPoint, Costs, about_run
from specscope.plans.plan import DynamicPlan
from specscope.speculate.drafters.base import Context, Draft, Drafter
from specscope.trace.record.tree import DraftTree
from specscope.user_cache import processor

ROUNDS = 24  # at least
WARM = 2  # that do not count
SECONDS = 60.0  # after which no round is added to make the figures more certain
SURE = 0.02  # relative error of the medians that is certain enough
# Nodes, depth and width of a search, so that there are costs of 2 to 32 rows, and of passes of 1 to 8 rows.
SEARCHES = ((1, 1, 1), (3, 3, 1), (5, 2, 2), (7, 2, 4), (11, 3, 4), (15, 3, 6), (23, 3, 6), (31, 3, 8))
LARGER = ((47, 3, 8), (63, 4, 8), (95, 4, 10), (127, 5, 12))
SIZES = (1, 3, 5, 7, 11, 15, 23, 31)  # nodes, for a drafter that is no model
PLAIN = {"drafter": "none", "draft_model": None, "tree": None}
Progress = Callable[[str, int, int], None]


class Filler(Drafter):
    """Drafts a chain of `nodes` random tokens: what a step costs does not depend on which they are."""

    name = "filler"

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self.max_nodes = self.max_depth = nodes
        self._draw = random.Random(nodes)
        self._vocab_size = vocab_size

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """A chain for each context."""
        parent = list(range(-1, self.max_nodes - 1))
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
        """The costs, from the rounds of these lanes."""
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
    with cost_lanes(engine, work, batch, most_nodes) as measuring:
        return measuring.costs(_measure(measuring, progress))


def _measure(measuring: CostLanes, progress: Progress) -> Rounds:
    start, least = time.monotonic(), ROUNDS + WARM
    for rounds in in_turn(measuring.run):
        progress("measuring step costs", min(len(rounds), least), least)
        counted = measuring.counted(rounds[WARM:]) if len(rounds) >= least else []
        if counted and min(map(len, counted)) >= ROUNDS // 2:
            error = max(_error([step.seconds for step in steps]) for steps in counted)
            if error <= SURE or time.monotonic() - start >= SECONDS:
                return rounds[WARM:]
    raise AssertionError  # lanes have work for ever


def _error(seconds: Sequence[float]) -> float:
    low, high = median_interval(seconds)
    return (high - low) / 2 / median(seconds)


def _steps(sizes: Sequence[Sequence[Timed]]) -> tuple[CostPoint, ...]:
    """The costs of steps without drafting, by rows: a size's rows are the mean over its steps."""
    points: dict[int, CostPoint] = {}
    for steps in filter(None, sizes):
        rows = round(sum(step.rows for step in steps) / len(steps))
        points[rows] = _point(rows, [step.seconds - step.drafting for step in steps])
    return rising([points[rows] for rows in sorted(points)])


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
    low, high = median_interval(seconds)
    return CostPoint(rows, middle(seconds), low, high)


def rising(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
    """The points made non-decreasing in rows: neighbours that fall become their mean (isotonic regression)."""
    y, all_ = [point.seconds for point in points], range(len(points))
    means = {(a, b): fmean(y[a : b + 1]) for a in all_ for b in all_[a:]}
    fitted = (max(min(means[a, b] for b in all_[i:]) for a in all_[: i + 1]) for i in all_)
    return tuple(replace(point, seconds=next(fitted)) for point in points)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median with this confidence, whatever the distribution.

    The number of values below the median is binomial (n, 1/2). With too few values it is the whole range.
    """
    ordered, n = sorted(values), len(values)
    outside, low = 1 / 2**n, 0
    while low + 1 < n // 2 and 2 * (outside + math.comb(n, low + 1) / 2**n) <= 1 - confidence:
        low += 1
        outside += math.comb(n, low) / 2**n
    return ordered[low], ordered[n - 1 - low]


def machine_info(dtype: str, threads: int) -> dict[str, str]:
    """What the figures were taken on."""
    return {
        "cpu": processor(),
        "threads": f"{threads} threads",
        "dtype": dtype,
        "torch": f"torch {torch.__version__}",
        "python": f"python {platform.python_version()}",
    }
