"""What was drafted: from the drafter's vocabulary, as the plan has it, in its own place, and from sound inputs.

A run with such a fault may well be lossless. It is not what it says it is, and its acceptance is lower for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.fields import lengths, numbers
from specscope.analyze.findings import Check, CheckResult, Unit
from specscope.analyze.verify.exact import check_each
from specscope.analyze.verify.sums import share_of
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.notes import TEXT, model_part, text_part
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import Preceded, RunInfo
from specscope.trace.record.tree import ROOT, Bools, Doubles, DraftTree

# The text that followed each root: drafts are compared with it where no p judges them.


@dataclass(frozen=True)
class Follows:
    """The texts of R requests end to end, prompts and outputs, and where each decode step's root is in them."""

    request: Indices  # [S] the number of its request
    text: Indices  # [T] all tokens
    begins: Indices  # [R] where each request's text begins
    ends: Indices  # [R] and where it ends
    outputs: Indices  # [R] where its output begins
    behind: Indices  # [S] the place of the token after the root

    @staticmethod
    def of(c: Columns) -> Follows:
        """The texts of all requests that have a decode step."""
        places: dict[str, int] = {}
        texts: list[list[int]] = []
        prompts: list[int] = []
        request, made = [], []  # of each step; its output tokens before
        count: list[int] = []
        for visit in c.visits:
            name = visit.request.id
            if name not in places:
                places[name] = len(texts)
                info = visit.request.info
                prompt = [] if info is None else told_ids(info.prompt_tokens) or []
                earlier = visit.request.earlier() or []
                texts.append([*prompt, *earlier, *(token for token, _ in visit.request.output())])
                prompts.append(len(prompt))
                known = visit.request.steps[: visit.request.place_of(visit.part.index)]
                count.append(len(earlier) + sum(part.emitted for part in known))
            number = places[name]
            request.append(number)
            made.append(count[number])
            count[number] += visit.part.emitted
        sizes = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(sizes)
        begins = ends - sizes
        outputs = begins + np.array(prompts, np.int64)
        numbered = np.array(request, np.int64)
        behind = outputs[numbered] + np.array(made, np.int64) if len(texts) else np.zeros(0, np.int64)
        text = np.array([token for text in texts for token in text], np.int64)
        return Follows(numbered, text, begins, ends, outputs, behind)

    def token_at(self, step: Indices, depth: Indices) -> Indices:
        """The text's token at a depth below the root of each step, the first at 1; -1 outside of its text."""
        place = self.behind[step] + depth - 1
        number = self.request[step]
        inside = (place >= self.begins[number]) & (place < self.ends[number])
        return np.where(inside, self.text[np.where(inside, place, 0)] if len(self.text) else -1, -1)

    def by_request(self, hits: Bools, step: Indices) -> tuple[Doubles, Doubles]:
        """[R] hits and totals, of items in these steps."""
        number, requests = self.request[step], len(self.begins)
        total = np.bincount(number, minlength=requests).astype(np.float64)
        return np.bincount(number, hits, requests).astype(np.float64), total


SHIFTS = (-2, -1, 0, 1, 2)
FEWEST = 40  # drafted tokens: fewer say little about the text
SIGMAS = 5.0  # standard errors that count; over requests, as the tokens of one are not independent
AS_OFTEN = 2.0  # times as often at another place as at its own
LEFT = 1e-3  # of q: with less, no further sibling could be drawn


def draft_checks(c: Columns, run: RunInfo | None) -> list[Check]:
    """All checks of what was drafted."""
    follows = Follows.of(c)
    return [
        draft_vocabulary(c, run),
        planned(c, run),
        likeliest_first(c, run),
        in_place(c, run, follows),
        placeholders(c, run, follows),
        fed_features(c),
        drafters_cache(c),
    ]


def draft_vocabulary(c: Columns, run: RunInfo | None) -> Check:
    """Skipped, with the reason, where the drafter's vocabulary is not reduced or not known."""
    name, about = "draft vocabulary", "every drafted token is one that the drafter knows"
    known = draft_tokens(run)
    if known is None:
        has_evidence = run is not None and bool(run.evidence)
        why = (
            NOT_TOLD
            if lacks_draft_tokens(run)
            else "the drafter's vocabulary is not reduced"
            if has_evidence
            else "the capture does not tell what the drafter knows"
        )
        return Check(name, CheckResult.SKIPPED, about, note=why, unit="node")
    every = c.source != TEXT  # what is drafted from a text, beside a model, may be any token
    bad = every & ~np.isin(c.token, known)
    note = f"{len(known):,} tokens of the target"
    return check_each(name, about, bad, every, c.nodes, lambda i: f"token {c.token[i]} is not among them", note=note)


