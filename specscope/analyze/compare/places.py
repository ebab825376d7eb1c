"""Where compared values are, and a field made of them: how many differ, how far, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.compare.columns import Longs, Side, SideRequest
from specscope.analyze.compare.contexts import Aligned
from specscope.analyze.compare.parting import BEYOND
from specscope.analyze.compare.result import Field, Where
from specscope.analyze.conditions import find
from specscope.analyze.evidence.columns import PRECEDED
from specscope.analyze.findings import Reference
from specscope.trace.record.tree import ROOT, Bools

FEWEST = 3  # contexts that must differ before they count against a side
RARE = 0.002  # and more than this share of them
COMMON = 0.05  # of those that are only a little beyond rounding
EDGE = 0.1  # where top-k, top-p or min-p cut a distribution

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]  # of A and B


@dataclass(frozen=True)
class Place:
    """Where compared values are on one side: nodes, final tokens, or, without nodes, whole steps."""

    side: Side
    drawn: Longs  # rows whose final tokens follow the nodes
    indices: Longs  # of nodes, then of `drawn` behind them; for other values of `of`, its rows
    of: Literal["nodes", "steps", "parents"] = "nodes"

    @cached_property
    def rows(self) -> Longs:
        """The row in `steps` of each."""
        if self.of == "parents":
            return self.side.parent_step[self.indices]
        return self.indices if self.of == "steps" else np.concatenate([self.side.node_step, self.drawn])[self.indices]

    @cached_property
    def depth(self) -> Longs:
        """Of the token in its tree; of a parent, 0 for the root."""
        if self.of == "parents":
            node, first = self.side.parents["node"][self.indices], self.side.steps["first_node"][self.rows]
            return np.where(node == ROOT, 0, np.append(self.side.depth, 0)[np.where(node == ROOT, -1, first + node)])
        final = self.side.steps["accepted"][self.drawn] + 1
        return np.concatenate([self.side.depth, final])[self.indices]

    @cached_property
    def sibling(self) -> Longs:
        """Its rank among its siblings, from 1; 0 for a final token."""
        return np.concatenate([self.side.sibling + 1, np.zeros(len(self.drawn), np.int32)])[self.indices]

    def reference(self, index: int) -> Reference:
        """The compared value with this index, as a reference."""
        step, place = self.side.steps[self.rows[index]], int(self.indices[index])
        node = place - int(step["first_node"]) if self.of == "nodes" and place < len(self.side.node_step) else None
        return Reference(self.side.requests[step["request"]].id, int(step["index"]), int(step["step"]), node)


Places = tuple[Place, Place]


def column(aligned: Aligned, name: str) -> Pair:
    """A column of the nodes at equal contexts."""
    x, y = (side.nodes[name][nodes] for side, nodes in zip((aligned.a, aligned.b), aligned.nodes, strict=True))
    return x.astype(np.float64), y.astype(np.float64)


def of_nodes(aligned: Aligned) -> Places:
    """The nodes at equal contexts."""
    a, b = aligned.nodes
    return Place(aligned.a, a[:0], a), Place(aligned.b, b[:0], b)


def of_steps(aligned: Aligned) -> Places:
    """The steps at equal contexts."""
    a, b = aligned.steps
    return Place(aligned.a, a[:0], a, "steps"), Place(aligned.b, b[:0], b, "steps")


def of_requests(places: Sequence[Place], *values: NDArray[Any]) -> list[NDArray[Any]]:
    """Values by request, one array a side, at the compared places."""
    return [
        by_request[place.side.steps["request"][place.rows]] for by_request, place in zip(values, places, strict=True)
    ]


def per_request(places: Places, value: Callable[[SideRequest], float]) -> NDArray[np.float64]:
    """The larger of both sides' values of their requests, at the compared places."""
    each = [np.array([float(value(request)) for request in place.side.requests]) for place in places]
    return np.asarray(np.maximum(*of_requests(places, *each)), np.float64)


