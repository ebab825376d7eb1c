"""Checks of drafts behind which one of several causes may lie: their plan, their vocabulary, their q, their cache."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from specscope.analyze.audit.lookup import SIZES, Rule, lookup, recorded_paths, told_rules
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import MOSTLY, Suspect, said
from specscope.analyze.evidence.arrays import Indices, numbers
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding
from specscope.analyze.locate.located import Proof
from specscope.analyze.verify.case import Case, Step
from specscope.analyze.verify.chance import drafted
from specscope.analyze.verify.drafts import most_cached
from specscope.analyze.verify.parameters import q_bounds
from specscope.analyze.verify.parents import NATS
from specscope.plans.plan import StaticPlan
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Preceded
from specscope.trace.record.tree import ROOT, Bools, Doubles

GRID = np.exp(np.linspace(math.log(0.2), math.log(5.0), 322))  # temperatures, 1 % apart
MOST = 2000  # nodes whose q is looked at
SHIFTS = (1, -1, 2, -2, 3)
LOOKED_UP = 2000  # steps that are looked up again
FOR_RULE = 100  # of them, from which the rule is found
EXPLAINED = 8  # drafted tokens that a mistake must explain
Drafted = list[tuple[Step, frozenset[tuple[int, ...]]]]  # steps with the paths of their tree


def outside_vocabulary(case: Case, check: Finding) -> list[Suspect]:
    """Tokens that the drafter does not know: a wrong map, or padding where it is one token over and over."""
    token, count = Counter(case.evidence.token[check.wrong].tolist()).most_common(1)[0]
    if count > MOSTLY * check.failed and check.failed > 2:
        return [said(check, Cause.DRAFT_PLACEHOLDERS, Proof.ROWS, f"token {token} at {count:,} of these")]
    return [said(check, Cause.DRAFT_VOCABULARY)]


def planned(case: Case, check: Finding) -> list[Suspect]:
    """Trees that were to be sampled and were not, or that lack nodes of the plan."""
    c, tested, suspects = case.evidence, plural(check.tested, "step"), list[Suspect]()
    drawn = c.any_in_step(c.sampled)[check.wrong]
    for cause, steps, what in (
        (Cause.Q_DROPPED, check.wrong[~drawn], "trees that should be sampled are recorded as deterministic"),
        (Cause.SIBLINGS_CHANGED, check.wrong[drawn], "sampled trees lack nodes of the plan"),
    ):
        line = f"{what} in {len(steps):,} of {tested}"
        suspects += [Suspect(cause, Proof.ROWS, (line,), c.at_step(int(step)), len(steps)) for step in steps[:1]]
    return suspects


def likeliest_first(case: Case, check: Finding) -> list[Suspect]:
    """First children that are not their drafter's likeliest tokens: cut off, or drawn and recorded as deterministic.

    They are cut off where only the first tokens are drafted, and the likeliest lies beyond them wherever a draft is
    wrong, and but for near ties nowhere else.
    """
    c, e = case.evidence, case.evidence.parents
    known = int(c.token.max(initial=-1)) + 1
    beyond = e.draft_top[e.at_node, 0] >= known
    firsts = ~c.sampled & (c.sibling == 0) & (e.at_node >= 0)
    others = int((beyond & firsts).sum()) - check.failed
    if beyond[check.wrong].all() and others <= 0.01 * check.tested and check.failed >= 5:
        return [said(check, Cause.DRAFT_VOCABULARY, Proof.ROWS, f"only the first {known:,} tokens are drafted")]
    sampled = ~c.greedy[c.step[check.wrong]]
    return [said(check, Cause.Q_DROPPED, Proof.CONDITION)] if sampled.mean() > MOSTLY else []


def sorted_siblings(case: Case, check: Finding) -> list[Suspect]:
    """Siblings drawn without replacement that are in falling order of q more often than chance puts them so."""
    c = case.evidence
    nodes = np.flatnonzero((c.elder >= 0) & c.sampled)
    falling = (check.bias or 0.0) > 0 and bool((c.q[c.elder[nodes]] >= c.q[nodes]).all())
    return [said(check, Cause.SIBLINGS_CHANGED, Proof.ROWS if falling else Proof.SUM)]


def outside_intervals(case: Case, check: Finding) -> list[Suspect]:
    """Coins outside of their drafts' intervals, also where no sibling could have been moved or dropped."""
    c, wrong = case.evidence, check.wrong
    if not (np.bincount(c.row, minlength=c.rows)[c.row[wrong]] == 1).any():
        return []
    below = (c.draft_coin[wrong] < c.draft_low[wrong]).any()  # another q moves only the upper ends
    return [said(check, Cause.Q_NOT_DRAWN, Proof.CONDITION if below else Proof.SUM)]


