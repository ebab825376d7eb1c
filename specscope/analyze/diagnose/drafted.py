"""What lies behind failed checks of the drafts: their place, their plan, their q, and what fed their drafter."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Proof, Suspect
from specscope.analyze.diagnose.verdicts import MOSTLY, counted
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.chance import drafted
from specscope.analyze.verify.drafts import most_cached
from specscope.analyze.verify.parameters import q_bounds
from specscope.analyze.verify.parents import NATS
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Preceded
from specscope.trace.record.tree import Bools, Doubles

GRID = np.exp(np.linspace(math.log(0.2), math.log(5.0), 322))  # temperatures, 1 % apart
FAR_MORE = "the drafter counts far more tokens as cached than it was fed"
MOST = 2000  # nodes whose q is looked at


def in_place(case: Case, check: Finding) -> list[Suspect]:
    """Drafts that are right, but at another place than their own."""
    z = check.statistic or 0.0
    lines = (check.detail, f"{z:.0f} standard errors apart")
    return [Suspect(Cause.DRAFT_POSITION, Proof.CONDITION, lines, example=check.example, explained=check.failed)]


def placeholders(case: Case, check: Finding) -> list[Suspect]:
    """One token that is drafted over and over, by no drafter's choice."""
    return [Suspect(Cause.DRAFT_PLACEHOLDERS, Proof.ROWS, (check.detail,), example=check.example)]


def outside_vocabulary(case: Case, check: Finding) -> list[Suspect]:
    """Tokens that the drafter does not know: a wrong map, or padding where it is one token over and over."""
    c = case.evidence
    token, count = Counter(c.token[check.wrong].tolist()).most_common(1)[0]
    lines = [f"{counted(check)} hold tokens that the drafter does not know"]
    if count > MOSTLY * check.failed and check.failed > 2:
        lines.append(f"token {token} at {count:,} of these")
        return [Suspect(Cause.DRAFT_PLACEHOLDERS, Proof.ROWS, tuple(lines), example=check.example)]
    return [Suspect(Cause.DRAFT_VOCABULARY, Proof.ROWS, tuple(lines), example=check.example)]


def planned(case: Case, check: Finding) -> list[Suspect]:
    """Trees that were to be sampled and were not, or that lack nodes of the plan."""
    c = case.evidence
    drawn = c.any_in_step(c.sampled)
    lost, pruned = check.wrong[~drawn[check.wrong]], check.wrong[drawn[check.wrong]]
    suspects = []
    if len(lost):
        line = f"the tree is to be sampled, but is recorded as deterministic in {len(lost):,} of "
        line += plural(check.tested, "step")
        suspects.append(
            Suspect(Cause.Q_DROPPED, Proof.ROWS, (line,), example=c.at_step(int(lost[0])), explained=len(lost))
        )
    if len(pruned):
        run = case.history.run
        line = f"{len(pruned):,} of {check.tested:,} sampled trees lack nodes of the plan "
        line += f"{'' if run is None else run.tree}, though q had tokens left"
        example = c.at_step(int(pruned[0]))
        suspects.append(Suspect(Cause.SIBLINGS_CHANGED, Proof.ROWS, (line,), example=example, explained=len(pruned)))
    return suspects


def likeliest_first(case: Case, check: Finding) -> list[Suspect]:
    """First children that are not their drafter's likeliest tokens: cut off, or drawn and recorded as deterministic."""
    c = case.evidence
    if cut := _first_tokens(c, check):
        return [cut]
    sampled = ~c.greedy[c.step[check.wrong]]
    line = f"the first child is not the drafter's likeliest token at {counted(check)}"
    if sampled.mean() > MOSTLY:
        return [Suspect(Cause.Q_DROPPED, Proof.CONDITION, (line,), example=check.example)]
    return []


def _first_tokens(c: Columns, check: Finding) -> Suspect | None:
    """Whether only the first tokens are drafted, and wherever a draft is wrong the likeliest token lies beyond them."""
    e = c.parents
    parent = e.at_node
    firsts = ~c.sampled & (c.sibling == 0) & (parent >= 0)
    known = int(c.token.max(initial=-1)) + 1
    beyond = e.draft_top[parent, 0] >= known
    wrong = np.isin(np.arange(len(c.token)), check.wrong)
    others = int((beyond & firsts & ~wrong).sum())  # but for near ties
    if not beyond[wrong].all() or others > 0.01 * check.tested or check.failed < 5:
        return None
    line = (
        f"only the first {known:,} tokens are drafted, and the likeliest lies beyond them at all {check.failed:,} "
        f"{check.unit}s where another was taken, at {others:,} of {check.tested - check.failed:,} others"
    )
    return Suspect(Cause.DRAFT_VOCABULARY, Proof.ROWS, (line,), example=check.example)


