"""The sampling rules of a run located: what was recorded of p and q against every variant of the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rows import Asked, Models, around, differing, rows_of
from specscope.analyze.audit.model.rows import recorded as recorded_tops
from specscope.analyze.audit.model.rules import RequestForms
from specscope.analyze.conditions import find, rarest
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult
from specscope.analyze.locate.decided import ACCEPTANCE
from specscope.analyze.locate.formulas import NEARLY, Best, located_formulas
from specscope.analyze.locate.located import Located, Operation, Proof, Stage
from specscope.analyze.locate.model.sampling import (
    BONUS,
    NODE,
    OTHERS,
    RECOVERED,
    RIGHT,
    ROWS,
    STEPS,
    TARGET,
    Places,
    RuleChange,
    RuledRows,
    changed,
    some,
    times,
)
from specscope.analyze.locate.model.search import TELLING, BestVariant, Item, Search, item_at
from specscope.analyze.verify.trial import Case, Step
from specscope.trace.history.wording import plural
from specscope.trace.record.params import UNREAD, untold_limits
from specscope.trace.record.records import FinalKind, Outcome, ParentNotes
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.tree import Bools, Doubles, Drawn

LEAST, CLEAR = 3, 3.0  # tokens that tell whose row it is; deviations above what chance gives
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
    """The rule that is applied wrongly, where p or q differs and the logits that they are made of are right; None where
    no variant explains most of what differs. Raises UserError where a model cannot be loaded.
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
    """The change of the rules that gives these items, or whose rows they are. `side`: where what differs stands."""
    first = max((item.token + 1 for item in items if item.recorded > 0), default=0)
    search = Search(rows, items, logits_right=logits_right, first=first)
    answer = search.answer()
    elsewhere = _elsewhere(search, side) if answer is None or not answer.certain else None
    if answer is None or (elsewhere is not None and elsewhere.located.share > answer.best.explained / answer.wrong):
        return elsewhere
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
    return notes is not None and abs(p - notes.final_target_p) > 1e-6 + 1e-4 * max(p, notes.final_target_p)


def _asked(case: Case, audit: Audit, models: Models, what: str) -> list[Asked]:
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
    what, wrong = rows.what, set[tuple[str, int, int | None]]()  # of which the audit says that they differ
    for finding in filter(None, map(audit.finding, RULED[what])):
        wrong |= {(item.request, item.index, item.node) for item in compress(finding.items, finding.differs)}
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
    item = replace(item, token=verdict.token, kind=verdict.kind)
    yield replace(item, recorded=1.0 if item.greedy else float(value), wrong=is_wrong)
    if verdict.final_p <= 0 and not item.greedy:
        yield replace(item, recorded=0.0, wrong=True, drawn=True)


def _elsewhere(search: Search, side: str) -> SampledFault | None:
    """What differs as some other row gives it; only tokens that tell whose row they are of count."""
    what, places = search.rows.what, search.rows.places
    bad = [i for i in np.flatnonzero(search.wrong & ~search.fits_right).tolist() if _is_telling(search.items[i])]
    p, found = search.rows.distributions(RIGHT, range(len(places.every))), {name: list[int]() for name in GROUPS}
    chances: dict[str, list[float]] = {name: [] for name in GROUPS}  # that one of the rows fits an item, by group
    for i in bad if len(bad) >= LEAST else ():
        for name, rows in _near(places, search.items[i]).items():
            same = [i] * len(rows)
            chances[name].append(1 - float(1 - search.chances[i]) ** len(rows))
            if rows and search.fits(search.values(p, rows, same), same).any():
                found[name].append(i)
    whose, same = max(found.items(), key=lambda pair: len(pair[1]))
    count, known, wrong = len(same), len(bad), int(search.wrong.sum())
    by_chance = sum(chances[whose]) + CLEAR * math.sqrt(sum(chance * (1 - chance) for chance in chances[whose]))
    if count < max(LEAST, by_chance) or len({i for some in found.values() for i in some}) <= 0.5 * known:
        return None
    item, tokens = search.items[same[0]], plural(wrong, "token")
    sentence = f"{what} is not its own row's at {tokens}; for {known:,} of them the source can be found; at "
    sentence += f"{count:,} of these it is {whose}'s"
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


