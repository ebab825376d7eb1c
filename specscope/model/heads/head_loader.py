"""EAGLE checkpoints on disk: reading those that were published, writing those that are trained here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specscope.errors import UserError, first_line
from specscope.model.heads.eagle_head import EagleHead, in_halves, read_config, rotary_of
from specscope.model.loader import LoadedModel, check_numbers, quick_meta
from specscope.model.places import head_place
from specscope.plans.heads import WEIGHTS, head_kind, weight_files

EMBEDDING = "embed_tokens.weight"
MASK_HIDDEN = "mask_hidden"
TURNED = tuple(f"self_attn.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias"))  # by position
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A head that fits its target."""

    head: Any  # an EagleHead, or a DFlashHead
    embedding: nn.Module  # token ids to [..., width]: the checkpoint's own, or the target's
    lm_head: nn.Module  # hidden states to logits over the draft vocabulary
    name: str


def load_head(folder: str, target: LoadedModel) -> LoadedHead:
    """Load a head from its folder. Raises UserError, with both shapes where it does not fit the target."""
    path = head_place(folder)
    if (kind := head_kind(path)) != "eagle":
        raise UserError(f"{path} holds no EAGLE head: it is for --drafter {kind}")
    tensors = read_tensors(path)
    is_eagle3 = "midlayer.hidden_norm.weight" in tensors or {"fc.weight", "norm.weight"} <= set(tensors)
    version = 3 if is_eagle3 else 1
    parallel = MASK_HIDDEN in tensors
    config = read_config(path, version, len(target.layers), parallel=parallel)
    if parallel:
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(1, 1, -1)  # published with one or two leading ones
    biased = {"bias": "fc.bias" in tensors, "attention_bias": "midlayer.self_attn.q_proj.bias" in tensors}
    config = dataclasses.replace(config, layer={**config.layer, **biased})
    own = tensors.pop(EMBEDDING, None)
    check_fit(config, target, own, path, as_wide=config.version == 1)
    head = unfilled(lambda: EagleHead(config), path)
    check_numbers([*tensors.items(), *([] if own is None else [(EMBEDDING, own)])], f"the head in {path}")
    _fill(head, tensors, path)
    del head.rotary
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    head.rotary = rotary_of(config).to(target.device)  # its frequencies stay float32
    output = head.lm_head if version == 3 else target.output
    return LoadedHead(head, embedding_of(own, target), output, path.resolve().name)


def unfilled(make: Callable[[], nn.Module], path: Path) -> Any:  # noqa: ANN401
    """A head without memory: none is allocated before the shapes are known to be right. Raises UserError."""
    try:
        with torch.device("meta"), quick_meta():
            return make()
    except Exception as error:
        raise UserError(f"{path}/config.json does not describe a decoder layer: {first_line(error)}") from error


def embedding_of(own: Tensor | None, target: LoadedModel) -> nn.Module:
    """The checkpoint's own, where it brings one, or the target's."""
    embedding: nn.Module = target.embedding
    return embedding if own is None else nn.Embedding.from_pretrained(own.to(target.device, target.dtype))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A head's tensors as they were published, by the authors' names. Raises UserError."""
    read, first = read_files(path), "layers.0."  # others' name of the first layer
    return {"midlayer." + name[len(first) :] if name.startswith(first) else name: x for name, x in read.items()}


def read_files(path: Path) -> dict[str, Tensor]:
    """The tensors of all weight files, by their names there. Raises UserError."""
    return {name.removeprefix("model."): x for file in weight_files(path) for name, x in _read_file(file).items()}


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has a dozen ways to say that a file is torn
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file} does not hold a state dict")
    return tensors


def check_fit(config: Any, target: LoadedModel, own: Tensor | None, path: Path, *, as_wide: bool = False) -> None:  # noqa: ANN401
    """Hold a config, and an embedding of the head's own, against the target. `as_wide`: whether the head must be."""
    width, layers = target.width, len(target.layers)
    high = [layer for layer in config.aux_layers if layer != "final" and not 0 <= layer < layers]
    wrong = ""
    if config.target_width != width:
        wrong = f"was made for hidden states of {config.target_width}, but {target.name} has {width}"
    elif config.vocab != target.vocab_size:
        wrong = f"was made for a vocabulary of {config.vocab}, but {target.name} has {target.vocab_size}"
    elif high:
        wrong = f"asks for layer {high[0]}, but {target.name} has {layers} layers"
    elif own is not None and list(own.shape) != (wanted := [config.vocab, config.width]):
        raise UserError(f"{EMBEDDING} in {path} is {list(own.shape)}, but config.json makes it {wanted}")
    elif config.width != width and (own is None or as_wide):
        wrong = f"is {config.width} wide and {target.name} {width}: it needs its own embed_tokens"
    if wrong:
        raise UserError(f"the head in {path} {wrong}")


