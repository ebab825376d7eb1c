"""Decisions once more, where p, q and coin are right as recorded and another p decided: of which row, or temperature?

Only first siblings are asked about: later ones are judged by a residual, which other rows would change too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, Suspect
from specscope.analyze.diagnose.rerun.rows import Asked, Rows, around
from specscope.analyze.diagnose.rerun.rules import RIGHT, probabilities
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Outcome
from specscope.trace.record.tree import ROOT

STEPS = 24  # that are asked about
ENOUGH = 4  # decisions that another row must explain
NEARLY = 0.96  # of all that were tried: rounding may turn one
CHECKS = ("outcomes", "greedy acceptance")
Other = Callable[[Asked, int, int, Sequence[Asked]], "tuple[Asked, int] | None"]  # whose row, of a parent and its child


def _at(asked: Asked, node: int) -> tuple[Asked, int] | None:
    return (asked, node) if node in asked.logits else None


def _beside(by: int) -> Other:
    """The row of the request `by` places further on in the batch, at the same place in its tree."""

    def other(asked: Asked, parent: int, child: int, every: Sequence[Asked]) -> tuple[Asked, int] | None:
        record = asked.step.visit.record.step
        together = (neighbour for neighbour in every if neighbour.step.visit.record.step == record)
        batch = sorted(together, key=lambda neighbour: neighbour.step.visit.row)
        places = [neighbour.step.request for neighbour in batch]
        return _at(batch[(places.index(asked.step.request) + by) % len(batch)], parent) if len(batch) > 1 else None

    return other


def _before(asked: Asked, parent: int, child: int, every: Sequence[Asked]) -> tuple[Asked, int] | None:
    last = asked.step.last
    if last is None:
        return None
    before = next((other for other in every if other.step.part is last.part), None)
    return None if before is None else _at(before, parent)


def _above(asked: Asked, parent: int, child: int, every: Sequence[Asked]) -> tuple[Asked, int] | None:
    return None if parent == ROOT else _at(asked, int(asked.step.tree.parent[parent]))


def _own(asked: Asked, parent: int, child: int, every: Sequence[Asked]) -> tuple[Asked, int] | None:
    return _at(asked, parent)


POWERS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.25, 1.5, 2.0, 3.0, 4.0)  # p at another temperature, or at it twice
OTHERS: dict[str, Other] = {
    "the root": lambda asked, parent, child, every: None if parent == ROOT else _at(asked, ROOT),
    "the row above its own": _above,
    "the row of the draft itself": lambda asked, parent, child, every: _at(asked, child),
    "the next request of the batch": _beside(1),
    "the request before it in the batch": _beside(-1),
    "the request's step before": _before,
}


def other_decisions(case: Case, rows: Rows) -> list[Suspect]:
    """Which other row of p gives the outcomes of the drafts that were decided wrongly."""
    c = case.evidence
    wrong = {
        (c.visits[int(c.step[node])].request.id, c.visits[int(c.step[node])].part.index, int(c.node[node]))
        for name in CHECKS
        if name in case.checks
        for node in case.checks[name].wrong.tolist()
    }
    keys = sorted({(request, index) for request, index, _ in wrong})  # the same ones in every process
    if len(wrong) < ENOUGH:
        return []
    chosen = set(keys[:: max(1, len(keys) // STEPS)][:STEPS])
    every = rows(case, around(case, chosen))
    judged = [asked for asked in every if asked.step.key in chosen]
    looked = sum((*asked.step.key, node) in wrong for asked in judged for _, node in first_trials(asked.step))
    candidates: list[tuple[str, Other, float]] = [(name, other, 1.0) for name, other in OTHERS.items()]
    candidates += [(f"its own row to the power {power:g}", _own, power) for power in POWERS]
    best: tuple[int, Suspect] | None = None
    for name, other, power in candidates:
        fits = total = explained = 0
        example = None
        for asked, child, same in _decided(judged, every, other, power):
            is_wrong = (*asked.step.key, child) in wrong
            total, fits = total + 1, fits + same
            explained += same and is_wrong
            example = example or (asked.step.reference(child) if is_wrong else None)
        if explained >= ENOUGH and explained > NEARLY * looked and fits > NEARLY * total:
            line = (
                f"{explained:,} of {plural(looked, 'draft')} that are decided against their own p follow from p of "
                f"{name}, and so do {fits:,} of all {total:,} that it could decide"
            )
            if best is None or fits > best[0]:
                best = fits, Suspect(Cause.P_NOT_USED, CERTAIN + 0.02, (line,), example=example, rerun=True)
    return [] if best is None else [best[1]]


def _decided(
    judged: Sequence[Asked], every: Sequence[Asked], other: Other, power: float
) -> Iterator[tuple[Asked, int, bool]]:
    """(step, first child, whether its outcome is as recorded) by the p of another row, to a power."""
    for asked in judged:
        for parent, child in first_trials(asked.step):
            row = other(asked, parent, child, every)
            if row is None:
                continue
            p = probabilities(row[0], row[1], RIGHT, below=parent != ROOT)
            p = p if power == 1 else p.pow(power) / p.pow(power).sum()
            accepted = asked.step.verdict.outcome[child] == Outcome.ACCEPTED
            yield asked, child, bool(decides(asked.step, child, p) == accepted)


def first_trials(step: Step) -> list[tuple[int, int]]:
    """(parent, first child) of each parent whose first child was tried."""
    tree, outcome = step.tree, step.verdict.outcome
    firsts: dict[int, int] = {}
    for node, parent in enumerate(tree.parent.tolist()):
        firsts.setdefault(parent, node)
    return [(parent, node) for parent, node in firsts.items() if outcome[node] != Outcome.UNTRIED]


def decides(step: Step, node: int, p: Tensor) -> bool:
    """Whether a draft is accepted by a p [V]."""
    token = int(step.tree.token[node])
    if token >= len(p):
        return False
    if step.params is not None and step.params.greedy:
        return int(p.argmax()) == token
    q = float(step.verdict.q_trial[node])
    return q > 0 and float(step.verdict.coin[node]) < min(1.0, float(p[token]) / q)
