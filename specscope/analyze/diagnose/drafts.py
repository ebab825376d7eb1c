"""Causes in the drafts: the wrong tokens, from the text that was decoded afterwards."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from specscope.analyze.diagnose.case import Case, Step, path_of_firsts
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, CONDITION, STATISTICAL, Suspect
from specscope.analyze.diagnose.rates import Rate, z_between
from specscope.analyze.findings import Reference
from specscope.trace.tree import Drawn
from specscope.trace.wording import plural

SHIFTS = (-2, -1, 0, 1, 2)
LEAST = 40  # drafted tokens: fewer say little
SIGMAS = 5.0


def shift_table(case: Case) -> Mapping[int, Rate]:
    """How often a drafted token is the text's at its own depth (0), and at depths further (1, 2) or less far (-1)."""
    table = {shift: Rate() for shift in SHIFTS}
    for step in case.drafting:
        for depth, node in enumerate(path_of_firsts(step), 1):
            token = int(step.tree.token[node])
            for shift, rate in table.items():
                there = step.token_after(depth + shift)
                if there is not None:
                    rate.add(step.request, token == there)
    return table


def draft_position(case: Case) -> Suspect | None:
    """Drafts that are right at another place than their own."""
    table = shift_table(case)
    best = max(table, key=lambda shift: table[shift].share)
    if best == 0 or table[0].total < LEAST:
        return None
    z = z_between(table[best], table[0])
    if z < SIGMAS or table[best].share < 2 * table[0].share or table[best].share < 0.1:
        return None
    where = f"{abs(best)} {'further' if best > 0 else 'before'}"
    said = (
        f"a drafted token is the text's token {where} in {table[best]}, at its own place in {table[0]}",
        f"{z:.0f} standard errors apart",
    )
    score = CONDITION + 0.25 * min(table[best].share / 0.5, 1.0)
    return Suspect(Cause.DRAFT_POSITION, score, said, example=_one_that_fits(case, best))


def _one_that_fits(case: Case, shift: int) -> Reference | None:
    """A step whose whole chain is right at a shift, or the one that fits longest."""
    best, example = 0, None
    for step in case.drafting:
        chain = enumerate(path_of_firsts(step), 1)
        fits = sum(int(step.tree.token[node]) == step.token_after(depth + shift) for depth, node in chain)
        if fits > best:
            best, example = fits, step.reference()
    return example


def placeholders(case: Case) -> Suspect | None:
    """One token that is drafted over and over, by no drafter's choice, and never accepted."""
    drafted, accepted = Counter[int](), Counter[int]()
    example: dict[int, Reference] = {}
    chosen = Counter[int]()  # drafted where the drafter's own notes have it among its likeliest
    noted = Counter[int]()
    for step in case.drafting:
        taken = set(step.verdict.path.tolist())
        for node, token in enumerate(step.tree.token.tolist()):
            drafted[token] += 1
            accepted[token] += node in taken
            example.setdefault(token, step.reference(node))
        for row, tokens in _own_choices(step):
            for node in step.tree.children(row):
                token = int(step.tree.token[node])
                noted[token] += 1
                chosen[token] += token in tokens
    total = sum(drafted.values())
    text = Counter(token for one in case.history.requests.values() for token, _ in one.output())
    prompt = {t for one in case.history.requests.values() if one.info for t in one.info.prompt_tokens.tolist()}
    for token, count in drafted.most_common(3):
        is_rare = text[token] <= 0.001 * sum(text.values()) and accepted[token] == 0 and token not in prompt
        own_choice = chosen[token] > 0.5 * noted[token] if noted[token] else case.is_model and token > 2
        if count >= max(20, 0.05 * total) and is_rare and not own_choice:
            said = f"token {token} is {count:,} of {total:,} drafted tokens, accepted never, and not in the text"
            return Suspect(Cause.DRAFT_PLACEHOLDERS, CERTAIN - 0.03, (said,), example=example[token])
    return None


