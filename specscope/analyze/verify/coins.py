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
    coin, step, draws = _tossed(c)
    single_use = draws | ~c.by_rule.match[step]  # under match siblings are judged by one coin
    coin, step = coin[single_use], step[single_use]
    order = np.lexsort((coin, step))
    same = np.flatnonzero((np.diff(coin[order]) == 0) & (np.diff(step[order]) == 0))
    if not len(np.unique(step)) < len(step):
        return Check(name, CheckResult.SKIPPED, about, note="no step has two coins")
    if len(same) <= _by_accident(coin, step):
        return Check(name, CheckResult.PASSED, about, len(c), unit="step")
    steps = np.unique(step[order[same]])
    first = order[same[0]]
    detail = f"coin {coin[first]:.6g} came {int(((coin == coin[first]) & (step == step[first])).sum())} times"
    where = c.at_step(int(steps[0]))
    return Check(name, CheckResult.FAILED, about, len(c), len(steps), where, detail, unit="step", wrong=steps)


def _by_accident(coin: Doubles, group: Indices) -> float:
    """How many pairs of equal coins within groups chance explains: a coin in float32 is one of 2^24."""
    if not (coin == coin.astype(np.float32)).all():
        return 0.0
    count = np.unique(group, return_counts=True)[1].astype(np.float64)
    expected = float((count * (count - 1) / 2).sum()) * 2.0**-24
    return expected + 5 * math.sqrt(expected)


def over_steps(c: Columns) -> Check:
    """No coin that drew a draft comes again at another step of its request: not in a draw, and not in a verdict."""
    name, about = "coins over steps", "no coin that drew a draft comes again at another step of its request"
    if not c.drawn_by_coin.any():
        why = "the capture does not tell the coins that drew drafts" if c.sampled.any() else "no draft was sampled"
        return Check(name, CheckResult.SKIPPED, about, note=why, unit="step")
    coin, step, draws = _tossed(c)
    looked = draws if not c.ours else np.ones(len(draws), np.bool_)  # another engine's verdicts may use one again
    coin, step, draws = coin[looked], step[looked], draws[looked]
    request = _requests(c)[step]
    order = np.lexsort((~draws, coin, request))  # of equal ones the draws first: each pair has one
    coin, step, draws, request = coin[order], step[order], draws[order], request[order]
    again = (np.diff(coin) == 0) & (np.diff(request) == 0) & (np.diff(step) != 0) & draws[:-1]
    first = np.flatnonzero(again)
    steps = np.unique(step[draws])
    if len(first) <= _by_accident(coin, request):
        return Check(name, CheckResult.PASSED, about, len(steps), unit="step")
    wrong = np.unique(step[first + 1])
    a, b, shared = int(step[first[0]]), int(step[first[0] + 1]), coin[first[0]]
    times = int(((coin == shared) & (request == request[first[0]])).sum())
    detail = f"coin {shared:.6g} came at {c.at_step(min(a, b))} and at {c.at_step(max(a, b))}, {times} times in all"
    where = c.at_step(int(wrong[0]))
    return Check(name, CheckResult.FAILED, about, len(steps), len(wrong), where, detail, unit="step", wrong=wrong)


def _requests(c: Columns) -> Indices:
    """[S] the number of each step's request."""
    names: dict[str, int] = {}
    return np.array([names.setdefault(visit.request.id, len(names)) for visit in c.visits], np.int64)


def of_requests(c: Columns) -> Check:
    """No two requests of an engine step have the same coin, except where they have one seed and position.

    Coins of our own drafts are compared over all steps: whatever runs beside it, a draw has its own.
    """
    name, about = "coins of requests", "no two requests of a step have the same coin, but with one seed and position"
    if not c.has_coins:
        return Check(name, CheckResult.SKIPPED, about, note="the capture has no coins", unit="step")
    record = np.array([visit.record.step for visit in c.visits], np.int64)
    nodes, drafts = np.flatnonzero((c.coin > 0) & ~c.by_rule.match[c.step]), np.flatnonzero(c.drawn_by_coin)
    coin = np.concatenate([c.coin[nodes], c.draft_coin[drafts]])
    step = np.concatenate([c.step[nodes], c.step[drafts]])
    apart = -1 if c.ours else -2 - record[c.step[drafts]]
    group = np.concatenate([record[c.step[nodes]], np.broadcast_to(apart, len(drafts))])
    order = np.lexsort((coin, group))
    same = np.flatnonzero((np.diff(coin[order]) == 0) & (np.diff(group[order]) == 0))
    pairs = np.stack([step[order[same]], step[order[same + 1]]], axis=1)
    request = _requests(c)
    pairs = pairs[request[pairs[:, 0]] != request[pairs[:, 1]]]
    strange = np.array([not _share_seed(c, int(a), int(b)) for a, b in pairs], np.bool_)
    pairs = pairs[strange]
    batch = np.bincount(np.unique(record, return_inverse=True)[1])
    if not (batch > 1).any() and not (c.ours and len(drafts) and request.max() > 0):
        return Check(name, CheckResult.SKIPPED, about, note="no step has two requests", unit="step")
    if len(pairs) <= _by_accident(coin, group):
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


