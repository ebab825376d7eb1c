"""What the evidence says about the tried parents must agree with itself: ranks, likeliest tokens, entropies."""

from __future__ import annotations

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import HOPELESS, LEAST, RECOVERED, RELATIVE, WHOLE, check_each
from specscope.trace.record.tree import Bools, Doubles

NATS = 1e-3  # by which an entropy in float32 over a whole vocabulary may be off
SURE = 0.99  # a token with more of p has nearly all of the residual too, whatever was rejected
LACKING = "the capture has no evidence on the parents that were tried"


def parent_checks(c: Columns) -> list[Finding]:
    """All checks of the tried parents; skipped where the capture has no such evidence."""
    return [
        likeliest_tokens(c),
        ranks(c),
        raw_probabilities(c),
        drafters_own(c),
        entropies(c),
        greedy_acceptance(c),
        greedy_tokens(c),
        final_entropies(c),
        final_shares(c),
    ]


def likeliest_tokens(c: Columns) -> Finding:
    """No drafted token has more than the target's choice; the choice, where it was drafted, has exactly that."""
    parent = c.parents.at_node
    has_parent = parent >= 0
    choice_p = _values_at(c.parents.choice_p, parent)
    is_choice = has_parent & (_values_at(c.parents.choice, parent) == c.token) & c.named
    bad = c.p > choice_p * (1 + RELATIVE) + LEAST
    bad |= is_choice & ~np.isclose(c.p, choice_p, rtol=1e-4, atol=LEAST)
    return check_each(
        "target's choice",
        "no drafted token is likelier than the target's first choice",
        bad,
        has_parent & c.told[c.step],
        c.nodes,
        lambda i: f"p = {c.p[i]:.6g}, the choice (token {c.parents.choice[parent[i]]}) has {choice_p[i]:.6g}",
        note="" if len(c.parents) else LACKING,
    )


def ranks(c: Columns) -> Finding:
    """A token of rank r has at most 1 / r; rank 1 is the likeliest; no rank where p is 0."""
    parent, rank = c.parents.at_node, c.parents.rank
    has_parent = parent >= 0
    bad = (c.p * rank > 1 + 1e-4) | ((rank == 0) != (c.p == 0))
    bad |= (rank == 1) & (c.p < _values_at(c.parents.choice_p, parent) * (1 - 1e-4) - LEAST)
    first = c.sampled & (c.sibling == 0)
    bad |= first & (c.q * c.parents.q_rank > 1 + 1e-4)
    return check_each(
        "ranks",
        "a token of rank r has at most 1 / r of p, and rank 1 the most",
        bad,
        has_parent & c.told[c.step],
        c.nodes,
        lambda i: f"rank {rank[i]} with p = {c.p[i]:.6g}; rank {c.parents.q_rank[i]} in q with q = {c.q[i]:.6g}",
        note="" if len(c.parents) else LACKING,
    )


def raw_probabilities(c: Columns) -> Finding:
    """The likeliest tokens in falling order, with a sum of 1 at most; a drafted one among them has their raw p."""
    e = c.parents
    parent = e.at_node
    bad = tested = np.zeros(len(parent), np.bool_)
    if e.top.size:
        tested = (parent >= 0) & c.told[c.step]
        disordered = (np.diff(e.top_p, axis=1) > LEAST).any(axis=1) | (e.top_p.sum(axis=1) > 1 + 1e-4)
        same = e.top[parent] == c.token[:, None]
        top_p = np.where(same, e.top_p[parent], 0).sum(axis=1)
        listed = same.any(axis=1)
        bad = disordered[parent] | (listed & ~np.isclose(e.raw_p, top_p, rtol=1e-4, atol=LEAST))
        bad |= ~listed & (e.raw_p > e.top_p[parent, -1] * (1 + 1e-4) + LEAST)
    return check_each(
        "raw probabilities",
        "the target's raw probability of a drafted token agrees with its likeliest tokens",
        bad,
        tested,
        c.nodes,
        lambda i: f"raw p = {e.raw_p[i]:.6g}, likeliest {_listed(e.top[parent[i]], e.top_p[parent[i]])}",
        note="" if len(e) else LACKING,
    )


