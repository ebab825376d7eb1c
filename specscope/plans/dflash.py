"""A DFlash head's config.json, in z-lab's layout or in speculators', as vLLM 0.32 reads both.

z-lab: a Qwen3 config with `block_size` and a `dflash_config`. speculators: the layer lies in
`transformer_layer_config`, `aux_hidden_state_layer_ids` are `target_layer_ids` + 1, and `sliding_window_non_causal`
says of all layers whether they are causal (its configs/speculators/algos.py, update_dflash).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from specscope.plans import kinds
from specscope.plans.kinds import LAYER_IDS, OF_LAYERS, SLIDING, Holds

MASK_FILE = "mask_embedding.pt"  # beside the weights, where the mask token's embedding was trained by itself
MOST_ROWS = 64  # of a block
INSIDE = "dflash_config"
LAYER = "transformer_layer_config"
WINDOW = "swa_window_size"  # in dflash_config, before sliding_window
ANCHOR = "sample_from_anchor"
COMPUTED = f"""
    block_size mask_token_id target_layer_ids aux_hidden_state_layer_ids causal is_causal use_swa {WINDOW} {ANCHOR}
    sliding_window_non_causal num_target_layers has_own_lm_head
"""
KNOWN: Mapping[str, Holds] = {**OF_LAYERS, **dict.fromkeys(COMPUTED.split(), lambda _: True)}
TENSORS = re.compile(
    r"(fc|hidden_norm|norm|lm_head|embed_tokens|(midlayer|layers\.\d+)\.(self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm))\.(weight|bias)|d2t|t2d"
)
NESTED = (LAYER, INSIDE, "rope_scaling", "rope_parameters")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All of a config in one, by z-lab's names; of which layers feed it, by vLLM's: j is what enters layer j."""
    layer, inside = (part if isinstance(part := config.get(name), Mapping) else {} for name in (LAYER, INSIDE))
    whole = {**config, **layer, **inside}
    if config.get("speculators_model_type"):
        whole["causal"] = not config.get("sliding_window_non_causal", True)
    entering = config.get(LAYER_IDS) or config.get("aux_hidden_state_layer_ids")
    leaving = whole.get("target_layer_ids") or []
    return whole | {LAYER_IDS: entering or [layer + 1 for layer in leaving if isinstance(layer, int)]}


unknown_tensor = partial(kinds.unknown_tensor, known=TENSORS)


def unknown(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if names not in (None, ["DFlashDraftModel"]):
        return f"architectures = {names}"
    return next(chain(kinds.unknown_keys(config, KNOWN, NESTED), _contradictions(flat(config))), "")


def _contradictions(config: Mapping[str, Any]) -> Iterator[str]:
    kinds, layers = config.get("layer_types") or [], config.get("num_hidden_layers", 1)
    slides = SLIDING in kinds or config.get("use_swa")
    if kinds and isinstance(layers, int) and len(kinds) < layers:
        yield f"layer_types of {len(kinds)} layers, and num_hidden_layers = {layers}"
    if slides and not window_of(config):
        yield f"sliding attention without {WINDOW} or a sliding_window that is used"
    if not slides and not kinds and config.get("use_sliding_window") and window_of(config):
        yield f"sliding_window = {window_of(config)} without layer_types"


def window_of(config: Mapping[str, Any]) -> int | None:
    """How many positions a row of a layer with a window looks back, its own among them."""
    used = config.get("use_sliding_window") is not False
    window: int | None = config.get(WINDOW) or (config.get("sliding_window") if used else None)
    return window


def longest_draft(config: Mapping[str, Any]) -> int:
    """How many tokens a block drafts; 0 where the config does not say it."""
    whole = flat(config)
    block = whole.get("block_size")
    if not isinstance(block, int) or block < 1:
        return 0
    return block if whole.get(ANCHOR) else block - 1  # without an anchor the root's row holds a token that is known
