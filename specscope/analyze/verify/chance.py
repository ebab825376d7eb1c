"""The run as a whole: did chance fall as the recorded probabilities say? One significance level for all checks. And
the coins: unequal, and where they cannot be computed again uniform, and independent of one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import RECOVERED, Columns
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.analyze.significance import holm
from specscope.analyze.verify.exact import NO_COINS, Check, undrawn
from specscope.analyze.verify.parents import LACKING
from specscope.trace.record.records import FinishReason
from specscope.trace.record.tree import Bools, Doubles, Drawn

POWER = 1.645  # standard deviations by which a bias must lie beyond the limit to be seen in 95 % of runs
FEWEST = 20  # differences
Z95 = 1.96
SHARES = np.array([1.0, 0.9, 0.5, 0.2, 0.1])  # of drafts that are taken as the likeliest and not drawn


@dataclass(frozen=True)
class Sum:
    """A sum of martingale differences."""

    total: float
    variance: float
    count: int
    bound: float  # on each of them
    worst: int = -1  # the one that adds most in the direction of the sum, as the caller numbers them
    likeliest: Likeliest | None = None  # of draws: how often they are the likeliest token, by which they are judged too
    unit: float = 1.0  # standard deviations in which z is told

    @staticmethod
    def of(difference: Doubles, variance: Doubles, bound: float, places: Indices) -> Sum:
        """Of these differences. `places`: how the caller numbers them."""
        total = float(difference.sum())
        worst = int(places[np.argmax(difference * math.copysign(1, total))]) if len(difference) else -1
        return Sum(total, float(variance.sum()), len(difference), bound, worst)

    @staticmethod
    def uniform(values: Doubles) -> Sum:
        """How far numbers are from uniform on (0, 1): Kolmogorov's distance, by Massart's bound 2 exp(-2 n d^2).

        It is that of a sum n d with variance n / 4. z is in units of 1 / sqrt(n).
        """
        ordered, n = np.sort(values), len(values)
        rank = np.arange(n)
        far = np.concatenate([[0.0], ordered - rank / max(n, 1), (rank + 1) / max(n, 1) - ordered])
        return Sum(n * float(far.max()), n / 4, n, 0.0, unit=2.0)

    @property
    def judged(self) -> bool:
        return self.count >= FEWEST and self.variance > 0

    @property
    def z(self) -> float:
        return self.total / math.sqrt(self.variance) / self.unit

    @property
    def bias(self) -> float:
        return self.total / self.count

    @property
    def log_chance(self) -> float:
        """The natural logarithm of an upper bound on the chance of a sum so far from 0."""
        t = abs(self.total)
        return min(0.0, math.log(2) - t * t / (2 * (self.variance + self.bound * t / 3)))

    @property
    def takes_likeliest(self) -> bool:
        """Whether chance explains this worst: another temperature shows in the sum first."""
        return self.likeliest is not None and self.likeliest.log_chance < self.log_chance

    @property
    def p_value(self) -> float:
        """The bound; of two the rarer one (Bonferroni's correction)."""
        if self.likeliest is None:
            return math.exp(self.log_chance)
        return min(1.0, 2 * math.exp(min(self.log_chance, self.likeliest.log_chance)))

    def least_bias(self, alpha: float) -> float:
        """The smallest mean that a test at this level would have seen with 95 % power."""
        log = math.log((2 if self.likeliest is None else 4) / alpha)
        limit = self.bound * log / 3
        limit += math.sqrt(limit * limit + 2 * self.variance * log)
        return (limit + POWER * math.sqrt(self.variance)) / self.count


@dataclass(frozen=True)
class Likeliest:
    """How often draws are the likeliest token of what they are said to be drawn from.

    A drafter that takes its likeliest token, of probability q, in a share s of its drafts and draws the others gives
    that token with s + (1 - s) q, and any other with 1 - s times its own probability. The product of these over the
    probabilities of draws is a martingale where drafts are drawn; so is its mean over SHARES. By Ville's inequality it
    ever exceeds 1 / x with a probability of x at most.
    """

    hits: int
    count: int
    log_chance: float  # natural logarithm of an upper bound on the chance of so many hits; 0 at most

    @staticmethod
    def of(q: Doubles, hit: Bools) -> Likeliest:
        """`q` [n] of the tokens that were drawn, above 0; `hit` [n]: which of them are the likeliest of their row."""
        more, hits = 1 / np.minimum(q[hit], 1.0) - 1, int(hit.sum())
        logs = np.log1p(SHARES[:, None] * more).sum(axis=1)
        if misses := len(q) - hits:
            with np.errstate(divide="ignore"):
                logs += misses * np.log1p(-SHARES)
        mean = logs.max() + math.log(float(np.exp(logs - logs.max()).mean()))
        return Likeliest(hits, len(q), -max(mean, 0.0))

    @property
    def p_value(self) -> float:
        return math.exp(self.log_chance)

    @property
    def words(self) -> str:
        """`177 of 177 are the likeliest token of their q; draws are so with a chance of 10^-239 at most`."""
        power = self.log_chance / math.log(10)
        chance = f"10^{math.ceil(power)}" if power < -3 else f"{self.p_value:.2g}"
        hits = f"{self.hits:,} of {self.count:,} are the likeliest token of their q"
        return f"{hits}; in draws from q the probability of that is at most {chance}"


SHARE, NATS = (100, "{:.2g} %"), (1, "{:.2g} nats a token")  # biases in words: of a probability, of a surprisal,
CORRELATION, DISTANCE = (1, "a correlation of {:.2g}"), (1, "a distance of {:.2g}")  # of two numbers, from uniform
FEW = "too few to judge"
LOOSE = 1e-3  # about the level of each of a dozen checks


@dataclass(frozen=True)
class Family:
    """A check before it is judged: one sum, or several of which the worst counts (Bonferroni's correction)."""

    name: str
    about: str
    sums: Mapping[str, Sum]  # by what they are over: one depth, place or size; "" for everything
    unit: tuple[float, str]
    where: Callable[[int], Reference]  # of what the sums number
    lacking: str = FEW  # why it is skipped, where it is
    looked: int | None = None  # how many its sums are of, where they overlap

    @cached_property
    def judged(self) -> dict[str, Sum]:
        """The sums with enough in them to show a bias of a possible size; the worst first."""
        largest = math.inf if self.unit is NATS else 1.0
        judged = {name: sum_ for name, sum_ in self.sums.items() if sum_.judged and sum_.least_bias(LOOSE) < largest}
        return dict(sorted(judged.items(), key=lambda each: each[1].p_value))

    @property
    def p_value(self) -> float:
        return min(1.0, len(self.judged) * next(iter(self.judged.values())).p_value)

    def finding(self, level: float, *, failed: bool) -> Finding:
        """The check. `level`: that of the first step of Holm's procedure."""
        # What the sums count: coins in themselves, or what chance decided or drew
        counted = "coin" if self.name.startswith("coins") else "decision" if "acceptance" in self.name else "draw"
        found = Finding(self.name, CheckResult.SKIPPED, self.about, note=self.lacking, unit=counted)
        if not self.judged:
            return found
        name, worst = next(iter(self.judged.items()))
        counts, (factor, words) = [sum_.count for sum_ in self.judged.values()], self.unit
        # Of those with a tenth of the largest one's observations at least: that a smaller one passes says little
        large = [sum_ for sum_ in self.judged.values() if sum_.count >= max(counts) / 10]
        least = max(sum_.least_bias(level / len(counts)) for sum_ in large)
        found = replace(found, tested=sum(counts) if self.looked is None else self.looked, least_bias=least)
        found = replace(found, statistic=worst.z, p_value=self.p_value, bias=worst.bias)
        if not failed:
            seen = words.format(factor * least)
            return replace(found, result=CheckResult.PASSED, note=f"would have seen a bias of {seen} with 95 % power")
        detail = f"off by {words.format(factor * worst.bias)} on average, z = {worst.z:.2f} over {worst.count:,}"
        detail = ": ".join(filter(None, (name, detail))) + (f"; {worst.likeliest.words}" if worst.likeliest else "")
        example = self.where(worst.worst) if worst.worst >= 0 else None
        return replace(found, result=CheckResult.FAILED, note="", detail=detail, example=example)


def share_of(hits: Doubles, total: Doubles) -> tuple[float, float]:
    """(the share, its variance) of hits [R] out of totals [R]: requests are independent, the tokens of one are not.

    The variance is the larger of two: by request (the ratio estimator's), and Wilson's of independent trials, which is
    not 0 where all or nothing was a hit.
    """
    trials, count = float(total.sum()), int((total > 0).sum())
    if not trials:
        return 0.0, math.inf
    share = float(hits.sum()) / trials
    around = (float(hits.sum()) + Z95**2 / 2) / (trials + Z95**2)
    by_request = float(((hits - share * total) ** 2).sum()) * count / max(count - 1, 1) / trials**2
    return share, max(around * (1 - around) / trials, by_request if count > 1 else 0.0)


# The sums over a run: what verification decided and drew, against the chances that it recorded.

FLAT = 1e-4  # nats^2: a distribution of less varentropy is nearly all one token, and rounding outweighs chance
WHOLE = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH)  # an output that ended by itself
SPENT = 0.01  # of q: where less is left, figures of the rest are mostly rounding
BY_OUTCOME = "requests were kept for their outcome (--keep): they are not a fair sample"