def _own_choices(step: Step) -> list[tuple[int, set[int]]]:
    """For each parent that was tried the drafter's likeliest tokens, where it is a model that looked there."""
    notes = step.part.parents
    if notes is None or not notes.draft_top.shape[1]:
        return []
    tops = zip(notes.node, notes.draft_top, notes.draft_top_p, strict=True)
    return [(int(node), set(top.tolist())) for node, top, p in tops if p.any()]


def vocabulary_map(case: Case) -> Suspect | None:
    """The text's token follows from the drafted one, but is another: a map that is wrong, token by token.

    What each drafted token stands for is learnt from every other request and tested on the rest.
    """
    if not case.is_model:
        return None
    pairs: dict[bool, list[tuple[str, int, int, Reference]]] = {True: [], False: []}
    odd = {name: bool(i % 2) for i, name in enumerate(case.history.requests)}
    for step in case.drafting:
        node = step.tree.children(-1)[0]
        there = step.token_after(1)
        if there is not None:
            one = (step.request, int(step.tree.token[node]), there, step.reference(node))
            pairs[odd[step.request]].append(one)
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
    table = shift_table(case)
    if max(table, key=lambda shift: table[shift].share) != 0 and max(rate.share for rate in table.values()) > 0.3:
        return None  # the drafts are right at another place
    z = z_between(as_map, as_is)
    if z < SIGMAS:
        return None
    said = (
        f"one token stands for another: with a map learnt from half of the requests the first draft is right in "
        f"{as_map} of the other half, as it is in {as_is}",
        f"{len({a for a, b in known.items() if a != b}):,} of {len(known):,} drafted tokens stand for another",
    )
    return Suspect(Cause.VOCABULARY_MAP, CONDITION + 0.2 * as_map.share, said, example=example)


def q_dropped(case: Case) -> Suspect | None:
    """Deterministic nodes where the plan is to sample, or where they are not the drafter's likeliest tokens."""
    judged, unlikely, planned, example = 0, 0, 0, None
    for step in case.drafting:
        if step.params is None or step.params.greedy or step.is_sampled:
            continue
        if not case.is_model:
            continue
        planned += case.wants_samples
        for parent, likeliest in [] if step.part.is_ranked_with_text else _own_choices(step):
            first = step.tree.children(parent)[:1]
            if first and not step.params.moved:
                notes = step.part.parents
                place = step.top_of(parent)
                assert notes is not None
                assert place is not None
                judged += 1
                top = int(notes.draft_top[place, 0])
                if int(step.tree.token[first[0]]) != top and likeliest:
                    unlikely += 1
                    example = example or step.reference(first[0])
    if planned <= 0.02 * len(case.drafting) and unlikely <= max(3, 0.02 * judged):
        return None
    said = []
    if planned:
        temperature = "a temperature" if case.steps[0].params is None else f"{case.steps[0].params.temperature:g}"
        said.append(
            f"the tree is to be sampled at temperature {temperature}, but is recorded as deterministic in "
            f"{planned:,} of {plural(len(case.drafting), 'step')}"
        )
    if unlikely:
        said.append(f"the first child is not the drafter's likeliest token at {unlikely:,} of {judged:,} parents")
    score = CERTAIN if planned and unlikely else CERTAIN - 0.05 if planned else CONDITION
    return Suspect(Cause.Q_DROPPED, score, tuple(said), example=example or case.drafting[0].reference())


