"""Intermittent mistakes: each is at work in one step alone, where a request first differs or shortly before.

If such a mistake is tried in every step, it spoils those in which it was not at work, and so explains nothing. All
before the first step that differs is right, so the mistake in one step must give what was recorded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.rerun import head as heads
from specscope.analyze.diagnose.rerun import target as targets
from specscope.analyze.diagnose.rerun.match import Match, among, compare_rows, slack
from specscope.analyze.findings import CheckResult
from specscope.trace.history.wording import plural

REQUESTS = 8  # whose first step that differs is looked at
LONGEST = 60  # steps up to it
ENOUGH = 3  # parents
NEARLY = 0.98  # of the parents must come out as recorded
HALF = 0.5  # of those that differ must, where no other cause explains half as many
BACK = 3  # steps before it in which the mistake may have been at work
M = TypeVar("M", targets.TreeMistake, heads.HeadMistake)
Begin = list[Step]  # a request's steps up to the first that differs, which is the last of these
Asked = tuple[str, Cause | None, Match]


def onsets(case: Case, audit: Audit, names: Sequence[str]) -> list[Begin]:
    """Of some requests the steps up to the first at which one of these quantities differs."""
    first: dict[str, int] = {}
    for name in names:
        finding = audit.finding(name)
        if finding is None or finding.result is not CheckResult.FAILED:
            continue
        for item, differs in zip(finding.items, finding.differs, strict=True):
            if differs:
                first[item.request] = min(first.get(item.request, item.index), item.index)
    begins: dict[str, Begin] = {name: [] for name in first}
    for step in case.steps:
        if step.part.index <= first.get(step.request, -1):
            begins[step.request].append(step)
    whole = [steps for steps in begins.values() if 0 < len(steps) <= LONGEST and _is_unbroken(steps)]
    return sorted(whole, key=len)[:REQUESTS]


def _is_unbroken(steps: Begin) -> bool:
    return steps[0].last is None and not any(
        step.visit.preempted or step.part.position != step.after - 1 for step in steps
    )


def of_model(
    model: Causal, begins: Sequence[Begin], mistakes: Iterable[targets.TreeMistake], case: Case, *, drafter: bool
) -> list[Asked]:
    """A causal language model without a mistake first, then with each in the step itself or shortly before it."""
    from transformers import DynamicCache

    before: list[Any] = []
    for steps in begins:
        cache = DynamicCache()
        for _ in targets.decoded(model, steps[: -BACK - 1], targets.RIGHT, cache=cache):
            pass
        before.append(cache)

    def ask(mistake: targets.TreeMistake, begin: int, back: int) -> Match:
        steps, match, cache = begins[begin], Match(), copy.deepcopy(before[begin])
        last = len(steps) - 1
        for place in range(max(last - BACK, 0), last + 1):
            at_work = mistake if place == last - back else targets.RIGHT
            for step, logits in targets.decoded(model, [steps[place]], at_work, cache=cache):
                if place == last:
                    rows = among(logits, at_work.known)
                    compare_rows(match, step, rows, slack(case.dtype), drafter=drafter)
        return match

    return _each(begins, (targets.RIGHT, *mistakes), ask)


def of_head(
    again: heads.HeadRerun, begins: Sequence[Begin], case: Case, mistakes: Iterable[heads.HeadMistake]
) -> list[Asked]:
    """The same for an EAGLE head: the mistake is at work on the rows that were fed in that step."""

    def ask(mistake: heads.HeadMistake, begin: int, back: int) -> Match:
        steps = begins[begin]
        notes = steps[-1 - back].part.notes
        rows = frozenset() if notes is None else frozenset(notes.fed_position.tolist())
        return again.ask(steps, mistake, slack(case.dtype), rows=rows, only=steps[-1].part.index)

    return _each(begins, (heads.MISTAKES[0], *mistakes), ask)


def _each(begins: Sequence[Begin], mistakes: Sequence[M], ask: Callable[[M, int, int], Match]) -> list[Asked]:
    """Each mistake at work in the last step, or in the step shortly before it that explains the request best."""
    asked: list[Asked] = []
    for mistake in mistakes:
        summed = Match()
        for begin, steps in enumerate(begins):
            best = ask(mistake, begin, 0)
            for back in range(1, min(BACK, len(steps) - 1) + 1) if asked else ():
                if best.share > NEARLY:
                    break
                best = max(best, ask(mistake, begin, back), key=lambda match: (match.share, -match.mean))
            summed.add(best)
        asked.append((mistake.name, mistake.cause, summed))
        if not _is_off(asked[0][2]):
            break
    return asked


def _is_off(right: Match) -> bool:
    """Whether enough differs without any mistake: else there is nothing to explain."""
    return right.total >= ENOUGH and right.share <= 0.9


def suspects(asked: Sequence[Asked], what: str, begins: Sequence[Begin]) -> list[Suspect]:
    """The mistakes that give the first steps that differ: nearly all of them, or far more than any other mistake."""
    (_, _, right), *others = asked
    if not _is_off(right):
        return []
    where = f"at the first step that differs, of {plural(len(begins), 'request')}"
    best: dict[Cause, tuple[float, str, Match]] = {}
    for name, cause, match in others:
        gain = match.gain(right)
        if cause is not None and gain > best.get(cause, (0.0, "", match))[0]:
            best[cause] = gain, name, match
    ranked = sorted(best.items(), key=lambda item: -item[1][0])
    named = _scaled(right, f"{where}, {what}", begins)
    for place, (cause, (gain, name, match)) in enumerate(ranked):
        next_best = ranked[place + 1][1][0] if place + 1 < len(ranked) else 0.0
        if match.share < NEARLY and (place or gain < HALF or gain < 2 * next_best):
            continue
        line = f"{where}, {what} come out with {name}, in one step alone, at {match} parents, without it at {right}"
        named.append(Suspect.rerun_of(cause, line, begins[0][-1].reference(), match.counts(right)))
    return named


def _scaled(right: Match, where: str, begins: Sequence[Begin]) -> list[Suspect]:
    """One factor on all logits of these steps that gives what was recorded."""
    scaled = right.common_scale(ENOUGH)
    if scaled is None:
        return []
    (scale, alike), differ = scaled, right.total - right.same
    line = f"{where} come out with logits times {scale:.3g} at {alike:,} of {differ:,} parents that differ"
    return [Suspect.rerun_of(Cause.LOGITS_SCALED, line, begins[0][-1].reference(), (alike, differ))]