def statistical_checks(c: Columns, alpha: float) -> list[Finding]:
    """All checks, with a family-wise error of alpha over those that can be judged."""
    families = [*_decisions(c), *_draws(c), *_coins(c)]
    if c.run is not None and "keep " in c.run.sampling:
        families = [replace(family, lacking=BY_OUTCOME, sums={}) for family in families]
    judged = [family for family in families if family.judged]
    failed = iter(holm([family.p_value for family in judged], alpha))
    level = alpha / max(len(judged), 1)
    return [family.finding(level, failed=bool(family.judged) and next(failed)) for family in families]


def _decisions(c: Columns) -> Iterator[Family]:
    """Outcomes against the acceptance probability, at nodes that chance decided."""
    nodes = np.flatnonzero(c.by_own_coin & ~c.forced & c.free[c.step] & (c.accept_prob > 0) & (c.accept_prob < 1))
    a = c.accept_prob[nodes]
    size = np.minimum((a * 10).astype(np.int64), 9)
    by = ((c.depth[nodes], "depth {}"), (c.sibling[nodes] + 1, "sibling {}"), (size, "a from 0.{}"))
    lacking = FEW if len(nodes) else "every acceptance probability was 0 or 1" if len(c.token) else "nothing drafted"

    def of(mine: Bools) -> Sum:
        return Sum.of((c.accepted[nodes] - a)[mine], (a * (1 - a))[mine], 1.0, nodes[mine])

    every = {"": of(np.ones(len(nodes), np.bool_))}
    places = {name.format(value): of(where == value) for where, name in by for value in np.unique(where).tolist()}
    about = "the same by depth, by place among siblings, and for small and large a"
    yield Family("acceptance", "nodes are accepted as often as a predicts", every, SHARE, c.at_node, lacking)
    yield Family("acceptance by place", about, places, SHARE, c.at_node, lacking, len(nodes))


