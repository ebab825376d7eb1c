"""The sampling rules of a run located: what was recorded of p and q against every variant of the rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rows import Asked, Models, around, differing, rows_of
from specscope.analyze.audit.model.rows import recorded as recorded_tops
from specscope.analyze.conditions import find, rarest
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.locate.model.other_rows import STEPS, Places, some
from specscope.analyze.locate.model.sampling import BONUS, NODE, RECOVERED, RIGHT, ROWS, TARGET, RuleChange, RuledRows
from specscope.analyze.locate.model.search import TELLING, BestVariant, Item, Search, item_at
from specscope.analyze.verify.case import Case, Step
from specscope.trace.history.wording import plural
from specscope.trace.record.params import UNREAD, untold_limits
from specscope.trace.record.records import FinalKind, ParentNotes
from specscope.trace.record.tree import Drawn

LEAST = 3  # tokens that tell whose row it is
KIND_NAMES = {NODE: "drafted", BONUS: "bonus", RECOVERED: "recovered", TARGET: "the target's"}
GROUPS = OF_OTHERS, OF_NODES, OF_BEFORE = (
    "another request of the same step",
    "another node of the same tree",
    "the request's previous step",
)
RULED = {
    "p": ("target p", "final p", "final token"),
    "q": ("draft p",),
    "raw p": ("target raw p", "target top tokens"),
    "raw q": ("drafter top tokens",),
}
WORDS = {"logits": "the logits", "softmax": "the softmax", "rows": "which row of probabilities is read"}


@dataclass(frozen=True)
class SampledFault:
    """What was found about p, or q: a change of the rules, or rows of elsewhere."""

    what: str  # "p", "q"; "raw p", "raw q": before any rule
    located: Located
    change: RuleChange | None = None
    whose: str = ""  # whose rows they are, of GROUPS


def search_sampling(case: Case, audit: Audit, models: Models, *, drafter: bool) -> SampledFault | None:
    """The rule that is applied wrongly, where p or q differs and the logits that they are made of are right.

    None where nothing differs, where the logits differ too and no change of these explains it, and where no variant
    explains most of what differs. Raises UserError where a model cannot be loaded.
    """
    what, raw = ("q", "raw q") if drafter else ("p", "raw p")
    failed = {finding.name for finding in audit.findings if finding.result is CheckResult.FAILED}
    if failed & {*RULED[raw]}:
        what = raw  # what follows differs too: only what makes the logits differ is asked about
    elif not failed & {*RULED[what]} and not (what == "p" and _odd_finals(case)):
        return None
    asked, run, forms = _asked(case, audit, models, what), case.history.run, None
    if not asked:
        return None
    if run is not None and any(one.contexts.params.limited for one in asked):
        forms = RequestForms(models.options.target, len(next(iter(asked[0].logits.values()))), run.eos_tokens)
    rows = RuledRows(Places(asked), what, forms)
    known = {finding.name for finding in audit.findings if finding.result is CheckResult.PASSED}
    return search_rows(case, rows, [*_items(audit, rows)], logits_right=what != raw and bool(known & {*RULED[raw]}))


def search_rows(
    case: Case, rows: RuledRows, items: Sequence[Item], *, logits_right: bool, side: str = "recorded"
) -> SampledFault | None:
    """The change of the rules that gives these items of some rows, or the other rows that they are of.

    `side`: where the figures that differ stand.
    """
    first = max((item.token + 1 for item in items if item.recorded > 0), default=0)
    search = Search(rows, items, logits_right=logits_right, first=first)
    answer = search.answer()
    if answer is None or not answer.certain:
        elsewhere = _elsewhere(search, side)
        if elsewhere is not None and (answer is None or elsewhere.located.share > answer.best.explained / answer.wrong):
            return elsewhere
    if answer is None:
        return None
    return SampledFault(rows.what, _located(case, rows.what, answer, side), answer.best.change)


def _odd_finals(case: Case) -> list[tuple[str, int]]:
    """Steps whose final token was drawn from another p than the one that is noted, or with a probability of 0."""
    return [
        step.key
        for step in case.steps
        if (step.verdict.tells_p and step.verdict.final_p <= 0)
        or (step.verdict.kind is not FinalKind.RECOVERED and _is_apart(step.verdict.final_p, step.part.parents))
    ]


def _is_apart(p: float, notes: ParentNotes | None) -> bool:
    """Whether a final token's p is not the one that is noted."""
    return notes is not None and abs(p - notes.final_target_p) > 1e-6 + 1e-4 * max(p, notes.final_target_p)


