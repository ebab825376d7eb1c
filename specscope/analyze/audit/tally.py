"""What was compared, item by item: how many differ, the first and the worst of them, and under which condition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import numpy as np

from specscope.analyze.conditions import Condition, find, rarest
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Example, Finding, Reference
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import log_odds

LEAST = 2e-6  # probabilities closer than this are the same whatever the dtype: they are stored as float32
SMALLEST, EPSILON = 2.0**-126, 2.0**-24  # of float32: the least probability, and by what one below 1 misses it
SUMMED = 1e-4  # relative error of a softmax in float32: see WHOLE in evidence/columns.py
EXAMPLES = 5
TARGET = {
    "target p": ("p of every drafted token is the model's", "node"),
    "target raw p": ("before temperature and rules, p of every drafted token is the model's", "node"),
    "target top tokens": ("the target's likeliest tokens have the model's p", "node"),
    "final token": ("a greedy request's final token is the model's choice", "step"),
    "final p": ("the final token's p is the model's", "step"),
    "log-probabilities": ("the emitted tokens' log-probabilities are the model's", "token"),
}
FED = "head's features"
DRAFTER = {
    "draft p": ("the drafter's probability of every token is the recomputed drafter's", "node"),
    "drafter tokens": ("the drafted tokens are the recomputed drafter's likeliest", "node"),
    "draft draws": ("the recorded coin draws the drafted token from the recomputed drafter's q", "node"),
    "drafter top tokens": ("the drafter's likeliest tokens have the recomputed drafter's p", "node"),
    FED: ("the head was fed the text's tokens and the target's hidden states", "step"),
}
TREE = ("drafter tree", "the tree is what a lookup in the text gives")
CONTEXT = ("context", "each step starts from the last committed token")
EMBEDDING = ("head's embedding", "the head's embedding of a token points in the direction of the target's")
NEAR_TIE = "at near ties"  # where rounding allows either outcome
NO_P = "whose p was not recorded"
TAIL, FAR = 0.005, 4.0  # share of a half precision's items that may be off by more than was seen, and by how much
FINE, NARROW = 1e-3, 0.25  # of log odds: float32 explains no more; and of what rounding does: farther is doubtful
DEARER = 0.1  # the price of a test where steps differ because an earlier one did: such conditions are long


@dataclass
class Tally:
    """The items of one quantity while they are compared."""

    name: str
    about: str
    noun: str = "node"
    show: Callable[[int], str] = str  # a token for people
    items: list[Reference] = field(default_factory=list)
    differs: list[bool] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)  # items that cannot be judged, by what they are
    has_tails: bool = False  # whether the capture's dtype rounds so that a few items may be off by more than was seen
    far: int = 0  # items that differ by more than such tails
    hidden: int = 0  # items that differ by what rounding explains, and float32's would not
    doubts: Counter[tuple[str, int]] = field(default_factory=Counter)  # by step: the farthest of these
    gives: str = ""  # the name of `judged` as a fact that conditions may use; "" where it is not used as one
    judged: list[float] = field(default_factory=list)  # the model's value for each item

    def add(
        self, where: Reference, *, differs: bool, recorded: float, judged: float, text: str, is_far: bool = True
    ) -> None:
        """One more item. `is_far`: whether one that differs does so by more than the tails of rounding."""
        self.items.append(where)
        self.differs.append(differs)
        self.far += differs and (is_far or not self.has_tails)
        self.judged.append(judged)
        if differs and len(self.examples) < EXAMPLES:
            self.examples.append(Example(where, float(recorded), float(judged), text))

    def compare(
        self, where: Reference, recorded: float, judged: float, allowed: Bounds, text: str, *, cuts: bool
    ) -> None:
        """One more figure, by what rounding allows. `cuts`: whether it may lie at a border of top-k, top-p or min-p,
        where rounding takes a token in or out, and that moves all others."""
        differs = not within(recorded, allowed)
        far = differs and not cuts and is_far(recorded, judged, allowed)
        self.add(where, differs=differs, recorded=recorded, judged=judged, text=text, is_far=far)
        if not differs and not within(recorded, span(judged, FINE)):
            self.hidden += 1
            self.doubts[where.request, where.index] += is_far(recorded, judged, allowed, NARROW)

    def finding(self, history: History) -> Finding:
        """The finding on all items; the condition is searched for over all of them."""
        failed, tested = sum(self.differs), plural(len(self.items), self.noun)
        notes = [f"{plural(count, self.noun)} {what} left out" for what, count in self.left.items() if count]
        if failed and not self.far and failed <= 2 + TAIL * len(self.items):
            notes.append(f"{failed:,} of {tested} off by up to {FAR:g} times the usual rounding")
            failed = 0
        result = CheckResult.SKIPPED if not self.items else CheckResult.FAILED if failed else CheckResult.PASSED
        note = "; ".join(notes)
        found = Finding(self.name, result, self.about, len(self.items), failed, note=note, unit=self.noun)
        if not failed:
            return found
        facts: dict[str, list[Any]] = {self.gives: [int(value) for value in self.judged]} if self.gives else {}
        facts |= facts_table(history, self.items)
        condition, first_only = self._condition(facts)
        example, like = self.examples[0], "" if condition is not None else rarest(facts, self.differs)
        found = replace(found, example=example.where, detail=example.text, examples=tuple(self.examples), rarest=like)
        found = replace(found, condition=condition, first_only=first_only)
        return replace(found, items=tuple(self.items), differs=tuple(self.differs))

    def _condition(self, facts: dict[str, list[Any]]) -> tuple[Condition | None, bool]:
        """The condition under which items differ, and whether it covers each request only up to its first such step:
        what is wrong in a cache stays wrong, so later steps may hide the cause. The clearer of the two is taken.
        """
        steps, differs = [f"{item.request}@{item.index}" for item in self.items], self.differs
        whole, wrong = find(facts, differs, steps), list(compress(self.items, differs))
        first = {item.request: item.index for item in sorted(wrong, key=lambda item: -item.index)}
        early = [place for place, item in enumerate(self.items) if item.index <= first.get(item.request, item.index)]
        if len(early) == len(self.items):
            return whole, False
        some = {name: [values[place] for place in early] for name, values in facts.items()}
        begun = find(some, [differs[place] for place in early], [steps[place] for place in early])
        dearer = 0 if whole is None else DEARER * max(len(whole.tests) - 1, 0) - 1e-6
        if begun is not None and begun.tests and (whole is None or begun.score > whole.correlation - dearer):
            return begun, True
        return whole, False


Tallies = Mapping[str, Tally]  # by name
Bounds = tuple[float, float]  # the least and the largest value that rounding allows


def skipped(name: str, about: str, note: str) -> Finding:
    return Finding(name, CheckResult.SKIPPED, about, note=note, unit="node")


def span(p: float, slack: float) -> Bounds:
    """The least and the largest probability whose log odds lie within `slack` of those of `p`."""
    near = LEAST + SUMMED * p
    odds = _odds(p)
    low, high = (1 / (1 + math.exp(-min(max(odds + off, -700), 700))) for off in (-slack, slack))
    return max(low - near, 0.0), min(high + near, 1.0)


def _odds(p: float) -> float:
    """Log odds; of 0 and 1 those that float32 rounds to them, at a low temperature for one."""
    return float(log_odds(np.asarray(p), SMALLEST, 1 - EPSILON))


def is_far(recorded: float, judged: float, allowed: Bounds, times: float = FAR) -> bool:
    """Whether a figure is off by more than so many times what rounding allows."""
    bound = _odds(allowed[0] if recorded < judged else allowed[1])
    off = abs(_odds(recorded) - _odds(judged)) if 0 <= recorded <= 1 else math.inf
    return off > times * abs(bound - _odds(judged))


def within(value: float, bounds: Bounds) -> bool:
    return bounds[0] <= value <= bounds[1]


def conditional(p: Bounds, taken: Sequence[Bounds]) -> Bounds:
    """Bounds of p / (1 - what was taken), from bounds of p and of each probability taken."""
    smallest, largest = (1 - sum(bounds[end] for bounds in taken) for end in (1, 0))
    return p[0] / max(largest, LEAST), min(p[1] / max(smallest, LEAST), 1.0) + LEAST