def sorted_siblings(case: Case, check: Finding) -> list[Suspect]:
    """Siblings drawn without replacement that are in falling order of q more often than chance puts them so."""
    more = (check.bias or 0.0) > 0
    lines = (f"of two siblings the likelier one comes first {'more' if more else 'less'} often: {check.detail}",)
    proof = Proof.ROWS if more and _all_falling(case.evidence) else Proof.SUM
    return [Suspect(Cause.SIBLINGS_CHANGED, proof, lines, example=check.example)]


def _all_falling(c: Columns) -> bool:
    nodes = np.flatnonzero((c.elder >= 0) & c.sampled)
    return bool((c.q[c.elder[nodes]] >= c.q[nodes]).all())


def fed_features(case: Case, check: Finding) -> list[Suspect]:
    """Rows that fed the head: zeros, normalised, or those of another position."""
    line = f"{check.detail}, and so with {counted(check)} that fed the head"
    return [Suspect(Cause.DRAFTER_FED, Proof.ROWS, (line,), example=check.example)]


def drafters_cache(case: Case, check: Finding) -> list[Suspect]:
    """A draft model that counts tokens as cached that it was not fed: how many too many, and after what."""
    c = case.evidence
    limit = most_cached(c)
    cached = np.array([-1 if visit.part.notes is None else visit.part.notes.cached for visit in c.visits], np.int64)
    batch: dict[int, list[int]] = {}
    for step, visit in enumerate(c.visits):
        batch.setdefault(visit.record.step, []).append(int(limit[step]))
    others = sum(int(cached[step]) in batch[c.visits[step].record.step] for step in check.wrong.tolist())
    if others > MOSTLY * check.failed and check.failed > 2:
        line = f"{others:,} of the {check.failed:,} caches that are wrong are as long as another request's of that step"
        return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, (line,), example=check.example)]
    kinds = Counter(_which_cache(c, step, int(cached[step] - limit[step])) for step in check.wrong.tolist())
    about, count = kinds.most_common(1)[0]
    line = f"{about} in {count:,} of the {check.failed:,} steps in which it is wrong, of {check.tested:,}"
    if about == FAR_MORE:
        return [Suspect(Cause.ROWS_SWAPPED, Proof.CONDITION, (line,), example=check.example, explained=count)]
    return [Suspect(Cause.DRAFTER_KV, Proof.ROWS, (line,), example=check.example, explained=count)]


def _which_cache(c: Columns, step: int, excess: int) -> str:
    """What it counts as cached that it was not fed."""
    part, before = c.visits[step].part, c.visits[step].before
    if part.preceded is Preceded.PREEMPTION:
        return "the drafter counts tokens as cached right after a preemption"
    if part.preceded is Preceded.PREFILL:
        return "the drafter counts tokens as cached before any pass fed it"
    if part.preceded is Preceded.FULL and excess == 1:
        return "the drafter counts the last accepted token as cached, though no pass fed it"
    drafted = 0 if before is None else len(before.tree)
    return "the drafter counts tokens as cached that were rejected" if excess <= drafted else FAR_MORE


