"""Causes in how drafts are tried and the final token is drawn: each step's verdict against its own numbers."""

from __future__ import annotations

import math
from collections import Counter

from specscope.analyze.diagnose.case import Case, Step, Trials
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, CONDITION, Suspect
from specscope.analyze.findings import Reference
from specscope.trace.records import FinalKind, Outcome
from specscope.trace.tree import Drawn
from specscope.trace.wording import plural

CLOSE = 1e-4  # of a probability that was recorded in float32
LITTLE = 0.01  # with less of q left, rounding decides what is recorded
SOME = 0.02  # of what was looked at: fewer that are wrong have another cause
FEW = 2  # likewise, whatever was looked at


def q_at_trial(case: Case) -> Suspect | None:
    """q as tried is q as drawn, over what earlier siblings left of it."""
    kinds, total = Counter[Cause](), 0
    examples: dict[Cause, Reference] = {}
    for step in case.standard:
        for trials in step.trials:
            total += len(trials.nodes)
            wrong = _wrong_q(step, trials)
            if wrong is not None:
                cause, node = wrong
                kinds[cause] += 1
                examples.setdefault(cause, step.reference(node))
    count = kinds.total()
    if count <= max(FEW, SOME * total / 4):
        return None
    cause, most = kinds.most_common(1)[0]
    about = {
        Cause.SIBLINGS_SWAPPED: "it is the q of another sibling",
        Cause.Q_NOT_RENORMALISED: "it is q as drawn, without division by what was left",
        Cause.Q_OTHER_ROW: "it is the q of no sibling, and not 1 where the draft is deterministic",
    }
    said = (
        f"q as tried does not follow from q as drawn below {count:,} parents ({total:,} tried nodes)",
        f"{about[cause]} at {most:,} of these",
    )
    return Suspect(cause, CERTAIN + 0.02, said, example=examples[cause])  # a wrong residual follows from it


def _wrong_q(step: Step, trials: Trials) -> tuple[Cause, int] | None:
    """The first sibling whose q as tried is not its own, and how it comes out."""
    tree, v = step.tree, step.verdict
    if tree.drawn[trials.nodes[0]] == Drawn.DETERMINISTIC:
        wrong = [node for node in trials.nodes if abs(float(v.q_trial[node]) - 1) > CLOSE]
        return (Cause.Q_OTHER_ROW, wrong[0]) if wrong else None
    every = tree.children(trials.parent)
    taken = 0.0  # of q, by the tokens that were really tried
    for node in trials.nodes:
        left = 1 - taken if tree.drawn[node] == Drawn.WITHOUT_REPLACEMENT else 1.0
        if left < LITTLE:
            return None
        recorded, tried = float(tree.q[node]), float(v.q_trial[node])
        slack = CLOSE / left
        if abs(tried - recorded / left) > slack:
            if taken and abs(tried - recorded) <= CLOSE:
                return Cause.Q_NOT_RENORMALISED, node
            swapped = any(abs(tried * left - float(tree.q[other])) <= CLOSE for other in every if other != node)
            return (Cause.SIBLINGS_SWAPPED if swapped else Cause.Q_OTHER_ROW), node
        taken += recorded
    return None


def against_coin(case: Case) -> Suspect | None:
    """Accepted where the coin is below the acceptance probability, rejected elsewhere."""
    total, wrong, example = 0, 0, None
    other = Counter[str]()
    for step in case.standard:
        v = step.verdict
        for node in (node for trials in step.trials for node in trials.nodes):
            coin, accept = float(v.coin[node]), float(v.accept_prob[node])
            if not 0 < coin < 1:
                continue  # an engine that tells no coins
            yes = v.outcome[node] == Outcome.ACCEPTED
            total += 1
            if yes == (coin < accept) or abs(coin - accept) < 1e-6:
                continue
            wrong += 1
            example = example or step.reference(node)
            other["coin <= q"] += yes == (coin <= float(v.q_trial[node]))
            other["coin < p"] += yes == (coin < float(v.p_trial[node]))
            other["coin < 1 - a"] += yes == (coin < 1 - accept)
            other["a > 1/2"] += yes == (accept > 0.5)
    if wrong <= max(FEW, SOME * total / 10):
        return None
    said = [f"{wrong:,} of {plural(total, 'tried node')} were not accepted just where coin < a"]
    test, fits = other.most_common(1)[0]
    if fits == wrong:
        said.append(f"the test {test} gives the outcome of all of these")
    return Suspect(Cause.AGAINST_COIN, CERTAIN, tuple(said), example=example)


