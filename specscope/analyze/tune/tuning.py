"""From captures to every tree considered, with its acceptance length and tokens/s, and the recommended one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from specscope.analyze.compare.bootstrap import FEWEST, LEVEL, resampled
from specscope.analyze.plain import fields, plain
from specscope.analyze.significance import t_quantile
from specscope.analyze.tune.candidates import Space, asked, candidates
from specscope.analyze.tune.evidence import RecordedCandidates, evidence
from specscope.analyze.tune.judged import Judge, Length, TreeRow
from specscope.errors import UserError
from specscope.plans.costs import Costs
from specscope.plans.plan import StaticPlan, TreePlan, read_plan
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import BLOCK, is_own
from specscope.trace.record.tree import Doubles

# From what single steps would have accepted to a run's acceptance length, with its interval.
#
# A tree decides where its next step begins, so the recorded run did not begin its steps where another tree would have.
# Between requests this is corrected: each request produces its tokens with any tree, an easy one in fewer steps. With
# n_r the tokens that request r produced in steps with drafts, and 1 + a_r the mean that the tree commits in the
# recorded steps, it takes n_r / (1 + a_r) steps, and the acceptance length is
#
# sum n_r / sum of n_r / (1 + a_r).
#
# Within a request the recorded step beginnings stand in for the tree's own. (Measured on the default model: tests and
# BENCHMARKS.md.) The interval is from a bootstrap over requests, as in analyze/compare/bootstrap.py.


def lengths(evidence: RecordedCandidates, accepted: Sequence[Doubles]) -> list[Length]:
    """The acceptance lengths of several trees, from what each would have accepted in each step [S]."""
    found = _ratios(*_by_request(evidence, accepted))
    return [each if each.low is None else replace(each, low=max(each.low, 1.0)) for each in found]


def over(evidence: RecordedCandidates, accepted: Doubles, other: Doubles) -> Length:
    """One tree's acceptance length over another's, both of the same requests: their differences are not in it."""
    _, (mine, others) = _by_request(evidence, (accepted, other))
    return _ratios(others, [mine])[0]


def _by_request(evidence: RecordedCandidates, accepted: Sequence[Doubles]) -> tuple[Doubles, list[Doubles]]:
    """[R] the tokens of each request with drafts, and of each tree the steps that these take it."""
    size = evidence.requests
    count = np.bincount(evidence.request, minlength=size).astype(float)
    tokens, some = np.bincount(evidence.request, evidence.tokens, minlength=size).astype(float), count > 0
    means = (np.bincount(evidence.request, per_step, minlength=size)[some] / count[some] for per_step in accepted)
    return tokens[some], [tokens[some] / (1 + mean) for mean in means]


def _ratios(top: Doubles, bottoms: Sequence[Doubles]) -> list[Length]:
    """Sums over n requests [n], each over another, with the intervals of their logarithms: a ratio is never below 0."""
    values, n = [float(top.sum() / bottom.sum()) for bottom in bottoms], len(top)
    if n < FEWEST:
        return [Length(value) for value in values]
    drawn, scale = np.log(resampled(np.stack([top, *bottoms], axis=1), n)), math.sqrt(n / (n - 1))
    spread = np.std(drawn[:, :1] - drawn[:, 1:], axis=0, ddof=1) * scale * t_quantile((1 + LEVEL) / 2, n - 1)
    return [Length(v, v * math.exp(-e), v * math.exp(e)) for v, e in zip(values, spread.tolist(), strict=True)]


NAMED = {"recorded_length": "recorded_acceptance_length", "rows": "trees"}  # fields, in JSON
TOLD = 0.05  # a tree is not recommended where more than this share of its acceptance rests on assumptions


@dataclass(frozen=True)
class Tuning:
    sources: tuple[str, ...]
    run: Mapping[str, str]  # what ran: model, drafter, tree, rule
    steps: int  # with drafts
    judged: int  # steps that were judged
    requests: int
    recorded_length: float  # what the run really accepted
    rows: tuple[TreeRow, ...]  # named ones first
    costs: Costs | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    checked: Mapping[str, Any] = field(default_factory=dict)  # how --check measured

    def named(self, name: str) -> TreeRow | None:
        return next((row for row in self.rows if name in row.names), None)

    choice = cached_property[TreeRow | None](lambda tuning: tuning.named("choice"))  # what to take; None without costs

    def family(self, name: str) -> list[TreeRow]:
        return [row for row in self.rows if row.family == name]

    def to_dict(self) -> dict[str, Any]:
        told = {NAMED.get(name, name): value for name, value in fields(self, "sources", "warnings").items()}
        errors = {row.tree or "none": row.error for row in self.rows if row.error is not None}
        checked = {**self.checked, "errors": errors} if self.checked else {}
        return told | {"choice": plain(self.choice), "checked": checked}


def trees(
    evidence: RecordedCandidates, named: Mapping[str, TreePlan], space: Space, costs: Costs | None
) -> list[TreeRow]:
    """Every tree's row; with costs the fastest of them is the `choice`.

    `named`: trees that are judged in any case, under a name ("recorded", "default"), or under themselves where the user
    gave them. Where the capture cannot judge one, a named one is left out, and one that the user gave raises UserError.
    """
    judge = Judge(evidence)
    names: dict[str, tuple[str, ...]] = {}
    rows: list[TreeRow] = []
    for name, plan in named.items():
        tree = str(plan)
        try:
            rows += [asked(judge, plan, space)] if tree not in names else []
        except UserError:
            if name == tree:
                raise
            continue
        names[tree] = (*names.get(tree, ()), *((name,) if name != tree else ()))
    rows = [replace(row, names=names[row.tree]) for row in rows] + candidates(judge, space, costs)
    if not rows:
        raise UserError(
            "the capture shows too little to judge any tree, even the recorded one; record with --tree dynamic:32, or "
            "name a tree with --tree"
        )
    each = lengths(evidence, [row.accepted for row in rows])
    rows = [replace(row, length=_reached(row, length)) for row, length in zip(rows, each, strict=True)]
    if costs is None:
        return rows
    rows = [_priced(row, evidence, costs) for row in rows]
    plain = costs.plain
    speed = Length(costs.batch / plain.seconds, costs.batch / plain.high, costs.batch / plain.low)
    nothing = TreeRow(None, "plain", 0, np.zeros(len(evidence.request)), 0.0, 0.0, names=("plain",))
    rows.append(replace(nothing, speed=speed, step=plain.seconds))
    best = max((row for row in rows if row.untold <= TOLD), key=attrgetter("rate"))
    default = next((row for row in rows if "default" in row.names), best)
    choice = replace(best, names=(*best.names, "choice"))
    if default is not best:
        paired = over(evidence, best.accepted, default.accepted)
        choice = replace(choice, over_default=_with_error(best.rate / default.rate, paired, costs.error))
    return [choice if row is best else row for row in rows]


def _priced(row: TreeRow, evidence: RecordedCandidates, costs: Costs) -> TreeRow:
    """With what a step costs, and tokens per second while a full batch decodes.

    They are batch * length / seconds, but steps without drafts cost and yield as plain ones do. The interval combines
    the error of the acceptance length with that of the measured costs.
    """
    assert row.plan is not None
    seconds, undrafted = costs.seconds(row.plan, row.nodes), float(evidence.undrafted.sum())

    def speed(length: float) -> float:
        time = evidence.committed / length * seconds + undrafted * costs.plain.seconds
        return costs.batch * (evidence.committed + undrafted) / time

    value, low, high = (None if each is None else speed(each) for each in astuple(row.length))
    assert value is not None
    return replace(row, step=seconds, speed=_with_error(value, Length(value, low, high), costs.error))


def _reached(row: TreeRow, length: Length) -> Length:
    """A step gives one token more than the tree is deep, at most."""
    return length if length.high is None else replace(length, high=max(min(length.high, 1.0 + row.depth), length.value))


def _with_error(value: float, like: Length, error: float) -> Length:
    """With the relative interval of another figure, which this error widens: of logarithms, so that it is above 0."""
    if like.low is None or like.high is None:
        return Length(value)
    low, high = (math.hypot(math.log(end / like.value), error) for end in (like.low, like.high))
    return Length(value, value * math.exp(-low), value * math.exp(high))


def expected(row: TreeRow, evidence: RecordedCandidates, costs: Costs) -> float:
    """A row's tokens/s at other costs."""
    return costs.batch / costs.plain.seconds if row.plan is None else _priced(row, evidence, costs).rate


