"""What the target's layers gave along requests' texts, and whether a head was fed with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import ModelReference, decoder_layers
from specscope.measure.locate.pairs import HeldPair
from specscope.measure.locate.watch import hooks

if TYPE_CHECKING:
    from specscope.measure.locate.drive import Drive

FEATURES = "features layer "
FINAL = "final"


class TrueFeatures:
    """What enters the target's layers at each position of the texts, as the engine's own layers have it.

    Where the engine did not compute a position, because other requests left it its KV, as the reference has it.
    """

    def __init__(
        self, drive: Drive, reference: ModelReference, texts: Mapping[str, Sequence[int]], layers: Sequence[Any]
    ) -> None:
        self.drive, self.layers = drive, tuple(layers)
        self.along = {name: _known(reference, text, self.layers) for name, text in texts.items()}  # [T, F], by request
        usual = max(reference.allowed(max(texts.values(), key=len)).values())
        self.allowed = {f"{FEATURES}{layer}": usual for layer in self.layers}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the target meanwhile."""
        runner, rows = self.drive.engine.runner, dict[Any, Tensor]()
        model: Any = runner.loaded.model
        layers, base = decoder_layers(model), getattr(model, model.base_model_prefix)
        real = runner.forward_with_features

        def keep(layer: Any, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
            entered = out[0] if layer == FINAL else given[0] if given else named["hidden_states"]
            rows[layer] = entered[0].float().cpu()

        def forward(segments: Any) -> Any:  # noqa: ANN401
            out = real(segments)
            self._take(torch.cat([rows[layer] for layer in self.layers], dim=1))
            return out

        with hooks() as put, patch.object(runner, "forward_with_features", forward):
            for layer in self.layers:
                put(base if layer == FINAL else layers[layer], lambda *call, layer=layer: keep(layer, *call))
            yield

    def _take(self, rows: Tensor) -> None:
        """Keep what the requests' rows gave: their pending tokens, and the accepted paths behind them."""
        first = 0
        for part in self.drive.fed:
            feed, along = part.prefill_tokens + (part.verdict is not None), self.along.get(part.request)
            if along is not None and len(along) > part.context_len:  # else it is behind all that is watched
                path = [] if part.verdict is None else [first + feed + node for node in part.verdict.path.tolist()]
                committed = [*range(first, first + feed), *path][: len(along) - part.context_len]
                along[part.context_len : part.context_len + len(committed)] = rows[committed]
            first += feed + len(part.tree)

    def compared(self, request: str, fed: Tensor, rows: tuple[FedRow, ...]) -> Iterator[HeldPair]:
        """The features that fed rows of committed pairs, [rows, F], beside those of their positions."""
        right = self.along[request][[row.position for row in rows]]
        sides = (x.chunk(len(self.layers), dim=1) for x in (fed.float().cpu(), right))
        for layer, ours, due in zip(self.layers, *sides, strict=True):
            yield HeldPair(f"{FEATURES}{layer}", ours, due, rows)


def _known(reference: ModelReference, text: Sequence[int], layers: Sequence[Any]) -> Tensor:
    """[T, F] as the reference has it."""
    known = reference.causal.alone(text, layers)[1]
    assert known is not None
    return known.cpu().clone()
