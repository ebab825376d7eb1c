"""What a watch asks of a model of our engine: how a pass is seen, and what it ought to give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from specscope.analyze.locate.model.reference import ModelPasses, ModelReference, ReferencePass, decoder_layers
from specscope.measure.locate.layer_taps import LayerCall
from specscope.measure.locate.pairs import Allowances, HeldPair
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer
from specscope.speculate.drafters.draft_model import DraftModel
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting

if TYPE_CHECKING:
    from specscope.model.runner import ModelRunner

Fed = tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]  # as ModelPasses.feed takes it


@dataclass(frozen=True)
class FedPart:
    """A request's part of a pass: its rows among those of all segments."""

    request: str
    segment: Segment
    given: slice  # among all that are fed
    wanted: slice  # among the logits


@dataclass
class Seen:
    """What the engine gave in a pass, all of it in the order of the segments."""

    calls: dict[str, LayerCall]  # by layer
    tensors: dict[str, tuple[str, Tensor]]  # by operation: of which rows, by FedPart's names; [rows, width]

    @property
    def batch(self) -> Batch:
        """How the rows were laid out."""
        return next(iter(self.calls.values())).batch


class ModelSide:
    """A model that a ModelRunner runs, and its reference over the texts of requests."""

    method = "forward_with_features"
    one_pass = by_operation = False  # what rounding explains inside a layer is not known by operation

    def __init__(
        self,
        runner: ModelRunner,
        reference: ModelReference,
        texts: Mapping[str, list[int]],
        fed: Callable[[FedPart], Fed],
    ) -> None:
        """`fed`: what a request ought to be fed."""
        self.runner, self.fed = runner, fed
        self.passes = {name: ModelPasses(reference, text) for name, text in texts.items()}
        self.limits = Allowances(reference.allowed(max(texts.values(), key=len)))

    def due(self, part: FedPart) -> tuple[ReferencePass | None, Allowances]:
        """What the pass ought to give, and what rounding explains."""
        return self.passes[part.request].feed(*self.fed(part), part.segment.wanted), self.limits

    def first(self, part: FedPart, right: ReferencePass) -> Iterator[HeldPair]:
        """What is compared before the pass itself."""
        return iter(())

    def ordered(self, name: str, right: Tensor) -> Tensor:
        """Right values of an operation inside a layer, in the engine's order of channels."""
        return right

    def run(self, forward: Any, segments: Sequence[Segment]) -> tuple[Any, Seen]:  # noqa: ANN401
        """A pass, and what was seen of it."""
        model: Any = self.runner.loaded.model
        base, calls, norms = getattr(model, model.base_model_prefix), dict[str, LayerCall](), list[Tensor]()
        with hooks() as put:
            for index, layer in enumerate(decoder_layers(model)):
                put(layer, lambda *call, index=index: calls.update({f"layers.{index}": call_of(index, *call)}))
            put(base, lambda module, given, named, out: norms.append(out[0][0].clone()))
            out = forward(segments)
        first = calls["layers.0"]
        every = {"embedding": first.hidden, "norm": norms[-1]}
        tensors = {name: ("given", x) for name, x in every.items()}
        return out, Seen(calls, tensors | {"lm_head": ("wanted", torch.cat(out[0]))})


@contextmanager
def hooks() -> Iterator[Callable[[nn.Module, Any], None]]:
    """Puts hooks on modules, told (module, given, named, out); they are taken off at the end."""
    handles: list[Any] = []
    try:
        yield lambda module, told: handles.append(
            module.register_forward_hook(lambda *call: told(*call) and None, with_kwargs=True)
        )
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def kept(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What modules give meanwhile, by name."""
    made: dict[str, Tensor] = {}
    with hooks() as put:
        for name, module in modules.items():
            put(module, lambda _, given, named, out, name=name: made.update({name: out.clone()}))
        yield made


def call_of(index: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> LayerCall:  # noqa: ANN401
    """A decoder layer's call as a hook sees it."""
    hidden = (given[0] if given else named["hidden_states"]).clone()
    rest = {name: value for name, value in named.items() if name not in ("pages", "hidden_states")}
    fused = layer.forward if isinstance(layer.forward, FusedLayer) else None
    forward = type(layer).forward.__get__(layer) if fused is not None else layer.forward

    def run(cache: Any) -> Tensor:  # noqa: ANN401
        return _out(forward(hidden.clone(), *given[1:], pages=cache, **rest))

    rotation = named.get("position_embeddings")
    made = _out(out).clone()
    return LayerCall(index, hidden[0], made, named["batch"], named["pages"], run, fused, None, rotation, layer)


def _out(made: Any) -> Tensor:  # noqa: ANN401
    rows: Tensor = (made[0] if isinstance(made, tuple) else made)[0]
    return rows


@dataclass
class Feeds:
    """What a drafter's pass is over, which is known only when it runs: committed tokens, or nodes of trees."""

    drafter: HeadDrafter | DraftModel
    drafting: Sequence[Drafting] = ()
    grows: bool = False  # whether the pass that runs now is over a tree's nodes

    def fed(self, part: FedPart) -> Fed:
        """What the drafter ought to be fed."""
        rows, end = len(part.segment.tokens), part.segment.length
        g = next((g for g in self.drafting if self.grows and g.context.request == part.request), None)
        if g is None:
            return end - rows, end, (), (), ()
        tree, nodes = g.builder, g.builder.fed[-rows:]
        return g.base, g.base, nodes, [tree.token[node] for node in nodes], [tree.parent[node] for node in nodes]
