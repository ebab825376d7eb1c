"""Places of a batch at which a model gives a row of logits, and which other place a row may be mistaken for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from specscope.analyze.audit.model.rows import Asked
from specscope.trace.record.tree import ROOT

STEPS = 24  # that are asked about, of each kind
T = TypeVar("T")


def some(items: Sequence[T]) -> Sequence[T]:
    """A few of them, spread over the run."""
    return items[:: max(1, len(items) // STEPS)][:STEPS]


@dataclass(frozen=True)
class RowPlace:
    """A row of logits: of a step, after its root or a node."""

    asked: Asked
    node: int

    @property
    def logits(self) -> Tensor:
        """[V]."""
        return self.asked.logits[self.node]

    @property
    def engine_step(self) -> int:
        """The engine's step."""
        return self.asked.step.visit.record.step


Related = Callable[["Places", RowPlace, "int | None"], int]  # of a place, and its child where one is asked about


@dataclass(frozen=True)
class Relation:
    """Another place than a row's own, by what it is to it."""

    name: str  # "the next request in the batch"
    of: Related  # -1: none


class Places:
    """All places of some steps, by number."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.every = [RowPlace(one, node) for one in asked for node in sorted(one.logits)]
        self._number = {(*place.asked.step.key, place.node): row for row, place in enumerate(self.every)}
        self._by_key = {one.step.key: one for one in asked}
        self._batch: dict[int, list[Asked]] = {}
        for one in sorted(asked, key=lambda one: one.step.visit.row):
            self._batch.setdefault(one.step.visit.record.step, []).append(one)
        self._others: dict[tuple[str, int, int | None], int] = {}

    def at(self, asked: Asked | None, node: int) -> int:
        """The number of the place there; -1 where the model was not asked."""
        return -1 if asked is None else self._number.get((*asked.step.key, node), -1)

    def other(self, relation: Relation, row: int, child: int | None = None) -> int:
        """The number of the related place, of a child that is asked about; its own where there is none."""
        key = relation.name, row, child
        if key not in self._others:
            there = relation.of(self, self.every[row], child)
            self._others[key] = row if there < 0 else there
        return self._others[key]

    def beside(self, place: RowPlace) -> list[Asked]:
        """The requests of its engine step, in the order of the batch."""
        return self._batch[place.engine_step]

    def before(self, place: RowPlace) -> Asked | None:
        """The request's step before."""
        last = place.asked.step.last
        return None if last is None else self._by_key.get(last.key)


def _neighbour(by: int) -> Related:
    """At the same node of the request `by` places further on."""

    def of(places: Places, place: RowPlace, child: int | None) -> int:
        batch = places.beside(place)
        own = next(index for index, one in enumerate(batch) if one is place.asked)
        return places.at(batch[(own + by) % len(batch)], place.node)

    return of


def _row_further(by: int) -> Related:
    """The row of the batch that lies `by` rows further on, of those that are known."""

    def of(places: Places, place: RowPlace, child: int | None) -> int:
        batch = [places.at(one, node) for one in places.beside(place) for node in sorted(one.logits)]
        return batch[(batch.index(places.at(place.asked, place.node)) + by) % len(batch)]

    return of


def _first_of_batch(places: Places, place: RowPlace, child: int | None) -> int:
    first = places.beside(place)[0]
    return places.at(first, min(first.logits, default=ROOT))


def _above(places: Places, place: RowPlace, child: int | None) -> int:
    return -1 if place.node == ROOT else places.at(place.asked, int(place.asked.step.tree.parent[place.node]))


OTHERS = PARENT, ROOT_ROW, NEXT, PREVIOUS, BEFORE, FIRST, CHILD, LATER_ROW, EARLIER_ROW = (
    Relation("the row above its own", _above),
    Relation("the root", lambda places, place, child: places.at(place.asked, ROOT)),
    Relation("the next request in the batch", _neighbour(1)),
    Relation("the previous request in the batch", _neighbour(-1)),
    Relation("the request's previous step", lambda places, place, child: places.at(places.before(place), place.node)),
    Relation("the batch's first row", _first_of_batch),
    Relation("the draft itself", lambda places, place, child: -1 if child is None else places.at(place.asked, child)),
    Relation("the next row in the batch", _row_further(1)),
    Relation("the previous row in the batch", _row_further(-1)),
)
OF_REQUESTS = (NEXT, PREVIOUS, FIRST)  # those whose parameters may be mixed up
