"""Whether what the prefix cache promises is there: each known block's KV beside that of its tokens, computed afresh."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from specscope.live.check_kv import check_kv
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache
from specscope.model.runner import ModelRunner
from tests.engines import fresh

HEAD = "the cat sat on the mat and the dog ran after the cat, "  # three full blocks


def pressed(engine, blocks, cached):
    """The engine as new, with so many KV blocks, with a prefix cache or without."""
    fresh(engine, blocks, cached=cached)
    engine.timeline = None


def chain(index, digest):
    """All tokens up to the end of a block; None where a block before it was forgotten."""
    tokens = []
    while digest:
        if digest not in index._blocks:
            return None
        _, content = index._blocks[digest]
        tokens, digest = [*content.tokens[:BLOCK_SIZE], *tokens], content.parent
    return tokens


def wrong_blocks(engine):
    """Known blocks of the target whose KV is not that of their tokens, and how many were looked at."""
    cache = engine.runner.cache
    index, wrong, looked = cache.pool.prefixes, [], 0
    for digest, (block, _) in index._blocks.items():
        tokens = chain(index, digest)
        if tokens is None:
            continue
        looked += 1
        fresh, table = ModelRunner(engine.runner.loaded, len(tokens) // BLOCK_SIZE + 1), BlockTable()
        fresh.cache.reserve(table, len(tokens), 0)
        for _ in fresh.compute(table, tokens):
            pass
        true = torch.from_numpy(table.slots(len(tokens) - BLOCK_SIZE, len(tokens)))
        mine = torch.from_numpy(np.arange(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))
        parts = zip([*cache.key, *cache.value], [*fresh.cache.key, *fresh.cache.value], strict=True)
        if not all(torch.allclose(a[:, mine], b[:, true], atol=1e-3) for a, b in parts):
            wrong.append((block, tokens))
    return wrong, looked


@contextmanager
def watched(engine):
    """Every block that is published meanwhile is looked at then and there. Gives a list of those that are wrong."""
    found, looked = [], []
    with pytest.MonkeyPatch.context() as patch:
        publish = KVCache.publish

        def careful(self, table, tokens, length, ahead=0):
            known = len(self.pool.prefixes)
            publish(self, table, tokens, length, ahead)
            if self is engine.runner.cache and len(self.pool.prefixes) > known:
                wrong, count = wrong_blocks(engine)
                found.extend(wrong)
                looked.append(count)

        patch.setattr(KVCache, "publish", careful)
        yield found
    assert looked, "nothing was published"


def finish(engine, check=False):
    """Run to the end: the records, and what check kv found wrong after each step."""
    records, wrong = [], []
    while engine.busy:
        records.append(engine.step())
        for name in engine.requests if check else ():
            wrong += [one for one in check_kv(engine, name).compared if one.differ]
    return records, wrong
