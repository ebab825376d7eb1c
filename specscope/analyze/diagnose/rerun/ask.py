"""Which named mistake gives what was recorded: the models run again under each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import seldom
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.diagnose.rerun.match import Match, among, beginnings, compare_rows, recorded, slack
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.diagnose.rerun.origin import origins
from specscope.analyze.diagnose.rerun.rows import of_head, of_model
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.model.other_rows import OF_REQUESTS
from specscope.analyze.locate.model.rules import OF_OTHERS, SampledFault, search_sampling
from specscope.analyze.locate.model.sampling import ROWS, TEMPERATURE
from specscope.analyze.locate.model.verdicts import located_verdicts
from specscope.plans.heads import runs_head
from specscope.trace.record.notes import model_part
from specscope.trace.record.tree import ROOT, DraftTree

REQUESTS, STEPS = 6, 12  # that are run again: the first steps of some requests
SOME = 0.02  # of parents that differ without any mistake: fewer are no sign of a mistake in every step
MOSTLY = 0.8  # of parents: where fewer are right, a mistake under which all are right is no chance
FEW = 2  # requests that every mistake is asked about
NEAR = 0.2  # below the best gain there: a mistake that comes so near is asked about all requests
GAIN = 0.3  # of the parents that differ, how many a mistake must explain
AS_DRAFTER: dict[Cause | None, Cause] = {Cause.TARGET_KV: Cause.DRAFTER_KV}
TARGETS, DRAFTERS = "the target's probabilities", "the drafter's probabilities"
M = TypeVar("M", targets.TreeMistake, heads.HeadMistake)
Asked = tuple[str, Cause | None, Match]  # a mistake, and how well it agrees
Parts = Sequence[Sequence[Step]]  # the first steps of some requests


def target_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """Masks, positions and KV of the target; the sampling parameters where its raw probabilities are right."""
    if models.target.runs_on:  # these mistakes are attention's
        return []
    rows = of_model(models.target)
    if suspects := origins(case, audit, rows) or (_ruled(case, models, audit) if _is_ruled(audit) else []):
        return suspects
    parts = beginnings(case.steps, REQUESTS, STEPS)
    model = models.target

    def ask(mistake: targets.TreeMistake, some: Parts) -> Asked:
        return _decode(model, some, mistake, case, drafter=False)

    asked = _all(case, parts, targets.RIGHT, targets.MISTAKES, ask)
    if suspects := _suspects(asked, TARGETS, parts):
        return suspects
    begins = seldom.onsets(case, audit, ("target raw p", "target top tokens"))
    return seldom.suspects(seldom.of_model(model, begins, targets.MISTAKES, case, drafter=False), TARGETS, begins)


def _ruled(case: Case, models: Models, audit: Audit, *, drafter: bool = False) -> list[Suspect]:
    """The variant of the sampling rules that gives the recorded p, or q."""
    sampled = search_sampling(case, audit, models, drafter=drafter)
    if sampled is None:
        return []
    at = sampled.located
    return [Suspect.rerun_of(_cause(sampled), at.sentence, at.where, (at.explained, at.differing))]


def _cause(sampled: SampledFault) -> Cause:
    """The familiar name of what was found."""
    is_q = sampled.what.endswith("q")
    other = Cause.Q_OTHER_ROW if is_q else Cause.P_OTHER_ROW
    if sampled.whose:
        return other if is_q or sampled.whose != OF_OTHERS else Cause.ROWS_SWAPPED
    if any(change.operation == ROWS for change in sampled.changes):
        of_requests = {f"the row of {relation.name}" for relation in OF_REQUESTS}
        return Cause.ROWS_SWAPPED if not is_q and sampled.changes[0].name in of_requests else other
    if is_q and any(change.operation == TEMPERATURE for change in sampled.changes):
        return Cause.Q_TEMPERATURE
    return Cause.RULES_WRONG


def other_decisions(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """Another row's p, or p at another temperature, that gives the outcomes of drafts decided against their own."""
    return [
        Suspect.rerun_of(Cause.P_NOT_USED, at.sentence, at.where, (at.explained, at.differing))
        for at in located_verdicts(case, audit, models)
        if at.operation.name == "p" and at.unit == "draft"
    ]


def _is_ruled(audit: Audit) -> bool:
    """Whether p is wrong and what it is made of is right."""
    raw, p = audit.finding("target raw p"), audit.finding("target p")
    return raw is not None and raw.result is CheckResult.PASSED and p is not None and p.failed > 0


def _is_drawn(audit: Audit) -> bool:
    """Whether q is wrong, and the drafter's raw probabilities are right, or not recorded."""
    raw, q = audit.finding("drafter top tokens"), audit.finding("draft p")
    return (raw is None or raw.result is not CheckResult.FAILED) and q is not None and q.failed > 0


