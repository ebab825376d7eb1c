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
from specscope.analyze.locate.located import Located, Proof, Stage
from specscope.analyze.locate.model.other_rows import STEPS, Places, some
from specscope.analyze.locate.model.sampling import BONUS, NODE, RECOVERED, RIGHT, ROWS, TARGET, RuleChange, RuledRows
from specscope.analyze.locate.model.search import TELLING, BestVariant, Item, Search, item_at
from specscope.analyze.locate.operations import our_operation
from specscope.analyze.verify.case import Case, Step
from specscope.trace.history.wording import plural
from specscope.trace.record.params import UNREAD, untold_limits
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import Drawn

LEAST = 3  # tokens that tell whose row it is
KIND_NAMES = {NODE: "drafted", BONUS: "bonus", RECOVERED: "recovered", TARGET: "the target's"}
KINDS = {FinalKind.BONUS: BONUS, FinalKind.RECOVERED: RECOVERED, FinalKind.TARGET: TARGET}
GROUPS = OF_OTHERS, OF_NODES, OF_BEFORE = (
    "another request of the same step",
    "another node of the same tree",
    "the request's step before",
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
    """What was found about p, or q: a variant of the rules, or rows of elsewhere."""

    what: str  # "p", "q"; "raw p", "raw q": before any rule
    located: Located
    changes: tuple[RuleChange, ...] = ()  # of the variant
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
    asked = _asked(case, audit, models, what)
    if not asked:
        return None
    rows = RuledRows(Places(asked), what, _forms(case, models, asked))
    items = [*_items(audit, rows)]
    known = {finding.name for finding in audit.findings if finding.result is CheckResult.PASSED}
    return search_rows(case, rows, items, logits_right=what != raw and bool(known & {*RULED[raw]}))


def search_rows(
    case: Case, rows: RuledRows, items: Sequence[Item], *, logits_right: bool, side: str = "recorded"
) -> SampledFault | None:
    """The change of the rules that gives these items of some rows, or the other rows that they are of.

    `side`: where the figures that differ stand.
    """
    search = Search(rows, items, logits_right=logits_right, first=_first_tokens(items))
    answer = search.answer()
    if answer is None or not answer.certain:
        share, elsewhere = _elsewhere(case, search, side)
        if elsewhere is not None and (answer is None or share > answer.best.gain / answer.wrong):
            return elsewhere
    if answer is None:
        return None
    changes = tuple(change for change, _ in answer.best.variant.changes)
    return SampledFault(rows.what, _located(case, rows.what, answer, side), changes)


def _odd_finals(case: Case) -> list[tuple[str, int]]:
    """Steps whose final token was drawn from another p than the one that is noted, or with a probability of 0."""
    return [
        step.key
        for step in case.steps
        if (step.verdict.tells_p and step.verdict.final_p <= 0)
        or (
            step.verdict.kind is not FinalKind.RECOVERED
            and step.part.parents is not None
            and _apart(step.verdict.final_p, step.part.parents.final_target_p)
        )
    ]


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > 1e-6 + 1e-4 * max(one, other)


def _asked(case: Case, audit: Audit, models: Models, what: str) -> list[Asked]:
    """The rows of steps that differ, of those around them, and of some others."""
    keys = differing(audit, RULED[what], STEPS)
    if what == "p":
        keys += [key for key in some(_odd_finals(case)) if key not in keys]
    wrong = set(keys)
    right = [step for step in case.steps if step.key not in wrong]
    steps = [*around(case, keys), *some(right)]
    asked = rows_of(case, models, what, list({step.key: step for step in steps}.values()))
    return [one for one in asked if one.logits and _is_computable(one, what)]


def _is_computable(asked: Asked, what: str) -> bool:
    """Whether the capture tells everything that shapes its probabilities."""
    contexts = asked.contexts
    if what.startswith("raw"):
        return not (contexts.shaped is not None and contexts.shaped.raw_is_masked and contexts.limits)
    if what == "q":
        return UNREAD not in contexts.limits and not untold_limits(contexts.drafter_params)
    return not contexts.limits


def _forms(case: Case, models: Models, asked: Sequence[Asked]) -> RequestForms | None:
    run = case.history.run
    if run is None or not any(one.contexts.params.limited for one in asked):
        return None
    return RequestForms(models.options.target, len(next(iter(asked[0].logits.values()))), run.eos_tokens)


def _items(audit: Audit, rows: RuledRows) -> Iterator[Item]:
    """What was recorded of the tokens after these places."""
    what = rows.what
    wrong = {
        (item.request, item.index, item.node)
        for name in RULED[what]
        if (finding := audit.finding(name)) is not None
        for item, differs in zip(finding.items, finding.differs, strict=True)
        if differs
    }
    for number, place in enumerate(rows.places.every):
        asked, node = place.asked, place.node
        item = item_at(rows, number, audit, asked.step.reference())
        if what.startswith("raw"):
            yield from _likeliest(asked, item, wrong, drafter=what == "raw q")
            continue
        for child in asked.step.tree.children(node):
            recorded = _recorded(asked.step, child, what)
            if recorded is not None:
                token, is_wrong = int(asked.step.tree.token[child]), (*asked.step.key, child) in wrong
                where = asked.step.reference(child)
                yield replace(item, token=token, recorded=recorded, where=where, wrong=is_wrong, child=child)
        if what == "p" and node == asked.judged.leaf:
            yield from _finals(asked, item, wrong)


def _likeliest(asked: Asked, item: Item, wrong: set[tuple[str, int, int | None]], *, drafter: bool) -> Iterator[Item]:
    """The raw p, or q, of the likeliest tokens at a node that was tried."""
    children = asked.step.tree.children(item.node)
    is_wrong = any((*asked.step.key, child) in wrong for child in children)
    for node, tokens, probs in recorded_tops(asked.step, drafter=drafter):
        if node == item.node and children and probs is not None:
            where = asked.step.reference(children[0])
            for token, value in zip(tokens.tolist(), probs.tolist(), strict=True):
                yield replace(item, token=token, recorded=value, where=where, wrong=is_wrong, child=children[0])


def _recorded(step: Step, child: int, what: str) -> float | None:
    """What the capture says of a drafted token."""
    if what == "p":
        return float(step.verdict.p[child])
    if step.tree.drawn[child] != Drawn.DETERMINISTIC:
        return float(step.tree.q[child])
    of_model = step.part.notes is not None and not step.part.is_ranked_with_text
    return float(step.part.notes.prob[child]) if of_model and step.part.notes is not None else None


def _finals(asked: Asked, item: Item, wrong: set[tuple[str, int, int | None]]) -> Iterator[Item]:
    """The final token: as noted before any rejection, and where nothing was rejected as it was drawn."""
    verdict, notes = asked.step.verdict, asked.step.part.parents
    kind, is_wrong = KINDS[verdict.kind], (*asked.step.key, None) in wrong
    noted = None if notes is None else notes.final_target_p
    value = noted if kind == RECOVERED else verdict.final_p
    if noted is not None and value is not None and _apart(value, noted):  # one of them is right
        is_wrong = True
    if verdict.tells_p and value is not None:
        recorded = 1.0 if item.greedy else float(value)
        yield replace(item, token=verdict.token, recorded=recorded, kind=kind, wrong=is_wrong)
    if verdict.tells_p and verdict.final_p <= 0 and not item.greedy:
        yield replace(item, token=verdict.token, recorded=0.0, kind=kind, wrong=True, drawn=True)


def _first_tokens(items: Sequence[Item]) -> int:
    """How many of the vocabulary's first tokens hold every token that could come."""
    return max((item.token + 1 for item in items if item.recorded > 0), default=0)


def _elsewhere(case: Case, search: Search, side: str) -> tuple[float, SampledFault | None]:
    """Whether what differs is what some other row gives: of another request, another node, or the step before.

    With the share of those tokens that tell whose row they are of.
    """
    what, places = search.rows.what, search.rows.places
    bad = [i for i in np.flatnonzero(search.wrong & ~search.fits_right).tolist() if _is_telling(search.items[i])]
    if len(bad) < LEAST:
        return 0.0, None
    p, found = search.rows.distributions(RIGHT, range(len(places.every))), {name: list[int]() for name in GROUPS}
    for i in bad:
        for name, rows in _near(places, search.items[i]).items():
            same = [i] * len(rows)
            if rows and search.fits(search.values(p, rows, same), same).any():
                found[name].append(i)
    whose, same = max(found.items(), key=lambda pair: len(pair[1]))
    count, known, wrong = len(same), len(bad), int(search.wrong.sum())
    if count < LEAST or len({i for some in found.values() for i in some}) <= 0.5 * known:
        return 0.0, None
    item = search.items[same[0]]
    located = Located(
        our_operation(case.history.run, Stage.SAMPLING, ROWS, WORDS[ROWS]),
        f"{what} is not that of its own row at {plural(wrong, 'token')}; {known:,} of them tell whose it is; it is "
        f"that of {whose} at {count:,} of these",
        f"{what} of {whose}",
        f"token {item.token} at {item.where}: {what} {item.recorded:.6g} {side}",
        item.where,
        count,
        known,
        "token",
        count >= math.ceil(0.8 * known),
        proof=Proof.ROWS,
    )
    return count / known, SampledFault(what, located, whose=whose)


def _is_telling(item: Item) -> bool:
    """Whether a match with another row would be no chance: a middling probability; where greedy, the choice itself."""
    return item.recorded == 1 if item.greedy else 1e-4 < item.recorded < TELLING


def _near(places: Places, item: Item) -> dict[str, list[int]]:
    """The rows that it may be mistaken for, by what they are to it."""
    own = places.every[item.row]
    before, others = places.before(own), [(i, other) for i, other in enumerate(places.every) if i != item.row]
    step = [(i, other) for i, other in others if other.engine_step == own.engine_step]
    return {
        OF_OTHERS: [i for i, other in step if other.asked is not own.asked],
        OF_NODES: [i for i, other in step if other.asked is own.asked],
        OF_BEFORE: [i for i, other in others if before is not None and other.asked is before],
    }


# In words


def _located(case: Case, what: str, answer: BestVariant, side: str) -> Located:
    best, item, name = answer.best, answer.example, " and ".join(answer.best.variant.operations)
    sentence = (
        f"with {best.variant.name} {what} comes out as {side} at {best.explained:,} of "
        f"{plural(answer.wrong, 'token')} at which it differs"
    )
    if answer.hits:
        sentence += _where_at_work(case, answer)
    else:
        sentence += f", and stays right at {answer.others - best.spoiled:,} of {answer.others:,} others"
    sentence += f" ({plural(answer.tried, 'variant')} tried)"
    if not answer.certain and answer.alike:
        same = dict.fromkeys(score.variant.name for score in answer.alike if score.variant.name != best.variant.name)
        sentence += f"; no token tells it from {', '.join(list(same)[:3])}"
    runner_up = ""
    if (second := answer.runner_up) is not None:
        runner_up = f"{second.variant.name} leaves {answer.wrong - second.explained:,} of {answer.wrong:,}"
        runner_up += f" and spoils {second.spoiled:,} others" if second.spoiled else ""
    words = f"{'the target' if what.endswith('p') else 'the drafter'}: {WORDS.get(name, name)}"
    return Located(
        our_operation(case.history.run, Stage.SAMPLING, name, words),
        sentence,
        best.variant.name,
        _smallest(item, what, answer, side),
        item.where,
        best.explained,
        answer.wrong,
        "token",
        answer.certain,
        runner_up,
        best.spoiled,
        Proof.ROWS,
    )


def _where_at_work(case: Case, answer: BestVariant) -> str:
    """Which tokens come out as a variant has them, of those that can tell it from the right rules."""
    items = [*answer.hits, *answer.misses]
    hit = [True] * len(answer.hits) + [False] * len(answer.misses)
    facts: dict[str, list[Any]] = {
        "the token": [KIND_NAMES[item.kind] for item in items],
        "its row is the root": [i.node < 0 for i in items],
    }
    facts |= facts_table(case.history, [item.where for item in items])
    condition = find(facts, hit, [f"{item.where.request}@{item.where.index}" for item in items])
    if condition is not None:
        return f"; of the tokens that can tell it {condition.sentence('is so', 'token')}"
    like = rarest(facts, hit)
    rest = f"; {len(answer.misses):,} others could tell it and are right" if answer.misses else ""
    return f"{rest}{': those that differ have ' + like if like else ''}"


def _smallest(item: Item, what: str, answer: BestVariant, side: str) -> str:
    where = f"token {item.token} at {item.where}"
    if item.greedy:
        chosen = f"is {side} as the choice" if item.recorded else f"is {side} as not the choice"
        return (
            f"{where} {chosen}: its log p is {answer.right:+.3g} against the best other, under this {answer.under:+.3g}"
        )
    return f"{where}: {what} {item.recorded:.6g} {side}, {answer.right:.6g} right, {answer.under:.6g} under this"