def plan_of(run: RunInfo | None) -> StaticPlan | None:
    """The static tree that a model is to draft; None where it is no such tree."""
    plan = None if run is None or not run.draft_model else read_plan(run.tree)
    return plan if isinstance(plan, StaticPlan) else None


def planned(c: Columns, run: RunInfo | None) -> Check:
    """Trees of sampled requests are sampled where the plan says so, and lack no node that q could still give."""
    name, about = "drafts as planned", "sampled requests' trees are drawn from q, each node of the plan"
    plan = plan_of(run)
    if plan is None or plan.top:
        why = "the drafter is no model with a static tree that is to be sampled"
        return Check(name, CheckResult.SKIPPED, about, note=why, unit="step")
    sizes = np.diff(c.start)
    tested = c.known & ~c.greedy & (sizes > 0)
    drawn = np.zeros(len(c), np.bool_)
    drawn[c.step[c.sampled]] = True
    lacking = np.zeros(len(c), np.int64)
    children = [plan.shape.children(node) for node in range(-1, len(plan.shape))]
    for step in np.flatnonzero(tested & drawn & (sizes < len(plan.shape))).tolist():
        part = c.visits[step].part
        # Another engine's scheduler may cut a chain: by a grammar, by a step's budget, where a request is about to end.
        cut = part.sizing or part.is_ranked_with_text or (run is not None and not run.is_ours)
        # After a node the grammar may refuse every token that the drafter knows.
        cut = cut or c.params[step].has("structured_outputs")
        lacking[step] = 0 if cut else _lacking(part.tree, children)
    return check_each(
        name,
        about,
        ~drawn | (lacking > 0),
        tested,
        c.steps,
        lambda s: (
            f"{lacking[s]} nodes of the plan {plan} are missing, though q had tokens left"
            if drawn[s]
            else f"drawn as deterministic at temperature {c.params[s].temperature:g}"
        ),
    )


def _lacking(tree: DraftTree, planned_children: list[list[int]]) -> int:
    """How many children are missing at nodes whose place in the plan is known, where q had more to give."""
    missing, place, queue = 0, {ROOT: ROOT}, [ROOT]
    while queue:
        node = queue.pop()
        children, wanted = tree.children(node), planned_children[place[node] + 1]
        given = sum(float(tree.q[child]) for child in children)
        if len(children) < len(wanted) and given < 1 - LEFT:
            missing += len(wanted) - len(children)
        for child, planned_child in zip(children, wanted, strict=False):
            place[child] = planned_child
            queue.append(child)
    return missing


def likeliest_first(c: Columns, run: RunInfo | None) -> Check:
    """A deterministic first child is the token that its drafter held likeliest; a near tie may be either."""
    e = c.parents
    tested = np.zeros(len(c.token), np.bool_)
    bad = tested
    if e.draft_top.size:
        parent = e.at_node
        with_text = np.array([visit.part.is_ranked_with_text for visit in c.visits], np.bool_)
        moved = np.array([params.moved for params in c.params], np.bool_)
        tested = ~c.sampled & (c.sibling == 0) & (parent >= 0) & (c.known & ~moved & ~with_text)[c.step]
        tested &= (e.draft_top[parent, 0] >= 0) & (e.draft_top_p[parent, 0] > 0)
        drafters = np.nan_to_num(e.drafters(parent, c.token))
        bad = (e.draft_top[parent, 0] != c.token) & (drafters < e.draft_top_p[parent, 0] * (1 - 1e-3) - 1e-6)
    return check_each(
        "likeliest draft first",
        "a deterministic first child is the token that the drafter held likeliest",
        bad,
        tested,
        c.nodes,
        lambda i: (
            f"token {c.token[i]}, but the drafter's likeliest is token {e.draft_top[e.at_row[c.row[i]], 0]} "
            f"with {e.draft_top_p[e.at_row[c.row[i]], 0]:.4g}"
        ),
        note="" if run is None or run.draft_model else "the drafter is no model",
    )