def drafters_own(c: Columns) -> Finding:
    """The drafter's likeliest tokens in falling order; its p of the target's choice and of drafted tokens agrees."""
    e = c.parents
    bad = np.zeros(len(e), np.bool_)
    has_list = np.zeros(len(e), np.bool_)
    if e.draft_top.size:
        has_list = e.draft_top[:, 0] >= 0
        bad = (np.diff(e.draft_top_p, axis=1) > LEAST).any(axis=1) | (e.draft_top_p.sum(axis=1) > 1 + 1e-4)
        of_choice = e.drafters(np.arange(len(e)), e.top[:, 0])
        bad |= np.isfinite(of_choice) & ~np.isclose(e.choice_q, of_choice, rtol=1e-3, atol=LEAST)
        bad |= (e.choice_rank * e.choice_q > 1 + 1e-4) | ((e.choice_rank == 0) & (e.choice_q > 0))
        parent = e.at_node
        raw = e.drafters(parent, c.token)
        plain = ~np.array([params.moved for params in c.params], np.bool_)[c.step]
        off = plain & ~c.sampled & np.isfinite(raw) & ~np.isclose(c.draft_prob, raw, rtol=1e-3, atol=LEAST)
        bad[parent[off & np.isfinite(c.draft_prob)]] = True
    return check_each(
        "drafter's likeliest",
        "what the drafter gave its tokens and the target's choice agrees with its likeliest tokens",
        bad,
        has_list & c.told[e.step],
        c.tried_parents,
        lambda k: (
            f"likeliest {_listed(e.draft_top[k], e.draft_top_p[k])}; the target's choice {e.top[k, 0]} has "
            f"{e.choice_q[k]:.4g} at rank {e.choice_rank[k]}"
        ),
        note=LACKING if not len(e) else "the drafter is no model" if not has_list.any() else "",
    )


def _listed(tokens: np.ndarray, probs: np.ndarray) -> str:
    return ", ".join(f"{token}: {p:.4g}" for token, p in zip(tokens.tolist(), probs.tolist(), strict=True))


def entropies(c: Columns) -> Finding:
    """An entropy is at least that of the choice's share against one other token, and 0 where the choice has all."""
    e = c.parents
    certain = e.choice_p >= 1
    bad = (e.entropy < least_entropy(e.choice_p) - NATS) | (certain & (e.entropy > NATS)) | (e.varentropy < 0)
    return check_each(
        "entropies",
        "the entropy of p fits the likeliest token's share",
        bad,
        c.told[e.step],
        c.tried_parents,
        lambda k: f"entropy {e.entropy[k]:.6g} nats where the likeliest token has {e.choice_p[k]:.6g}",
        note="" if len(e) else LACKING,
    )


def least_entropy(p: Doubles) -> Doubles:
    """In nats, of a distribution in which some token has p: all the rest is on one other token."""
    p = np.clip(p, 1e-300, 1.0)
    rest = np.clip(1 - p, 1e-300, 1.0)
    return -(p * np.log(p) + rest * np.log(rest))


def greedy_acceptance(c: Columns) -> Finding:
    """At temperature 0 coins decide nothing: the token whose p is 1 is accepted, and nothing else.

    Rules that look ahead are left out: they also reject such a token below one whose p is not 1.
    """
    greedy = c.greedy & c.told & c.by_rule.walks
    return check_each(
        "greedy acceptance",
        "at temperature 0 a draft is accepted where it is the target's first choice, and nowhere else",
        c.accepted != (c.p == 1),
        c.tried & greedy[c.step] & ~c.forced,
        c.nodes,
        lambda i: f"token {c.token[i]} was {'accepted' if c.accepted[i] else 'rejected'} with p {c.p[i]:g}",
        note="" if c.greedy.any() else "no request was greedy",
    )


