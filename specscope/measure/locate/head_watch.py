"""An EAGLE head's passes beside the reference, while the engine makes them.

What feeds each pass, what leaves its layers and its logits are compared at once. Where a layer's output differs first,
the layer is run again there and then with its operations tapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from specscope.analyze.locate.model.head_passes import HeadPass, HeadPasses
from specscope.measure.locate.both import COMPILED, Both, PassCompared
from specscope.measure.locate.choices import Choices
from specscope.measure.locate.features import TrueFeatures
from specscope.measure.locate.layer_taps import LayerCall, code_of, layer_again
from specscope.model.batch import Batch, Segment
from specscope.model.fast.decoder import FusedLayer
from specscope.model.heads.eagle_head import EagleHead, in_halves
from specscope.model.kv_cache import KVCache
from specscope.speculate.drafters.eagle import Eagle
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.speculate.drafters.tree_builder import Level, TreeBuilder

OF_QUERIES, OF_KEYS = ("q_proj", ".query", ".attention", "o_proj:in"), ("k_proj", "v_proj", ".key", " read")
STEEP = 32.0  # nats between scores, from which on rounding grows with them
ROTATED = ("q_proj", "k_proj", ".query", ".key", ".keys read")


@dataclass
class _Seen:
    """What the engine gave in the pass that runs now."""

    taps: dict[str, Tensor] = field(default_factory=dict)  # [N, width] in the batch's order; or of the wanted rows
    code: dict[str, str] = field(default_factory=dict)
    calls: list[LayerCall] = field(default_factory=list)  # of the head's layers
    batch: Batch | None = None

    def hook(self, name: str, module: nn.Module) -> Any:  # noqa: ANN401
        """Keep what a module gives."""

        def after(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
            self.taps[name] = out.clone()

        self.code[name] = code_of(module)
        return module.register_forward_hook(after)


class _SpiedLayer:
    """A head's layer, whose calls are kept. Several requests may be watched at once: then it is spied on by each."""

    def __init__(self, layer: FusedLayer | _SpiedLayer, calls: list[LayerCall]) -> None:
        self._layer, self._calls = layer, calls
        self.fused: FusedLayer = layer.fused if isinstance(layer, _SpiedLayer) else layer

    def run(
        self, x: Tensor, projected: Tensor | None, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache
    ) -> Tensor:
        """As FusedLayer.run."""
        fused, hidden = self.fused, x.clone()

        def again(pages: KVCache) -> Tensor:
            return fused.run(hidden.clone(), projected, rotation, batch, pages)

        out = self._layer.run(x, projected, rotation, batch, cache)
        call = LayerCall(fused.index, hidden, out.clone(), batch, cache, again, fused, projected, rotation)
        self._calls.append(call)
        return out


@dataclass(frozen=True)
class _Part:
    """The watched request's part of a pass."""

    segment: Segment
    given: slice  # its rows among the fed
    combined: slice  # its rows among the features that were combined
    wanted: slice  # its rows among the logits
    masks: int


