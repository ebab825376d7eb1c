"""A model of our engine beside its reference, pass by pass, while the engine runs them.

Where a layer's output differs first, it is run again there and then with its operations tapped. How a pass is seen, and
what it ought to give, is asked of a side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.located import Stage
from specscope.analyze.locate.model.reference import (
    IN,
    ModelPasses,
    ModelReference,
    ReferencePass,
    Taps,
    decoder_layers,
    hooked,
    relative,
)
from specscope.measure.locate.drive import Drive, WalkPlan
from specscope.measure.locate.pairs import Allowances, ComparedPass, HeldPair, heads_of
from specscope.model import attention
from specscope.model.batch import Batch, Segment
from specscope.model.fast import decoder
from specscope.model.fast.decoder import FusedLayer
from specscope.model.kv_cache import BlockTable, KVCache
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting, DraftModel

SAME = 1e-4  # relative: a layer that was run again gives what it gave


@dataclass(frozen=True)
class LayerCall:
    """One call of a decoder layer. Filled by a hook."""

    layer: int
    hidden: Tensor  # [N, width] what entered
    out: Tensor  # [N, width]
    batch: Batch
    cache: KVCache
    run: Callable[[KVCache], Tensor] | None = None  # the module's own forward over the same rows, [N, width]
    fused: FusedLayer | None = None
    projected: Tensor | None = None  # of a head's first layer: what attention projects
    rotation: tuple[Tensor, Tensor] | None = None  # of a fused layer: cos and sin
    module: nn.Module | None = None  # whose children are tapped where it runs by itself


def layer_again(call: LayerCall) -> LayerTaps:
    """The layer once more, tapped: a fused one by its own steps without the compiled kernels, else through the module's
    own forward. The way that gives what the engine's layer gave, else the first.
    """
    runs = [] if call.fused is None else [_again(call, fused=True)]
    if (not runs or not runs[0].same) and call.module is not None:
        runs.append(_again(call, fused=False))
    return next((run for run in runs if run.same), runs[0])


@torch.inference_mode()
def _again(call: LayerCall, *, fused: bool) -> LayerTaps:
    made, rows = LayerTaps(call), len(call.hidden)
    told = nullcontext() if fused or call.module is None else hooked(call.module, made.put, lambda: rows)
    with _kept(call), made.on(), told:
        out = made.fused() if fused or call.run is None else call.run(call.cache)
    made.same = bool(relative(out.float(), call.out.float()).max() < SAME)
    made.taps = made.recorder.take()
    return made


@contextmanager
def _kept(call: LayerCall) -> Iterator[None]:
    """What the layer wrote into the cache stays as it was."""
    slots, stores = call.batch.slots, (call.cache.key[call.layer], call.cache.value[call.layer])
    before = [store[:, slots].clone() for store in stores]
    try:
        yield
    finally:
        for store, rows in zip(stores, before, strict=True):
            store[:, slots] = rows


class LayerTaps:
    """What a layer's operations gave when it was run again, [N, width] by name, in the order of the batch's rows."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.recorder = call, Taps()
        self.put = self.recorder.put
        self.taps: dict[str, Tensor] = {}
        self.same = False  # whether what came out is what the engine's layer gave
        self.heads, self.kv_heads = 0, call.cache.layers[call.layer].heads
        self.weights: Callable[[list[int]], Tensor] | None = None  # [N, H, K] of attention, over K slots

    @contextmanager
    def on(self) -> Iterator[None]:
        """Attention is tapped, wherever it is called from, and what is written into the cache."""
        store, shape = self.call.cache, self.call.cache.layers[self.call.layer]
        write, sizes = store.write_rows, [shape.heads * shape.key_size, shape.heads * shape.value_size]

        def written(layer: int, slots: Tensor, rows: Tensor) -> None:
            for name, part in zip(("key", "value"), rows.split(sizes, 1), strict=True):
                self.put(f"self_attn.{name}", part)
            write(layer, slots, rows)

        def tapped(function: Any) -> Any:  # noqa: ANN401
            def paged(query: Tensor, layer: int, cache: KVCache, *how: Any) -> Tensor:  # noqa: ANN401
                out: Tensor = function(query, layer, cache, *how)
                self.heads, attend = query.shape[1], partial(function, query.clone(), layer, cache, *how)
                self.put("self_attn.query", query)
                self.put("self_attn.attention", out)
                self.weights = partial(_weights, attend, cache.value[layer])
                return out

            return paged

        with (
            patch.object(store, "write_rows", written),
            patch.object(attention, "paged_attention", tapped(attention.paged_attention)),
            patch.object(decoder, "paged_attention", tapped(vars(decoder)["paged_attention"])),
        ):
            yield

    def fused(self) -> Tensor:
        """The fused layer's own steps, each with its output tapped."""
        call = self.call
        assert call.fused is not None
        assert call.rotation is not None
        layer = copy.copy(call.fused)
        layer.compiled, layer.stack = None, None
        layer.first_norm = self._tapped(layer.first_norm, "input_layernorm")
        layer.second_norm = self._tapped(layer.second_norm, "post_attention_layernorm", inputs=True)
        sizes = [heads * layer.size for heads in (layer.heads, layer.kv_heads, layer.kv_heads)]
        layer.qkv = self._tapped(layer.qkv, *(f"self_attn.{part}_proj" for part in "qkv"), sizes=sizes)
        layer.gate_up = self._tapped(layer.gate_up, "mlp.gate_proj", "mlp.up_proj")
        layer.act = self._tapped(layer.act, "mlp.act_fn")
        layer.out = self._tapped(layer.out, "self_attn.o_proj", inputs=True)
        layer.down = self._tapped(layer.down, "mlp.down_proj", inputs=True)
        if layer.head_norms is not None:
            query, key = layer.head_norms
            layer.head_norms = self._tapped(query, "self_attn.q_norm"), self._tapped(key, "self_attn.k_norm")
        if call.projected is not None:
            self.put("self_attn.q_proj" + IN, call.projected)
        return layer.run(call.hidden.clone(), call.projected, call.rotation, call.batch, call.cache)

    def _tapped(self, function: Any, *names: str, sizes: Sequence[int] = (), inputs: bool = False) -> Any:  # noqa: ANN401
        """Its output is tapped, by parts where it makes several at once; without sizes they are alike."""

        def tapped(x: Tensor) -> Tensor:
            if inputs:
                self.put(names[0] + IN, x)
            out: Tensor = function(x)
            parts = out.split(list(sizes), dim=-1) if sizes else out.chunk(len(names), dim=-1)
            for name, part in zip(names, parts, strict=True):
                self.put(name, part)
            return out.clone()  # the layer goes on in place

        return tapped


