"""What was drafted: from the drafter's vocabulary, as the plan has it, in its own place, from sound inputs and coins.

A run with such a fault may well be lossless. It is not what it says it is, and its acceptance is lower for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.fields import lengths, numbers
from specscope.analyze.findings import Finding, Unit
from specscope.analyze.verify.exact import HOPELESS, LEAST, RELATIVE, WHOLE, check_each, childless, with_children
from specscope.analyze.verify.sums import share_of
from specscope.plans.plan import StaticPlan, read_plan
from specscope.trace.record.coins import Stream, coins_at, draw_number
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.notes import TEXT, model_part, text_part
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.records import Preceded, RunInfo
from specscope.trace.record.tree import ROOT, Bools, Doubles, DraftTree
from specscope.tree_shape import TreeShape

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


def draft_checks(c: Columns, run: RunInfo | None) -> list[Finding]:
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
        in_intervals(c),
        recomputed_draft_coins(c, run),
    ]


def draft_vocabulary(c: Columns, run: RunInfo | None) -> Finding:
    """Skipped, with the reason, where the drafter's vocabulary is not reduced or not known."""
    known = draft_tokens(run)
    has_evidence = run is not None and bool(run.evidence)
    if known is not None:
        note = f"{len(known):,} tokens of the target"
    elif lacks_draft_tokens(run):
        note = NOT_TOLD
    elif has_evidence:
        note = "the drafter's vocabulary is not reduced"
    else:
        note = "the capture does not tell what the drafter knows"
    return check_each(
        "draft vocabulary",
        "every drafted token is one that the drafter knows",
        ~np.isin(c.token, () if known is None else known),
        (c.source != TEXT) & (known is not None),  # what is drafted from a text, beside a model, may be any token
        c.nodes,
        lambda i: f"token {c.token[i]} is not among them",
        note=note,
    )


def plan_of(run: RunInfo | None) -> StaticPlan | None:
    """The static tree that a model is to draft; None where it is no such tree."""
    plan = None if run is None or not run.draft_model else read_plan(run.tree)
    return plan if isinstance(plan, StaticPlan) else None