def number(
    places: Places,
    name: str,
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    where: Bools,
    tolerance: float | NDArray[np.float64],
    *,
    note: str = "",
    rare: float | None = None,
) -> Field:
    """The field of a number. `rare`: the share that may lie beyond rounding; with more it is suspect. None: never."""
    # A value that is no number on one side alone is as far from the other as can be.
    apart = np.where(np.isnan(a) | np.isnan(b), np.where(np.isnan(a) & np.isnan(b), 0.0, np.inf), np.abs(a - b))
    apart = np.where(where, apart, 0.0)
    worst = int(np.argmax(apart)) if len(apart) else -1
    largest = float(apart[worst]) if len(apart) else None
    made = other(places, name, apart > tolerance, where, note=note, worst=worst)
    far = int((apart > BEYOND * tolerance).sum())
    suspect = rare is not None and (many(far, made.compared, rare) or many(made.differ, made.compared, COMMON))
    smallest = float(np.min(tolerance, initial=np.inf)) if isinstance(tolerance, np.ndarray) else tolerance
    least = None if smallest == np.inf else smallest
    return replace(made, largest=largest, tolerance=least, suspect=suspect, judged=rare is not None)


def many(count: int, compared: int, rare: float) -> bool:
    """Whether it is more than a few, and more than this share."""
    return count >= FEWEST and count > rare * compared


def other(
    places: Places,
    name: str,
    differ: Bools,
    where: Bools,
    *,
    note: str = "",
    rare: float | None = None,
    far: Bools | None = None,
    worst: int | None = None,
) -> Field:
    """The field of values that are equal or not. `far`: where rounding does not explain a difference; None: everywhere.

    `rare`: as in `number`.
    """
    differ = differ & where
    count, compared = int(differ.sum()), int(where.sum())
    example = None
    if count:
        index = int(np.argmax(differ)) if worst is None else worst
        example = (places[0].reference(index), places[1].reference(index))
    by = _where(places[1], differ, where) if count > 0 else ()
    condition = _condition(places, differ[where], np.flatnonzero(where)) if 0 < count < compared else ""
    suspect = rare is not None and many(int((differ if far is None else differ & far).sum()), compared, rare)
    return Field(
        name, compared, count, None, None, example, by, suspect, judged=rare is not None, note=note, condition=condition
    )


def _condition(places: Places, differ: Bools, chosen: Longs) -> str:
    """The shortest condition that says where it differs, with its counts; "" where chance would find one as good."""
    a, b = places
    rows, steps = b.rows[chosen], b.side.steps[b.rows[chosen]]
    other = a.side.steps[a.rows[chosen]]
    capture = b.side.captures[0].run
    root = steps["context"] + steps["prefill"]
    facts: dict[str, NDArray[Any]] = {
        "after": np.array([*map(str, PRECEDED), "prefill"])[steps["preceded"]],
        "requests in the step": steps["batch"],
        "requests in the step differ": steps["batch"] != other["batch"],
        "output position": b.side.place[rows],
        "context length": steps["context"],
        "prefill tokens": steps["prefill"],
    }
    if capture is not None:
        facts["position of the root in its block"] = root % capture.block_size
    if b.of != "steps":
        facts["depth"] = b.depth[chosen]
    if b.of == "nodes":
        facts["sibling"] = b.sibling[chosen]
    best = find(facts, differ, rows)
    if best is None:
        return ""
    inside, outside = f"{best.hits_in:,} of {best.total_in:,}", f"{best.hits_out:,} of {best.total_out:,}"
    return f"{best.text}: {inside}; elsewhere {outside}"


def _where(place: Place, differ: Bools, where: Bools) -> tuple[Where, ...]:
    """By depth, by rank among siblings, by what came before the step (of B), and by its batch."""
    steps = place.side.steps
    groups: list[tuple[str, NDArray[np.integer], Sequence[str] | None]] = []
    if place.of != "steps":
        groups.append(("depth", place.depth, None))
    if place.of == "nodes":
        groups.append(("sibling", place.sibling, None))
    groups += [("after", steps["preceded"][place.rows], PRECEDED)]
    groups += [("requests in the step", steps["batch"][place.rows], None)]
    lines = []
    for group, values, names in groups:
        for value in np.unique(values[where]).tolist():
            mine = where & (values == value)
            text = str(value) if names is None else str(names[value]) if value >= 0 else "prefill"
            lines.append(Where(group, text, int(mine.sum()), int((differ & mine).sum())))
    return tuple(lines)