def _draws(c: Columns) -> Iterator[Family]:
    """Tokens against the distributions that they were drawn from."""
    lacking = FEW if c.parents.there.any() else LACKING
    no_draws = lacking if c.sampled.any() else "no draft was sampled"
    recovered, (emitted, top_token), (first, later) = c.kind == RECOVERED, _emitted(c), drafted(c)
    choice = "the target's likeliest token is emitted as often as its p predicts"
    siblings = "first siblings follow q, and are its likeliest token no more often than draws would be"
    left = "siblings drawn after the first follow what is left of q"
    order = "the likelier of two sampled siblings comes first as often as in draws from q"
    residual, drawn = (_final_draws(c, kind) for kind in (recovered, ~recovered))
    for name, about, total, unit in (
        ("recovered draws", "recovered tokens follow the residual", residual, NATS),
        ("other final draws", "bonus and target tokens follow p", drawn, NATS),
        ("emitted surprisal", "emitted tokens follow the target's p: lossless", emitted, NATS),
        ("target's choice emitted", choice, top_token, SHARE),
    ):
        yield Family(name, about, {"": total}, unit, c.at_step, lacking)
    yield Family("drafted surprisal", siblings, {"": first}, NATS, c.at_node, no_draws)
    yield Family("later siblings", left, {"": later}, NATS, c.at_node, no_draws)
    yield Family("order of siblings", order, {"": _draw_order(c)}, SHARE, c.at_node, no_draws)


