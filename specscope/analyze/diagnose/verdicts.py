"""What lies behind failed checks of a step's own arithmetic: trials, residuals, acceptance and final tokens.

Each function is given a check of verify that failed and says what its wrong nodes or steps have in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from specscope.analyze.diagnose.by_text import tail_of_binomial
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, Proof, Suspect
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding, Reference
from specscope.analyze.verify.chance import surprisal
from specscope.analyze.verify.exact import residual_p
from specscope.analyze.verify.parents import of_all_p
from specscope.analyze.verify.sums import Sum, nats
from specscope.trace.history.wording import plural
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.tree import Bools

CLOSE = 1e-4  # of a probability that was recorded in float32
MOSTLY = 0.8  # of what is wrong: what holds less often is no pattern
ENOUGH = 3  # wrong places: fewer show no pattern


def ratio(case: Case, check: Finding) -> list[Suspect]:
    """Acceptance probabilities that are not min(1, p / q) of the p and q recorded beside them."""
    c, wrong = case.evidence, check.wrong
    lines = [f"the acceptance probability is not min(1, p / q) at {counted(check)}"]
    by_p = int((np.abs(c.accept_prob[wrong] - c.p_trial[wrong]) < CLOSE).sum())
    if by_p > MOSTLY * len(wrong):
        lines.append(f"it is p itself at {by_p:,} of these")
    return [Suspect(Cause.RATIO_TEST, Proof.ROWS, tuple(lines), example=check.example)]


def outcomes(case: Case, check: Finding) -> list[Suspect]:
    """Accepted where the coin is not below a, or rejected where it is: a wrong count, or another test."""
    if suspects := _of_the_step_before(case, check) or other_counts(case, check):
        return suspects
    c, wrong = case.evidence, check.wrong
    accepted, coin, a = c.accepted[wrong], c.coin[wrong], c.accept_prob[wrong]
    tests = {
        "coin <= q": coin <= c.q_trial[wrong],
        "coin < p": coin < c.p_trial[wrong],
        "coin < 1 - a": coin < 1 - a,
        "a > 1/2": a > 0.5,
    }
    lines = [f"{counted(check)} were not accepted just where coin < a"]
    name, fits = max(tests.items(), key=lambda item: int((item[1] == accepted).sum()))
    if len(wrong) >= ENOUGH and bool((fits == accepted).all()):
        lines.append(f"the test {name} gives the outcome of all of these")
    return [Suspect(Cause.RATIO_TEST, Proof.ROWS, tuple(lines), example=check.example)]


def greedy_acceptance(case: Case, check: Finding) -> list[Suspect]:
    """A greedy draft that is accepted and is not the target's choice, or the other way round."""
    if suspects := _of_the_step_before(case, check) or other_counts(case, check):
        return suspects
    c, wrong = case.evidence, check.wrong
    accepted = int(c.accepted[wrong].sum())
    lines = (
        f"greedy drafts are accepted that are not the target's choice, or rejected that are, at {counted(check)}",
        f"{accepted:,} of these were accepted, {len(wrong) - accepted:,} rejected",
    )
    return [Suspect(Cause.RATIO_TEST, Proof.ROWS, lines, example=check.example)]


def log_probabilities(case: Case, check: Finding) -> list[Suspect]:
    """Log-probabilities that are not their tokens' own."""
    line = f"{counted(check)} have another log-probability than the evidence: {check.detail}"
    return [Suspect(Cause.LOGPROBS, Proof.ROWS, (line,), example=check.example)]


def paths(case: Case, check: Finding) -> list[Suspect]:
    """Committed paths that are not the accepted nodes."""
    return other_counts(case, check)


