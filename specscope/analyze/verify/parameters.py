"""p against the sampling parameters, at every node along its own path: what these parameters can never give.

Among the tokens that are kept, p is the raw distribution, after logit bias and penalties, to the power 1 / temperature;
so any two kept tokens can be checked against each other. Top-p's border depends on the raw distribution itself, and is
checked where the temperature is 1. Repetition penalty depends on a logit's sign, which is not recorded: where a token
was seen before, only its direction is known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Finding
from specscope.analyze.verify.drafts import Follows
from specscope.analyze.verify.exact import LEAST, check_each
from specscope.analyze.verify.parents import LACKING
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import Bools, Doubles

TIES = 8  # tokens that may share a probability at top-p's border
FAINT = 1e-30  # raw probabilities below it have lost their digits


def parameter_checks(c: Columns) -> list[Finding]:
    """All checks of p and q against the sampling parameters."""
    node = Nodes.of(c)
    return [top_k(c, node), min_p(c, node), top_p(c, node), temperature(c, node), draft_temperature(c, node)]


@dataclass(frozen=True)
class Nodes:
    """The parameters of each node's request, by name; and the parent at which the node was tried."""

    temperature: Doubles  # [N]
    top_k: Indices
    top_p: Doubles
    min_p: Doubles
    shaped: Bools  # whether bias or penalties move logits
    limited: Bools  # whether a grammar, or a least length, may refuse tokens: the others keep their shares
    judged: Bools  # sampled requests of known parameters, at parents that the evidence has
    parent: Indices  # its parent among Columns.parents, -1 for none
    choice_p: Doubles  # the likeliest token's p there

    @staticmethod
    def of(c: Columns) -> Nodes:
        """The parameters and the parent of each node."""

        def each(name: str, kind: type) -> np.ndarray:
            return np.array([getattr(params, name) for params in c.params], kind)[c.step]

        shaped = np.array([params.penalised or params.has("logit_bias") for params in c.params], np.bool_)[c.step]
        parent = c.parents.at_node
        judged = (parent >= 0) & (c.known & ~c.greedy)[c.step] & c.told[c.step]
        choice_p = c.parents.choice_p[parent] if len(c.parents) else np.zeros(len(parent))
        return Nodes(
            each("temperature", np.float64),
            each("top_k", np.int64),
            each("top_p", np.float64),
            each("min_p", np.float64),
            shaped,
            np.array([params.limited for params in c.params], np.bool_)[c.step],
            judged,
            parent,
            choice_p,
        )


def _note(c: Columns, what: str, asked: Bools) -> str:
    """Why nothing was tested."""
    if not (c.known & ~c.greedy).any():
        return "no request was sampled"
    if not asked.any():
        return f"no request has {what}"
    return "" if len(c.parents) else LACKING


def top_k(c: Columns, n: Nodes) -> Finding:
    """A token that is kept has fewer than k above it."""
    asked = n.top_k > 0
    bad = (c.p > 0) & (c.parents.rank > n.top_k)
    return check_each(
        "top-k",
        "no token beyond the k likeliest has a probability, at any depth",
        bad,
        asked & n.judged,
        c.nodes,
        lambda i: f"p = {c.p[i]:.6g} at rank {c.parents.rank[i]}, with top_k {n.top_k[i]}, at depth {c.depth[i]}",
        note=_note(c, "top_k", asked),
    )


def min_p(c: Columns, n: Nodes) -> Finding:
    """A token that is kept has at least min_p times the likeliest one's p."""
    asked = n.min_p > 0
    bad = (c.p > 0) & (c.p < n.min_p * n.choice_p * (1 - 1e-3) - LEAST)
    return check_each(
        "min-p",
        "no token below its share of the likeliest has a probability, at any depth",
        bad,
        asked & n.judged,
        c.nodes,
        lambda i: (
            f"p = {c.p[i]:.6g} where the likeliest has {n.choice_p[i]:.6g}, with min_p {n.min_p[i]}, "
            f"at depth {c.depth[i]}"
        ),
        note=_note(c, "min_p", asked),
    )


def _raw_choice(c: Columns) -> Doubles:
    """[K] the raw probability of p's likeliest token; NaN where it is none of the listed ones."""
    e = c.parents
    same = e.top == e.choice[:, None]
    return np.where(same.any(axis=1), np.where(same, e.top_p, 0).sum(axis=1), np.nan)