BUSY = 0.05  # relative error of measured step times beyond which a machine was not idle
AGAIN = "other programs may have used the machine; measure again when it is idle"


@dataclass(frozen=True)
class Recorded:
    sources: tuple[str, ...]
    histories: tuple[History, ...]
    run: RunInfo
    evidence: RecordedCandidates

    @property
    def acceptance(self) -> Acceptance:
        total = Acceptance()
        for history in self.histories:
            total.merge(history.acceptance)
        return total

    @property
    def greedy(self) -> bool:
        infos = [request.info for history in self.histories for request in history.requests.values()]
        return all(info is not None and info.params.greedy for info in infos)


def recorded(sources: Sequence[str], histories: Sequence[History]) -> Recorded:
    """The captures as one record. Raises UserError where they cannot be tuned, or are not of one engine."""
    runs = [history.run for history in histories]
    first = runs[0]
    for source, run in zip(sources, runs, strict=True):
        if run is None or first is None:
            raise UserError(f"{source} does not say what ran (its header is missing): it cannot be tuned")
        if not run.tells_tokens:
            raise UserError(f"{source} was {run.privacy.lack}: what other trees would have held is unknown")
        for name in ("target", "drafter", "draft_model", "dtype", "rule", "tree"):
            if getattr(run, name) != getattr(first, name):
                what = name.replace("_", " ")
                raise UserError(
                    f"{source} has another {what} than {sources[0]}: tune captures of one engine and tree together"
                )
    assert first is not None
    return Recorded(tuple(sources), tuple(histories), first, evidence(histories))