def _of_the_step_before(case: Case, check: Finding) -> list[Suspect]:
    """Wrong steps with the count and the final token of their request's step before, more often than other steps."""
    c = case.evidence
    wrong = set(np.unique(c.step[check.wrong]).tolist())
    last: dict[str, tuple[int, int]] = {}
    hits = total = alike = others = 0
    for step, verdict in enumerate(c.verdicts):
        name = c.visits[step].request.id
        committed, before = (verdict.accepted, verdict.token), last.get(name)
        last[name] = committed
        if before is None:
            continue
        same = committed == before
        if step in wrong:
            hits, total = hits + same, total + 1
        else:
            alike, others = alike + same, others + 1
    if hits < ENOUGH or hits < MOSTLY * total:
        return []
    chance = tail_of_binomial(hits, total, (alike + 1) / (others + 2))
    if chance > CHANCE:
        return []
    line = (
        f"{hits:,} of {plural(total, 'step')} that are decided wrongly have the count of accepted drafts and the final "
        f"token of their request's step before, {alike:,} of {others:,} others have"
    )
    return [Suspect(Cause.VERDICT_LATE, Proof.ROWS, (line,), example=check.example, chance=chance)]


def other_counts(case: Case, check: Finding) -> list[Suspect]:
    """How many drafts each wrong step committed, against how many its figures accept: another request's, or one off."""
    c = case.evidence
    due, committed = judged_right(c), c.depth_reached
    steps = np.unique(c.step[check.wrong]) if check.unit == "node" else check.wrong
    steps = steps[due[steps] != committed[steps]]
    if not len(steps):
        return []
    by_record = defaultdict[int, list[int]](list)
    for step, visit in enumerate(c.visits):
        if len(visit.part.tree):
            by_record[visit.record.step].append(step)
    others = alone = 0
    for step in steps.tolist():
        batch = [other for other in by_record[c.visits[step].record.step] if other != step]
        alone += not batch
        others += any(due[other] == committed[step] for other in batch)
    example = c.at_step(int(steps[0]))
    total = plural(int(c.told.sum()), "step")
    line = f"the committed path is not as long as what was judged right in {len(steps):,} of {total}"
    if others == len(steps) and not alone and _as_long_by_chance(c, due, steps, by_record) < CHANCE:
        lines = (line, f"it is as long as another request's of the same batch in {others:,} of these")
        if swapped := _with_its_final(c, due, steps, by_record):
            more = f"and the final token is what that request's own target chooses in {swapped:,}"
            return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, (*lines, more), example=example)]
        return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, lines, example=example)]
    off = Counter((committed[steps] - due[steps]).tolist())
    by, count = off.most_common(1)[0]
    if count == len(steps) and len(steps) >= ENOUGH and _is_a_count(c, due, steps, by):
        lines = (line, f"it is {abs(by)} {'longer' if by > 0 else 'shorter'} in {count:,} of these")
        return [Suspect(Cause.ACCEPTED_COUNT, Proof.ROWS, lines, example=example)]
    if check.name == "paths":
        return [Suspect(Cause.ACCEPTED_COUNT, Proof.CONDITION, (line,), example=example)]
    return []


def _with_its_final(c: Columns, due: Indices, steps: Indices, by_record: dict[int, list[int]]) -> int:
    """In how many of these steps the final token too is another request's; 0 unless it is in most."""
    ends = {}  # by step: the target's choice where the path that was judged right ends, where the evidence has it
    for step in range(len(c)):
        node = next(
            (n for n in range(c.start[step], c.start[step + 1]) if c.depth[n] == due[step] and c.p[n] == 1), None
        )
        row = c.root_row[step] if node is None else c.own_row[node]
        parent = int(c.parents.at_row[row])
        if parent >= 0 and (node is not None or due[step] == 0) and c.final[step] != NO_TOKEN:
            ends[step] = int(c.parents.choice[parent])
    known = hits = 0
    for step in steps.tolist():
        others = [ends[other] for other in by_record[c.visits[step].record.step] if other != step and other in ends]
        if others and ends.get(step) not in others:
            known, hits = known + 1, hits + (int(c.final[step]) in others)
    return hits if known >= ENOUGH and hits > 0.6 * known else 0


