"""What a target tells its drafter besides tokens: the hidden states at chosen places of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specscope.errors import UserError

AuxLayer = int | Literal["final"]
"""j: what enters layer j (0 is the embedding); "final": what enters the head, normalised."""


def published_aux_layers(layers: int) -> tuple[int, int, int]:
    """Where EAGLE-3's authors take features from a target of that many layers: a low, a middle and a high one.

    Li et al. 2025; the places are those of their modeling_llama_kv.py, and vLLM's and SGLang's default.
    """
    if layers < 6:
        need = "EAGLE-3 takes features from three of them and needs at least 6"
        raise UserError(f"the target has {layers} layers; {need}")
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
            else layers[aux_layer].register_forward_pre_hook(self._keeper(aux_layer), with_kwargs=True)
            for aux_layer in set(aux_layers)
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, aux_layer: AuxLayer) -> Any:  # noqa: ANN401
        def keep(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._seen[aux_layer] = (args[0] if args else named["hidden_states"])[0]

        return keep

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
