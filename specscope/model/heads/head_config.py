"""What the config.json of a published EAGLE head says, by whichever of the published conventions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from specscope.errors import UserError
from specscope.model.checkpoint import Size
from specscope.model.features import AuxLayer, published_aux_layers
from specscope.plans.heads import FLAGS, SLIDING, flattened, layer_ids
from specscope.whole_file import read_object

PARTIAL = "partial_rotary_factor"
ROPES = ("rope_parameters", "rope_scaling")  # where it may be told too


@dataclass(frozen=True)
class HeadConfig:
    """One EAGLE head. Filled by `read_config`, or by training."""

    version: int  # 3: EAGLE-3; 1: EAGLE and EAGLE-2, whose heads are the same
    layer: Mapping[str, Any]  # sizes, rotary and norms, by the names of a Llama config
    target_width: int  # of a hidden state of the target
    draft_vocab: int  # tokens that the head can draft; the target's vocabulary where it is not reduced
    aux_layers: tuple[AuxLayer, ...]
    norm_before_residual: bool = False  # the residual is the normalised feature: a variant of EAGLE-3
    # EAGLE-3.1: the state that is fed to the next depth is the normalised one, and so are features: all together, or
    # each layer's by itself
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    mask_token: int | None = (
        None  # P-EAGLE, which drafts all depths in one pass: the token of every row below the root's
    )

    @property
    def width(self) -> int:
        """Width of the head's own hidden states."""
        return int(self.layer["hidden_size"])

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.layer.get("num_hidden_layers", 1))

    @property
    def vocab(self) -> int:
        """The target's vocabulary."""
        return int(self.layer["vocab_size"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each decoder layer, how many positions a query looks back, including its own; None: all."""
        kinds, window = self.layer.get("layer_types") or [], self.layer.get("sliding_window")
        return tuple(window if SLIDING in kinds[i : i + 1] else None for i in range(self.layers))

    @property
    def head_size(self) -> int:
        """Channels of a query head."""
        return int(self.layer.get("head_dim") or self.width // int(self.layer["num_attention_heads"]))

    @property
    def turned(self) -> int:
        """How many of a head's first channels are rotated by position; the others are not."""
        ropes = (*(self.layer.get(name) for name in ROPES), self.layer)
        given = (rope.get(PARTIAL) for rope in ropes if rope)
        return int(self.head_size * next((share for share in given if share is not None), 1))

    @property
    def flags(self) -> dict[str, bool]:
        """The parts of its arithmetic that config.json switches on or off."""
        return {name: getattr(self, name) for name in FLAGS}

    def to_dict(self) -> dict[str, Any]:
        """A config.json as the EAGLE-3 authors publish it, with what vLLM and SGLang read too. Not a P-EAGLE head's."""
        return {
            **self.layer,
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "tie_word_embeddings": False,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": self.target_width,
            **self.flags,
            **layer_ids(self.aux_layers),
        }


class LayerJson(msgspec.Struct):
    """What must hold of the numbers that describe the layer. Other keys are transformers' to check."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    rms_norm_eps: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-6
    rope_theta: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    max_position_embeddings: Size | None = None
    hidden_act: str = "silu"
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    sliding_window: Size | None = None
    layer_types: list[str] | None = None


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Ids = list[Annotated[int, msgspec.Meta(ge=0, le=4096)]]


class SglangJson(msgspec.Struct):
    """`eagle_config`, as SGLang writes it."""

    eagle_aux_hidden_state_layer_ids: list[Annotated[int, msgspec.Meta(ge=-1, le=4096)]] | None = None


class HeadJson(msgspec.Struct):
    """What must hold of the rest of a head's config.json."""

    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    transformer_layer_config: dict[str, Any] | None = None  # the layer, nested: vLLM's speculators format
    eagle_aux_hidden_state_layer_ids: Ids | None = None
    eagle_config: SglangJson | None = None
    mask_token_id: TokenId | None = None  # P-EAGLE: speculators' name, and two more that vLLM reads
    pard_token: TokenId | None = None
    ptd_token_id: TokenId | None = None


def read_config(folder: Path, version: int, target_layers: int, *, parallel: bool = False) -> HeadConfig:
    """Read a head's config.json. `version`, and whether it is a P-EAGLE head, follow from its tensors.

    Raises UserError.
    """
    layer = flattened(read_object(folder / "config.json"))
    none = f"{folder}/config.json does not describe an EAGLE head"
    try:
        head_json = msgspec.convert(layer, HeadJson)
        sizes = msgspec.convert(layer, LayerJson)
    except msgspec.ValidationError as error:
        raise UserError(f"{none}: {error}") from None
    flags = {name: bool(getattr(head_json, name)) for name in FLAGS}
    if version == 1 and sizes.num_hidden_layers > 1:
        raise UserError(f"{folder}/config.json says {sizes.num_hidden_layers} layers: an EAGLE-1 head has one")
    if version == 1 and any(flags.values()):
        on = next(name for name, value in flags.items() if value)
        raise UserError(f"{folder}/config.json has `{on}`, which an EAGLE-1 head does not have")
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads or sizes.num_attention_heads
    size = sizes.head_dim or sizes.hidden_size // heads
    if size < 2 or size % 2 or heads % kv_heads:
        raise UserError(f"{none}: {heads} query and {kv_heads} key heads of {size}")
    config = HeadConfig(
        version=version,
        layer=layer,
        target_width=head_json.target_hidden_size or sizes.hidden_size,
        draft_vocab=head_json.draft_vocab_size or sizes.vocab_size,
        aux_layers=_aux_layers(head_json, target_layers) if version == 3 else ("final",),
        mask_token=_mask_token(head_json, sizes.vocab_size, folder) if parallel else None,
        **flags,
    )
    try:
        turned = config.turned
    except (TypeError, ValueError, OverflowError):
        turned = 0
    if not 2 <= turned <= size or turned % 2:
        raise UserError(f"{none}: {PARTIAL} must leave an even number of the {size} channels of a head")
    return config


def _mask_token(head_json: HeadJson, vocab: int, folder: Path) -> int:
    """The token of a P-EAGLE head's mask rows, looked up in vLLM 0.33's order."""
    tokens = (head_json.mask_token_id, head_json.pard_token, head_json.ptd_token_id)
    token = next((token for token in tokens if token is not None), None)
    if token is None or token >= vocab:
        wrong = "names no mask token" if token is None else f"names mask token {token} in a vocabulary of {vocab}"
        raise UserError(f"{folder}/config.json {wrong}: a P-EAGLE head needs mask_token_id, pard_token or ptd_token_id")
    return token


def _aux_layers(head_json: HeadJson, target_layers: int) -> tuple[AuxLayer, ...]:
    """Which layers feed an EAGLE-3 head.

    `eagle_aux_hidden_state_layer_ids` is vLLM's: j is what enters layer j. Inside `eagle_config` it is SGLang's: j is
    what leaves layer j, which enters j + 1. Where neither is given, the authors' rule.
    """
    if head_json.eagle_aux_hidden_state_layer_ids:
        return tuple(head_json.eagle_aux_hidden_state_layer_ids)
    if head_json.eagle_config is not None and head_json.eagle_config.eagle_aux_hidden_state_layer_ids:
        return tuple(j + 1 for j in head_json.eagle_config.eagle_aux_hidden_state_layer_ids)
    return published_aux_layers(target_layers)
