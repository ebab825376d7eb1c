"""What the config.json of a published EAGLE head says, by whichever of the published conventions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specscope.errors import UserError
from specscope.model.features import Tap, published_taps

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class HeadConfig:
    """One EAGLE head. Filled by `read_config`, or by training."""

    version: int  # 3: EAGLE-3; 1: EAGLE and EAGLE-2, whose heads are the same
    layer: Mapping[str, Any]  # sizes, rotary and norms, by the names of a Llama config
    target_width: int  # of a hidden state of the target
    draft_vocab: int  # tokens that the head can draft; the target's vocabulary where it is not reduced
    taps: tuple[Tap, ...]
    norm_before_residual: bool = False  # the residual is the normalised feature: a variant of EAGLE-3

    @property
    def width(self) -> int:
        """Of the head's own hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def vocab(self) -> int:
        """The target's vocabulary."""
        return int(self.layer["vocab_size"])

    def to_dict(self) -> dict[str, Any]:
        """A config.json as the EAGLE-3 authors publish it, with what vLLM and SGLang read besides."""
        return {
            **self.layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": self.target_width,
            "norm_before_residual": self.norm_before_residual,
            LAYER_IDS: list(self.taps),
        }


def read_config(folder: Path, version: int, target_layers: int) -> HeadConfig:
    """Read a head's config.json. `version` follows from its tensors. Raises UserError."""
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{folder} is not an EAGLE head: cannot read its config.json ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{folder}/config.json is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{folder}/config.json is not a JSON object")
    layer = {**raw, **(raw.get("transformer_layer_config") or {})}  # the nested one: vLLM's speculators format
    wrong = [name for name in NEEDED if not isinstance(layer.get(name), int) or layer[name] < 1]
    if wrong:
        raise UserError(f"{folder}/config.json lacks {', '.join(wrong)}, or they are not sizes")
    for name in ("target_hidden_size", "draft_vocab_size"):
        if not isinstance(raw.get(name) or 1, int):
            raise UserError(f"{folder}/config.json: {name} is not a number")
    return HeadConfig(
        version=version,
        layer=layer,
        target_width=int(raw.get("target_hidden_size") or layer["hidden_size"]),
        draft_vocab=int(raw.get("draft_vocab_size") or layer["vocab_size"]),
        taps=read_taps(raw, target_layers) if version == 3 else ("final",),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def read_taps(raw: Mapping[str, Any], target_layers: int) -> tuple[Tap, ...]:
    """Which layers feed an EAGLE-3 head.

    `eagle_aux_hidden_state_layer_ids` is vLLM's: j is what enters layer j. Inside `eagle_config` it is SGLang's: j is
    what leaves layer j, which enters j + 1. Where neither is given, the authors' rule.
    """
    nested = raw.get("eagle_config")
    for ids, shift in (
        (raw.get(LAYER_IDS), 0),
        (nested.get(LAYER_IDS) if isinstance(nested, dict) else None, 1),
    ):
        if ids:
            if not isinstance(ids, list) or not all(isinstance(j, int) for j in ids):
                raise UserError(f"the head's config names the target's layers {ids}: it must be a list of numbers")
            return tuple(j + shift for j in ids)
    return published_taps(target_layers)