def _tossed(c: Columns) -> tuple[Doubles, Indices, Bools]:
    """Every coin that was tossed, with its step: those of verdicts, and then those that drew drafts, which it tells."""
    coin, step = _all(c)
    drafts, verdicts = np.flatnonzero(c.drawn_by_coin), np.flatnonzero(coin > 0)
    draws = np.concatenate([np.zeros(len(verdicts), np.bool_), np.ones(len(drafts), np.bool_)])
    both = np.concatenate([coin[verdicts], c.draft_coin[drafts]])
    return both, np.concatenate([step[verdicts], c.step[drafts]]), draws


def uniform(c: Columns) -> list[Distance]:
    """How far from uniform the coins of nodes are, those that drew final tokens, and those that drew drafts."""
    by_chance = _by_chance(c)
    finals = c.final_coin[by_chance & of_finals(c)]
    of_drafts = c.draft_coin[by_chance[c.step] & c.drawn_by_coin]
    return [Distance.of(c.coin[by_chance[c.step] & of_nodes(c)]), Distance.of(finals), Distance.of(of_drafts)]


def serial(c: Columns) -> list[Sum]:
    """As correlations: each coin of a verdict with the next of its step, each that drew a draft with the next likewise,
    and with that of the same draw in the request's step before. Numbered by step."""
    drafts = np.flatnonzero(c.drawn_by_coin & _by_chance(c)[c.step])
    follows = drafts[1:][(np.diff(drafts) == 1) & (np.diff(c.step[drafts]) == 0)]
    later, before = _one_step_apart(c, drafts)
    return [
        _of_verdicts(c),
        _product(c.draft_coin[follows - 1], c.draft_coin[follows], c.step[follows]),
        _product(c.draft_coin[before], c.draft_coin[later], c.step[later]),
    ]


def _product(coin: Doubles, other: Doubles, places: Indices) -> Sum:
    """Two coins each as a correlation."""
    return Sum.of(12 * (coin - 0.5) * (other - 0.5), np.ones(len(coin)), 3.0, places)


def _one_step_apart(c: Columns, nodes: Indices) -> tuple[Indices, Indices]:
    """Of these nodes those that are there in the request's step before too, by their number; and these."""
    request, index = _requests(c), np.array([part.index for part in c.parts], np.int64)
    order = nodes[np.lexsort((index[c.step[nodes]], c.node[nodes], request[c.step[nodes]]))]
    step, node = c.step[order], c.node[order]
    next_ = (np.diff(request[step]) == 0) & (np.diff(node) == 0) & (np.diff(index[step]) == 1)
    return order[1:][next_], order[:-1][next_]


def _of_verdicts(c: Columns) -> Sum:
    """Each coin of a verdict with the next of its step."""
    coin, step = _all(c)
    free = _by_chance(c) & ~c.by_rule.match
    pair = np.flatnonzero((np.diff(step) == 0) & free[step[:-1]] & (coin[:-1] > 0) & (coin[1:] > 0))
    return _product(coin[pair], coin[pair + 1], step[pair])


def against_draws(c: Columns) -> list[Sum]:
    """As correlations: a node's coin with its token's q and with its id, the final coin with the first draft's id; and
    both with the coin that drew the draft, where that is recorded.

    The id of a token drawn by inverting a cumulative sum rises with the coin that drew it, and so shows where a coin is
    used twice. Numbered by step.
    """
    by_chance = _by_chance(c)[c.step]
    nodes = np.flatnonzero(c.sampled & by_chance & of_nodes(c))
    first = np.flatnonzero(c.sampled & (c.sibling == 0) & by_chance & of_finals(c)[c.step])
    first = first[c.row[first] == c.final_row[c.step[first]]]
    own, firsts = nodes[c.drawn_by_coin[nodes]], first[c.drawn_by_coin[first]]
    return [
        _correlation(c.coin[nodes], c.q[nodes], c.step[nodes]),
        _correlation(c.coin[nodes], c.token[nodes].astype(np.float64), c.step[nodes]),
        _correlation(c.final_coin[c.step[first]], c.token[first].astype(np.float64), c.step[first]),
        _product(c.draft_coin[own], c.coin[own], c.step[own]),
        _product(c.draft_coin[firsts], c.final_coin[c.step[firsts]], c.step[firsts]),
    ]


def _correlation(coin: Doubles, other: Doubles, places: Indices) -> Sum:
    spread = float(other.std()) if len(other) else 0.0
    if not spread:
        return Sum(0.0, 0.0, 0, 1.0)
    weight = (other - other.mean()) / spread
    return Sum.of(2 * ROOT_3 * (coin - 0.5) * weight, weight**2, ROOT_3 * float(np.abs(weight).max()), places)
