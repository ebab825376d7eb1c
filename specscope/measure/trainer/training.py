"""The training code's forward over a text, as the reference: specscope's own, in float32 and in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.measure.trainer.folders import weight_of
from specscope.measure.trainer.taps import FIRST, LATE, Calls, Pass, in_order, module_taps
from specscope.model.heads.eagle_head import EagleHead
from specscope.model.heads.head_loader import LoadedHead
from specscope.train import eagle3, p_eagle
from specscope.train.attend import HeadRotary
from specscope.train.scores import Padded, TargetTensors


@dataclass(frozen=True)
class ForcedText:
    """A text with what the target computed along it, and the places that are compared."""

    tokens: Sequence[int]  # [T]
    features: Tensor  # [T, aux_layers * width] of the head's own layers
    final: Tensor  # [T, width] what the target's own head turns into logits
    places: Sequence[int]


class OwnTraining:
    """specscope train's forward."""

    name = "specscope's training forward"

    def __init__(self, loaded: LoadedHead, rows: Tensor) -> None:
        """`rows`: of the target's head, [draft vocabulary, width]. Raises UserError for what is not trained here."""
        config = loaded.head.config
        if config.version != 3 or config.layers > 1 or any(config.windows):
            kind = "is an EAGLE-1 head" if config.version != 3 else "has several layers or a sliding window"
            raise UserError(f"{loaded.name} {kind}, which specscope's training has not: its forward is no reference")
        self.head = loaded.head
        self._embedding, self._rows = weight_of(loaded.embedding), rows

    def passes(self, text: ForcedText, depths: int, dtype: torch.dtype) -> list[Pass]:
        """The operations of each depth, teacher-forced; computed in `dtype`."""
        head = self.head if dtype is torch.float32 else copy.deepcopy(self.head).to(dtype)
        target = TargetTensors(self._embedding.to(dtype), self._rows.to(dtype))
        tokens = torch.tensor([list(text.tokens)])
        given = torch.ones_like(tokens, dtype=torch.bool)
        batch = Padded(tokens, given, given, text.features.to(dtype)[None], text.final.to(dtype)[None])
        with torch.no_grad(), module_taps(head) as calls:
            if head.config.parallel is None:
                eagle3.forward(head, target, batch, depths)
            else:
                p_eagle.forward(head, target, batch, p_eagle.every_anchor(batch, depths))
            split = _one_pass if head.config.parallel is not None else _passes
            return split(head, calls, text, depths)


def _passes(head: EagleHead, calls: Calls, text: ForcedText, depths: int) -> list[Pass]:
    """EAGLE-3: each module runs once a depth over the whole sequence."""
    pairs, fed = len(text.tokens) - 1, calls.pop("hidden")
    passes: list[Pass] = []
    for depth in range(depths):
        values = {name: made[depth] for name, made in calls.items() if depth < len(made)}
        if depth:
            values["fed back"] = fed[depth]
        _turn(head, values, torch.arange(pairs + 1) + depth)
        passes.append(
            in_order({name: _rows(name, x, depth, text.places, pairs) for name, x in values.items()}, head.config)
        )
    return passes


def _rows(name: str, x: Tensor, depth: int, places: Sequence[int], pairs: int) -> Tensor:
    return x[list(places)] if depth or name.rpartition("/")[2] in LATE else x[:pairs]


EARLY = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "input_layernorm", "hidden_norm", "residual")


def _one_pass(head: EagleHead, calls: Calls, text: ForcedText, depths: int) -> list[Pass]:
    """P-EAGLE: what precedes attention runs for the text and once for all mask rows, the rest once for all depths."""
    pairs, places = len(text.tokens) - 1, list(text.places)
    calls.pop("hidden")
    passes: list[Pass] = []
    start = 0
    for depth in range(depths):
        values, here = {}, [start + place for place in places]
        for name, made in calls.items():
            early = len(made) > 1 or name.rpartition("/")[2] in EARLY
            late = name.rpartition("/")[2] in LATE or depth
            values[name] = made[min(depth, 1)] if early else made[0][here if late else slice(pairs)]
        if depth == 0:
            values = {name: x[:pairs] if len(x) == pairs + 1 else x for name, x in values.items()}
        else:
            values = {name: x.expand(len(places), -1) if len(x) == 1 else x for name, x in values.items()}
        _turn(head, values, torch.arange(pairs) if not depth else torch.tensor(places) + depth)
        passes.append(in_order(values, head.config))
        start += len(text.tokens) - 1 - depth
    return passes


def _turn(head: EagleHead, values: dict[str, Tensor], positions: Tensor) -> None:
    """Queries and keys after rotary: training's own tables over its own projections."""
    rotary, size = HeadRotary(head, int(positions.max()) + 1), head.midlayer.self_attn.size
    for part, name in (("q_proj", "query"), ("k_proj", "key")):
        x = values[f"{FIRST}/self_attn.{part}"]
        values[f"{FIRST}/self_attn.{name}"] = rotary.turn(x.unflatten(-1, (-1, size)), positions).flatten(-2)
