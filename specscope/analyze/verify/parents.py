"""What the evidence says about tried parents and emitted tokens must agree with itself: ranks, entropies, logprobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from specscope.analyze.evidence.arrays import Indices, holding, joined, lengths, padded, places
from specscope.analyze.evidence.columns import RECOVERED, WHOLE, Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import HOPELESS, LEAST, RELATIVE, Check
from specscope.trace.record.params import SamplingParams
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
    choice_p, rank = np.append(e.choice_p, 0)[parent], e.rank
    off = (np.append(e.choice, 0)[parent] == c.token) & c.named & ~np.isclose(c.p, choice_p, rtol=1e-4, atol=LEAST)
    yield check("target's choice", "no drafted token is likelier than the target's top token").of(
        (c.p > choice_p * (1 + RELATIVE) + LEAST) | off,
        there,
        lambda i: f"p = {c.p[i]:.6g}, the choice (token {e.choice[parent[i]]}) has {choice_p[i]:.6g}",
        why,
    )
    bad = (c.p * rank > 1 + WHOLE) | ((rank == 0) != (c.p == 0))
    bad |= (rank == 1) & (c.p < choice_p * (1 - 1e-4) - LEAST)
    bad |= c.sampled & (c.sibling == 0) & (c.q * e.q_rank > 1 + WHOLE)
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
        bad |= (e.choice_rank * e.choice_q > 1 + WHOLE) | ((e.choice_rank == 0) & (e.choice_q > 0))
        raw = e.drafters(e.at_node, c.token)
        plain = ~c.asked(lambda params: params.moved)[c.step]
        off = plain & ~c.sampled & np.isfinite(raw) & ~np.isclose(c.draft_prob, raw, rtol=1e-3, atol=LEAST)
        bad[e.at_node[off & np.isfinite(c.draft_prob)]] = True
    about = "the drafter's probabilities of its tokens and of the target's choice agree with its likeliest tokens"

    def lists(k: int) -> str:
        choice = f"the target's choice {e.top[k, 0]} has {e.choice_q[k]:.4g} at rank {e.choice_rank[k]}"
        return f"likeliest {_listed(e.draft_top[k], e.draft_top_p[k])}; {choice}"

    no_list = why or ("" if has_list.any() else "the drafter's likeliest tokens are not recorded")
    yield check("drafter's likeliest", about).of(bad, has_list & c.told[e.step], lists, no_list)
    # At least that of the choice's share against one other token, and 0 where the choice has all
    off = (e.choice_p >= 1) & (e.entropy > NATS)
    yield check("entropies", "the entropy of p fits the likeliest token's share").of(
        (e.entropy < _least_entropy(e.choice_p) - NATS) | off | (e.varentropy < 0),
        c.told[e.step],
        lambda k: f"entropy {e.entropy[k]:.6g} nats where the likeliest token has {e.choice_p[k]:.6g}",
        why,
    )


def _disordered(top_p: Doubles) -> Bools:
    """[K] whether the likeliest tokens' probabilities do not fall, or are more than 1 in all."""
    return np.asarray((np.diff(top_p, axis=1) > LEAST).any(axis=1) | (top_p.sum(axis=1) > 1 + WHOLE))


def _listed(tokens: Indices, probs: Doubles) -> str:
    return ", ".join(f"{token}: {p:.4g}" for token, p in zip(tokens.tolist(), probs.tolist(), strict=True))


def _least_entropy(p: Doubles) -> Doubles:
    """In nats, of a distribution in which some token has p: all the rest is on one other token."""
    p, rest = np.clip(p, 1e-300, 1.0), np.clip(1 - p, 1e-300, 1.0)
    return np.asarray(-(p * np.log(p) + rest * np.log(rest)))