def planned(c: Columns, run: RunInfo | None) -> Finding:
    """Trees of sampled requests are sampled where the plan says so, and lack no node that q could still give."""
    plan, sizes = plan_of(run), np.diff(c.start)
    is_planned = plan is not None and not plan.top
    tested = c.known & ~c.greedy & (sizes > 0) & is_planned
    drawn = np.zeros(len(c), np.bool_)
    drawn[c.step[c.sampled]] = True
    lacking = np.zeros(len(c), np.int64)
    children = [] if plan is None else [plan.shape.children(node) for node in range(-1, len(plan.shape))]
    for step in np.flatnonzero(tested & drawn & (sizes < len(children) - 1)).tolist():
        part = c.visits[step].part
        # Another engine's scheduler may cut a chain: by a grammar, by a step's budget, where a request is about to end.
        cut = part.sizing or part.is_ranked_with_text or (run is not None and not run.is_ours)
        # After a node the grammar may refuse every token that the drafter knows.
        cut = cut or c.params[step].has("structured_outputs")
        lacking[step] = 0 if cut else _lacking(part.tree, children)
    return check_each(
        "drafts as planned",
        "sampled requests' trees are drawn from q, each node of the plan",
        ~drawn | (lacking > 0),
        tested,
        c.steps,
        lambda s: (
            f"{lacking[s]} nodes of the plan {plan} are missing, though q had tokens left"
            if drawn[s]
            else f"drawn as deterministic at temperature {c.params[s].temperature:g}"
        ),
        note="" if is_planned else "the drafter is no model with a static tree that is to be sampled",
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


def likeliest_first(c: Columns, run: RunInfo | None) -> Finding:
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


def in_place(c: Columns, run: RunInfo | None, follows: Follows) -> Finding:
    """Drafted tokens are the text's at their own depth more often than at another one."""
    nodes = chains(c)
    nodes = nodes[~_padding(c, run, follows)[nodes]]
    shares: dict[int, tuple[float, float]] = {}  # by shift: the share that fits, and its variance
    for shift in SHIFTS:
        there = follows.token_at(c.step[nodes], c.depth[nodes] + shift)
        some = there >= 0
        shares[shift] = share_of(*follows.by_request(c.token[nodes[some]] == there[some], c.step[nodes[some]]))
    best = max(shares, key=lambda shift: shares[shift][0])
    tested, bad = np.zeros((2, len(c.token)), np.bool_)
    tested[nodes[follows.token_at(c.step[nodes], c.depth[nodes]) >= 0]] = True
    tested &= tested.sum() >= FEWEST
    (own_share, own_variance), (share, variance) = shares[0], shares[best]
    z = (share - own_share) / math.sqrt(own_variance + variance)
    if best != 0 and z >= SIGMAS and share >= AS_OFTEN * own_share and share >= 0.1:
        bad[nodes] = follows.token_at(c.step[nodes], c.depth[nodes] + best) == c.token[nodes]
    where = f"{abs(best)} {'further on' if best > 0 else 'before'}"
    detail = f"a drafted token is the text's token {where} in {100 * share:.0f} %, "
    detail += f"at its own place in {100 * own_share:.0f} % (n = {tested.sum():,})"
    found = check_each(
        "drafts in place",
        "drafted tokens are the text's at their own depth, no more often at another",
        bad,
        tested,
        Unit("draft", c.at_node),
        lambda _: detail,
        note="" if tested.any() else "too few to judge",
    )
    return replace(found, statistic=z, p_value=math.erfc(z / math.sqrt(2))) if found.failed else found


def _padding(c: Columns, run: RunInfo | None, follows: Follows) -> Bools:
    """Where a text holds nothing more to draft: vLLM's V2 runner fills the chain of an n-gram with the root's token."""
    if run is None or run.is_ours or not text_part(run.drafter):
        return np.zeros(len(c.token), np.bool_)
    others = np.concatenate([[0], np.cumsum(c.token != follows.token_at(c.step, np.zeros_like(c.step)))])
    return np.asarray(others[c.start[c.step + 1]] == others[:-1], np.bool_)


def placeholders(c: Columns, run: RunInfo | None, follows: Follows) -> Finding:
    """No token that is nobody's choice, in no text and never accepted is drafted over and over."""
    free = ~np.array([params.limited for params in c.params], np.bool_)[c.step]  # a grammar favours tokens of its own
    free &= free.sum() >= FEWEST
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
        "placeholders",
        "no token that is in no text and nobody's choice is drafted over and over",
        bad,
        free,
        c.nodes,
        lambda i: f"token {c.token[i]} is {counts[place[i]]:,} of {free.sum():,} drafted tokens, accepted never",
        note="" if free.any() else "too few to judge",
    )


def _is_chosen(c: Columns, run: RunInfo | None, token: int) -> bool:
    """Whether the drafter's own notes have a token among its likeliest where it was drafted."""
    e, parent = c.parents, c.parents.at_node
    noted = (c.token == token) & (parent >= 0)
    if not e.draft_top.size or not (noted & (e.draft_top_p[parent].any(axis=1))).any():
        return run is not None and bool(run.draft_model) and token > 2  # as far as is known
    return bool(np.isfinite(e.drafters(parent[noted], c.token[noted])).mean() > 0.5)


FLAT = 1e-3  # of a norm: hidden states between layers vary far more from row to row
ROWS, DIFFERENT = 20, 8  # rows, and tokens behind them, before a norm is said to be the same everywhere


