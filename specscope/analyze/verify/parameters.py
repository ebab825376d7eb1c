"""p against the sampling parameters, at every node along its own path: what these parameters can never give.

Among the tokens that are kept, p is the raw distribution, after logit bias and penalties, to the power 1 / temperature;
so any two kept tokens can be checked against each other. Top-p's border depends on the raw distribution itself, and is
checked where the temperature is 1. Repetition penalty depends on a logit's sign, which is not recorded: where a token
was seen before, only its direction is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.exact import LEAST, Check
from specscope.analyze.verify.parents import lacking
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import Bools, Doubles

TIES = 8  # tokens that may share a probability at top-p's border
FAINT = 1e-30  # raw probabilities below it have lost their digits


def _judged(c: Columns) -> Bools:
    """[N] nodes of sampled requests of known parameters, at parents that the evidence has."""
    return (c.parents.at_node >= 0) & (c.known & ~c.greedy & c.told)[c.step]


def _shaped(c: Columns) -> Bools:
    """[N] whether bias or penalties move logits."""
    return c.asked(lambda params: params.penalised or params.has("logit_bias"))[c.step]


def _note(c: Columns, what: str, asked: Bools) -> str:
    """Why nothing was tested."""
    if not (c.known & ~c.greedy).any():
        return "no request was sampled"
    return lacking(c) if asked.any() else f"no request has {what}"


def cuts(c: Columns) -> Iterator[Finding]:
    """Rules that cut tokens off."""
    check, e, judged = partial(Check, c), c.parents, _judged(c)
    top_k, min_p, top_p = (c.parameter(name) for name in ("top_k", "min_p", "top_p"))
    yield check("top-k", "only the k likeliest tokens have a probability, at any depth").of(
        (c.p > 0) & (e.rank > top_k),
        (top_k > 0) & judged,
        lambda i: f"p = {c.p[i]:.6g} at rank {e.rank[i]}, with top_k {top_k[i]:g}, at depth {c.depth[i]}",
        _note(c, "top_k", top_k > 0),
    )
    choice_p = e.at(e.choice_p)
    yield check("min-p", "no token below min-p times the likeliest has a probability, at any depth").of(
        (c.p > 0) & (c.p < min_p * choice_p * (1 - 1e-3) - LEAST),
        (min_p > 0) & judged,
        lambda i: (
            f"p = {c.p[i]:.6g} where the likeliest has {choice_p[i]:.6g}, with min_p {min_p[i]}, at depth {c.depth[i]}"
        ),
        _note(c, "min_p", min_p > 0),
    )
    # At temperature 1, raw p over p is the mass that was kept: at least top_p, and less without its last token
    asked = (top_p < 1) & (c.parameter("temperature") == 1) & ~_shaped(c)
    asked &= ~c.asked(lambda params: params.limited or params.top_k > 0 or params.min_p > 0)[c.step]
    kept = e.at(_raw_choice(c) / e.choice_p)
    yield check("top-p", "the tokens with a probability are the fewest that reach top_p, at any depth").of(
        (kept < top_p - 1e-3) | ((c.p > 0) & (kept - TIES * e.raw_p > top_p + 1e-3)),
        asked & judged & np.isfinite(kept),
        lambda i: (
            f"the tokens kept have {kept[i]:.6g} of the raw mass, with top_p {top_p[i]}, at depth {c.depth[i]}; "
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
    """What moves p, and q, as a whole."""
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
    """(low, high) of what q of tokens can be, drawn at these parents and temperatures by the nodes' requests' rules.

    q is the drafter's raw distribution to the power 1 / temperature; its likeliest tokens bound the sum of powers. No
    other token is likelier than the last of those, so the sum over the others is bounded too: from above at
    temperatures below 1, from below at temperatures above 1. Where rules cut tokens off, q can only be larger. NaN
    where a parent does not list the token.
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
