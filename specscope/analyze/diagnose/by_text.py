"""What the decoded text says about drafts: that one token stands for another, that they are another request's, or that
prompt lookup took them from another place."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from specscope.analyze.audit.lookup import SIZES, Rule, lookup, told_rules
from specscope.analyze.diagnose.case import Case, Step, path_of_firsts
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, Proof, Suspect
from specscope.analyze.diagnose.rates import Rate, chance_of, z_between
from specscope.analyze.findings import CheckResult, Reference
from specscope.plans.plan import StaticPlan
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import ROOT

LEAST = 40  # drafted tokens: fewer prove little
SIGMAS = 5.0
SHIFTS = (1, -1, 2, -2, 3)
LOOKED_UP = 2000  # steps that are looked up again
FOR_RULE = 100  # of them, from which the rule is found
EXPLAINED = 8  # drafted tokens that a mistake must explain
Paths = frozenset[tuple[int, ...]]


def vocabulary_map(case: Case) -> Suspect | None:
    """The text's token follows from the drafted one but is a different one: a wrong map, token by token.

    What each drafted token stands for is learnt from one half of the requests and tested on the other.
    """
    in_place = case.checks.get("drafts in place")
    if not case.is_model or (in_place is not None and in_place.result is CheckResult.FAILED):
        return None  # the drafts are right at another place
    pairs: dict[bool, list[tuple[str, int, int, Reference]]] = {True: [], False: []}
    odd = {name: bool(i % 2) for i, name in enumerate(case.history.requests)}
    for step in case.drafting:
        node = step.tree.children(-1)[0]
        there = step.token_after(1)
        if there is not None:
            drafted = int(step.tree.token[node])
            pairs[odd[step.request]].append((step.request, drafted, there, step.reference(node)))
    learnt: dict[int, Counter[int]] = defaultdict(Counter)
    for _, drafted, there, _ in pairs[False]:
        learnt[drafted][there] += 1
    known = {drafted: counts.most_common(1)[0][0] for drafted, counts in learnt.items() if counts.total() >= 3}
    as_map, as_is, example = Rate(), Rate(), None
    for request, drafted, there, where in pairs[True]:
        if drafted in known:
            as_map.add(request, known[drafted] == there)
            as_is.add(request, drafted == there)
            if known[drafted] == there != drafted:
                example = example or where
    if as_map.total < LEAST or as_map.share < 2 * as_is.share or as_map.share < 0.5:
        return None
    if len(set(known.values())) < 0.75 * len(known) or len(known) < 5:
        return None  # a map gives each token one of its own; a weak drafter's drafts are all followed by common tokens
    z = z_between(as_map, as_is)
    if z < SIGMAS:
        return None
    lines = (
        f"one token stands for another: with a map learnt from half of the requests the first draft is right in "
        f"{as_map} of the other half, as it is in {as_is}",
        f"{len({a for a, b in known.items() if a != b}):,} of {len(known):,} drafted tokens stand for another",
    )
    return Suspect(Cause.DRAFT_VOCABULARY, Proof.CONDITION, lines, example=example, chance=chance_of(z))


def other_requests_text(case: Case) -> Suspect | None:
    """Drafts that continue another request's text in the same batch, and not their own."""
    own_text, other_text, example = Rate(), Rate(), None
    batches: dict[int, list[Step]] = {}
    for step in case.drafting:
        batches.setdefault(step.visit.record.step, []).append(step)
    for batch in batches.values():
        for step in batch:
            chain = [(depth, int(step.tree.token[node])) for depth, node in enumerate(path_of_firsts(step), 1)]
            hits = [
                sum(other.token_after(depth) == token for depth, token in chain) for other in batch if other is not step
            ]
            if not hits:
                continue
            mine = sum(step.token_after(depth) == token for depth, token in chain)
            own_text.add(step.request, mine, len(chain))
            other_text.add(step.request, max(hits), len(chain))
            if max(hits) > mine:
                example = example or step.reference()
    z = z_between(other_text, own_text)
    if own_text.total < 30 or z < SIGMAS or other_text.share < max(3 * own_text.share, 0.25):
        return None
    line = f"a drafted token is another request's next one in {other_text}, its own request's in {own_text}"
    lines = (line, f"{z:.0f} standard errors apart")
    return Suspect(Cause.ROWS_SWAPPED, Proof.CONDITION, lines, example=example, chance=chance_of(z))


