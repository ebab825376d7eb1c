"""The search: which variant of the rules gives what was recorded of every token, and what the next best leaves.

Of several that explain as much the one that would spoil the fewest is the answer, then the simplest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.tally import LEAST, SUMMED
from specscope.analyze.findings import Reference
from specscope.analyze.locate.model.sampling import (
    LOGITS,
    NODE,
    RIGHT,
    ROWS,
    RuleChange,
    RuledRows,
    changed,
    changes,
    cut,
    dials,
    left_out,
)
from specscope.trace.record.rules import log_odds

FEW = 10  # tokens that differ, on which every change is tried first
FULL = 14  # changes that are tried on all tokens
GAIN, EVERY = 0.5, 0.9  # of the tokens that differ, how many a variant must explain; and one of a fitted number
NEARLY = 0.97  # that explain so much of what the best one does are as good, where they are simpler
SURE, LEAST_SURE = 10, 3  # tokens that tell a scope; and an operation
FARTHEST = 10.0  # in log odds; what is farther off is not told apart
TELLING = 0.98  # a probability below this is met by no chance
SPAN = 4.0  # in log odds, over which probabilities lie that a wrong variant gives
OF_CHOICE = 0.3  # how often a wrong variant of a greedy request has the choice that is recorded
CHANCE = 1e-3  # that any variant which was tried explains as much, where rows may be right or as it has them
FINE = 1e-7  # probabilities nearer than this are the same, while a number is fitted
FIGURES, SWEEPS = 5, 30  # of each token, at least, that tell its offset; sweeps of the fit
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
    params, is_greedy = rows.params[number], rows.params[number].greedy and rows.what == "p"
    slack = audit.slack if rows.what.endswith("p") else audit.draft_slack
    slack *= max(params.repetition_penalty, 1 / params.repetition_penalty)
    slack /= 1.0 if params.greedy else params.temperature
    return Item(number, 0, 0.0, NODE, where, False, slack, rows.places.every[number].node, greedy=is_greedy)


@dataclass(frozen=True, eq=False)
class RuleVariant:
    """A change of the rules, what it gives for all items, and what that explains."""

    change: RuleChange
    predicted: Array = field(repr=False)
    fits: Bools = field(repr=False)
    explained: int  # of the tokens that differ
    spoils: int  # right ones of the same steps that are not as it has them
    error: float  # mean deviation of the log odds at tokens that differ

    @property
    def cost(self) -> float:
        change = self.change
        return 0.05 * change.fitted + (0.2 if change.row is not None else 0.25 if change.operation == ROWS else 0)

    def explains(self, wrong: int, less: int = 0) -> bool:
        """Whether it explains enough of so many: more where a number was fitted, of which some value fits anything."""
        return self.explained - less > (EVERY if self.change.fitted else GAIN) * wrong


@dataclass(frozen=True)
class BestVariant:
    best: RuleVariant
    wrong: int  # tokens that differ
    tried: int  # variants
    right: float  # p of the first of `hits` by the right rules
    under: float  # its p under the variant
    runner_up: RuleVariant | None
    alike: tuple[RuleVariant, ...]  # that cannot be told from it
    hits: tuple[Item, ...]  # that are as it has them and not as they should be
    misses: tuple[Item, ...]  # that are as they should be and not as it has them

    @property
    def certain(self) -> bool:
        """Whether it is one operation, that explains nearly all."""
        same = all(other.change.operation == self.best.change.operation for other in self.alike)
        return same and self.best.explained >= max(0.8 * self.wrong, LEAST_SURE)

    @property
    def next_best(self) -> str:
        name, explained = ("any other", 0) if (x := self.runner_up) is None else (x.change.name, x.explained)
        return f"{name} leaves {self.wrong - explained:,} of {self.wrong:,}"


class Search:
    """Variants over the items of one capture."""

    def __init__(self, rows: RuledRows, items: Sequence[Item], *, logits_right: bool = False, first: int = 0) -> None:
        """`logits_right`: whether the logits are known to be right; `first`: how many first tokens hold all that
        came; 0 where that is not known."""
        self.rows, self.items, self.tried = rows, list(items), 0
        names = ("wrong", "recorded", "slack", "greedy", "drawn")
        arrays = (np.array([getattr(item, name) for item in items]) for name in names)
        self.wrong, self.recorded, self.slack, self.greedy, self.drawn = arrays
        self.chances = np.where(self.greedy, OF_CHOICE, np.minimum(self.slack / SPAN, 1))  # that a wrong value fits
        self.right = self.predicted(None)
        self.fits_right = self.fits(self.right)
        self.differ = self.wrong & ~self.fits_right
        keys = [(item.where.request, item.where.index) for item in items]
        steps = {keys[i] for i in np.flatnonzero(self.differ)}
        self.beside = ~self.wrong & self.fits_right & np.array([key in steps for key in keys], np.bool_)
        self.few = self._few()
        self.logits_right, self.first = logits_right, first

    def _few(self) -> list[int]:
        """Some that differ, of different rows, of each kind, spread over the run."""
        by_kind: dict[tuple[str, bool], dict[int, int]] = {}
        for index in np.flatnonzero(self.differ).tolist():
            item = self.items[index]
            by_kind.setdefault((item.kind, item.node < 0), {}).setdefault(item.row, index)
        share = max(1, FEW // max(1, len(by_kind)))
        every = [list(rows.values()) for rows in by_kind.values()]
        return sorted(index for some in every for index in some[:: max(1, len(some) // share)][:share])

    def predicted(self, change: RuleChange | None, some: Sequence[int] | None = None) -> Array:
        """What a change gives for items: p of the token; where greedy, how far its log p is above the others'."""
        wanted = list(range(len(self.items))) if some is None else list(some)
        recipe, relation = (RIGHT, None) if change is None else (change.recipe, change.row)
        of = [self.items[index] for index in wanted]
        at = [x.row if relation is None else self.rows.places.other(relation, x.row, x.child) for x in of]
        places, out = sorted(set(at)), np.zeros(len(wanted))
        size = max(8, 2**24 // max(self.rows.vocab, 1))
        for start in range(0, len(places), size):  # in pieces of up to 16 million numbers
            here = {row: number for number, row in enumerate(places[start : start + size])}
            mine = [number for number, row in enumerate(at) if row in here]
            p, rows = self.rows.distributions(recipe, [*here]), [here[at[number]] for number in mine]
            out[mine] = self.values(p, rows, [wanted[number] for number in mine])
        return out

    def values(self, p: Tensor, rows: Sequence[int], indices: Sequence[int]) -> Array:
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
        """How far each is from what was recorded, in log odds; 0 where they are nearer than `least`."""
        pick = slice(None) if some is None else list(some)
        recorded, greedy = self.recorded[pick], self.greedy[pick]
        away = np.abs(_odds(values) - _odds(recorded))
        away[np.abs(values - recorded) <= least * (1 + SUMMED / LEAST * np.abs(values))] = 0
        chosen = np.where(recorded > 0.5, np.maximum(-values, 0), np.maximum(values, 0))
        away = np.where(self.drawn[pick], np.where(values > LEAST, 0, FARTHEST), away)
        return np.asarray(np.where(greedy, chosen, away))

    def fits(self, values: Array, some: Sequence[int] | None = None) -> Bools:
        slack = self.slack if some is None else self.slack[list(some)]
        return np.asarray(self.off(values, some) <= slack)

    def singles(self) -> list[RuleChange]:
        made = changes(self.rows)
        if self.logits_right:
            made = [change for change in made if change.operation != LOGITS]
        cuts = {self.first, *(self.rows.vocab // parts for parts in (2, 3, 4, 8) if self.first)}
        made += [cut(first) for first in sorted(cuts) if self.first <= first < self.rows.vocab and first]
        if not self.few or bool(self.greedy[self.few].all()):
            return made
        made += [self._fitted(*dial) for dial in dials(self.rows, logits_right=self.logits_right)]
        of_raw = self.rows.what.startswith("raw") and not self.logits_right
        return [*made, *self._left_out(), *self._offsets()] if of_raw else made

    def _left_out(self) -> list[RuleChange]:
        """A token that never came, where it is the likeliest of rows that differ: one that is banned by mistake."""
        came = {item.token for item in self.items if item.recorded > LEAST}
        p = self.rows.distributions(RIGHT, sorted({self.items[index].row for index in self.few}))
        return [left_out(token) for token in dict.fromkeys(p.argmax(1).tolist()) if token not in came]

    def _offsets(self) -> list[RuleChange]:
        """An offset that each token has in all rows: a bias of the last layer. Least squares, with a level of each row;
        none where there are too few figures to tell it from chance."""
        rows, tokens = (np.array([getattr(item, name) for item in self.items]) for name in ("row", "token"))
        told = (self.recorded > LEAST) & (self.right > LEAST)
        rows, tokens, away = rows[told], tokens[told], np.log(self.recorded[told] / self.right[told])
        of_rows, of_tokens = np.bincount(rows), np.bincount(tokens, minlength=self.rows.vocab)
        if FIGURES * int((of_tokens > 0).sum()) > len(rows):
            return []
        offsets = np.zeros(len(of_tokens))
        for _ in range(SWEEPS):
            level = np.bincount(rows, away - offsets[tokens]) / np.maximum(of_rows, 1)
            offsets = np.bincount(tokens, away - level[rows], len(of_tokens)) / np.maximum(of_tokens, 1)
        moved, apart = torch.from_numpy(offsets[: self.rows.vocab]).float(), float(np.ptp(offsets[of_tokens > 0]))
        name = f"an offset of each token on the logits, up to {apart:.3g} apart"
        return [RuleChange(name, LOGITS, changed(LOGITS, lambda logits: logits + moved), fitted=True)]

    def _fitted(self, dial: Callable[[float], RuleChange], values: list[float]) -> RuleChange:
        """The change with the number that comes nearest to what was recorded of the few."""
        best, without = values[0], self._apart(self.right[self.few], FINE)
        for number in range(ROUNDS):
            errors = [self._apart(self.predicted(dial(value), self.few), FINE) for value in values]
            self.tried += len(values)
            place = int(np.argmin(errors))
            best, low, high = values[place], values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
            if number and errors[place] > 0.8 * without:  # at first what does nothing may be the nearest
                break
            values = list(np.geomspace(low, high, 9))
        rounded = [float(f"{best:.{digits}g}") for digits in (2, 3)]  # what people write
        counts = [self.on_few([dial(value)])[0][0] for value in (*rounded, best)]
        return dial((*rounded, best)[int(np.argmax(counts))])

    def _apart(self, values: Array, least: float = LEAST) -> float:
        """How far off what is predicted of the few is, on average; a fifth of them may be anything."""
        off = self.off(values, self.few, least=least)
        return float(np.sort(np.minimum(off, FARTHEST))[: max(1, round(0.8 * len(off)))].mean())

    def on_few(self, made: Sequence[RuleChange]) -> list[tuple[int, float]]:
        """For each change: how many of the few come out, and how far off they are."""
        self.tried += len(made)
        given = (self.predicted(change, self.few) for change in made)
        return [(int(self.fits(values, self.few).sum()), self._apart(values)) for values in given]

    def variant(self, change: RuleChange) -> RuleVariant:
        values = self.predicted(change)
        fits, off = self.fits(values), np.minimum(self.off(values)[self.differ], FARTHEST)
        explained, spoils = int(fits[self.differ].sum()), int((self.beside & ~fits).sum())
        return RuleVariant(change, values, fits, explained, spoils, float(off.mean()))

    def answer(self) -> BestVariant | None:
        """The variant that explains the most; None where none explains enough."""
        if not self.few:
            return None
        singles = self.singles()
        results = self.on_few(singles)
        order = sorted(range(len(singles)), key=lambda i: (-results[i][0], results[i][1]))
        return self._best([self.variant(singles[i]) for i in order if results[i][0]][:FULL])

    def _best(self, made: Sequence[RuleVariant]) -> BestVariant | None:
        """The simplest of those that explain the most and would spoil the fewest."""
        self.tried += len(made)
        wrong = int(self.differ.sum())
        near = [v for v in made if v.explains(wrong) and (v.explains(wrong, v.spoils) or self._is_no_chance(v))]
        if not near:
            return None
        most = max(variant.explained for variant in near)
        near = [variant for variant in near if variant.explained >= NEARLY * most]
        fewest = min(variant.spoils for variant in near)
        near = [variant for variant in near if variant.spoils == fewest]
        error = min(variant.error for variant in near)
        near = [variant for variant in near if variant.error <= 1.5 * error + 0.1 * float(np.median(self.slack))]
        best = min(near, key=lambda variant: (round(variant.cost, 3), -variant.explained))
        alike = [variant for variant in made if variant is best or self._same(variant, best)]
        others = [variant for variant in made if variant not in alike]
        hits, misses = (np.flatnonzero(some).tolist() for some in (self.differ & best.fits, ~self.wrong & ~best.fits))
        return BestVariant(
            best,
            wrong,
            self.tried,
            float(self.right[hits[0]]),
            float(best.predicted[hits[0]]),
            max(others, key=lambda variant: (variant.explained, -variant.spoils, -variant.cost), default=None),
            tuple(v for v in alike if v is not best and v.explains(wrong) and v.cost <= best.cost + 0.2),
            tuple(self.items[i] for i in hits),
            tuple(self.items[i] for i in misses),
        )

    def _is_no_chance(self, variant: RuleVariant) -> bool:
        """Whether what a variant explains is more than some value would fit, of all that were tried: a probability is
        met by chance about as often as its slack is of the span of log odds; 0 and 1 are met by many."""
        middling = np.where(self.greedy, self.recorded == 1, (self.recorded > 1e-4) & (self.recorded < TELLING))
        hits = self.differ & variant.fits & middling & ~self.drawn
        return bool(np.log(self.chances[hits]).sum() + np.log(max(self.tried, 1)) < np.log(CHANCE))

    def _same(self, variant: RuleVariant, other: RuleVariant) -> bool:
        """Whether two variants give the same for all items."""
        one, two = variant.predicted, other.predicted
        away = np.where(np.abs(one - two) <= LEAST + SUMMED * np.abs(two), 0, np.abs(_odds(one) - _odds(two)))
        return not bool(np.where(self.greedy, (one > 0) != (two > 0), away > self.slack).any())


def _odds(p: Array) -> Array:
    """Log odds of probabilities; those of 0 and 1 are far away."""
    return log_odds(p, 1e-12, 1 - 1e-12)