def _coins(c: Columns) -> Iterator[Family]:
    """Coins against uniform, independent random numbers; those that were computed again are no chance."""
    lacking = "every coin was recomputed from its key" if len(c) and c.recomputed.all() else FEW
    no_draws = FEW if c.sampled.any() else "no draft was sampled"
    in_series, drafted = "a coin is not correlated with the next one", "coins are not correlated with what was drafted"
    found = (
        Family("coins uniform", "coins are spread evenly over 0 to 1", uniform(c), DISTANCE, c.at_step, lacking),
        Family("coins in series", in_series, _serial(c), CORRELATION, c.at_step, lacking),
        Family("coins and draws", drafted, _against_draws(c), CORRELATION, c.at_step, no_draws),
    )
    yield from found if c.has_coins else (replace(family, sums={}, lacking=NO_COINS) for family in found)


def surprisal(p: Doubles, entropy: Doubles, varentropy: Doubles, places: Indices) -> Sum:
    """The sum over tokens drawn with these probabilities. Its bound is the largest difference that was seen."""
    difference = -np.log(np.maximum(p, 1e-45)) - entropy
    return Sum.of(difference, varentropy, float(np.abs(difference).max(initial=1.0)), places)


def _final_draws(c: Columns, of_kind: Bools) -> Sum:
    """Surprisal of final tokens against the entropy of what they were drawn from; numbered by step."""
    e = c.parents
    steps = np.flatnonzero(of_kind & c.free & e.there & ~c.forced_final & (e.final_varentropy > FLAT))
    return surprisal(c.final_p[steps], e.final_entropy[steps], e.final_varentropy[steps], steps)


def _output(c: Columns) -> tuple[Bools, Bools]:
    """[N] accepted nodes and [S] final tokens that a sum over what came out may count: under rules that look ahead only
    those of whole outputs, up to where they ended by themselves, for how many tokens a step gives depends on them.
    """
    finals, nodes = np.ones(len(c), np.bool_), c.accepted.copy()
    for s in np.flatnonzero(c.ahead).tolist():
        visit = c.visits[s]
        end = visit.request.end
        emitted = 0 if end is None or end.reason not in WHOLE else visit.part.emitted
        path = c.start[s] + c.verdicts[s].path
        nodes[path[emitted:]] = False
        finals[s] = emitted > len(path)
    return nodes, finals


def _untouched(c: Columns) -> Bools:
    """[rows] of free steps, where neither a child nor the final token was forced."""
    # Under rules that look ahead a step in which anything was forced is left out as a whole
    free = c.free & ~c.forced_final & ~(c.any_in_step(c.forced) & c.ahead)
    rows = np.repeat(free, np.diff(c.start) + 1)
    rows[c.row[c.forced]] = False
    return rows