def verdict_late(case: Case) -> Suspect | None:
    """Verdicts whose numbers are those of the request's step before, more often than by chance.

    How often chance does this is read from the run itself: how often a verdict is that of another request's step.
    """
    same, total, example = 0, 0, None
    alike = pairs = 0
    last: Step | None = None
    for step in case.drafting:
        if last is not None and last.request != step.request and _comparable(last, step):
            pairs += 1
            alike += _same_verdict(last, step)
        last = step
        if step.last is None or not _comparable(step.last, step):
            continue
        total += 1
        if _same_verdict(step.last, step):
            same += 1
            example = example or step.reference()
    if not same:
        return None
    chance = tail_of_binomial(same, total, (alike + 1) / (pairs + 2))
    if chance > CHANCE:
        return None
    line = f"the verdict is the request's last one, number by number, in {same:,} of {total:,} steps"
    by_chance = f"another request's step has the same verdict in {alike:,} of {pairs:,} pairs"
    return Suspect(Cause.VERDICT_LATE, Proof.CONDITION, (line, by_chance), example=example, chance=chance)


def _comparable(step: Step, other: Step) -> bool:
    return len(step.tree) == len(other.tree) and len(step.tree) >= 2


def _same_verdict(step: Step, other: Step) -> bool:
    first, second = step.verdict, other.verdict
    numbers = ((v.coin.tolist(), v.p.tolist(), v.final_coin, v.token) for v in (first, second))
    return len({str(figures) for figures in numbers}) == 1


def tail_of_binomial(hits: int, total: int, share: float) -> float:
    """An upper bound (Chernoff's) on the chance of so many hits or more in `total` trials of chance `share`."""
    mean = hits / total
    if mean <= share:
        return 1.0
    distance = mean * math.log(mean / share) + ((1 - mean) * math.log((1 - mean) / (1 - share)) if mean < 1 else 0.0)
    return math.exp(-total * distance)


def shifted_lookup(case: Case) -> Suspect | None:
    """Trees that are what the text gives at another place: the continuation is taken too late or too early."""
    run, plan = case.history.run, case.plan
    if run is None or run.drafter != "ngram" or not isinstance(plan, StaticPlan):
        return None
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    steps = [step for step in case.drafting if step.after > 0]
    steps = steps[:: max(1, len(steps) // LOOKED_UP)]
    if not steps:
        return None
    recorded = {id(step): _paths(step) for step in steps}

    def fits(some: Sequence[Step], rule: Rule, shift: int) -> list[Step]:
        """Steps whose tree is what the text gives; with a shift, the end may be missing."""
        drafted = ((step, frozenset(lookup(step.text[: step.after], depth, width, rule, shift))) for step in some)
        pairs = ((step, recorded[id(step)], paths) for step, paths in drafted)
        return [
            step
            for step, there, paths in pairs
            if (bool(there) and there <= paths if shift else rule.agrees(there, paths))
        ]

    rules = told_rules(run.speculation) or tuple(Rule(*sizes) for sizes in SIZES)
    few = steps[:: max(1, len(steps) // FOR_RULE)]
    right = max(rules, key=lambda rule: len(fits(few, rule, 0)))
    alike = {id(step) for step in fits(steps, right, 0)}
    wrong = [step for step in steps if id(step) not in alike and recorded[id(step)]]
    if not wrong:
        return None
    explained, shift = max(((fits(wrong, rule, shift), shift) for shift in SHIFTS for rule in rules), key=_drafted)
    if len(explained) <= 0.8 * len(wrong) or sum(len(step.tree) for step in explained) < EXPLAINED:
        return None
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    line = (
        f"prompt lookup that continues {late} drafts the recorded tree in {len(explained):,} of the {len(wrong):,} "
        f"steps in which the right lookup does not; {len(steps):,} steps were looked at"
    )
    return Suspect.rerun_of(Cause.DRAFT_POSITION, line, explained[0].reference(), (len(explained), len(wrong)))


def _drafted(explained: tuple[list[Step], int]) -> int:
    """How many drafted tokens are explained."""
    return sum(len(step.tree) for step in explained[0])


def _paths(step: Step) -> Paths:
    tree = step.tree
    return frozenset(tuple(int(tree.token[i]) for i in tree.path_to(node)) for node in range(len(tree)))