def _weights(attend: Callable[[], Tensor], value: Tensor, slots: list[int]) -> Tensor:
    """[N, H, K] how much each row attends to each of K slots of a layer's values, whatever computes it.

    Attention is linear in the values. So it is asked for the values 1 in one channel and 0 elsewhere, a slot a channel.
    """
    places, size, parts = torch.tensor(slots), value.shape[2], list[Tensor]()
    before = value[:, places].clone()
    try:
        with torch.inference_mode():
            for here in places.split(size):
                value[:, places] = 0
                value[:, here] = torch.eye(size, dtype=value.dtype)[: len(here)]
                parts.append(attend()[..., : len(here)].float())
    finally:
        value[:, places] = before
    return torch.cat(parts, dim=-1)


Texts = Mapping[str, list[int]]
Fed = tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]  # as ModelPasses.feed takes it
FedBy = Callable[["FedPart"], Fed]


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
        return next(iter(self.calls.values())).batch


class ModelSide:
    """A model that a ModelRunner runs, and its reference over the texts of requests."""

    method = "forward_with_features"
    one_pass = by_operation = False  # what rounding explains inside a layer is not known by operation

    def __init__(self, runner: ModelRunner, reference: ModelReference, texts: Texts, fed: FedBy) -> None:
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

    def run(self, forward: Any, segments: Sequence[Segment]) -> tuple[Any, Seen]:  # noqa: ANN401
        model: Any = self.runner.loaded.model
        base, calls, norms = getattr(model, model.base_model_prefix), dict[str, LayerCall](), list[Tensor]()
        with hooks() as put:
            for index, layer in enumerate(decoder_layers(model)):
                put(layer, lambda *call, index=index: calls.update({f"layers.{index}": call_of(index, *call)}))
            put(base, lambda module, given, named, out: norms.append(out[0][0].clone()))
            out = forward(segments)
        tensors = {"embedding": ("given", calls["layers.0"].hidden), "norm": ("given", norms[-1])}
        return out, Seen(calls, tensors | {"lm_head": ("wanted", torch.cat(out[0]))})


