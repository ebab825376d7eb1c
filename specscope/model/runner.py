"""ModelRunner: a model, its paged KV cache, and one forward pass over a ragged batch.

A target also tells its drafter hidden states at chosen places of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specscope.errors import UserError
from specscope.model.batch import Batch, Segment
from specscope.model.graphs import Graphs
from specscope.model.kv_cache import BlockTable, KVCache
from specscope.model.loader import LoadedModel
from specscope.model.places import Backend

AuxLayer = int | Literal["final"]
"""j: what enters layer j (0 is the embedding); "final": what enters the head, normalised."""


def published_aux_layers(layers: int) -> tuple[int, int, int]:
    """Where EAGLE-3's authors take features from a target of that many layers: a low, a middle and a high one.

    Li et al. 2025; the places are those of their modeling_llama_kv.py, and vLLM's and SGLang's default.
    """
    if layers < 6:
        raise UserError(f"the target has {layers} layers; EAGLE-3 takes features from three and needs at least 6")
    return 2, layers // 2, layers - 3


class AuxHiddenStates:
    """Collects hidden states while a model runs. One forward pass at a time."""

    def __init__(self, model: Any, aux_layers: Sequence[AuxLayer]) -> None:  # noqa: ANN401
        layers = decoder_layers(model)
        for aux_layer in aux_layers:
            if aux_layer != "final" and not 0 <= aux_layer < len(layers):
                has = f"the target has layers 0 to {len(layers) - 1}"
                raise UserError(f"the head asks for features of layer {aux_layer}, but {has}")
        self.aux_layers = tuple(aux_layers)
        self._seen: dict[AuxLayer, Tensor] = {}
        base = getattr(model, model.base_model_prefix)  # the model below its head
        self._hooks = [
            base.register_forward_hook(lambda module, args, out: self._seen.update({"final": out[0][0]}))
            if aux_layer == "final"
            else layers[aux_layer].register_forward_pre_hook(partial(self._keep, aux_layer), with_kwargs=True)
            for aux_layer in set(aux_layers)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, aux_layer: AuxLayer, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._seen[aux_layer] = (args[0] if args else named["hidden_states"])[0]

    def take(self) -> Tensor:
        """The last pass's features, [N, aux_layers * width], the aux layers side by side. They are not kept here."""
        seen, self._seen = self._seen, {}
        return torch.cat([seen[aux_layer] for aux_layer in self.aux_layers], dim=-1)


def decoder_layers(model: Any) -> nn.ModuleList:  # noqa: ANN401
    """The list of a model's decoder layers."""
    wanted = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UserError(f"{type(model).__name__} has no list of {wanted} layers to take features from")


CHUNK = 512  # tokens that `compute` feeds in one pass


class ModelRunner:
    """Runs segments through a model. The target and each drafter that is a model have one of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int,
        aux_layers: Sequence[AuxLayer] = (),
        backend: Backend = Backend.TORCH,
        *,
        cache: KVCache | None = None,
    ) -> None:
        """`cache`: another runner's over the same model, to share; else one of `blocks` blocks is made."""
        self.loaded = loaded
        self.cache = cache or KVCache(loaded.layers, blocks, loaded.dtype, loaded.device, backend)
        self.graphs = Graphs(self.cache)
        self._aux = AuxHiddenStates(loaded.model, aux_layers) if aux_layers else None

    def compute(self, table: BlockTable, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor | None]]:
        """Write the KV of a sequence's first tokens, a chunk at a time, without logits. The table must have room.

        Gives the position of each chunk's first token, and the chunk's features [n, their widths] with aux layers.
        """
        for start in range(0, len(tokens), CHUNK):
            chunk = list(tokens[start : start + CHUNK])
            segment = Segment.of_tree(table, start, chunk, logits=False)
            _, features = self.forward_with_features([segment])
            yield start, features[0] if features else None

    def beside(self, blocks: int) -> ModelRunner:
        """One with a cache of its own, of so many blocks."""
        return ModelRunner(self.loaded, blocks, backend=self.cache.backend)

    def close(self) -> None:
        """Leave the model as it was: another runner may share it."""
        if self._aux is not None:
            self._aux.close()

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Write the KV of every fed token and return the wanted logits, [rows, vocabulary] for each segment.

        Each segment's table must have room for its length (KVCache.reserve). The dtype is the model's, or float32
        where our own product makes them.
        """
        return self.forward_with_features(segments)[0]

    @torch.inference_mode()
    def forward_with_features(self, segments: Sequence[Segment]) -> tuple[list[Tensor], list[Tensor]]:
        """As `forward`; besides the logits the features of every fed row, [rows, aux_layers * width] for each segment.

        No features where the runner has no aux_layers.
        """
        replayed = self.graphs.replay(segments)
        if replayed is None:
            logits, *features = self.run_batch(Batch.build(segments, self.loaded.device, self.cache.backend))
        else:
            every, *all_features = replayed.outputs
            logits, features = every[replayed.wanted], [x[replayed.fed] for x in all_features]
        fed = [len(s.tokens) for s in segments]
        return list(logits.split([len(s.wanted) for s in segments])), [part for x in features for part in x.split(fed)]

    @torch.inference_mode()
    def run_batch(self, batch: Batch) -> tuple[Tensor, ...]:
        """Logits of the wanted rows, [R, vocabulary]; with aux layers the features of all, [N, their widths]."""
        logits = self.loaded.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.wanted,
            batch=batch,
            pages=self.cache,  # not `cache`: since 5.24 that is transformers' own
        ).logits[0]
        return (logits,) if self._aux is None else (logits, self._aux.take())
