"""Places of a batch at which a model gives a row of logits, and which other place a row may be mistaken for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specscope.analyze.diagnose.rerun.rows import Asked
from specscope.trace.record.tree import ROOT


@dataclass(frozen=True)
class RowPlace:
    """A row of logits: of a step, after its root or a node."""

    asked: Asked
    node: int
    plain: bool = False  # whether its distribution is noted before temperature and cuts

    @property
    def logits(self) -> Tensor:
        """[V]."""
        return self.asked.logits[self.node]

    @property
    def engine_step(self) -> int:
        """The engine's step."""
        return self.asked.step.visit.record.step


@dataclass(frozen=True)
class Relation:
    """Another place than a row's own, by what it is to it."""

    name: str  # "the next request of the batch"
    of: Callable[[Places, RowPlace, int | None], RowPlace | None]  # of a place, and its child where one is asked about


class Places:
    """All places of some steps, by number."""

    def __init__(
        self, asked: Sequence[Asked], *, plain: Callable[[Asked, int], bool] = lambda asked, node: False
    ) -> None:
        self.asked = list(asked)
        self.every = [RowPlace(one, node, plain(one, node)) for one in asked for node in sorted(one.logits)]
        self._number = {(*place.asked.step.key, place.node): row for row, place in enumerate(self.every)}
        self._batch: dict[int, list[Asked]] = {}
        for one in sorted(asked, key=lambda one: one.step.visit.row):
            self._batch.setdefault(one.step.visit.record.step, []).append(one)
        self._others: dict[tuple[str, int, int | None], int] = {}

    def number(self, place: RowPlace) -> int:
        """Its number."""
        return self._number[(*place.asked.step.key, place.node)]

    def at(self, asked: Asked, node: int) -> RowPlace | None:
        """The place there; None where the model was not asked."""
        row = self._number.get((*asked.step.key, node))
        return None if row is None else self.every[row]

    def other(self, relation: Relation, row: int) -> int:
        """The number of the related place; its own where there is none."""
        return self.related(relation, row, None, row)

    def related(self, relation: Relation, row: int, child: int | None, default: int = -1) -> int:
        """The same for a child that is asked about; `default` where there is none."""
        key = relation.name, row, child
        if key not in self._others:
            place = relation.of(self, self.every[row], child)
            self._others[key] = -1 if place is None else self.number(place)
        return default if self._others[key] < 0 else self._others[key]

    def beside(self, place: RowPlace) -> list[Asked]:
        """The requests of its engine step, in the order of the batch."""
        return self._batch[place.engine_step]

    def before(self, place: RowPlace) -> Asked | None:
        """The request's step before."""
        last = place.asked.step.last
        key = None if last is None else last.key
        return next((one for one in self.asked if one.step.key == key), None)


def _neighbour(by: int) -> Callable[[Places, RowPlace, int | None], RowPlace | None]:
    """At the same node of the request `by` places further on."""

    def of(places: Places, place: RowPlace, child: int | None) -> RowPlace | None:
        batch = places.beside(place)
        if len(batch) < 2:
            return None
        own = next(index for index, one in enumerate(batch) if one is place.asked)
        return places.at(batch[(own + by) % len(batch)], place.node)

    return of


def _first_of_batch(places: Places, place: RowPlace, child: int | None) -> RowPlace | None:
    first = places.beside(place)[0]
    return places.at(first, min(first.logits, default=ROOT))


def _above(places: Places, place: RowPlace, child: int | None) -> RowPlace | None:
    return None if place.node == ROOT else places.at(place.asked, int(place.asked.step.tree.parent[place.node]))


def _before(places: Places, place: RowPlace, child: int | None) -> RowPlace | None:
    before = places.before(place)
    return None if before is None else places.at(before, place.node)


def _row_further(by: int) -> Callable[[Places, RowPlace, int | None], RowPlace | None]:
    """The row of the batch that lies `by` rows further on, of those that are known."""

    def of(places: Places, place: RowPlace, child: int | None) -> RowPlace | None:
        batch = [(one, node) for one in places.beside(place) for node in sorted(one.logits)]
        own = next(i for i, (one, node) in enumerate(batch) if one is place.asked and node == place.node)
        return places.at(*batch[(own + by) % len(batch)])

    return of


ROOT_ROW = Relation(
    "the root", lambda places, place, child: None if place.node == ROOT else places.at(place.asked, ROOT)
)
PARENT = Relation("the row above its own", _above)
NEXT = Relation("the next request of the batch", _neighbour(1))
PREVIOUS = Relation("the request before it in the batch", _neighbour(-1))
FIRST = Relation("the batch's first row", _first_of_batch)
BEFORE = Relation("the request's step before", _before)
CHILD = Relation(
    "the draft itself", lambda places, place, child: None if child is None else places.at(place.asked, child)
)
LATER_ROW, EARLIER_ROW = (
    Relation("the next row of the batch", _row_further(1)),
    Relation("the row before it in the batch", _row_further(-1)),
)
OTHERS = (PARENT, ROOT_ROW, NEXT, PREVIOUS, BEFORE, FIRST, CHILD, LATER_ROW, EARLIER_ROW)
OF_REQUESTS = (NEXT, PREVIOUS, FIRST)  # those whose parameters may be mixed up