def _emitted(c: Columns) -> tuple[Sum, Sum]:
    """Of every committed token, whatever drew it: its surprisal in the target's p at its place, and whether it is the
    target's first choice, against the choice's p. Numbered by step."""
    e = c.parents
    untouched, (out, finals) = _untouched(c), _output(c)
    rows, recovered = untouched & (e.at_row >= 0), c.kind == RECOVERED
    nodes = np.flatnonzero(out & rows[c.row])
    ends = np.flatnonzero(recovered & rows[c.final_row] & finals)
    others = np.flatnonzero(~recovered & e.there & untouched[c.final_row] & finals)
    parent = e.at_row[np.concatenate([c.row[nodes], c.final_row[ends]])]
    p = np.concatenate([c.p[nodes], e.final_p[ends], e.final_p[others]])
    entropy = np.concatenate([e.entropy[parent], e.final_entropy[others]])
    varentropy = np.concatenate([e.varentropy[parent], e.final_varentropy[others]])
    steps = np.concatenate([c.step[nodes], ends, others])
    usable = varentropy > FLAT
    of_all = surprisal(p[usable], entropy[usable], varentropy[usable], steps[usable])
    chance, token = e.choice_p[parent], np.concatenate([c.token[nodes], c.final[ends]])
    usable = (chance > 0) & (chance < 1)
    difference, variance = (e.choice[parent] == token) - chance, chance * (1 - chance)
    return of_all, Sum.of(difference[usable], variance[usable], 1.0, steps[: len(parent)][usable])


def drafted(c: Columns) -> tuple[Sum, Sum]:
    """Sampled drafts against q: first siblings, and the surprisal of later ones; numbered by node."""
    nodes, q, entropy, varentropy = (np.concatenate(column) for column in zip(*_by_place(c), strict=True))
    first = c.sibling[nodes] == 0
    sums = [surprisal(q[m], entropy[m], varentropy[m], nodes[m]) for m in (first, ~first)]
    return replace(sums[0], likeliest=Likeliest.of(q[first], c.parents.q_rank[nodes[first]] == 1)), sums[1]


def _by_place(c: Columns) -> Iterator[tuple[Indices, Doubles, Doubles, Doubles]]:
    """By place among siblings: nodes, q as drawn, entropy and varentropy of what they were drawn from. Without
    replacement the sums of q log q and q log^2 q lose one term with each draw.
    """
    e = c.parents
    sums = np.zeros((2, c.rows))
    sums[:, e.row] = -e.q_entropy, e.q_varentropy + e.q_entropy**2
    usable = c.sampled & (e.at_node >= 0) & c.free[c.step] & (c.q > 0)
    # Under rules that look ahead what is drawn below an inner node has a part in whether that node is accepted, and
    # so in whether its children are seen here
    usable &= c.walks[c.step] | (c.depth == 1)
    for place in range(int(c.sibling[usable].max(initial=0)) + 1):
        nodes = np.flatnonzero(usable & (c.sibling == place))
        left, (first, second) = c.q_left[nodes], sums[:, c.row[nodes]]
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.log(left)
            entropy = log - first / left
            varentropy = second / left - 2 * log * first / left + log**2 - entropy**2
        fine = (left > SPENT) & (varentropy > 10 * FLAT)
        yield nodes[fine], c.q[nodes[fine]] / left[fine], entropy[fine], varentropy[fine]
        gone = nodes[c.drawn[nodes] == Drawn.WITHOUT_REPLACEMENT]
        q = c.q[gone]
        sums[:, c.row[gone]] -= np.stack([q * np.log(q), q * np.log(q) ** 2])


