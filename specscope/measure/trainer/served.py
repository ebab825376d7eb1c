"""The served head over a text: our engine's HeadRunner, teacher-forced from many places at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specscope.measure.trainer.taps import Pass, in_order, runner_taps
from specscope.model.batch import Segment
from specscope.model.heads.head_loader import LoadedHead
from specscope.model.heads.head_runner import HeadRunner
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable
from specscope.model.runner import ModelRunner


def served_runner(loaded: LoadedHead, length: int, places: int, depths: int) -> HeadRunner:
    """A runner with room for a text and what is drafted from so many places."""
    slots = length + places * depths
    positions = length + depths + BLOCK_SIZE
    blocks = -(-max(slots, positions) // BLOCK_SIZE) + 1
    return HeadRunner(loaded, loaded.head.config.vocab, positions, blocks)


def served_features(runner: ModelRunner, tokens: Sequence[int]) -> Tensor:
    """[T, layers * width] what our engine takes from the target along a text."""
    table = BlockTable()
    runner.cache.reserve(table, len(tokens), 0)
    parts = [features for _, features in runner.compute(table, tokens) if features is not None]
    runner.cache.truncate(table, 0)
    return torch.cat(parts)


def forced(
    runner: HeadRunner, tokens: Sequence[int], features: Tensor, places: Sequence[int], depths: int
) -> list[Tensor]:
    """Logits [places, draft vocabulary] by depth: from each place the text's own tokens are fed, a row a depth.

    The rows below a place see the text's pairs up to it and each other, as a drafted chain does.
    """
    pairs, count = len(tokens) - 1, len(places)
    at, table = np.asarray(places, np.int64), BlockTable()
    runner.cache.reserve(table, pairs + count * (depths - 1), 0)
    text = np.arange(pairs, dtype=np.int64)
    segment = Segment(table, list(tokens[1:]), 0, text, np.tri(pairs, dtype=np.bool_), places)
    logits, hidden = runner.forward([segment], runner.combine(features[:pairs]))
    outputs, parallel = [logits], runner.head.config.parallel
    if parallel is not None:
        masked = runner.combine(runner.head.mask_features()).expand(count, -1) if depths > 1 else hidden
    for depth in range(1, depths):
        if parallel is not None:
            fed, hidden = [parallel.mask_token] * count, masked
        else:
            fed = [tokens[place + 1 + depth] for place in places]
        positions = np.concatenate([text, *(at + below for below in range(1, depth + 1))])
        own = np.tile(np.eye(count, dtype=np.bool_), (1, depth))
        mask = np.concatenate([text <= at[:, None], own], axis=1)
        logits, hidden = runner.forward([Segment(table, fed, 0, positions, mask, range(count))], hidden)
        outputs.append(logits)
    runner.cache.truncate(table, 0)
    return outputs


def served_passes(
    runner: HeadRunner, tokens: Sequence[int], features: Tensor, places: Sequence[int], depths: int
) -> list[Pass]:
    """The operations of each depth, through torch's operators."""
    with runner_taps(runner) as calls:
        forced(runner, tokens, features, places, depths)
    fed_back = calls.pop("hidden")
    passes: list[Pass] = []
    for depth in range(depths):
        values = {name: made[depth] for name, made in calls.items() if depth < len(made)}
        if depth and runner.head.config.parallel is None:
            values["fed back"] = fed_back[depth]
        passes.append(in_order(values, runner.head.config))
    return passes
