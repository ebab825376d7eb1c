"""From a check of verify that failed to its cause; functions of EXPLAINS tell apart causes that fail the same check."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from specscope.analyze.audit.lookup import SIZES, Rule, lookup, recorded_paths, told_rules
from specscope.analyze.diagnose.causes import LOGPROBS, Cause
from specscope.analyze.diagnose.diagnosis import CHANCE, LOG_CHANCE, MOSTLY, Suspect, counted, said
from specscope.analyze.evidence.arrays import Indices, numbers
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit
from specscope.analyze.findings import Finding
from specscope.analyze.locate.located import Proof
from specscope.analyze.significance import tail_of_binomial
from specscope.analyze.verify.chance import drafted
from specscope.analyze.verify.drafts import most_cached
from specscope.analyze.verify.exact import BEFORE, CoinsOf
from specscope.analyze.verify.parents import NATS, q_bounds
from specscope.analyze.verify.trial import Case, Step
from specscope.plans.plan import StaticPlan
from specscope.trace.history.wording import plural
from specscope.trace.record.records import Preceded
from specscope.trace.record.tree import ROOT, Bools

CLOSE = 1e-4  # of a probability that was recorded in float32
ENOUGH = 3  # wrong places: fewer show no pattern
LOOKED_AT = 4000  # steps whose coins are computed again
CACHED = "tokens in the cache"
GRID = np.exp(np.linspace(math.log(0.2), math.log(5.0), 322))  # temperatures, 1 % apart
MOST = 2000  # nodes whose q is looked at
SHIFTS = (1, -1, 2, -2, 3)
LOOKED_UP = 2000  # steps that are looked up again
FOR_RULE = 100  # of them, from which the rule is found
EXPLAINED = 8  # drafted tokens that a mistake must explain
Drafted = list[tuple[Step, frozenset[tuple[int, ...]]]]  # steps with the paths of their tree
SHOWS: Mapping[str, tuple[Cause, Proof]] = {
    "probabilities": (Cause.NOT_A_NUMBER, Proof.ROWS),
    "rule of verification": (Cause.OTHER_RULE, Proof.ROWS),
    "accept probability": (Cause.RATIO_TEST, Proof.ROWS),
    "trial order": (Cause.TRIAL_ORDER, Proof.ROWS),
    "p at later trials": (Cause.RESIDUAL_NOT_RENORMALISED, Proof.ROWS),
    "residual mass": (Cause.RESIDUAL_NOT_RENORMALISED, Proof.ROWS),
    **dict.fromkeys(("top-k", "min-p", "top-p", "temperature and penalties"), (Cause.RULES_WRONG, Proof.CONDITION)),
    "drafts in place": (Cause.DRAFT_POSITION, Proof.CONDITION),
    "placeholders": (Cause.DRAFT_PLACEHOLDERS, Proof.ROWS),
    "features fed": (Cause.DRAFTER_FED, Proof.ROWS),
    "accepted KV moved": (Cause.TARGET_KV, Proof.ROWS),
    LOGPROBS: (Cause.LOGPROBS, Proof.ROWS),
    **dict.fromkeys(("blocks written", "blocks kept"), (Cause.BLOCKS_SHARED, Proof.ROWS)),
    **dict.fromkeys(("coins unequal", "coins over steps", "coins of requests"), (Cause.COINS, Proof.ROWS)),
    **dict.fromkeys(("recovered draws", "coins and draws"), (Cause.COINS, Proof.SUM)),
    "acceptance": (Cause.RATIO_TEST, Proof.SUM),
}


def named(case: Case, check: Finding) -> Iterator[Suspect]:
    """The causes that a failed check shows, with the share of it that each explains; none where it shows none."""
    shows = [said(check, *SHOWS[check.name])] if check.name in SHOWS else []
    for suspect in EXPLAINS[check.name](case, check) if check.name in EXPLAINS else shows:
        explained = suspect.explained or check.failed
        share = min(explained / check.failed, 1.0) if check.failed else 1.0
        yield replace(suspect, explained=explained, of=check.failed, explains={check.name: share})


# What was decided


def decided(case: Case, check: Finding) -> list[Suspect]:
    """Accepted where the coin is not below a, or the other way round: a late verdict, a wrong count, another test."""
    return _of_the_step_before(case, check) or other_counts(case, check) or [said(check, Cause.RATIO_TEST)]


def _of_the_step_before(case: Case, check: Finding) -> list[Suspect]:
    """Wrong steps with the count and the final token of their request's step before, more often than other steps."""
    c = case.evidence
    wrong, known = np.isin(np.arange(len(c)), c.step[check.wrong]), c.before >= 0
    same = known & (c.depth_reached == c.depth_reached[c.before]) & (c.final == c.final[c.before])
    hits, total, alike, others = (int(x.sum()) for x in (same & wrong, known & wrong, same & ~wrong, known & ~wrong))
    chance = tail_of_binomial(hits, total, (alike + 1) / (others + 2)) if total else 1.0
    if hits < max(ENOUGH, MOSTLY * total) or chance > CHANCE:
        return []
    line = (
        f"{hits:,} of {plural(total, 'step')} that are decided wrongly have the count of accepted drafts and the "
        f"final token of their request's previous step; so have {alike:,} of {others:,} others"
    )
    return [Suspect(Cause.VERDICT_LATE, Proof.ROWS, (line,), check.example, chance=chance)]