def _draw_order(c: Columns) -> Sum:
    """Whether the likelier of two neighbours came first, against its chance of that; numbered by node. Of two tokens
    drawn without replacement, with shares a and b of what was left of q, a comes first with a b / (1 - a), b with
    a b / (1 - b).
    """
    nodes = np.flatnonzero((c.elder >= 0) & c.sampled & c.free[c.step])
    nodes = nodes[c.drawn[c.elder[nodes]] == Drawn.WITHOUT_REPLACEMENT]
    left = np.maximum(c.q_left[c.elder[nodes]], 1e-6)
    first, second = np.minimum(c.q[c.elder[nodes]] / left, 1.0), np.minimum(c.q[nodes] / left, 1.0)
    usable = (second > 0) & (first > 0) & (first + second < 1 - 1e-4) & (first != second)
    nodes, first, second = nodes[usable], first[usable], second[usable]
    larger, smaller = np.maximum(first, second), np.minimum(first, second)
    chance = (1 - smaller) / ((1 - larger) + (1 - smaller))
    return Sum.of((first > second) - chance, chance * (1 - chance), 1.0, nodes)


ROOT_3 = math.sqrt(3)


def _equal(coin: Doubles, group: Indices) -> tuple[Indices, Indices]:
    """Pairs of equal coins of one group: the places of neighbours in order."""
    order = np.lexsort((coin, group))
    same = np.flatnonzero((np.diff(coin[order]) == 0) & (np.diff(group[order]) == 0))
    return order[same], order[same + 1]


def _again(coin: Doubles, group: Indices, counts: Callable[[Indices, Indices], Bools] | None = None) -> Indices:
    """[P, 2] pairs of equal coins of one group that count; none where chance explains as many.

    A coin in float32 is one of 2^24.
    """
    pairs = np.stack(_equal(coin, group), axis=1)
    pairs = pairs if counts is None else pairs[counts(*pairs.T)]
    size, expected = np.unique(group, return_counts=True)[1].astype(np.float64), 0.0
    if (coin == coin.astype(np.float32)).all():
        expected = float((size * (size - 1) / 2).sum()) * 2.0**-24
    return pairs if len(pairs) > expected + 5 * math.sqrt(expected) else pairs[:0]


def coins_apart(c: Columns) -> Iterator[Finding]:
    """No coin comes again, beyond what their resolution brings about."""
    check = partial(Check, c, unit="step")
    coin, step, draws = _tossed(c)
    single_use = draws | ~c.match[step]  # under match siblings are judged by one coin
    single, its_step = coin[single_use], step[single_use]
    bad = np.zeros(len(c), np.bool_)
    bad[its_step[_again(single, its_step)]] = True

    def repeated(s: int) -> str:
        found, times = np.unique(single[its_step == s], return_counts=True)
        return f"coin {found[times.argmax()]:.6g} came {times.max()} times"

    tested = np.full(len(c), c.has_coins and len(np.unique(its_step)) < len(its_step))
    why = "" if tested.any() else "no step has two coins" if c.has_coins else NO_COINS
    yield check("coins unequal", "no two coins of a step are the same").of(bad, tested, repeated, why)
    # Another engine's verdicts may use one again. Of equal ones the draws come first: each pair has one
    looked = np.concatenate([np.flatnonzero(draws), np.flatnonzero(~draws & c.ours)])
    coin, step, draws = coin[looked], step[looked], draws[looked]
    request = c.request[step]
    before, after = _again(coin, request, lambda a, b: (step[a] != step[b]) & draws[a]).T
    tested, again = np.zeros((2, len(c)), np.bool_)
    again[step[after]] = tested[step[after]] = tested[step[draws]] = True

    def came(s: int) -> str:
        pair = np.argmax(step[after] == s)
        steps, shared = sorted((int(step[before[pair]]), s)), coin[before[pair]]
        times = int(((coin == shared) & (request == c.request[s])).sum())
        return f"coin {shared:.6g} came at {' and at '.join(str(c.at_step(s)) for s in steps)}, {times} times in all"

    about = "no coin that drew a draft repeats at another step of its request"
    yield check("coins over steps", about).of(again, tested, came, undrawn(c))
    yield _coins_of_requests(c)


