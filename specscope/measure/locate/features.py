"""What the target's layers gave along requests' texts, and whether a head was fed with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import ModelReference, decoder_layers
from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.pairs import HeldPair
from specscope.measure.locate.sides import hooks
from specscope.trace.history.wording import plural

if TYPE_CHECKING:
    from specscope.measure.locate.drive import Drive

FEATURES = "features layer "
FINAL = "final"
SAME = 1e-4  # relative: two rows are one
MOST = 0.8  # of the rows that are off must be explained
ROOM = 2**28  # bytes of what leaves the layers that is kept of a request to look rows up in


class TrueFeatures:
    """What enters the target's layers at each position of the texts, as the engine's own layers have it.

    Where the engine did not compute a position, because other requests left it its KV, as the reference has it.
    """

    def __init__(
        self, drive: Drive, reference: ModelReference, texts: Mapping[str, Sequence[int]], layers: Sequence[Any]
    ) -> None:
        self.drive, self.layers = drive, tuple(layers)
        self.entered = {name: self._known(reference, text) for name, text in texts.items()}
        self.nodes: dict[str, dict[Any, Tensor]] = {name: {} for name in texts}  # rows of the last tree, by layer
        usual = max(reference.allowed(max(texts.values(), key=len)).values())
        self.allowed = {f"{FEATURES}{layer}": usual for layer in self.layers}
        self._pass: dict[Any, Tensor] = {}

    def _known(self, reference: ModelReference, text: Sequence[int]) -> dict[Any, Tensor]:
        """By layer [T, width]: as the reference has it; of layers that feed no head, zeros."""
        known = reference.causal.alone(text, self.layers)[1]
        assert known is not None
        parts = known.cpu().chunk(len(self.layers), 1)
        every = range(len(reference.layers)) if len(reference.layers) * parts[0].nbytes <= ROOM else ()
        return {layer: torch.zeros_like(parts[0]) for layer in every} | {
            layer: x.clone() for layer, x in zip(self.layers, parts, strict=True)
        }

    def along(self, request: str) -> Tensor:
        """[T, F] the features of the head's layers, side by side."""
        return torch.cat([self.entered[request][layer] for layer in self.layers], dim=1)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the target meanwhile."""
        runner = self.drive.engine.runner
        model: Any = runner.loaded.model
        layers, base, real = (
            decoder_layers(model),
            getattr(model, model.base_model_prefix),
            runner.forward_with_features,
        )

        def forward(segments: Any) -> Any:  # noqa: ANN401
            out = real(segments)
            self._take()
            return out

        with hooks() as put, patch.object(runner, "forward_with_features", forward):
            for layer in {layer: None for entered in self.entered.values() for layer in entered}:
                put(base if layer == FINAL else layers[layer], self._keeper(layer))
            yield

    def _keeper(self, layer: Any) -> Any:  # noqa: ANN401
        def keep(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
            rows = out[0] if layer == FINAL else given[0] if given else named["hidden_states"]
            self._pass[layer] = rows[0].float().cpu()

        return keep

    def _take(self) -> None:
        """Keep what the requests' rows gave: their pending tokens, and the accepted paths behind them."""
        rows, self._pass, first = self._pass, {}, 0
        for part in self.drive.fed:
            feed = part.prefill_tokens + (part.verdict is not None)
            entered = self.entered.get(part.request, {})
            known = len(entered[self.layers[0]]) - part.context_len if entered else 0
            if known > 0:  # else it is behind all that is watched
                path = [] if part.verdict is None else [first + feed + node for node in part.verdict.path.tolist()]
                committed = [*range(first, first + feed), *path][:known]
                end = part.context_len + len(committed)
                for layer in entered:
                    entered[layer][part.context_len : end] = rows[layer][committed]
                    self.nodes[part.request][layer] = rows[layer][first + feed : first + feed + len(part.tree)]
            first += feed + len(part.tree)

    def compared(self, request: str, fed: Tensor, rows: tuple[FedRow, ...], code: str) -> Iterator[HeldPair]:
        """The features that fed rows of committed pairs, [rows, F], beside those of their positions."""
        places = [row.position for row in rows]
        for layer, ours in zip(self.layers, fed.float().cpu().chunk(len(self.layers), dim=1), strict=True):
            right = self.entered[request][layer][places]
            wrong = (relative(ours, right)[:, 0] > SAME).nonzero()[:, 0].tolist()
            looks = self._looks(request, ours, wrong, places, layer) if wrong else ""
            yield HeldPair(f"{FEATURES}{layer}", ours, right, rows, code=code, looks=looks)

    def _looks(self, request: str, ours: Tensor, wrong: list[int], places: Sequence[int], layer: Any) -> str:  # noqa: ANN401
        """Whose rows were fed instead."""
        if not bool(ours[wrong].any()):
            return f"all zero at {len(wrong)} of {len(ours)} rows"
        found = Counter(phrase for i in wrong for phrase in {*self._whose(request, ours[i], places[i], layer)})
        phrase, count = found.most_common(1)[0] if found else ("", 0)
        return f"{phrase}, at {count} of {len(wrong)} rows that are off" if count >= MOST * len(wrong) else ""

    def _whose(self, request: str, row: Tensor, place: int, layer: Any) -> Iterator[str]:  # noqa: ANN401
        """What a row that was fed at a position is, in words."""
        for other, every in self.entered[request].items():
            elsewhere = "" if other == layer else f" in layer {other}"
            for position in _where(every, row):
                shift = position - place
                away = f"{plural(abs(shift), 'position')} {'before' if shift < 0 else 'after'}"
                yield f"rows of {away if shift else 'its own position'}{elsewhere}"
            if other in self.nodes[request] and _where(self.nodes[request][other], row):
                yield f"rows of the tree's nodes{elsewhere}"


def _where(every: Tensor, row: Tensor) -> list[int]:
    """Which rows are this one."""
    off = (every - row).norm(dim=1) / row.norm().clamp(min=1e-12)
    rows: list[int] = (off < SAME).nonzero()[:, 0].tolist()
    return rows
