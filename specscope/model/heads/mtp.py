"""A target's own next-token modules (MTP): loaded from its checkpoint, run over a paged KV cache of their own.

DeepSeek-V3 (2024), section 2.2: at slot t module k = 0, 1, .. takes the token at t + 1 + k and the state that module
k - 1 made of slot t, at first the target's, after its last norm. The norm of the token's embedding and the norm of the
state, side by side, are projected to the model's width; a decoder layer of the target's kind and a norm follow, and the
target's head gives the token at t + 2 + k. The modules are transformers' own (MtpModel), whose layers attend through
our attention; each has a layer of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specscope.errors import UserError, not_loaded
from specscope.model import attention
from specscope.model.batch import Batch, Segment
from specscope.model.graphs import Graphs
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape
from specscope.model.loader import LayerRecorder, LoadedModel, check_numbers, quick_meta
from specscope.model.places import Backend
from specscope.model.runner import AuxLayer
from specscope.plans.kinds import modules_in


@dataclass(frozen=True)
class LoadedMtp:
    """A target's modules."""

    model: Any  # transformers' MtpModel
    layers: list[LayerShape]  # what each module keeps of a token
    output: nn.Module  # the target's: hidden states to logits
    name: str


def load_mtp(target: LoadedModel) -> LoadedMtp:
    """Load the modules that lie in the target's checkpoint. Raises UserError where it has none."""
    config: Any = target.model.config
    kind = f"{target.name} ({type(target.model).__name__})"
    count = modules_in(config.get_text_config().to_dict())
    if not count:
        raise UserError(
            f"{kind} has no next-token modules (num_nextn_predict_layers in its config): use --drafter ngram or a head"
        )
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise UserError("the drafter mtp needs transformers 5.23 or newer") from None
    try:
        with torch.device("meta"), quick_meta():  # the target as it was published: its own parts may be faster ones
            published: Any = type(target.model)(deepcopy(config))
        beyond = range(first := int(config.get_text_config().num_hidden_layers), first + count)
        known = published._keys_to_ignore_on_load_unexpected or ()  # transformers': of the sizes that were published
        published._keys_to_ignore_on_load_unexpected = {*known, *(rf"(^|\.)layers\.{layer}\." for layer in beyond)}
        model = MtpModel.from_pretrained(published, device_map={"": target.device})
    except Exception as error:
        raise not_loaded(f"the next-token modules of {kind}", error) from error
    decoder = target.model.get_decoder()  # type: ignore[operator]
    model.embed_tokens, model.rotary_emb = target.embedding, getattr(decoder, "rotary_emb", None)
    model.shared_head = nn.Identity()
    model.set_attn_implementation(attention.BACKEND)
    model = model.eval().requires_grad_(False)
    check_numbers(model.layers.named_parameters(), f"the next-token modules of {kind}")
    return LoadedMtp(model, _probe(model, count, target), target.output, target.name)


@torch.inference_mode()
def _probe(model: Any, count: int, target: LoadedModel) -> list[LayerShape]:  # noqa: ANN401
    """Run a token through each module; what it keeps."""
    recorder: Any = LayerRecorder()
    segment = Segment.of_tree(BlockTable([0]), 0, [3], logits=True)
    batch = Batch.build([segment], target.device)
    states = torch.zeros(1, target.width, device=target.device, dtype=target.dtype)
    for module in range(count):
        run_module(model, module, batch, states, recorder)
    return [recorder.layers[module] for module in range(count)]


def run_module(model: Any, module: int, batch: Batch, states: Tensor, pages: KVCache) -> Tensor:  # noqa: ANN401
    """What a module makes of the states [N, width] of a batch's slots and its tokens: [N, width]."""
    places = batch.positions + module + 1  # of the tokens, as transformers turns them
    fed: dict[str, Any] = {"input_ids": batch.tokens, "batch": batch, "pages": pages}
    out: Tensor = model.forward_layer(module, states[None], places, None, **fed)[0]
    return out


class MtpRunner:
    """Runs pairs of a token and a hidden state through a target's modules. What HeadRunner is to an EAGLE head."""

    aux_layers: tuple[AuxLayer, ...] = ("final",)
    d2t: Tensor | None = None  # a module drafts any token of the target

    def __init__(self, loaded: LoadedMtp, target: LoadedModel, blocks: int, backend: Backend = Backend.TORCH) -> None:
        self.loaded, self.vocab_size, self.modules = loaded, target.vocab_size, len(loaded.layers)
        self.beside = partial(MtpRunner, loaded, target, backend=backend)  # with another cache, of so many blocks
        self.cache = KVCache(loaded.layers, blocks, target.dtype, target.device, backend)
        self.graphs = Graphs(self.cache, [torch.zeros(1, target.width, device=target.device, dtype=target.dtype)])

    def combine(self, features: Tensor) -> Tensor:
        return features

    def forward(self, segments: Sequence[Segment], hidden: Tensor, module: int | None = None) -> tuple[Tensor, Tensor]:
        """One pass over hidden [N, width]: the logits of the wanted rows, [R, V], and hidden states.

        Of the first module, where none is named, those of the wanted rows, as HeadRunner gives them; of a named one
        all rows', [N, width], which the next module takes.
        """
        replayed = self.graphs.replay(segments, hidden) if module is None else None
        if replayed is not None:
            return replayed.outputs[0][replayed.wanted], replayed.outputs[1][replayed.wanted]
        return self.run_batch(Batch.build(segments, self.cache.device, self.cache.backend), hidden, module)

    @torch.inference_mode()
    def run_batch(self, batch: Batch, hidden: Tensor, module: int | None = None) -> tuple[Tensor, Tensor]:
        states = run_module(self.loaded.model, module or 0, batch, hidden, self.cache)
        wanted = states[batch.wanted]
        return self.loaded.output(wanted), wanted if module is None else states
