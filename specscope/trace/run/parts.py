"""All request steps of a run, in the order in which they came: the newest as records, the others in columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, overload

from specscope.trace.record.records import RequestStep
from specscope.trace.run.packed import PackedParts

CHUNK, CHUNK_BYTES = 256, 2**20  # request steps that are packed together, and their bytes as records, at most


def part_weight(part: RequestStep) -> int:
    """Bytes of a request's part in a step, roughly."""
    size = 3000 + 60 * len(part.tree) + (0 if part.parents is None else 2000 + 120 * len(part.parents.node))
    notes = part.notes
    if part.logprobs is not None:
        size += 400 + 12 * (len(part.logprobs.logprob) + part.logprobs.top.size)
    return size + (
        0 if notes is None else 12 * len(notes.dropped_token) + 8 * len(notes.fed_token) + notes.fed_norms.nbytes
    )


class PartStore:
    """A run's request steps by their rows, which count on and are never given again. One thread adds; any may read."""

    def __init__(self) -> None:
        self._chunks: list[PackedParts | None] = []  # None for one that was forgotten
        self._firsts: list[int] = []  # the row at which each begins
        self._newest: tuple[int, list[RequestStep]] = (0, [])  # the same of those that are not packed yet
        self._packed = self._loose = 0  # bytes of the columns, and of the newest

    @property
    def nbytes(self) -> int:
        """Bytes in memory, roughly."""
        return self._packed + self._loose

    def append(self, part: RequestStep) -> int:
        """Add a step; gives its row."""
        first, newest = self._newest
        row = first + len(newest)
        newest.append(part)
        self._loose += part_weight(part)
        if len(newest) == CHUNK or self._loose > CHUNK_BYTES:
            self._firsts.append(first)
            self._chunks.append(packed := PackedParts(newest))
            self._newest, self._loose = (row + 1, []), 0
            self._packed += packed.nbytes
        return row

    def __getitem__(self, row: int) -> RequestStep:
        """The step at a row. Raises LookupError where it was forgotten."""
        first, newest = self._newest
        if row >= first:
            return newest[row - first]
        chunk, place = self._packed_at(row)
        return chunk[place]

    def field(self, row: int, held: str, name: str) -> Any:  # noqa: ANN401 - as the record has it
        """One field of the step at a row, or of what it holds (`held`: "verdict"); None where it holds none."""
        first, newest = self._newest
        if row >= first:
            holder = getattr(newest[row - first], held) if held else newest[row - first]
            return None if holder is None else getattr(holder, name)
        chunk, place = self._packed_at(row)
        return chunk.field(place, held, name)

    def _packed_at(self, row: int) -> tuple[PackedParts, int]:
        place = bisect_right(self._firsts, row) - 1
        chunk = self._chunks[place]
        if chunk is None:
            raise LookupError(f"row {row} was forgotten")
        return chunk, row - self._firsts[place]

    def forget(self, before: int) -> None:
        """Let go of the chunks that hold no row from this one on."""
        for place in range(bisect_right(self._firsts, before) - (before < self._newest[0])):
            if (chunk := self._chunks[place]) is not None:
                self._packed -= chunk.nbytes
                self._chunks[place] = None


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
