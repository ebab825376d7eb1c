"""What the target's layers gave along a request's text, and whether a head was fed with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.located import FedRow
from specscope.analyze.locate.model.reference import ModelReference, decoder_layers
from specscope.analyze.locate.model.taps import relative
from specscope.measure.locate.both import Both
from specscope.measure.locate.drive import Drive

FEATURES = "features layer "
FINAL = "final"
SAME = 1e-4  # relative: two rows are one
MOST = 0.8  # of the rows that are off must be explained
ROOM = 2**28  # bytes of what leaves the layers that is kept to look rows up in


class TrueFeatures:
    """What enters the target's layers at each position of the text, as the engine's own layers have it.

    Where the engine did not compute a position, because other requests left it its KV, as the reference has it.
    """

    def __init__(
        self, drive: Drive, request: str, reference: ModelReference, text: Sequence[int], layers: Sequence[Any]
    ) -> None:
        self.drive, self.request, self.layers = drive, request, tuple(layers)
        known, kept = (
            reference.causal.alone(text, self.layers)[1],
            len(decoder_layers(drive.engine.runner.loaded.model)),
        )
        assert known is not None
        self.width = known.shape[1] // len(self.layers)
        self.entered = {
            layer: x.clone() for layer, x in zip(self.layers, known.cpu().chunk(len(self.layers), 1), strict=True)
        }
        if kept * known.nbytes // len(self.layers) <= ROOM:
            self.entered |= {
                layer: torch.zeros(len(text), self.width) for layer in range(kept) if layer not in self.entered
            }
        self.nodes: dict[Any, Tensor] = {}  # by layer: the tree's rows of the last step that had one
        self.allowed = {f"{FEATURES}{layer}": max(reference.allowed(list(text)).values()) for layer in self.layers}
        self._pass: dict[Any, Tensor] = {}

    @property
    def along(self) -> Tensor:
        """[T, F] the features of the head's layers, side by side."""
        return torch.cat([self.entered[layer] for layer in self.layers], dim=1)

    @contextmanager
    def on(self) -> Iterator[None]:
        """TargetWatch the target meanwhile."""
        runner = self.drive.engine.runner
        model: Any = runner.loaded.model
        layers, base = decoder_layers(model), getattr(model, model.base_model_prefix)
        real = runner.forward_with_features

        def forward(segments: Any) -> Any:  # noqa: ANN401
            out = real(segments)
            self._take()
            return out

        with ExitStack() as stack:
            for layer in self.entered:
                module = base if layer == FINAL else layers[layer]
                handle = (
                    module.register_forward_hook(self._leave, with_kwargs=True)
                    if layer == FINAL
                    else module.register_forward_pre_hook(self._enter(layer), with_kwargs=True)
                )
                stack.callback(handle.remove)
            stack.enter_context(patch.object(runner, "forward_with_features", forward))
            yield

    def _enter(self, layer: Any) -> Any:  # noqa: ANN401
        def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = given[0] if given else named["hidden_states"]
            self._pass[layer] = named["batch"].as_given(hidden[0]).float().cpu()

        return enter

    def _leave(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> None:  # noqa: ANN401
        self._pass[FINAL] = named["batch"].as_given(out[0][0]).float().cpu()

    def _take(self) -> None:
        """Keep what the request's rows gave: its pending tokens, and the accepted path behind them."""
        rows, self._pass, first = self._pass, {}, 0
        for part in self.drive.fed:
            feed = part.prefill_tokens + (part.verdict is not None)
            if part.request == self.request:
                path = [] if part.verdict is None else [first + feed + node for node in part.verdict.path.tolist()]
                committed = [*range(first, first + feed), *path][: len(self.along) - part.context_len]
                end = part.context_len + len(committed)
                for layer, x in rows.items():
                    self.entered[layer][part.context_len : end] = x[committed]
                    self.nodes[layer] = x[first + feed : first + feed + len(part.tree)]
            first += feed + len(part.tree)

    def compared(self, fed: Tensor, rows: tuple[FedRow, ...], code: str) -> Iterator[Both]:
        """The features that fed rows of committed pairs, [rows, F], beside those of their positions."""
        places = [row.position for row in rows]
        for layer, ours in zip(self.layers, fed.float().cpu().chunk(len(self.layers), dim=1), strict=True):
            right = self.entered[layer][places]
            both = Both(f"{FEATURES}{layer}", ours, right, rows, code=code)
            if bool((relative(ours, right) > SAME).any()):
                both = Both(both.name, ours, right, rows, code=code, looks=self._looks(ours, right, places, layer))
            yield both

    def _looks(self, ours: Tensor, right: Tensor, places: Sequence[int], layer: Any) -> str:  # noqa: ANN401
        """Whose rows were fed instead."""
        wrong = [i for i in range(len(ours)) if float(relative(ours[i : i + 1], right[i : i + 1])) > SAME]
        if not bool(ours[wrong].any()):
            return f"all zero at {len(wrong)} of {len(ours)} rows"
        found = Counter[str]()
        for i in wrong:
            found.update(set(self._whose(ours[i], places[i], layer)))
        phrase, count = found.most_common(1)[0] if found else ("", 0)
        return f"{phrase}, at {count} of {len(wrong)} rows that are off" if count >= MOST * len(wrong) else ""

    def _whose(self, row: Tensor, place: int, layer: Any) -> Iterator[str]:  # noqa: ANN401
        """What a row that was fed at a position is, in words."""
        for other, every in self.entered.items():
            for position in _where(every, row):
                shift = position - place
                rows = (
                    "its own position"
                    if not shift
                    else f"{abs(shift)} position{'s' * (abs(shift) > 1)} " + ("before" if shift < 0 else "after")
                )
                yield f"rows of {rows}" + ("" if other == layer else f" in layer {other}")
        for other, every in self.nodes.items():
            if _where(every, row):
                yield "rows of the tree's nodes" + ("" if other == layer else f" in layer {other}")


def _where(every: Tensor, row: Tensor) -> list[int]:
    """Which rows are this one."""
    if not len(every):
        return []
    off = (every - row).norm(dim=1) / row.norm().clamp(min=1e-12)
    rows: list[int] = (off < SAME).nonzero()[:, 0].tolist()
    return rows
