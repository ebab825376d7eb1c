"""Passes over the cache's spare block, whose numbers nobody reads: they compile what a run's passes launch."""

from __future__ import annotations

import numpy as np
import torch

from specscope.model.batch import Batch, Segment
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable
from specscope.model.places import Backend
from specscope.model.runner import ModelRunner


@torch.inference_mode()
def warm_up_passes(runner: ModelRunner | HeadRunner, max_context: int) -> None:
    """A pass for each size that makes a difference to the kernels, and a move of slots. Needs the triton backend."""
    from specscope.kernels.launch import MOST_TILE  # triton is imported only where it runs

    max_rows = min(MOST_TILE, max_context)  # rows of a sequence: more only make more tiles
    for rows in sorted({max_rows, *(2**i for i in range(max_rows.bit_length()))}):
        for context in {0, max_context - rows}:
            _pass(runner, rows, context)
    slot = np.array([runner.cache.spare * BLOCK_SIZE])
    runner.cache.move([(slot + 1, slot)])


def _pass(runner: ModelRunner | HeadRunner, rows: int, context: int) -> None:
    """Run one sequence that feeds `rows` rows after `context` slots."""
    cache = runner.cache
    table = BlockTable([cache.spare] * -(-(context + rows) // BLOCK_SIZE))
    positions, mask = context + np.arange(rows, dtype=np.int64), np.tri(rows, dtype=np.bool_)
    segment = Segment(table, [0] * rows, context, positions, mask, range(rows))
    batch = Batch.build([segment], cache.device, Backend.TRITON)
    if isinstance(runner, HeadRunner):
        fc = runner.head.fc
        runner._run(batch, fc.weight.new_zeros(rows, fc.out_features))
    else:
        runner._run(batch)
