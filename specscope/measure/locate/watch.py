"""A model of our engine beside its reference, pass by pass, while the engine runs them.

What a pass is fed, what leaves its layers and its logits are compared when it has run. Where a layer's output differs
first, the layer is run again there and then with its operations tapped: the batch, the cache and whatever went wrong
are still as they were. How a pass is seen, and what it ought to give, is asked of a side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.located import Stage
from specscope.analyze.locate.model.reference import ModelPasses, ModelReference, ReferencePass, decoder_layers
from specscope.measure.locate.layer_taps import LayerCall, layer_again
from specscope.measure.locate.pairs import Allowances, ComparedPass, HeldPair, heads_of
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting, DraftModel

if TYPE_CHECKING:
    from specscope.measure.locate.drive import Drive
    from specscope.measure.locate.question import WalkPlan
    from specscope.model.kv_cache import BlockTable
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


class ModelWatch:
    """Compares the passes of some requests, up to the first that differs."""

    def __init__(
        self,
        stage: Stage,
        drive: Drive,
        plan: WalkPlan,
        side: Any,  # noqa: ANN401  # a ModelSide, or another with its methods
        tables: Callable[[str], BlockTable | None],
    ) -> None:
        self.stage, self.drive, self.plan, self.side, self.tables = stage, drive, plan, side, tables
        self.last: dict[str, ComparedPass] = {}  # by request
        self.right: dict[str, tuple[FedPart, ReferencePass]] = {}  # of these
        self.wrong: ComparedPass | None = None
        self.passes = self.rows = 0  # that were compared; rows at all borders
        self.largest = 0.0  # error within what is allowed, over it

    @property
    def is_on(self) -> bool:
        """Whether passes are compared now."""
        running = bool(self.drive.fed) if self.stage is Stage.TARGET else True
        return self.wrong is None and running and self.drive.place <= self.plan.until

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch meanwhile."""
        runner, method = self.side.runner, self.side.method
        forward = getattr(runner, method)

        def watched(segments: Sequence[Segment], *hidden: Tensor) -> Any:  # noqa: ANN401
            parts = list(self._parts(segments)) if self.is_on else []
            if not parts:
                return forward(segments, *hidden)
            out, seen = self.side.run(forward, segments, *hidden)
            found = [self._compared(part, seen) for part in parts]
            wrong = [each for each in found if each is not None and each.wrong is not None]
            self.wrong = min(wrong, key=lambda each: len(each.held), default=None)
            return out

        with patch.object(runner, method, watched):
            yield

    def compare(self, request: str, pairs: Iterable[HeldPair]) -> bool:
        """Compare more of a request's last pass; whether something differs, in it or before."""
        if self.wrong is None and self.last[request].compare(pairs):
            self.wrong = self.last[request]
        return self.wrong is not None

    def _parts(self, segments: Sequence[Segment]) -> Iterator[FedPart]:
        """The watched requests' parts of a pass."""
        watched: Collection[str] = self.side.passes
        tables = {id(table): name for name in watched if (table := self.tables(name)) is not None}
        given = wanted = 0
        for segment in segments:
            given_to, wanted_to = given + len(segment.tokens), wanted + len(segment.wanted)
            if (request := tables.get(id(segment.table))) is not None:
                yield FedPart(request, segment, slice(given, given_to), slice(wanted, wanted_to))
            given, wanted = given_to, wanted_to

    def _compared(self, part: FedPart, seen: Seen) -> ComparedPass | None:
        right, limits = self.side.due(part)
        if right is None:
            return None
        self.right[part.request], where = (part, right), self.drive.where(part.request)
        compared = self.last[part.request] = ComparedPass(self.stage, where, right.rows, limits)
        compared.compare(self._pairs(part, right, seen))
        self.passes += 1
        for held in (each for each in compared.held if each.allowed):
            self.rows += held.rows
            if not held.differs:
                self.largest = max(self.largest, held.error / held.allowed)
        return compared

    def _pairs(self, part: FedPart, right: ReferencePass, seen: Seen) -> Iterator[HeldPair]:
        """The pass's operations, both sides, in the order of computing."""
        batch, rows, wanted = seen.batch, right.rows, list(part.segment.wanted)
        yield from self.side.first(part, right)
        for name, values in (("tokens", batch.tokens[0]), ("positions", batch.positions[0])):
            due = torch.tensor([getattr(row, name.removesuffix("s")) for row in rows])[:, None]
            ours = values[part.given, None].cpu()
            yield HeldPair(name, ours, due, rows, exact=True)
        for name, due in right.taps.items():
            due = due.flatten(1)
            if (call := seen.calls.get(name)) is not None:
                ours = call.out[part.given].float().cpu()
                inside = partial(self._inside, name, call, part, right)
                yield HeldPair(name, ours, due, rows, certain=False, inside=inside)
            elif name in seen.tensors:
                kind, every = seen.tensors[name]
                here, ours = rows[: len(due)], every[getattr(part, kind)]
                if kind == "wanted":
                    here, due = tuple(rows[i] for i in wanted), due if len(due) == len(wanted) else due[wanted]
                yield HeldPair(name, ours[: len(due)].float().cpu(), due, here)

    def _inside(
        self, layer: str, call: LayerCall, part: FedPart, right: ReferencePass, limit: float
    ) -> Iterator[HeldPair]:
        """The operations of one layer, run again."""
        again, every = layer_again(call), right.inside(layer)
        slots = part.segment.table.slots(0, len(right.keys)).tolist()
        cache = {"keys": call.cache.key[call.layer], "values": call.cache.value[call.layer]}
        allowed = None if self.side.by_operation else limit
        for short, due in every.items():
            name, rows = f"{layer}.{short}", right.rows
            if short == "self_attn.scores" and again.weights is not None:
                weights = again.weights(slots)[part.given].cpu()
                due = due.exp().reshape(weights.shape)
                weights = _to_the_same_sum(weights, due)
                yield HeldPair(name, weights, due, rows, keys=right.keys, allowed=allowed)
                continue
            if short.endswith(" read"):
                ours, rows = cache[short.split(".")[1].split()[0]][:, slots].transpose(0, 1).flatten(1), right.keys
            elif short in again.taps:
                ours = again.taps[short][part.given]
            else:
                continue
            if ours.shape == (due := self.side.ordered(short, due.flatten(1))).shape:
                heads = heads_of(short, again.heads, again.kv_heads)
                yield HeldPair(name, ours.float().cpu(), due, rows, heads, allowed=allowed)


