"""Which named mistake gives what was recorded: a model run again under each of them, up to where a request differs.

What a mistake writes into masks, KV or features stays there. So each is judged by the first step of a request that
differs: all before it is right. The mistake was at work all along, or in one step alone, that one or shortly before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Models, recorded
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.diagnose.rerun.match import Match
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.locate.model.other_rows import OF_REQUESTS
from specscope.analyze.locate.model.rules import OF_OTHERS, SampledFault, search_sampling
from specscope.analyze.locate.model.sampling import ROWS, TEMPERATURE
from specscope.analyze.locate.model.verdicts import located_verdicts
from specscope.analyze.verify.case import Case, Step
from specscope.plans.heads import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part

REQUESTS, LONGEST = 8, 60  # whose first step that differs is looked at; steps up to it
ALONG = 12  # steps, up to which a mistake that was at work all along is tried
BACK = 3  # steps before it in which the mistake may have been at work
FEW = 2  # requests that every mistake is asked about
NEAR = 0.2  # below the best gain there: a mistake that comes so near is asked about all requests
ENOUGH, SOME = 3, 0.02  # parents that differ, and of all: fewer are no sign of a mistake
NEARLY = 0.98  # of the parents must come out as recorded
HALF = 0.5  # of those that differ must, where no other cause explains half as many
TARGETS, DRAFTERS = "the target's probabilities", "the drafter's probabilities"
Begin = Sequence[Step]  # a request's steps up to the first that differs, which is the last of these
M = TypeVar("M", targets.TreeMistake, heads.HeadMistake)


class Again(Protocol[M]):
    """A model that can be run again under a mistake."""

    right: M  # no mistake

    def ask(self, steps: Begin, mistake: M, back: int | None) -> Match:
        """The last of some first steps, the mistake at work so many steps before it; None: in all of them."""
        ...

    def step_by_step(self, steps: Begin) -> Iterator[Match]:
        """Each of these steps without a mistake."""
        ...


def target_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """Masks, positions and KV of the target where its raw p differs; else another row, or the sampling parameters."""
    if models.target.runs_on:  # these mistakes are attention's
        return []
    raw = ("target raw p", "target top tokens")
    again = targets.ModelAgain(models.target, case)
    begins = _begins(case, audit, raw, again)
    found = _explained(again, begins, targets.MISTAKES, TARGETS, case)
    return found or _sampled(case, models, audit, (*raw, "target p"))


def drafter_mistakes(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """What a drafter that is a model is fed, and what becomes of its probabilities."""
    run = case.history.run
    is_head = run is not None and runs_head(model_part(run.drafter))
    if not is_head and models.draft.runs_on:
        return []
    names = ("drafter top tokens", "draft p", "drafter tokens")
    raw_differs = bool(_failed(audit, names[:1]))
    if not raw_differs and (suspects := _sampled(case, models, audit, names, drafter=True)):
        return suspects
    if is_head:
        head = heads.HeadAgain(models, case)
        begins = _begins(case, audit, names, head)
        return _explained(head, begins, [*heads.MISTAKES, *_cut(head.right, case, begins)], DRAFTERS, case)
    again = targets.ModelAgain(models.draft, case, drafter=True)
    begins = _begins(case, audit, names, again)
    mistakes = [*targets.of_drafter(case), *_cut(again.right, case, begins)]
    found = _explained(again, begins, mistakes, DRAFTERS, case)
    return _sampled(case, models, audit, names, drafter=True) if raw_differs and not found else found


def _cut(right: M, case: Case, begins: Sequence[Begin]) -> Iterator[M]:
    """A choice among the first tokens alone, that hold all that was drafted: in the run, or where requests differ."""
    for steps in (case.drafting, [begin[-1] for begin in begins]):
        largest = 0
        for step in steps:
            largest = max(largest, int(step.tree.token.max(initial=0)))
            for _, tokens, probs in recorded(step, drafter=True):
                largest = max(largest, int((tokens if probs is None else tokens[probs > 0]).max(initial=0)))
        name = f"a choice among the first {largest + 1:,} tokens only"
        yield replace(right, name=name, cause=Cause.DRAFT_VOCABULARY, known=largest + 1)


def other_decisions(case: Case, models: Models, audit: Audit) -> list[Suspect]:
    """Another row's p, or p at another temperature, that gives the outcomes of drafts decided against their own."""
    return [
        Suspect.rerun_of(Cause.P_NOT_USED, at.sentence, at.where, (at.explained, at.differing))
        for at in located_verdicts(case, audit, models)
        if at.operation.name == "p" and at.unit == "draft"
    ]


def _failed(audit: Audit, names: Sequence[str]) -> list[Finding]:
    """The findings of these names that failed."""
    findings = [audit.finding(name) for name in names]
    return [finding for finding in findings if finding is not None and finding.result is CheckResult.FAILED]


def _sampled(case: Case, models: Models, audit: Audit, names: Sequence[str], *, drafter: bool = False) -> list[Suspect]:
    """The variant of the sampling rules, or the row of elsewhere, that gives the recorded p, or q."""
    sampled = search_sampling(case, audit, models, drafter=drafter) if _failed(audit, names) else None
    cause = None if sampled is None else _cause(sampled)
    if sampled is None or cause is None:
        return []
    at = sampled.located
    return [Suspect.rerun_of(cause, at.sentence, at.where, (at.explained, at.differing))]


