"""What the evidence says about tried parents and emitted tokens must agree with itself: ranks, entropies, logprobs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specscope.analyze.evidence.arrays import Indices, holding, joined, lengths, padded
from specscope.analyze.evidence.columns import RECOVERED, Columns
from specscope.analyze.verify.exact import HOPELESS, LEAST, RELATIVE, WHOLE, Checks, Seen
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.tree import Bools, Doubles

EVIDENCE = Checks("The evidence")
NATS = 1e-3  # by which an entropy in float32 over a whole vocabulary may be off
SURE = 0.99  # a token with more of p has nearly all of the residual too, whatever was rejected
ERROR = 1e-3  # of a log-probability in float32 over a whole vocabulary
TINY = 1e-6  # a raw probability below is stored with few digits
LACKING = "the capture has no evidence on the parents that were tried"


def lacking(c: Columns) -> str:
    """Why there is nothing to look at; "" where there is."""
    return "" if len(c.parents) else LACKING


@EVIDENCE.add("target's choice", "no drafted token is likelier than the target's first choice")
def _likeliest_tokens(c: Columns) -> Seen:
    """And the choice, where it was drafted, has exactly that."""
    parent = c.parents.at_node
    has_parent = parent >= 0
    choice_p = _values_at(c.parents.choice_p, parent)
    is_choice = has_parent & (_values_at(c.parents.choice, parent) == c.token) & c.named
    bad = c.p > choice_p * (1 + RELATIVE) + LEAST
    return Seen(
        bad | (is_choice & ~np.isclose(c.p, choice_p, rtol=1e-4, atol=LEAST)),
        has_parent & c.told[c.step],
        lambda i: f"p = {c.p[i]:.6g}, the choice (token {c.parents.choice[parent[i]]}) has {choice_p[i]:.6g}",
        lacking(c),
    )


@EVIDENCE.add("ranks", "a token of rank r has at most 1 / r of p, and rank 1 the most")
def _ranks(c: Columns) -> Seen:
    parent, rank = c.parents.at_node, c.parents.rank
    bad = (c.p * rank > 1 + 1e-4) | ((rank == 0) != (c.p == 0))
    bad |= (rank == 1) & (c.p < _values_at(c.parents.choice_p, parent) * (1 - 1e-4) - LEAST)
    bad |= c.sampled & (c.sibling == 0) & (c.q * c.parents.q_rank > 1 + 1e-4)
    return Seen(
        bad,
        (parent >= 0) & c.told[c.step],
        lambda i: f"rank {rank[i]} with p = {c.p[i]:.6g}; rank {c.parents.q_rank[i]} in q with q = {c.q[i]:.6g}",
        lacking(c),
    )


@EVIDENCE.add("raw probabilities", "the target's raw probability of a drafted token agrees with its likeliest tokens")
def _raw_probabilities(c: Columns) -> Seen:
    """The likeliest tokens in falling order, with a sum of 1 at most; a drafted one among them has their raw p."""
    e = c.parents
    parent = e.at_node
    bad = tested = np.zeros(len(parent), np.bool_)
    if e.top.size:
        tested = (parent >= 0) & c.told[c.step]
        same = e.top[parent] == c.token[:, None]
        top_p = np.where(same, e.top_p[parent], 0).sum(axis=1)
        listed = same.any(axis=1)
        bad = _disordered(e.top_p)[parent] | (listed & ~np.isclose(e.raw_p, top_p, rtol=1e-4, atol=LEAST))
        bad |= ~listed & (e.raw_p > e.top_p[parent, -1] * (1 + 1e-4) + LEAST)
    return Seen(
        bad,
        tested,
        lambda i: f"raw p = {e.raw_p[i]:.6g}, likeliest {_listed(e.top[parent[i]], e.top_p[parent[i]])}",
        lacking(c),
    )


def _disordered(top_p: Doubles) -> Bools:
    """[K] whether the likeliest tokens' probabilities do not fall, or are more than 1 in all."""
    disordered: Bools = (np.diff(top_p, axis=1) > LEAST).any(axis=1) | (top_p.sum(axis=1) > 1 + 1e-4)
    return disordered


