"""What lies in the two folders, before anything runs: weights and settings of the head in training and as served."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specscope.errors import UserError, first_line
from specscope.model.heads.eagle_head import llama_config
from specscope.model.heads.head_config import PARTIAL, HeadConfig
from specscope.model.heads.head_loader import EMBEDDING, LoadedHead, load_head, published_tensors, read_tensors
from specscope.model.loader import LoadedModel
from specscope.plans.heads import LAYER_IDS

STATE = "training.pt"  # what `specscope train` goes on from
LAYER = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act"),
    "attention_bias",
)


@dataclass(frozen=True)
class FolderDifference:
    """A tensor or a setting that is not the same on both sides."""

    key: str  # "weights: midlayer.mlp.up_proj.weight", "config: rope_theta"
    sentence: str


@dataclass(frozen=True)
class Trained:
    """A head as its training left it, in the numbers of the dtype that is served."""

    loaded: LoadedHead
    weights: str  # where they come from: "training.pt", "model.safetensors"


def read_trained(folder: str, target: LoadedModel, dtype: torch.dtype) -> Trained:
    """The head of a training run's folder. `dtype`: to which its weights are rounded, as exporting does.

    Raises UserError where there is none.
    """
    loaded = load_head(folder, target)
    path = Path(folder).expanduser()
    head = copy.deepcopy(loaded.head)
    state = path / STATE
    if state.is_file():
        _fill(head, state)
    own = loaded.embedding is not target.embedding
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.data = parameter.data.to(dtype).float()
    embedding = loaded.embedding
    if own:
        embedding = nn.Embedding.from_pretrained(weight_of(embedding).to(dtype).float())
    made = replace(loaded, head=head, embedding=embedding)
    return Trained(made, STATE if state.is_file() else "published weights")


def _fill(head: nn.Module, state: Path) -> None:
    """Put the weights of an interrupted or ended run into a head. Raises UserError."""
    try:
        tensors = torch.load(state, map_location="cpu", weights_only=True)["head"]
        head.load_state_dict(tensors)
    except Exception as error:  # torch.load has a dozen ways to say that a file is torn
        raise UserError(f"{state} holds no state of this head's training: {first_line(error)}") from error


def served_dtype(folder: str) -> torch.dtype:
    """The dtype of a head's published weights. Raises UserError."""
    return next(x.dtype for x in read_tensors(Path(folder).expanduser()).values() if x.is_floating_point())


def weight_differences(trained: LoadedHead, served: LoadedHead, dtype: torch.dtype) -> Iterator[FolderDifference]:
    """Tensors of the served head that are not the trainer's, by more than rounding to `dtype`."""
    ours, theirs = (tensors_of(loaded) for loaded in (trained, served))
    for name, right in ours.items():
        tensor = theirs.get(name)
        key = f"weights: {name}"
        if tensor is None:
            yield FolderDifference(key, f"{name} is in the checkpoint, and not in the served head")
        elif tensor.shape != right.shape:
            yield FolderDifference(
                key, f"{name} is {list(tensor.shape)} in the served head, {list(right.shape)} in training"
            )
        elif right.is_floating_point():
            error = float((tensor - right).norm() / right.norm().clamp_min(1e-30))
            if error > torch.finfo(dtype).eps:
                yield FolderDifference(key, f"{name} differs (relative {error:.2g})")
        elif not torch.equal(tensor, right):
            count = int((tensor != right).sum())
            yield FolderDifference(key, f"{name} differs at {count:,} of {right.numel():,} tokens")
    for name in theirs.keys() - ours.keys():
        yield FolderDifference(f"weights: {name}", f"{name} is in the served head, and not in the checkpoint")


def tensors_of(loaded: LoadedHead) -> dict[str, Tensor]:
    """By published names, the embedding that it uses among them."""
    return {EMBEDDING: weight_of(loaded.embedding), **published_tensors(loaded.head)}


def weight_of(module: nn.Module) -> Tensor:
    """A module's weight in float32."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.detach().float()


def setting_differences(trained: HeadConfig, served: HeadConfig) -> Iterator[FolderDifference]:
    """Settings that change what is computed, and are not the same, by their keys."""
    ours, theirs = settings(trained), settings(served)
    for key in (*ours, *(key for key in theirs if key not in ours)):
        right, value = ours.get(key), theirs.get(key)
        if value != right:
            yield FolderDifference(
                f"config: {key}", f"{key} is {_shown(value)} in the served head, {_shown(right)} in training"
            )


def settings(config: HeadConfig) -> dict[str, Any]:
    """What a head's config comes to, by its keys: what is left out has its default."""
    llama: Any = llama_config(config)
    rope = {key: value for key, value in (llama.rope_parameters or {}).items() if key != PARTIAL}
    return {
        "num_hidden_layers": config.layers,
        "draft_vocab_size": config.draft_vocab,
        LAYER_IDS: list(config.aux_layers),
        **config.flags,
        "head_dim": config.head_size,
        **{key: getattr(llama, key) for key in LAYER},
        **rope,
        PARTIAL: round(config.turned / config.head_size, 6),
        "sliding_window": list(config.windows),
        **({} if config.parallel is None else {"mask_token_id": config.parallel.mask_token}),
    }


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