def fed_features(c: Columns) -> Finding:
    """What fed a head is no row of zeros, no row of another position, and no layer's was normalised.

    No two positions of a text have the same norms in two layers or more, but where a text goes round in a loop. A
    single layer's may agree by chance, and are compared with those of the position before.
    """
    rows: list[tuple[int, str]] = []  # the step of each row that was looked at, and what is wrong with it
    of_rows: list[tuple[float, ...]] = []
    tokens = set[int]()
    last: dict[str, dict[tuple[float, ...], tuple[int, int]]] = {}  # of each request its rows: position, token behind
    fed = lengths(c.picked, "notes", "fed_norms") > 0
    for step, visit in enumerate(c.visits):
        notes = visit.part.notes if fed[step] else None
        if notes is None:
            continue
        seen = last.setdefault(visit.request.id, {})
        fed_rows = notes.fed_position.tolist(), notes.fed_token.tolist(), map(tuple, notes.fed_norms.tolist())
        for position, token, norms in zip(*fed_rows, strict=True):
            problem, (before, behind) = "", seen.get(norms, (position, token))
            if not any(norms):
                problem = f"the features of position {position} are all zero"
            elif before == position - 1:
                problem = f"position {position} holds the features of the position before"
            elif before != position and behind != token and len(norms) > 1:
                problem = f"position {position} holds the features of position {before}"
            rows.append((step, problem))
            of_rows.append(norms)
            tokens.add(token)
            seen.setdefault(norms, (position, token))
    flat = _normalised(of_rows) if len(tokens) >= DIFFERENT else ""
    rows = [(step, problem or flat) for step, problem in rows]
    return check_each(
        "features fed",
        "the rows that fed the head hold features, each its own",
        np.array([bool(problem) for _, problem in rows], np.bool_),
        np.ones(len(rows), np.bool_),
        Unit("row", lambda row: c.at_step(rows[row][0])),
        lambda row: rows[row][1],
        note="" if rows else "the capture tells of no features that fed a head",
    )


def _normalised(of_rows: Sequence[tuple[float, ...]]) -> str:
    """What is wrong where a layer's norm is the same in every row; "" elsewhere. One layer may lie behind a norm."""
    layers = {len(norms) for norms in of_rows}
    if len(of_rows) < ROWS or len(layers) != 1 or layers == {1}:
        return ""
    table = np.array(of_rows)
    mean = table.mean(axis=0)
    flat = np.flatnonzero((table.std(axis=0) < FLAT * mean) & (mean > 0))
    if not len(flat):
        return ""
    which = "each of the layers" if len(flat) == table.shape[1] else f"layer {flat[0] + 1} of the {table.shape[1]}"
    return f"{which} has features with a norm of {mean[flat[0]]:.4g} in every row: they were normalised"


def drafters_cache(c: Columns) -> Finding:
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
    back = False  # the run went back: what was fed then may still be cached
    for step, visit in enumerate(c.visits):
        part, before = visit.part, last.get(visit.request.id)
        back |= visit.record.rewound or visit.record.after is not None
        anew = before is None and c.ours and not back and visit.request.steps[0].index == 0
        if part.preceded is Preceded.PREEMPTION and not part.found:
            limit[step] = 0
        elif anew and part.preceded is Preceded.PREFILL:
            limit[step] = visit.request.steps[0].found  # no pass fed anything before its first draft
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
    fed = sum(1 for node in part.verdict.path.tolist() if node in with_children(part))
    return part.position + 1 + (fed + childless(part) if len(rows) > 1 else 0)


NO_COINS = "the capture does not tell the coins that drew drafts"


def interval(c: Columns) -> tuple[Doubles, Doubles, Doubles]:
    """[N] the interval of each draw, and how far rounding may move its ends: q and what was left of it were float32."""
    left = np.maximum(c.q_left, 1e-12)
    width, share = c.q / left, RELATIVE + WHOLE / left
    drawn = c.draft_low[c.drawn_by_coin]
    single = bool((drawn == drawn.astype(np.float32)).all())  # sums over a vocabulary in float32
    high = c.draft_low + width  # both ends are over what was left, whose error so moves them
    slack = share * high + (WHOLE if single else LEAST)
    return c.draft_low, high, np.where(share < HOPELESS, slack, 1.0)  # of so little left, all may be rounding