def drafter_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """What a drafter that is a model is fed, and what becomes of its probabilities."""
    run = case.history.run
    eagle = run is not None and runs_head(model_part(run.drafter))
    if not eagle and models.draft.runs_on:
        return []
    rows = of_head(models.head, models.target) if eagle else of_model(models.draft)
    if _is_drawn(audit) and (suspects := _ruled(case, models, audit, drafter=True)):
        return suspects
    if not eagle and (suspects := origins(case, audit, rows, drafter=True)):
        return suspects
    begins = seldom.onsets(case, audit, ("drafter top tokens", "draft p"))
    return _head_mistakes(case, models, begins) if eagle else _draft_model_mistakes(case, models, begins)


def _head_mistakes(case: Case, models: Models, begins: Sequence[seldom.Begin]) -> list[Suspect]:
    """An EAGLE head under each mistake: all through first, then in one step alone."""
    parts = beginnings(case.steps, REQUESTS, STEPS)
    again = heads.HeadRerun(models, case, STEPS)
    right, *mistakes = heads.MISTAKES
    cut, cut_there = (
        [heads.HeadMistake(name, Cause.DRAFT_VOCABULARY, known=known) for name, known in _first_tokens(some)]
        for some in (case.drafting, [begin[-1] for begin in begins])
    )
    mistakes += cut
    asked = _all(case, parts, right, mistakes, lambda mistake, some: _fed_head(again, some, mistake, case))
    if suspects := _suspects(asked, DRAFTERS, parts):
        return suspects
    return seldom.suspects(seldom.of_head(again, begins, case, [*mistakes, *cut_there]), DRAFTERS, begins)


def _draft_model_mistakes(case: Case, models: Models, begins: Sequence[seldom.Begin]) -> list[Suspect]:
    """A draft model under each mistake: all through first, then in one step alone."""
    parts = beginnings(case.steps, REQUESTS, STEPS)
    model = models.draft
    cut, cut_there = (
        [targets.TreeMistake(name, Cause.DRAFT_VOCABULARY, known=known) for name, known in _first_tokens(some)]
        for some in (case.drafting, [begin[-1] for begin in begins])
    )
    of_trees = (targets.RIGHT, *targets.MISTAKES, *cut)
    first, *mistakes = (replace(mistake, keep=_fed(mistake.keep)) for mistake in of_trees)
    mistakes += [*OF_ITS_KV, _behind_a_cached_prefix(case)]
    asked = _all(case, parts, first, mistakes, lambda mistake, some: _decode(model, some, mistake, case, drafter=True))
    if len(asked) > 1:
        late = _decode(model, parts, first, case, drafter=True, late=True)
        asked.append(("each draft from the tokens without the last one", Cause.DRAFT_POSITION, late[2]))
    if suspects := _suspects(_as_drafter(asked), DRAFTERS, parts):
        return suspects
    rare = seldom.of_model(model, begins, [*mistakes, *cut_there], case, drafter=True)
    return seldom.suspects(_as_drafter(rare), DRAFTERS, begins)


def _as_drafter(asked: Sequence[Asked]) -> list[Asked]:
    """The same mistakes, with the causes that they have in a drafter."""
    return [(name, cause if cause is None else AS_DRAFTER.get(cause, cause), match) for name, cause, match in asked]


def _all(case: Case, parts: Parts, right: M, mistakes: Iterable[M], ask: Callable[[M, Parts], Asked]) -> list[Asked]:
    """No mistake first; then, where something differs, the mistakes, up to one that explains all of it.

    Most mistakes explain nothing. So each is asked about the few requests that differ most, and about all requests only
    where it comes near the best.
    """
    asked = [ask(right, parts)]
    rounded = case.dtype != "float32"  # then small differences do not show parent by parent
    if asked[0][2].share >= 1 - SOME and not rounded:
        return asked
    alone = [(part, ask(right, [part])[2]) for part in parts if part] if len(parts) > FEW else []
    worst = sorted(alone, key=lambda pair: (pair[1].share, -pair[1].mean))[:FEW]
    few = [part for part, _ in worst] or list(parts)
    base = ask(right, few)[2]
    tried = [(mistake, ask(mistake, few)[2].gain(base)) for mistake in mistakes]
    reach = max((gain for _, gain in tried), default=0.0) - NEAR
    for mistake, gain in sorted(tried, key=lambda pair: -pair[1]):
        if gain < max(reach, GAIN / 2) and len(few) < len(parts):
            break
        asked.append(ask(mistake, parts))
        if asked[0][2].share < MOSTLY and asked[-1][2].share > 1 - SOME:
            break
    if len(asked) == 1 and tried:
        asked.append(ask(max(tried, key=lambda pair: pair[1])[0], parts))
    return asked


