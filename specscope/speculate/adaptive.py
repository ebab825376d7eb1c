"""Sizer: how deep and how wide to draft for a request, from what was accepted lately and what a step costs. No torch.

A step that verifies rows drafted in D passes takes about base + slope * rows + pass * D, all three measured as the
engine runs. A request that has its d-th level accepted with probability a_d, measured over its last steps, gets
1 + a_1 + .. + a_D tokens from it. The sizer takes the depth of the most tokens per time; 0, where drafting does not
pay. From time to time a request that drafts nothing drafts a little, to see whether it pays again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specscope.trace.plan import DynamicPlan
from specscope.trace.records import Phase, StepRecord, Verdict
from specscope.trace.tree import DraftTree
from specscope.trace.wording import plural

WEIGHT = 0.08  # of the newest step in a request's averages: about the last dozen count
COST_WEIGHT = 0.02  # of the newest step in the measured costs
PRIOR = 0.6  # acceptance of a level, given the one above, before anything is known
OUTLIER = 5  # a pass that takes so many times what is known fed more than a tree
PROBE_EVERY = 24  # steps without drafts after which a request tries again
PROBE_DEPTH = 2


@dataclass(frozen=True)
class Size:
    """What a request may draft in a step. Filled by Sizer.choose."""

    depth: int  # 0: nothing
    nodes: int
    reason: str  # for the evidence


def _seconds(phase: Phase) -> float:
    return (phase.end_ns - phase.start_ns) / 1e9


@dataclass
class _CostLine:
    """Least squares of y = base + slope * x over an exponential window."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 1 - COST_WEIGHT
        self.weight = keep * self.weight + 1
        self.x, self.y = keep * self.x + x, keep * self.y + y
        self.xx, self.xy = keep * self.xx + x * x, keep * self.xy + x * y

    def at(self, x: float) -> float:
        """The line's value; flat while all points have one x. 0 before the first point."""
        if self.weight == 0:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = (self.xy / self.weight - mean_x * mean_y) / spread if spread > 1e-6 else 0.0
        return max(mean_y + max(slope, 0.0) * (x - mean_x), mean_y * 0.1)


@dataclass
class _Recent:
    """What became of a request's last drafts."""

    reach: list[float]  # a_d: how often level d was accepted
    idle: int = 0  # steps since it last drafted


@dataclass
class Sizer:
    """Chooses sizes for all requests of an engine."""

    plan: DynamicPlan  # the largest tree
    _recent: dict[str, _Recent] = field(default_factory=dict)
    _step: _CostLine = field(default_factory=_CostLine)  # seconds of a step without its passes, by rows
    _pass: _CostLine = field(default_factory=_CostLine)  # seconds of a drafting pass, by requests

    def nodes(self, depth: int) -> int:
        """Nodes of a tree of some depth: the plan's share of them."""
        return max(round(self.plan.max_nodes * depth / self.plan.depth), depth)

    def choose(self, request: str, batch: int) -> Size:
        """The size for a request in a batch of that many, as if all of them chose alike."""
        recent = self._recent.setdefault(request, _Recent([PRIOR ** (d + 1) for d in range(self.plan.depth)]))
        if self._pass.weight == 0 or self._step.weight == 0:
            return Size(self.plan.depth, self.plan.max_nodes, "the whole tree: costs are not known yet")
        if recent.idle >= PROBE_EVERY:
            depth = min(PROBE_DEPTH, self.plan.depth)
            return Size(depth, self.nodes(depth), f"a probe after {plural(recent.idle, 'step')} without drafts")
        gains = [1 + sum(recent.reach[:depth]) for depth in range(self.plan.depth + 1)]
        costs = [self._cost(depth, batch) for depth in range(self.plan.depth + 1)]
        best = max(range(self.plan.depth + 1), key=lambda depth: gains[depth] / costs[depth])
        reach = " ".join(f"{a:.2f}" for a in recent.reach)
        why = f"{gains[best]:.2f} tokens at {costs[best] / costs[0]:.2f} of a plain step; recent acceptance {reach}"
        return Size(best, self.nodes(best) if best else 0, why if best else f"no draft pays: {why}")

    def _cost(self, depth: int, batch: int) -> float:
        """Seconds of a step with trees of some depth."""
        if depth == 0:
            return self._step.at(batch)
        return self._step.at(batch * (1 + self.nodes(depth))) + depth * self._pass.at(batch)

    def learn(self, request: str, tree: DraftTree, verdict: Verdict) -> None:
        """What became of a draft, or that nothing was drafted."""
        recent = self._recent.get(request)
        if recent is None:
            return
        if not len(tree):
            recent.idle += 1
            return
        recent.idle, reach = 0, recent.reach
        for depth in range(len(reach)):
            if depth < tree.max_depth:
                seen = 1.0 if verdict.accepted > depth else 0.0
            else:  # not drafted: as likely, given the level above, as that was given the one above it
                above = reach[depth - 2] if depth > 1 else 1.0
                seen = min(reach[depth - 1] ** 2 / max(above, 1e-9), reach[depth - 1])
            reach[depth] += WEIGHT * (seen - reach[depth])

    def note(self, record: StepRecord) -> None:
        """Learn from a step: what became of its drafts, and what it cost where it only decoded."""
        for part in record.requests:
            if part.verdict is not None:
                self.learn(part.request, part.tree, part.verdict)
        if not record.requests or any(part.prefill_tokens or part.verdict is None for part in record.requests):
            return
        seconds = {phase.name: _seconds(phase) for phase in record.phases}
        drafting = seconds.pop("draft")
        if len(record.passes) > 1:  # the first pass may also feed a whole prompt, and says nothing of the others
            drafting = (drafting - _seconds(record.passes[0])) / (len(record.passes) - 1)
        rows = sum(1 + len(part.tree) for part in record.requests)
        self.timed(rows, sum(seconds.values()), len(record.requests), drafting if record.passes else None)

    def timed(self, rows: int, step_s: float, batch: int, pass_s: float | None) -> None:
        """Note costs: seconds of a step without drafting, by rows; seconds of a pass, by requests, None without."""
        self._step.add(rows, step_s)
        known = self._pass.at(batch)
        if pass_s is not None and (known == 0 or pass_s < OUTLIER * known):
            self._pass.add(batch, pass_s)

    def forget(self, request: str) -> None:
        """A request ended."""
        self._recent.pop(request, None)
