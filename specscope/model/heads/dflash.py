"""DFlash heads: all of a block's tokens in one pass, over keys and values made of the target's features.

DFlash (z-lab, 2026) as vLLM 0.32 runs it (model_executor/models/qwen3_dflash.py, v1/spec_decode/dflash.py), with
Qwen3's layers. Of each committed position the target's features go through `fc` and `hidden_norm` straight to every
layer's keys and values: no query, and nothing of one layer enters the next. A block's rows are the root and mask
tokens; they see all that is committed and, unless their layer is causal, each other. The row of a mask token gives the
distribution of its own position; with `sample_from_anchor` a row gives that of the next one, the root's too.

The cache's slot t holds the features of position t. So a block begins in the slot of its root, and is given back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from specscope.errors import UserError, first_line
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import ROWS
from specscope.model.graphs import Graphs
from specscope.model.heads import head_runner
from specscope.model.heads.eagle_head import EagleHead, HeadJson
from specscope.model.heads.head_runner import EMBEDDING, LayersRunner, LoadedHead
from specscope.model.kv_cache import BlockTable, LayerShape
from specscope.model.loader import LoadedModel, check_numbers
from specscope.model.places import Backend, head_place
from specscope.model.runner import AuxLayer
from specscope.plans.dflash import ANCHOR, MASK_FILE, MOST_ROWS, flat, longest_draft, window_of
from specscope.plans.kinds import SLIDING
from specscope.whole_file import read_object

LM_HEAD = "lm_head.weight"
FIRST_NORM, FIRST_BIAS = "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias"
THETA = 1e6  # the rotary base where the config names none: vLLM's set_default_rope_theta


@dataclass(frozen=True)
class DFlashConfig:
    """One DFlash head. Filled by `read_config`."""

    layer: Mapping[str, Any]  # by the names of a Qwen3 config
    width: int  # of its own hidden states
    target_width: int  # of a hidden state of the target
    vocab: int  # the target's vocabulary
    draft_vocab: int  # tokens that the head can draft
    aux_layers: tuple[AuxLayer, ...]
    mask_token: int
    longest: int  # tokens that a block drafts
    from_anchor: bool  # whether the root's row drafts too
    windows: tuple[int | None, ...]  # for each layer, how many positions a row looks back, including its own; None: all
    causal: tuple[bool, ...]  # for each layer, whether a row of a block does not see those behind it

    def rows(self, depth: int) -> int:
        """How many rows draft so many tokens."""
        return depth if self.from_anchor else depth + 1

    @property
    def ahead(self) -> tuple[int, ...]:
        """For each layer, how many rows behind its own a row of a block sees."""
        each = zip(self.windows, self.causal, strict=True)
        return tuple(0 if causal else min((window or MOST_ROWS) - 1, MOST_ROWS) for window, causal in each)


def read_config(folder: Path) -> DFlashConfig:
    """Read a head's config.json. Raises UserError."""
    whole = flat(read_object(folder / "config.json"))
    try:
        told = msgspec.convert(whole, HeadJson)
    except msgspec.ValidationError as error:
        raise UserError(f"{folder}/config.json does not describe a DFlash head: {error}") from None
    longest, token, ids = longest_draft(whole), told.mask_token_id, told.eagle_aux_hidden_state_layer_ids
    if longest < 1 or token is None or not ids:
        what = "block_size of at least 2" if longest < 1 else "target_layer_ids" if not ids else "mask_token_id"
        raise UserError(f"{folder}/config.json has no {what}, which a DFlash head needs")
    layers, kinds = told.num_hidden_layers, told.layer_types or []
    all_slide = bool(whole.get("use_swa")) and SLIDING not in kinds
    slides = [all_slide or SLIDING in kinds[i : i + 1] for i in range(layers)]
    given = (whole.get(name) for name in ("is_causal", "causal"))
    causal = next((value for value in given if value is not None), None)
    return DFlashConfig(
        layer=whole,
        width=told.hidden_size,
        vocab=told.vocab_size,
        target_width=told.target_hidden_size or told.hidden_size,
        draft_vocab=told.draft_vocab_size or told.vocab_size,
        aux_layers=tuple(ids),
        mask_token=token,
        longest=longest,
        from_anchor=bool(whole.get(ANCHOR)),
        windows=tuple(window_of(whole) if slide else None for slide in slides),
        causal=tuple(SLIDING in kinds[i : i + 1] if causal is None else bool(causal) for i in range(layers)),
    )