def other_q(case: Case, check: Finding) -> list[Suspect]:
    """q that does not follow from the drafter's raw probability at its own parent.

    Another row is tried first: of the same step, or of the request's step before. Then one temperature that explains
    the nodes; the suspect says how many it explains.
    """
    c = case.evidence
    nodes = check.wrong[:: max(1, len(check.wrong) // MOST)][:MOST]
    elsewhere, known = _of_another_row(c, nodes)
    if known >= 3 and elsewhere > MOSTLY * known:
        lines = (
            f"q does not follow from the drafter's probability at its own place at {counted(check)}",
            f"it follows from that at another row of the same step, or of the step before, at {elsewhere:,} of "
            f"{known:,} where one lists the token",
        )
        return [Suspect(Cause.Q_OTHER_ROW, Proof.ROWS, lines, example=check.example)]
    temperature, fits = _one_temperature(c, nodes)
    if fits < MOSTLY * len(nodes):
        return []
    wanted = float(np.median(c.parameter("temperature")[nodes]))
    line = (
        f"q is the drafter's at temperature {temperature:.2g}, the requests' is {wanted:g}: so at {fits:,} of "
        f"{plural(len(nodes), 'node')} whose q does not follow from the requests' temperature"
    )
    explained = round(check.failed * fits / len(nodes))
    return [Suspect(Cause.Q_TEMPERATURE, Proof.ROWS, (line,), example=check.example, explained=explained)]


def other_draws(case: Case, check: Finding) -> list[Suspect]:
    """Sampled drafts that do not follow their q: its likeliest tokens, or drawn from another distribution."""
    c, (draws, _) = case.evidence, drafted(case.evidence)
    likeliest = draws.likeliest
    assert likeliest is not None
    always = likeliest.hits == likeliest.count
    if (c.sibling > 0).any() and not always:  # siblings that are sorted, pruned or swapped are another matter
        return []
    side = "likelier" if draws.bias < 0 else "less likely"
    line = f"drafts are {side} than draws from their q: {check.detail}"
    if not always and draws.bias < 0 and (more := _drawn_within_top_k(c)):
        return [
            Suspect(Cause.Q_TEMPERATURE, Proof.CONDITION, (line, more), example=check.example, chance=check.p_value)
        ]
    if draws.takes_likeliest:
        lines, proof = (likeliest.words,), Proof.ROWS if always else Proof.SUM
        return [Suspect(Cause.Q_NOT_DRAWN, proof, lines, example=check.example, chance=likeliest.p_value)]
    return [Suspect(Cause.Q_TEMPERATURE, Proof.SUM, (line,), example=check.example, chance=check.p_value)]


def _drawn_within_top_k(c: Columns) -> str:
    """Where q has more tokens than top-k leaves, and none of them is drafted, that in a line; else ""."""
    e = c.parents
    top_k = np.array([params.top_k for params in c.params], np.int64)
    tested = (e.q_entropy > 0) & (top_k[e.step] > 0)
    # No k tokens have a larger entropy than log k
    wide = int((tested & (e.q_entropy > np.log(np.maximum(top_k[e.step], 1)) + NATS)).sum())
    beyond = (e.q_rank > top_k[c.step]) & (top_k[c.step] > 0)
    if wide <= 0.1 * tested.sum() or beyond.any():
        return ""
    return f"q has more tokens than top-k leaves at {wide:,} of {plural(int(tested.sum()), 'parent')}; none is drafted"


def _one_temperature(c: Columns, nodes: Indices) -> tuple[float, int]:
    """The one temperature that gives the most of these nodes their q, and how many that is."""
    best, count = 1.0, -1
    for temperature in GRID.tolist():
        fits = int(_within(c, nodes, temperature).sum())
        if fits > count:
            best, count = temperature, fits
    return best, count


def _within(c: Columns, nodes: Indices, temperature: float) -> Bools:
    """Which nodes' q follow from their drafter's likeliest tokens at a temperature, 1 % to either side."""
    inside, parent = np.zeros(len(nodes), np.bool_), c.parents.at_node[nodes]
    for near in (temperature * 0.99, temperature, temperature * 1.01):
        low, high = q_bounds(c, parent, c.token[nodes], np.full(len(nodes), near), nodes)
        inside |= _between(c.q[nodes], low, high)
    return inside


def _between(q: Doubles | float, low: Doubles, high: Doubles) -> Bools:
    """Where q lies between bounds that are near each other: wide bounds would fit any q."""
    return np.asarray((high < 2 * low) & (q >= low * (1 - 2e-3)) & (q <= high * (1 + 2e-3)))


def _of_another_row(c: Columns, nodes: Indices) -> tuple[int, int]:
    """At how many nodes q is what another parent gives the token, out of those where another parent lists it."""
    e, temperature = c.parents, c.parameter("temperature")
    record = np.array([visit.record.step for visit in c.visits], np.int64)
    by_record: dict[int, list[int]] = {}
    for parent in range(len(e)):
        by_record.setdefault(int(record[e.step[parent]]), []).append(parent)
    before = _steps_before(c)
    fits = known = 0
    for node in nodes.tolist():
        step = int(c.step[node])
        others = [*by_record.get(int(record[step]), ())]
        if before[step] >= 0:
            others += by_record.get(int(record[before[step]]), [])
        parents = np.array([other for other in others if other != e.at_node[node]], np.int64)
        token = np.full(len(parents), c.token[node])
        listed = parents[np.isfinite(e.drafters(parents, token))] if len(parents) else parents
        if not len(listed):
            continue
        known += 1
        warm = np.full(len(listed), temperature[node])
        low, high = q_bounds(c, listed, token[: len(listed)], warm, np.full(len(listed), node))
        fits += bool(_between(c.q[node], low, high).any())
    return fits, known


def _steps_before(c: Columns) -> Indices:
    """[S] the request's previous decode step, -1 for none."""
    last: dict[str, int] = {}
    before = np.full(len(c), -1, np.int64)
    for step, visit in enumerate(c.visits):
        before[step] = last.get(visit.request.id, -1)
        last[visit.request.id] = step
    return before
