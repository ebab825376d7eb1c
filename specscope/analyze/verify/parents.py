"""What the evidence says about tried parents and emitted tokens must agree with itself: ranks, entropies, logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import Indices, holding, joined, lengths, padded, places
from specscope.analyze.evidence.columns import RECOVERED, Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import HOPELESS, LEAST, RELATIVE, WHOLE, Check
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.tree import Bools, Doubles

NATS = 1e-3  # by which an entropy in float32 over a whole vocabulary may be off
SURE = 0.99  # a token with more of p has nearly all of the residual too, whatever was rejected
ERROR = 1e-3  # of a log-probability in float32 over a whole vocabulary
TINY = 1e-6  # a raw probability below is stored with few digits
LACKING = "the capture has no evidence on the parents that were tried"


def lacking(c: Columns) -> str:
    """Why there is nothing to look at; "" where there is."""
    return "" if len(c.parents) else LACKING


def of_nodes(c: Columns) -> Iterator[Finding]:
    """Each node against what its parent's evidence says."""
    check, e, parent, why = partial(Check, c), c.parents, c.parents.at_node, lacking(c)
    there = (parent >= 0) & c.told[c.step]
    choice_p, rank = _at(e.choice_p, parent), e.rank
    off = (_at(e.choice, parent) == c.token) & c.named & ~np.isclose(c.p, choice_p, rtol=1e-4, atol=LEAST)
    yield check("target's choice", "no drafted token is likelier than the target's top token").of(
        (c.p > choice_p * (1 + RELATIVE) + LEAST) | off,
        there,
        lambda i: f"p = {c.p[i]:.6g}, the choice (token {e.choice[parent[i]]}) has {choice_p[i]:.6g}",
        why,
    )
    bad = (c.p * rank > 1 + 1e-4) | ((rank == 0) != (c.p == 0))
    bad |= (rank == 1) & (c.p < choice_p * (1 - 1e-4) - LEAST)
    bad |= c.sampled & (c.sibling == 0) & (c.q * e.q_rank > 1 + 1e-4)
    yield check("ranks", "a token of rank r has at most 1 / r of p, and rank 1 has the most").of(
        bad,
        there,
        lambda i: f"rank {rank[i]} with p = {c.p[i]:.6g}; rank {e.q_rank[i]} in q with q = {c.q[i]:.6g}",
        why,
    )
    # The likeliest tokens in falling order, with a sum of 1 at most; a drafted one among them has their raw p
    bad = np.zeros(len(parent), np.bool_)
    if e.top.size:
        same = e.top[parent] == c.token[:, None]
        listed, top_p = same.any(axis=1), np.where(same, e.top_p[parent], 0).sum(axis=1)
        bad = _disordered(e.top_p)[parent] | (listed & ~np.isclose(e.raw_p, top_p, rtol=1e-4, atol=LEAST))
        bad |= ~listed & (e.raw_p > e.top_p[parent, -1] * (1 + 1e-4) + LEAST)
    about = "the target's raw probability of a drafted token agrees with its likeliest tokens"
    yield check("raw probabilities", about).of(
        bad,
        there & (e.top.size > 0),
        lambda i: f"raw p = {e.raw_p[i]:.6g}, likeliest {_listed(e.top[parent[i]], e.top_p[parent[i]])}",
        why,
    )


def of_parents(c: Columns) -> Iterator[Finding]:
    """Each parent: the drafter's likeliest tokens, the entropies."""
    check, e, why = partial(Check, c, unit="parent"), c.parents, lacking(c)
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
    about = "the drafter's probabilities of its tokens and of the target's choice agree with its likeliest tokens"
    yield check("drafter's likeliest", about).of(
        bad,
        has_list & c.told[e.step],
        lambda k: (
            f"likeliest {_listed(e.draft_top[k], e.draft_top_p[k])}; the target's choice {e.top[k, 0]} has "
            f"{e.choice_q[k]:.4g} at rank {e.choice_rank[k]}"
        ),
        why or ("" if has_list.any() else "the drafter is not a model"),
    )
    # At least that of the choice's share against one other token, and 0 where the choice has all
    off = (e.choice_p >= 1) & (e.entropy > NATS)
    yield check("entropies", "the entropy of p fits the likeliest token's share").of(
        (e.entropy < _least_entropy(e.choice_p) - NATS) | off | (e.varentropy < 0),
        c.told[e.step],
        lambda k: f"entropy {e.entropy[k]:.6g} nats where the likeliest token has {e.choice_p[k]:.6g}",
        why,
    )


