"""Which named mistake gives what was recorded: the models run again under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import RERUN, Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import seldom
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.diagnose.rerun.match import Match, among, beginnings, compare_rows, recorded, slack
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.diagnose.rerun.origin import origins
from specscope.analyze.diagnose.rerun.rows import of_head, of_model
from specscope.analyze.diagnose.rerun.rules import rule_mistakes
from specscope.analyze.findings import CheckResult
from specscope.trace.record.method import model_part
from specscope.trace.record.tree import ROOT, DraftTree

REQUESTS, STEPS = 6, 12  # that are run again: the first steps of some requests
SOME = 0.02  # of parents that differ as it should be: fewer are no mistake of every step
MOSTLY = 0.8  # of parents: with fewer that are right, one mistake under which all are is no chance
FEW = 2  # requests that every mistake is asked about
NEAR = 0.2  # of the best gain there: what comes so near is asked about all
GAIN = 0.3  # of the parents that differ a mistake must explain so many
AS_DRAFTER: dict[Cause | None, Cause] = {
    Cause.POSITION_BY_INDEX: Cause.DRAFTER_ROTARY,
    Cause.KV_NOT_MOVED: Cause.DRAFTER_KV_NOT_MOVED,
    Cause.KV_RECOMPUTED: Cause.DRAFTER_ROTARY,
}
TARGETS, DRAFTERS = "the target's probabilities", "the drafter's probabilities"
M = TypeVar("M", targets.TreeMistake, heads.HeadMistake)
Asked = tuple[str, Cause | None, Match]  # a mistake, and how well it agrees
Parts = Sequence[Sequence[Step]]  # the first steps of some requests


def target_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """Masks, positions and KV of the target; the sampling parameters where its raw probabilities are right."""
    rows = of_model(models.target)
    found = origins(case, audit, rows) or (rule_mistakes(case, audit, rows) if _is_ruled(audit) else [])
    if found:
        return found
    parts = beginnings(case.steps, REQUESTS, STEPS)
    model = models.target
    asked = _all(
        case, parts, targets.RIGHT, targets.MISTAKES, lambda one, of: _decode(model, of, one, case, drafter=False)
    )
    if suspects := _suspects(asked, TARGETS, parts):
        return suspects
    begins = seldom.onsets(case, audit, ("target raw p", "target top tokens"))
    return seldom.suspects(seldom.of_model(model, begins, targets.MISTAKES, case, drafter=False), TARGETS, begins)


def _is_ruled(audit: Audit) -> bool:
    """Whether p is wrong and what it is made of is right."""
    raw, p = audit.finding("target raw p"), audit.finding("target p")
    return raw is not None and raw.check.result is CheckResult.PASSED and p is not None and p.check.failed > 0


def _is_drawn(audit: Audit) -> bool:
    """Whether q is wrong and the drafter's raw probabilities are right."""
    raw, q = audit.finding("drafter top tokens"), audit.finding("draft p")
    return raw is not None and raw.check.result is CheckResult.PASSED and q is not None and q.check.failed > 0


def drafter_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """What a drafter that is a model is fed, and what becomes of its probabilities."""
    run = case.history.run
    parts = beginnings(case.steps, REQUESTS, STEPS)
    begins = seldom.onsets(case, audit, ("drafter top tokens", "draft p"))
    eagle = run is not None and model_part(run.drafter) == "eagle"
    rows = of_head(models.head, models.target) if eagle else of_model(models.draft)
    if _is_drawn(audit) and (found := rule_mistakes(case, audit, rows, drafter=True)):
        return found
    if eagle:
        again = heads.HeadRerun(models)
        right, *mistakes = heads.MISTAKES
        cuts = [
            [heads.HeadMistake(name, Cause.DRAFT_TOKENS_CUT, known=known) for name, known in _first_tokens(some)]
            for some in (case.drafting, [begin[-1] for begin in begins])
        ]
        mistakes += cuts[0]
        asked = _all(case, parts, right, mistakes, lambda one, of: _fed_head(again, of, one, case))
        if suspects := _suspects(asked, DRAFTERS, parts):
            return suspects
        return seldom.suspects(seldom.of_head(again, begins, case, [*mistakes, *cuts[1]]), DRAFTERS, begins)
    model = models.draft
    if found := origins(case, audit, rows, drafter=True):
        return found
    cut, cut_there = (
        [targets.TreeMistake(name, Cause.DRAFT_TOKENS_CUT, known=known) for name, known in _first_tokens(some)]
        for some in (case.drafting, [begin[-1] for begin in begins])
    )
    first, *rest = (replace(one, keep=_fed(one.keep)) for one in (targets.RIGHT, *targets.MISTAKES, *cut))
    asked = _all(case, parts, first, [*rest, *OF_ITS_KV], lambda one, of: _decode(model, of, one, case, drafter=True))
    if len(asked) > 1:
        late = _decode(model, parts, first, case, drafter=True, late=True)
        asked.append(("each draft from the tokens without the last one", Cause.DRAFT_POSITION, late[2]))
    if suspects := _suspects(_as_drafter(asked), DRAFTERS, parts):
        return suspects
    rare = seldom.of_model(model, begins, [*rest, *OF_ITS_KV, *cut_there], case, drafter=True)
    return seldom.suspects(_as_drafter(rare), DRAFTERS, begins)


