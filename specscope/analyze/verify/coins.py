"""The coins of a run as random numbers: uniform, unequal, and independent of one another and of what was drawn."""

from __future__ import annotations

import math

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import KINDS, Columns
from specscope.analyze.findings import Check, CheckResult
from specscope.analyze.verify.sums import Distance, Sum
from specscope.trace.record.records import FinalKind
from specscope.trace.record.tree import Bools, Doubles

ROOT_3 = math.sqrt(3)


def unequal(c: Columns) -> Check:
    """No two coins of a step are the same number, beyond what their resolution brings about."""
    name, about = "coins unequal", "no two coins of a step are the same"
    if not c.has_coins:
        return Check(name, CheckResult.SKIPPED, about, note="the capture has no coins")
    coin, step = _all(c)
    shared = c.by_rule.match[step]  # siblings have one coin there
    coin, step = coin[(coin > 0) & ~shared], step[(coin > 0) & ~shared]
    order = np.lexsort((coin, step))
    same = np.flatnonzero((np.diff(coin[order]) == 0) & (np.diff(step[order]) == 0))
    count = np.bincount(step, minlength=len(c))
    pairs = float((count * (count - 1) / 2).sum())
    if not pairs:
        return Check(name, CheckResult.SKIPPED, about, note="no step has two coins")
    single = bool((coin == coin.astype(np.float32)).all())
    expected = pairs * 2.0**-24 if single else 0.0
    if len(same) <= expected + 5 * math.sqrt(expected):
        return Check(name, CheckResult.PASSED, about, len(c), unit="step")
    steps = np.unique(step[order[same]])
    first = order[same[0]]
    detail = f"coin {coin[first]:.6g} came {int(((coin == coin[first]) & (step == step[first])).sum())} times"
    where = c.at_step(int(steps[0]))
    return Check(name, CheckResult.FAILED, about, len(c), len(steps), where, detail, unit="step", wrong=steps)


def of_requests(c: Columns) -> Check:
    """No two requests of an engine step have the same coin, except where they have one seed and position."""
    name, about = "coins of requests", "no two requests of a step have the same coin, but with one seed and position"
    if not c.has_coins:
        return Check(name, CheckResult.SKIPPED, about, note="the capture has no coins", unit="step")
    record = np.array([visit.record.step for visit in c.visits], np.int64)
    nodes = np.flatnonzero((c.coin > 0) & ~c.by_rule.match[c.step])
    order = nodes[np.lexsort((c.coin[nodes], record[c.step[nodes]]))]
    same = np.flatnonzero((np.diff(c.coin[order]) == 0) & (np.diff(record[c.step[order]]) == 0))
    pairs = np.stack([c.step[order[same]], c.step[order[same + 1]]], axis=1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    strange = np.array([not _share_seed(c, int(a), int(b)) for a, b in pairs], np.bool_)
    pairs = pairs[strange]
    batch = np.bincount(np.unique(record, return_inverse=True)[1])
    if not (batch > 1).any():
        return Check(name, CheckResult.SKIPPED, about, note="no step has two requests", unit="step")
    # A coin in float32 is one of 2^24: two requests may get the same one by chance
    single = bool((c.coin == c.coin.astype(np.float32)).all())
    expected = len(nodes) * float(np.diff(c.start).max(initial=0)) * float(batch.max()) * 2.0**-24 if single else 0.0
    if len(pairs) <= expected + 5 * math.sqrt(expected):
        return Check(name, CheckResult.PASSED, about, len(c), unit="step")
    wrong = np.unique(pairs)
    first, second = pairs[0].tolist()
    detail = f"{c.at_step(first)} and {c.at_step(second)} have a coin in common"
    return Check(
        name, CheckResult.FAILED, about, len(c), len(wrong), c.at_step(first), detail, unit="step", wrong=wrong
    )


def _share_seed(c: Columns, first: int, second: int) -> bool:
    """Whether two steps are known to have the same seed, and position; vLLM's V2 goes by that of each token."""
    if not (c.known[first] and c.known[second]) or (c.ours and c.position[first] != c.position[second]):
        return False
    infos = [visit.request.info for visit in (c.visits[first], c.visits[second])]
    seeded = all(info is not None and info.labels.get("seed") != "none" for info in infos)
    return seeded and c.params[first].seed == c.params[second].seed


def of_nodes(c: Columns) -> Bools:
    """[N] whether a coin was tossed for the node; under match all siblings share the first one's."""
    return (c.coin > 0) & ~(c.by_rule.match[c.step] & (c.sibling > 0))


def of_finals(c: Columns) -> Bools:
    """[S] likewise for the final token; under match a recovered token shares the coin of the rejected siblings."""
    shared: Bools = c.by_rule.match & (c.kind == KINDS.index(FinalKind.RECOVERED))
    return (c.final_coin > 0) & ~shared


def _by_chance(c: Columns) -> Bools:
    """[S] whether the step's coins count as random: not those of an earlier step, and in range (a check of its own)."""
    return c.fresh & c.sound


def _all(c: Columns) -> tuple[Doubles, Indices]:
    """Every coin with its step: the final one, then the nodes', step after step."""
    coin, step = np.zeros(c.rows), np.zeros(c.rows, np.int64)
    coin[c.root_row], step[c.root_row] = c.final_coin, np.arange(len(c))
    coin[c.own_row], step[c.own_row] = c.coin, c.step
    return coin, step


def uniform(c: Columns) -> list[Distance]:
    """How far from uniform the coins of nodes are, and those that drew final tokens."""
    by_chance = _by_chance(c)
    finals = c.final_coin[by_chance & of_finals(c)]
    return [Distance.of(c.coin[by_chance[c.step] & of_nodes(c)]), Distance.of(finals)]


def serial(c: Columns) -> Sum:
    """Each coin with the next of its step, as a correlation; numbered by step."""
    coin, step = _all(c)
    free = _by_chance(c) & ~c.by_rule.match
    pair = np.flatnonzero((np.diff(step) == 0) & free[step[:-1]] & (coin[:-1] > 0) & (coin[1:] > 0))
    product = 12 * (coin[pair] - 0.5) * (coin[pair + 1] - 0.5)
    return Sum.of(product, np.ones(len(pair)), 3.0, step[pair])


def against_draws(c: Columns) -> list[Sum]:
    """As correlations: a node's coin with its token's q and with its id, the final coin with the first draft's id.

    The id of a token drawn by inverting a cumulative sum rises with the coin that drew it, and so shows where a coin is
    used twice. Numbered by step.
    """
    by_chance = _by_chance(c)[c.step]
    nodes = np.flatnonzero(c.sampled & by_chance & of_nodes(c))
    first = np.flatnonzero(c.sampled & (c.sibling == 0) & by_chance & of_finals(c)[c.step])
    first = first[c.row[first] == c.final_row[c.step[first]]]
    return [
        _correlation(c.coin[nodes], c.q[nodes], c.step[nodes]),
        _correlation(c.coin[nodes], c.token[nodes].astype(np.float64), c.step[nodes]),
        _correlation(c.final_coin[c.step[first]], c.token[first].astype(np.float64), c.step[first]),
    ]


def _correlation(coin: Doubles, other: Doubles, places: Indices) -> Sum:
    spread = float(other.std()) if len(other) else 0.0
    if not spread:
        return Sum(0.0, 0.0, 0, 1.0)
    weight = (other - other.mean()) / spread
    return Sum.of(2 * ROOT_3 * (coin - 0.5) * weight, weight**2, ROOT_3 * float(np.abs(weight).max()), places)
