"""EAGLE heads: read from disk as they were published, and run over a paged KV cache, a pass over a ragged batch."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specscope.errors import UserError, first_line
from specscope.model.attention import Variant
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import ROWS, FusedLayer, Rotary, fuse_norms
from specscope.model.fast.linear import PackedLinear, compiled_rows, may_pack, same_numbers
from specscope.model.graphs import Graphs
from specscope.model.heads.eagle_head import EagleHead, llama_config, read_config
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, KVCache, LayerShape
from specscope.model.loader import LoadedModel, check_numbers, quick_meta
from specscope.model.places import Backend, head_place
from specscope.plans.kinds import WEIGHTS, head_kind, weight_files

EMBEDDING = "embed_tokens.weight"
MASK_HIDDEN = "mask_hidden"
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
    head.rotary = LlamaRotaryEmbedding(llama_config(config)).to(target.device)  # its frequencies stay float32
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
    tensors = {"midlayer." + name[len(first) :] if name.startswith(first) else name: x for name, x in read.items()}
    if len(tensors) < len(read):
        raise UserError(f"the head in {path} has tensors of its first layer by two names: midlayer. and {first}")
    return tensors


def read_files(path: Path) -> dict[str, Tensor]:
    """The tensors of all weight files, by their names there. Raises UserError."""
    tensors = {name.removeprefix("model."): x for file in weight_files(path) for name, x in _read_file(file).items()}
    for name, x in tensors.items():
        if name not in ("d2t", "t2d") and (not x.is_floating_point() or x.element_size() == 1):
            raise UserError(f"{name} in {path} is {x.dtype}: a head's weights must be float32, bfloat16 or float16")
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = read_saved(file)
    except Exception as error:  # torch.load has a dozen ways to say that a file is torn
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file} does not hold a state dict")
    return tensors


def read_saved(file: Path) -> Any:  # noqa: ANN401
    """What torch.save wrote, weights alone, without torch's warnings of what is then refused."""
    with warnings.catch_warnings(action="ignore"):
        return torch.load(file, map_location="cpu", weights_only=True)


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
    head.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in wanted.items()}, assign=True)


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
    tokens = torch.arange(size)
    if d2t is not None:
        if d2t.dtype not in INTEGERS or d2t.shape != (size,):
            raise UserError(f"d2t in {path} is {_kind(d2t)}: it must be whole numbers, [{size}], one per draft token")
        tokens = tokens + d2t.long()
        inside = 0 <= int(tokens.min()) <= int(tokens.max()) < vocab
        if not inside or len(tokens.unique()) != size or (size == vocab and bool(d2t.any())):
            raise UserError(f"d2t in {path} must give each of {size} draft tokens another one of the target's {vocab}")
    if t2d is not None and (t2d.shape != (vocab,) or not torch.equal(t2d.nonzero()[:, 0], tokens.sort().values)):
        raise UserError(f"t2d in {path} is {_kind(t2d)}: it must be true, [{vocab}], at the tokens that d2t names")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def save_head(head: EagleHead, folder: Path) -> None:
    """Write a head, but for P-EAGLE's, as the EAGLE-3 authors publish theirs, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    brief = lambda x: x.bfloat16() if x.is_floating_point() else x  # noqa: E731
    tensors = {name: brief(x).contiguous().clone() for name, x in head.state_dict().items()}
    save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})
    told = {**head.config.to_dict(), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n")


class LayersRunner:
    """The decoder layers of a head over a paged KV cache of their own, and its projections: as fast as runs here."""

    def __init__(
        self,
        loaded: LoadedHead,
        layers: Sequence[Any],
        shape: LayerShape,  # of each
        rotary: nn.Module,
        target: LoadedModel,
        blocks: int,
        backend: Backend,
    ) -> None:
        head, weight = loaded.head, loaded.head.fc.weight
        self.loaded, self.head, self.vocab_size = loaded, head, target.vocab_size
        kind: Any = type(self)
        self.beside = partial(kind, loaded, target, backend=backend)  # with another cache, of so many blocks
        self.d2t, self.aux_layers = head.target_tokens(), head.config.aux_layers
        self.cache = KVCache([shape] * len(layers), blocks, weight.dtype, weight.device, backend)
        pack = weight.device.type == "cpu" and may_pack(head)
        self._max_rows = compiled_rows(weight.dtype) if pack else 0  # of our own kernels for processors
        if self._max_rows:
            fuse_norms(head)
        variants = [Variant(shape.key_size**-0.5, window, None, None) for window in head.config.windows]
        of = zip(layers, variants, strict=True)
        self.layers = [FusedLayer(layer, shape, variant, None, pack=pack) for layer, variant in of]
        own = hasattr(head, "lm_head")
        self.lm_head: nn.Module = PackedLinear([head.lm_head], pack=pack) if own else loaded.lm_head
        self.fc = PackedLinear([head.fc], pack=pack)
        # No position lies beyond the cache, whatever context a config promises.
        positions = torch.arange(min(target.max_context, blocks * BLOCK_SIZE), device=weight.device)[None]
        # cos and sin of every position as the layers use them, side by side: [positions, 2, 1, 2, size / 2]
        self._turns = torch.stack(Rotary()(*rotary(weight, positions)), dim=1)
        if not self._turns.isfinite().all():
            raise UserError(f"the head {loaded.name} has rotations that are no numbers: see its rope_scaling")

    def rotation(self, batch: Batch) -> tuple[Tensor, Tensor]:
        cos, sin = self._turns[batch.positions[0]].unbind(1)
        return cos, sin

    def compile(self, trial: Callable[[], Tensor], *, first_norm: bool = True) -> None:
        """Compile the layers, where a pass over a few rows, `trial`, then comes out alike. Before the cache is used.

        `first_norm`: whether the first layer begins with a norm.
        """
        if not self._max_rows:
            return
        plain = trial()
        for index, layer in enumerate(self.layers):
            layer.compile(self._max_rows, norms=first_norm or index > 0)
        if not same_numbers(plain, trial()):
            for layer in self.layers:
                layer.compiled = None


class HeadRunner(LayersRunner):
    """Runs pairs of a token and a hidden state through a head."""

    def __init__(self, loaded: LoadedHead, target: LoadedModel, blocks: int, backend: Backend = Backend.TORCH) -> None:
        head, weight, attention = loaded.head, loaded.head.fc.weight, loaded.head.midlayer.self_attn
        heads = attention.k_proj.out_features // attention.head_dim
        layers, shape = [head.midlayer, *head.layers.values()], LayerShape(heads, *[attention.head_dim] * 2)
        super().__init__(loaded, layers, shape, head.rotary, target, blocks, backend)
        self.layer, *self.further = self.layers
        self.graphs = Graphs(self.cache, [weight.new_zeros(1, head.fc.out_features)])
        rows = min(ROWS, len(self._turns), BLOCK_SIZE)
        segment = Segment(BlockTable([0]), [0] * rows, 0, np.arange(rows), np.tri(rows, dtype=np.bool_), range(rows))
        hidden = torch.randn(rows, head.config.width, generator=torch.Generator().manual_seed(0)).to(weight)
        self.compile(lambda: self.forward([segment], hidden)[1], first_norm=False)

    @torch.inference_mode()
    def combine(self, features: Tensor) -> Tensor:
        """The target's features [N, aux_layers * target width] as hidden states [N, width] for `forward`."""
        return self.fc(self.head.before_fc(features)) if self.head.config.version == 3 else features

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass. hidden [N, width]: combined features, or what an earlier pass returned.

        Returns the logits of the wanted rows, [R, draft vocabulary], and their hidden states [R, width], which are the
        features of the pairs that follow.
        """
        replayed = self.graphs.replay(segments, hidden)
        if replayed is None:
            return self.run_batch(Batch.build(segments, self.cache.device, self.cache.backend), hidden)
        logits, out = replayed.outputs
        return logits[replayed.wanted], out[replayed.wanted]

    @torch.inference_mode()
    def run_batch(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x, projected = self.head.prepare(self.loaded.embedding(batch.tokens[0]), hidden)
        rotation = self.rotation(batch)
        x = self.layer.run(x, projected, rotation, batch, self.cache)
        for layer in self.further:
            x = layer.run(x, None, rotation, batch, self.cache)
        normed, out = self.head.leave(x[batch.wanted])
        return self.lm_head(normed), out