def _at(values: NDArray, place: Indices) -> NDArray:  # type: ignore[type-arg]
    """The values at these places. What is given for place -1 means nothing; all are 0 where there are no values."""
    return values[place] if len(values) else np.zeros(len(place), values.dtype)


def _disordered(top_p: Doubles) -> Bools:
    """[K] whether the likeliest tokens' probabilities do not fall, or are more than 1 in all."""
    return np.asarray((np.diff(top_p, axis=1) > LEAST).any(axis=1) | (top_p.sum(axis=1) > 1 + 1e-4))


def _listed(tokens: Indices, probs: Doubles) -> str:
    return ", ".join(f"{token}: {p:.4g}" for token, p in zip(tokens.tolist(), probs.tolist(), strict=True))


def _least_entropy(p: Doubles) -> Doubles:
    """In nats, of a distribution in which some token has p: all the rest is on one other token."""
    p, rest = np.clip(p, 1e-300, 1.0), np.clip(1 - p, 1e-300, 1.0)
    return np.asarray(-(p * np.log(p) + rest * np.log(rest)))


def of_greedy(c: Columns) -> Iterator[Finding]:
    """Requests at temperature 0."""
    why, told = "" if c.greedy.any() else "no request was greedy", c.greedy & c.told
    about = "at temperature 0 a draft is accepted if and only if it is the target's top token"
    yield Check(c, "greedy acceptance", about).of(
        c.accepted != (c.p == 1),
        c.tried & (told & c.walks)[c.step] & ~c.forced,  # others also reject such a token below one whose p is not 1
        lambda i: f"token {c.token[i]} was {'accepted' if c.accepted[i] else 'rejected'} with p {c.p[i]:g}",
        why,
    )
    parent = c.parents.at_row[c.final_row]
    chosen = (parent < 0) | (_at(c.parents.choice, parent) == c.final)  # without token ids all are the same
    another = (c.final_p != 1) | ((c.kind == RECOVERED) & ~chosen)
    about = "at temperature 0 every p is 0 or 1, and the target's top token is emitted"
    yield Check(c, "greedy tokens", about, "step").of(
        c.any_in_step(~np.isin(c.p, (0, 1))) | (another & ~c.forced_final),
        told,
        lambda s: f"final p {c.final_p[s]:.6g}, p {np.round(c.verdicts[s].p, 6).tolist()}",
        why,
    )


def of_finals(c: Columns) -> Iterator[Finding]:
    """The final token: what it was drawn from, and its share of that."""
    check, e, why = partial(Check, c, unit="step"), c.parents, "" if c.parents.there.any() else LACKING
    judged = e.there & c.told & ~c.forced_final
    about = "the entropy of the final token's distribution fits that token's share"
    yield check("entropy of the final draw", about).of(
        e.final_entropy < _least_entropy(np.minimum(c.final_p, 1.0)) - NATS,
        judged,
        lambda s: f"entropy {e.final_entropy[s]:.6g} nats, the token had {c.final_p[s]:.6g}",
        why,
    )
    # [S] the mass that rejections left of the p that the final token was drawn from, and its p over that
    left = np.ones(c.rows)
    gone = c.rejected & (c.residual_mass > 0) & (c.parent_ratio > 0)
    np.multiply.at(left, c.row[gone], c.residual_mass[gone] / c.parent_ratio[gone])
    left = left[c.final_row]
    limit = np.where(c.greedy, e.final_p, e.final_p / left)
    exact = ~c.children_at(c.sampled & c.rejected)[c.final_row]
    slack = 1e-4 * limit + WHOLE / left
    # Drawn with their whole p, as if nothing had been rejected. Tokens with nearly all of p are left out: they have
    # nearly all of what is left of it too. About one in a million looks like this by chance: a few of many are no fault
    recovered = e.there & (c.kind == RECOVERED)
    whole = recovered & ~c.greedy & ~c.forced_final & (limit > 1.01 * e.final_p) & (e.final_p < SURE)
    whole &= np.abs(c.final_p - e.final_p) <= 1e-6 * e.final_p
    whole &= whole.sum() > max(3, 0.01 * recovered.sum())
    about = "the final token was drawn with its p over the mass that rejections left"
    yield check("share of the final token", about).of(
        (c.final_p > limit + slack) | (exact & (c.final_p < limit - slack)) | whole,
        judged & (slack < HOPELESS),
        lambda s: f"drawn with {c.final_p[s]:.6g}, but its p of {e.final_p[s]:.6g} gives {limit[s]:.6g}",
        why,
    )