def top_p(c: Columns, n: Nodes) -> Finding:
    """At temperature 1, raw p over p is the mass that was kept: at least top_p, and less without its last token."""
    asked = (n.top_p < 1) & (n.temperature == 1) & ~n.shaped & ~n.limited & (n.top_k == 0) & (n.min_p == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept_mass = (_raw_choice(c) / c.parents.choice_p)[n.parent] if len(c.parents) else np.ones(len(n.parent))
    short = kept_mass < n.top_p - 1e-3
    beyond = (c.p > 0) & (kept_mass - TIES * c.parents.raw_p > n.top_p + 1e-3)
    return check_each(
        "top-p",
        "the tokens with a probability are the fewest that reach top_p, at any depth",
        short | beyond,
        asked & n.judged & np.isfinite(kept_mass),
        c.nodes,
        lambda i: (
            f"the tokens kept have {kept_mass[i]:.6g} of the raw mass, with top_p {n.top_p[i]}, at depth {c.depth[i]}; "
            f"this one has {c.parents.raw_p[i]:.3g}"
        ),
        note=_note(c, "top_p alone at temperature 1", asked),
    )


def temperature(c: Columns, n: Nodes) -> Finding:
    """log(p / p of the choice) times the temperature is the raw tokens' log ratio, after bias and penalties."""
    e = c.parents
    raw = _raw_choice(c)[n.parent] if len(e) else np.full(len(n.parent), np.nan)
    tested = n.judged & (c.p > 0) & (e.raw_p > FAINT) & np.isfinite(raw) & (raw > FAINT) & (c.p > FAINT)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = n.temperature * np.log(c.p / n.choice_p)
        expected = np.log(e.raw_p / raw)
    low, high = np.zeros(len(n.parent)), np.zeros(len(n.parent))
    _shape(c, n, tested, low, high)
    slack = 2e-3 + 1e-4 * np.abs(expected) + 1e-3 * n.temperature
    with np.errstate(invalid="ignore"):
        bad = (ratio < expected + low - slack) | (ratio > expected + high + slack)
    asked = (c.known & ~c.greedy)[c.step]
    return check_each(
        "temperature and penalties",
        "p follows from the raw p by temperature, bias and penalties, at any depth",
        bad,
        tested,
        c.nodes,
        lambda i: (
            f"log p / p of the choice, times temperature {n.temperature[i]:g}: {ratio[i]:.4g}; raw {expected[i]:.4g}, "
            f"after bias and penalties {_range(expected[i] + low[i], expected[i] + high[i])}; at depth {c.depth[i]}"
        ),
        note=_note(c, "parameters", asked),
    )


def draft_temperature(c: Columns, n: Nodes) -> Finding:
    """q is the drafter's raw distribution to the power 1 / temperature; its likeliest tokens bound the sum of powers.

    No other token is likelier than the last of those, so the sum over the others is bounded too: from above at
    temperatures below 1, from below at temperatures above 1. Where rules cut tokens off, q can only be larger.
    """
    e = c.parents
    raw = e.drafters(n.parent, c.token)
    asked = c.sampled & n.judged & ~n.shaped
    tested = asked & (raw > FAINT)
    low, high = np.zeros(len(raw)), np.ones(len(raw))
    if tested.any():
        low, high = q_bounds(c, n, n.parent, c.token, n.temperature, np.arange(len(raw)))
    bad = (c.q < low * (1 - 2e-3) - LEAST) | (c.q > high * (1 + 2e-3) + LEAST)
    return check_each(
        "draft's temperature",
        "q follows from the drafter's raw probability by the request's temperature",
        bad,
        tested,
        c.nodes,
        lambda i: (
            f"q = {c.q[i]:.6g}; the drafter's {raw[i]:.6g} at temperature {n.temperature[i]:g} allows "
            f"{low[i]:.6g} to {high[i]:.6g}; at depth {c.depth[i]}"
        ),
        note="no draft was sampled from a model" if not asked.any() else "",
    )


def q_bounds(
    c: Columns, n: Nodes, parent: Indices, token: Indices, temperature: Doubles, node: Indices
) -> tuple[Doubles, Doubles]:
    """(low, high) of what q of tokens can be, drawn at these parents and temperatures by the nodes' requests' rules.

    NaN where a parent does not list the token.
    """
    e = c.parents
    raw, top, power = e.drafters(parent, token), e.draft_top_p[parent], 1 / temperature
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        listed = (top ** power[:, None]).sum(axis=1)
        rest = np.maximum(1 - top.sum(axis=1), 0) * np.maximum(top[:, -1], FAINT) ** (power - 1)
        cut = ((n.top_k > 0) | (n.top_p < 1) | (n.min_p > 0) | n.limited)[node]
        # Above temperature 1 the rest weighs most where it is spread evenly over all of the vocabulary
        size = 1.1 * (1 + max(int(e.draft_top.max(initial=0)), int(e.top.max(initial=0)), int(c.token.max(initial=0))))
        spread = np.maximum(1 - top.sum(axis=1), 0) ** power * size ** (1 - power)
        low = raw**power / (listed + np.where(power >= 1, rest, spread))
        high = np.where(cut, 1, raw**power / (listed + np.where(power <= 1, rest, 0)))
    return low, high


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _shape(c: Columns, n: Nodes, tested: Bools, low: Doubles, high: Doubles) -> None:
    """Fill in, from low to high, what bias and penalties add to the log ratio of each node's token and the choice."""
    nodes = np.flatnonzero(tested & n.shaped)
    if not len(nodes):
        return
    texts = Follows.of(c)
    for i in nodes.tolist():
        s = int(c.step[i])
        number = texts.request[s]
        prompt = set(texts.text[texts.begins[number] : texts.outputs[number]].tolist())
        output = Counter([*texts.text[texts.outputs[number] : texts.behind[s]].tolist(), *_path(c, i)])
        tokens = int(c.token[i]), int(c.parents.choice[n.parent[i]])
        (a, b), (x, y) = (_moved(token, c.params[s], output, prompt) for token in tokens)
        low[i], high[i] = a - y, b - x


def _moved(token: int, params: SamplingParams, output: Counter[int], prompt: set[int]) -> tuple[float, float]:
    """(low, high): how far bias and penalties move a token's logit."""
    times = output[token]
    by = params.logit_bias.get(token, 0.0) - params.frequency_penalty * times - params.presence_penalty * bool(times)
    if params.repetition_penalty != 1 and (times or token in prompt):
        return (-np.inf, by) if params.repetition_penalty > 1 else (by, np.inf)
    return by, by


def _path(c: Columns, node: int) -> list[int]:
    """The drafted tokens above a node."""
    path = []
    while (node := int(c.above[node])) >= 0:
        path.append(int(c.token[node]))
    return path
