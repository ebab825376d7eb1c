"""The passes of EAGLE and DFlash heads and of a target's next-token module as a watch sees them, and their references
over what the target's own layers gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.model.head_passes import BlockPasses, HeadPasses
from specscope.analyze.locate.model.reference import ReferencePass, inside
from specscope.errors import UserError
from specscope.measure.locate.features import TrueFeatures
from specscope.measure.locate.layer_taps import LayerCall
from specscope.measure.locate.pairs import LAYER, Allowances, HeldPair
from specscope.measure.locate.watch import FedPart, Feeds, Seen, call_of, hooks, kept
from specscope.model.batch import Segment
from specscope.model.fast.decoder import FusedLayer
from specscope.model.heads.eagle_head import EagleHead, in_halves

if TYPE_CHECKING:
    from specscope.analyze.audit.model.block import BlockHead
    from specscope.analyze.audit.model.head import Head
    from specscope.analyze.audit.model.mtp import Modules
    from specscope.model.heads.dflash import DFlashRunner
    from specscope.model.heads.head_runner import HeadRunner
    from specscope.model.heads.mtp import MtpRunner

STEEP = 32.0  # nats between scores, from which on rounding grows with them
PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")
ROTATED = ("q_proj", "k_proj", ".query", ".key", ".keys read")


class HeadSide:
    """An EAGLE head, and its reference over what the target's own layers gave."""

    method, by_operation = "forward", True
    passes_of: Any = HeadPasses  # along a text

    def __init__(
        self,
        runner: HeadRunner | DFlashRunner | MtpRunner,
        feeds: Feeds,
        head: Head | BlockHead,
        texts: Mapping[str, list[int]],
        features: TrueFeatures,
    ) -> None:
        self.runner: Any = runner
        self.feeds, self.features = feeds, features
        self.layers, self.one_pass = head.names, head.mask_token is not None
        self.passes = {name: self.passes_of(head, text, features.along[name]) for name, text in texts.items()}
        self._usual = {name: passes.allowed() | features.allowed for name, passes in self.passes.items()}
        for usual in self._usual.values():
            usual["vocabulary"] = usual.get("d2t", usual["lm_head"])  # where the vocabulary is not reduced
        self._slack: dict[str, float] = {}  # by how much more rounding moves a pass, or one that fed it
        self._fed = torch.empty(0)  # the features that were combined last
        self._combined: dict[str, Tensor] = {}  # what combining them gave, by operation
        ours = getattr(runner, "head", None)  # a target's modules have no features to combine
        self.order = in_halves(ours.config) if isinstance(ours, EagleHead) else None  # of channels, as published

    @property
    def combines(self) -> dict[str, nn.Module]:
        """What combines features, as the runner has it now."""
        head = getattr(self.runner, "head", None)
        norms = {"input_norm": getattr(head, "input_norm", None)}
        norms |= {f"fc_norm.{i}": norm for i, norm in enumerate(getattr(head, "fc_norm", ()))}
        return {name: norm for name, norm in norms.items() if norm is not None}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Keep what combines features meanwhile."""
        combine = self.runner.combine

        def combining(features: Tensor) -> Tensor:
            with kept(self.combines) as self._combined:
                self._fed = features
                combined: Tensor = combine(features)
                return combined

        with patch.object(self.runner, "combine", combining), self.features.on():
            yield

    def due(self, part: FedPart) -> tuple[ReferencePass, Allowances]:
        """What the pass ought to give, and what rounding explains."""
        name, passes = part.request, self.passes[part.request]
        passes.features = self.features.along[name]
        right = passes.feed(*self.feeds.fed(part))
        self._slack[name] = max(steepness(right), self._slack.get(name, 1.0) if self.feeds.grows else 1.0)
        return right, Allowances(self._usual[name], LAYER, torch.inf, self._slack[name])

    def first(self, part: FedPart, right: ReferencePass) -> Iterator[HeldPair]:
        """The features that feed the pass."""
        if not self.feeds.grows:
            fed = self._fed[part.given]
            yield from self.features.compared(part.request, fed, right.rows[: len(fed)])

    def ordered(self, name: str, right: Tensor) -> Tensor:
        """Right values of an operation inside a layer, in the engine's order of channels."""
        if self.order is not None and name.endswith(ROTATED):
            right = right.unflatten(1, (-1, len(self.order)))[..., self.order].flatten(1)
        return right

    def run(self, forward: Any, segments: Sequence[Segment], hidden: Tensor) -> tuple[Any, Seen]:  # noqa: ANN401
        """A pass, and what was seen of it."""
        runner, head, is_three = self.runner, self.runner.head, self.runner.head.config.version == 3
        modules: dict[str, nn.Module] = {"embedding": runner.loaded.embedding}
        if is_three:
            modules |= {f"midlayer.{name}": getattr(head.midlayer, name) for name in ("hidden_norm", "input_layernorm")}
        modules |= {"norm": head.norm} if is_three else {"fc": head.fc}
        with spied((runner.layer, *runner.further)) as calls, kept(modules) as made:
            out = forward(segments, hidden)
        tensors = {name: ("given", x) for name, x in self._combined.items()}
        tensors |= {name: ("given", x) for name, x in made.items() if name != "norm"}
        tensors |= {"fed back": ("given", hidden), "lm_head": ("wanted", out[0])}
        if is_three:
            tensors |= {"fc": ("given", hidden), "norm": ("wanted", made["norm"])}
        return out, self.seen(calls, tensors)

    def seen(self, calls: Sequence[LayerCall], tensors: Mapping[str, Any]) -> Seen:
        """Of a pass the calls of its layers, and what else it made."""
        return Seen(dict(zip(self.layers, calls, strict=True)), dict(tensors))