def _asked(case: Case, audit: Audit, models: Models, what: str) -> list[Asked]:
    """The rows of steps that differ, of those around them, and of some others."""
    keys = differing(audit, RULED[what], STEPS)
    if what == "p":
        keys += [key for key in some(_odd_finals(case)) if key not in keys]
    wrong = set(keys)
    right = some([step for step in case.steps if step.key not in wrong])
    steps = {step.key: step for step in (*around(case, keys), *right)}
    asked = rows_of(case, models, what, list(steps.values()))
    return [one for one in asked if one.logits and _is_computable(one, what)]


def _is_computable(asked: Asked, what: str) -> bool:
    """Whether the capture tells everything that shapes its probabilities."""
    contexts = asked.contexts
    if what.startswith("raw"):
        return not (contexts.raw_is_masked and contexts.limits)
    if what == "q":
        return UNREAD not in contexts.limits and not untold_limits(contexts.drafter_params)
    return not contexts.limits


def _items(audit: Audit, rows: RuledRows) -> Iterator[Item]:
    """What was recorded of the tokens after these places."""
    what, wrong = rows.what, set[tuple[str, int, int | None]]()
    for finding in filter(None, map(audit.finding, RULED[what])):
        both = zip(finding.items, finding.differs, strict=True)
        wrong |= {(item.request, item.index, item.node) for item, differs in both if differs}
    for number, place in enumerate(rows.places.every):
        step, item = place.asked.step, item_at(rows, number, audit, place.asked.step.reference())
        for child in step.tree.children(place.node):
            where, is_wrong = step.reference(child), (*step.key, child) in wrong
            here = replace(item, token=int(step.tree.token[child]), where=where, wrong=is_wrong, child=child)
            if not what.startswith("raw"):
                value = _recorded(step, child, what)
                yield from () if value is None else [replace(here, recorded=value)]
            elif child == step.tree.children(place.node)[0]:
                any_wrong = any((*step.key, other) in wrong for other in step.tree.children(place.node))
                for token, value in _likeliest(step, place.node, drafter=what == "raw q"):
                    yield replace(here, token=token, recorded=value, wrong=any_wrong)
        if what == "p" and place.node == place.asked.judged.leaf:
            yield from _finals(step, item, is_wrong=(*step.key, None) in wrong)


def _likeliest(step: Step, parent: int, *, drafter: bool) -> Iterator[tuple[int, float]]:
    """The likeliest tokens at a node that was tried, and their raw p, or q."""
    for node, tokens, probs in recorded_tops(step, drafter=drafter):
        if node == parent and probs is not None:
            yield from zip(tokens.tolist(), probs.tolist(), strict=True)


def _recorded(step: Step, child: int, what: str) -> float | None:
    """What the capture says of a drafted token."""
    if what == "p":
        return float(step.verdict.p[child])
    if step.tree.drawn[child] != Drawn.DETERMINISTIC:
        return float(step.tree.q[child])
    notes = None if step.part.is_ranked_with_text else step.part.notes
    return None if notes is None else float(notes.prob[child])


def _finals(step: Step, item: Item, *, is_wrong: bool) -> Iterator[Item]:
    """The final token: as noted before any rejection, and where nothing was rejected as it was drawn."""
    verdict, notes = step.verdict, step.part.parents
    noted = None if notes is None else notes.final_target_p
    value = noted if verdict.kind is FinalKind.RECOVERED else verdict.final_p
    if not verdict.tells_p or value is None:
        return
    is_wrong |= _is_apart(value, notes)  # one of them is right
    recorded = 1.0 if item.greedy else float(value)
    item = replace(item, token=verdict.token, recorded=recorded, kind=verdict.kind, wrong=is_wrong)
    yield item
    if verdict.final_p <= 0 and not item.greedy:
        yield replace(item, recorded=0.0, wrong=True, drawn=True)


