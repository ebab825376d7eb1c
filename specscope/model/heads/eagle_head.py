"""EAGLE heads: decoder layers that continue the target's hidden states. Trained and run from the same modules.

A head works on pairs: the feature of position t and the token at t + 1 give the token at t + 2. EAGLE-3 (Li et al.
2025) joins features of three layers through `fc`, attends over [embedding, feature] and has a norm and a head of its
own over a reduced vocabulary. P-EAGLE (Hui et al. 2026, arXiv 2602.01469) is an EAGLE-3 head that drafts all depths in
one pass, behind the root's pair from rows of a mask token and a learned feature. EAGLE and EAGLE-2 (Li et al. 2024)
join embedding and feature through `fc` and use the target's head. Layers after the first are plain ones over its hidden
states. Module names are those of the published checkpoints; config.json is read by whichever of the published
conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specscope.errors import UserError
from specscope.model.loader import Size
from specscope.model.runner import AuxLayer, published_aux_layers
from specscope.plans.kinds import FLAGS, LAYER_IDS, SLIDING, flattened, layer_ids
from specscope.whole_file import read_object


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
    mask_token: int | None = None  # P-EAGLE, all depths in one pass: the token of every row below the root's

    @property
    def width(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def layers(self) -> int:
        return int(self.layer.get("num_hidden_layers", 1))

    @property
    def vocab(self) -> int:
        return int(self.layer["vocab_size"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each decoder layer, how many positions a query looks back, including its own; None: all."""
        kinds, window = self.layer.get("layer_types") or [], self.layer.get("sliding_window")
        return tuple(window if SLIDING in kinds[i : i + 1] else None for i in range(self.layers))

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


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class SglangJson(msgspec.Struct):
    """`eagle_config`, as SGLang writes it."""

    eagle_aux_hidden_state_layer_ids: list[Annotated[int, msgspec.Meta(ge=-1, le=4096)]] | None = None


class HeadJson(msgspec.Struct):
    """What must hold of a head's config.json, flattened. Other keys are transformers' to check."""

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
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: list[Annotated[int, msgspec.Meta(ge=0, le=4096)]] | None = None
    mask_token_id: TokenId | None = None  # speculators' name, and two more that vLLM reads
    # An EAGLE head's
    pard_token: TokenId | None = None
    ptd_token_id: TokenId | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    eagle_config: SglangJson | None = None
    # A DFlash head's
    swa_window_size: Size | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None


def read_config(folder: Path, version: int, target_layers: int, *, parallel: bool = False) -> HeadConfig:
    """Read a head's config.json. `version`, and whether it is a P-EAGLE head, follow from its tensors.

    Raises UserError.
    """
    layer = flattened(read_object(folder / "config.json"))
    none = f"{folder}/config.json does not describe an EAGLE head"
    try:
        told = msgspec.convert(layer, HeadJson)
    except msgspec.ValidationError as error:
        raise UserError(f"{none}: {error}") from None
    flags = {name: bool(getattr(told, name)) for name in FLAGS}
    if version == 1 and told.num_hidden_layers > 1:
        raise UserError(f"{folder}/config.json says {told.num_hidden_layers} layers: an EAGLE-1 head has one")
    nested = told.eagle_config and told.eagle_config.eagle_aux_hidden_state_layer_ids
    reduced = told.draft_vocab_size not in (None, told.vocab_size)
    of_eagle3 = {**flags, LAYER_IDS: told.eagle_aux_hidden_state_layer_ids or nested, "draft_vocab_size": reduced}
    if version == 1 and (on := next((name for name, value in of_eagle3.items() if value), "")):
        raise UserError(f"{folder}/config.json has `{on}`, which an EAGLE-1 head does not have")
    heads, kv_heads = told.num_attention_heads, told.num_key_value_heads or told.num_attention_heads
    size = told.head_dim or told.hidden_size // heads
    if size < 2 or size % 2 or heads % kv_heads:
        raise UserError(f"{none}: {heads} query and {kv_heads} key heads of {size}")
    return HeadConfig(
        version=version,
        layer=layer,
        target_width=told.target_hidden_size or told.hidden_size,
        draft_vocab=told.draft_vocab_size or told.vocab_size,
        aux_layers=_aux_layers(told, target_layers) if version == 3 else ("final",),
        mask_token=_mask_token(told, told.vocab_size, folder) if parallel else None,
        **flags,
    )


def _mask_token(told: HeadJson, vocab: int, folder: Path) -> int:
    """The token of a P-EAGLE head's mask rows, looked up in vLLM 0.33's order."""
    tokens = (told.mask_token_id, told.pard_token, told.ptd_token_id)
    token = next((token for token in tokens if token is not None), None)
    if token is None or token >= vocab:
        wrong = "names no mask token" if token is None else f"names mask token {token} in a vocabulary of {vocab}"
        raise UserError(f"{folder}/config.json {wrong}: a P-EAGLE head needs mask_token_id, pard_token or ptd_token_id")
    return token


