"""Drafted nodes of some steps, as columns: arrays that are put together, so that no node is a Python object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specscope.analyze.verify.arrays import places
from specscope.trace.record.method import SOURCES
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import Outcome, ParentNotes, RequestStep
from specscope.trace.record.tree import MAX_NODES, Bools, Drawn, Ints

Array = NDArray[Any]
TREE = ("token", "parent", "q", "drawn")
VERDICT = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")
PER_NODE = ("raw_p", "rank", "q_rank")
OF_PARENT = ("choice", "choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy")
LISTS = ("top", "top_p", "draft_top", "draft_top_p")  # of a parent: its likeliest tokens
OF_DRAFTER = ("choice_rank", "choice_q", "outside")  # of a parent too, where the drafter is a model
TYPES = {
    **dict.fromkeys(("token", "parent", "rank", "q_rank", "choice", "choice_rank", "module", "source"), np.int32),
    **dict.fromkeys(("top", "draft_top"), np.int32),
    **dict.fromkeys(("drawn", "outcome"), np.uint8),
    "judged": np.bool_,
    **dict.fromkeys(("accept_prob", "coin", "residual_mass", "margin"), np.float64),
}  # of all others: float32
OUTCOMES = [outcome.name.lower() for outcome in Outcome]
DRAWN = [drawn.name.lower() for drawn in Drawn]


class NodeRows:
    """Takes steps one after the other; `columns` gives the columns of schema.NODES behind the keys."""

    def __init__(self) -> None:
        self.count = 0
        self._sizes: list[int] = []  # nodes of each step
        self._held: dict[str, list[Array]] = {}
        self._has: dict[str, list[bool]] = {name: [] for name in ("p", "notes", "confidence", "module", "source")}
        self._forced: list[Array] = []  # nodes, counted over all steps
        self._parents: list[Array] = []  # where each parent stands, see _place
        self._widths: dict[str, list[Array]] = {name: [] for name in LISTS}  # of each parent: how long its list is
        self._has_drafter: list[Array] = []  # of each parent: whether the drafter is a model that looked there

    def add(self, part: RequestStep) -> None:
        """The next step, which may have no nodes."""
        n, verdict = len(part.tree), part.verdict
        self._sizes.append(n if verdict is not None else 0)
        if verdict is None or not n:
            for known in self._has.values():
                known.append(False)
            return
        for name in TREE:
            self._hold(name, getattr(part.tree, name))
        for name in VERDICT:
            self._hold(name, getattr(verdict, name))
        self._hold("judged", verdict.judged)
        self._hold("margin", verdict.margin)
        if len(verdict.forced):
            self._forced.append(verdict.forced[verdict.forced < n].astype(np.int64) + self.count)
        self._has["p"].append(verdict.tells_p)
        notes, method = part.notes, part.method
        self._maybe("notes", None if notes is None else {"prob": notes.prob, "score": notes.score}, n)
        for name in ("confidence", "module", "source"):
            told = None if method is None else getattr(method, name)
            self._maybe(name, {name: told} if told is not None and len(told) == n else None, n)
        if part.parents is None:
            for name in PER_NODE:
                self._hold(name, None, n)
        else:
            self._add_parents(part.parents)
        self.count += n

    def _add_parents(self, parents: ParentNotes) -> None:
        for name in PER_NODE:
            self._hold(name, getattr(parents, name))
        for name in (*OF_PARENT, *OF_DRAFTER):
            self._hold(name, getattr(parents, name))
        for name in LISTS:
            rows = getattr(parents, name)
            self._hold(name, rows.reshape(-1))
            self._widths[name].append(np.full(len(rows), rows.shape[1]))
        self._parents.append(_place(len(self._sizes) - 1, parents.node))
        looked = np.any(parents.draft_top_p > 0, axis=1, keepdims=True)[:, 0]  # beside a text it may not have
        self._has_drafter.append(looked)

    def _hold(self, name: str, values: Array | None, n: int = 0) -> None:
        """Values, or n zeros in their place."""
        kind = TYPES.get(name, np.float32)
        self._held.setdefault(name, []).append(np.zeros(n, kind) if values is None else values)

    def _maybe(self, what: str, columns: dict[str, Array] | None, n: int) -> None:
        """Columns that not every step has."""
        self._has[what].append(columns is not None)
        for name in ("prob", "score") if what == "notes" else (what,):
            self._hold(name, None if columns is None else columns[name], n)

    def step(self) -> Array:
        """[N] the step of each node, counted from the first that was added."""
        return np.repeat(np.arange(len(self._sizes)), self._sizes)

    def _whole(self, name: str) -> Array:
        kind, parts = TYPES.get(name, np.float32), self._held.get(name)
        return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)

    def _known(self, what: str) -> Bools:
        """[N] whether the node's step tells it."""
        return np.repeat(np.array(self._has[what], np.bool_), self._sizes)

    def columns(self, pieces: Callable[[Array], pa.Array]) -> tuple[Ints, list[pa.Array]]:
        """(the depth of each step's tree, the columns of its nodes). `pieces` gives the texts of tokens."""
        a = {name: self._whole(name) for name in (*TREE, *VERDICT, *PER_NODE)}
        step, first = self.step(), np.cumsum(self._sizes) - self._sizes
        depth = depths(np.where(a["parent"] < 0, -1, a["parent"] + first[step]))
        deepest = np.zeros(len(self._sizes), np.int32)
        np.maximum.at(deepest, step, depth)
        forced = np.zeros(self.count, np.bool_)
        if self._forced:
            forced[np.concatenate(self._forced)] = True
        has_p, tried, deterministic = self._known("p"), a["outcome"] != Outcome.UNTRIED, a["drawn"] == 0
        judged, by_own = has_p & tried, self._whole("judged")
        margin = self._whole("margin")
        has_margin = (a["coin"] != 0) | (margin == 1)  # without a coin, only where nothing could change it
        at, given = self._parent_rows(step, a["parent"])
        number = np.arange(self.count) - first[step]
        columns = [
            pa.array(number.astype(np.int32)),
            pa.array(a["parent"]),
            pa.array(depth),
            pa.array(siblings(_place(step, a["parent"])) + 1),
            ids(a["token"]),
            pieces(a["token"]),
            _coded(DRAWN, a["drawn"]),
            pa.array(a["q"]),
            _coded(OUTCOMES, a["outcome"]),
            pa.array(forced),
            pa.array(by_own),
            _where(has_p, a["p"]),
            *(_where(judged, a[name]) for name in ("p_trial", "q_trial", "accept_prob")),
            _where(a["coin"] != 0, a["coin"]),
            _where(has_p & (a["outcome"] == Outcome.REJECTED), a["residual_mass"]),
            _where(judged & has_margin, margin),
            _where(self._known("notes") & deterministic, self._whole("prob")),
            _where(self._known("notes"), self._whole("score")),
            *(_where(self._known(name), self._whole(name)) for name in ("confidence", "module")),
            _coded(SOURCES, self._whole("source"), self._known("source")),
            _where(given, a["raw_p"]),
            *(_where(given & (a[name] > 0), a[name]) for name in ("rank", "q_rank")),
            self._of_parent("choice", at, given & self._names_choice(at)),
            *(self._of_parent(name, at, given) for name in OF_PARENT[1:4]),
            *(self._of_parent(name, at, given & ~deterministic) for name in OF_PARENT[4:]),
            *(self._of_parent(name, at, self._of_model(at, given)) for name in OF_DRAFTER),
            *(self._list(name, at, given) for name in LISTS[:2]),
            *(self._list(name, at, self._of_model(at, given)) for name in LISTS[2:]),
        ]
        return deepest, columns

    def _parent_rows(self, step: Array, parent: Array) -> tuple[Array, Bools]:
        """[N] the row of each node's parent among those that were tried, and whether it was."""
        if not self._parents:
            return np.zeros(len(step), np.int64), np.zeros(len(step), np.bool_)
        there = np.concatenate(self._parents)
        if not len(there):
            return np.zeros(len(step), np.int64), np.zeros(len(step), np.bool_)
        wanted = _place(step, parent)
        order = np.argsort(there)
        at = order[np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)]
        return at, there[at] == wanted

    def _of_parent(self, name: str, at: Array, given: Bools) -> pa.Array:
        values = self._whole(name)
        return _where(given, values[at] if len(values) else np.zeros(len(at), values.dtype))

    def _names_choice(self, at: Array) -> Bools:
        choice = self._whole("choice")
        return choice[at] != NO_TOKEN if len(choice) else np.zeros(len(at), np.bool_)

    def _list(self, name: str, at: Array, given: Bools) -> pa.Array:
        """[N] lists of the nodes' parents."""
        widths = np.concatenate([np.zeros(1, np.int64), *self._widths[name]])
        values = self._whole(name)
        if name in ("top", "draft_top"):
            given = given & ~np.any(values == NO_TOKEN)
        rows = pa.ListArray.from_arrays(pa.array(np.cumsum(widths).astype(np.int32)), pa.array(values))
        return rows.take(pa.array(at, mask=~given))

    def _of_model(self, at: Array, given: Bools) -> Bools:
        if not given.any():
            return given
        known: Bools = np.concatenate(self._has_drafter)[at]
        return given & known


