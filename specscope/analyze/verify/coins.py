"""The coins of a run as random numbers: uniform, unequal, and independent of one another and of what was drawn."""

from __future__ import annotations

import math

import numpy as np

from specscope.analyze.findings import Check, Result
from specscope.analyze.verify.arrays import Indices
from specscope.analyze.verify.columns import KINDS, Columns
from specscope.analyze.verify.sums import Distance, Sum
from specscope.trace.records import FinalKind
from specscope.trace.tree import Bools, Doubles

ROOT_3 = math.sqrt(3)


def unequal(c: Columns) -> Check:
    """No two coins of a step are the same number, beyond what their resolution brings about."""
    name, about = "coins unequal", "no two coins of a step are the same"
    if not c.has_coins:
        return Check(name, Result.SKIPPED, about, note="the capture has no coins")
    coin, step = _all(c)
    shared = c.by_rule.match[step]  # siblings have one coin there
    coin, step = coin[(coin > 0) & ~shared], step[(coin > 0) & ~shared]
    order = np.lexsort((coin, step))
    same = np.flatnonzero((np.diff(coin[order]) == 0) & (np.diff(step[order]) == 0))
    count = np.bincount(step, minlength=len(c))
    pairs = float((count * (count - 1) / 2).sum())
    if not pairs:
        return Check(name, Result.SKIPPED, about, note="no step has two coins")
    single = bool((coin == coin.astype(np.float32)).all())
    expected = pairs * 2.0**-24 if single else 0.0
    if len(same) <= expected + 5 * math.sqrt(expected):
        return Check(name, Result.PASSED, about, len(c))
    steps = np.unique(step[order[same]])
    first = order[same[0]]
    detail = f"coin {coin[first]:.6g} came {int(((coin == coin[first]) & (step == step[first])).sum())} times"
    return Check(name, Result.FAILED, about, len(c), len(steps), c.at_step(int(steps[0])), detail)


def of_nodes(c: Columns) -> Bools:
    """[N] whether a coin was tossed for the node; under match the first sibling's is that of all."""
    return (c.coin > 0) & ~(c.by_rule.match[c.step] & (c.sibling > 0))


def of_finals(c: Columns) -> Bools:
    """[S] likewise for the final token; under match a recovered token has its rejected siblings' coin."""
    shared: Bools = c.by_rule.match & (c.kind == KINDS.index(FinalKind.RECOVERED))
    return (c.final_coin > 0) & ~shared


def _all(c: Columns) -> tuple[Doubles, Indices]:
    """Every coin with its step: the final one, then the nodes', step after step."""
    coin, step = np.zeros(c.rows), np.zeros(c.rows, np.int64)
    coin[c.root_row], step[c.root_row] = c.final_coin, np.arange(len(c))
    coin[c.own_row], step[c.own_row] = c.coin, c.step
    return coin, step


def uniform(c: Columns) -> list[Distance]:
    """Those of nodes, and those that drew final tokens."""
    finals = c.final_coin[c.fresh & of_finals(c)]
    return [Distance.of(c.coin[c.fresh[c.step] & of_nodes(c)]), Distance.of(finals)]


def serial(c: Columns) -> Sum:
    """Each coin with the next of its step, as a correlation; numbered by step."""
    coin, step = _all(c)
    free = c.fresh & ~c.by_rule.match
    pair = np.flatnonzero((np.diff(step) == 0) & free[step[:-1]] & (coin[:-1] > 0) & (coin[1:] > 0))
    product = 12 * (coin[pair] - 0.5) * (coin[pair + 1] - 0.5)
    return Sum.of(product, np.ones(len(pair)), 3.0, step[pair])


def against_draws(c: Columns) -> list[Sum]:
    """As correlations: a node's coin with its token's q and with its id, the final coin with the first draft's id.

    A token drawn by inverting a cumulative sum rises with the coin that drew it: where one coin serves twice, its id
    tells. Numbered by step.
    """
    nodes = np.flatnonzero(c.sampled & c.fresh[c.step] & of_nodes(c))
    first = np.flatnonzero(c.sampled & (c.sibling == 0) & c.fresh[c.step] & of_finals(c)[c.step])
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