def other_counts(case: Case, check: Finding) -> list[Suspect]:
    """How many drafts each wrong step committed, against how many its figures accept: another request's, or one off."""
    c = case.evidence
    due, committed = judged_right(c), c.depth_reached
    steps = np.unique(c.step[check.wrong]) if check.unit == "node" else check.wrong
    steps = steps[due[steps] != committed[steps]]
    if not len(steps):
        return []
    all_steps, example = plural(int(c.told.sum()), "step"), c.at_step(int(steps[0]))
    line = f"the committed path is not as long as what was judged right in {len(steps):,} of {all_steps}"
    by, count = Counter((committed[steps] - due[steps]).tolist()).most_common(1)[0]
    if _are_of_others(c, due, steps):
        more = f"it is as long as another request's in the same batch in {len(steps):,} of these"
        return [Suspect(Cause.ROWS_SWAPPED, Proof.ROWS, (line, more), example)]
    if count == len(steps) and len(steps) >= ENOUGH and _is_a_count(c, due, steps, by):
        more = f"it is {abs(by)} {'longer' if by > 0 else 'shorter'} in {count:,} of these"
        return [Suspect(Cause.ACCEPTED_COUNT, Proof.ROWS, (line, more), example)]
    return [Suspect(Cause.ACCEPTED_COUNT, Proof.CONDITION, (line,), example)] if check.name == "paths" else []


def _are_of_others(c: Columns, due: Indices, steps: Indices) -> bool:
    """Whether each committed count is another request's of the same batch, by more than chance: each of these could
    have been any count that its tree allows."""
    drafts, chance = np.diff(c.start) > 0, 1.0
    for step in steps.tolist():
        others = {*due[drafts & (c.batch == c.batch[step]) & (np.arange(len(c)) != step)].tolist()}
        if int(c.depth_reached[step]) not in others:
            return False
        chance *= min(1.0, len(others - {int(due[step])}) / max(c.visits[step].part.tree.max_depth, 1))
    return chance < CHANCE


