"""What was drafted. A run with such a fault may be lossless; its acceptance is lower than it should be."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from specscope.analyze.evidence.arrays import Indices, joined, lengths, numbers
from specscope.analyze.evidence.columns import WHOLE, Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.chance import FEW, share_of
from specscope.analyze.verify.exact import (
    HOPELESS,
    LEAST,
    RELATIVE,
    Check,
    childless,
    coins_of,
    draw_numbers,
    own_key,
    plan_of,
    undrawn,
    with_children,
)
from specscope.plans.kinds import model_part, text_part
from specscope.trace.record.coins import Stream
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_tokens, lacks_draft_tokens
from specscope.trace.record.notes import TEXT
from specscope.trace.record.records import Preceded, RequestStep
from specscope.trace.record.tree import ROOT, Bools, DraftTree

SHIFTS = (-2, -1, 0, 1, 2)
FEWEST = 40  # drafted tokens: fewer say little about the text
SIGMAS = 5.0  # standard errors that count; over requests, as the tokens of one are not independent
AS_OFTEN = 2.0  # times as often at another place as at its own
LEFT = 1e-3  # of q: with less, no further sibling could be drawn
FLAT = 1e-3  # of a norm: hidden states between layers vary far more from row to row
ROWS, DIFFERENT = 20, 8  # rows, and tokens behind them, before a norm is said to be the same everywhere


def from_vocabulary(c: Columns) -> Iterator[Finding]:
    known, is_told = draft_tokens(c.run), c.run is not None and bool(c.run.evidence)
    note = "the drafter's vocabulary is not reduced" if is_told else "the draft vocabulary is not recorded"
    if known is not None:
        note = f"{len(known):,} tokens of the target"
    elif lacks_draft_tokens(c.run):
        note = NOT_TOLD
    yield Check(c, "draft vocabulary", "every drafted token is in the draft vocabulary").of(
        ~np.isin(c.token, () if known is None else known),
        (c.source != TEXT) & (known is not None),  # what is drafted from a text, beside a model, may be any token
        lambda i: f"token {c.token[i]} is not among them",
        note,
    )


def as_planned(c: Columns) -> Iterator[Finding]:
    """Sampled trees lack no node that q could still give; deterministic ones begin with the likeliest."""
    plan, sizes, drawn = plan_of(c.run), np.diff(c.start), c.any_in_step(c.sampled)
    is_planned = plan is not None and not plan.top
    tested = c.known & ~c.greedy & (sizes > 0) & is_planned
    lacking = np.zeros(len(c), np.int64)
    children = [] if plan is None else [plan.shape.children(node) for node in range(ROOT, len(plan.shape))]
    for step in np.flatnonzero(tested & drawn & (sizes < len(children) - 1)).tolist():
        part = c.parts[step]
        # Another engine's scheduler may cut a chain, and after a node a grammar refuse every token of the drafter's
        cut = part.sizing or part.is_ranked_with_text or not c.ours or c.params[step].has("structured_outputs")
        lacking[step] = 0 if cut else _lacking(part.tree, children)

    def differs(s: int) -> str:
        missing = f"{lacking[s]} nodes of the plan {plan} are missing, though q had tokens left"
        return missing if drawn[s] else f"drawn as deterministic at temperature {c.params[s].temperature:g}"

    about = "sampled requests' trees are drawn from q, each node of the plan"
    why = "" if is_planned else "the drafter is not a model with a sampled static tree"
    yield Check(c, "drafts as planned", about, "step").of(~drawn | (lacking > 0), tested, differs, why)
    e, parent, plain = c.parents, c.parents.at_node, c.known & ~c.asked(lambda params: params.moved)
    bad = likely = np.zeros(len(c.token), np.bool_)
    if e.draft_top.size:
        plain &= ~np.array([part.is_ranked_with_text for part in c.parts], np.bool_)
        top, top_p = e.draft_top[parent, 0], e.draft_top_p[parent, 0]
        likely = ~c.sampled & (c.sibling == 0) & (parent >= 0) & plain[c.step] & (top >= 0) & (top_p > 0)
        # A near tie may be either
        bad = (top != c.token) & (np.nan_to_num(e.drafters(parent, c.token)) < top_p * (1 - 1e-3) - 1e-6)
    about = "a deterministic first child is the drafter's likeliest token"
    yield Check(c, "likeliest draft first", about).of(
        bad,
        likely,
        lambda i: f"token {c.token[i]}, but the drafter's likeliest is token {top[i]} with {top_p[i]:.4g}",
        "" if c.run is None or c.run.draft_model else "the drafter is not a model",
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


def in_text(c: Columns) -> Iterator[Finding]:
    """Drafts against the text: in their own place, and found there at all."""
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
    where = f"{abs(best)} {'further on' if best > 0 else 'before'} in {100 * share:.0f} %"
    own = f"at its own place in {100 * own_share:.0f} % (n = {tested.sum():,})"
    detail, why = f"a drafted token is the text's token {where}, {own}", "" if tested.any() else FEW
    about = "drafted tokens are the text's at their own depth, no more often at another"
    yield Check(c, "drafts in place", about, "drafted token").of(bad, tested, lambda _: detail, why, z=z)
    free = ~c.limited[c.step]  # a grammar favours tokens of its own
    free &= free.sum() >= FEWEST
    tokens, place = np.unique(c.token, return_inverse=True)
    counts, accepted = (np.bincount(place, some, len(tokens)).astype(np.int64) for some in (free, c.accepted))
    spoken = np.bincount(np.searchsorted(tokens, texts.text[np.isin(texts.text, tokens)]), minlength=len(tokens))
    rare = (accepted == 0) & (spoken <= 0.001 * len(texts.text)) & (counts >= max(20, 0.05 * free.sum()))
    odd = [number for number in np.flatnonzero(rare).tolist() if not _is_chosen(c, int(tokens[number]))]
    yield Check(c, "placeholders", "no token that is in no text and no model's choice is drafted over and over").of(
        np.isin(place, odd) & ~c.filler,
        free,
        lambda i: f"token {c.token[i]} is {counts[place[i]]:,} of {free.sum():,} drafted tokens, never accepted",
        "" if free.any() else FEW,
    )


def _padding(c: Columns) -> Bools:
    """Where a text holds nothing more to draft: vLLM's V2 runner fills the chain of an n-gram with the root's token."""
    if c.run is None or c.run.is_ours or not text_part(c.run.drafter):
        return np.zeros(len(c.token), np.bool_)
    others = np.concatenate([[0], np.cumsum(c.token != c.texts.token_at(c.step, np.zeros_like(c.step)))])
    return np.asarray(others[c.start[c.step + 1]] == others[:-1], np.bool_)


def _is_chosen(c: Columns, token: int) -> bool:
    """Whether the drafter's own notes have a token among its likeliest where it was drafted."""
    e, parent = c.parents, c.parents.at_node
    noted = (c.token == token) & (parent >= 0)
    if not e.draft_top.size or not (noted & (e.draft_top_p[parent].any(axis=1))).any():
        return c.run is not None and bool(c.run.draft_model) and token > 2  # as far as is known
    return bool(np.isfinite(e.drafters(parent[noted], c.token[noted])).mean() > 0.5)