def trial_order(case: Case) -> Suspect | None:
    """Below the root and below each accepted node: one sibling after another until one is accepted."""
    total, wrong, skipped, backwards, example = 0, 0, 0, 0, None
    for step in case.standard:
        outcome = step.verdict.outcome
        for parent in (-1, *(int(node) for node in step.verdict.path)):
            children = step.tree.children(parent)
            if len(children) < 2:
                continue
            total += 1
            tried = [node for node in children if outcome[node] != Outcome.UNTRIED]
            until = next((i for i, node in enumerate(children, 1) if outcome[node] == Outcome.ACCEPTED), len(children))
            if tried == children[:until]:
                continue
            wrong += 1
            skipped += not any(outcome[node] == Outcome.ACCEPTED for node in children)
            backwards += tried == children[len(children) - len(tried) :]
            example = example or step.reference(next((n for n in children if n not in tried), children[0]))
    if wrong <= max(FEW, SOME * total / 4):
        return None
    said = [f"siblings were tried out of turn, or not at all, below {wrong:,} of {plural(total, 'parent')}"]
    if skipped > wrong / 2:
        said.append(f"below {skipped:,} of these some were never tried, though none was accepted")
    elif backwards == wrong:
        said.append("the last ones were tried first below all of these")
    return Suspect(Cause.TRIAL_ORDER, CERTAIN + 0.03, tuple(said), example=example)


def final_p(case: Case) -> Suspect | None:
    """The final token's p: the target's own after an acceptance, at most that over the residual's mass after none."""
    totals, wrongs = Counter[bool](), Counter[bool]()
    examples: dict[bool, Reference] = {}
    for step in case.steps:
        v, notes = step.verdict, step.part.parents
        if notes is None or step.part.rule != "standard" or step.params is None or step.params.greedy:
            continue
        recovered = v.kind is FinalKind.RECOVERED
        mass = math.prod(max(float(v.residual_mass[node]), 0.0) for node in step.rejected_last)
        if v.final_p <= 0 or not mass > LITTLE:
            continue
        totals[recovered] += 1
        most = notes.final_target_p / mass
        if v.final_p > most + CLOSE / mass or (not recovered and v.final_p < most - CLOSE):
            wrongs[recovered] += 1
            examples.setdefault(recovered, step.reference())
    for recovered, cause in ((False, Cause.FINAL_OTHER_NODE), (True, Cause.FINAL_NOT_RESIDUAL)):
        wrong, total = wrongs[recovered], totals[recovered]
        if wrong <= max(FEW - 1, SOME * total / 4):
            continue
        if recovered:
            said = [f"the final token was drawn with more probability than any residual of p can have in {wrong:,} of"]
        else:
            said = [f"the final token was not drawn with its p behind the last accepted node in {wrong:,} of"]
        said = [f"{said[0]} {plural(total, 'draw')} {'after a rejection' if recovered else 'after none'}"]
        return Suspect(cause, CERTAIN, tuple(said), example=examples[recovered])
    return None


def other_requests_text(case: Case) -> Suspect | None:
    """Drafts that continue another request's text in the same batch, and not their own."""
    from specscope.analyze.diagnose.case import path_of_firsts
    from specscope.analyze.diagnose.rates import Rate, z_between

    own, others, example = Rate(), Rate(), None
    batches: dict[int, list[Step]] = {}
    for step in case.drafting:
        batches.setdefault(step.visit.record.step, []).append(step)
    for batch in batches.values():
        for step in batch:
            chain = [(depth, int(step.tree.token[node])) for depth, node in enumerate(path_of_firsts(step), 1)]
            hits = [sum(one.token_after(depth) == token for depth, token in chain) for one in batch if one is not step]
            if not hits:
                continue
            mine = sum(step.token_after(depth) == token for depth, token in chain)
            own.add(step.request, mine, len(chain))
            others.add(step.request, max(hits), len(chain))
            if max(hits) > mine:
                example = example or step.reference()
    z = z_between(others, own)
    if own.total < 30 or z < 3.5 or others.share < max(3 * own.share, 0.25):
        return None
    said = f"a drafted token is another request's next one in {others}, its own request's in {own}"
    score = CONDITION + 0.25 * min(others.share / 0.5, 1.0)
    return Suspect(Cause.ROWS_SWAPPED, score, (said, f"{z:.0f} standard errors apart"), example=example)
