"""The shortest condition that separates items that differ from those that agree, over all known facts about them.

A small search over rules: single tests first (a fact against one of its values), then up to two more tests, each
joined by `and` or `or`. A rule is scored by the correlation of "it holds" with "differs" (phi), less a price for each
further test. A rule that chance could have produced, given how many were tried, is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
OPERATORS = (">=", "<=", "==", "!=")  # of those that do equally well, the first is taken


@dataclass(frozen=True)
class Test:
    """A fact against a value."""

    fact: str
    operator: str
    value: Any

    def holds(self, facts: Facts) -> Bools:
        """[items] where it holds."""
        column = np.asarray(facts[self.fact])
        compare = {">=": np.greater_equal, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal}[self.operator]
        return np.asarray(compare(column, self.value), dtype=np.bool_)

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
    """[items] where joined tests hold; everywhere without any."""
    if not tests:
        return np.ones(len(next(iter(facts.values()))), np.bool_)
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
        """The condition in words."""
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
        """As plain values, for --json."""
        return {
            "text": self.text,
            "hits_in": self.hits_in,
            "total_in": self.total_in,
            "hits_out": self.hits_out,
            "total_out": self.total_out,
            "p_value": self.p_value,
        }


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
    table = [column for name, values in facts.items() if (column := _Column.of(name, values)) is not None]
    if not table:
        return None
    search = _Search(table, label)
    groups = np.arange(len(label)) if clusters is None else np.unique(np.asarray(clusters), return_inverse=True)[1]
    best: Condition | None = None
    for rules in search.by_length():
        for rule in rules[:3]:
            condition = _judged(rule, facts, label, groups, search.tried)
            good = condition.p_value < CERTAIN and condition.correlation >= WEAKEST
            if good and (best is None or condition.score > best.score + 1e-9):
                best = condition
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
    return f"{', '.join(shown)}; in brackets how many of {others:,} others are so" if rare else ""


@dataclass(frozen=True)
class _Column:
    """A fact of all items: its distinct values, ascending, and which of them each item has."""

    name: str
    values: list[Any]
    code: NDArray[np.int64]
    operators: tuple[str, ...]

    @staticmethod
    def of(name: str, values: Sequence[Any] | NDArray[Any]) -> _Column | None:
        """None where all items have the same value."""
        array = np.asarray(values)
        distinct, code = np.unique(array, return_inverse=True)
        if len(distinct) < 2:
            return None
        if array.dtype == np.bool_:
            return _Column(name, [False, True], code, ("==",))
        operators = ("==", "!=") if array.dtype.kind in "US" else OPERATORS
        return _Column(name, distinct.tolist(), code, operators)

    def counts(self, chosen: NDArray[Any], label: Bools) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
        """For each operator the chosen items that pass it at each value: how many differ, and how many there are."""
        size = len(self.values)
        code = self.code[chosen]
        here = np.bincount(code, minlength=size).astype(np.float64)
        hits = np.bincount(code[label[chosen]], minlength=size).astype(np.float64)
        whole, differ = here.sum(), hits.sum()
        for operator in self.operators:
            if operator == "==":
                yield operator, hits, here
            elif operator == "!=":
                yield operator, differ - hits, whole - here
            elif operator == "<=":
                yield operator, hits.cumsum(), here.cumsum()
            else:
                yield operator, differ - hits.cumsum() + hits, whole - here.cumsum() + here


@dataclass(frozen=True)
class _Rule:
    """Tests, how they are joined, and the score over the items that are searched."""

    tests: tuple[Test, ...]
    joins: tuple[str, ...]
    score: float


class _Search:
    """The search, over a sample of at most SEARCHED items in which both kinds are well represented."""

    def __init__(self, table: list[_Column], label: Bools) -> None:
        chosen = _sampled(label)
        self.table = [_Column(c.name, c.values, c.code[chosen], c.operators) for c in table]
        self.label = label[chosen]
        self.items = len(self.label)
        self.differ = int(self.label.sum())
        self.tried = sum(len(c.values) * len(c.operators) for c in table)
        self.facts = {c.name: np.asarray(c.values)[c.code] for c in self.table}

    def by_length(self) -> Iterator[list[_Rule]]:
        """The best rules of one test, of two, of three; best first."""
        rules = self._extended(None)
        yield rules
        for _ in range(LONGEST - 1):
            if not rules or rules[0].score >= 1 - 1e-9:
                return
            longer = [rule for base in rules[:BEAM] for rule in self._extended(base)]
            rules = sorted(longer, key=lambda rule: -rule.score)[: 3 * BEAM]
            yield rules

    def _extended(self, base: _Rule | None) -> list[_Rule]:
        """The best rules that extend `base` by one test: with `and` where it holds, with `or` where it does not."""
        if base is None:
            return self._best(None, "", np.arange(self.items), 0, 0)
        held = _hold(base.tests, base.joins, self.facts)
        inside, outside = np.flatnonzero(held), np.flatnonzero(~held)
        hits = int(self.label[inside].sum())
        return [*self._best(base, "and", inside, 0, 0), *self._best(base, "or", outside, hits, len(inside))]

    def _best(self, base: _Rule | None, join: str, chosen: NDArray[Any], hits: int, held: int) -> list[_Rule]:
        """The best test of each fact and operator over the chosen items; `held` others hold already, `hits` differ."""
        rules = []
        for column in self.table:
            for operator, differ, there in column.counts(chosen, self.label):
                score = phi(differ + hits, there + held, self.differ, self.items)
                index = int(score.argmax())
                test = Test(column.name, operator, column.values[index])
                tests = (test,) if base is None else (*base.tests, test)
                joins = () if base is None else (*base.joins, join)
                rules.append(_Rule(tests, joins, float(score[index])))
        return sorted(rules, key=lambda rule: -round(rule.score, 9))[: BEAM if base is not None else 4 * BEAM]


def _sampled(label: Bools) -> NDArray[Any]:
    """Items to search, in order: all, or a sample in which both kinds are well represented."""
    if len(label) <= SEARCHED:
        return np.arange(len(label))
    draw = np.random.default_rng(0)
    yes, no = np.flatnonzero(label), np.flatnonzero(~label)
    few = min(len(yes), len(no), SEARCHED // 2)
    many = SEARCHED - few
    wanted = (few, many) if len(yes) <= len(no) else (many, few)
    parts = [
        draw.choice(part, min(count, len(part)), replace=False) for part, count in zip((yes, no), wanted, strict=True)
    ]
    return np.sort(np.concatenate(parts))


def phi(hits: NDArray[Any], held: NDArray[Any], differ: int, items: int) -> NDArray[Any]:
    """The correlation of "it holds" with "differs": hits of the `held` items differ, and `differ` of all items."""
    below = held * (items - held) * float(differ) * float(items - differ)
    return np.where(below > 0, (items * hits - held * differ) / np.sqrt(np.maximum(below, 1)), 0.0)


def _judged(rule: _Rule, facts: Facts, label: Bools, groups: NDArray[Any], tried: int) -> Condition:
    """The rule with its figures over all items, and the probability that noise gives one as good."""
    holds = _hold(rule.tests, rule.joins, facts)
    cells = [len(np.unique(groups[a & b])) for a in (holds, ~holds) for b in (label, ~label)]
    choices = len(rule.tests) * math.log(max(tried, 1))
    chance = min(0.0, log_fisher(*cells) + choices)
    return Condition(
        tests=rule.tests,
        joins=rule.joins,
        hits_in=int((holds & label).sum()),
        total_in=int(holds.sum()),
        hits_out=int((~holds & label).sum()),
        total_out=int((~holds).sum()),
        p_value=math.exp(max(chance, -700.0)),
    )


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