def _fed_head(again: heads.HeadRerun, parts: Parts, mistake: heads.HeadMistake, case: Case) -> Asked:
    match = Match()
    for steps in parts:
        if steps:
            match.add(again.ask(steps, mistake, slack(case.dtype)))
    return mistake.name, mistake.cause, match


def _first_tokens(steps: Iterable[Step]) -> list[tuple[str, int]]:
    """The mistake of choosing among the first tokens only: its name, and how few hold all that the steps drafted."""
    largest = 0
    for step in steps:
        largest = max(largest, int(step.tree.token.max(initial=0)))
        for _, tokens, probs in recorded(step, drafter=True):
            largest = max(largest, int((tokens if probs is None else tokens[probs > 0]).max(initial=0)))
    return [(f"a choice among the first {largest + 1:,} tokens only", largest + 1)]


def _fed(keep: targets.Keep) -> targets.Keep:
    """A drafter keeps what it ran: nodes that have children."""
    return lambda path, tree: [node for node in keep(path, tree) if node in tree.parent]


def _inner(tree: DraftTree) -> list[int]:
    """The nodes that a draft model ran, in the order of their slots."""
    return sorted({int(node) for node in tree.parent if node != ROOT})


def _first_run(path: Sequence[int], tree: DraftTree) -> list[int]:
    """As many nodes as were accepted and run, but the first ones that were run."""
    inner = _inner(tree)
    return inner[: sum(node in inner for node in path)]


OF_ITS_KV = (
    targets.TreeMistake("the first nodes that it ran kept, not the path's", Cause.DRAFTER_KV, keep=_first_run),
)


def _behind_a_cached_prefix(case: Case) -> targets.TreeMistake:
    """A drafter whose KV at t comes from the token at t + 1, as an EAGLE head's does, and that has KV from the cache.

    The last cached slot then holds the token that followed in the request which filled the cache, and the first token
    is in no slot.
    """
    texts = {step.request: step.text for step in case.steps}
    fed: dict[str, Sequence[int]] = {}
    for number, (name, text) in enumerate(texts.items()):
        cached = case.history.requests[name].steps[0].context_len
        earlier = (texts[other] for other in list(texts)[:number])
        alike = next((other for other in earlier if len(other) > cached and other[:cached] == text[:cached]), None)
        if cached and alike is not None:
            fed[name] = [*text[:cached], alike[cached], *text[cached + 1 :]]
    return targets.TreeMistake(
        "the token behind a cached prefix of the request that filled the cache, and without the first token",
        Cause.DRAFTER_KV,
        fed=lambda step: fed.get(step.request, step.text),
        unseen=1,
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
    match = Match()
    for steps in parts:
        for step, logits in targets.decoded(model, steps, mistake):
            compare_rows(match, step, among(logits, mistake.known), slack(case.dtype), drafter=drafter, late=late)
    return mistake.name, mistake.cause, match


def _scaled(right: Match, what: str, parts: Parts) -> list[Suspect]:
    """One factor on all logits that gives what was recorded."""
    scaled = right.common_scale(5)
    if scaled is None:
        return []
    (scale, alike), differ = scaled, right.total - right.same
    line = f"{what} come out with logits times {scale:.3g} at {alike:,} of {differ:,} parents that differ"
    example = next((steps[0].reference() for steps in parts if steps), None)
    return [Suspect.rerun_of(Cause.LOGITS_SCALED, line, example, (alike, differ))]


def _suspects(asked: Sequence[Asked], what: str, parts: Parts) -> list[Suspect]:
    """The mistakes that explain most of what differs, and the shuffled vocabulary, where something does."""
    (_, _, right), *others = asked
    if not others or not right.total:
        return []
    suspects = _scaled(right, what, parts)
    example = next((steps[min(1, len(steps) - 1)].reference() for steps in parts if steps), None)
    best = max(match.gain(right) for _, _, match in others)
    by_cause: dict[Cause, tuple[str, Match]] = {}
    for name, cause, match in others:
        gain = match.gain(right)
        if cause is None or gain <= GAIN or gain < best - 0.1:
            continue
        if cause not in by_cause or gain > by_cause[cause][1].gain(right):
            by_cause[cause] = name, match
    for cause, (name, match) in by_cause.items():
        line = f"{what} come out with {name} at {match} parents, without it at {right}"
        suspects.append(Suspect.rerun_of(cause, line, example, match.counts(right)))
    if right.permuted > 0.5 * (right.total - right.same):
        line = f"{what} are right, but at other tokens, at {right.permuted:,} of {right.total:,} parents"
        suspects.append(
            Suspect.rerun_of(Cause.DRAFT_VOCABULARY, line, example, (right.permuted, right.total - right.same))
        )
    return suspects