def _is_a_count(c: Columns, due: Indices, steps: Indices, by: int) -> bool:
    """Whether paths that are all off by `by` show a wrong count, and not decisions that are wrong one by one.

    A wrongly accepted draft is often followed by a right one, so that paths would be longer by more than `by`. A wrong
    rejection always ends the path: then nearly all paths that could be shorter must be.
    """
    drafts = int((np.diff(c.start) > 0).sum())
    if by > 0:
        goes_on = float(due.sum()) / max(drafts + float(due.sum()), 1.0)
        return bool((1 - goes_on) ** len(steps) < 1e-3)
    return len(steps) > 0.9 * int((due >= -by).sum())


def judged_right(c: Columns) -> Indices:
    """[S] how many drafts in a row, from the root down, each step's own figures accept."""
    greedy = c.greedy[c.step]
    q = np.where(c.sampled & ~c.match[c.step], c.q, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = (c.sibling == 0) & (q > 0) & (c.coin < c.p / q)  # known for untried nodes too
    by_coin = np.where(c.tried, c.coin < c.accept_prob, first)
    fits: Bools = np.where(greedy, c.p == 1, np.where(c.coin > 0, by_coin, c.accepted))
    reached = fits.copy()
    for depth in range(2, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        reached[nodes] &= reached[c.above[nodes]]
    due = np.zeros(len(c), np.int64)
    np.maximum.at(due, c.step[reached], c.depth[reached])
    return due


def _as_long_by_chance(c: Columns, due: Indices, steps: Indices, by_record: dict[int, list[int]]) -> float:
    """How often wrong counts would all be another request's by chance, each being any count that its tree allows."""
    chance = 1.0
    for step in steps.tolist():
        batch = by_record[c.visits[step].record.step]
        others = {int(due[other]) for other in batch if other != step} - {int(due[step])}
        chance *= min(1.0, len(others) / max(c.visits[step].part.tree.max_depth, 1))
    return chance


def trial_order(case: Case, check: Finding) -> list[Suspect]:
    """Siblings that were tried out of turn, or not at all."""
    c = case.evidence
    rows = np.unique(c.row[check.wrong])
    skipped = backwards = 0
    for row in rows.tolist():
        children = np.flatnonzero(c.row == row)
        tried = c.tried[children]
        skipped += not c.accepted[children].any() and not tried.all()
        backwards += bool(tried[len(tried) - int(tried.sum()) :].all()) and not tried.all()
    lines = [f"siblings were tried out of turn, or not at all, below {plural(len(rows), 'parent')} ({counted(check)})"]
    if skipped > len(rows) / 2:
        lines.append(f"below {skipped:,} of these some were never tried, though none was accepted")
    elif backwards == len(rows):
        lines.append("the last ones were tried first below all of these")
    return [Suspect(Cause.TRIAL_ORDER, Proof.ROWS, tuple(lines), example=check.example)]


def later_p(case: Case, check: Finding) -> list[Suspect]:
    """p at the second and later siblings, which does not follow from what was rejected before them."""
    c, wrong = case.evidence, check.wrong
    expected, _ = residual_p(c)
    masses = np.array([_masses(c, node) for node in wrong.tolist()])
    plain = int((np.abs(c.p_trial[wrong] - expected[wrong] * masses) <= CLOSE).sum())
    same = int((np.abs(c.p_trial[wrong] - c.p[wrong]) <= CLOSE).sum())
    lines = [f"p of later siblings does not follow from the earlier ones at {counted(check)}"]
    if plain > MOSTLY * len(wrong) and plain >= same:
        lines.append(f"it is max(p - q, 0) without division by its mass at {plain:,} of these")
    elif same > MOSTLY * len(wrong):
        lines.append(f"it is the first p, as if nothing had been subtracted, at {same:,} of these")
    return [Suspect(Cause.RESIDUAL, Proof.ROWS, tuple(lines), example=check.example)]


def _masses(c: Columns, node: int) -> float:
    """What a node's p is divided by: the product of the masses that its elder siblings left."""
    product = 1.0
    while (node := int(c.elder[node])) >= 0:
        product *= float(c.residual_mass[node]) or 1.0
    return product


def masses(case: Case, check: Finding) -> list[Suspect]:
    """Masses of residuals that p and q do not allow."""
    line = f"the mass of the residual is not what p and q leave at {counted(check)}"
    return [Suspect(Cause.RESIDUAL, Proof.ROWS, (line,), example=check.example)]


def trial_q(case: Case, check: Finding) -> list[Suspect]:
    """q as tried is not q as drawn, over what earlier siblings left of it."""
    c = case.evidence
    causes, examples = Counter[Cause](), dict[Cause, Reference]()
    seen: set[int] = set()
    for node in check.wrong.tolist():
        row = int(c.row[node])
        if row not in seen:  # the first wrong child of a parent: the others follow from it
            seen.add(row)
            cause = _which_q(c, node)
            causes[cause] += 1
            examples.setdefault(cause, c.at_node(node))
    cause, count = causes.most_common(1)[0]
    about = {
        Cause.SIBLINGS_CHANGED: "it is the q of another sibling",
        Cause.RESIDUAL: "it is q as drawn, without division by what was left",
        Cause.Q_OTHER_ROW: "it is the q of no sibling, and not 1 where the draft is deterministic",
    }
    lines = (
        f"q as tried does not follow from q as drawn below {plural(len(seen), 'parent')} ({counted(check)})",
        f"{about[cause]} at {count:,} of these",
    )
    return [Suspect(cause, Proof.ROWS, lines, example=examples[cause])]  # a wrong residual follows from it


def _which_q(c: Columns, node: int) -> Cause:
    tried, left = float(c.q_trial[node]), max(float(c.q_left[node]), 1e-12)
    if not c.sampled[node]:
        return Cause.Q_OTHER_ROW
    if left < 1 - CLOSE and abs(tried - float(c.q[node])) <= CLOSE:
        return Cause.RESIDUAL
    others = np.flatnonzero((c.row == c.row[node]) & (np.arange(len(c.row)) != node))
    swapped = bool((np.abs(tried * left - c.q[others]) <= CLOSE).any())
    return Cause.SIBLINGS_CHANGED if swapped else Cause.Q_OTHER_ROW


def final_tokens(case: Case, check: Finding) -> list[Suspect]:
    """Final tokens that were rejected just before, or that had no probability in what was left of p.

    Drawn from p, a rejected token comes out with probability p; drawn from q, with probability q. The one that better
    predicts how often it happened is named.
    """
    c, steps = case.evidence, check.wrong
    at_end = c.rejected & (c.row == c.final_row[c.step]) & ~c.greedy[c.step]
    again = at_end & (c.token == c.final[c.step]) & c.named
    count, recovered = len(np.unique(c.step[again])), _recovered(c)
    if count or recovered[steps].all():
        by_p, by_q = float(c.p[at_end].sum()), float(c.q[at_end & c.sampled].sum())
        against_p = _against_p(c)
        is_far = against_p.judged and against_p.p_value < CHANCE
        lines = [f"after a rejection the final token has no place in what is left of p in {counted(check)}"]
        if is_far:
            lines.append(f"nor does it follow p: off by {nats(against_p.bias)}, z = {against_p.z:.1f}")
        if count:
            expected = f"drawn from p that comes in {by_p:.1f} steps, from q in {by_q:.1f}"
            lines.append(f"it had just been rejected in {plural(count, 'step')}: {expected}")
        return [Suspect(Cause.FINAL_NOT_RESIDUAL, Proof.ROWS, tuple(lines), example=check.example)]
    line = f"the final token had no probability in {counted(check)}"
    return [Suspect(Cause.FINAL_OTHER_NODE, Proof.CONDITION, (line,), example=check.example)]


def _against_p(c: Columns) -> Sum:
    """The surprisal in p of the tokens behind a rejection, against what it is had they been drawn from p."""
    e = c.parents
    parent = e.at_row[c.final_row]
    steps = np.flatnonzero(_recovered(c) & c.told & e.there & ~c.forced_final & ~c.greedy & (parent >= 0))
    return surprisal(e.final_p[steps], e.entropy[parent[steps]], e.varentropy[parent[steps]], steps)


def final_shares(case: Case, check: Finding) -> list[Suspect]:
    """Final tokens that were not drawn with their p, over the mass that rejections left."""
    c, steps = case.evidence, check.wrong
    recovered, suspects = _recovered(c)[steps], list[Suspect]()
    tokens = case.checks["final tokens"]
    no_place = np.isin(steps, tokens.wrong)  # nothing was left of their p: it does not show how they were drawn
    if no_place.any():
        suspects += final_tokens(case, tokens)
        steps, recovered = steps[~no_place], recovered[~no_place]
    if (~recovered).any():
        line = (
            "the final token was not drawn with its p behind the last accepted node in "
            f"{int((~recovered).sum()):,} of {plural(check.tested, 'draw')}"
        )
        example = c.at_step(int(steps[~recovered][0]))
        suspects.append(
            Suspect(Cause.FINAL_OTHER_NODE, Proof.ROWS, (line,), example=example, explained=int((~recovered).sum()))
        )
    if recovered.any():
        whole = of_all_p(c)[steps] & recovered
        of_all = whole.sum() > 0.5 * recovered.sum()
        about = (
            "its whole p, as if nothing had been rejected" if of_all else "another probability than the residual of p"
        )
        line = (
            f"after a rejection the final token was drawn with {about}, in {int(recovered.sum()):,} of "
            f"{plural(check.tested, 'draw')}"
        )
        example = c.at_step(int(steps[recovered][0]))
        count = int(recovered.sum())
        suspects.append(Suspect(Cause.FINAL_NOT_RESIDUAL, Proof.ROWS, (line,), example=example, explained=count))
    return suspects


def greedy_tokens(case: Case, check: Finding) -> list[Suspect]:
    """Greedy steps whose final token is not the target's choice, or whose p are not 0 and 1."""
    c, steps = case.evidence, check.wrong
    if c.any_in_step(~np.isin(c.p, (0, 1)))[steps].sum() > 0.5 * len(steps):
        line = f"at temperature 0 p is neither 0 nor 1 in {counted(check)}"
        return [Suspect(Cause.RULES_WRONG, Proof.CONDITION, (line,), example=check.example)]
    line = f"the final token is not the target's first choice in {counted(check)}"
    return [Suspect(Cause.FINAL_OTHER_NODE, Proof.ROWS, (line,), example=check.example)]


def _recovered(c: Columns) -> Bools:
    return c.children_at(c.rejected)[c.final_row] if len(c.token) else np.zeros(len(c), np.bool_)


def parameters(case: Case, check: Finding) -> list[Suspect]:
    """p that the sampling parameters cannot give: everywhere, or only below the root's children."""
    c = case.evidence
    depths = c.depth[check.wrong]
    at_root = bool((depths == 1).any())
    where = "" if at_root else ", all of them below the root's children"
    line = f"{check.name}: p is not what the sampling parameters give at {counted(check)}{where}"
    return [Suspect(Cause.RULES_WRONG, Proof.CONDITION, (line,), example=check.example)]


def probabilities(case: Case, check: Finding) -> list[Suspect]:
    """Figures that no probability can have."""
    line = f"figures are not numbers, or lie outside 0 to 1, in {counted(check)}: {check.detail}"
    return [Suspect(Cause.NOT_A_NUMBER, Proof.ROWS, (line,), example=check.example)]


def other_rule(case: Case, check: Finding) -> list[Suspect]:
    """Steps under another rule than the run's."""
    return [Suspect(Cause.OTHER_RULE, Proof.ROWS, (f"{counted(check)}: {check.detail}",), example=check.example)]


def counted(check: Finding) -> str:
    """`3 of 41 steps`."""
    return f"{check.failed:,} of {plural(check.tested, check.unit)}"