def ids(tokens: Array) -> pa.Array:
    """Token ids; null where they were left out."""
    return _where(tokens != NO_TOKEN, tokens)


def _place(step: Array | int, node: Array) -> Array:
    """One number for a node (or the root) of a step."""
    place: Array = np.asarray(step, np.int64) * (MAX_NODES + 1) + node + 1
    return place


def _where(known: Bools, values: Array) -> pa.Array:
    """A column that is null where it is not known."""
    return pa.array(values, mask=~known)


def _coded(texts: Sequence[str], codes: Array, known: Bools | None = None) -> pa.Array:
    """Texts by their codes; null where not known."""
    indices = pa.array(codes.astype(np.int32), mask=None if known is None else ~known)
    return pa.DictionaryArray.from_arrays(indices, pa.array(texts))


def siblings(above: Array) -> Ints:
    """Place of each node among those that have the same node above them."""
    order = np.argsort(above, kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = places(above[order])
    return place


def depths(above: Array) -> Ints:
    """Depth of each node, 1 where it has no node above it. `above`: the index of its parent, -1 for the root."""
    depth = np.ones(len(above), np.int32)
    at = np.flatnonzero(above >= 0)
    while len(at):  # a level deeper each time: as often as the deepest tree has levels
        deeper = depth[above[at]] + 1
        at = at[deeper != depth[at]]
        depth[at] = depth[above[at]] + 1
    return depth