def _elsewhere(search: Search, side: str) -> SampledFault | None:
    """What differs as what some other row gives: of another request, another node, or the step before.

    Only tokens that tell whose row they are of count.
    """
    what, places = search.rows.what, search.rows.places
    bad = [i for i in np.flatnonzero(search.wrong & ~search.fits_right).tolist() if _is_telling(search.items[i])]
    p, found = search.rows.distributions(RIGHT, range(len(places.every))), {name: list[int]() for name in GROUPS}
    for i in bad if len(bad) >= LEAST else ():
        for name, rows in _near(places, search.items[i]).items():
            same = [i] * len(rows)
            if rows and search.fits(search.values(p, rows, same), same).any():
                found[name].append(i)
    whose, same = max(found.items(), key=lambda pair: len(pair[1]))
    count, known, wrong = len(same), len(bad), int(search.wrong.sum())
    if count < LEAST or len({i for some in found.values() for i in some}) <= 0.5 * known:
        return None
    item = search.items[same[0]]
    sentence = (
        f"{what} is not its own row's at {plural(wrong, 'token')}; for {known:,} of them the source can be found; at "
        f"{count:,} of these it is {whose}'s"
    )
    smallest = f"token {item.token} at {item.where}: {what} {item.recorded:.6g} {side}"
    operation = Operation(Stage.SAMPLING, ROWS, WORDS[ROWS])
    counts = count, known, "token", count >= math.ceil(0.8 * known)
    located = Located(operation, sentence, f"{what} of {whose}", smallest, item.where, *counts, proof=Proof.ROWS)
    return SampledFault(what, located, whose=whose)


def _is_telling(item: Item) -> bool:
    """Whether a match with another row would be no chance: a middling probability; where greedy, the choice itself."""
    return item.recorded == 1 if item.greedy else 1e-4 < item.recorded < TELLING


def _near(places: Places, item: Item) -> dict[str, list[int]]:
    """The rows that it may be mistaken for, by what they are to it."""
    own = places.every[item.row]
    before, near = places.before(own), {name: list[int]() for name in GROUPS}
    for number, other in enumerate(places.every):
        if other.engine_step == own.engine_step and number != item.row:
            near[OF_NODES if other.asked is own.asked else OF_OTHERS].append(number)
        elif before is not None and other.asked is before:
            near[OF_BEFORE].append(number)
    return near


# In words


def _located(case: Case, what: str, answer: BestVariant, side: str) -> Located:
    best, item, change = answer.best, answer.example, answer.best.change
    where, told = _at_work(case, answer)
    looks = f"{change.name}, where {where}" if where else change.name
    sentence = (
        f"with {change.name} {what} is as {side} at {best.explained:,} of {plural(answer.wrong, 'token')} at which it "
        f"differs; {told} ({plural(answer.tried, 'variant')} tried)"
    )
    if not answer.certain and answer.alike:
        others = dict.fromkeys(other.change.name for other in answer.alike)
        sentence += f"; nothing separates it from {', '.join([*others][:3])}"
    if item.greedy:
        chosen = f"is {side} as {'' if item.recorded else 'not '}the choice"
        figures = f" {chosen}: its log p is {answer.right:+.3g} against the best other, under this {answer.under:+.3g}"
    else:
        figures = f": {what} {item.recorded:.6g} {side}, {answer.right:.6g} right, {answer.under:.6g} under this"
    words = f"{'the target' if what.endswith('p') else 'the drafter'}: {WORDS.get(change.operation, change.operation)}"
    operation = Operation(Stage.SAMPLING, change.operation, words)
    smallest = f"token {item.token} at {item.where}{figures}"
    counts = best.explained, answer.wrong, "token", answer.certain, answer.next_best
    return Located(operation, sentence, looks, smallest, item.where, *counts, proof=Proof.ROWS)


def _at_work(case: Case, answer: BestVariant) -> tuple[str, str]:
    """Which tokens come out as a variant has them, of those that can tell it from the right rules: a rule, a line."""
    if not answer.misses:
        return "", "no token contradicts it"
    items = [*answer.hits, *answer.misses]
    hit = [True] * len(answer.hits) + [False] * len(answer.misses)
    facts: dict[str, list[Any]] = {
        "the token": [KIND_NAMES[item.kind] for item in items],
        "its row is the root": [i.node < 0 for i in items],
    }
    facts |= facts_table(case.history, [item.where for item in items])
    condition = find(facts, hit, [f"{item.where.request}@{item.where.index}" for item in items])
    if condition is not None:
        return condition.text, f"of the tokens that can show it, it {condition.sentence('holds', 'token')}"
    like = rarest(facts, hit)
    alike = f": those that differ have {like}" if like else ""
    return "", f"{plural(len(answer.misses), 'other')} could show it and are right{alike}"