def _cause(sampled: SampledFault) -> Cause | None:
    """The familiar name of what was found; of raw probabilities only whose row they are is said."""
    is_q = sampled.what.endswith("q")
    other = Cause.Q_OTHER_ROW if is_q else Cause.P_OTHER_ROW
    if sampled.whose:
        return other if is_q or sampled.whose != OF_OTHERS else Cause.ROWS_SWAPPED
    if any(change.operation == ROWS for change in sampled.changes):
        of_requests = {f"the row of {relation.name}" for relation in OF_REQUESTS}
        return Cause.ROWS_SWAPPED if not is_q and sampled.changes[0].name in of_requests else other
    if sampled.what.startswith("raw"):
        return None
    if is_q and any(change.operation == TEMPERATURE for change in sampled.changes):
        return Cause.Q_TEMPERATURE
    return Cause.RULES_WRONG


def _begins(case: Case, audit: Audit, names: Sequence[str], again: Again[M]) -> list[Begin]:
    """Of some requests the steps up to the first that differs from the model without a mistake.

    The audit looks at a sample of steps: the first of these that differs need not be the first.
    """
    first: dict[str, int] = {}
    for finding in _failed(audit, names):
        for item, differs in zip(finding.items, finding.differs, strict=True):
            if differs:
                first[item.request] = min(first.get(item.request, item.index), item.index)
    begins: dict[str, list[Step]] = {name: [] for name in first}
    for step in case.steps:
        if step.part.index <= first.get(step.request, -1):
            begins[step.request].append(step)
    whole = [steps for steps in begins.values() if 0 < len(steps) <= LONGEST and _is_unbroken(steps)]
    cut: list[Begin] = []
    for steps in sorted(whole, key=len)[:REQUESTS]:
        agree = (match.differ for match in again.step_by_step(steps))
        place = next((place for place, differ in enumerate(agree) if differ), len(steps) - 1)
        cut.append(steps[: place + 1])
    return cut


def _is_unbroken(steps: Begin) -> bool:
    return steps[0].last is None and not any(
        step.visit.preempted or step.part.position != step.after - 1 for step in steps
    )


def _explained(again: Again[M], begins: Sequence[Begin], mistakes: Sequence[M], what: str, case: Case) -> list[Suspect]:
    """The mistakes that give the first steps that differ: nearly all of them, or far more than any other mistake.

    Most mistakes explain nothing. So each is asked about the few requests that differ most, and about all requests only
    where it comes near the best.
    """
    base = {n: again.ask(steps, again.right, None) for n, steps in enumerate(begins)}
    right = sum(base.values(), Match())
    if right.total < ENOUGH or (right.share > 1 - SOME and case.dtype == "float32"):
        return []
    few = sorted(base, key=lambda n: base[n].share)[:FEW]
    tried = [(mistake, {n: _best(again, begins[n], mistake) for n in few}) for mistake in mistakes]

    def gain(found: dict[int, Match]) -> float:
        return sum(found.values(), Match()).gain(sum((base[n] for n in found), Match()))

    reach = max(gain(found) for _, found in tried) - NEAR
    best: dict[Cause, tuple[float, str, Match]] = {}
    for mistake, found in tried:
        if gain(found) < max(reach, HALF / 2):
            continue
        whole = found | {n: _best(again, begins[n], mistake) for n in base if n not in found}
        share, (most, name, match) = gain(whole), best.get(mistake.cause, (0.0, "", Match()))
        if share > most:
            best[mistake.cause] = share, mistake.name, sum(whole.values(), Match())
        elif name and share == most:  # no step tells the two apart
            best[mistake.cause] = most, f"{name} or {mistake.name}", match
    where = f", where {plural(len(begins), 'request')} first differ" + "s" * (len(begins) == 1)
    first = min((steps[-1].visit for steps in begins), key=lambda visit: (visit.record.step, visit.row))
    example = first.reference()
    suspects = [
        Suspect.rerun_of(cause, f"{what} {line}{where}", example, (count, right.differ))
        for cause, line, count in _of_all_rows(right)
    ]
    ranked = sorted(best.items(), key=lambda item: -item[1][0])
    for place, (cause, (share, name, match)) in enumerate(ranked):
        next_best = ranked[place + 1][1][0] if place + 1 < len(ranked) else 0.0
        if match.share >= NEARLY or (not place and share >= max(HALF, 2 * next_best)):
            line = f"{what} come out with {name} at {match} parents, without it at {right}{where}"
            count = min(max(round(share * right.differ), 0), right.differ)
            suspects.append(Suspect.rerun_of(cause, line, example, (count, right.differ)))
    return suspects


def _best(again: Again[M], steps: Begin, mistake: M) -> Match:
    """A mistake at work all along, or in one of the last steps: where it explains the request best."""
    backs: list[int | None] = [None] if len(steps) <= ALONG else []
    found: list[Match] = []
    for back in (*backs, *range(min(BACK, len(steps) - 1) + 1)):
        found.append(again.ask(steps, mistake, back))
        if found[-1].share > NEARLY:
            break
    return max(found, key=lambda match: (match.share, -match.mean))


def _of_all_rows(right: Match) -> Iterator[tuple[Cause, str, int]]:
    """What mends all rows alike: one factor on their logits, or other tokens; and at how many parents."""
    if (scaled := right.common_scale(ENOUGH)) is not None:
        scale, alike = scaled
        yield (
            Cause.LOGITS_SCALED,
            f"come out with logits times {scale:.3g} at {alike:,} of {right.differ:,} parents that differ",
            alike,
        )
    if right.permuted > HALF * right.differ:
        line = f"are right, but at other tokens, at {right.permuted:,} of {right.total:,} parents"
        yield Cause.DRAFT_VOCABULARY, line, right.permuted