def tune(
    data: Recorded, named: Mapping[str, TreePlan], limit: int, costs: Costs | None, warnings: Sequence[str] = ()
) -> Tuning:
    """Judge all trees. `named`: trees that are judged in any case, besides the recorded one."""
    candidates, run = data.evidence, data.run
    plan = read_plan(run.tree)  # None where its string is not one of ours
    space = Space(
        max_nodes=limit,
        top=not data.greedy and not candidates.lookup,
        chains=run.rule == BLOCK or not run.is_ours,
        recorded=plan,
    )
    wanted: dict[str, TreePlan] = {} if plan is None else {"recorded": plan}
    rows = trees(candidates, wanted | dict(named), space, costs)
    busy = [] if costs is None or costs.error <= BUSY else [f"step costs are known only to ±{costs.error:.0%}: {AGAIN}"]
    return Tuning(
        sources=data.sources,
        run={
            "model": run.target,
            "drafter": run.drafter + (f" ({run.draft_model})" if run.draft_model else ""),
            "tree": run.tree,
            "rule": run.rule,
        },
        steps=candidates.drafts,
        judged=len(candidates.request),
        requests=candidates.requests,
        recorded_length=data.acceptance.tau or 1.0,
        rows=tuple(rows),
        costs=costs,
        notes=tuple(_notes(data, plan, costs)),
        warnings=(*warnings, *busy),
    )


def _notes(data: Recorded, plan: TreePlan | None, costs: Costs | None) -> list[str]:
    """What cannot be judged from the capture, and what to record instead."""
    candidates, lines = data.evidence, []
    if len(candidates.request) < candidates.drafts:
        lines.append(f"{plural(len(candidates.request), 'step')} of {candidates.drafts:,} were judged, spread evenly")
    if not data.run.is_ours:
        lines.append("another engine's capture: shorter chains are told; costs are measured on our own engine alone")
    elif isinstance(plan, StaticPlan) and not candidates.lookup:
        lines.append(
            "the recorded tree is static: dynamic ones are told as far as it reaches; record dynamic:32 for more"
        )
    if is_own(data.run.rule):
        lines.append(f"the rule is {data.run.rule}: other trees are judged as the standard rule accepts")
    if costs is None:
        why = "none were measured" if data.run.is_ours else "give --costs FILE to add them"
        lines.append(f"no costs ({why}): trees of a size are compared by acceptance alone")
    elif (most := costs.step[-1].rows) < costs.batch * (1 + candidates.largest):
        lines.append(f"steps of more than {most} rows were not measured: their costs continue the line")
    return lines