class HeadWatch:
    """Compares a head's passes for one request. `passes`: those of the draft that was made last."""

    def __init__(self, drafter: Eagle, request: str, reference: HeadPasses, features: TrueFeatures) -> None:
        self.drafter, self.request, self.reference, self.features = drafter, request, reference, features
        self.runner = drafter.runner
        self.allowed = reference.allowed() | features.allowed
        self.allowed["vocabulary"] = self.allowed["d2t"]  # where the vocabulary is not reduced
        self.passes: list[PassCompared] = []
        self.compared = 0  # passes in all
        self.choices = Choices()
        self._drafting: Sequence[Drafting] = ()
        self._grows = False  # whether the pass that runs now is over a tree's nodes
        self._right: HeadPass | None = None  # of the pass that ran last
        self._wanted = slice(0, 0)
        self._slack = 1.0  # by how much more than usual rounding moves this pass, or one that fed it
        self._combined = _Seen()
        self._features = torch.empty(0)

    @property
    def _limits(self) -> dict[str, float]:
        """What rounding explains in the pass that runs."""
        return {name: limit * self._slack for name, limit in self.allowed.items()}

    @property
    def wrong(self) -> PassCompared | None:
        """The pass that differs first."""
        return next((each for each in self.passes if each.wrong is not None), None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """TargetWatch meanwhile."""
        drafter, runner = self.drafter, self.runner
        with ExitStack() as stack:
            stack.enter_context(self.features.on())
            for owner, name, wrapped in (
                (runner, "combine", self._combining(runner.combine)),
                (runner, "forward", self._forward(runner.forward)),
                (drafter, "feed_context", self._feeding(drafter.feed_context, grows=False)),
                (drafter, "feed_frontier", self._feeding(drafter.feed_frontier, grows=True)),
                (drafter, "propose", self._proposing(drafter.propose)),
            ):
                stack.enter_context(patch.object(owner, name, wrapped))
            yield

    def begin(self) -> None:
        """A step begins."""
        if self.wrong is None:
            self.passes = []

    def _proposing(self, propose: Any) -> Any:  # noqa: ANN401
        def proposing(contexts: Any) -> Any:  # noqa: ANN401
            self.choices = Choices()
            drafts = propose(contexts)
            if self.wrong is None and self.passes:
                last = self.passes[-1]
                last.compare(self.choices.compared(code_of(TreeBuilder._top)), self.allowed)
            return drafts

        return proposing

    def _feeding(self, feed: Any, *, grows: bool) -> Any:  # noqa: ANN401
        def feeding(drafting: Sequence[Drafting]) -> Level:
            self._drafting, self._grows, self._right = drafting, grows, None
            level: Level = feed(drafting)
            self._drafting, self._grows = (), False
            mine = next((g for g in drafting if g.context.request == self.request), None)
            if mine is not None and self._right is not None and self.wrong is None:
                self._judge(level, mine, self._right)
            return level

        return feeding

    def _judge(self, level: Level, mine: Drafting, right: HeadPass) -> None:
        """The logits over the target's vocabulary, of which the tree's tokens are then chosen."""
        rows = right.rows[-(self._wanted.stop - self._wanted.start) :]
        logits = right.taps["d2t"][-len(rows) :]
        name = "d2t" if self.runner.d2t is not None else "vocabulary"
        both = Both(name, level.full(self._wanted), logits, rows, code=code_of(Level.full))
        if not self.passes[-1].compare([both], self._limits):
            self.choices.see(mine, logits, one_pass=self.reference.head.mask_token is not None)

    def _combining(self, combine: Any) -> Any:  # noqa: ANN401
        head = self.runner.head

        def combining(features: Tensor) -> Tensor:
            self._combined, self._features = _Seen(), features
            norms = {"input_norm": getattr(head, "input_norm", None)}
            norms |= {f"fc_norm.{i}": norm for i, norm in enumerate(getattr(head, "fc_norm", ()))}
            handles = [self._combined.hook(name, norm) for name, norm in norms.items() if norm is not None]
            try:
                hidden: Tensor = combine(features)
            finally:
                for handle in handles:
                    handle.remove()
            return hidden

        return combining

    def _forward(self, forward: Any) -> Any:  # noqa: ANN401
        def forwarding(segments: Sequence[Segment], hidden: Tensor) -> tuple[Tensor, Tensor]:
            part = self._part(segments) if self.wrong is None else None
            if part is None:
                return forward(segments, hidden)  # type: ignore[no-any-return]
            with self._seeing() as seen:
                logits, out = forward(segments, hidden)
            right = self._right = self._reference(part)
            self._slack = max(_steepness(right), self._slack if self._grows else 1.0)
            self._wanted = part.wanted
            compared = PassCompared(right.rows, [])
            compared.compare(self._operations(part, right, seen, hidden, logits), self._limits)
            self.passes.append(compared)
            self.compared += 1
            return logits, out

        return forwarding

    def _part(self, segments: Sequence[Segment]) -> _Part | None:
        """Which part of a pass is the request's; None where it has none."""
        state = self.drafter.states.get(self.request)
        bases = {} if self._grows else {id(g.state.table): g.base for g in self._drafting}
        given = combined = wanted = 0
        for segment in segments:
            rows, last = len(segment.tokens), bases.get(id(segment.table), segment.length)
            masks = min(max(segment.length - last, 0), rows)
            if state is not None and segment.table is state.table:
                return _Part(
                    segment,
                    slice(given, given + rows),
                    slice(combined, combined + rows - masks),
                    slice(wanted, wanted + len(segment.wanted)),
                    masks,
                )
            given, combined, wanted = given + rows, combined + rows - masks, wanted + len(segment.wanted)
        return None

    def _reference(self, part: _Part) -> HeadPass:
        """What the pass ought to give."""
        self.reference.features = self.features.along
        g = next((g for g in self._drafting if g.context.request == self.request), None)
        if self._grows and g is not None:
            tree, nodes = g.builder, g.builder.fed[-len(part.segment.tokens) :]
            tokens, parents = ([column[node] for node in nodes] for column in (tree.token, tree.parent))
            return self.reference.level(nodes, tokens, parents, g.base - 1)
        end = part.segment.length - part.masks
        return self.reference.context(end - len(part.segment.tokens) + part.masks, end, part.masks)

    @contextmanager
    def _seeing(self) -> Iterator[_Seen]:
        """What the engine gives meanwhile."""
        runner, head, seen = self.runner, self.runner.head, _Seen()
        hooked = {"embedding": runner.loaded.embedding}
        if head.config.version == 3:
            inner = {f"midlayer.{name}": getattr(head.midlayer, name) for name in ("hidden_norm", "input_layernorm")}
            hooked |= {**inner, "norm": head.norm}
        else:
            hooked["fc"] = head.fc
        run = runner._run

        def running(batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
            seen.batch = batch
            return run(batch, hidden)

        layers = [_SpiedLayer(layer, seen.calls) for layer in (runner.layer, *runner.further)]
        handles = [seen.hook(name, module) for name, module in hooked.items()]
        try:
            with (
                patch.object(runner, "_run", running),
                patch.object(runner, "layer", layers[0]),
                patch.object(runner, "further", layers[1:]),
            ):
                yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _operations(self, part: _Part, right: HeadPass, seen: _Seen, hidden: Tensor, logits: Tensor) -> Iterator[Both]:
        """The pass's operations, both sides, in the order of computing."""
        batch, rows = seen.batch, right.rows
        assert batch is not None
        committed = rows[: len(rows) - part.masks]
        if not self._grows:
            yield from self.features.compared(self._features[part.combined], committed, code_of(self.drafter.observe))
        fed = code_of(TreeBuilder.segment if self._grows else self.drafter._pending)
        for name, values in (("tokens", batch.tokens[0]), ("positions", batch.positions[0])):
            due = torch.tensor([getattr(row, name.removesuffix("s")) for row in rows])
            yield Both(name, batch.as_given(values)[part.given, None], due[:, None], rows, code=fed, exact=True)
        given = hidden[part.given]
        entered = {"fc": given[: len(committed)]} if self.runner.head.config.version == 3 else {}
        entered |= {"mask_hidden": given[len(committed) :], "fed back": given}
        code = {
            "fc": code_of(self.runner._fc),
            "mask_hidden": code_of(EagleHead.mask_features),
            "fed back": code_of(EagleHead.leave),
            "lm_head": code_of(self.runner.lm_head),
            **self._combined.code,
            **seen.code,
        }
        layers = self.reference.head.names
        for name, due in right.taps.items():
            ours: Tensor | None = None
            here = rows
            if name in layers:
                index = layers.index(name)
                out = Both(name, batch.as_given(seen.calls[index].out)[part.given], due, rows, certain=False)
                if bool((out.errors > self._limits[name]).any()):
                    yield from self._inside(name, seen.calls[index], part, right)
                yield out
                continue
            if name in self._combined.taps and not self._grows:
                ours, here = self._combined.taps[name][part.combined], committed
            elif name in entered:
                ours = entered[name]
                here = rows[-part.masks :] if name == "mask_hidden" else committed if name == "fc" else rows
            elif name in ("norm", "lm_head"):
                here, due = tuple(rows[i] for i in part.segment.wanted), due[list(part.segment.wanted)]
                ours = logits if name == "lm_head" else seen.taps["norm"]
                ours = ours[part.wanted]
            elif name in seen.taps:
                ours = batch.as_given(seen.taps[name])[part.given]
            if ours is not None and len(here):
                yield Both(name, ours.float(), due.flatten(1), here, code=code.get(name, ""))

    def _inside(self, prefix: str, call: LayerCall, part: _Part, right: HeadPass) -> Iterator[Both]:
        """The operations of one layer, run again."""
        again, batch, head = layer_again(call), call.batch, self.reference.head
        slots = part.segment.table.slots(0, len(right.keys)).tolist()
        cache = {"keys": call.cache.key[call.layer], "values": call.cache.value[call.layer]}
        order = in_halves(self.runner.head.config)
        for name, due in right.taps.items():
            short, rows = name.removeprefix(prefix + "."), right.rows
            if not name.startswith(prefix + ".") or name.endswith("hidden_norm"):
                continue
            if short == "self_attn.scores" and again.weights is not None:
                yield self._scores(name, batch.as_given(again.weights(slots))[part.given], due, right, again.code)
                continue
            if short.endswith(" read"):
                ours, rows = cache[short.split(".")[1].split()[0]][:, slots].transpose(0, 1).flatten(1), right.keys
            elif short in again.taps:
                ours = batch.as_given(again.taps[short])[part.given]
            else:
                continue
            due = due.flatten(1)
            if short.endswith(ROTATED):  # the engine's order of a head's channels
                due = due.unflatten(1, (-1, len(order)))[..., order].flatten(1)
            others = due
            heads = head.heads if short.endswith(OF_QUERIES) else again.kv_heads if short.endswith(OF_KEYS) else 1
            yield Both(name, ours.float(), due, rows, heads, again.code.get(short, ""), others=others)
        if not again.same and call.fused is not None and call.fused.compiled is not None:
            due = right.taps[prefix].flatten(1)
            out = batch.as_given(call.out)[part.given]
            yield Both(prefix, out, due, right.rows, code=code_of(call.fused.compiled), looks=COMPILED)

    def _scores(self, name: str, weights: Tensor, due: Tensor, right: HeadPass, code: dict[str, str]) -> Both:
        """Attention's weights. A head whose output is gone altogether shows none: it is told by its output."""
        expected = due.exp().transpose(0, 1)
        weights = torch.where(weights.sum(-1, keepdim=True) == 0, expected, weights)
        return Both(
            name,
            weights,
            expected,
            right.rows,
            code=code.get("self_attn.scores", ""),
            keys=right.keys,
            size=self.reference.head.size,
        )


def _steepness(right: HeadPass) -> float:
    """By how much more than usual rounding moves attention's weights: large scores are rounded by more."""
    scores = [x for name, x in right.taps.items() if name.endswith(".scores")]
    spread = max((-float(x[x.isfinite()].min()) for x in scores), default=0.0)
    return max(1.0, spread / STEEP)