def drafters_cache(case: Case, check: Finding) -> list[Suspect]:
    """A draft model that counts tokens as cached that it was not fed: another request's, or its own."""
    c, wrong = case.evidence, check.wrong
    limit, cached = most_cached(c), numbers(c.picked, "notes", "cached", -1)
    others = int(sum((limit[c.batch == c.batch[step]] == cached[step]).any() for step in wrong))
    if others > MOSTLY * check.failed and check.failed > 2:
        line = f"{others:,} of these are as long as another request's in that step"
        return [said(check, Cause.ROWS_SWAPPED, Proof.ROWS, line)]
    began = np.array([c.visits[step].part.preceded in (Preceded.PREEMPTION, Preceded.PREFILL) for step in wrong])
    drafted = np.array([0 if (before := c.visits[step].before) is None else len(before.tree) for step in wrong])
    far = int((~began & (cached[wrong] - limit[wrong] > np.maximum(drafted, 1))).sum())
    if far > 0.5 * check.failed:
        line = f"in {far:,} of these the drafter counts far more tokens as cached than it was fed"
        return [replace(said(check, Cause.ROWS_SWAPPED, Proof.CONDITION, line), explained=far)]
    return [said(check, Cause.DRAFTER_KV)]


def other_q(case: Case, check: Finding) -> list[Suspect]:
    """q that does not follow from the drafter's raw probability at its own parent.

    Another row is tried first: of the same step, or of the request's previous step. Then one temperature that explains
    the nodes; the suspect says how many it explains.
    """
    c = case.evidence
    nodes = check.wrong[:: max(1, len(check.wrong) // MOST)][:MOST]
    elsewhere, known = _of_another_row(c, nodes)
    if known >= 3 and elsewhere > MOSTLY * known:
        line = (
            f"it follows from that at another row of the same step, or of the step before, at {elsewhere:,} of "
            f"{known:,} where one lists the token"
        )
        return [said(check, Cause.Q_OTHER_ROW, Proof.ROWS, line)]
    # The one temperature that gives the most of these nodes their q
    fitting = {temperature: int(_within(c, nodes, temperature).sum()) for temperature in GRID.tolist()}
    temperature, fits = max(fitting.items(), key=lambda pair: pair[1])
    if fits < MOSTLY * len(nodes):
        return []
    wanted = float(np.median(c.parameter("temperature")[nodes]))
    line = (
        f"q is the drafter's at temperature {temperature:.2g}, the requests' is {wanted:g}: so at {fits:,} of "
        f"{plural(len(nodes), 'node')} whose q does not follow from the requests' temperature"
    )
    explained = round(check.failed * fits / len(nodes))
    return [Suspect(Cause.Q_TEMPERATURE, Proof.ROWS, (line,), check.example, explained)]


def other_draws(case: Case, check: Finding) -> list[Suspect]:
    """Sampled drafts that do not follow their q: its likeliest tokens, or drawn from another distribution."""
    c, (draws, _) = case.evidence, drafted(case.evidence)
    likeliest = draws.likeliest
    assert likeliest is not None
    always = likeliest.hits == likeliest.count
    if (c.sibling > 0).any() and not always:  # siblings that are sorted, pruned or swapped are another matter
        return []
    if not always and draws.bias < 0 and (more := _drawn_within_top_k(c)):
        return [replace(said(check, Cause.Q_TEMPERATURE, Proof.CONDITION, more), chance=check.p_value)]
    if draws.takes_likeliest:
        proof = Proof.ROWS if always else Proof.SUM
        return [Suspect(Cause.Q_NOT_DRAWN, proof, (likeliest.words,), check.example, chance=likeliest.p_value)]
    return [replace(said(check, Cause.Q_TEMPERATURE, Proof.SUM), chance=check.p_value)]


def _drawn_within_top_k(c: Columns) -> str:
    """Where q has more tokens than top-k leaves, and none of them is drafted, that in a line; else ""."""
    e, top_k = c.parents, np.array([params.top_k for params in c.params], np.int64)
    tested = (e.q_entropy > 0) & (top_k[e.step] > 0)
    # No k tokens have a larger entropy than log k
    wide = int((tested & (e.q_entropy > np.log(np.maximum(top_k[e.step], 1)) + NATS)).sum())
    beyond = (e.q_rank > top_k[c.step]) & (top_k[c.step] > 0)
    if wide <= 0.1 * tested.sum() or beyond.any():
        return ""
    return f"q has more tokens than top-k leaves at {wide:,} of {plural(int(tested.sum()), 'parent')}; none is drafted"


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
    e, temperature, fits = c.parents, c.parameter("temperature"), list[bool]()
    batch = c.batch[e.step]
    for node in nodes.tolist():
        step = c.step[node]
        batches = [c.batch[step], c.batch[c.before[step]] if c.before[step] >= 0 else -1]
        parents = np.flatnonzero(np.isin(batch, batches) & (np.arange(len(e)) != e.at_node[node]))
        listed = parents[np.isfinite(e.drafters(parents, np.full(len(parents), c.token[node])))]
        token, warm, place = (np.full(len(listed), x) for x in (c.token[node], temperature[node], node))
        if len(listed):
            fits.append(bool(_between(c.q[node], *q_bounds(c, listed, token, warm, place)).any()))
    return sum(fits), len(fits)


def shifted_lookup(case: Case) -> list[Suspect]:
    """Trees that are what the text gives at another place: the continuation is taken too late or too early."""
    run, plan = case.history.run, case.plan
    if run is None or run.drafter != "ngram" or not isinstance(plan, StaticPlan):
        return []
    depth, width = plan.max_depth, len(plan.shape.children(ROOT))
    every = [(step, frozenset(recorded_paths(step.tree))) for step in case.drafting if step.after > 0]
    every = every[:: max(1, len(every) // LOOKED_UP)]

    def fits(drafted: Drafted, rule: Rule, shift: int) -> Drafted:
        """Steps whose tree is what the text gives; with a shift, the end may be missing."""
        found = [frozenset(lookup(step.text[: step.after], depth, width, rule, shift)) for step, _ in drafted]
        pairs = zip(drafted, found, strict=True)
        return [
            one for one, paths in pairs if (bool(one[1]) and one[1] <= paths if shift else rule.agrees(one[1], paths))
        ]

    def nodes(drafted: Drafted) -> int:
        return sum(len(step.tree) for step, _ in drafted)

    rules = told_rules(run.speculation) or tuple(Rule(*sizes) for sizes in SIZES)
    few = every[:: max(1, len(every) // FOR_RULE)]
    right = max(rules, key=lambda rule: len(fits(few, rule, 0)))
    alike = {step.key for step, _ in fits(every, right, 0)}
    wrong = [(step, paths) for step, paths in every if step.key not in alike]
    tried = [(fits(wrong, rule, shift), shift) for shift in SHIFTS for rule in rules]
    explained, shift = max(tried, key=lambda one: nodes(one[0]))
    if len(explained) <= 0.8 * len(wrong) or nodes(explained) < EXPLAINED:
        return []
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    line = (
        f"If prompt lookup continues {late}, it gives the recorded tree in {len(explained):,} of the {len(wrong):,} "
        f"steps where correct lookup does not ({len(every):,} steps checked)."
    )
    if len(explained) == len(every):
        line = f"{line.partition(', it')[0]}, it gives the recorded tree in all {len(every):,} steps checked."
        line += " Correct lookup never does."
    example = explained[0][0].reference()
    return [Suspect(Cause.DRAFT_POSITION, Proof.ROWS, (line,), example, len(explained), len(wrong), rerun=True)]