def _as_drafter(asked: Sequence[Asked]) -> list[Asked]:
    """The same mistakes, with the causes that they have in a drafter."""
    return [(name, cause if cause is None else AS_DRAFTER.get(cause, cause), match) for name, cause, match in asked]


def _all(case: Case, parts: Parts, right: M, mistakes: Iterable[M], ask: Callable[[M, Parts], Asked]) -> list[Asked]:
    """What is right first; then the mistakes, where something differs, up to one that explains all of it.

    Most mistakes explain nothing. So each is asked about the requests that differ most, and about all of them only
    where it comes within reach of the best.
    """
    asked = [ask(right, parts)]
    rounded = case.dtype != "float32"  # then small differences do not show parent by parent
    if asked[0][2].share >= 1 - SOME and not rounded:
        return asked
    alone = [(part, ask(right, [part])[2]) for part in parts if part] if len(parts) > FEW else []
    worst = sorted(alone, key=lambda one: (one[1].share, -one[1].mean))[:FEW]
    few = [part for part, _ in worst] or list(parts)
    base = ask(right, few)[2]
    tried = [(one, ask(one, few)[2].gain(base)) for one in mistakes]
    reach = max((gain for _, gain in tried), default=0.0) - NEAR
    for one, gain in sorted(tried, key=lambda pair: -pair[1]):
        if gain < max(reach, GAIN / 2) and len(few) < len(parts):
            break
        asked.append(ask(one, parts))
        if asked[0][2].share < MOSTLY and asked[-1][2].share > 1 - SOME:
            break
    if len(asked) == 1 and tried:
        asked.append(ask(max(tried, key=lambda pair: pair[1])[0], parts))
    return asked


def _fed_head(again: heads.HeadRerun, parts: Parts, mistake: heads.HeadMistake, case: Case) -> Asked:
    found = Match()
    for steps in parts:
        if steps:
            found.add(again.ask(steps, mistake, slack(case.dtype)))
    return mistake.name, mistake.cause, found


def _first_tokens(steps: Iterable[Step]) -> list[tuple[str, int]]:
    """The first tokens of the vocabulary that hold all that these steps drafted and listed, as a mistake has it."""
    largest = 0
    for step in steps:
        largest = max(largest, int(step.tree.token.max(initial=0)))
        for _, tokens, probs in recorded(step, drafter=True):
            largest = max(largest, int(tokens[probs > 0].max(initial=0)))
    return [(f"a choice among the first {largest + 1:,} tokens only", largest + 1)]


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
    targets.TreeMistake(
        "the first nodes that it ran kept, not the path's", Cause.DRAFTER_KV_NOT_MOVED, keep=_first_run
    ),
)


def _decode(
    model: Causal,
    parts: Parts,
    mistake: targets.TreeMistake,
    case: Case,
    *,
    drafter: bool,
    late: bool = False,
) -> Asked:
    found = Match()
    for steps in parts:
        for step, logits in targets.decoded(model, steps, mistake):
            compare_rows(found, step, among(logits, mistake.known), slack(case.dtype), drafter=drafter, late=late)
    return mistake.name, mistake.cause, found


def _scaled(right: Match, what: str, parts: Parts) -> list[Suspect]:
    """One factor on all logits that gives what was recorded."""
    scaled = right.common_scale(5)
    if scaled is None:
        return []
    (scale, alike), differ = scaled, right.total - right.same
    said = f"{what} come out with logits times {scale:.3g} at {alike:,} of {differ:,} parents that differ"
    example = next((steps[0].reference() for steps in parts if steps), None)
    return [Suspect(Cause.LOGITS_SCALED, RERUN + 0.1 * alike / differ, (said,), example=example, rerun=True)]


def _suspects(asked: Sequence[Asked], what: str, parts: Parts) -> list[Suspect]:
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
        found.append(
            Suspect(cause, RERUN * match.gain(right) + 0.1 * match.share, (said,), example=example, rerun=True)
        )
    if right.permuted > 0.5 * (right.total - right.same):
        said = f"{what} are right, but at other tokens, at {right.permuted:,} of {right.total:,} parents"
        found.append(Suspect(Cause.VOCABULARY_MAP, RERUN, (said,), example=example, rerun=True))
    return found
