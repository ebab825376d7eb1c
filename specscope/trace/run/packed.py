"""Many request steps in columns: one array for each field that a record declares, over all of the steps at once.

As a record, a step is an object for each of its arrays: eight kilobytes where its numbers are one. It comes out of the
columns as the record that went in, its arrays views into them. PartStore has all of a run, in the order in which they
came: in columns, but for the newest that came as records.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from specscope.trace.history.stats import StepCounts
from specscope.trace.record.declared import made
from specscope.trace.record.notes import DraftNotes, FormNotes, Logprobs, MethodNotes, ParentNotes
from specscope.trace.record.records import RequestStep, Verdict
from specscope.trace.record.tree import DraftTree
from specscope.trace.wire.codec import wired
from specscope.tree_shape import MAX_NODES, ROOT

HELD: dict[str, type] = {  # a RequestStep, and the records that it holds, by the field that holds them
    "": RequestStep,
    "tree": DraftTree,
    "verdict": Verdict,
    "notes": DraftNotes,
    "parents": ParentNotes,
    "method": MethodNotes,
    "form": FormNotes,
    "logprobs": Logprobs,
}
NUMBERS: dict[Any, Any] = {bool: np.bool_, int: np.int64, float: np.float64}  # fields that are one number
Longs = NDArray[np.int64]


@cache
def _columns(kind: type) -> tuple[tuple[str, Any, bool | None], ...]:
    """(name, dtype, whether it is of two dimensions) of each field; without a dtype a word, and None for one number."""
    fields = [field for field in wired(kind) if not (kind is RequestStep and field.name in HELD)]
    numbers = [(f.name, NUMBERS.get(f.base), None) for f in fields if f.dtype is None]
    return (*numbers, *((f.name, f.dtype, len(f.dimensions) > 1) for f in fields if f.dtype is not None))


class FieldColumns:
    """Records of one kind in columns. Once they are filled, nothing is changed."""

    def __init__(self) -> None:
        self.numbers: dict[str, NDArray[Any]] = {}
        self.words: dict[str, list[Any]] = {}  # texts, names of enumerations, None
        self.arrays: dict[str, NDArray[Any]] = {}  # of all records end to end
        self.shapes: dict[str, Longs] = {}  # [S, 2] of arrays of two dimensions
        self.ends: dict[str, Longs] = {}  # where each begins, and where the last ends; arrays over the same share them

    def add(self, name: str, flat: NDArray[Any], counts: NDArray[np.integer], shapes: Longs | None = None) -> None:
        ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.ends[name] = next((same for same in self.ends.values() if np.array_equal(same, ends)), ends)
        self.arrays[name] = flat
        if shapes is not None:
            self.shapes[name] = shapes

    @staticmethod
    def of(kind: type, records: Sequence[Any]) -> FieldColumns:
        table = FieldColumns()
        for name, dtype, wide in _columns(kind):
            values = list(map(attrgetter(name), records))
            if dtype is None:
                table.words[name] = values
            elif wide is None:
                table.numbers[name] = np.array(values, dtype)
            else:
                shapes = np.array([array.shape for array in values], np.int64).reshape(-1, 2) if wide else None
                flat = [array.ravel() for array in values]
                counts = np.fromiter(map(len, flat), np.int64, len(flat))
                table.add(name, np.concatenate(flat or [np.zeros(0, dtype)]), counts, shapes)
        return table

    def fields(self, row: int) -> dict[str, Any]:
        values = {name: self.field(row, name) for name in (*self.numbers, *self.words, *self.arrays)}
        return values | {name: values[name].reshape(shapes[row]) for name, shapes in self.shapes.items()}

    def each(self) -> list[dict[str, Any]]:
        """The fields of every record: sooner than of one after another."""
        columns = {name: column.tolist() for name, column in self.numbers.items()} | self.words
        for name, flat in self.arrays.items():
            columns[name] = [flat[begin:end] for begin, end in pairwise(self.ends[name].tolist())]
        for name, shapes in self.shapes.items():
            columns[name] = [array.reshape(shape) for array, shape in zip(columns[name], shapes, strict=True)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def field(self, row: int, name: str) -> Any:  # noqa: ANN401 - as the record has it
        """One field of a record; an array of two dimensions row after row."""
        if name in self.arrays:
            ends = self.ends[name]
            return self.arrays[name][ends.item(row) : ends.item(row + 1)]
        return self.words[name][row] if name in self.words else self.numbers[name].item(row)

    @property
    def nbytes(self) -> int:
        ends = {id(ends): ends for ends in self.ends.values()}
        columns = (*self.numbers.values(), *self.arrays.values(), *self.shapes.values(), *ends.values())
        return sum(column.nbytes for column in columns) + sum(8 * len(words) for words in self.words.values())


OWN = frozenset(name for name, *_ in _columns(RequestStep))  # fields of a step that are no records


class PackedParts:
    """Some request steps in columns. Immutable."""

    def __init__(self, held: Mapping[str, tuple[NDArray[np.bool_], FieldColumns]]) -> None:
        """`held`: of each of HELD, whether each step holds one, and those."""
        self.held = {name: table for name, (_, table) in held.items()}
        self.rows: dict[str, Longs] = {}  # [S] the row of each step in a table of `held`; -1 where it holds none
        for name, (there, _) in held.items():
            self.rows[name] = np.where(there, np.cumsum(there) - 1, -1)

    @staticmethod
    def of(parts: Sequence[RequestStep]) -> PackedParts:
        held = {}
        for name, kind in HELD.items():
            records = list(map(attrgetter(name), parts)) if name else parts
            there = np.array([record is not None for record in records], np.bool_)
            held[name] = there, FieldColumns.of(kind, [record for record in records if record is not None])
        return PackedParts(held)

    def __len__(self) -> int:
        return len(self.rows[""])

    @cached_property
    def counts(self) -> list[StepCounts | None]:
        """What is counted of each step; None for a prefill chunk."""
        tree, verdict = self.held["tree"], self.held["verdict"]
        accepted = [*np.diff(verdict.ends["path"]).tolist(), 0]
        kinds, emitted = [*verdict.words["kind"], None], self.held[""].numbers["emitted"].tolist()
        drafted = np.diff(tree.ends["parent"]).tolist()
        each = zip(self.rows["verdict"].tolist(), emitted, drafted, _depths(tree), strict=True)
        return [kinds[row] and StepCounts(kinds[row], out, n, n and accepted[row], deep) for row, out, n, deep in each]

    def __getitem__(self, row: int) -> RequestStep:
        return made(RequestStep, {"packed": (self, row)})  # type: ignore[no-any-return]

    def field(self, row: int, held: str, name: str) -> Any:  # noqa: ANN401 - as the record has it
        """One field of a step, or of what it holds; None where it holds none."""
        place = self.rows[held].item(row)
        return None if place < 0 else self.held[held].field(place, name)

    def attribute(self, row: int, name: str) -> Any:  # noqa: ANN401 - as the record has it
        """A field of a step, or what it holds. Raises AttributeError for any other name."""
        if name not in HELD:
            if name not in OWN:
                raise AttributeError(name)
            return self.held[""].field(row, name)
        place = self.rows[name].item(row)
        return None if place < 0 else made(HELD[name], self.held[name].fields(place))

    @cached_property
    def nbytes(self) -> int:
        return sum(table.nbytes + self.rows[name].nbytes for name, table in self.held.items())


def _depths(trees: FieldColumns) -> list[int]:
    """[S] the number of levels of each tree."""
    parent, ends = trees.arrays["parent"], trees.ends["parent"]
    tree = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    above = np.where(parent == ROOT, ROOT, parent + ends[tree])
    depth, node = np.ones(len(parent), np.int64), above
    for _ in range(MAX_NODES):  # each goes up by a level, to the root at last
        below = node != ROOT
        if not below.any():
            break
        depth += below
        node = np.where(below, above[node], ROOT)
    levels = np.zeros(len(ends) - 1, np.int64)
    np.maximum.at(levels, tree, depth)
    return levels.tolist()


def slices(first: Longs, count: NDArray[np.integer]) -> Longs:
    """The indices of several slices, one after the other."""
    total = int(count.sum())
    begin = np.repeat(first - (np.cumsum(count) - count), count)
    return begin + np.arange(total)


@dataclass(frozen=True)
class Picked:
    steps: PackedParts
    rows: Longs  # [S] where each lies

    @staticmethod
    def of(parts: Sequence[RequestStep]) -> list[Picked]:
        """These steps, those together that lie together; those that lie in no columns are packed."""
        where = [part.__dict__.get("packed", (None, 0)) for part in parts]
        picked: list[Picked] = []
        for steps, same in groupby(zip(where, parts, strict=True), key=lambda each: each[0][0]):
            rows, mine = zip(*((row, part) for (_, row), part in same), strict=True)
            loose = steps is None
            columns = PackedParts.of(mine) if loose else steps
            picked.append(Picked(columns, np.arange(len(mine)) if loose else np.array(rows, np.int64)))
        return picked

    def places(self, held: str) -> Longs:
        """[S] where what each step holds lies in the table; -1 where it holds none. `held` as in HELD."""
        return self.steps.rows[held][self.rows]

    def table(self, held: str) -> FieldColumns:
        return self.steps.held[held]

    def there(self, held: str) -> Longs:
        places = self.places(held)
        return places[places >= 0]

    def counts(self, held: str, name: str) -> Longs:
        """[S] how many values an array has at each step; 0 where there is none."""
        places, ends = self.places(held), self.table(held).ends[name]
        return np.where(places < 0, 0, ends[places + 1] - ends[places]) if len(ends) > 1 else np.zeros(len(places), int)

    def values(self, held: str, name: str) -> NDArray[Any]:
        places, table = self.there(held), self.table(held)
        ends, column = table.ends[name], table.arrays[name]
        if len(places) and places[-1] - places[0] == len(places) - 1 and (np.diff(places) == 1).all():
            return column[ends[places[0]] : ends[places[-1] + 1]]
        counts = ends[places + 1] - ends[places]
        values: NDArray[Any] = column[slices(ends[places], counts)]
        return values


CHUNK, CHUNK_BYTES = 256, 2**20  # request steps that are packed together, and their bytes as records, at most
FEW = 16  # steps that came together in columns of their own: so few are packed anew, with others
ROW = 16  # bytes of a row besides


SIZES = {  # bytes that a value of an array takes, with those that go along with it
    ("tree", "token"): 60,
    ("parents", "node"): 120,
    ("notes", "dropped_token"): 12,
    ("notes", "fed_token"): 8,
    ("notes", "fed_norms"): 4,
    ("logprobs", "logprob"): 12,
    ("logprobs", "top"): 12,
}


def part_weight(part: RequestStep) -> int:
    """Bytes that a request's part in a step takes as a record, roughly."""
    arrays = {name: (each, part.told(*name)) for name, each in SIZES.items()}
    notes = 0 if part.told("parents", "node") is None else 2000
    sizes: int = sum(each * array.size for each, array in arrays.values() if array is not None)
    return 3000 + notes + sizes


