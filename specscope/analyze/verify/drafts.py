"""What was drafted: from the drafter's vocabulary, as the plan has it, in its own place, from sound inputs and coins.

A run with such a fault may well be lossless. It is not what it says it is, and its acceptance is lower for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specscope.analyze.evidence.arrays import Indices, lengths, numbers
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.verify.coin_keys import coins_of, draw_numbers, own_key
from specscope.analyze.verify.exact import (
    HOPELESS,
    LEAST,
    RELATIVE,
    WHOLE,
    Checks,
    Seen,
    childless,
    plan_of,
    with_children,
)
from specscope.analyze.verify.sums import FEW, share_of
from specscope.trace.record.coins import Stream
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.notes import TEXT, model_part, text_part
from specscope.trace.record.records import Preceded
from specscope.trace.record.tree import ROOT, Bools, DraftTree

DRAFTS = Checks("The drafts")
SHIFTS = (-2, -1, 0, 1, 2)
FEWEST = 40  # drafted tokens: fewer say little about the text
SIGMAS = 5.0  # standard errors that count; over requests, as the tokens of one are not independent
AS_OFTEN = 2.0  # times as often at another place as at its own
LEFT = 1e-3  # of q: with less, no further sibling could be drawn


@DRAFTS.add("draft vocabulary", "every drafted token is one that the drafter knows")
def _draft_vocabulary(c: Columns) -> Seen:
    known = draft_tokens(c.run)
    if known is not None:
        note = f"{len(known):,} tokens of the target"
    elif lacks_draft_tokens(c.run):
        note = NOT_TOLD
    elif c.run is not None and c.run.evidence:
        note = "the drafter's vocabulary is not reduced"
    else:
        note = "the capture does not tell what the drafter knows"
    return Seen(
        ~np.isin(c.token, () if known is None else known),
        (c.source != TEXT) & (known is not None),  # what is drafted from a text, beside a model, may be any token
        lambda i: f"token {c.token[i]} is not among them",
        note,
    )


@DRAFTS.add("drafts as planned", "sampled requests' trees are drawn from q, each node of the plan", "step")
def _planned(c: Columns) -> Seen:
    """They lack no node that q could still give."""
    plan, sizes, drawn = plan_of(c.run), np.diff(c.start), c.any_in_step(c.sampled)
    is_planned = plan is not None and not plan.top
    tested = c.known & ~c.greedy & (sizes > 0) & is_planned
    lacking = np.zeros(len(c), np.int64)
    children = [] if plan is None else [plan.shape.children(node) for node in range(-1, len(plan.shape))]
    for step in np.flatnonzero(tested & drawn & (sizes < len(children) - 1)).tolist():
        part = c.visits[step].part
        # Another engine's scheduler may cut a chain: by a grammar, by a step's budget, where a request is about to end.
        cut = part.sizing or part.is_ranked_with_text or not c.ours
        # After a node the grammar may refuse every token that the drafter knows.
        cut = cut or c.params[step].has("structured_outputs")
        lacking[step] = 0 if cut else _lacking(part.tree, children)
    return Seen(
        ~drawn | (lacking > 0),
        tested,
        lambda s: (
            f"{lacking[s]} nodes of the plan {plan} are missing, though q had tokens left"
            if drawn[s]
            else f"drawn as deterministic at temperature {c.params[s].temperature:g}"
        ),
        "" if is_planned else "the drafter is no model with a static tree that is to be sampled",
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
        place.update(zip(children, wanted, strict=False))
        queue += children[: len(wanted)]
    return missing


@DRAFTS.add("likeliest draft first", "a deterministic first child is the token that the drafter held likeliest")
def _likeliest_first(c: Columns) -> Seen:
    """A near tie may be either."""
    e = c.parents
    parent = e.at_node
    bad = tested = np.zeros(len(c.token), np.bool_)
    if e.draft_top.size:
        with_text = np.array([visit.part.is_ranked_with_text for visit in c.visits], np.bool_)
        plain = c.known & ~with_text & ~c.asked(lambda params: params.moved)
        tested = ~c.sampled & (c.sibling == 0) & (parent >= 0) & plain[c.step]
        tested &= (e.draft_top[parent, 0] >= 0) & (e.draft_top_p[parent, 0] > 0)
        drafters = np.nan_to_num(e.drafters(parent, c.token))
        bad = (e.draft_top[parent, 0] != c.token) & (drafters < e.draft_top_p[parent, 0] * (1 - 1e-3) - 1e-6)
    return Seen(
        bad,
        tested,
        lambda i: (
            f"token {c.token[i]}, but the drafter's likeliest is token {e.draft_top[parent[i], 0]} "
            f"with {e.draft_top_p[parent[i], 0]:.4g}"
        ),
        "" if c.run is None or c.run.draft_model else "the drafter is no model",
    )


@DRAFTS.add("drafts in place", "drafted tokens are the text's at their own depth, no more often at another", "draft")
def _in_place(c: Columns) -> Seen:
    texts, nodes = c.texts, np.flatnonzero(c.is_first & ~_padding(c))
    shares: dict[int, tuple[float, float]] = {}  # by shift: the share that fits, and its variance
    for shift in SHIFTS:
        there = texts.token_at(c.step[nodes], c.depth[nodes] + shift)
        some = there >= 0
        shares[shift] = share_of(*texts.by_request(c.token[nodes[some]] == there[some], c.step[nodes[some]]))
    best = max(shares, key=lambda shift: shares[shift][0])
    tested, bad = np.zeros((2, len(c.token)), np.bool_)
    tested[nodes[texts.token_at(c.step[nodes], c.depth[nodes]) >= 0]] = True
    tested &= tested.sum() >= FEWEST
    (own_share, own_variance), (share, variance) = shares[0], shares[best]
    z = (share - own_share) / math.sqrt(own_variance + variance)
    if best != 0 and z >= SIGMAS and share >= AS_OFTEN * own_share and share >= 0.1:
        bad[nodes] = texts.token_at(c.step[nodes], c.depth[nodes] + best) == c.token[nodes]
    where = f"{abs(best)} {'further on' if best > 0 else 'before'}"
    detail = f"a drafted token is the text's token {where} in {100 * share:.0f} %, "
    detail += f"at its own place in {100 * own_share:.0f} % (n = {tested.sum():,})"
    return Seen(bad, tested, lambda _: detail, "" if tested.any() else FEW, z=z)


def _padding(c: Columns) -> Bools:
    """Where a text holds nothing more to draft: vLLM's V2 runner fills the chain of an n-gram with the root's token."""
    if c.run is None or c.run.is_ours or not text_part(c.run.drafter):
        return np.zeros(len(c.token), np.bool_)
    others = np.concatenate([[0], np.cumsum(c.token != c.texts.token_at(c.step, np.zeros_like(c.step)))])
    return np.asarray(others[c.start[c.step + 1]] == others[:-1], np.bool_)


@DRAFTS.add("placeholders", "no token that is in no text and nobody's choice is drafted over and over")
def _placeholders(c: Columns) -> Seen:
    free = ~c.limited[c.step]  # a grammar favours tokens of its own
    free &= free.sum() >= FEWEST
    tokens, place, counts = np.unique(c.token, return_inverse=True, return_counts=True)
    counts = np.bincount(place, free, len(tokens)).astype(np.int64)
    accepted = np.bincount(place, c.accepted, len(tokens))
    spoken = np.zeros(len(tokens))
    known, times = np.unique(c.texts.text, return_counts=True)
    spoken[np.isin(tokens, known)] = times[np.isin(known, tokens)]
    rare = (accepted == 0) & (spoken <= 0.001 * len(c.texts.text)) & (counts >= max(20, 0.05 * free.sum()))
    odd = [number for number in np.flatnonzero(rare).tolist() if not _is_chosen(c, int(tokens[number]))]
    return Seen(
        np.isin(place, odd) & ~c.filler,
        free,
        lambda i: f"token {c.token[i]} is {counts[place[i]]:,} of {free.sum():,} drafted tokens, accepted never",
        "" if free.any() else FEW,
    )


def _is_chosen(c: Columns, token: int) -> bool:
    """Whether the drafter's own notes have a token among its likeliest where it was drafted."""
    e, parent = c.parents, c.parents.at_node
    noted = (c.token == token) & (parent >= 0)
    if not e.draft_top.size or not (noted & (e.draft_top_p[parent].any(axis=1))).any():
        return c.run is not None and bool(c.run.draft_model) and token > 2  # as far as is known
    return bool(np.isfinite(e.drafters(parent[noted], c.token[noted])).mean() > 0.5)