def qwen3_config(config: DFlashConfig, size: int, *, bias: bool) -> Qwen3Config:
    """A layer of the head, with attention heads of `size`, as transformers' modules want it."""
    unread = ("architectures", "torch_dtype", "dtype", "layer_types", "model_type", "sliding_window", "auto_map")
    layer = {key: value for key, value in config.layer.items() if key not in unread and value is not None}
    return Qwen3Config.from_dict({"rope_theta": THETA, **layer, "head_dim": size, "attention_bias": bias})


class DFlashHead(nn.Module):
    """A head without its embedding, and without a vocabulary's projection unless the checkpoint brings one.

    Module names are those of the published checkpoints.
    """

    def __init__(self, config: DFlashConfig, qwen3: Qwen3Config, *, own_output: bool) -> None:
        super().__init__()
        self.config, self.qwen3 = config, qwen3
        norm = lambda: Qwen3RMSNorm(qwen3.hidden_size, qwen3.rms_norm_eps)  # noqa: E731
        self.fc = nn.Linear(len(config.aux_layers) * config.target_width, qwen3.hidden_size, bias=False)
        self.hidden_norm, self.norm = norm(), norm()
        self.layers = nn.ModuleList(Qwen3DecoderLayer(qwen3, i) for i in range(len(config.windows)))
        if own_output:
            self.lm_head = nn.Linear(qwen3.hidden_size, config.draft_vocab, bias=False)
        if config.draft_vocab != config.vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))

    target_tokens = EagleHead.target_tokens


class MaskedEmbedding(nn.Module):
    """An embedding in which one token has a vector of its own."""

    def __init__(self, embedding: nn.Module, token: int, vector: Tensor) -> None:
        super().__init__()
        self.embedding, self.token, self.vector = embedding, token, vector

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids to [..., width]. The token may lie outside the vocabulary."""
        is_own = tokens == self.token
        return torch.where(is_own[..., None], self.vector, self.embedding(tokens.masked_fill(is_own, 0)))


def load_dflash(folder: str, target: LoadedModel) -> LoadedHead:
    """Load a head from its folder. Raises UserError, with both shapes where it does not fit the target."""
    path = head_place(folder)
    config, tensors = read_config(path), head_runner.read_files(path)
    own = tensors.pop(EMBEDDING, None)
    head_runner.check_fit(config, target, own, path)
    mask = _mask_embedding(path, config)
    size, bias = config.layer.get("head_dim") or len(tensors.get(FIRST_NORM, ())), FIRST_BIAS in tensors
    qwen3, own_output = qwen3_config(config, int(size), bias=bias), LM_HEAD in tensors
    head = head_runner.unfilled(lambda: DFlashHead(config, qwen3, own_output=own_output), path)
    further = [(name, x) for name, x in ((EMBEDDING, own), (MASK_FILE, mask)) if x is not None]
    check_numbers([*tensors.items(), *further], f"the head in {path}")
    wanted = head.state_dict()
    is_targets = config.draft_vocab == config.vocab and config.width == config.target_width
    head_runner.check_tensors(head, tensors, path, "a DFlash", {*wanted, *(() if is_targets else (LM_HEAD,))})
    head.load_state_dict({name: tensors[name].to(tensor.dtype) for name, tensor in wanted.items()}, assign=True)
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    embedding = head_runner.embedding_of(own, target)
    if mask is not None:
        embedding = MaskedEmbedding(embedding, config.mask_token, mask.to(target.device, target.dtype))
    return LoadedHead(head, embedding, getattr(head, "lm_head", target.output), path.resolve().name)


def _mask_embedding(path: Path, config: DFlashConfig) -> Tensor | None:
    """[width] the mask token's own embedding; None where the token is one of the vocabulary. Raises UserError."""
    file, token = path / MASK_FILE, config.mask_token
    if not file.is_file():
        if token >= config.vocab:
            raise UserError(f"the head in {path} names mask token {token} in a vocabulary of {config.vocab}")
        return None
    try:
        state = head_runner.read_saved(file)
        told = state.get("mask_token_id", token) if isinstance(state, dict) else token
        vector: Tensor = (state["embedding"] if isinstance(state, dict) else state).reshape(-1)
    except Exception as error:  # torch.load has a dozen ways to say that a file is torn
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
    if told != token:
        raise UserError(f"{file} holds the embedding of token {told}, but the config's mask_token_id is {token}")
    if len(vector) != config.width:
        raise UserError(f"the head in {path} has a mask embedding of {len(vector)} numbers, and is {config.width} wide")
    return vector


