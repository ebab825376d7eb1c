"""Which named mistake gives what was recorded: the models run again under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.options import Options
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import RERUN, Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.diagnose.rerun.match import Match, beginnings, compare_rows, slack
from specscope.analyze.diagnose.rerun.origin import origins
from specscope.analyze.diagnose.rerun.rules import rule_mistakes
from specscope.analyze.findings import Result
from specscope.trace.method import model_part
from specscope.trace.tree import ROOT, DraftTree

REQUESTS, STEPS = 6, 12  # that are run again: the first steps of some requests
SOME = 0.02  # of parents that differ as it should be: fewer are no mistake of every step
MOSTLY = 0.8  # of parents: with fewer that are right, one mistake under which all are is no chance
GAIN = 0.3  # of the parents that differ a mistake must explain so many
AS_DRAFTER: dict[Cause | None, Cause] = {
    Cause.POSITION_BY_INDEX: Cause.DRAFTER_ROTARY,
    Cause.KV_NOT_MOVED: Cause.DRAFTER_KV_NOT_MOVED,
}
M = TypeVar("M", targets.Mistake, heads.Mistake)
Asked = tuple[str, Cause | None, Match]  # a mistake, and how well it agrees


def target_mistakes(case: Case, options: Options, audit: Audit) -> list[Suspect]:
    """Masks, positions and KV of the target; the sampling parameters where its raw probabilities are right."""
    model = _model(options.target)
    found = origins(case, audit, model) or (rule_mistakes(case, audit, model) if _is_ruled(audit) else [])
    if found:
        return found
    parts = beginnings(case.steps, REQUESTS, STEPS)
    asked = _all(case, targets.RIGHT, targets.MISTAKES, lambda one: _decode(model, parts, one, case, drafter=False))
    return _suspects(asked, "the target's probabilities", parts)


def _is_ruled(audit: Audit) -> bool:
    """Whether p is wrong and what it is made of is right."""
    raw, p = audit.finding("target raw p"), audit.finding("target p")
    return raw is not None and raw.check.result is Result.PASSED and p is not None and p.check.failed > 0


def drafter_mistakes(case: Case, options: Options, audit: Audit) -> list[Suspect]:
    """What a drafter that is a model is fed."""
    run = case.history.run
    assert options.draft is not None
    parts = beginnings(case.steps, REQUESTS, STEPS)
    what = "the drafter's probabilities"
    if run is not None and model_part(run.drafter) == "eagle":
        again = heads.HeadRerun(options.draft, _model(options.target))
        right, *mistakes = heads.MISTAKES
        return _suspects(_all(case, right, mistakes, lambda one: _fed_head(again, parts, one, case)), what, parts)
    model = _model(options.draft)
    if found := origins(case, audit, model, drafter=True):
        return found
    first, *rest = (replace(one, keep=_fed(one.keep)) for one in (targets.RIGHT, *targets.MISTAKES))
    asked = _all(case, first, [*rest, *OF_ITS_KV], lambda one: _decode(model, parts, one, case, drafter=True))
    if len(asked) > 1:
        late = _decode(model, parts, first, case, drafter=True, late=True)
        asked.append(("each draft from the tokens without the last one", Cause.DRAFT_POSITION, late[2]))
    return _suspects([(name, AS_DRAFTER.get(cause, cause), found) for name, cause, found in asked], what, parts)


def _all(case: Case, right: M, mistakes: Iterable[M], ask: Callable[[M], Asked]) -> list[Asked]:
    """What is right first; the mistakes only where something differs, up to one that explains all of it."""
    asked = [ask(right)]
    rounded = _dtype(case) != "float32"  # then small differences do not show parent by parent
    if asked[0][2].share < 1 - SOME or rounded:
        for one in mistakes:
            asked.append(ask(one))
            if asked[0][2].share < MOSTLY and asked[-1][2].share > 1 - SOME:
                break
    return asked


def _fed_head(again: heads.HeadRerun, parts: Sequence[Sequence[Step]], mistake: heads.Mistake, case: Case) -> Asked:
    found = Match()
    for steps in parts:
        if steps:
            found = _sum(found, again.ask(steps, mistake, slack(_dtype(case))))
    return mistake.name, mistake.cause, found


def _fed(keep: targets.Keep) -> targets.Keep:
    """A drafter keeps what it ran: nodes that have children."""
    return lambda path, tree: [node for node in keep(path, tree) if node in tree.parent]


def _inner(tree: DraftTree) -> list[int]:
    """The nodes that a draft model ran, in the order of their slots."""
    return sorted({int(node) for node in tree.parent if node != ROOT})


def _first_run(path: Sequence[int], tree: DraftTree) -> list[int]:
    """As many as are accepted and were run, but the first ones."""
    inner = _inner(tree)
    return inner[: sum(node in inner for node in path)]


OF_ITS_KV = (
    targets.Mistake("the first nodes that it ran kept, not the path's", Cause.DRAFTER_KV_NOT_MOVED, keep=_first_run),
)


def _model(source: object) -> Causal:
    from specscope.analyze.audit.options import Source

    assert isinstance(source, Source)
    return Causal(source, "float32", "cpu")


def _dtype(case: Case) -> str:
    return "" if case.history.run is None else case.history.run.dtype


def _decode(
    model: Causal,
    parts: Sequence[Sequence[Step]],
    mistake: targets.Mistake,
    case: Case,
    *,
    drafter: bool,
    late: bool = False,
) -> Asked:
    found = Match()
    for steps in parts:
        for step, logits in targets.decoded(model, steps, mistake):
            compare_rows(found, step, logits, slack(_dtype(case)), drafter=drafter, late=late)
    return mistake.name, mistake.cause, found


def _sum(one: Match, other: Match) -> Match:
    return Match(
        one.same + other.same,
        one.total + other.total,
        one.permuted + other.permuted,
        one.off + other.off,
        one.scales + other.scales,
    )


def _scaled(right: Match, what: str, parts: Sequence[Sequence[Step]]) -> list[Suspect]:
    """One factor on all logits that gives what was recorded."""
    differ = right.total - right.same
    if len(right.scales) < max(5, 0.5 * differ):
        return []
    scale = float(np.median(right.scales))
    alike = sum(abs(one / scale - 1) < 0.1 for one in right.scales)
    if alike < 0.8 * len(right.scales):
        return []
    said = f"{what} come out with logits times {scale:.3g} at {alike:,} of {differ:,} parents that differ"
    example = next((steps[0].reference() for steps in parts if steps), None)
    return [Suspect(Cause.LOGITS_SCALED, RERUN + 0.1 * alike / differ, (said,), example=example)]


def _suspects(asked: Sequence[Asked], what: str, parts: Sequence[Sequence[Step]]) -> list[Suspect]:
    """The mistakes that explain most of what differs, and the shuffled vocabulary, where something does."""
    (_, _, right), *others = asked
    if not others or not right.total:
        return []
    found = _scaled(right, what, parts)
    example = next((steps[min(1, len(steps) - 1)].reference() for steps in parts if steps), None)
    best = max(one[2].gain(right) for one in others)
    by_cause: dict[Cause, Asked] = {}
    for one in others:
        cause, gain = one[1], one[2].gain(right)
        if cause is None or gain <= GAIN or gain < best - 0.1:
            continue
        if cause not in by_cause or gain > by_cause[cause][2].gain(right):
            by_cause[cause] = one
    for cause, (name, _, match) in by_cause.items():
        said = f"{what} come out with {name} at {match} parents, without it at {right}"
        found.append(Suspect(cause, RERUN * match.gain(right) + 0.1 * match.share, (said,), example=example))
    if right.permuted > 0.5 * (right.total - right.same):
        said = f"{what} are right, but at other tokens, at {right.permuted:,} of {right.total:,} parents"
        found.append(Suspect(Cause.VOCABULARY_MAP, RERUN, (said,), example=example))
    return found