def _fill(head: EagleHead, tensors: dict[str, Tensor], path: Path) -> None:
    """Put the tensors into the head: all that it needs, with the shapes that its config says."""
    wanted = head.state_dict()
    ignored = {"lm_head.weight", "midlayer.input_layernorm.weight"} if head.config.version == 1 else set()
    ignored |= {f"layers.{name}.hidden_norm.weight" for name in head.layers}  # vLLM's layers have one that is not used
    # t2d follows from d2t: NVIDIA's exporter leaves it out
    check_tensors(head, tensors, path, f"an EAGLE-{head.config.version}", {*wanted} - {"t2d"}, ignored)
    if "t2d" in wanted and "t2d" not in tensors:
        drafted = tensors["d2t"].long() + torch.arange(head.config.draft_vocab)
        tensors["t2d"] = torch.zeros(head.config.vocab, dtype=torch.bool).index_fill_(0, drafted, True)
    order = in_halves(head.config)
    ours = {name: _ordered(name, tensors[name], order) for name in wanted}
    head.load_state_dict({name: ours[name].to(tensor.dtype) for name, tensor in wanted.items()}, assign=True)


def _ordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Reorder the channels of each head in the projections of queries and keys; leave other tensors as they are."""
    if not name.endswith(TURNED) or torch.equal(order, torch.arange(len(order))):
        return tensor
    ordered: Tensor = tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)
    return ordered


def check_tensors(
    head: Any,  # noqa: ANN401
    tensors: Mapping[str, Tensor],
    path: Path,
    kind: str,
    needed: Set[str],
    ignored: Set[str] = frozenset(),
) -> None:
    """Refuse tensors that are missing, that such a head does not have, or of another shape than is wanted."""
    wanted = head.state_dict()
    missing, extra = sorted(needed - {*tensors}), sorted({*tensors} - {*wanted} - ignored - {"d2t", "t2d"})
    what = [f"lacks {missing[0]}"] if missing else []
    what += [f"has {extra[0]}, which {kind} head does not have"] if extra else []
    if what:
        raise UserError(f"the head in {path} " + " and ".join(what))
    for name, tensor in wanted.items():
        if name in tensors and tensor.shape != tensors[name].shape:
            held, made = list(tensors[name].shape), list(tensor.shape)
            raise UserError(f"{name} in {path} is {held}, but config.json makes it {made}")
    _check_maps(tensors, head.config.draft_vocab, head.config.vocab, path)


def _check_maps(tensors: Mapping[str, Tensor], size: int, vocab: int, path: Path) -> None:
    """Refuse d2t and t2d unless they agree on which of the target's tokens each of `size` draft tokens is."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    wrong = ""
    if d2t is not None and (d2t.dtype not in INTEGERS or d2t.shape != (size,)):
        wrong = f"d2t in {path} is {_kind(d2t)}: it must be whole numbers, [{size}], one per draft token"
    elif d2t is not None:
        tokens = d2t.long() + torch.arange(size)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            wrong = f"d2t in {path} contains tokens outside the target's vocabulary"
        elif len(tokens.unique()) != len(tokens):
            wrong = f"d2t in {path} gives two draft tokens the same token of the target"
        elif size == vocab and bool(d2t.any()):
            wrong = f"d2t in {path} must be zeros: the vocabulary is not reduced"
    if not wrong and t2d is not None:
        if t2d.dtype not in (torch.bool, *INTEGERS) or t2d.shape != (vocab,):
            wrong = f"t2d in {path} is {_kind(t2d)}: it must be true or false, [{vocab}]"
        elif d2t is not None and not torch.equal(t2d.bool().nonzero()[:, 0], tokens.sort().values):
            wrong = f"t2d in {path} and d2t name different tokens"
    if wrong:
        raise UserError(wrong)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def published_tensors(head: EagleHead) -> dict[str, Tensor]:
    """A head's tensors as they are published, by the authors' names: channels in the order of the checkpoint."""
    order = in_halves(head.config).argsort()
    return {name: _ordered(name, x, order) for name, x in head.state_dict().items()}


def save_head(head: EagleHead, folder: Path) -> None:
    """Write a head, but for P-EAGLE's, as the EAGLE-3 authors publish theirs, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    published = published_tensors(head).items()
    tensors = {name: (x.bfloat16() if x.is_floating_point() else x).contiguous().clone() for name, x in published}
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    told = {**head.config.to_dict(), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")