def siblings_sorted(case: Case) -> Suspect | None:
    """Draws without replacement come in falling order of q more often than not, but by a known share."""
    from specscope.analyze.diagnose.rates import Sum

    falling, total, expected, example = 0, 0, Sum(), None
    for step in case.drafting:
        if not step.is_sampled:
            continue
        parents = set(step.tree.parent.tolist())
        for parent in parents:
            nodes = step.tree.children(parent)
            taken = 0.0
            for one, other in itertools.pairwise(nodes):
                if step.tree.drawn[one] != Drawn.WITHOUT_REPLACEMENT:
                    break
                left = max(1 - taken, 1e-6)
                a, b = (min(float(step.tree.q[node]) / left, 1.0) for node in (one, other))
                taken += float(step.tree.q[one])
                if not 0 < b < a + b < 1 - 1e-4 or a == b:
                    continue
                # P(a first | a and b): a b / (1 - a) against a b / (1 - b)
                chance = (1 - b) / ((1 - a) + (1 - b))
                chance = chance if a > b else 1 - chance
                total += 1
                falling += a > b
                expected.add((a > b) - chance, chance * (1 - chance))
                example = example or (step.reference(other) if a > b else None)
    if total < LEAST or expected.z < SIGMAS:
        return None
    said = [
        f"of {total:,} pairs of siblings {falling:,} come in falling order of q, where draws would give "
        f"{falling - expected.value:,.0f} ({expected.z:.0f} standard errors)"
    ]
    score = CERTAIN - 0.01 if falling == total else STATISTICAL + 0.2
    return Suspect(Cause.SIBLINGS_SORTED, score, tuple(said), example=example)


def siblings_pruned(case: Case) -> Suspect | None:
    """Sampled trees that lack nodes of their plan, though q had tokens left to give."""
    from specscope.trace.plan import StaticPlan

    plan = case.plan
    if not isinstance(plan, StaticPlan) or not case.is_model:
        return None
    full = [len(plan.shape.children(node)) for node in range(-1, len(plan.shape))]
    lacking, total, example, kept, least = 0, 0, None, 1.0, 1.0
    for step in case.drafting:
        if not step.is_sampled or step.part.sizing:
            continue
        total += 1
        missing = _missing(step, plan.shape.children, full)
        if missing:
            lacking += 1
            example = example or step.reference()
        leaves = [n for n in range(len(step.tree)) if n not in step.tree.parent]
        kept = min(
            [kept, *(float(step.tree.q[n]) for n in leaves if step.tree.children(int(step.tree.parent[n]))[0] != n)]
        )
        least = min(least, float(step.tree.q.min()))
    if lacking <= max(2, 0.02 * total):
        return None
    said = (
        f"{lacking:,} of {total:,} sampled trees lack nodes of the plan {plan}, though q had tokens left",
        f"no younger leaf has q below {kept:.3f}",
    )
    return Suspect(Cause.SIBLINGS_PRUNED, CERTAIN - 0.02, said, example=example)


def _missing(step: Step, planned: object, full: list[int]) -> int:
    """How many children are missing at nodes whose place in the plan is known, where q had more to give."""
    assert callable(planned)
    missing, place, queue = 0, {-1: -1}, [-1]
    while queue:
        node = queue.pop()
        children, wanted = step.tree.children(node), planned(place[node])
        given = sum(float(step.tree.q[child]) for child in children)
        if len(children) < len(wanted) and given < 1 - 1e-3 and (children or node == -1 or wanted):
            missing += len(wanted) - len(children)
        for child, there in zip(children, wanted, strict=False):
            place[child] = there
            queue.append(child)
    return missing


def q_temperature(case: Case) -> Suspect | None:
    """The temperature at which the recorded q follows from the drafter's raw probabilities, and the draws from q."""
    from specscope.analyze.diagnose.temperature import draws_against_q, fitted_temperature

    fit = fitted_temperature(case)
    draws = draws_against_q(case)
    said, score, example = [], 0.0, None
    if fit is not None and abs(np.log(fit.found / fit.wanted)) > 0.1:
        said.append(
            f"the recorded q is the drafter's at temperature {fit.found:.2f}, and the requests' is {fit.wanted:g} "
            f"(over {plural(fit.count, 'parent')})"
        )
        score, example = CERTAIN - 0.05, fit.example
    if draws.count >= LEAST and abs(draws.z) > SIGMAS:
        side = "less" if draws.value > 0 else "more"
        said.append(
            f"the drawn tokens are {abs(draws.mean):.2f} nats {side} likely under q than draws from it would be "
            f"({abs(draws.z):.0f} standard errors over {draws.count:,})"
        )
        score = max(score, STATISTICAL + 0.1)
    return Suspect(Cause.Q_TEMPERATURE, score, tuple(said), example=example) if said else None
