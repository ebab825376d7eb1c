"""Compiling before the first request what a run launches: every variant of every kernel, and no other.

Which variants those are is the launchers' to say (specscope.kernels.launch): a pass is run for each size that makes a
difference to them, over the cache's spare block, whose numbers nobody reads.
"""

from __future__ import annotations

import numpy as np
import torch

from specscope.kernels.flat_trees import NOBODY, FlatTrees, Tree
from specscope.model.backend import Backend
from specscope.model.batch import Batch, Segment
from specscope.model.head_runner import HeadRunner
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import Drafter
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.sampling import LogitRows, all_probabilities
from specscope.trace.params import SamplingParams


@torch.inference_mode()
def warm_up(runner: ModelRunner, drafter: Drafter, max_context: int) -> None:
    """Launch each variant once. Needs the triton backend."""
    from specscope.kernels.tree_attention import MOST_TILE  # triton is imported only where it runs

    runners: list[ModelRunner | HeadRunner] = [runner]
    if isinstance(drafter, Eagle | DraftModel):
        runners.append(drafter.runner)
    most = min(MOST_TILE, max_context)  # rows of a sequence that make a difference: more only make more tiles
    sizes = {most, *(2**i for i in range(most.bit_length()))}
    for one in runners:
        for rows in sorted(sizes):
            for context in {0, max_context - rows}:
                _pass(one, rows, context)
        slot = np.array([one.cache.spare * BLOCK_SIZE])
        one.cache.move([(slot + 1, slot)])
    _verify(runner)


def _pass(runner: ModelRunner | HeadRunner, rows: int, context: int) -> None:
    """One sequence that feeds so many rows behind so many slots."""
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


def _verify(runner: ModelRunner) -> None:
    """Logits as the target gives them, and as penalties and drafters do, to probabilities; a tree of one node."""
    from specscope.kernels.tree_verify import tree_verify

    cache: KVCache = runner.cache
    for dtype in {runner.loaded.dtype, torch.float32}:
        logits = torch.zeros(2, runner.loaded.vocab_size, dtype=dtype, device=cache.device)
        p = all_probabilities([LogitRows(logits, SamplingParams(temperature=1.0))], Backend.TRITON)
    nobody, token = np.full(1, NOBODY, np.int32), np.zeros(1, np.int32)
    tree = Tree(token, nobody, token.astype(np.uint8), np.full(2, 0.5), np.full(2, NOBODY))
    none = torch.zeros(0, dtype=torch.int64, device=cache.device)
    tree_verify(FlatTrees.build([tree]).on(cache.device), p, none, None)