def chains(c: Columns) -> Indices:
    """The nodes that are first children all the way from the root: what the drafter thinks likeliest."""
    first = c.sibling == 0
    chain = first.copy()
    for depth in range(2, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(c.depth == depth)
        chain[nodes] &= chain[c.above[nodes]]
    return np.flatnonzero(chain)


def in_place(c: Columns, run: RunInfo | None, follows: Follows) -> Check:
    """Drafted tokens are the text's at their own depth more often than at another one."""
    name, about = "drafts in place", "drafted tokens are the text's at their own depth, no more often at another"
    nodes = chains(c)
    nodes = nodes[~_padding(c, run, follows)[nodes]]
    shares: dict[int, tuple[float, float]] = {}  # by shift: the share that fits, and its variance
    for shift in SHIFTS:
        there = follows.token_at(c.step[nodes], c.depth[nodes] + shift)
        some = there >= 0
        shares[shift] = share_of(*follows.by_request(c.token[nodes[some]] == there[some], c.step[nodes[some]]))
    best = max(shares, key=lambda shift: shares[shift][0])
    total = int((follows.token_at(c.step[nodes], c.depth[nodes]) >= 0).sum())
    if total < FEWEST:
        return Check(name, CheckResult.SKIPPED, about, note="too few to judge", unit="draft")
    (own_share, own_variance), (share, variance) = shares[0], shares[best]
    z = (share - own_share) / math.sqrt(own_variance + variance)
    if best == 0 or z < SIGMAS or share < AS_OFTEN * own_share or share < 0.1:
        return Check(name, CheckResult.PASSED, about, total, unit="draft")
    fits = follows.token_at(c.step[nodes], c.depth[nodes] + best) == c.token[nodes]
    where = f"{abs(best)} {'further on' if best > 0 else 'before'}"
    detail = f"a drafted token is the text's token {where} in {100 * share:.0f} %, "
    detail += f"at its own place in {100 * own_share:.0f} %"
    return Check(
        name,
        CheckResult.FAILED,
        about,
        total,
        int(fits.sum()),
        c.at_node(int(nodes[np.argmax(fits)])),
        f"{detail} (n = {total:,})",
        unit="draft",
        wrong=nodes[fits],
        statistic=z,
        p_value=math.erfc(z / math.sqrt(2)),
    )


def _padding(c: Columns, run: RunInfo | None, follows: Follows) -> Bools:
    """Where a text holds nothing more to draft: vLLM's V2 runner fills the chain of an n-gram with the root's token."""
    if run is None or run.is_ours or not text_part(run.drafter):
        return np.zeros(len(c.token), np.bool_)
    others = np.concatenate([[0], np.cumsum(c.token != follows.token_at(c.step, np.zeros_like(c.step)))])
    return np.asarray(others[c.start[c.step + 1]] == others[:-1], np.bool_)


def placeholders(c: Columns, run: RunInfo | None, follows: Follows) -> Check:
    """No token that is nobody's choice, in no text and never accepted is drafted over and over."""
    name, about = "placeholders", "no token that is in no text and nobody's choice is drafted over and over"
    free = ~np.array([params.limited for params in c.params], np.bool_)[c.step]  # a grammar favours tokens of its own
    if free.sum() < FEWEST:
        return Check(name, CheckResult.SKIPPED, about, note="too few to judge", unit="node")
    tokens, place, counts = np.unique(c.token, return_inverse=True, return_counts=True)
    counts = np.bincount(place, free, len(tokens)).astype(np.int64)
    accepted = np.bincount(place, c.accepted, len(tokens))
    spoken = np.zeros(len(tokens))
    known, times = np.unique(follows.text, return_counts=True)
    spoken[np.isin(tokens, known)] = times[np.isin(known, tokens)]
    rare = (accepted == 0) & (spoken <= 0.001 * len(follows.text)) & (counts >= max(20, 0.05 * free.sum()))
    filler = None if run is None else run.ways.filler
    odd = [token for token in np.flatnonzero(rare).tolist() if tokens[token] != filler]
    odd = [token for token in odd if not _is_chosen(c, run, int(tokens[token]))]
    bad = np.isin(place, odd)
    return check_each(
        name,
        about,
        bad,
        free,
        c.nodes,
        lambda i: f"token {c.token[i]} is {counts[place[i]]:,} of {free.sum():,} drafted tokens, accepted never",
    )


def _is_chosen(c: Columns, run: RunInfo | None, token: int) -> bool:
    """Whether the drafter's own notes have a token among its likeliest where it was drafted."""
    e, parent = c.parents, c.parents.at_node
    noted = (c.token == token) & (parent >= 0)
    if not e.draft_top.size or not (noted & (e.draft_top_p[parent].any(axis=1))).any():
        return run is not None and bool(run.draft_model) and token > 2  # as far as is known
    return bool(np.isfinite(e.drafters(parent[noted], c.token[noted])).mean() > 0.5)


def fed_features(c: Columns) -> Check:
    """What fed an EAGLE head is no row of zeros, and no copy of the position before: no layer produces either."""
    rows: list[tuple[int, str]] = []  # the step of each row that was looked at, and what is wrong with it
    last: dict[str, tuple[int, tuple[float, ...]]] = {}  # of each request: position and norms of its last row
    fed = lengths(c.picked, "notes", "fed_norms") > 0
    for step, visit in enumerate(c.visits):
        notes = visit.part.notes if fed[step] else None
        if notes is None:
            continue
        before = last.get(visit.request.id)
        for position, norms in zip(notes.fed_position.tolist(), map(tuple, notes.fed_norms.tolist()), strict=True):
            problem = "" if any(norms) else f"the features of position {position} are all zero"
            if before is not None and position == before[0] + 1 and any(norms) and norms == before[1]:
                problem = f"position {position} holds the features of the position before"
            rows.append((step, problem))
            before = position, norms
        if before is not None:
            last[visit.request.id] = before
    wrong = [row for row, (_, problem) in enumerate(rows) if problem]
    bad = np.zeros(len(rows), np.bool_)
    bad[wrong] = True
    return check_each(
        "features fed",
        "the rows that fed the head hold features, each its own",
        bad,
        np.ones(len(rows), np.bool_),
        Unit("row", lambda row: c.at_step(rows[row][0])),
        lambda row: rows[row][1],
        note="the capture tells of no features that fed a head",
    )


def drafters_cache(c: Columns) -> Check:
    """A draft model's cache holds no more than what its passes have fed: its text, and accepted nodes that it ran."""
    limit = most_cached(c)
    cached = numbers(c.picked, "notes", "cached", -1)
    runs_model = np.array([model_part(visit.part.drafter) == "draft_model" for visit in c.visits], np.bool_)
    tested: Bools = runs_model & (limit >= 0) & (cached >= 0)
    return check_each(
        "drafter's cache",
        "a draft model's cache holds no token that it was not fed",
        cached > limit,
        tested,
        c.steps,
        lambda s: f"counts {cached[s]} tokens as cached, {limit[s]} at most were fed and kept",
        note="" if runs_model.any() else "the drafter is no draft model",
    )


def most_cached(c: Columns) -> Indices:
    """[S] how many tokens a draft model's cache may hold when each step begins; -1 where that is not known."""
    limit = np.full(len(c), -1, np.int64)
    last: dict[str, int] = {}  # of each request, its decode step before
    for step, visit in enumerate(c.visits):
        part, before = visit.part, last.get(visit.request.id)
        if part.preceded is Preceded.PREEMPTION and not part.found:
            limit[step] = 0
        elif before is not None and part.index == c.visits[before].part.index + 1:
            limit[step] = _held_after(c, before)
        last[visit.request.id] = step
    return limit


def _held_after(c: Columns, step: int) -> int:
    """How many tokens a draft model's cache may hold after a step; -1 where its passes' rows are not recorded."""
    part = c.visits[step].part
    rows = part.told("notes", "rows")
    if rows is None or not len(rows) or part.notes is None or part.verdict is None:
        return -1
    inner = {*part.tree.parent.tolist(), *part.notes.dropped_parent.tolist()}
    fed = sum(1 for node in part.verdict.path.tolist() if node in inner)
    return part.position + 1 + (fed if len(rows) > 1 else 0)
