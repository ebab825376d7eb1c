"""What the decoded text says of drafts: that one token stands for another, or that they are another request's."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from specscope.analyze.diagnose.case import Case, Step, path_of_firsts
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, CONDITION, Suspect
from specscope.analyze.diagnose.rates import Rate, chance_of, z_between
from specscope.analyze.findings import CheckResult, Reference

LEAST = 40  # drafted tokens: fewer say little
SIGMAS = 5.0


def vocabulary_map(case: Case) -> Suspect | None:
    """The text's token follows from the drafted one, but is another: a map that is wrong, token by token.

    What each drafted token stands for is learnt from every other request and tested on the rest.
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
        return None  # a map gives each token another one; a weak drafter's drafts are all followed by what is common
    z = z_between(as_map, as_is)
    if z < SIGMAS:
        return None
    lines = (
        f"one token stands for another: with a map learnt from half of the requests the first draft is right in "
        f"{as_map} of the other half, as it is in {as_is}",
        f"{len({a for a, b in known.items() if a != b}):,} of {len(known):,} drafted tokens stand for another",
    )
    score = CONDITION + 0.2 * as_map.share
    return Suspect(Cause.VOCABULARY_MAP, score, lines, example=example, chance=chance_of(z))


def other_requests_text(case: Case) -> Suspect | None:
    """Drafts that continue another request's text in the same batch, and not their own."""
    own, others, example = Rate(), Rate(), None
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
            own.add(step.request, mine, len(chain))
            others.add(step.request, max(hits), len(chain))
            if max(hits) > mine:
                example = example or step.reference()
    z = z_between(others, own)
    if own.total < 30 or z < SIGMAS or others.share < max(3 * own.share, 0.25):
        return None
    said = f"a drafted token is another request's next one in {others}, its own request's in {own}"
    score = CONDITION + 0.25 * min(others.share / 0.5, 1.0)
    lines = (said, f"{z:.0f} standard errors apart")
    return Suspect(Cause.ROWS_SWAPPED, score, lines, example=example, chance=chance_of(z))


def verdict_late(case: Case) -> Suspect | None:
    """Verdicts whose numbers are those of the request's step before, more often than chance gives such.

    How often chance does is read from the run itself: how often a verdict is that of another request's step.
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
    said = f"the verdict is the request's last one, number by number, in {same:,} of {total:,} steps"
    by_chance = f"another request's step has the same verdict in {alike:,} of {pairs:,} pairs"
    return Suspect(Cause.VERDICT_LATE, CONDITION, (said, by_chance), example=example, chance=chance)


def _comparable(one: Step, other: Step) -> bool:
    return len(one.tree) == len(other.tree) and len(one.tree) >= 2


def _same_verdict(one: Step, other: Step) -> bool:
    first, second = one.verdict, other.verdict
    numbers = ((v.coin.tolist(), v.p.tolist(), v.final_coin, v.token) for v in (first, second))
    return len({str(figures) for figures in numbers}) == 1


def tail_of_binomial(hits: int, total: int, share: float) -> float:
    """How often so many hits or more come of `total` trials of that chance, at most (Chernoff)."""
    mean = hits / total
    if mean <= share:
        return 1.0
    distance = mean * math.log(mean / share) + ((1 - mean) * math.log((1 - mean) / (1 - share)) if mean < 1 else 0.0)
    return math.exp(-total * distance)
