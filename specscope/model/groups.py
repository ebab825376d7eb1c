"""How the torch backend attends: contexts read in place where they lie side by side, the rest gathered in groups.

A context that lies side by side is read in place as a whole by the few rows of a step, with a mask of all of it, and by
idle threads in parts. Many rows, as of a prompt's chunk, and rows whose context lies in several places, read its long
runs of blocks one after another; these need no mask, as every row sees them. What is left of each request, at least the
slots that it feeds, is padded to a group with those that are about as long; few rows are never padded to many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.model.kv_cache import BLOCK_SIZE, KVCache, LayerShape
from specscope.trace.record.tree import Bools, Ints

if TYPE_CHECKING:
    from specscope.model.segment import Segment

GATHER = 5  # what a slot of padding takes, in rows that attend to it
GATHERED = 13  # and what it takes to gather a slot
CALL = 8192  # what a call of its own takes, in slots times rows
LONG = 1024  # slots of context from which on runs are read in place
FEW = 32  # rows, as those of trees: a mask of their whole context takes about as long as calls for its runs at most
RUN = 256  # slots that a run has at least: a shorter one is gathered
NOWHERE = -(2**30)  # as a position: before every other
Masks = tuple[int | None, int, torch.dtype]  # what a group's masks differ by: window, query heads of a key head, dtype


@dataclass(frozen=True)
class Run:
    """Context that lies side by side: slots `start` to `end`, of which the first holds position `first`."""

    member: int  # which of the group's segments
    start: int
    end: int
    first: int


@dataclass(frozen=True)
class Piece:
    """Slots `start` to `end`, read in place by the rows of one segment."""

    member: int
    start: int
    end: int
    bias: Tensor | None  # [1, 1, fold * M, end - start]; None where all rows see all of it


@dataclass
class AttentionGroup:
    """Segments whose attention is computed together, padded to the longest: B segments, M rows, K slots."""

    rows: Tensor | slice  # int64 [B * M] the batch's row behind each padded row; a slice where one follows the other
    real: Tensor | None  # int64: which padded rows are real, in order; None where all are
    into: Tensor | slice  # the batch's row of each real row
    size: int  # B
    blocks: Tensor  # int64 [B * K / 16] the KV blocks of each segment that are gathered, padded with block 0
    start: int | None  # the first segment's first slot where all that is read lies in place; None: it is gathered
    stride: int  # slots from one segment's first to the next one's, where it lies in place
    seen: Bools  # [B, M, K]
    column: Ints  # [B, K] position of each slot; NOWHERE in padding
    row: Ints  # [B, M] position of each row; NOWHERE in padding
    runs: list[Run]
    device: torch.device
    _views: dict[int | None, tuple[Bools, int]] = field(default_factory=dict)
    _bias: dict[tuple[Masks, int], Tensor | None] = field(default_factory=dict)
    _pieces: dict[Masks, list[Piece]] = field(default_factory=dict)
    _scratch: dict[LayerShape, tuple[list[Tensor], tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def view(self, window: int | None) -> tuple[Bools, int]:
        """[B, M, K - n] which slots each row sees within a window, and n: so many at the beginning no row sees.

        What is gathered keeps them: n is 0.
        """
        if window is None:
            return self.seen, 0
        if window not in self._views:
            seen, first = self.seen & self._within(window), 0
            if self.start is not None:
                first = int(seen[self.row != NOWHERE].any(0).argmax())
                seen = seen[:, :, first:]
            self._views[window] = seen, first
        return self._views[window]

    def width(self, window: int | None) -> int:
        """How many slots of each segment are read."""
        return int(self.view(window)[0].shape[-1])

    @property
    def can_be_cut(self) -> bool:
        """Whether it is one segment that is read in place: its keys can be read in parts."""
        return self.size == 1 and self.start is not None and self.device.type == "cpu"

    def bias(self, window: int | None, fold: int, dtype: torch.dtype, parts: int = 1) -> Tensor | None:
        """Additive mask of the slots that are read [1, B, fold * M, K - n]: 0 where a row sees a slot, least where not.

        None where all is seen. `fold` query heads share a key, one after another. `parts`: as in `context`.
        """
        key = (window, fold, dtype), parts
        if key not in self._bias:
            seen = self.view(window)[0]
            self._bias[key] = self._masked(_overlapping(seen, parts) if parts > 1 else seen, fold, dtype)
        return self._bias[key]

    def _within(self, window: int) -> Bools:
        """[B, M, K]: which slots lie less than `window` positions before a row. For a row of padding all do."""
        return self.column[:, None] > self.row[:, :, None] - window

    def _masked(self, seen: Bools, fold: int, dtype: torch.dtype) -> Tensor | None:
        if seen.all():
            return None
        least = torch.finfo(dtype).min
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), least)
        return bias.repeat(1, fold, 1)[None].to(self.device)

    def pieces(self, window: int | None, fold: int, dtype: torch.dtype) -> list[Piece]:
        """What is read in place: the runs, as far as they lie in the window."""
        key = (window, fold, dtype)
        if key not in self._pieces:
            self._pieces[key] = [
                piece
                for run in self.runs
                for piece in ([Piece(run.member, run.start, run.end, None)] if window is None else self._cut(run, *key))
            ]
        return self._pieces[key]

    def _cut(self, run: Run, window: int | None, fold: int, dtype: torch.dtype) -> list[Piece]:
        """A run without what lies before every row's window; what some rows see, and what all of them see."""
        assert window is not None
        before = self.row[run.member] - window  # the last position that a row does not see
        real, length = before[self.row[run.member] != NOWHERE], run.end - run.start
        some, every = (int(np.clip(last + 1 - run.first, 0, length)) for last in (real.min(), real.max()))
        seen = np.arange(run.first + some, run.first + every)[None, None] > before[None, :, None]
        cut = [(some, every, self._masked(seen, fold, dtype))] if some < every else []
        cut += [(every, length, None)] if every < length else []
        return [Piece(run.member, run.start + start, run.start + end, bias) for start, end, bias in cut]

    def context(self, cache: KVCache, layer: int, window: int | None = None, parts: int = 1) -> tuple[Tensor, Tensor]:
        """The keys and values of every segment, [heads, B, K - n, size] each, in place or gathered by whole blocks.

        n: see `view`. `parts`: of a segment alone and in place, in how many overlapping parts they are given
        instead of B. Layers of one shape share a scratch tensor: what was gathered is gone at the next call.
        """
        seen, first = self.view(window)
        keys = seen.shape[-1]
        if self.start is not None and parts > 1:
            size, stride = _part(keys, parts)
            return cache.read(layer, self.start + first, self.start + first + size, parts, stride)
        if self.start is not None:
            return cache.read(layer, self.start + first, self.start + first + keys, self.size, self.stride)
        shape, stores = cache.layers[layer], cache.parts[layer]
        if shape not in self._scratch:
            out = [part.new_empty(len(part), len(self.blocks), BLOCK_SIZE * part.shape[2]) for part in stores]
            views = [
                x.view(len(x), self.size, -1, part.shape[2])[:, :, :keys] for x, part in zip(out, stores, strict=True)
            ]
            self._scratch[shape] = out, (views[0][: shape.heads], views[-1][-shape.heads :])
        out, key_value = self._scratch[shape]
        for part, gathered in zip(stores, out, strict=True):
            torch.index_select(part.view(len(part), -1, gathered.shape[2]), 1, self.blocks, out=gathered)
        return key_value


