"""Forward passes of fixed shapes, captured once and replayed: what a CUDA graph asks of a ragged batch.

A graph holds all launches of a pass, with the addresses and sizes that they had when it was captured. So a batch is
padded to a shape that was captured, and copied to where that graph reads: each sequence is given the shape's rows, and
sequences that are not there stand on the cache's spare block. A row of padding sees the sequence's context and itself,
its keys and values go behind the sequence's own or to the spare block, and the result is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.kernels.tree_batch import FixedShape, Packed
from specscope.model.batch import Batch, Segment
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache
from specscope.model.places import Backend

Outputs = tuple[Tensor, ...]
Run = Callable[..., Outputs]  # (batch, *inputs) -> outputs; a row of each input and output for each row of the batch
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]
"""Runs a pass and captures it: where its outputs lie, and what runs it again on what its inputs hold by then."""


@dataclass(frozen=True, order=True)
class Shape:
    """The shape of a pass: how many sequences, and how many rows each of them feeds."""

    sequences: int
    rows: int


def shapes(max_batch: int, rows: Iterable[int]) -> list[Shape]:
    """For batches up to `max_batch` sequences, in powers of two, with each of these counts of rows."""
    return [Shape(a, b) for a in powers(max_batch) for b in sorted({*rows})]


def powers(largest: int) -> list[int]:
    """Powers of two up to `largest`, and it."""
    return sorted({largest, *(2**i for i in range(largest.bit_length()) if 2**i < largest)})


@dataclass(frozen=True)
class Replayed:
    """The results of a batch. All of it is overwritten by the runner's next replay: take rows of outputs, not views."""

    outputs: Outputs
    fed: Tensor  # int64: the outputs' rows of the tokens that were fed, in the batch's order
    wanted: Tensor  # int64: those whose logits were asked for