def of_greedy(c: Columns) -> Iterator[Finding]:
    why, told = "" if c.greedy.any() else "no request was greedy", c.greedy & c.told
    about = "at temperature 0 a draft is accepted if and only if it is the target's top token"
    yield Check(c, "greedy acceptance", about).of(
        c.accepted != (c.p == 1),
        c.tried & (told & c.walks)[c.step] & ~c.forced,  # others also reject such a token below one whose p is not 1
        lambda i: f"token {c.token[i]} was {'accepted' if c.accepted[i] else 'rejected'} with p {c.p[i]:g}",
        why,
    )
    parent = c.parents.at_row[c.final_row]
    chosen = (parent < 0) | (np.append(c.parents.choice, 0)[parent] == c.final)  # without token ids all are the same
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
    # Drawn with their whole p, as if nothing had been rejected, but for tokens with nearly all of p. About one in two
    # million looks like this to the last digit by chance: a few of many are no fault
    recovered = e.there & (c.kind == RECOVERED)
    whole = recovered & ~c.greedy & ~c.forced_final & (limit > 1.01 * e.final_p) & (e.final_p < SURE)
    whole &= np.abs(c.final_p - e.final_p) <= 2e-7 * e.final_p
    whole &= whole.sum() > 1e-4 * recovered.sum()
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
    first = np.cumsum(c.depth_reached) - c.depth_reached
    path = np.append(c.path_node, -1)[np.where(on_path, first[step] + place, -1)]
    token = np.where(on_path, np.append(c.token, 0)[path], c.final[step])
    logprob = joined(c.picked, "logprobs", "logprob", np.float64)
    top = padded(c.picked, "logprobs", "top", np.int64, NO_TOKEN)
    top_logprob = padded(c.picked, "logprobs", "top_logprob", np.float64, -np.inf)
    raw = _raw(c, path, c.final_row[step], token)
    raw[holding(c.picked, "form")[step]] = np.nan  # there raw p may be what the form left of it
    named = token != NO_TOKEN
    listed = (top == token[:, None]) & named[:, None]
    own = np.where(listed.any(axis=1), np.where(listed, top_logprob, -np.inf).max(axis=1, initial=-np.inf), np.nan)
    least = np.where(np.isfinite(top_logprob), top_logprob, np.inf).min(axis=1, initial=np.inf)
    problems: tuple[tuple[Bools, Callable[[int], str]], ...] = (
        (~np.isfinite(logprob) | (logprob > ERROR), lambda i: f"{logprob[i]:.6g} is not a log-probability"),
        (np.abs(logprob - own) > ERROR, lambda i: f"{logprob[i]:.6g}, and {own[i]:.6g} in its list of the likeliest"),
        (named & np.isnan(own) & (logprob > least + ERROR), lambda i: f"{logprob[i]:.6g} is above the likeliest's"),
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
        same = (e.top[parent] == token[:, None]) & ((node < 0) & (parent >= 0) & (token != NO_TOKEN))[:, None]
        raw = np.where(same.any(axis=1), np.where(same, e.top_p[parent], 0).max(axis=1, initial=0), raw)
    return raw


TIES = 8  # tokens that may share a probability at top-p's border; in 16 bits, where logits lie on a grid, as many more
GRID = 0.5  # as this share of those before them: a step of the grid, 0.125 or 0.25, holds as much of a tail
FAINT = 1e-30  # raw probabilities below it have lost their digits


def _judged(c: Columns) -> Bools:
    """[N] nodes of sampled requests of known rules, at parents that the evidence has."""
    return (c.parents.at_node >= 0) & (c.tells_rules & ~c.greedy & c.told)[c.step]


def _shaped(c: Columns) -> Bools:
    """[N] whether bias or penalties move logits."""
    return c.asked(lambda params: params.penalised or params.has("logit_bias"))[c.step]


def _note(c: Columns, what: str, asked: Bools) -> str:
    """Why nothing was tested."""
    if not (c.known & ~c.greedy).any():
        return "no request was sampled"
    if not (c.tells_rules & ~c.greedy).any():
        return "rules that the capture only names shape p, as logits processors"
    return lacking(c) if asked.any() else f"no request has {what}"


def cuts(c: Columns) -> Iterator[Finding]:
    check, e, judged = partial(Check, c), c.parents, _judged(c)
    top_k, min_p, top_p = (c.parameter(name) for name in ("top_k", "min_p", "top_p"))

    def at(i: int) -> str:
        return f"at depth {c.depth[i]}"

    yield check("top-k", "only the k likeliest tokens have a probability, at any depth").of(
        (c.p > 0) & (e.rank > top_k),
        (top_k > 0) & judged,
        lambda i: f"p = {c.p[i]:.6g} at rank {e.rank[i]}, with top_k {top_k[i]:g}, {at(i)}",
        _note(c, "top_k", top_k > 0),
    )
    choice_p = e.at(e.choice_p)
    yield check("min-p", "no token below min-p times the likeliest has a probability, at any depth").of(
        (c.p > 0) & (c.p < min_p * choice_p * (1 - 1e-3) - LEAST),
        (min_p > 0) & judged,
        lambda i: f"p = {c.p[i]:.6g} where the likeliest has {choice_p[i]:.6g}, with min_p {min_p[i]}, {at(i)}",
        _note(c, "min_p", min_p > 0),
    )
    # At temperature 1, raw p over p is the mass that was kept: at least top_p, and less without its last token
    asked = (top_p < 1) & (c.parameter("temperature") == 1) & ~_shaped(c)
    asked &= ~c.asked(lambda params: params.limited or params.top_k > 0 or params.min_p > 0)[c.step]
    kept = e.at(_raw_choice(c) / e.choice_p)
    ties = TIES + (0 if c.run is not None and c.run.dtype == "float32" else GRID) * e.rank
    yield check("top-p", "the tokens with a probability are the fewest that reach top_p, at any depth").of(
        (kept < top_p - 1e-3) | ((c.p > 0) & (kept - ties * e.raw_p > top_p + 1e-3)),
        asked & judged & np.isfinite(kept),
        lambda i: (
            f"the tokens kept have {kept[i]:.6g} of the raw mass, with top_p {top_p[i]}, {at(i)}; "
            f"this one has {e.raw_p[i]:.3g}"
        ),
        _note(c, "top_p alone at temperature 1", asked),
    )


def _raw_choice(c: Columns) -> Doubles:
    """[K] the raw probability of p's likeliest token; NaN where it is none of the listed ones."""
    e = c.parents
    same = e.top == e.choice[:, None]
    return np.where(same.any(axis=1), np.where(same, e.top_p, 0).sum(axis=1), np.nan)


def temperatures(c: Columns) -> Iterator[Finding]:
    check, e, judged, temperature = partial(Check, c), c.parents, _judged(c), c.parameter("temperature")
    # log(p / p of the choice) times the temperature is the raw tokens' log ratio, after bias and penalties
    raw = e.at(_raw_choice(c))
    tested = judged & (e.raw_p > FAINT) & np.isfinite(raw) & (raw > FAINT) & (c.p > FAINT)
    ratio, expected = temperature * np.log(c.p / e.at(e.choice_p)), np.log(e.raw_p / raw)
    low, high = (expected + moved for moved in _moves(c, tested))
    slack = 2e-3 + 1e-4 * np.abs(expected) + 1e-3 * temperature
    about = "p follows from the raw p by temperature, bias and penalties, at any depth"
    yield check("temperature and penalties", about).of(
        (ratio < low - slack) | (ratio > high + slack),
        tested,
        lambda i: (
            f"log p / p of the choice, times temperature {temperature[i]:g}: {ratio[i]:.4g}; raw {expected[i]:.4g}, "
            f"after bias and penalties {_range(low[i], high[i])}; at depth {c.depth[i]}"
        ),
        _note(c, "parameters", (c.known & ~c.greedy)[c.step]),
    )
    drafters = e.drafters(e.at_node, c.token)
    asked = c.sampled & judged & ~_shaped(c)
    tested = asked & (drafters > FAINT)
    least, most = np.zeros(len(tested)), np.ones(len(tested))
    if tested.any():
        least, most = q_bounds(c, e.at_node, c.token, temperature, np.arange(len(tested)))
    about = "q follows from the drafter's raw probability by the request's temperature"
    yield check("draft's temperature", about).of(
        (c.q < least * (1 - 2e-3) - LEAST) | (c.q > most * (1 + 2e-3) + LEAST),
        tested,
        lambda i: (
            f"q = {c.q[i]:.6g}; the drafter's {drafters[i]:.6g} at temperature {temperature[i]:g} allows "
            f"{least[i]:.6g} to {most[i]:.6g}; at depth {c.depth[i]}"
        ),
        "" if asked.any() else "no draft was sampled from a model",
    )


def q_bounds(
    c: Columns, parent: Indices, token: Indices, temperature: Doubles, node: Indices
) -> tuple[Doubles, Doubles]:
    """(low, high) of what q of tokens can be, drawn at these parents and temperatures by their requests' rules; NaN
    where a parent does not list the token.

    q is the drafter's raw distribution to the power 1 / temperature; its likeliest tokens bound the sum of powers, and
    as no other is likelier than the last of those, that over the others too. Where rules cut, q can only be larger.
    """
    e = c.parents
    raw, top, power = e.drafters(parent, token), e.draft_top_p[parent], 1 / temperature
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        listed = (top ** power[:, None]).sum(axis=1)
        rest = np.maximum(1 - top.sum(axis=1), 0) * np.maximum(top[:, -1], FAINT) ** (power - 1)
        # Above temperature 1 the rest weighs most where it is spread evenly over all of the vocabulary
        size = 1.1 * (1 + max(int(e.draft_top.max(initial=0)), int(e.top.max(initial=0)), int(c.token.max(initial=0))))
        spread = np.maximum(1 - top.sum(axis=1), 0) ** power * size ** (1 - power)
        low = raw**power / (listed + np.where(power >= 1, rest, spread))
        high = np.where(c.cut[c.step[node]], 1, raw**power / (listed + np.where(power <= 1, rest, 0)))
    return low, high


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _moves(c: Columns, tested: Bools) -> tuple[Doubles, Doubles]:
    """(low, high) [N] of what bias and penalties add to the log ratio of each node's token and the choice."""
    low, high = np.zeros((2, len(tested)))
    for i in np.flatnonzero(tested & _shaped(c)).tolist():
        s, texts = int(c.step[i]), c.texts
        number = texts.request[s]
        prompt = set(texts.text[texts.begins[number] : texts.outputs[number]].tolist())
        output = Counter(texts.text[texts.outputs[number] : texts.behind[s]].tolist())
        above = i
        while (above := int(c.above[above])) >= 0:
            output[int(c.token[above])] += 1
        tokens = int(c.token[i]), int(c.parents.choice[c.parents.at_node[i]])
        (a, b), (x, y) = (_moved(token, c.params[s], output, prompt) for token in tokens)
        low[i], high[i] = a - y, b - x
    return low, high


def _moved(token: int, params: SamplingParams, output: Counter[int], prompt: set[int]) -> tuple[float, float]:
    """(low, high): how far bias and penalties move a token's logit."""
    times = output[token]
    by = params.logit_bias.get(token, 0.0) - params.frequency_penalty * times - params.presence_penalty * bool(times)
    if params.repetition_penalty != 1 and (times or token in prompt):
        return (-np.inf, by) if params.repetition_penalty > 1 else (by, np.inf)
    return by, by