def in_intervals(c: Columns) -> Finding:
    """The coin lies in [low, low + q), q renormalised after the siblings that were drawn before."""
    low, high, slack = interval(c)
    tested = c.drawn_by_coin & c.sound[c.step] & (slack < HOPELESS)
    return check_each(
        "draft coins in their intervals",
        "the coin that drew a draft lies in the draft's interval of q's distribution function",
        (c.draft_coin < low - slack) | (c.draft_coin >= high + slack),
        tested,
        c.nodes,
        lambda i: f"coin {c.draft_coin[i]:.6g} is not in [{low[i]:.6g}, {high[i]:.6g}), the interval of its draft",
        note=undrawn(c),
    )


def recomputed_draft_coins(c: Columns, run: RunInfo | None) -> Finding:
    """Each draft's coin, computed again from its key."""
    number = draw_numbers(c, run)
    tested = c.drawn_by_coin & c.known[c.step] & (number >= 0) & c.ours
    nodes = np.flatnonzero(tested)
    expected = draft_coins(c, nodes, number, c.position)
    bad = np.zeros(len(c.token), np.bool_)
    bad[nodes] = c.draft_coin[nodes] != expected
    return check_each(
        "draft coins",
        "every draft's coin follows from the request's seed, the root's position and its draw",
        bad,
        tested,
        c.nodes,
        lambda i: f"not coin {number[i]} of seed {c.params[c.step[i]].seed} at position {c.position[c.step[i]]}",
        note=undrawn(c) if c.ours else "the coins are another engine's",
    )


def undrawn(c: Columns) -> str:
    """Why no draft has a coin; "" where one has."""
    return "" if c.drawn_by_coin.any() else NO_COINS if c.sampled.any() else "no draft was sampled"


def draft_coins(
    c: Columns, nodes: Indices, number: Indices, position: Indices, stream: Stream = Stream.DRAFT
) -> Doubles:
    """[nodes] coins of these numbers [N], of the seeds of the nodes' requests at a position [S] for each step."""
    steps, at = np.unique(c.step[nodes], return_inverse=True)
    counts = np.zeros(len(steps), np.int64)
    np.maximum.at(counts, at, number[nodes] + 1)
    seeds = np.array([c.params[step].seed for step in steps], np.uint64)
    every = coins_at(seeds, stream, position[steps], counts)
    result: Doubles = every[(np.cumsum(counts) - counts)[at] + number[nodes]] if len(nodes) else every
    return result


def draw_numbers(c: Columns, run: RunInfo | None) -> Indices:
    """[N] the number of each node's draw, as our drafters count them; -1 where it is none of the plan's."""
    plan = None if run is None else read_plan(run.tree)
    if plan is None:
        return np.full(len(c.token), -1, np.int64)
    if not isinstance(plan, StaticPlan):
        return draw_number(c.parent, c.sibling)
    children = _children(plan.shape)
    number = np.full(len(c.token), -1, np.int64)
    for depth in range(1, int(c.depth.max(initial=0)) + 1):
        nodes = np.flatnonzero((c.depth == depth) & (c.sibling < children.shape[1]))
        above = np.full(len(nodes), ROOT) if depth == 1 else number[c.above[nodes]]
        known = (above >= 0) | (depth == 1)
        number[nodes] = np.where(known, children[above + 1, c.sibling[nodes]], -1)
    return number


def _children(shape: TreeShape) -> Indices:
    """[nodes + 1, w] the children of the root, then those of each node; -1 beyond the last."""
    every = [shape.children(node) for node in range(ROOT, len(shape))]
    table = np.full((len(every), max(map(len, every))), -1, np.int64)
    for row, children in zip(table, every, strict=True):
        row[: len(children)] = children
    return table