def _is_a_count(c: Columns, due: Indices, steps: Indices, by: int) -> bool:
    """Whether paths that are all off by `by` show a wrong count, and not decisions that are wrong one by one: a wrongly
    accepted draft is often followed by a right one; where paths are shorter, nearly all that could be must be.
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


def trial_q(case: Case, check: Finding) -> list[Suspect]:
    """q as tried is not q as drawn, over what earlier siblings left of it."""
    c, wrong = case.evidence, check.wrong
    firsts = wrong[np.unique(c.row[wrong], return_index=True)[1]].tolist()  # of each parent: the others follow from it
    whose = [_which_q(c, node) for node in firsts]
    (cause, about), count = Counter(whose).most_common(1)[0]
    suspect = said(check, cause, Proof.ROWS, f"{about} below {count:,} of {plural(len(firsts), 'parent')}")
    return [replace(suspect, example=c.at_node(firsts[whose.index((cause, about))]))]


def _which_q(c: Columns, node: int) -> tuple[Cause, str]:
    tried, left, sampled = float(c.q_trial[node]), max(float(c.q_left[node]), 1e-12), c.sampled[node]
    if sampled and left < 1 - CLOSE and abs(tried - float(c.q[node])) <= CLOSE:
        return Cause.RESIDUAL_NOT_RENORMALISED, "it is q as drawn, not renormalised"
    others = (c.row == c.row[node]) & (np.arange(len(c.row)) != node)
    if sampled and (np.abs(tried * left - c.q[others]) <= CLOSE).any():
        return Cause.SIBLINGS_CHANGED, "it is the q of another sibling"
    return Cause.Q_OTHER_ROW, "it is no sibling's q, and not 1 for deterministic drafts"


def final_tokens(case: Case, check: Finding) -> list[Suspect]:
    """Final tokens that were rejected just before, or that had no probability in what was left of p."""
    c = case.evidence
    again = c.rejected & (c.row == c.final_row[c.step]) & ~c.greedy[c.step] & (c.token == c.final[c.step]) & c.named
    if again.any() or _recovered(c)[check.wrong].all():
        return [said(check, Cause.FINAL_NOT_RESIDUAL)]
    return [said(check, Cause.FINAL_OTHER_NODE, Proof.CONDITION)]


def final_shares(case: Case, check: Finding) -> list[Suspect]:
    """Final tokens that were not drawn with their p, over the mass that rejections left."""
    c, tokens = case.evidence, case.checks["final tokens"]
    no_place = np.isin(check.wrong, tokens.wrong)  # nothing was left of their p: it does not show how they were drawn
    suspects, steps = final_tokens(case, tokens) if no_place.any() else [], check.wrong[~no_place]
    recovered, drawn = _recovered(c)[steps], "the final token was not drawn with its p in"
    by_cause = {
        Cause.FINAL_OTHER_NODE: (steps[~recovered], f"after the last accepted node {drawn}"),
        Cause.FINAL_NOT_RESIDUAL: (steps[recovered], f"after a rejection {drawn}"),
    }
    return [*suspects, *_by_steps(c, by_cause, plural(check.tested, "draw"))]


def _by_steps(c: Columns, by_cause: Mapping[Cause, tuple[Indices, str]], of: str) -> Iterator[Suspect]:
    """Causes that each explain some steps of a check; none where there are none."""
    for cause, (steps, what) in by_cause.items():
        for step in steps[:1].tolist():
            yield Suspect(cause, Proof.ROWS, (f"{what} {len(steps):,} of {of}",), c.at_step(step), len(steps))


def greedy_tokens(case: Case, check: Finding) -> list[Suspect]:
    """Greedy steps whose final token is not the target's choice, or whose p are not 0 and 1."""
    c = case.evidence
    if np.isin(check.wrong, c.step[~np.isin(c.p, (0, 1))]).mean() > 0.5:
        return [said(check, Cause.RULES_WRONG, Proof.CONDITION)]
    return [said(check, Cause.FINAL_OTHER_NODE)]


def _recovered(c: Columns) -> Bools:
    return c.children_at(c.rejected)[c.final_row]


# From step to step


def token_lost(case: Case, check: Finding) -> list[Suspect]:
    """Steps that do not begin where the one before ended: by how much, and after what."""
    longer = [_keeps_rejected(case.visits[place]) for place in case.checks[CACHED].wrong.tolist()]
    if longer and all(longer) and check.name in ("positions", CACHED):  # the root too far, or the cache too long
        line = f"the cache is too long after a rejection in {counted(check)}, by no more than was rejected"
        return [Suspect(Cause.TARGET_KV, Proof.ROWS, (line,), check.example)] if check.name == CACHED else []
    if line := _of_anothers_count(case, [case.visits[place] for place in check.wrong.tolist()]):
        return [said(check, Cause.ROWS_SWAPPED, Proof.ROWS, line)]
    # Where most positions are wrong, no tokens are lost: positions are recorded wrongly
    positions = check.failed > 0.5 * check.tested and check.tested > 4
    return [said(check, Cause.TOKEN_LOST, Proof.CONDITION if positions else Proof.ROWS)]


