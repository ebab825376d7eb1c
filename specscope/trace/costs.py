"""What a step costs on one machine: seconds by rows of the target and by rows of a drafting pass. No torch.

A step that verifies trees of n nodes in a batch of B takes

    step(B (1 + n)) + draft(pass 1) + sum over later passes of pass(B * nodes fed)

where step(rows) is all but drafting (schedule, forward, verify, commit), draft(pass 1) the first pass with all that
drafting takes once, and the curves lie on straight lines between what was measured (bench/step_costs.py). A plain step
is that of an engine that drafts nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.files import read_whole, write_whole
from specscope.trace.plan import DynamicPlan, TreePlan
from specscope.trace.record.records import RunInfo

KIND = "specscope step costs"
LARGEST = 2**20  # bytes of a file of costs


@dataclass(frozen=True)
class CostPoint:
    """Median seconds at a size, and where the median lies at 95 %."""

    rows: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class StepCosts:
    """Measured costs of one engine at one batch size."""

    target: str
    drafter: str
    draft_model: str
    dtype: str
    batch: int
    context: int  # tokens of a request, about, while it was measured
    machine: Mapping[str, str]
    plain: CostPoint
    step: tuple[CostPoint, ...]  # without drafting
    first: CostPoint  # drafting with one pass; 0 seconds for a drafter that is no model
    passes: tuple[CostPoint, ...]  # each later pass, by its rows in all; none for a drafter that is no model
    kind: str = KIND

    def seconds(self, plan: TreePlan, nodes: float) -> float:
        """Of a step of B requests, each with a tree of so many nodes."""
        rows = self.batch * (1 + nodes)
        drafting = self.first.seconds + sum(at(self.passes, self.batch * width) for width in fed(plan))
        return at(self.step, rows) + drafting

    @property
    def error(self) -> float:
        """How far the measured medians are off, relative: the root of the mean square over steps and plain."""
        points = [self.plain, *self.step]
        return math.sqrt(sum(((one.high - one.low) / 2 / one.seconds) ** 2 for one in points) / len(points))

    @property
    def most_rows(self) -> int:
        """Up to which steps were measured."""
        return max(point.rows for point in self.step)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def at(points: Sequence[CostPoint], rows: float) -> float:
    """Seconds at a number of rows: on the line between its neighbours, or beyond the last two."""
    if not points:
        return 0.0
    x, y = [point.rows for point in points], [point.seconds for point in points]
    if rows > x[-1] and len(x) > 1:
        return y[-1] + max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0) * (rows - x[-1])
    return float(np.interp(rows, x, y))


def rising(points: Sequence[CostPoint]) -> tuple[CostPoint, ...]:
    """More rows take no less: neighbours that fall are set to their mean (isotonic regression)."""
    groups: list[list[CostPoint]] = []
    for point in points:
        groups.append([point])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return tuple(dataclasses.replace(point, seconds=_mean(group)) for group in groups for point in group)


def _mean(points: Sequence[CostPoint]) -> float:
    return sum(point.seconds for point in points) / len(points)


def fed(plan: TreePlan) -> list[int]:
    """Nodes of a request that each drafting pass after the first feeds."""
    if isinstance(plan, DynamicPlan):
        return [plan.top] * (plan.depth - 1)
    parents = {above for above in plan.shape.parent if above >= 0}
    return [count for level in plan.shape.levels if (count := len(parents.intersection(level)))]


def read_costs(path: str, run: RunInfo, batch: int) -> StepCosts:
    """From a file that --save-costs wrote. Raises UserError for any other, and for another engine's."""
    try:
        found = decoded(read_whole(path, "the costs", LARGEST), StepCosts)
    except OSError as error:
        raise UserError(f"cannot read the costs {path}: {error.strerror}") from error
    except ValueError:
        raise UserError(f"{path} holds no costs: --save-costs writes them") from None
    if (
        found.kind != KIND
        or not found.step
        or not all(_sound(one) for one in (*found.step, *found.passes, found.plain))
    ):
        raise UserError(f"{path} holds no costs: --save-costs writes them")
    for name in ("target", "drafter", "draft_model", "dtype"):
        here, there = getattr(run, name), getattr(found, name)
        if here != there:
            what = name.replace("_", " ")
            raise UserError(
                f"{path} holds the costs of {what} {there or 'none'}, and the capture's is {here or 'none'}"
            )
    if found.batch != batch:
        raise UserError(f"{path} holds costs at batch {found.batch}: give --batch {found.batch}, or measure anew")
    return found


def _sound(point: CostPoint) -> bool:
    return point.rows >= 0 and 0 < point.seconds < math.inf and 0 <= point.low <= point.high < math.inf


def write_costs(path: str, costs: StepCosts) -> None:
    """As JSON that read_costs reads. Raises UserError."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