class DFlashRunner(LayersRunner):
    """Runs a head over a paged KV cache of its own."""

    def __init__(self, loaded: LoadedHead, target: LoadedModel, blocks: int, backend: Backend = Backend.TORCH) -> None:
        head, qwen3, config = loaded.head, loaded.head.qwen3, loaded.head.config
        shape = LayerShape(int(qwen3.num_key_value_heads or 0), *[int(qwen3.head_dim)] * 2)
        rotary = Qwen3RotaryEmbedding(qwen3).to(head.fc.weight.device)  # its frequencies stay float32
        super().__init__(loaded, head.layers, shape, rotary, target, blocks, backend)
        mixed = "some of its layers are causal and some are not" if len({*config.ahead}) > 1 else ""
        self.graphs = Graphs(self.cache, unfit=mixed)
        block = block_segment(BlockTable([0]), 1, 0, min(ROWS, len(self._turns) - 1), config)
        context = Segment.of_tree(block.table, 0, [0], logits=False)
        state = torch.randn(1, config.width, generator=torch.Generator().manual_seed(0)).to(self._turns)
        if config.rows(config.longest) <= MOST_ROWS:
            self.write_context([context], state)
            self.compile(lambda: self.forward([block]))

    @torch.inference_mode()
    def combine(self, features: Tensor) -> Tensor:
        """The target's features [N, aux_layers * target width] as states [N, width] for `write_context`."""
        return self.head.hidden_norm(self.fc(features))  # type: ignore[no-any-return]

    @torch.inference_mode()
    def write_context(self, segments: Sequence[Segment], states: Tensor) -> None:
        """Write the keys and values of committed positions in every layer, from states [N, width] of all rows."""
        batch = Batch.build(segments, self.cache.device, self.cache.backend)
        rotation = self.rotation(batch)
        for layer in self.layers:
            layer.write(states, rotation, batch, self.cache)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """One pass over blocks: the logits of the wanted rows, [R, draft vocabulary]."""
        ahead = self.head.config.ahead
        fed = [(segment, len(segment.tokens)) for segment in segments]
        seen = {
            k: [replace(segment, mask=np.tri(rows, k=k, dtype=np.bool_)) for segment, rows in fed] for k in {*ahead}
        }
        replayed = self.graphs.replay(seen[ahead[0]])
        if replayed is not None:
            return replayed.outputs[0][replayed.wanted]
        batches = {k: Batch.build(some, self.cache.device, self.cache.backend) for k, some in seen.items()}
        return self.run_batch(*(batches[k] for k in ahead))[0]

    @torch.inference_mode()
    def run_batch(self, batch: Batch, *further: Batch) -> tuple[Tensor]:
        """`forward` of a batch that is laid out; `further`: how the other layers see it, where not alike."""
        x, rotation = self.loaded.embedding(batch.tokens[0]), self.rotation(batch)
        for layer, seen in zip(self.layers, (batch, *further) if further else [batch] * len(self.layers), strict=True):
            x = layer.run(x, None, rotation, seen, self.cache)
        return (self.lm_head(self.head.norm(x[batch.wanted])),)


def block_segment(table: BlockTable, root: int, token: int, rows: int, config: DFlashConfig) -> Segment:
    """A block of so many rows behind `root` committed positions: its root's token, then mask tokens."""
    return Segment(
        table=table,
        tokens=[token, *[config.mask_token] * (rows - 1)],
        context=root,
        positions=root + np.arange(rows, dtype=np.int64),
        mask=np.ones((rows, rows), dtype=np.bool_),
        wanted=range(0 if config.from_anchor else 1, rows),
    )