class BlockSide(HeadSide):
    """A DFlash head: what is written of committed positions, then a block's rows."""

    passes_of = BlockPasses

    @property
    def combines(self) -> dict[str, nn.Module]:
        """What makes states of features."""
        return {"fc": self.runner.fc, "hidden_norm": self.runner.head.hidden_norm}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Keep what is written of committed positions meanwhile."""
        write = self.runner.write_context
        # By table what was written last, and its rows of `_fed` and `_combined`
        self._written: dict[int, tuple[Segment, slice]] = {}

        def writing(segments: Sequence[Segment], states: Tensor) -> None:
            row = 0
            for segment in segments:
                end = row + len(segment.tokens)
                self._written[id(segment.table)], row = (segment, slice(row, end)), end
            write(segments, states)

        with patch.object(self.runner, "write_context", writing), super().on():
            yield

    def due(self, part: FedPart) -> tuple[ReferencePass, Allowances]:
        """What the pass ought to give, and what rounding explains."""
        passes, (segment, _) = self.passes[part.request], self._written[id(part.segment.table)]
        passes.features = self.features.along[part.request]
        end = next(g.base for g in self.feeds.drafting if g.context.request == part.request)
        right = passes.feed(min(segment.context, end), end, len(part.segment.tokens))
        return right, Allowances(self._usual[part.request], LAYER, torch.inf, steepness(right))

    def first(self, part: FedPart, right: ReferencePass) -> Iterator[HeldPair]:
        """The features of the positions that were written, and what was made of them."""
        (segment, here), due = self._written[id(part.segment.table)], self.passes[part.request].written
        start, count = segment.context, len(due["fc"])
        rows, here = right.keys[start : start + count], slice(here.start, here.start + count)
        yield from self.features.compared(part.request, self._fed[here], rows)
        for name in self.combines:
            yield HeldPair(name, self._combined[name][here].float().cpu(), due[name], rows)
        cache, slots = self.runner.cache, segment.table.slots(start, start + count)
        for index, layer in enumerate(self.layers):
            for what, store in (("key", cache.key[index]), ("value", cache.value[index])):
                name, ours = f"{layer}.self_attn.context {what}", store[:, slots].transpose(0, 1).flatten(1)
                yield HeldPair(name, ours.float().cpu(), due[name].flatten(1), rows, heads=len(store))

    def run(self, forward: Any, segments: Sequence[Segment], *_: Tensor) -> tuple[Any, Seen]:  # noqa: ANN401
        """A pass, and what was seen of it."""
        runner, modules = self.runner, {"embedding": self.runner.loaded.embedding, "norm": self.runner.head.norm}
        with spied(runner.layers) as calls, kept(modules) as made:
            logits = forward(segments)
        tensors = {"embedding": ("given", made["embedding"]), "norm": ("wanted", made["norm"])}
        return logits, self.seen(calls, {**tensors, "lm_head": ("wanted", logits)})


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
            put(module.mtp_block, lambda *call: calls.update({"layers.0": call_of(0, *call)}))
            out = forward(segments, hidden)
        tensors = {name: ("given", x) for name, x in made.items()}
        tensors |= {"fed back": ("given", hidden), "lm_head": ("wanted", out[0])}
        return out, Seen(calls, tensors)


@contextmanager
def spied(layers: Sequence[FusedLayer]) -> Iterator[list[LayerCall]]:
    """The calls of these layers meanwhile."""
    calls = list[LayerCall]()

    def run(layer: FusedLayer, right: Any, x: Tensor, projected: Tensor | None, *given: Any) -> Tensor:  # noqa: ANN401
        hidden, (rotation, batch, cache) = x.clone(), given
        out: Tensor = right(x, projected, *given)
        calls.append(LayerCall(layer.index, hidden, out.clone(), batch, cache, None, layer, projected, rotation))
        return out

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "run", partial(run, layer, layer.run)))
        yield calls


def steepness(right: ReferencePass) -> float:
    """By how much more than usual rounding moves attention's weights: large scores are rounded by more."""
    scores = [x for name, x in right.taps.items() if name.endswith(".scores")]
    spread = max((-float(x[x.isfinite()].min()) for x in scores), default=0.0)
    return max(1.0, spread / STEEP)