@EVIDENCE.add(
    "drafter's likeliest",
    "what the drafter gave its tokens and the target's choice agrees with its likeliest tokens",
    "parent",
)
def _drafters_own(c: Columns) -> Seen:
    e = c.parents
    bad, has_list = np.zeros((2, len(e)), np.bool_)
    if e.draft_top.size:
        has_list = e.draft_top[:, 0] >= 0
        of_choice = e.drafters(np.arange(len(e)), e.top[:, 0])
        bad = _disordered(e.draft_top_p)
        bad |= np.isfinite(of_choice) & ~np.isclose(e.choice_q, of_choice, rtol=1e-3, atol=LEAST)
        bad |= (e.choice_rank * e.choice_q > 1 + 1e-4) | ((e.choice_rank == 0) & (e.choice_q > 0))
        raw = e.drafters(e.at_node, c.token)
        plain = ~c.asked(lambda params: params.moved)[c.step]
        off = plain & ~c.sampled & np.isfinite(raw) & ~np.isclose(c.draft_prob, raw, rtol=1e-3, atol=LEAST)
        bad[e.at_node[off & np.isfinite(c.draft_prob)]] = True
    return Seen(
        bad,
        has_list & c.told[e.step],
        lambda k: (
            f"likeliest {_listed(e.draft_top[k], e.draft_top_p[k])}; the target's choice {e.top[k, 0]} has "
            f"{e.choice_q[k]:.4g} at rank {e.choice_rank[k]}"
        ),
        lacking(c) or ("" if has_list.any() else "the drafter is no model"),
    )


def _listed(tokens: np.ndarray, probs: np.ndarray) -> str:
    return ", ".join(f"{token}: {p:.4g}" for token, p in zip(tokens.tolist(), probs.tolist(), strict=True))


@EVIDENCE.add("entropies", "the entropy of p fits the likeliest token's share", "parent")
def _entropies(c: Columns) -> Seen:
    """At least that of the choice's share against one other token, and 0 where the choice has all."""
    e = c.parents
    certain = e.choice_p >= 1
    return Seen(
        (e.entropy < _least_entropy(e.choice_p) - NATS) | (certain & (e.entropy > NATS)) | (e.varentropy < 0),
        c.told[e.step],
        lambda k: f"entropy {e.entropy[k]:.6g} nats where the likeliest token has {e.choice_p[k]:.6g}",
        lacking(c),
    )


def _least_entropy(p: Doubles) -> Doubles:
    """In nats, of a distribution in which some token has p: all the rest is on one other token."""
    p = np.clip(p, 1e-300, 1.0)
    rest = np.clip(1 - p, 1e-300, 1.0)
    return -(p * np.log(p) + rest * np.log(rest))


@EVIDENCE.add(
    "greedy acceptance", "at temperature 0 a draft is accepted where it is the target's first choice, and nowhere else"
)
def _greedy_acceptance(c: Columns) -> Seen:
    """Rules that look ahead are left out: they also reject such a token below one whose p is not 1."""
    greedy = c.greedy & c.told & c.walks
    return Seen(
        c.accepted != (c.p == 1),
        c.tried & greedy[c.step] & ~c.forced,
        lambda i: f"token {c.token[i]} was {'accepted' if c.accepted[i] else 'rejected'} with p {c.p[i]:g}",
        "" if c.greedy.any() else "no request was greedy",
    )


@EVIDENCE.add("greedy tokens", "at temperature 0 every p is 0 or 1, and the target's first choice comes out", "step")
def _greedy_tokens(c: Columns) -> Seen:
    parent = c.parents.at_row[c.final_row] if len(c) else np.zeros(0, np.int64)
    chosen = (parent < 0) | (_values_at(c.parents.choice, parent) == c.final)  # without token ids all are the same
    another = (c.final_p != 1) | ((c.kind == RECOVERED) & ~chosen)
    return Seen(
        c.any_in_step(~np.isin(c.p, (0, 1))) | (another & ~c.forced_final),
        c.greedy & c.told,
        lambda s: f"final p {c.final_p[s]:.6g}, p {np.round(c.verdicts[s].p, 6).tolist()}",
        "" if c.greedy.any() else "no request was greedy",
    )


@EVIDENCE.add(
    "entropy of the final draw", "the entropy of what the final token was drawn from fits that token's share", "step"
)
def _final_entropies(c: Columns) -> Seen:
    e = c.parents
    return Seen(
        e.final_entropy < _least_entropy(np.minimum(c.final_p, 1.0)) - NATS,
        e.there & c.told & ~c.forced_final,
        lambda s: f"entropy {e.final_entropy[s]:.6g} nats, the token had {c.final_p[s]:.6g}",
        "" if e.there.any() else LACKING,
    )


@EVIDENCE.add(
    "share of the final token", "the final token was drawn with its p, over the mass that rejections left", "step"
)
def _final_shares(c: Columns) -> Seen:
    e = c.parents
    left, limit = _left(c)
    exact = ~c.children_at(c.sampled & c.rejected)[c.final_row]
    slack = 1e-4 * limit + WHOLE / left
    whole = of_all_p(c)
    # About one in a million looks like this by chance: a few of many are no fault
    whole &= whole.sum() > max(3, 0.01 * (e.there & (c.kind == RECOVERED)).sum())
    return Seen(
        (c.final_p > limit + slack) | (exact & (c.final_p < limit - slack)) | whole,
        e.there & c.told & ~c.forced_final & (slack < HOPELESS),
        lambda s: f"drawn with {c.final_p[s]:.6g}, from its p of {e.final_p[s]:.6g} it would be {limit[s]:.6g}",
        "" if e.there.any() else LACKING,
    )


