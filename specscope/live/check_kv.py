"""The cached KV of a request, place by place, beside KV computed afresh from its tokens alone. Looking changes nothing.

Fresh KV is a plain prefill into separate caches, over the same weights: no block of the engine is touched. The KV of
an EAGLE head is computed from features that the target also computes afresh.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.debug.kv_check import KVCheck, KVCompared, KVPlace
from specscope.engine.engine import Engine
from specscope.engine.request import Slots
from specscope.errors import UserError
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.model_drafter import ModelDrafter

# How far a key or value may be from one computed in another batch, relative to its norm. KV of another token is 0.4
# away or more. Measured over trees, moves and preemptions, on SmolLM2-135M-Instruct and on models of a few layers:
# at most 4e-6 in float32, 0.003 in float16 and 0.07 in bfloat16.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.2}


def check_kv(engine: Engine, name: str) -> KVCheck:
    """Compare what target and drafter hold of a running request. Raises UserError where it has ended."""
    request, drafter = engine.requests.get(name), engine.drafter
    if request is None:
        raise UserError(f"{name} is not running: its KV was freed")
    tokens = list(request.tokens)
    model = drafter if isinstance(drafter, ModelDrafter) else None
    state = None if model is None else model.states.get(name)
    length, cache = max(request.computed, 0 if state is None else state.computed), engine.runner.cache
    fresh = ModelRunner(engine.runner.loaded, _blocks(length), drafter.aux_layers, cache.backend)
    try:
        table, features = _prefill(fresh, tokens[:length])
        held = tokens[: request.computed]
        compared = [_compare("target", cache, request.table, fresh.cache, table, held)]
    finally:
        fresh.close()
    if model is None:
        return KVCheck(name, tuple(compared), f"the drafter ({drafter.name}) keeps no KV")
    if state is None:
        return KVCheck(name, tuple(compared), f"the drafter ({drafter.name}) holds nothing of {name}")
    drafts, table, drafted = model.afresh(tokens, state.computed, features, _blocks(state.computed))
    compared.append(_compare(f"drafter {drafter.name}", model.cache, state.table, drafts, table, drafted))
    return KVCheck(name, tuple(compared))


def _blocks(length: int) -> int:
    return -(-length // BLOCK_SIZE) + 1


def _prefill(runner: ModelRunner, tokens: Sequence[int]) -> tuple[BlockTable, list[Tensor]]:
    """Prefill the tokens: the table of their KV, and their features."""
    table = BlockTable()
    runner.cache.reserve(table, len(tokens), 0)
    return table, [part for _, part in runner.compute(table, tokens) if part is not None]


def _compare(
    model: str, cache: KVCache, held: BlockTable, fresh: KVCache, table: BlockTable, tokens: Sequence[int]
) -> KVCompared:
    tolerance = TOLERANCE.get(cache.dtype, max(TOLERANCE.values()))
    there = min(len(tokens), len(held.blocks) * BLOCK_SIZE)
    slots = held.slots(0, there)
    apart = _apart(cache, slots, fresh, table.slots(0, there))
    worst = apart.max(axis=0) if there else np.zeros(0)
    wrong = np.flatnonzero(~(worst <= tolerance)).tolist()
    differ = [KVPlace(i, tokens[i], int(slots[i]), int(apart[:, i].argmax()), float(worst[i])) for i in wrong]
    differ += [KVPlace(place, tokens[place], None, 0, float("inf")) for place in range(there, len(tokens))]
    return KVCompared(model, len(tokens), float(worst.max(initial=0)), tolerance, tuple(differ))


@torch.inference_mode()
def _apart(cache: KVCache, held: Slots, fresh: KVCache, table: Slots) -> NDArray[np.float32]:
    """[layers, places] how far keys or values are apart, whichever is more, relative to the fresh one's norm."""
    mine, true = (torch.from_numpy(slots).to(cache.device) for slots in (held, table))
    keys, values = (
        torch.stack([_distance(a[:, mine].float(), b[:, true].float()) for a, b in zip(*sides, strict=True)])
        for sides in ((cache.key, fresh.key), (cache.value, fresh.value))
    )
    apart: NDArray[np.float32] = torch.maximum(keys, values).cpu().numpy()
    return apart


def _distance(mine: Tensor, true: Tensor) -> Tensor:
    """[places] of [heads, places, size], relative to the norm of what is true."""
    apart, size = (x.transpose(0, 1).flatten(1).norm(dim=-1) for x in (mine - true, true))
    distance: Tensor = apart / size.clamp_min(1e-12)
    return distance
