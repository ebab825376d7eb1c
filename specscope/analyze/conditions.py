"""The shortest condition that separates items that differ from those that agree, over all known facts about them.

A small search over rules: single tests first (a fact against one of its values), then up to two more tests, each
joined by `and` or `or`. A rule is scored by the correlation of "it holds" with "differs" (phi), less a price for each
further test. A rule that chance could have produced, given how many were tried, is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.history.wording import plural

Facts = Mapping[str, Sequence[Any] | NDArray[Any]]  # by name, a value for each item: numbers, strings or booleans
Bools = NDArray[np.bool_]

LONGEST = 3  # tests in a condition
PRICE = 0.03  # what a further test must add to the correlation
WEAKEST = 0.1  # a correlation below this explains nothing, however certain it is
CERTAIN = 0.01  # the largest probability that noise alone gives a condition
BEAM = 12  # rules of one length that are extended
SEARCHED = 20_000  # items that the search uses; the figures are over all
FEW = 3  # items that differ, whose look is told without a condition
COMPARE = {">=": np.greater_equal, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal}
OPERATORS = tuple(COMPARE)  # of those that do equally well, the first is taken


@dataclass(frozen=True)
class Test:
    fact: str
    operator: str
    value: Any

    def holds(self, facts: Facts) -> Bools:
        """[items] where it holds."""
        return np.asarray(COMPARE[self.operator](np.asarray(facts[self.fact]), self.value), dtype=np.bool_)

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return self.fact if self.value == (self.operator == "==") else _negated(self.fact)
        if isinstance(self.value, str):
            return f"{self.fact} is {'' if self.operator == '==' else 'not '}{self.value or 'empty'}"
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:.6g}"
        return f"{self.fact} {self.operator} {value}"


def _negated(fact: str) -> str:
    """`the parent is the root` to `the parent is not the root`; a fact without a known verb gets `not:` before it."""
    for verb in (" is ", " are ", " was ", " were ", " has ", " had "):
        if verb in fact:
            before, after = fact.split(verb, 1)
            return f"{before}{verb}{'no ' if verb in (' has ', ' had ') else 'not '}{after}"
    return f"not: {fact}"


def _hold(tests: Sequence[Test], joins: Sequence[str], facts: Facts) -> Bools:
    """[items] where joined tests hold."""
    passing = tests[0].holds(facts)
    for join, test in zip(joins, tests[1:], strict=True):
        passing = passing & test.holds(facts) if join == "and" else passing | test.holds(facts)
    return passing


@dataclass(frozen=True)
class Condition:
    """What separates the items that differ from the rest. Filled by `find`."""

    tests: tuple[Test, ...]  # none: everything differs
    joins: tuple[str, ...]  # and, or: before each test but the first; joined from left to right
    hits_in: int  # items that differ, of those for which it holds
    total_in: int
    hits_out: int  # items that differ, of the others
    total_out: int
    p_value: float  # the probability that noise gives one as good, over all rules of this length

    @property
    def correlation(self) -> float:
        """The correlation of "it holds" with "differs", from 0 to 1; 1 where everything differs."""
        if not self.total_out:
            return 1.0
        held, items = self.total_in, self.total_in + self.total_out
        return float(phi(np.array([self.hits_in]), np.array([held]), self.hits_in + self.hits_out, items)[0])

    @property
    def score(self) -> float:
        """The correlation, less the price of each test but the first."""
        return self.correlation - PRICE * max(len(self.tests) - 1, 0)

    @property
    def text(self) -> str:
        if not self.tests:
            return "everywhere"
        texts = [str(test) for test in self.tests]
        out = texts[0]
        for index, (join, text) in enumerate(zip(self.joins, texts[1:], strict=True)):
            mixed = index == 1 and join != self.joins[0]
            out = f"({out}) {join} {text}" if mixed else f"{out} {join} {text}"
        return out

    def holds(self, facts: Facts) -> Bools:
        """[items] where it holds."""
        return _hold(self.tests, self.joins, facts)

    def sentence(self, what: str = "differs", noun: str = "node") -> str:
        """`p differs at 212 of 212 nodes where depth >= 2, at 0 of 1,904 others`."""
        if not self.tests:
            return f"{what} at all {plural(self.total_in, noun)}"
        inside = f"{self.hits_in:,} of {plural(self.total_in, noun)}"
        return f"{what} at {inside} where {self.text}, at {self.hits_out:,} of {self.total_out:,} others"

    def to_dict(self) -> dict[str, Any]:
        names = ("text", "hits_in", "total_in", "hits_out", "total_out", "p_value")
        return {name: getattr(self, name) for name in names}


def find(
    facts: Facts, differs: Sequence[bool] | Bools, clusters: Sequence[Any] | NDArray[Any] | None = None
) -> Condition | None:
    """The shortest condition for the items that differ; None where nothing differs or noise would do as well.

    `clusters`: items of one cluster (a step, a request) may differ together, and count as one against chance.
    """
    label = np.asarray(differs, dtype=np.bool_)
    if not label.any():
        return None
    if label.all():
        return Condition((), (), len(label), len(label), 0, 0, 0.0)
    search = _Search(facts, label)
    groups = np.arange(len(label)) if clusters is None else np.unique(np.asarray(clusters), return_inverse=True)[1]
    best: Condition | None = None
    rules: list[_Rule] = [(0.0, (), ())]
    for _ in range(LONGEST):
        longer = [rule for _, tests, joins in rules[:BEAM] for rule in search.extended(tests, joins)]
        rules = sorted(longer, key=lambda rule: -round(rule[0], 9))
        for _, tests, joins in rules[:3]:
            condition = _judged(tests, joins, facts, label, groups, search.tried)
            good = condition.p_value < CERTAIN and condition.correlation >= WEAKEST
            if good and (best is None or condition.score > best.score + 1e-9):
                best = condition
        if not rules or rules[0][0] >= 1 - 1e-9:
            break
    return best


def rarest(facts: Facts, differs: Sequence[bool] | Bools) -> str:
    """What the few items that differ have in common and the fewest others have, where no condition is certain.

    `depth 3 (as 4 of 266 others), batch size 2 (as 31)`; "" where they are many, or unlike each other.
    """
    label = np.asarray(differs, dtype=np.bool_)
    others = int((~label).sum())
    if not 0 < label.sum() <= FEW or not others:
        return ""
    shared: dict[bytes, tuple[int, str]] = {}  # of facts that hold for the same items, the first
    for name, values in facts.items():
        column = np.asarray(values)
        if (column[label] == column[label][0]).all():
            same = column == column[label][0]
            shared.setdefault(
                same.tobytes(), (int((same & ~label).sum()), str(Test(name, "==", column[label][0].item())))
            )
    rare = sorted((count, text) for count, text in shared.values() if count < others / 4)[:LONGEST]
    shown = [f"{text.replace(' == ', ' ')} ({count:,})" for count, text in rare]
    return f"{', '.join(shown)}; in brackets: of {others:,} others" if rare else ""


_Rule = tuple[float, tuple[Test, ...], tuple[str, ...]]  # the score over the items searched, tests, how they are joined


class _Search:
    """The search, over a sample of at most SEARCHED items in which both kinds are well represented."""

    def __init__(self, facts: Facts, label: Bools) -> None:
        chosen = _sampled(label)
        self.label, self.tried = label[chosen], 0
        # Facts with several values: those, ascending, which of them each item has, and what it may be held against
        self.columns: list[tuple[str, NDArray[Any], NDArray[Any], tuple[str, ...]]] = []
        for name, column in facts.items():
            values, code = np.unique(np.asarray(column), return_inverse=True)
            operators = {"b": ("==",), "U": ("==", "!="), "S": ("==", "!=")}.get(values.dtype.kind, OPERATORS)
            if len(values) > 1:
                self.columns.append((name, values, code[chosen], operators))
                self.tried += len(values) * len(operators)
        self.facts = {name: values[code] for name, values, code, _ in self.columns}

    def extended(self, tests: tuple[Test, ...], joins: tuple[str, ...]) -> list[_Rule]:
        """The best rules that extend this one by one test: with `and` where it holds, with `or` where it does not."""
        held = _hold(tests, joins, self.facts) if tests else np.ones(len(self.label), np.bool_)
        longer = []
        for join, chosen in (("and", held), ("or", ~held)) if tests else (("", held),):
            # Of the others those that hold already, and how many of them differ
            more, known = (int(held.sum()), int(self.label[held].sum())) if join == "or" else (0, 0)
            best = []
            for name, values, code, operators in self.columns:
                some = (code[chosen & self.label], code[chosen])  # of each value: those that differ, all
                hits, here = (np.bincount(each, minlength=len(values)).astype(np.float64) for each in some)
                passing = {
                    ">=": (hits[::-1].cumsum()[::-1], here[::-1].cumsum()[::-1]),
                    "<=": (hits.cumsum(), here.cumsum()),
                    "==": (hits, here),
                    "!=": (hits.sum() - hits, here.sum() - here),
                }
                for operator in operators:
                    differ, there = passing[operator]
                    score = phi(differ + known, there + more, int(self.label.sum()), len(self.label))
                    place = int(score.argmax())
                    test = Test(name, operator, values[place].item())
                    best.append((float(score[place]), (*tests, test), (*joins, join) if tests else ()))
            longer += sorted(best, key=lambda rule: -round(rule[0], 9))[:BEAM]
        return longer


def _sampled(label: Bools) -> NDArray[Any]:
    """Items to search, in order: all, or as many of either kind as there are, at most half of SEARCHED."""
    if len(label) <= SEARCHED:
        return np.arange(len(label))
    drawn = np.random.default_rng(0).permutation(len(label))
    return np.sort(np.concatenate([drawn[label[drawn] == kind][: SEARCHED // 2] for kind in (True, False)]))


def phi(hits: NDArray[Any], held: NDArray[Any], differ: int, items: int) -> NDArray[Any]:
    """The correlation of "it holds" with "differs": hits of the `held` items differ, and `differ` of all items."""
    below = held * (items - held) * float(differ) * float(items - differ)
    return np.where(below > 0, (items * hits - held * differ) / np.sqrt(np.maximum(below, 1)), 0.0)


def _judged(
    tests: tuple[Test, ...], joins: tuple[str, ...], facts: Facts, label: Bools, groups: NDArray[Any], tried: int
) -> Condition:
    """The rule with its figures over all items, and the probability that noise gives one as good."""
    holds = _hold(tests, joins, facts)
    cells = [len(np.unique(groups[a & b])) for a in (holds, ~holds) for b in (label, ~label)]
    chance = min(0.0, log_fisher(*cells) + len(tests) * math.log(max(tried, 1)))
    hits_in, total_in, hits_out, total_out = (
        int(some.sum()) for some in (holds & label, holds, ~holds & label, ~holds)
    )
    return Condition(tests, joins, hits_in, total_in, hits_out, total_out, math.exp(max(chance, -700.0)))


def log_fisher(a: int, b: int, c: int, d: int) -> float:
    """Fisher's exact test, one-sided: the log probability of `a` or more in the table [[a, b], [c, d]]."""
    row, column, n = a + b, a + c, a + b + c + d
    factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    x = np.arange(a, min(row, column) + 1)
    known = factorial[row] + factorial[n - row] + factorial[column] + factorial[n - column] - factorial[n]
    cells = factorial[x] + factorial[row - x] + factorial[column - x] + factorial[n - row - column + x]
    terms = known - cells
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))
