"""From captures to a Tuning: which run they are of, which trees it allows, and the notes on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specscope.analyze.tune.candidates import Space
from specscope.analyze.tune.evidence import RecordedCandidates, evidence
from specscope.analyze.tune.tuning import Tuning, trees
from specscope.errors import UserError
from specscope.plans.costs import Costs
from specscope.plans.plan import DynamicPlan, StaticPlan, TreePlan, read_plan
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import BLOCK

BUSY = 0.05  # relative error of measured step times beyond which a machine was not idle


@dataclass(frozen=True)
class Recorded:
    """Captures of one engine, read."""

    sources: tuple[str, ...]
    histories: tuple[History, ...]
    run: RunInfo
    evidence: RecordedCandidates

    @property
    def acceptance(self) -> Acceptance:
        """What the runs really accepted."""
        total = Acceptance()
        for history in self.histories:
            total.merge(history.acceptance)
        return total

    @property
    def greedy(self) -> bool:
        """Whether all requests were greedy."""
        infos = [request.info for history in self.histories for request in history.requests.values()]
        return all(info is not None and info.params.greedy for info in infos)

    def plan(self) -> TreePlan | None:
        """The tree that was recorded; None where its string is not one of ours."""
        return read_plan(self.run.tree)


def recorded(sources: Sequence[str], histories: Sequence[History]) -> Recorded:
    """The captures as one record. Raises UserError where they cannot be tuned, or are not of one engine."""
    runs = [history.run for history in histories]
    first = runs[0]
    for source, run in zip(sources, runs, strict=True):
        if run is None or first is None:
            raise UserError(f"{source} does not say what ran (its header is missing): it cannot be tuned")
        if not run.tells_tokens:
            raise UserError(f"{source} was {run.privacy.lack}: what other trees would have held is not known")
        for name in ("target", "drafter", "draft_model", "dtype", "rule"):
            if getattr(run, name) != getattr(first, name):
                what = name.replace("_", " ")
                raise UserError(f"{source} has another {what} than {sources[0]}: tune captures of one engine together")
    assert first is not None
    return Recorded(tuple(sources), tuple(histories), first, evidence(histories))


def tune(
    data: Recorded, named: Mapping[str, TreePlan], limit: int, costs: Costs | None, warnings: Sequence[str] = ()
) -> Tuning:
    """Judge all trees. `named`: trees that are judged in any case, besides the recorded one."""
    candidates, run = data.evidence, data.run
    plan = data.plan()
    if candidates.whole and plan is None:
        raise UserError("only the recorded tree could be told of, and its string cannot be read")
    if candidates.whole and isinstance(plan, DynamicPlan):
        raise UserError(
            "the run's sampled requests had as many draws a step as were expected to pay: tune cannot tell what other "
            "trees would have held. Record with --tree dynamic:32"
        )
    space = Space(
        max_nodes=limit,
        top=not data.greedy and not candidates.lookup,
        chains=run.rule == BLOCK or not run.is_ours,
        recorded=plan,
    )
    wanted: dict[str, TreePlan] = {} if plan is None else {"recorded": plan}
    rows, choice = trees(candidates, wanted | dict(named), space, costs)
    total = data.acceptance
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
        recorded_length=total.tau or 1.0,
        rows=tuple(rows),
        choice=choice,
        costs=costs,
        notes=tuple(_notes(data, plan, costs)),
        warnings=(*warnings, *_unsure(costs)),
    )


def _unsure(costs: Costs | None) -> list[str]:
    """A warning on step times that a busy machine made uncertain."""
    if costs is None or costs.error <= BUSY:
        return []
    return [
        f"what a step costs is known to ±{costs.error:.0%} only: other programs may have used the machine; measure "
        "again when it is idle"
    ]


def _notes(data: Recorded, plan: TreePlan | None, costs: Costs | None) -> list[str]:
    """What cannot be judged from the capture, and what to record instead."""
    candidates, lines = data.evidence, []
    if candidates.judged_steps < candidates.drafts:
        lines.append(f"{plural(candidates.judged_steps, 'step')} of {candidates.drafts:,} were judged, spread evenly")
    if candidates.whole:
        lines.append(
            "the drafts were sampled: only the recorded tree can be told; record with --tree top:... or dynamic:32 to "
            "judge others"
        )
    elif not data.run.is_ours:
        lines.append("another engine's capture: shorter chains are told; costs are measured on our own engine alone")
    elif isinstance(plan, StaticPlan) and not candidates.lookup:
        lines.append(
            "the recorded tree is static: dynamic ones are told as far as it reaches; record dynamic:32 for more"
        )
    if costs is None:
        why = "--no-costs was given" if data.run.is_ours and not candidates.whole else "give --costs FILE to add them"
        lines.append(f"no costs ({why}): trees of a size are compared by acceptance alone")
    elif costs.most_rows < costs.batch * (1 + max(candidates.in_tree.sum(1))):
        lines.append(f"steps of more than {costs.most_rows} rows were not measured: their costs continue the line")
    return lines