class Graphs:
    """Captured passes of one runner, by shape; a batch that none of them holds runs without."""

    def __init__(self, cache: KVCache, inputs: Sequence[Tensor] = (), *, unfit: str = "") -> None:
        """`inputs`: a row of each input that a pass takes besides its batch; `unfit`: why none can be captured."""
        self._cache, self._inputs, self._unfit = cache, inputs, unfit
        self._window = self._blocks = self._beyond = 0
        self._captured: dict[Shape, _Captured] = {}
        self._outputs: Outputs = ()  # of the largest shape; those of the others are copied to their first rows

    def __len__(self) -> int:
        return len(self._captured)

    def capture(
        self, run: Run, wanted: Sequence[Shape], capture: Capture, max_context: int, window: int
    ) -> Iterator[Shape]:
        """Capture each shape, largest first, so that the smaller ones fit into its memory; says which comes next.

        `max_context`: slots of a sequence; `window`: those behind its context at most, fed rows included.
        """
        if self._unfit:
            raise UserError(self._unfit)
        self._blocks, self._beyond = (-(-slots // BLOCK_SIZE) for slots in (max_context, window))
        self._window, captured = window, dict[Shape, _Captured]()
        for shape in sorted(wanted, reverse=True):
            yield shape
            static = [row.new_zeros(shape.sequences * shape.rows, *row.shape[1:]) for row in self._inputs]
            packed, sizes = self._padded([], shape, [], [])
            views = packed.views(buffer := packed.host.to(self._cache.device, copy=True))
            batch = Batch.of(views, sizes)
            outputs, replay = capture(lambda batch=batch, static=static: self._pass(run, batch, static))  # type: ignore[misc]
            self._outputs = self._outputs or outputs
            captured[shape] = _Captured(buffer, views["fed_rows"], views["wanted_rows"], static, outputs, replay)
        self._captured = captured

    @torch.inference_mode()
    def warm_up(self, run: Run, max_context: int) -> None:
        """A pass for each size that makes a difference to the kernels, and a move of slots. Needs the triton backend.

        They go over the cache's spare block, whose numbers nobody reads: they compile what a run's passes launch.
        """
        from specscope.kernels.launch import MOST_TILE  # triton is imported only where it runs

        cache, max_rows = self._cache, min(MOST_TILE, max_context)  # of a sequence: more rows only make more tiles
        for rows in sorted({max_rows, *(2**i for i in range(max_rows.bit_length()))}):
            for context in {0, max_context - rows}:
                table = BlockTable([cache.spare] * -(-(context + rows) // BLOCK_SIZE))
                segment = Segment.of_tree(table, context, [0] * rows, logits=True)
                batch = Batch.build([segment], cache.device, Backend.TRITON)
                run(batch, *(row.new_zeros(rows, *row.shape[1:]) for row in self._inputs))
        slot = np.array([cache.spare * BLOCK_SIZE])
        cache.move([(slot + 1, slot)])

    def _pass(self, run: Run, batch: Batch, static: Sequence[Tensor]) -> Outputs:
        """The captured pass. Its outputs lie where those of the largest shape do, so that they take memory once."""
        made = run(batch, *static)
        if not self._outputs:
            return made
        outputs = tuple(whole[: len(part)] for whole, part in zip(self._outputs, made, strict=True))
        for whole, part in zip(outputs, made, strict=True):
            whole.copy_(part)
        return outputs

    def replay(self, segments: Sequence[Segment], *inputs: Tensor) -> Replayed | None:
        """Run a batch through the smallest shape that holds it; None where none does.

        Each of `inputs` has a row for each fed token, in the batch's order.
        """
        rows = max(len(s.tokens) for s in segments)
        before = max(len(s.positions) - len(s.tokens) for s in segments)  # slots of a window that are not fed
        wide = [s for s in self._captured if s.sequences >= len(segments) and rows <= s.rows <= self._window - before]
        if not wide or max(len(s.table.blocks) for s in segments) > self._blocks:
            return None
        shape = min(wide, key=lambda s: (s.sequences * s.rows, s.rows))
        captured = self._captured[shape]
        each = list(zip(range(0, len(segments) * shape.rows, shape.rows), segments, strict=True))
        fed = [start + row for start, s in each for row in range(len(s.tokens))]
        wanted = [start + row for start, s in each for row in s.wanted]
        captured.buffer.copy_(self._padded(segments, shape, fed, wanted)[0].host, non_blocking=True)
        index = captured.fed[: len(fed)]
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.index_copy_(0, index, given.to(static.dtype))
        captured.again()
        return Replayed(captured.outputs, index, captured.wanted[: len(wanted)])

    def _padded(
        self, segments: Sequence[Segment], shape: Shape, fed: list[int], wanted: list[int]
    ) -> tuple[Packed, dict[str, Any]]:
        """A batch of exactly this shape, of which the first sequences are these; with the rows that count."""
        spare = [self._cache.spare] * self._beyond
        padding = Segment(BlockTable(), [], 0, np.zeros(0, np.int64), np.zeros((0, 0), np.bool_), ())
        all_of_them = [*segments, *[padding] * (shape.sequences - len(segments))]
        padded = [_pad(s, shape.rows, spare) for s in all_of_them]
        index = np.zeros((2, shape.sequences * shape.rows), dtype=np.int64)
        index[0, : len(fed)], index[1, : len(wanted)] = fed, wanted
        room = FixedShape(self._window, self._blocks + self._beyond)
        return Batch.pack(padded, self._cache.device, room, fed_rows=index[0], wanted_rows=index[1])


@dataclass
class _Captured:
    buffer: Tensor  # uint8: the batch that the pass reads, and which rows count, as Batch.pack lays it out
    fed: Tensor  # int64, in the buffer
    wanted: Tensor  # likewise
    inputs: list[Tensor]
    outputs: Outputs
    again: Callable[[], None]


def _pad(segment: Segment, rows: int, spare: list[int]) -> Segment:
    """The segment with rows of padding behind its own, and blocks behind its table for them."""
    (m, w), more = segment.mask.shape, rows - len(segment.tokens)
    mask = np.zeros((rows, w + more), dtype=np.bool_)
    mask[:m, :w] = segment.mask
    mask[m:, w:] = np.eye(more, dtype=np.bool_)
    last = segment.positions[-1:] if w else np.zeros(1, np.int64)
    return Segment(
        table=BlockTable(segment.table.blocks + spare),
        tokens=segment.tokens + [0] * more,
        context=segment.context,
        positions=np.concatenate([segment.positions, np.repeat(last, more)]),
        mask=mask,
        wanted=range(rows),
    )


class CudaCapture:
    """Captures the passes of one runner as CUDA graphs that share a pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()

    @torch.inference_mode()
    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Run it twice aside, so that kernels are compiled; then capture it. The stream in use stays the one it was."""
        now = torch.cuda.current_stream()
        self._aside.wait_stream(now)
        with torch.cuda.stream(self._aside):
            run()
            run()
        now.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(now), torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
            outputs = run()
        return outputs, graph.replay
