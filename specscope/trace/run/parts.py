"""All request steps of a run, in the order in which they came: in columns, but for the newest that came as records."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

from specscope.trace.record.records import RequestStep
from specscope.trace.run.packed import PackedParts

CHUNK, CHUNK_BYTES = 256, 2**20  # request steps that are packed together, and their bytes as records, at most
FEW = 16  # steps that came together in columns of their own: so few are packed anew, with others
LOOSE = -1  # in the place of a chunk's number: not packed yet


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
        self._chunks: list[PackedParts | None] = []  # None for one that was forgotten
        self._chunk_of, self._place_of = array("q"), array("q")  # of each row
        self._loose: dict[int, RequestStep] = {}  # those that are not packed yet, by row
        self._packed_bytes = self._loose_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes in memory, roughly."""
        return self._packed_bytes + self._loose_bytes + 16 * len(self._chunk_of)

    def append(self, part: RequestStep) -> int:
        """Add a step; gives its row."""
        row = len(self._chunk_of)
        packed, place = part.__dict__.get("packed", (None, 0))
        if packed is not None and len(packed) >= FEW:
            self._put(self._number_of(packed), place, row)
            return row
        self._loose[row] = part
        self._put(LOOSE, 0, row)
        self._loose_bytes += part_weight(part)
        if len(self._loose) == CHUNK or self._loose_bytes > CHUNK_BYTES:
            number = self._number_of(PackedParts.of(list(self._loose.values())))
            for place, loose in enumerate(self._loose):
                self._put(number, place, loose)
            self._loose, self._loose_bytes = {}, 0
        return row

    def _put(self, chunk: int, place: int, row: int) -> None:
        """A row lies there. The chunk's number is written last: a reader on another thread goes by it."""
        if row == len(self._place_of):
            self._place_of.append(place)
            self._chunk_of.append(chunk)
        else:
            self._place_of[row] = place
            self._chunk_of[row] = chunk

    def _number_of(self, packed: PackedParts) -> int:
        """The number of a chunk, which is new where it is none of the last."""
        for number in range(len(self._chunks) - 1, max(len(self._chunks) - CHUNK, 0) - 1, -1):
            if self._chunks[number] is packed:
                return number
        self._chunks.append(packed)
        self._packed_bytes += packed.nbytes
        return len(self._chunks) - 1

    def __getitem__(self, row: int) -> RequestStep:
        """The step at a row. Raises LookupError where it was forgotten."""
        loose = self._loose.get(row) if self._chunk_of[row] == LOOSE else None
        if loose is not None:
            return loose
        chunk = self._chunks[self._chunk_of[row]]  # where it was packed in between, this is written
        if chunk is None:
            raise LookupError(f"row {row} was forgotten")
        return chunk[self._place_of[row]]

    def forget(self, before: int) -> None:
        """Let go of the chunks that hold no row from this one on."""
        kept = set(self._chunk_of[before:])
        for number, chunk in enumerate(self._chunks):
            if chunk is not None and number not in kept:
                self._packed_bytes -= chunk.nbytes
                self._chunks[number] = None


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