def _located(case: Case, what: str, answer: BestVariant, side: str) -> Located:
    best, item, change = answer.best, answer.hits[0], answer.best.change
    where, told = _at_work(case, answer)
    looks = f"{change.name}, where {where}" if where else change.name
    tokens, tried = plural(answer.wrong, "token"), plural(answer.tried, "variant")
    sentence = f"with {change.name} {what} is as {side} at {best.explained:,} of {tokens} at which it differs; {told} "
    sentence += f"({tried} tried)"
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
    items, hit = [*answer.hits, *answer.misses], [True] * len(answer.hits) + [False] * len(answer.misses)
    facts = facts_table(case.history, [item.where for item in items])
    facts = {"its row is the root": [item.node < 0 for item in items], **facts}
    facts = {"the token": [KIND_NAMES[item.kind] for item in items], **facts}
    condition = find(facts, hit, [f"{item.where.request}@{item.where.index}" for item in items])
    if condition is not None:
        return condition.text, f"of the tokens that can show it, it {condition.sentence('holds', 'token')}"
    like = rarest(facts, hit)
    alike = f": those that differ have {like}" if like else ""
    return "", f"{plural(len(answer.misses), 'other')} could show it and are right{alike}"


ENOUGH = 4  # decisions that an explanation must explain
POWERS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.25, 1.5, 2.0, 3.0, 4.0)  # p at another temperature, or at it twice
BY_COIN = "the coin below p / q"
TESTS: dict[str, Callable[[Doubles, Doubles, Doubles], Bools]] = {  # of p, q and the coin
    BY_COIN: lambda p, q, coin: coin * q < p,
    "the coin below q / p": lambda p, q, coin: coin * p < q,
    "the coin not below p / q": lambda p, q, coin: coin * q >= p,
    "the coin at most q": lambda p, q, coin: coin <= q,
    "p / q above 1/2, ignoring the coin": lambda p, q, coin: p > 0.5 * q,
    "p above q, ignoring the coin": lambda p, q, coin: p > q,
    "the coin below the square of p / q": lambda p, q, coin: p * p > coin * q * q,
    "the coin below the square root of p / q": lambda p, q, coin: p > coin * coin * q,
    "every draft accepted": lambda p, q, coin: np.ones(len(p), np.bool_),
    "every draft rejected": lambda p, q, coin: np.zeros(len(p), np.bool_),
}


def located_verdicts(case: Case, audit: Audit, models: Models) -> list[Located]:
    """What the verdict takes in place of its own p, q, coin or comparison. Raises UserError."""
    c = case.evidence
    judged = np.array([not len(verdict.forced) for verdict in c.verdicts], np.bool_) & (c.rule == STANDARD)
    nodes = np.flatnonzero(c.tried & (judged & c.told)[c.step]) if len(c.token) else np.zeros(0, np.int64)
    margin = c.p_trial - c.coin * c.q_trial
    known = (c.coin != 0) | c.greedy[c.step]  # else the engine tells no coin
    against = known & (np.abs(margin) > 1e-6) & ((margin > 0) != c.accepted)  # by more than rounding
    if int(against[nodes].sum()) >= ENOUGH:
        wrong = list(dict.fromkeys(c.step[nodes[against[nodes]]].tolist()))
        right = sorted({*c.step[nodes].tolist()}.difference(wrong))
        for steps in ([*some(wrong), *some(right)], some(wrong)):  # at work in all steps, or in those alone
            here = nodes[np.isin(c.step[nodes], steps)]
            if (found := _outcomes(case, audit, models, here, against)) is not None:
                return [found]
    return [item for item in located_formulas(case) if item.looks]