def _of_anothers_count(case: Case, wrong: Sequence[Visit]) -> str:
    """Whether each step begins where another request's count of accepted tokens would have ended it, by more than
    chance among the counts that the step before could have had; "" where not."""
    at, log_chance = {(visit.request.id, visit.part.index): visit for visit in case.visits}, 0.0
    for visit in wrong:
        before, gap = visit.before, _gap(visit)
        if before is None or before.verdict is None or visit.preempted or not gap:
            return ""
        batch, own = at[visit.request.id, before.index].record.requests, before.verdict.accepted
        others = {part.verdict.accepted for part in batch if part.verdict is not None} - {own}
        if own + gap not in others:
            return ""
        log_chance += math.log(len(others) / max(before.tree.max_depth, len(others), 1))
    gaps = f"each of {plural(len(wrong), 'gap')}"
    said = f"{gaps} is the count of another request in the same batch minus the request's own"
    return said if log_chance <= LOG_CHANCE else ""


def _gap(visit: Visit) -> int:
    """By how many tokens the step begins too late; 0 where that is not known."""
    before = visit.before  # what it fed, the root, and the accepted path
    if before is None:
        return 0
    left = before.position + (0 if before.verdict is None else 1 + len(before.verdict.path))
    return visit.part.context_len - (visit.part.found if visit.preempted else left)


def _keeps_rejected(visit: Visit) -> bool:
    """Whether the step begins with more in the cache than was due, and rejected drafts of the one before can be it."""
    before = visit.before
    if before is None or before.verdict is None or visit.preempted:
        return False
    return 0 < _gap(visit) <= len(before.tree) - before.verdict.accepted


def outputs(case: Case, check: Finding) -> list[Suspect]:
    """Outputs that are not what the steps emitted: another request's, or with tokens missing."""
    made = {name: [token for token, _ in request.output()] for name, request in case.history.requests.items()}
    wrong = {one.id: one.end for one in (case.visits[place].request for place in check.wrong.tolist()) if one.end}
    pairs = [(end.output.tolist(), name) for name, end in wrong.items()]
    if swapped := sum(output in (text for other, text in made.items() if other != name) for output, name in pairs):
        line = f"in {swapped:,} of these it is what another request's steps emitted"
        return [replace(said(check, Cause.ROWS_SWAPPED, Proof.ROWS, line), explained=swapped)]
    # Where a single token is another, none is lost
    lost = any(len(out) != len(made[name]) or sum(map(operator.ne, out, made[name])) > 1 for out, name in pairs)
    return [said(check, Cause.TOKEN_LOST)] if lost else []


def ends(case: Case, check: Finding) -> list[Suspect]:
    """Output that goes on past what ends it. One that ends too soon has no cause of its own."""
    went_on = "after" in check.detail or "went on" in check.detail
    return [said(check, Cause.PAST_THE_END)] if went_on else []


# Coins


def wrong_key(case: Case, check: Finding) -> list[Suspect]:
    """Coins that do not follow from seed and position: the key that nearly all of them follow from.

    Where most of a step's coins are right, so is its key: one was used twice (another check's), or is none of its own.
    """
    c, of_drafts = case.evidence, check.name == "draft coins"
    coins = CoinsOf.drafts(c) if of_drafts else CoinsOf.verdicts(c)
    steps = (np.unique(c.step[check.wrong]) if of_drafts else check.wrong)[:LOOKED_AT]
    if of_drafts and (moved := coins.moved(steps)) > MOSTLY * len(steps):
        line = f"the drafts' own coins lie in another order in {moved:,} of {plural(len(steps), 'step')}"
        return [said(check, Cause.SIBLINGS_CHANGED, Proof.ROWS, line)]
    steps = steps[coins.same(steps, coins.right) <= 0.5]
    name, fits = coins.key_of(steps)
    if not name:
        return [said(check, Cause.COINS, Proof.CONDITION)]
    cause = Cause.VERDICT_LATE if name == BEFORE and not of_drafts else Cause.COINS
    return [said(check, cause, Proof.ROWS, f"they are {name} in {fits:,} of {plural(len(steps), 'step')}")]


# Drafts: their plan, their vocabulary, their q, their cache


def outside_vocabulary(case: Case, check: Finding) -> list[Suspect]:
    """Tokens that the drafter does not know: a wrong map, or padding where it is one token over and over."""
    token, count = Counter(case.evidence.token[check.wrong].tolist()).most_common(1)[0]
    if count > MOSTLY * check.failed and check.failed > 2:
        return [said(check, Cause.DRAFT_PLACEHOLDERS, Proof.ROWS, f"token {token} at {count:,} of these")]
    return [said(check, Cause.DRAFT_VOCABULARY)]