def _left(c: Columns) -> tuple[Doubles, Doubles]:
    """[S] the mass that rejections left of the p that the final token was drawn from, and its p over that."""
    left = np.ones(c.rows)
    gone = c.rejected & (c.residual_mass > 0) & (c.parent_ratio > 0)
    np.multiply.at(left, c.row[gone], c.residual_mass[gone] / c.parent_ratio[gone])
    left = left[c.final_row]
    return left, np.where(c.greedy, c.parents.final_p, c.parents.final_p / left)


def of_all_p(c: Columns) -> Bools:
    """[S] final tokens drawn with their whole p, as if nothing had been rejected.

    Tokens that have nearly all of p are left out: they have nearly all of what is left of it too.
    """
    e = c.parents
    due = e.there & (c.kind == RECOVERED) & ~c.greedy & ~c.forced_final & (_left(c)[1] > 1.01 * e.final_p)
    due &= e.final_p < SURE
    return np.asarray(due & (np.abs(c.final_p - e.final_p) <= 1e-6 * e.final_p))


def _values_at(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The values at these places. What is given for place -1 means nothing; all are 0 where there are no values."""
    return values[place] if len(values) else np.zeros(len(place), values.dtype)


@EVIDENCE.add("log-probabilities", "every log-probability is its token's own", "token")
def _log_probabilities(c: Columns) -> Seen:
    """Each is that of its token among the likeliest, and of the raw p that was recorded where it was tried or drawn."""
    counts = lengths(c.picked, "logprobs", "logprob")
    step = np.repeat(np.arange(len(c)), counts)
    place = np.arange(len(step)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0 is behind the root
    on_path = place < c.depth_reached[step]
    path = np.append(c.path, 0)[np.where(on_path, (np.cumsum(c.depth_reached) - c.depth_reached)[step] + place, -1)]
    node = np.where(on_path, c.start[step] + path, -1)
    token = np.where(on_path, np.append(c.token, 0)[node], c.final[step])
    logprob = joined(c.picked, "logprobs", "logprob", np.float64)
    top = padded(c.picked, "logprobs", "top", np.int64, NO_TOKEN)
    top_logprob = padded(c.picked, "logprobs", "top_logprob", np.float64, -np.inf)
    raw = _raw(c, node, c.final_row[step], token)
    raw[holding(c.picked, "form")[step]] = np.nan  # there raw p may be what the form left of it
    listed = (top == token[:, None]) & (token != NO_TOKEN)[:, None]
    own = np.where(listed.any(axis=1), np.where(listed, top_logprob, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    least = np.where(np.isfinite(top_logprob), top_logprob, np.inf).min(axis=1, initial=np.inf)
    problems: tuple[tuple[Bools, Callable[[int], str]], ...] = (
        (~np.isfinite(logprob) | (logprob > ERROR), lambda i: f"{logprob[i]:.6g} is no log-probability"),
        (np.abs(logprob - own) > ERROR, lambda i: f"{logprob[i]:.6g}, and {own[i]:.6g} in its list of the likeliest"),
        (np.isnan(own) & (logprob > least + ERROR), lambda i: f"{logprob[i]:.6g} is above the likeliest's"),
        (np.exp(top_logprob).sum(axis=1) > 1 + ERROR, lambda i: "the likeliest have more than 1 in all"),
        (
            (raw > TINY) & (np.abs(logprob - np.log(raw)) > ERROR),
            lambda i: f"{logprob[i]:.6g}, the target's raw p is {raw[i]:.6g}",
        ),
    )
    bad = np.any([wrong for wrong, _ in problems], axis=0) if len(step) else np.zeros(0, np.bool_)
    return Seen(
        bad,
        np.ones(len(step), np.bool_),
        lambda i: next(f"token {token[i]}: {text(i)}" for wrong, text in problems if wrong[i]),
        "" if len(step) else "no log-probabilities were asked for",
        lambda i: c.at_step(int(step[i])),
    )


def _raw(c: Columns, node: Indices, final_row: Indices, token: Indices) -> Doubles:
    """[E] the target's raw p of each emitted token, where it was recorded; else NaN. node: -1 for final tokens."""
    e = c.parents
    raw = np.full(len(token), np.nan)
    drafted = node >= 0
    there = drafted & (np.append(e.at_node, -1)[node] >= 0)
    raw[there] = e.raw_p[node[there]]
    parent = e.at_row[final_row] if len(e) else np.full(len(token), -1)
    if e.top.shape[1]:
        same = (e.top[parent] == token[:, None]) & (~drafted & (parent >= 0))[:, None]
        raw = np.where(same.any(axis=1), np.where(same, e.top_p[parent], 0).max(axis=1, initial=0), raw)
    return raw
