"""A target's next-token module as a watch sees it: what HeadSide is to an EAGLE head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from specscope.analyze.locate.model.reference import inside
from specscope.errors import UserError
from specscope.measure.locate.head_side import HeadSide
from specscope.measure.locate.layer_taps import LayerCall, code_of
from specscope.measure.locate.sides import Feeds, Seen, call_of, hooks
from specscope.model.batch import Segment
from specscope.speculate.drafters.tree_builder import TreeBuilder

if TYPE_CHECKING:
    from specscope.analyze.audit.model.mtp import Modules
    from specscope.measure.locate.features import TrueFeatures
    from specscope.model.heads.mtp import MtpRunner

PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")
LAYER = "layers.0"


class ModulesSide(HeadSide):
    """A single module, iterated, and its reference over what the target's own layers gave."""

    def __init__(
        self, runner: MtpRunner, feeds: Feeds, head: Modules, texts: Mapping[str, list[int]], features: TrueFeatures
    ) -> None:
        """Raises UserError where each depth has its module: their passes go over the same slots."""
        drafter: Any = feeds.drafter
        if not drafter.iterates:
            why = "a pass goes over the slots of the module before, and only one module that is iterated is walked"
            raise UserError(f"{runner.modules} next-token modules draft a depth each: {why}; audit judges them all")
        head.inside = lambda layer, put, rows: inside(layer, put, lambda: rows)
        super().__init__(runner, feeds, head, texts, features)

    def run(self, forward: Any, segments: Sequence[Segment], hidden: Tensor) -> tuple[Any, Seen]:  # noqa: ANN401
        """A pass, and what was seen of it."""
        module, calls, made = self.runner.loaded.model.layers[0], dict[str, LayerCall](), dict[str, Tensor]()
        parts: dict[str, nn.Module] = {"embedding": self.runner.loaded.model.embed_tokens}
        parts |= {name: getattr(module, name) for name in PARTS}

        def keep(name: str, given: tuple[Any, ...], out: Tensor) -> None:
            made[f"{name}:in"], made[name] = given[0][0].clone(), out[0].clone()

        with hooks() as put:
            for name, part in parts.items():
                put(part, lambda _, given, named, out, name=name: keep(name, given, out))
            put(module.mtp_block, lambda *call: calls.update({LAYER: call_of(0, *call)}))
            out = forward(segments, hidden)
        tensors = {name: ("given", x) for name, x in made.items()}
        tensors |= {"fed back": ("given", hidden), "lm_head": ("wanted", out[0])}
        fed = TreeBuilder.segment if self.feeds.grows else self.feeds.drafter.pending
        made_by: dict[str, object] = {**parts, "eh_proj:in": module, "lm_head": self.runner.loaded.output}
        made_by |= {"tokens": fed, "positions": fed, "fed back": type(self.feeds.drafter).feed_frontier}
        return out, Seen(calls, tensors, {name: code_of(function) for name, function in made_by.items()})
