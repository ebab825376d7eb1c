"""The search: which variant of the rules gives what was recorded of every token, and what the next best leaves.

Every change is tried by itself on a few tokens that differ. Those that explain any are tried on all tokens, at every
scope, then row by row: each is right, or as the variant has it. Where no one explains all, pairs follow. Of several
that explain as much the simplest is the answer, and where two cannot be told apart on any token, neither is stated as
the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product

import numpy as np
import torch
from numpy.typing import NDArray

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.tally import LEAST, SUMMED
from specscope.analyze.findings import Reference
from specscope.analyze.locate.model.other_rows import Relation
from specscope.analyze.locate.model.sampling import (
    EVERYWHERE,
    LOGITS,
    NODE,
    RIGHT,
    ROWS,
    SCOPES,
    Dial,
    RuleChange,
    RuledRows,
    Scope,
    changes,
    cut,
    dials,
)
from specscope.trace.record.rules import log_odds

FEW = 10  # tokens that differ, on which every change is tried first
FULL = 14  # changes that are tried on all tokens
IN_PAIRS = 40  # changes of which pairs are made
PAIRS = 8  # pairs that are tried on all tokens
GAIN = 0.5  # of the tokens that differ, how many a variant must explain
EVERY = 0.9  # the same of a fitted number: some value fits part of anything
NEARLY = 0.97  # that explain so much of what the best one does are as good, where they are simpler
SURE, LEAST_SURE = 10, 3  # tokens that tell a scope; and an operation
WORK = 2**29  # probabilities that pairs may take, so that the answer does not hang on the machine's load
FARTHEST = 10.0  # in log odds; what is farther off is not told apart
TELLING = 0.98  # a probability below this is met by no chance
SPAN = 4.0  # in log odds, over which probabilities lie that a wrong variant gives
OF_CHOICE = 0.3  # how often a wrong variant of a greedy request has the choice that is recorded
CHANCE = 1e-3  # that any variant which was tried explains as much, where rows may be right or as it has them
FINE = 1e-7  # probabilities nearer than this are the same, while a number is fitted
ROUNDS = 9  # in which a number is fitted ever more finely

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Item:
    """A recorded probability: of a drafted token, or of a final one."""

    row: int  # the place's number
    token: int
    recorded: float
    kind: str  # NODE, BONUS, ...
    where: Reference
    wrong: bool  # whether it is not what the model and the right rules give
    slack: float  # how far rounding may move its log odds
    node: int  # of the row
    child: int | None = None  # the token's node
    greedy: bool = False  # then `recorded` is 1 at the choice and 0 elsewhere
    drawn: bool = False  # `recorded` is nothing, but it was drawn: it had some p


def item_at(rows: RuledRows, number: int, audit: Audit, where: Reference) -> Item:
    """An item at a place, of which nothing is recorded yet."""
    params, of_p = rows.params[number], rows.what.endswith("p")
    slack = audit.slack if of_p else audit.draft_slack
    slack *= max(params.repetition_penalty, 1 / params.repetition_penalty)
    slack /= 1.0 if params.greedy else params.temperature
    is_greedy = params.greedy and rows.what == "p"
    return Item(number, 0, 0.0, NODE, where, False, slack, rows.places.every[number].node, greedy=is_greedy)


@dataclass(frozen=True)
class RuleVariant:
    """Changes of the rules, each where it is at work."""

    changes: tuple[tuple[RuleChange, Scope], ...]

    @property
    def name(self) -> str:
        """In words."""
        return " and ".join(f"{change.name} {scope.name}".strip() for change, scope in self.changes)

    @property
    def operations(self) -> tuple[str, ...]:
        """Those that it changes, in the order of `changes`."""
        return tuple(dict.fromkeys(change.operation for change, _ in self.changes))

    @property
    def cost(self) -> float:
        """The simplest is the least."""
        return sum(
            1
            + 0.1 * (scope is not EVERYWHERE)
            + 0.05 * change.fitted
            + (0.2 if change.row is not None else 0.25 if change.operation == ROWS else 0)
            for change, scope in self.changes
        )


@dataclass(frozen=True)
class Score:
    """What a variant explains of the tokens that differ, and what it spoils of the others."""

    variant: RuleVariant
    explained: int
    spoiled: int
    error: float  # mean deviation of the log odds at tokens that differ
    predicted: Array = field(compare=False, repr=False)

    @property
    def gain(self) -> int:
        """Explained, less spoiled."""
        return self.explained - self.spoiled


@dataclass(frozen=True)
class BestVariant:
    """The best variant, and the search behind it."""

    best: Score
    wrong: int  # tokens that differ
    others: int
    tried: int  # variants
    example: Item  # a token that shows it
    right: float  # its p by the right rules
    under: float  # its p under the variant
    runner_up: Score | None
    alike: tuple[Score, ...]  # that cannot be told from it
    # Where it was found in the steps that differ alone: the tokens that are as it has them and not as they should be
    hits: tuple[Item, ...] = ()
    misses: tuple[Item, ...] = ()  # and those that are as they should be and not as it has them

    @property
    def certain(self) -> bool:
        """Whether it is one operation, that explains nearly all."""
        same = all(set(score.variant.operations) == set(self.best.variant.operations) for score in self.alike)
        return same and self.best.gain >= 0.8 * self.wrong and self.best.explained >= LEAST_SURE


class Search:
    """Variants over the items of one capture."""

    def __init__(self, rows: RuledRows, items: Sequence[Item], *, logits_right: bool = False, first: int = 0) -> None:
        """`logits_right`: whether the logits are known to be right; `first`: how many first tokens hold all that
        came; 0 where that is not known."""
        self.rows, self.items, self.tried = rows, list(items), 0
        self.wrong = np.array([item.wrong for item in items])
        self.recorded = np.array([item.recorded for item in items])
        self.slack = np.array([item.slack for item in items])
        self.greedy = np.array([item.greedy for item in items])
        self.drawn = np.array([item.drawn for item in items])
        self.at_work = {
            scope: np.array([scope.holds(item.kind, item.node) for item in items], np.bool_) for scope in SCOPES
        }
        self.right = self.predicted(())
        self.fits_right = self.fits(self.right)
        self.differ, self.agree = self.wrong & ~self.fits_right, ~self.wrong & self.fits_right
        self.few = self._few()
        self.logits_right, self.first = logits_right, first
        self._cache: dict[tuple[str, ...], Array] = {}

    def _few(self) -> list[int]:
        """Some that differ, of different rows, of each kind, spread over the run."""
        by_kind: dict[tuple[str, bool], dict[int, int]] = {}
        for index in np.flatnonzero(self.differ).tolist():
            item = self.items[index]
            by_kind.setdefault((item.kind, item.node < 0), {}).setdefault(item.row, index)
        share = max(1, FEW // max(1, len(by_kind)))
        chosen: list[int] = []
        for rows in by_kind.values():
            indices = list(rows.values())
            chosen += indices[:: max(1, len(indices) // share)][:share]
        return sorted(chosen)

    def predicted(self, made: Sequence[RuleChange], some: Sequence[int] | None = None) -> Array:
        """What the changes give for items: p of the token; where greedy, how far its log p is above the others'."""
        wanted = list(range(len(self.items))) if some is None else list(some)
        recipe, relation = RIGHT, None
        for change in made:
            recipe, relation = change.of(recipe), change.row or relation
        at = [self._place(self.items[index], relation) for index in wanted]
        places = sorted(set(at))
        out = np.zeros(len(wanted))
        for piece in _pieces(places, self.rows.vocab):
            p = self.rows.distributions(recipe, piece)
            here = {row: number for number, row in enumerate(piece)}
            mine = [number for number, row in enumerate(at) if row in here]
            out[mine] = self.values(p, [here[at[number]] for number in mine], [wanted[number] for number in mine])
        return out

    def _place(self, item: Item, relation: Relation | None) -> int:
        return item.row if relation is None else self.rows.places.other(relation, item.row, item.child)

    def values(self, p: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> Array:
        """Of items, by their numbers, what rows of p give."""
        tokens = torch.tensor([min(self.items[index].token, p.shape[1] - 1) for index in indices])
        values = p[list(rows), tokens].double().numpy()
        greedy = self.greedy[list(indices)]
        if greedy.any():
            picked, place = torch.tensor(rows).unique(return_inverse=True)
            largest, best = p[picked].topk(2)
            rest = torch.where(best[place, 0] == tokens, largest[place, 1], largest[place, 0]).double().numpy()
            margin = np.log(np.maximum(values, 1e-30)) - np.log(np.maximum(rest, 1e-30))
            values = np.where(greedy, margin, values)
        return np.asarray(values)

    def off(self, values: Array, some: Sequence[int] | None = None, *, least: float = LEAST) -> Array:
        """How far each is from what was recorded, in log odds; 0 where they are nearer than float32 can tell.

        `least`: how near that is.
        """
        pick = slice(None) if some is None else list(some)
        recorded, greedy = self.recorded[pick], self.greedy[pick]
        away = np.abs(_odds(values) - _odds(recorded))
        away[np.abs(values - recorded) <= least * (1 + SUMMED / LEAST * np.abs(values))] = 0
        chosen = np.where(recorded > 0.5, np.maximum(-values, 0), np.maximum(values, 0))
        away = np.where(self.drawn[pick], np.where(values > LEAST, 0, FARTHEST), away)
        return np.asarray(np.where(greedy, chosen, away))

    def fits(self, values: Array, some: Sequence[int] | None = None) -> Bools:
        """Which of them come out as recorded."""
        slack = self.slack if some is None else self.slack[list(some)]
        return np.asarray(self.off(values, some) <= slack)

    # Singles

    def singles(self) -> list[RuleChange]:
        """Every change, with those whose numbers were fitted."""
        made = changes(self.rows)
        if self.logits_right:
            made = [change for change in made if change.operation != LOGITS]
        cuts = {self.first, *(self.rows.vocab // parts for parts in (2, 3, 4, 8) if self.first)}
        made += [cut(first) for first in sorted(cuts) if self.first <= first < self.rows.vocab and first]
        if not self.few or bool(self.greedy[self.few].all()):
            return made
        fitting = (dial for dial in dials(self.rows) if not (self.logits_right and dial.operation == LOGITS))
        return [*made, *map(self._fitted, fitting)]

    def _fitted(self, dial: Dial) -> RuleChange:
        """The change with the number that comes nearest to what was recorded of the few."""
        values, best = list(dial.values), dial.values[0]
        without = self._apart(self.right[self.few], FINE)
        for _ in range(ROUNDS):
            errors = [self._apart(self.predicted((dial.change(value),), self.few), FINE) for value in values]
            self.tried += len(values)
            place = int(np.argmin(errors))
            best, low, high = values[place], values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
            if errors[place] > 0.8 * without:
                break
            values = np.exp(np.linspace(np.log(low), np.log(high), 9)).tolist()
        rounded = [float(f"{best:.{digits}g}") for digits in (2, 3)]  # what people write
        counts = [self.on_few([(dial.change(value),)])[0][0] for value in (*rounded, best)]
        return dial.change((*rounded, best)[int(np.argmax(counts))])

    def _apart(self, values: Array, least: float = LEAST) -> float:
        """How far off what is predicted of the few is, on average; a fifth of them may be anything."""
        off = self.off(values, self.few, least=least)
        return float(np.sort(np.minimum(off, FARTHEST))[: max(1, round(0.8 * len(off)))].mean())

    def on_few(self, made: Sequence[Sequence[RuleChange]]) -> list[tuple[int, float, Array]]:
        """For each variant: how many of the few come out, how far off they are, and what it gives."""
        self.tried += len(made)
        given = [self.predicted(variant, self.few) for variant in made]
        return [(int(self.fits(values, self.few).sum()), self._apart(values), values) for values in given]

    # On all tokens

    def whole(self, made: tuple[RuleChange, ...]) -> Array:
        """What changes give for all items."""
        key = tuple(change.name for change in made)
        if key not in self._cache:
            self._cache[key] = self.predicted(made) if made else self.right
        return self._cache[key]

    def score(self, variant: RuleVariant, among: Bools) -> Score:
        """A variant over the items `among`."""
        values = self.right.copy()
        for pattern in product((False, True), repeat=len(variant.changes)):
            each = [
                (change, holds, self.at_work[scope])
                for (change, scope), holds in zip(variant.changes, pattern, strict=True)
            ]
            here = np.all([at_work == holds for _, holds, at_work in each], axis=0)
            if here.any():
                values[here] = self.whole(tuple(change for change, holds, _ in each if holds))[here]
        fits, bad = self.fits(values), self.differ & among
        error = float(np.minimum(self.off(values)[bad], FARTHEST).mean()) if bad.any() else 0.0
        return Score(variant, int(fits[bad].sum()), int((self.agree & among & ~fits).sum()), error, values)

    def answer(self) -> BestVariant | None:
        """The variant that explains the most; None where none explains enough."""
        if not self.few:
            return None
        everything, keys = np.ones(len(self.items), np.bool_), [(i.where.request, i.where.index) for i in self.items]
        steps = {keys[i] for i in np.flatnonzero(self.differ)}
        at_work = np.array([key in steps for key in keys])
        singles = self.singles()
        results = self.on_few([(change,) for change in singles])
        promising = [i for i, (count, _, _) in enumerate(results) if count]
        promising.sort(key=lambda i: (-results[i][0], results[i][1]))
        chosen = [singles[i] for i in promising[:FULL]]
        made = [RuleVariant(((change, scope),)) for change in chosen for scope in SCOPES]
        for among, mixed in ((everything, False), (at_work, False), (at_work, True)):
            answer = self._best(made, among, mixed=mixed)
            if answer is not None and answer.best.gain >= NEARLY * answer.wrong:
                if among is everything and answer.wrong < SURE:  # a rare fault spoils steps without it
                    simpler = self._best(made, at_work)
                    if simpler is not None and simpler.best.variant.cost < answer.best.variant.cost:
                        return simpler
                return answer
        made += self._pairs(singles, results)
        return self._best(made, everything) or self._best(made, at_work)

    def _pairs(self, singles: Sequence[RuleChange], results: Sequence[tuple[int, float, Array]]) -> list[RuleVariant]:
        """Pairs of changes that explain the few, or come nearer to them; each at every scope."""
        right = self.off(self.right[self.few], self.few)
        order = sorted(range(len(singles)), key=lambda i: (-results[i][0], results[i][1]))
        distinct: list[int] = []
        for i in order:
            values = [self.right[self.few], *(results[j][2] for j in distinct)]
            if all(np.abs(results[i][2] - other).max(initial=0) > LEAST for other in values):
                distinct.append(i)
        together = []
        most = WORK // max(len(self.few) * self.rows.vocab, 1)
        for i, j in islice(combinations(distinct[:IN_PAIRS], 2), most):
            pair = (singles[i], singles[j])
            if (pair[0].row and pair[1].row) or (pair[0].fitted and pair[1].fitted):
                continue
            recipe = pair[1].of(pair[0].of(RIGHT))
            if not (pair[0].row or pair[1].row) and recipe in (RIGHT, pair[0].of(RIGHT), pair[1].of(RIGHT)):
                continue
            count, error, _ = self.on_few([pair])[0]
            union = int((self.fits(results[i][2], self.few) | self.fits(results[j][2], self.few)).sum())
            together.append((max(count, union), error, pair))
        together.sort(key=lambda entry: (-entry[0], entry[1]))
        least = max(0.5 * float((right > 0).sum()), 1)
        return [
            RuleVariant(((first, scope), (second, other)))
            for count, _, (first, second) in together[:PAIRS]
            if count >= least
            for scope, other in product(SCOPES, SCOPES)
        ]

    def _best(self, made: Iterable[RuleVariant], among: Bools, *, mixed: bool = False) -> BestVariant | None:
        """The simplest of those that explain the most of some items. `mixed`: any row may be right none the less."""
        scores = [self.score(variant, among) for variant in made]
        if mixed:  # what a variant would spoil it does not: there it is not at work
            least = {score.variant: score.spoiled for score in scores}
            scores = [replace(score, spoiled=0) for score in scores if self._is_no_chance(score, among)]
        self.tried += len(scores)
        wrong = int((self.differ & among).sum())
        good = [score for score in scores if score.gain > self._least(score) * wrong]
        if not good:
            return None
        most = max(score.gain for score in good)
        near = [score for score in good if score.gain >= NEARLY * most - 1e-9]
        if mixed:
            fewest = min(least[score.variant] for score in near)
            near = [score for score in near if least[score.variant] == fewest]
        error = min(score.error for score in near)
        near = [score for score in near if score.error <= 1.5 * error + 0.1 * float(np.median(self.slack))]
        best = min(near, key=lambda score: (round(score.variant.cost, 3), -score.gain))
        return self._told(best, scores, among, alone=mixed or not among.all())

    def _told(self, best: Score, scores: Sequence[Score], among: Bools, *, alone: bool) -> BestVariant:
        """The best of some variants, with what stands beside it."""
        bad, fits = self.differ & among, self.fits(best.predicted)
        wrong, example = int(bad.sum()), int(np.flatnonzero(bad & fits)[0])
        others = [score for score in scores if score is not best]
        alike = [score for score in others if self._same(score, best, among)]
        other = [score for score in others if not any(score is one for one in alike)]
        return BestVariant(
            best,
            wrong,
            int((self.agree & among).sum()),
            self.tried,
            self.items[example],
            float(self.right[example]),
            float(best.predicted[example]),
            max(other, key=lambda score: (score.gain, -score.variant.cost), default=None),
            tuple(
                score
                for score in alike
                if score.gain > self._least(score) * wrong and score.variant.cost <= best.variant.cost + 0.2
            ),
            tuple(self.items[i] for i in np.flatnonzero(bad & fits)) if alone else (),
            tuple(self.items[i] for i in np.flatnonzero(~self.wrong & ~fits)) if alone else (),
        )

    def _is_no_chance(self, score: Score, among: Bools) -> bool:
        """Whether what a variant explains is more than some value would fit, of all that were tried.

        A probability is met by chance about as often as its slack is of the span of log odds; 0 and 1 are met by many.
        """
        middling = np.where(self.greedy, self.recorded == 1, (self.recorded > 1e-4) & (self.recorded < TELLING))
        hits = self.differ & among & self.fits(score.predicted) & middling & ~self.drawn
        chance = np.where(self.greedy, OF_CHOICE, np.minimum(self.slack / SPAN, 1))[hits]
        return bool(np.log(chance).sum() + np.log(max(self.tried, 1)) < np.log(CHANCE))

    def _least(self, score: Score) -> float:
        return EVERY if any(change.fitted for change, _ in score.variant.changes) else GAIN

    def _same(self, score: Score, other: Score, among: Bools) -> bool:
        """Whether two variants give the same for all items."""
        away = np.abs(_odds(score.predicted) - _odds(other.predicted))
        away[np.abs(score.predicted - other.predicted) <= LEAST + SUMMED * np.abs(other.predicted)] = 0
        away = np.where(self.greedy, (score.predicted > 0) != (other.predicted > 0), away > self.slack)
        return not bool(away[among].any())


def _odds(p: Array) -> Array:
    """Log odds of probabilities; those of 0 and 1 are far away."""
    return log_odds(p, 1e-12, 1 - 1e-12)


def _pieces(places: Sequence[int], vocab: int) -> Iterable[Sequence[int]]:
    """Places in pieces of up to 16 million numbers."""
    size = max(8, 2**24 // max(vocab, 1))
    for start in range(0, len(places), size):
        yield places[start : start + size]