def _to_the_same_sum(ours: Tensor, right: Tensor) -> Tensor:
    """Weights [rows, heads, keys] of heads that give a constant share of what they should, brought to the right sum.

    Such a head's output is scaled, or nothing: that is no matter of its scores.
    """
    share = ours.sum(-1) / right.sum(-1).clamp(min=1e-12)
    mean = share.mean(0)
    constant = (share - mean).abs().amax(0) <= 1e-3 * mean.abs().clamp(min=1e-6)
    is_some = (mean.abs() > 1e-6)[None, :, None]
    whole = torch.where(is_some, ours / mean.clamp(min=1e-6)[None, :, None], right)
    return torch.where(constant[None, :, None], whole, ours)


def target_watch(drive: Drive, plan: WalkPlan, reference: ModelReference, stack: ExitStack) -> ModelWatch:
    """Watches the target of a drive, as long as the stack is open."""

    def fed(part: FedPart) -> Fed:
        step = drive.part_of(part.request)
        assert step is not None
        end = step.context_len + step.prefill_tokens + (step.verdict is not None)
        return step.context_len, end, range(len(step.tree)), step.tree.token.tolist(), step.tree.parent.tolist()

    side = ModelSide(drive.engine.runner, reference, plan.texts, fed)
    watch = ModelWatch(Stage.TARGET, drive, plan, side, drive.table_of)
    stack.enter_context(watch.on())
    return watch