def drafters_state(c: Columns) -> Iterator[Finding]:
    """What fed a head, and what a draft model cached.

    No two positions of a text have the same norms in two layers or more, but where a text goes round in a loop. A
    single layer's may agree by chance: they are compared with those of the position before, where not all are alike.
    """
    steps, problems, of_rows, tokens = list[int](), list[str](), list[tuple[float, ...]](), set[int]()
    known: dict[tuple[str, tuple[float, ...]], tuple[int, int]] = {}  # a request's norms: position, token behind
    every = joined(c.picked, "notes", "fed_norms", np.float64)
    alike = len(every) > 0 and float(np.std(every)) < FLAT * float(np.mean(every))
    for step in np.flatnonzero(lengths(c.picked, "notes", "fed_norms")).tolist():
        part = c.parts[step]
        assert part.notes is not None
        fed = (getattr(part.notes, name).tolist() for name in ("fed_position", "fed_token", "fed_norms"))
        for position, token, norms in zip(*fed, strict=True):
            problem, key = "", (part.request, tuple(norms))
            before, behind = known.setdefault(key, (position, token))
            if not any(norms):
                problem = f"the features of position {position} are all zero"
            elif before == position - 1 and not (alike and len(norms) == 1):
                problem = f"position {position} holds the features of the previous position"
            elif before != position and behind != token and len(norms) > 1:
                problem = f"position {position} holds the features of position {before}"
            steps.append(step)
            problems.append(problem)
            of_rows.append(key[1])
            tokens.add(token)
    flat = _normalised(of_rows) if len(tokens) >= DIFFERENT else ""
    problems = [problem or flat for problem in problems]
    bad, tested = np.array(list(map(bool, problems)), np.bool_), np.ones(len(steps), np.bool_)
    why, where = "" if steps else "the capture records no features fed to a head", lambda row: c.at_step(steps[row])
    about = "each row fed to the head holds its own features"
    yield Check(c, "features fed", about, "row").of(bad, tested, problems.__getitem__, why, where)
    # A cache holds no more than what its passes have fed: its text, and accepted nodes that it ran
    limit, cached = most_cached(c), numbers(c.picked, "notes", "cached", -1)
    runs_model = np.array([model_part(part.drafter) == "draft_model" for part in c.parts], np.bool_)
    yield Check(c, "drafter's cache", "a draft model's cache holds only tokens that it was fed", "step").of(
        cached > limit,
        runs_model & (limit >= 0) & (cached >= 0),
        lambda s: f"counts {cached[s]} tokens as cached; at most {limit[s]} were fed and kept",
        "" if runs_model.any() else "the drafter is not a draft model",
    )