def _coins_of_requests(c: Columns) -> Finding:
    """Coins of our own drafts are compared over all steps: whatever runs beside it, a draw has its own."""
    nodes, drafts = np.flatnonzero((c.coin > 0) & ~c.match[c.step]), np.flatnonzero(c.drawn_by_coin)
    coin, step = np.concatenate([c.coin[nodes], c.draft_coin[drafts]]), c.step[np.concatenate([nodes, drafts])]
    group = c.batch[step]
    group[len(nodes) :] = -1 if c.ours else -2 - group[len(nodes) :]

    def apart(first: Indices, second: Indices) -> Bools:
        a, b = step[first], step[second]
        shared = c.known[a] & c.known[b] & (c.seed[a] == c.seed[b])
        shared &= (not c.ours) | (c.position[a] == c.position[b])  # vLLM's V2 goes by the position of each token
        return np.asarray((c.request[a] != c.request[b]) & ~shared)

    pairs = step[_again(coin, group, apart)]
    meet = len(np.unique(c.batch)) < len(c) or bool(c.ours and len(drafts) and c.request.max() > 0)
    tested, bad = np.full(len(c), c.has_coins and meet), np.zeros(len(c), np.bool_)
    bad[pairs] = True

    def detail(s: int) -> str:
        first, second = pairs[np.argmax((pairs == s).any(axis=1))].tolist()
        return f"{c.at_step(first)} and {c.at_step(second)} have a coin in common"

    why = "no step has two requests" if c.has_coins else NO_COINS
    about = "no two requests of a step have the same coin, unless with the same seed and position"
    return Check(c, "coins of requests", about, "step").of(bad, tested, detail, "" if tested.any() else why)


def _of_nodes(c: Columns) -> Bools:
    """[N] whether a coin was tossed for the node; under match all siblings share the first one's."""
    return (c.coin > 0) & ~(c.match[c.step] & (c.sibling > 0))


def _of_finals(c: Columns) -> Bools:
    """[S] likewise for the final token; under match a recovered token shares the coin of the rejected siblings."""
    return np.asarray((c.final_coin > 0) & ~(c.match & (c.kind == RECOVERED)))


def _all(c: Columns) -> tuple[Doubles, Indices]:
    """Every coin with its step: the final one, then the nodes', step after step."""
    coin = np.zeros(c.rows)
    coin[c.root_row], coin[c.own_row] = c.final_coin, c.coin
    return coin, np.repeat(np.arange(len(c)), np.diff(c.start) + 1)


def _tossed(c: Columns) -> tuple[Doubles, Indices, Bools]:
    """Every coin that was tossed, with its step: those of verdicts, and then those that drew drafts, which it tells."""
    coin, step = _all(c)
    drafts, verdicts = np.flatnonzero(c.drawn_by_coin), np.flatnonzero(coin > 0)
    both = np.concatenate([coin[verdicts], c.draft_coin[drafts]])
    return both, np.concatenate([step[verdicts], c.step[drafts]]), np.arange(len(both)) >= len(verdicts)


def _once(c: Columns, coin: Doubles, step: Indices) -> Indices:
    """The first of each coin among those of one seed: another engine may note one at two nodes that hold its token."""
    return np.delete(np.arange(len(coin)), _equal(coin, c.seed[step])[1])


def uniform(c: Columns) -> dict[str, Sum]:
    nodes, finals = np.flatnonzero(c.by_chance[c.step] & _of_nodes(c)), np.flatnonzero(c.by_chance & _of_finals(c))
    return {
        "those of nodes": Sum.uniform(c.coin[nodes][_once(c, c.coin[nodes], c.step[nodes])]),
        "those of final tokens": Sum.uniform(c.final_coin[finals][_once(c, c.final_coin[finals], finals)]),
        "those that drew drafts": Sum.uniform(c.draft_coin[(c.by_chance & c.fresh)[c.step] & c.drawn_by_coin]),
    }