FLAT = 1e-3  # of a norm: hidden states between layers vary far more from row to row
ROWS, DIFFERENT = 20, 8  # rows, and tokens behind them, before a norm is said to be the same everywhere


@DRAFTS.add("features fed", "the rows that fed the head hold features, each its own", "row")
def _fed_features(c: Columns) -> Seen:
    """What fed a head is no row of zeros, no row of another position, and no layer's was normalised.

    No two positions of a text have the same norms in two layers or more, but where a text goes round in a loop. A
    single layer's may agree by chance, and are compared with those of the position before.
    """
    rows: list[tuple[int, str]] = []  # the step of each row that was looked at, and what is wrong with it
    of_rows: list[tuple[float, ...]] = []
    tokens = set[int]()
    last: dict[str, dict[tuple[float, ...], tuple[int, int]]] = {}  # of each request its rows: position, token behind
    for step in np.flatnonzero(lengths(c.picked, "notes", "fed_norms")).tolist():
        notes, seen = c.visits[step].part.notes, last.setdefault(c.visits[step].request.id, {})
        assert notes is not None
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
    problems = [problem or flat for _, problem in rows]
    return Seen(
        np.array(list(map(bool, problems)), np.bool_),
        np.ones(len(rows), np.bool_),
        problems.__getitem__,
        "" if rows else "the capture tells of no features that fed a head",
        lambda row: c.at_step(rows[row][0]),
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


@DRAFTS.add("drafter's cache", "a draft model's cache holds no token that it was not fed", "step")
def _drafters_cache(c: Columns) -> Seen:
    """It holds no more than what its passes have fed: its text, and accepted nodes that it ran."""
    limit, cached = most_cached(c), numbers(c.picked, "notes", "cached", -1)
    runs_model = np.array([model_part(visit.part.drafter) == "draft_model" for visit in c.visits], np.bool_)
    return Seen(
        cached > limit,
        runs_model & (limit >= 0) & (cached >= 0),
        lambda s: f"counts {cached[s]} tokens as cached, {limit[s]} at most were fed and kept",
        "" if runs_model.any() else "the drafter is no draft model",
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


@DRAFTS.add(
    "draft coins in their intervals",
    "the coin that drew a draft lies in the draft's interval of q's distribution function",
)
def _in_intervals(c: Columns) -> Seen:
    """[low, low + q), q renormalised after the siblings drawn before; q and what was left of it were float32."""
    left, low = np.maximum(c.q_left, 1e-12), c.draft_low
    share, drawn = RELATIVE + WHOLE / left, low[c.drawn_by_coin]
    single = bool((drawn == drawn.astype(np.float32)).all())  # sums over a vocabulary in float32
    high = low + c.q / left  # both ends are over what was left, whose error so moves them
    slack = share * high + (WHOLE if single else LEAST)
    return Seen(
        (c.draft_coin < low - slack) | (c.draft_coin >= high + slack),
        c.drawn_by_coin & c.sound[c.step] & (share < HOPELESS) & (slack < HOPELESS),
        lambda i: f"coin {c.draft_coin[i]:.6g} is not in [{low[i]:.6g}, {high[i]:.6g}), the interval of its draft",
        undrawn(c),
    )


@DRAFTS.add("draft coins", "every draft's coin follows from the request's seed, the root's position and its draw")
def _recomputed_draft_coins(c: Columns) -> Seen:
    number = draw_numbers(c)
    tested = c.drawn_by_coin & c.known[c.step] & (number >= 0) & c.ours
    nodes, bad = np.flatnonzero(tested), np.zeros(len(c.token), np.bool_)
    bad[nodes] = c.draft_coin[nodes] != coins_of(own_key(c, Stream.DRAFT), c.step[nodes], number[nodes])
    return Seen(
        bad,
        tested,
        lambda i: f"not coin {number[i]} of seed {c.params[c.step[i]].seed} at position {c.position[c.step[i]]}",
        undrawn(c) if c.ours else "the coins are another engine's",
    )


def undrawn(c: Columns) -> str:
    """Why no draft has a coin; "" where one has."""
    untold = "the capture does not tell the coins that drew drafts"
    return "" if c.drawn_by_coin.any() else untold if c.sampled.any() else "no draft was sampled"