def _part(keys: int, parts: int) -> tuple[int, int]:
    """How many of the keys each part has, and from one part's first to the next one's: the last ends where they do."""
    stride = keys // parts
    return keys - (parts - 1) * stride, stride


def _overlapping(seen: Bools, parts: int) -> Bools:
    """[1, M, K] in overlapping parts [parts, M, size]: where two overlap, the second sees nothing."""
    size, stride = _part(seen.shape[-1], parts)
    cut = np.stack([seen[0, :, part * stride : part * stride + size] for part in range(parts)])
    cut[1:, :, : size - stride] = False
    return cut


@dataclass(frozen=True)
class _Layout:
    """A segment's blocks: runs that are read in place, and the others."""

    segment: Segment
    first: int  # the batch's row of its first token
    runs: list[tuple[int, int, int]]  # start, end, first position
    kept: NDArray[np.int64]  # the other blocks
    places: Ints  # positions of the table that lie in them
    start: int | None  # the first slot of the others, where they lie side by side

    @property
    def rows(self) -> int:
        return len(self.segment.tokens)

    @staticmethod
    def of(segment: Segment, first: int) -> _Layout:
        length, whole = segment.length, segment.context // BLOCK_SIZE
        blocks = np.asarray(segment.table.blocks[: -(-length // BLOCK_SIZE)], dtype=np.int64)
        runs, gathered = [], np.arange(len(blocks))
        side_by_side = bool((np.diff(blocks) == 1).all())
        if segment.context >= LONG and not (side_by_side and len(segment.tokens) <= FEW):
            in_place = np.zeros(len(blocks), dtype=np.bool_)
            edges = [0, *(np.flatnonzero(np.diff(blocks[:whole]) != 1) + 1).tolist(), whole]
            for start, end in pairwise(edges):
                if (end - start) * BLOCK_SIZE >= RUN:
                    slot = int(blocks[start]) * BLOCK_SIZE
                    runs.append((slot, slot + (end - start) * BLOCK_SIZE, start * BLOCK_SIZE))
                    in_place[start:end] = True
            gathered = np.flatnonzero(~in_place)
        places = (gathered[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
        beyond = len(blocks) * BLOCK_SIZE - length  # the last block is among the gathered: it holds fed rows
        others = blocks[gathered]
        side_by_side = side_by_side or bool((np.diff(others) == 1).all())
        return _Layout(
            segment=segment,
            first=first,
            runs=runs,
            kept=others,
            places=places[: len(places) - beyond].astype(np.int32),
            start=int(others[0]) * BLOCK_SIZE if side_by_side else None,
        )


def build_groups(segments: Sequence[Segment], first: NDArray[np.int64], device: torch.device) -> list[AttentionGroup]:
    """Put segments together with others that have about as many slots to read: see `_together`.

    Of those together, the ones that lie equally far apart in the cache are one group, which is read in place.
    `first`: the batch's row of each segment's first token.
    """
    layouts = [_Layout.of(segment, int(row)) for segment, row in zip(segments, first, strict=False)]
    few = [layout for layout in layouts if layout.rows <= FEW]
    many = [layout for layout in layouts if layout.rows > FEW]
    return [
        _group(part, start, stride, device)
        for members in (*_together(few), *_together(many))
        for part, start, stride in _parts(sorted(members, key=lambda layout: layout.first))
    ]


def _together(layouts: Sequence[_Layout]) -> list[list[_Layout]]:
    """Which segments to pad to the longest of them, so that all the padding and a call for each group take the least.

    The best way to cut them, sorted by length, into groups: least[n] is what the n longest take.
    """
    ordered = sorted(layouts, key=lambda layout: (-len(layout.places), -layout.rows))
    rows, slots = np.array([(layout.rows, len(layout.places)) for layout in ordered]).reshape(-1, 2).T
    least, begin = np.zeros(len(ordered) + 1), [0]
    for end in range(1, len(ordered) + 1):
        widest = np.maximum.accumulate(rows[:end][::-1])[::-1]
        taken = least[:end] + CALL + np.arange(end, 0, -1) * (widest + GATHER) * slots[:end]
        begin.append(int(taken.argmin()))
        least[end] = taken[begin[-1]]
    groups, end = list[list[_Layout]](), len(ordered)
    while end:
        groups.append(ordered[begin[end] : end])
        end = begin[end]
    return groups[::-1]


def _parts(members: list[_Layout]) -> list[tuple[list[_Layout], int | None, int]]:
    """Those that are read in place together, where that takes less than to gather all of them at once."""
    parts = list(_by_place(members))
    if (len(parts) - 1) * CALL > GATHERED * sum(len(layout.places) for layout in members):
        return [(members, None, 0)]
    return parts


def _by_place(members: list[_Layout]) -> Iterator[tuple[list[_Layout], int | None, int]]:
    """Those whose blocks lie in place, each as far behind the one before: first slot and stride; then the others."""
    ordered = sorted(
        ((layout.start, layout) for layout in members if layout.start is not None), key=lambda each: each[0]
    )
    while ordered:
        first, count = ordered[0][0], 1
        apart = ordered[1][0] - first if len(ordered) > 1 else 0
        while count < len(ordered) and ordered[count][0] == first + count * apart:
            count += 1
        yield [layout for _, layout in ordered[:count]], first, apart if count > 1 else 0
        ordered = ordered[count:]
    others = [layout for layout in members if layout.start is None]
    if others:
        yield others, None, 0


def _group(members: list[_Layout], start: int | None, stride: int, device: torch.device) -> AttentionGroup:
    """Pad segments into one group."""
    size, rows = len(members), max(layout.rows for layout in members)
    keys = max(len(layout.places) for layout in members)
    if start is None:  # whole blocks, gathered side by side: a product of keys with gaps between sequences copies them
        keys = max(len(layout.kept) for layout in members) * BLOCK_SIZE
    row_of, is_real = np.zeros((size, rows), dtype=np.int64), np.zeros((size, rows), dtype=np.bool_)
    block_of = np.zeros((size, max(len(layout.kept) for layout in members)), dtype=np.int64)
    seen = np.zeros((size, rows, keys), dtype=np.bool_)
    seen[:, :, 0] = True  # a padded row sees one slot, if its window does not begin later; its result is not read
    column, row = (np.full((size, n), NOWHERE, dtype=np.int32) for n in (keys, rows))
    for b, layout in enumerate(members):
        s, m, places = layout.segment, layout.rows, layout.places
        row_of[b, :m] = layout.first + np.arange(m)
        is_real[b, :m] = True
        block_of[b, : len(layout.kept)] = layout.kept
        before, end = len(places) - len(s.positions), len(places)
        seen[b, :m, :before] = True
        seen[b, :m, before:end] = s.mask
        column[b, :before], column[b, before:end] = places[:before], s.positions
        row[b, :m] = s.positions[-m:]
    return AttentionGroup(
        rows=_rows(row_of.ravel(), device),
        real=None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real.ravel())).to(device),
        into=_rows(row_of[is_real], device),
        size=size,
        blocks=torch.from_numpy(block_of.ravel()).to(device),
        start=start,
        stride=stride,
        seen=seen,
        column=column,
        row=row,
        runs=[Run(b, *run) for b, layout in enumerate(members) for run in layout.runs],
        device=device,
    )


def _rows(rows: NDArray[np.int64], device: torch.device) -> Tensor | slice:
    """Rows of the batch; a slice where one follows the other."""
    if bool((rows[1:] - rows[:-1] == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