def log_probabilities(c: Columns) -> Iterator[Finding]:
    """Each is that of its token among the likeliest, and of the raw p that was recorded where it was tried or drawn."""
    step = np.repeat(np.arange(len(c)), lengths(c.picked, "logprobs", "logprob"))
    place = places(step)  # 0 is behind the root
    on_path = place < c.depth_reached[step]
    path = np.append(c.path_node, -1)[
        np.where(on_path, (np.cumsum(c.depth_reached) - c.depth_reached)[step] + place, -1)
    ]
    token = np.where(on_path, np.append(c.token, 0)[path], c.final[step])
    logprob = joined(c.picked, "logprobs", "logprob", np.float64)
    top = padded(c.picked, "logprobs", "top", np.int64, NO_TOKEN)
    top_logprob = padded(c.picked, "logprobs", "top_logprob", np.float64, -np.inf)
    raw = _raw(c, path, c.final_row[step], token)
    raw[holding(c.picked, "form")[step]] = np.nan  # there raw p may be what the form left of it
    listed = (top == token[:, None]) & (token != NO_TOKEN)[:, None]
    own = np.where(listed.any(axis=1), np.where(listed, top_logprob, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    least = np.where(np.isfinite(top_logprob), top_logprob, np.inf).min(axis=1, initial=np.inf)
    problems: tuple[tuple[Bools, Callable[[int], str]], ...] = (
        (~np.isfinite(logprob) | (logprob > ERROR), lambda i: f"{logprob[i]:.6g} is not a log-probability"),
        (np.abs(logprob - own) > ERROR, lambda i: f"{logprob[i]:.6g}, and {own[i]:.6g} in its list of the likeliest"),
        (np.isnan(own) & (logprob > least + ERROR), lambda i: f"{logprob[i]:.6g} is above the likeliest's"),
        (np.exp(top_logprob).sum(axis=1) > 1 + ERROR, lambda i: "the likeliest tokens sum to more than 1"),
        (
            (raw > TINY) & (np.abs(logprob - np.log(raw)) > ERROR),
            lambda i: f"{logprob[i]:.6g}, the target's raw p is {raw[i]:.6g}",
        ),
    )
    yield Check(c, "log-probabilities", "every log-probability is its token's own", "token").of(
        np.any([wrong for wrong, _ in problems], axis=0),
        np.ones(len(step), np.bool_),
        lambda i: next(f"token {token[i]}: {text(i)}" for wrong, text in problems if wrong[i]),
        "" if len(step) else "no log-probabilities were requested",
        lambda i: c.at_step(int(step[i])),
    )


def _raw(c: Columns, node: Indices, final_row: Indices, token: Indices) -> Doubles:
    """[E] the target's raw p of each emitted token, where it was recorded; else NaN. node: -1 for final tokens."""
    e = c.parents
    there = (node >= 0) & (np.append(e.at_node, -1)[node] >= 0)
    raw = np.where(there, np.append(e.raw_p, 0)[node], np.nan)
    parent = e.at_row[final_row]
    if e.top.size:
        same = (e.top[parent] == token[:, None]) & ((node < 0) & (parent >= 0))[:, None]
        raw = np.where(same.any(axis=1), np.where(same, e.top_p[parent], 0).max(axis=1, initial=0), raw)
    return raw