def greedy_tokens(c: Columns) -> Finding:
    """At temperature 0 every p is 0 or 1, and what comes out is the target's choice."""
    e = c.parents
    bad = np.zeros(len(c), np.bool_)
    uncertain = ~np.isin(c.p, (0, 1))
    bad[c.step[uncertain]] = True
    bad |= (c.final_p != 1) & ~c.forced_final
    parent = e.at_row[c.final_row] if len(c) else np.zeros(0, np.int64)
    chosen = (parent < 0) | (_values_at(e.choice, parent) == c.final)  # without token ids all are the same
    bad |= (c.kind == RECOVERED) & ~chosen & ~c.forced_final
    return check_each(
        "greedy tokens",
        "at temperature 0 every p is 0 or 1, and the target's first choice comes out",
        bad,
        c.greedy & c.told,
        c.steps,
        lambda s: f"final p {c.final_p[s]:.6g}, p {np.round(c.verdicts[s].p, 6).tolist()}",
        note="" if c.greedy.any() else "no request was greedy",
    )


def final_entropies(c: Columns) -> Finding:
    """The final token's share bounds the entropy of what it was drawn from."""
    e = c.parents
    bad = e.final_entropy < least_entropy(np.minimum(c.final_p, 1.0)) - NATS
    return check_each(
        "entropy of the final draw",
        "the entropy of what the final token was drawn from fits that token's share",
        bad,
        e.there & c.told & ~c.forced_final,
        c.steps,
        lambda s: f"entropy {e.final_entropy[s]:.6g} nats, the token had {c.final_p[s]:.6g}",
        note="" if e.there.any() else LACKING,
    )


def final_shares(c: Columns) -> Finding:
    """What the final token was drawn with, from its p: over the mass that rejections left, less what q took."""
    e = c.parents
    left = _left(c)
    limit = np.where(c.greedy, e.final_p, e.final_p / left)
    exact = ~c.children_at(c.sampled & c.rejected)[c.final_row]
    slack = 1e-4 * limit + WHOLE / left
    whole = of_all_p(c)
    # About one in a million looks like this by chance: a few of many are no fault
    whole &= whole.sum() > max(3, 0.01 * (e.there & (c.kind == RECOVERED)).sum())
    bad = (c.final_p > limit + slack) | (exact & (c.final_p < limit - slack)) | whole
    return check_each(
        "share of the final token",
        "the final token was drawn with its p, over the mass that rejections left",
        bad,
        e.there & c.told & ~c.forced_final & (slack < HOPELESS),
        c.steps,
        lambda s: f"drawn with {c.final_p[s]:.6g}, from its p of {e.final_p[s]:.6g} it would be {limit[s]:.6g}",
        note="" if e.there.any() else LACKING,
    )


def _left(c: Columns) -> Doubles:
    """[S] the mass that rejections left of the p that the final token was drawn from."""
    left = np.ones(c.rows)
    gone = c.rejected & (c.residual_mass > 0) & (c.by_rule.parent > 0)
    np.multiply.at(left, c.row[gone], c.residual_mass[gone] / c.by_rule.parent[gone])
    return left[c.final_row]


def of_all_p(c: Columns) -> Bools:
    """[S] final tokens drawn with their whole p, as if nothing had been rejected.

    Tokens that have nearly all of p are left out: they have nearly all of what is left of it too.
    """
    e = c.parents
    limit = np.where(c.greedy, e.final_p, e.final_p / _left(c))
    due = e.there & (c.kind == RECOVERED) & ~c.greedy & ~c.forced_final & (limit > 1.01 * e.final_p)
    due &= e.final_p < SURE
    return np.asarray(due & (np.abs(c.final_p - e.final_p) <= 1e-6 * e.final_p))


def _values_at(values: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The values at these places. What is given for place -1 means nothing; all are 0 where there are no values."""
    return values[place] if len(values) else np.zeros(len(place), values.dtype)