def _outcomes(case: Case, audit: Audit, models: Models, here: Indices, against: Bools) -> Located | None:
    """Which p, q, coin or comparison gives the outcomes, at nodes `here`, of drafts decided against their own."""
    c, ways = case.evidence, _decisions(case, audit, models, here)
    decided = {name: (axis, accepted == c.accepted[here]) for axis, name, accepted in ways}
    likely = {name: fits for name, (_, fits) in decided.items() if fits.sum() > NEARLY * len(here)}
    best = Best.of(likely, against[here])
    if best is None or best.explained < max(ENOUGH, NEARLY * best.wrong):
        return None
    node = int(here[against[here]][0])
    where, outcome = c.at_node(node), Outcome(int(c.outcome[node])).name.lower()
    figures = f"p {c.p_trial[node]:.6g}, q {c.q_trial[node]:.6g}, coin {c.coin[node]:.6g}, {outcome}"
    operation = Operation(Stage.VERDICT, decided[best.name][0], "whether a draft is accepted")
    drafts, tried = plural(best.wrong, "draft"), plural(len(decided), "way")
    text = f"{best.explained:,} of {drafts} decided against their own p follow from {best.name}, as do "
    text += f"{best.fits:,} of all {len(here):,} that it could decide ({tried} tried)"
    smallest = f"token {c.token[node]} at {where}: {figures}"
    spoiled = len(here) - best.fits - best.wrong + best.explained
    counts = best.explained, best.wrong, "draft", True, best.next_best, spoiled, Proof.ROWS
    return Located(operation, text, best.name, smallest, where, *counts)


def _decisions(case: Case, audit: Audit, models: Models, here: Indices) -> Iterator[tuple[str, str, Bools]]:
    """What is accepted where one thing is not as it should be: which of p, q, coin and comparison, and its name."""
    c = case.evidence
    right = {"p": c.p_trial[here], "q": c.q_trial[here], "coin": c.coin[here]}
    of_capture = (  # which of p, q and coin, the name of what may stand in its place, and that of each node
        ("p", "its p before any sibling was rejected", c.p[here]),
        ("q", "a q of 1", np.ones(len(here))),
        ("q", "its q before any sibling was rejected", c.q[here]),
        ("coin", "the coin of the final token", c.final_coin[c.step[here]]),
    )
    for axis, name, values in (*of_capture, *_other_rows(case, audit, models, here)):
        given = right | {axis: np.where(np.isnan(values), right[axis], values)}
        yield axis, name, TESTS[BY_COIN](*given.values())
    for name, test in TESTS.items():
        if name != BY_COIN:
            yield ACCEPTANCE, name, test(*right.values())


def _other_rows(case: Case, audit: Audit, models: Models, here: Indices) -> Iterator[tuple[str, str, Doubles]]:
    """p, and q where it was drawn from, of other rows, and p at other temperatures: of first trials."""
    c = case.evidence
    keys = [(c.visits[step].request.id, c.visits[step].part.index) for step in c.step[here].tolist()]
    firsts = np.sort(np.unique(c.row[here], return_index=True)[1])  # before which no sibling was tried
    for what, read, known in (("p", c.p_trial, firsts), ("q", c.q, firsts[c.sampled[here[firsts]]])):
        every = rows_of(case, models, what, around(case, keys))
        every = [asked for asked in every if asked.logits and not asked.contexts.limits]
        rows, items, nodes = RuledRows(Places(every), what, None), list[Item](), list[int]()
        by_key = {asked.step.key: asked for asked in every}
        for place in known.tolist():
            node = int(here[place])
            number = rows.places.at(by_key.get(keys[place]), int(c.parent[node]))
            if number >= 0:
                item = item_at(rows, number, audit, c.at_node(node))
                item = replace(item, token=int(c.token[node]), recorded=float(read[node]), child=int(c.node[node]))
                items.append(replace(item, wrong=True))
                nodes.append(place)
        if not items:
            continue
        search = Search(rows, items, logits_right=True)
        made = [RuleChange(f"the {what} of {relation.name}", ROWS, row=relation) for relation in OTHERS]
        colder = ((power, changed("temperature", times(1 / power))) for power in POWERS if what == "p")
        made += [RuleChange(f"its p to the power {power:g}", "p", recipe) for power, recipe in colder]
        for change in made:
            values, whole = search.predicted(change), np.full(len(here), np.nan)
            whole[nodes] = np.where(search.greedy, values > 0, values)
            yield what, change.name, whole