def _normalised(of_rows: list[tuple[float, ...]]) -> str:
    """What is wrong where a layer's norm is the same in every row; "" elsewhere. One layer may lie behind a norm."""
    if len(of_rows) < ROWS or len(set(map(len, of_rows))) != 1 or len(of_rows[0]) == 1:
        return ""
    mean, spread = np.mean(of_rows, axis=0), np.std(of_rows, axis=0)
    flat = np.flatnonzero((spread < FLAT * mean) & (mean > 0))
    if not len(flat):
        return ""
    which = "each of the layers" if len(flat) == len(mean) else f"layer {flat[0] + 1} of the {len(mean)}"
    return f"{which} has features with a norm of {mean[flat[0]]:.4g} in every row: they were normalised"


def most_cached(c: Columns) -> Indices:
    """[S] how many tokens a draft model's cache may hold when each step begins; -1 where that is not known."""
    limit = np.full(len(c), -1, np.int64)
    back = False  # the run went back: what was fed then may still be cached
    for step, (visit, before) in enumerate(zip(c.visits, c.before.tolist(), strict=True)):
        part, first = visit.part, visit.request.steps[0]
        back |= visit.record.rewound or visit.record.after is not None
        if part.preceded is Preceded.PREEMPTION and not part.found:
            limit[step] = 0
        elif before < 0 and c.ours and not back and first.index == 0 and part.preceded is Preceded.PREFILL:
            limit[step] = first.found  # no pass fed anything before its first draft
        elif before >= 0 and part.index == c.parts[before].index + 1:
            limit[step] = _held_after(c.parts[before])
    return limit


def _held_after(part: RequestStep) -> int:
    """How many tokens a draft model's cache may hold after a step; -1 where its passes' rows are not recorded."""
    rows = part.told("notes", "rows")
    if rows is None or not len(rows) or part.verdict is None:
        return -1
    fed = len(with_children(part).intersection(part.verdict.path.tolist()))
    return part.position + 1 + (fed + childless(part) if len(rows) > 1 else 0)


def coins_of_draws(c: Columns) -> Iterator[Finding]:
    # [low, low + q), q renormalised after the siblings drawn before; q and what was left of it were float32
    left, low = np.maximum(c.q_left, 1e-12), c.draft_low
    share, drawn = RELATIVE + WHOLE / left, low[c.drawn_by_coin]
    single = bool((drawn == drawn.astype(np.float32)).all())  # sums over a vocabulary in float32
    high = low + c.q / left  # both ends are over what was left, whose error so moves them
    slack = share * high + (WHOLE if single else LEAST)
    about = "the coin that drew a draft lies in the draft's interval of q's distribution function"
    yield Check(c, "draft coins in their intervals", about).of(
        (c.draft_coin < low - slack) | (c.draft_coin >= high + slack),
        c.drawn_by_coin & c.sound[c.step] & (share < HOPELESS) & (slack < HOPELESS),
        lambda i: f"coin {c.draft_coin[i]:.6g} is not in [{low[i]:.6g}, {high[i]:.6g}), the interval of its draft",
        undrawn(c),
    )
    number, bad = draw_numbers(c), np.zeros(len(c.token), np.bool_)
    tested = c.drawn_by_coin & c.known[c.step] & (number >= 0) & c.ours
    nodes = np.flatnonzero(tested)
    bad[nodes] = c.draft_coin[nodes] != coins_of(own_key(c, Stream.DRAFT), c.step[nodes], number[nodes])
    about = "every draft's coin follows from the request's seed, the root's position and its draw"
    yield Check(c, "draft coins", about).of(
        bad,
        tested,
        lambda i: f"not coin {number[i]} of seed {c.params[c.step[i]].seed} at position {c.position[c.step[i]]}",
        undrawn(c) if c.ours else "the coins come from another engine",
    )