@contextmanager
def hooks() -> Iterator[Callable[[nn.Module, Any], object]]:
    """Puts hooks on modules, told (module, given, named, out); they are taken off at the end."""
    with ExitStack() as stack:
        yield lambda module, told: stack.enter_context(
            module.register_forward_hook(lambda *call: told(*call) and None, with_kwargs=True)
        )


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
    run = lambda cache: _out(forward(hidden.clone(), *given[1:], pages=cache, **rest))  # noqa: E731
    made, rotation = _out(out).clone(), named.get("position_embeddings")
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
        rows, end = len(part.segment.tokens), part.segment.length
        for g in self.drafting:
            if self.grows and g.context.request == part.request:
                nodes, (token, parent) = g.builder.fed[-rows:], (g.builder.token, g.builder.parent)
                return g.base, g.base, nodes, [token[node] for node in nodes], [parent[node] for node in nodes]
        return end - rows, end, (), (), ()


@dataclass
class ModelWatch:
    """Compares the passes of some requests, up to the first that differs."""

    stage: Stage
    drive: Drive
    plan: WalkPlan
    side: Any  # a ModelSide, or another with its methods
    tables: Callable[[str], BlockTable | None]
    last: dict[str, ComparedPass] = field(default_factory=dict)  # by request
    right: dict[str, tuple[FedPart, ReferencePass]] = field(default_factory=dict)  # of these
    wrong: ComparedPass | None = None
    passes: int = 0  # that were compared
    rows: int = 0  # at all borders
    largest: float = 0.0  # error within what is allowed, over it

    @property
    def is_on(self) -> bool:
        running = self.stage is not Stage.TARGET or bool(self.drive.fed)
        return self.wrong is None and running and self.drive.place <= self.plan.until

    @contextmanager
    def on(self) -> Iterator[None]:
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
        again, slots = layer_again(call), part.segment.table.slots(0, len(right.keys)).tolist()
        ours = {name: (x[part.given], right.rows) for name, x in again.taps.items()}
        for what, store in (("keys", call.cache.key), ("values", call.cache.value)):
            ours[f"self_attn.{what} read"] = store[call.layer][:, slots].transpose(0, 1).flatten(1), right.keys
        allowed = None if self.side.by_operation else limit
        for short, due in right.inside(layer).items():
            name = f"{layer}.{short}"
            if short == "self_attn.scores" and again.weights is not None:
                weights = again.weights(slots)[part.given].cpu()
                due = due.exp().reshape(weights.shape)
                weights = _to_the_same_sum(weights, due)
                yield HeldPair(name, weights, due, right.rows, keys=right.keys, allowed=allowed)
            elif short in ours and ours[short][0].shape == (due := due.flatten(1)).shape:
                x, rows = ours[short]
                heads = heads_of(short, again.heads, again.kv_heads)
                yield HeldPair(name, x.float().cpu(), due, rows, heads, allowed=allowed)


def _to_the_same_sum(ours: Tensor, right: Tensor) -> Tensor:
    """Weights [rows, heads, keys] of heads that give a constant share of what they should, brought to the right sum:
    such a head's output is scaled, or nothing, and that is no matter of its scores."""
    share = ours.sum(-1, keepdim=True) / right.sum(-1, keepdim=True).clamp(min=1e-12)
    mean = share.mean(0, keepdim=True)
    constant = (share - mean).abs().amax(0, keepdim=True) <= 1e-3 * mean.abs().clamp(min=1e-6)
    whole = torch.where(mean.abs() > 1e-6, ours / mean.clamp(min=1e-6), right)
    return torch.where(constant, whole, ours)


def target_watch(drive: Drive, plan: WalkPlan, reference: ModelReference, stack: ExitStack) -> ModelWatch:
    def fed(part: FedPart) -> Fed:
        step = drive.part_of(part.request)
        assert step is not None
        end = step.context_len + step.prefill_tokens + (step.verdict is not None)
        return step.context_len, end, range(len(step.tree)), step.tree.token.tolist(), step.tree.parent.tolist()

    side = ModelSide(drive.engine.runner, reference, plan.texts, fed)
    watch = ModelWatch(Stage.TARGET, drive, plan, side, drive.table_of)
    stack.enter_context(watch.on())
    return watch
