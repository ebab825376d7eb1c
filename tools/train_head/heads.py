"""Heads to start a training from: new ones, and earlier ones to continue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.model.heads.eagle_head import EagleHead, HeadConfig
from specscope.model.heads.head_runner import load_head
from specscope.model.loader import LoadedModel
from specscope.model.runner import published_aux_layers
from tools.train_head.scores import TargetTensors
from tools.train_head.shards import Shards

DRAFT_VOCAB = 8192  # of a new head


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a training run besides the data."""

    draft_vocab: int | None = None  # None: heads.DRAFT_VOCAB for a new head; a continued head keeps its own
    epochs: float = 4.0
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    seed: int = 0
    start: str = ""  # the folder of a head to continue from; "" for a new one
    steps: int = 3  # training-time test: passes of the head over its own outputs


def new_head(
    target: LoadedModel, data: Shards, samples: Sequence[int], recipe: Recipe
) -> tuple[EagleHead, TargetTensors]:
    """A head of the target's width for the commonest tokens of the data; its LM head starts from the target's rows."""
    counts = data.counts(target.vocab_size, samples)
    size = min(recipe.draft_vocab or DRAFT_VOCAB, target.vocab_size)
    chosen = commonest(counts, size).to(target.device)
    torch.manual_seed(recipe.seed)
    config = head_config(target, size)
    head = EagleHead(config).to(target.device)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, 0.02)
        rows = target.output.weight[chosen].float()
        head.lm_head.weight.copy_(rows)
        _start_from_the_last_tap(head, data, samples)
        if size != target.vocab_size:
            head.set_vocabulary(chosen)
    return head, TargetTensors(target.embedding.weight.float(), rows)


def going_on(
    target: LoadedModel, data: Shards, samples: Sequence[int], recipe: Recipe
) -> tuple[EagleHead, TargetTensors]:
    """The head in the recipe's `start`. Raises UserError where its shape differs.

    It keeps every token that it drafts; where `draft_vocab` is larger, the commonest of the others join.
    """
    loaded = load_head(recipe.start, target)
    head = loaded.head.float().requires_grad_(True)
    wanted, current = head_config(target, head.config.draft_vocab), head.config
    alike = current.layer.items() >= wanted.layer.items() and replace(current, layer=wanted.layer) == wanted
    if not alike or id(loaded.embedding) != id(target.embedding) or any(current.windows):
        raise UserError(f"{recipe.start}: this is another kind of head than these: start a new one")
    size = max(min(recipe.draft_vocab or 0, target.vocab_size), current.draft_vocab)
    if size != current.draft_vocab:
        config = replace(current, layer={name: current.layer[name] for name in wanted.layer}, draft_vocab=size)
        head = remade(head, config, target, data.counts(target.vocab_size, samples))
    tokens = head.target_tokens()
    rows = target.output.weight[slice(None) if tokens is None else tokens]
    return head, TargetTensors(target.embedding.weight.float(), rows.float())


def commonest(counts: Tensor, size: int) -> Tensor:
    """The tokens with the highest counts, int64 [size], ascending; of equal counts the lower token."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def remade(head: EagleHead, config: HeadConfig, target: LoadedModel, counts: Tensor) -> EagleHead:
    """A head of `config` with a head's weights: its own tokens, and the commonest of the others where it has more.

    Rows of new tokens start from the target's. counts int64 [vocabulary].
    """
    made = EagleHead(config).to(target.device)
    weights = {name: x for name, x in head.state_dict().items() if name in made.state_dict()}
    had = head.target_tokens()
    if had is not None and config.draft_vocab > len(had):
        others = counts.clone()
        others[had.cpu()] = -1  # below every other token
        new = commonest(others, config.draft_vocab - len(had)).to(had.device)
        tokens, order = torch.cat([had, new]).sort()
        weights["lm_head.weight"] = torch.cat([head.lm_head.weight.detach(), target.output.weight[new].float()])[order]
        weights = {name: x for name, x in weights.items() if name not in ("d2t", "t2d")}
        if config.draft_vocab != target.vocab_size:
            made.set_vocabulary(tokens)
    made.load_state_dict(weights, strict=False)
    return made


def _start_from_the_last_tap(head: EagleHead, data: Shards, samples: Sequence[int]) -> None:
    """Let the highest layer's feature pass through `fc` unchanged, in the basis that the target's LM head reads.

    All are scaled by their size in the data (the median over tokens: a few tokens have features a thousand times as
    large), so that the residual stream begins near 1 and the layer's own output counts from the first step on.
    """
    width, aux_layers = head.config.target_width, len(head.config.aux_layers)
    some = torch.cat([data[i].features for i in samples[:64]]).float().view(-1, aux_layers, width)
    sizes = some.pow(2).mean(-1).sqrt().median(0).values.tolist()
    for aux_layer, size in enumerate(sizes):
        block = head.fc.weight[:, aux_layer * width : (aux_layer + 1) * width]
        if aux_layer == aux_layers - 1:
            torch.nn.init.eye_(block)
            block /= size
        else:
            block.normal_(0, 0.3 / (size * math.sqrt(width)))


def head_config(target: LoadedModel, draft_vocab: int) -> HeadConfig:
    """A Llama layer with the target's sizes."""
    config: Any = target.model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    layer = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_context,
        "vocab_size": target.vocab_size,
        "rope_theta": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": target.eos[0] if target.eos else None,
        "pad_token_id": 0,
    }
    return HeadConfig(3, layer, config.hidden_size, draft_vocab, published_aux_layers(len(target.layers)))
