"""The result: every tree looked at with its acceptance length and tokens/s, and the one to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specscope.analyze.tune.candidates import Candidate, Space, asked, candidates
from specscope.analyze.tune.evidence import RecordedCandidates
from specscope.analyze.tune.judged import Judge
from specscope.analyze.tune.lengths import Length, lengths
from specscope.errors import UserError
from specscope.trace.costs import BatchCosts
from specscope.trace.plan import TreePlan

TOLD = 0.05  # a tree of whose acceptance more rests on assumptions is not recommended


@dataclass(frozen=True)
class TreeRow:
    """A tree."""

    tree: str
    family: str  # static, dynamic, asked, or plain: no drafting
    budget: int  # nodes that it may have
    nodes: float  # that it has in a step, in the mean
    depth: int
    length: Length  # acceptance length
    untold: float  # share of what is accepted that rests on assumptions
    speed: Length | None = None  # tokens/s; None without costs
    step: float | None = None  # seconds
    names: tuple[str, ...] = ()  # recorded, default, choice
    expected: float | None = None  # tokens/s at the costs during --check
    measured: float | None = None  # tokens/s, with --check
    measured_length: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        told = {
            name: None if value is None else {"value": value.value, "low": value.low, "high": value.high}
            for name, value in (("acceptance_length", self.length), ("tokens_per_s", self.speed))
        }
        return {
            "tree": self.tree,
            "family": self.family,
            "names": list(self.names),
            "budget": self.budget,
            "nodes": self.nodes,
            "depth": self.depth,
            **told,
            "step_seconds": self.step,
            "assumed_share": self.untold,
            "expected_tokens_per_s": self.expected,
            "measured_tokens_per_s": self.measured,
            "measured_acceptance_length": self.measured_length,
        }


@dataclass(frozen=True)
class Tuning:
    """All that `specscope tune` found."""

    sources: tuple[str, ...]
    run: Mapping[str, str]  # what ran: model, drafter, tree, rule
    steps: int  # with drafts
    judged: int  # of them
    requests: int
    recorded_length: float  # what the run really accepted
    rows: tuple[TreeRow, ...]  # named ones first
    choice: TreeRow | None  # what to take; None without costs
    costs: BatchCosts | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    checked: Mapping[str, Any] = field(default_factory=dict)  # how --check measured

    def named(self, name: str) -> TreeRow | None:
        """The row called so."""
        return next((row for row in self.rows if name in row.names), None)

    def error(self, row: TreeRow) -> float | None:
        """Tokens/s expected at the costs during the check, over those measured, less one; None where none were."""
        return None if row.measured is None or row.expected is None else row.expected / row.measured - 1

    def family(self, name: str) -> list[TreeRow]:
        """The best of each size."""
        return [row for row in self.rows if row.family == name]

    def _errors(self) -> dict[str, float]:
        each = [(row.tree or "none", self.error(row)) for row in self.rows]
        return {tree: error for tree, error in each if error is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run": dict(self.run),
            "steps": self.steps,
            "judged": self.judged,
            "requests": self.requests,
            "recorded_acceptance_length": self.recorded_length,
            "choice": None if self.choice is None else self.choice.to_dict(),
            "trees": [row.to_dict() for row in self.rows],
            "costs": None if self.costs is None else self.costs.to_dict(),
            "checked": {**self.checked, "errors": self._errors()} if self.checked else {},
            "notes": list(self.notes),
        }


def trees(
    evidence: RecordedCandidates, named: Mapping[str, TreePlan], space: Space, costs: BatchCosts | None
) -> tuple[list[TreeRow], TreeRow | None]:
    """Every tree's row, and the fastest of them where there are costs.

    `named`: trees that are judged in any case, by what they are called, or by themselves where somebody asked for
    them. A capture that cannot tell of these raises UserError; one with a name is left out then.
    """
    judge = Judge(evidence)
    plans: dict[str, list[str]] = {}
    first: list[Candidate] = []
    for name, plan in named.items():
        own = [name] if name != str(plan) else []
        if str(plan) not in plans:
            try:
                first.append(asked(judge, plan, space))
            except UserError:
                if own:
                    continue
                raise
        plans.setdefault(str(plan), []).extend(own)
    found = [*first, *candidates(judge, space, costs)]
    if not found:
        raise UserError(
            "the capture tells of no tree: not of the recorded one, and its drafts have too little to judge others by; "
            "record with --tree dynamic:32, or name one with --tree"
        )
    each = lengths(evidence, [one.judged.accepted for one in found])
    rows = [_row(one, length, evidence, costs) for one, length in zip(found, each, strict=True)]
    rows = [replace(row, names=tuple(plans[row.tree])) if row.family == "asked" else row for row in rows]
    if costs is None:
        return rows, None
    rows.append(_plain(costs))
    best = max((row for row in rows if row.untold <= TOLD), key=_speed)
    at = rows.index(best)
    rows[at] = replace(best, names=(*best.names, "choice"))
    return rows, rows[at]


def _speed(row: TreeRow) -> float:
    return 0.0 if row.speed is None else row.speed.value


def _row(one: Candidate, length: Length, evidence: RecordedCandidates, costs: BatchCosts | None) -> TreeRow:
    row = TreeRow(
        tree=str(one.plan),
        family=one.family,
        budget=one.budget,
        nodes=one.nodes,
        depth=one.plan.max_depth,
        length=length,
        untold=one.judged.untold_share,
    )
    if costs is None:
        return row
    seconds = costs.seconds(one.plan, one.nodes)
    return replace(row, step=seconds, speed=_tokens_per_s(length, seconds, evidence, costs))


def _tokens_per_s(length: Length, seconds: float, evidence: RecordedCandidates, costs: BatchCosts) -> Length:
    """While a full batch decodes: batch * length / seconds, but steps without drafts cost and give as plain ones.

    The interval holds the error of the acceptance length and that of the measured costs.
    """
    undrafted = float(evidence.undrafted.sum())
    time = evidence.committed / length.value * seconds + undrafted * costs.plain.seconds
    value = costs.batch * (evidence.committed + undrafted) / time
    return _with_error(value, math.hypot(length.error, costs.error), length.low is not None)


def _with_error(value: float, error: float, known: bool) -> Length:
    return Length(value, value * (1 - error), value * (1 + error)) if known else Length(value)


def _plain(costs: BatchCosts) -> TreeRow:
    point = costs.plain
    return TreeRow(
        tree="",
        family="plain",
        budget=0,
        nodes=0.0,
        depth=0,
        length=Length(1.0, 1.0, 1.0),
        untold=0.0,
        speed=Length(costs.batch / point.seconds, costs.batch / point.high, costs.batch / point.low),
        step=point.seconds,
        names=("plain",),
    )


def expected(row: TreeRow, plan: TreePlan | None, evidence: RecordedCandidates, costs: BatchCosts) -> float:
    """A row's tokens/s at other costs. `plan`: its tree; None for no drafting."""
    if plan is None:
        return costs.batch / costs.plain.seconds
    return _tokens_per_s(row.length, costs.seconds(plan, row.nodes), evidence, costs).value