class PartStore:
    """A run's request steps by their rows, which count on and are never given again. One thread adds; any may read."""

    def __init__(self) -> None:
        self._held: list[PackedParts | RequestStep | None] = []  # by row: what holds it; None: it was forgotten
        self._places = array("q")  # by row: where it lies in that
        self._loose: list[int] = []  # rows that are not packed yet
        self._gone = self._packed_bytes = self._loose_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._packed_bytes + self._loose_bytes + ROW * len(self._held)

    def append(self, part: RequestStep) -> int:
        packed, place = part.__dict__.get("packed", (None, 0))
        self._places.append(place)
        if packed is not None and len(packed) >= FEW:
            self._held.append(packed)
            self._packed_bytes += packed.nbytes // len(packed)
            return len(self._held) - 1
        self._held.append(part)
        self._loose.append(len(self._held) - 1)
        self._loose_bytes += part_weight(part)
        if len(self._loose) == CHUNK or self._loose_bytes > CHUNK_BYTES:
            self._pack()
        return len(self._held) - 1

    def _pack(self) -> None:
        if not self._loose:
            return
        packed = PackedParts.of([self[row] for row in self._loose])
        for place, row in enumerate(self._loose):
            self._places[row] = place  # first: a reader on another thread goes by what holds it
            self._held[row] = packed
        self._packed_bytes += packed.nbytes
        self._loose, self._loose_bytes = [], 0

    def __getitem__(self, row: int) -> RequestStep:
        """The step at a row. Raises LookupError where it was forgotten."""
        held = self._held[row]
        if held is None:
            raise LookupError(f"row {row} was forgotten")
        return held[self._places[row]] if isinstance(held, PackedParts) else held

    def forget(self, before: int) -> None:
        self._pack()
        for row in range(self._gone, before):
            held, self._held[row] = self._held[row], None
            if isinstance(held, PackedParts):
                self._packed_bytes -= held.nbytes // len(held)
        self._gone = max(self._gone, before)


class PartViews(Sequence[RequestStep]):
    """Some of a run's request steps: each is made when it is asked for. Equal to any sequence of equal steps."""

    __slots__ = ("parts", "rows")

    def __init__(self, parts: PartStore, rows: Sequence[int]) -> None:
        self.parts, self.rows = parts, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> RequestStep: ...

    @overload
    def __getitem__(self, place: slice) -> PartViews: ...

    def __getitem__(self, place: int | slice) -> RequestStep | PartViews:
        return PartViews(self.parts, self.rows[place]) if isinstance(place, slice) else self.parts[self.rows[place]]

    def __iter__(self) -> Iterator[RequestStep]:
        return map(self.parts.__getitem__, self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def __repr__(self) -> str:
        return repr(list(self))