def _serial(c: Columns) -> dict[str, Sum]:
    """As correlations: each coin of a verdict with the next of its step, each that drew a draft with the next likewise,
    and with that of the same draw in the request's previous step. Numbered by step."""
    (coin, step), free, drew = _all(c), c.by_chance & ~c.match, c.draft_coin
    pair = np.flatnonzero((np.diff(step) == 0) & free[step[:-1]] & (coin[:-1] > 0) & (coin[1:] > 0))
    pair = pair[_once(c, coin[pair + 1], step[pair])]
    drafts = np.flatnonzero(c.drawn_by_coin & (c.by_chance & c.fresh)[c.step])
    follows = drafts[1:][(np.diff(drafts) == 1) & (np.diff(c.step[drafts]) == 0)]
    later, before = _one_step_apart(c, drafts)
    return {
        "": _product(coin[pair], coin[pair + 1], step[pair]),
        "those that drew drafts": _product(drew[follows - 1], drew[follows], c.step[follows]),
        "those that drew drafts, from step to step": _product(drew[before], drew[later], c.step[later]),
    }


def _product(coin: Doubles, other: Doubles, places: Indices) -> Sum:
    """Two coins each as a correlation."""
    return Sum.of(12 * (coin - 0.5) * (other - 0.5), np.ones(len(coin)), 3.0, places)


def _one_step_apart(c: Columns, nodes: Indices) -> tuple[Indices, Indices]:
    """Of these nodes those that are there in the request's previous step too, by their number; and these."""
    index = np.array([part.index for part in c.parts], np.int64)[c.step]
    request = c.request[c.step]
    order = nodes[np.lexsort((index[nodes], c.node[nodes], request[nodes]))]
    same = (np.diff(request[order]) == 0) & (np.diff(c.node[order]) == 0) & (np.diff(index[order]) == 1)
    return order[1:][same], order[:-1][same]


def _against_draws(c: Columns) -> dict[str, Sum]:
    """As correlations, with the coin that drew a draft where that is recorded; the id of a token drawn by inverting a
    cumulative sum rises with its coin, and so shows where one is used twice. Numbered by step.
    """
    step, drew, by_chance = c.step, c.draft_coin, c.sampled & (c.sound & c.fresh)[c.step]
    nodes = np.flatnonzero(by_chance & _of_nodes(c))
    nodes = nodes[_once(c, c.coin[nodes], step[nodes])]
    first = np.flatnonzero(by_chance & (c.sibling == 0) & _of_finals(c)[step] & (c.row == c.final_row[step]))
    own, firsts = nodes[c.drawn_by_coin[nodes]], first[c.drawn_by_coin[first]]
    ids, final = c.token.astype(np.float64), c.final_coin[step]
    return {
        "a node's coin and its q": _correlation(c.coin[nodes], c.q[nodes], step[nodes]),
        "a node's coin and its token id": _correlation(c.coin[nodes], ids[nodes], step[nodes]),
        "the final coin and the draft's token id": _correlation(final[first], ids[first], step[first]),
        "a node's coin and the one that drew it": _product(drew[own], c.coin[own], step[own]),
        "the final coin and the one that drew the draft": _product(drew[firsts], final[firsts], step[firsts]),
    }


def _correlation(coin: Doubles, other: Doubles, places: Indices) -> Sum:
    spread = float(other.std()) if len(other) else 0.0
    weight = (other - other.mean()) / spread if spread else np.zeros(len(other))
    bound = ROOT_3 * float(np.abs(weight).max(initial=0.0))
    return Sum.of(2 * ROOT_3 * (coin - 0.5) * weight, weight**2, bound, places)
