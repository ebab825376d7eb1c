"""Causes in the rule of verification: what a right sampler cannot have recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from specscope.analyze.diagnose.case import Case, Step, Trials
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, STATISTICAL, Suspect
from specscope.analyze.diagnose.rates import Sum
from specscope.analyze.findings import Reference
from specscope.trace.records import FinalKind
from specscope.trace.tree import Drawn
from specscope.trace.wording import plural

CLOSE = 1e-4  # of a recomputed probability, recorded in float32
SIGMAS = 5.0  # of a statistical suspect: with 30 of them over 60 runs chance gives 0.001
SOME = 0.02  # of what was looked at: fewer that are wrong have another cause


def ratio_by_p(case: Case) -> Suspect | None:
    """Acceptance probabilities that are not min(1, p / q) of the very numbers that stand beside them."""
    wrong, by_p, total, example = 0, 0, 0, None
    for step in case.standard:
        v = step.verdict
        for node in (node for trials in step.trials for node in trials.nodes if v.q_trial[node] > 0):
            expected = min(1.0, float(v.p_trial[node]) / float(v.q_trial[node]))
            total += 1
            if abs(float(v.accept_prob[node]) - expected) > CLOSE:
                wrong += 1
                by_p += abs(float(v.accept_prob[node]) - float(v.p_trial[node])) < CLOSE
                example = example or step.reference(node)
    if wrong <= SOME * total:
        return None
    said = [f"the acceptance probability is not min(1, p / q) at {wrong:,} of {plural(total, 'tried node')}"]
    if by_p > 0.9 * wrong:
        said.append(f"it is p itself at {by_p:,} of these")
    return Suspect(Cause.RATIO_BY_P, CERTAIN, tuple(said), example=example)


def later_siblings(case: Case) -> Suspect | None:
    """p at the second and later siblings, from what was rejected before them."""
    total, wrong, plain, same, example = 0, 0, 0, 0, None
    for step, trials in _groups(case):
        p = step.verdict.p_trial
        for place, node in enumerate(trials.nodes[1:], 1):
            right, unscaled, slack = _expected_p(step, trials.nodes[:place], node)
            total += 1
            if abs(float(p[node]) - right) > slack:
                wrong += 1
                plain += abs(float(p[node]) - unscaled) <= slack
                same += abs(float(p[node]) - float(step.verdict.p[node])) <= CLOSE
                example = example or step.reference(node)
    if total < 5 or wrong <= SOME * total:
        return None
    said = [f"p of later siblings does not follow from the earlier ones at {wrong:,} of {total:,}"]
    if plain > 0.9 * wrong:
        said.append(f"it is max(p - q, 0) without division by its mass at {plain:,} of these")
    elif same > 0.9 * wrong:
        said.append(f"it is the first p, as if nothing had been subtracted, at {same:,} of these")
    return Suspect(Cause.RESIDUAL, CERTAIN, tuple(said), example=example)


def _groups(case: Case) -> Iterator[tuple[Step, Trials]]:
    """Siblings of which more than one was tried, where p is no one-hot choice."""
    for step in case.standard:
        if step.params is None or not step.params.greedy:
            yield from ((step, trials) for trials in step.trials if len(trials.nodes) > 1)


def _expected_p(step: Step, rejected: tuple[int, ...], node: int) -> tuple[float, float, float]:
    """(p of a sibling after these were rejected, the same without any division, how far off it may be)."""
    v, tree = step.verdict, step.tree
    p = plain = float(v.p[node])
    q = float(tree.q[node])
    least = 1.0
    for other in rejected:
        mass = float(v.residual_mass[other])
        if mass <= 0:
            continue  # nothing was left: p stays
        least = min(least, mass)
        if tree.drawn[other] != Drawn.DETERMINISTIC:
            p, plain = max(p - q, 0.0), max(plain - q, 0.0)
            if tree.drawn[other] == Drawn.WITHOUT_REPLACEMENT:
                q /= max(1 - float(v.q_trial[other]), 1e-9)
        p /= mass
    return p, plain, CLOSE + 3e-6 / least


def final_from_p(case: Case) -> Suspect | None:
    """A token that was just rejected has no mass in the residual: it cannot be the final one."""
    hits, total, example = 0, 0, None
    for step in case.standard:
        rejected, v = step.rejected_last, step.verdict
        if not rejected or min(float(v.residual_mass[node]) for node in rejected) < 1e-5:
            continue
        if step.params is not None and step.params.greedy:
            continue
        total += 1
        if v.token in step.tree.token[list(rejected)]:
            hits += 1
            example = example or step.reference()
    if hits < 2 or hits <= SOME * total / 4:
        return None
    said = f"the final token is one that had just been rejected in {hits:,} of {plural(total, 'step')} with a residual"
    return Suspect(Cause.FINAL_FROM_P, CERTAIN - 0.02, (said,), example=example)


def noise_shared(case: Case) -> Suspect | None:
    """Final draws with a coin that was used before, or that do not follow the distribution they are drawn from."""
    same, total, example = 0, 0, None
    recovered, others = Sum(), Sum()
    worst, at = 0.0, None
    for step in case.tossed:
        v, notes = step.verdict, step.part.parents
        if step.params is not None and step.params.greedy:
            continue
        if v.kind is FinalKind.RECOVERED:
            total += 1
            if any(v.final_coin == v.coin[node] for trials in step.trials for node in trials.nodes):
                same += 1
                example = example or step.reference()
        if notes is None or v.final_p <= 0:
            continue
        excess = -math.log(v.final_p) - notes.final_entropy
        (recovered if v.kind is FinalKind.RECOVERED else others).add(excess, notes.final_varentropy)
        if v.kind is FinalKind.RECOVERED and excess > worst:
            worst, at = excess, step.reference()
    if same > max(SOME * total, 2):
        said = f"the coin that rejected a draft also draws the final token in {same:,} of {plural(total, 'such step')}"
        return Suspect(Cause.NOISE_SHARED, CERTAIN, (said,), example=example)
    if recovered.count >= 30 and abs(recovered.z) > SIGMAS > abs(others.z):
        return _biased(recovered, others, at)
    return None


def _biased(recovered: Sum, others: Sum, example: Reference | None) -> Suspect:
    said = (
        f"tokens drawn from residuals are {abs(recovered.mean):.2f} nats {_side(recovered)} likely than their "
        f"distribution says, {abs(recovered.z):.1f} standard errors over {plural(recovered.count, 'draw')}",
        f"other final tokens follow theirs ({others.z:+.1f} standard errors over {others.count:,})",
        "every verdict can be recomputed: only the draws are wrong",
    )
    return Suspect(Cause.NOISE_SHARED, STATISTICAL + 0.2, said, example=example)


def _side(one: Sum) -> str:
    return "less" if one.value > 0 else "more"