def planned(case: Case, check: Finding) -> list[Suspect]:
    """Trees that were to be sampled and were not, or that lack nodes of the plan."""
    c = case.evidence
    drawn = c.any_in_step(c.sampled)[check.wrong]
    by_cause = {
        Cause.Q_DROPPED: (check.wrong[~drawn], "trees that should be sampled are recorded as deterministic in"),
        Cause.SIBLINGS_CHANGED: (check.wrong[drawn], "sampled trees lack nodes of the plan in"),
    }
    return list(_by_steps(c, by_cause, plural(check.tested, "step")))


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
    began = np.array([c.visits[step].part.preceded in (Preceded.PREEMPTION, Preceded.PREFILL) for step in wrong])
    drafted = np.array([0 if (before := c.visits[step].before) is None else len(before.tree) for step in wrong])
    far = int((~began & (cached[wrong] - limit[wrong] > np.maximum(drafted, 1))).sum())
    if far > 0.5 * check.failed:
        line = f"in {far:,} of these the drafter counts far more tokens as cached than it was fed"
        return [replace(said(check, Cause.ROWS_SWAPPED, Proof.CONDITION, line), explained=far)]
    return [said(check, Cause.DRAFTER_KV)]


def other_q(case: Case, check: Finding) -> list[Suspect]:
    """q that does not follow from the drafter's raw probability: the one temperature that explains the most of it."""
    c = case.evidence
    nodes = check.wrong[:: max(1, len(check.wrong) // MOST)][:MOST]
    fitting = {temperature: int(_within(c, nodes, temperature).sum()) for temperature in GRID.tolist()}
    temperature, fits = max(fitting.items(), key=lambda pair: pair[1])
    if fits < MOSTLY * len(nodes):
        return []
    wanted = float(np.median(c.parameter("temperature")[nodes]))
    line = f"q is the drafter's at temperature {temperature:.2g}, the requests' is {wanted:g}: so at {fits:,} of "
    line += f"{plural(len(nodes), 'node')} whose q does not follow from the requests' temperature"
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
        q = c.q[nodes]  # wide bounds would fit any
        inside |= (high < 2 * low) & (q >= low * (1 - 2e-3)) & (q <= high * (1 + 2e-3))
    return inside


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
        found = (frozenset(lookup(step.text[: step.after], depth, width, rule, shift)) for step, _ in drafted)
        both = zip(drafted, found, strict=True)
        return [one for one, paths in both if (one[1] <= paths if shift else rule.agrees(one[1], paths))]

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
    checked, some = f"{len(every):,} steps checked", f"{len(explained):,} of the {len(wrong):,} steps"
    where = f"{some} where correct lookup does not ({checked})."
    if len(explained) == len(every):
        where = f"all {checked}. Correct lookup never does."
    late = f"{plural(abs(shift), 'token')} too {'late' if shift > 0 else 'early'}"
    line = f"If prompt lookup continues {late}, it gives the recorded tree in {where}"
    example = explained[0][0].reference()
    return [Suspect(Cause.DRAFT_POSITION, Proof.ROWS, (line,), example, len(explained), len(wrong), rerun=True)]


EXPLAINS: Mapping[str, Callable[[Case, Finding], list[Suspect]]] = {  # by check of verify
    **dict.fromkeys(("outcomes", "greedy acceptance"), decided),
    "paths": other_counts,
    "q at trials": trial_q,
    "final tokens": final_tokens,
    "share of the final token": final_shares,
    "greedy tokens": greedy_tokens,
    **dict.fromkeys((CACHED, "positions", "prompt fed"), token_lost),
    "outputs": outputs,
    "ends": ends,
    **dict.fromkeys(("coins", "draft coins"), wrong_key),
    "draft's temperature": other_q,
    "drafted surprisal": other_draws,
    "draft vocabulary": outside_vocabulary,
    "drafts as planned": planned,
    "likeliest draft first": likeliest_first,
    "order of siblings": sorted_siblings,
    "draft coins in their intervals": outside_intervals,
    "drafter's cache": drafters_cache,
}
