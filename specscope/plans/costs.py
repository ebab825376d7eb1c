"""What a step costs on one machine: the one model of it, and the one file that keeps it.

A step of B requests with n drafted nodes in all, of which the drafter made some in passes, takes

    step(B + n) + first(B) + sum over later passes of pass(rows that it is fed)

where step is all but drafting, first the first pass with all that drafting takes once, and every curve lies on straight
lines between what was measured, at one B. `tune` rates trees by these costs, and measures them while requests decode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from specscope.errors import UserError
from specscope.plans.plan import TreePlan
from specscope.user_cache import LARGEST
from specscope.whole_file import decoded, read_whole, write_whole

Seconds = Annotated[float, Meta(ge=0)]
MODELS = ("target", "drafter", "draft model", "dtype")  # what must agree; machines may differ
MACHINE = ("cpu", "device", "threads", "dtype", "torch", "python", "versions")


@dataclass(frozen=True)
class CostPoint:
    """Seconds at a size, with bounds: a 95 % interval, or the range that was measured."""

    rows: Annotated[int, Meta(ge=1, le=2**31)]
    seconds: Seconds
    low: Seconds
    high: Seconds


@dataclass(frozen=True)
class Costs:
    """The costs of one engine on one machine, at one batch. A file holds just these, as JSON."""

    about: Mapping[str, str]  # models, settings and machine; a file that was made up may say nothing
    step: Annotated[tuple[CostPoint, ...], Meta(min_length=1)]  # by rows in all: the plain step is first
    first: tuple[CostPoint, ...]  # a first drafting pass, by requests; none for a drafter that is no model
    passes: tuple[CostPoint, ...]  # each later pass, by rows
    kind: Literal["specscope costs"] = "specscope costs"

    def __post_init__(self) -> None:
        curves = (self.step, self.first, self.passes)
        rises = all(point.rows < further.rows for curve in curves for point, further in pairwise(curve))
        if not (rises and all(point.seconds > 0 for point in self.step)):
            raise ValueError("rows must rise, and every step must take time")

    @property
    def batch(self) -> int:
        return self.plain.rows

    @property
    def plain(self) -> CostPoint:
        return self.step[0]

    def seconds(self, plan: TreePlan, nodes: float) -> float:
        """Seconds of a step in which each request has a tree of so many nodes, drafted by the plan."""
        later = sum(at(self.passes, self.batch * width) for width in plan.fed)
        return at(self.step, self.batch * (1 + nodes)) + at(self.first, self.batch) + later

    @property
    def error(self) -> float:
        """Relative error of what was measured: root mean square over the steps."""
        each = [((point.high - point.low) / 2 / point.seconds) ** 2 for point in self.step]
        return math.sqrt(sum(each) / len(each))

    @property
    def machine(self) -> dict[str, str]:
        return {name: self.about[name] for name in MACHINE if name in self.about}

    def to_dict(self) -> dict[str, Any]:
        between = CostPoint(self.batch, at(self.first, self.batch), 0.0, 0.0)
        first = next((point for point in self.first if point.rows == self.batch), between)
        models = {name.replace(" ", "_"): self.about.get(name, "") for name in MODELS}
        context = int(self.about.get("context") or 0)
        told = {"batch": self.batch, "context": context, "machine": self.machine, "plain": self.plain}
        curves = {"step": self.step[1:], "first": first, "passes": self.passes, "kind": self.kind}
        return {name: msgspec.to_builtins(value) for name, value in {**models, **told, **curves}.items()}


def at(points: Sequence[CostPoint], rows: float) -> float:
    """Seconds at a number of rows: interpolated between neighbours, extrapolated beyond the last two."""
    if not points:
        return 0.0
    x, y = [point.rows for point in points], [point.seconds for point in points]
    if rows > x[-1] and len(x) > 1:
        return y[-1] + max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0) * (rows - x[-1])
    return float(np.interp(rows, x, y))


def read_costs(path: str, run: object, batch: int) -> Costs | None:
    """Costs of a capture's engine at one batch; None where the file does not exist. Raises UserError for another's."""
    try:
        costs = decoded(read_whole(path, "the costs", LARGEST), Costs)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the costs {path}: {error.strerror}") from error
    except ValueError:
        raise UserError(f"{path} holds no costs: name a file that --costs wrote, or a new file") from None
    for name, here in about_run(run).items():
        if (there := costs.about.get(name, here)) != here:  # what is not told is not checked
            words = f"{name} {there or 'none'}, and the capture's is {here or 'none'}"
            raise UserError(f"{path} holds the costs of {words}")
    if batch != costs.batch:
        raise UserError(f"{path} holds costs at batch {costs.batch}: give --batch {costs.batch}, or measure again")
    return costs


def about_run(run: object) -> dict[str, str]:
    return {name: getattr(run, name.replace(" ", "_")) for name in MODELS}


def write_costs(path: str, costs: Costs) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