def _aux_layers(told: HeadJson, target_layers: int) -> tuple[AuxLayer, ...]:
    """Which layers feed an EAGLE-3 head.

    `eagle_aux_hidden_state_layer_ids` is vLLM's: j is what enters layer j. Inside `eagle_config` it is SGLang's: j is
    what leaves layer j, which enters j + 1. Where neither is given, the authors' rule.
    """
    if told.eagle_aux_hidden_state_layer_ids:
        return tuple(told.eagle_aux_hidden_state_layer_ids)
    if told.eagle_config is not None and told.eagle_config.eagle_aux_hidden_state_layer_ids:
        return tuple(j + 1 for j in told.eagle_config.eagle_aux_hidden_state_layer_ids)
    return published_aux_layers(target_layers)


def head_layer(config: LlamaConfig, version: int, index: int = 0) -> Any:  # noqa: ANN401
    """A decoder layer. In the first, EAGLE-3 normalises embedding and feature separately; EAGLE neither of them."""
    layer: Any = LlamaDecoderLayer(config, index)
    attention = layer.self_attn
    attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
    if version == 1:
        layer.input_layernorm = nn.Identity()
    elif index == 0:
        layer.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            out = attention.get_submodule(name).out_features
            attention.set_submodule(name, nn.Linear(2 * config.hidden_size, out, bias=config.attention_bias))
    return layer


class EagleHead(nn.Module):
    """A head without its embedding, which is the target's unless the checkpoint brings one.

    `d2t` holds for each draft token the target's token minus its own number; `t2d` says which tokens of the target
    can be drafted. Both are absent where the vocabulary is not reduced.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        llama = llama_config(config)
        joined = len(config.aux_layers) * config.target_width if config.version == 3 else 2 * config.width
        self.fc = nn.Linear(joined, config.width, bias=config.version == 1 and bool(config.layer.get("bias", True)))
        self.midlayer = head_layer(llama, config.version)
        self.layers = nn.ModuleDict({str(i): head_layer(llama, 3, i) for i in range(1, config.layers)})
        self.rotary = LlamaRotaryEmbedding(llama)
        if config.version == 3:
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(joined, llama.rms_norm_eps)
            if config.fc_norm:
                each = (LlamaRMSNorm(config.target_width, llama.rms_norm_eps) for _ in config.aux_layers)
                self.fc_norm = nn.ModuleList(each)
            self.norm = LlamaRMSNorm(config.width, llama.rms_norm_eps)
            self.lm_head = nn.Linear(config.width, config.draft_vocab, bias=False)
            if config.mask_token is not None:
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, joined))
            if config.draft_vocab != config.vocab:
                self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
                self.register_buffer("t2d", torch.zeros(config.vocab, dtype=torch.bool))

    def set_vocabulary(self, tokens: Tensor) -> None:
        """Say which tokens of the target the head drafts: int64 [draft vocabulary], ascending."""
        d2t: Tensor = self.d2t  # type: ignore[assignment]
        t2d: Tensor = self.t2d  # type: ignore[assignment]
        d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        t2d.zero_()
        t2d[tokens] = True

    def target_tokens(self) -> Tensor | None:
        """int64 [draft vocabulary] the target's token behind each draft token; None where they are the same."""
        d2t: Tensor | None = getattr(self, "d2t", None)
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def combine(self, features: Tensor) -> Tensor:
        """Features [..., aux_layers * target width] as hidden states [..., width]; EAGLE takes them as they are."""
        return self.fc(self.before_fc(features)) if self.config.version == 3 else features

    def before_fc(self, features: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            return self.input_norm(features)  # type: ignore[no-any-return]
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return features

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the vocabulary's projection takes, and what the next depth is fed, of a residual stream [..., width]."""
        normed = self.norm(x) if self.config.version == 3 else x
        return normed, normed if self.config.norm_output else x

    def prepare(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream [..., width], what attention projects) of embeddings and hidden states [..., width]."""
        if self.config.version == 1:
            joined = self.fc(torch.cat([embedding, hidden], dim=-1))
            return joined, joined
        normed = self.midlayer.hidden_norm(hidden)
        both = torch.cat([self.midlayer.input_layernorm(embedding), normed], dim=-1)
        return (normed if self.config.norm_before_residual else hidden), both


def llama_config(config: HeadConfig) -> LlamaConfig:
    """A layer of the head as transformers' modules want it."""
    further = ("architectures", "torch_dtype", "dtype", "layer_types")  # layer_types: of another number of layers
    layer = {key: value for key, value in config.layer.items() if key not in further}
    return LlamaConfig.from_dict({**layer, "num_hidden_layers": 1})
