"""What watches a drafter that is a model: its passes, from what they are fed to the tokens that are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.audit.model.run import head_of
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import FedRow, Stage
from specscope.analyze.locate.model.reference import (
    BlockPasses,
    HeadPasses,
    ModelReference,
    ReferencePass,
    decoder_layers,
    inside,
)
from specscope.errors import UserError
from specscope.measure.locate.drive import Drive, WalkPlan
from specscope.measure.locate.pairs import LAYER, Allowances, HeldPair
from specscope.measure.locate.watch import (
    FedPart,
    Feeds,
    LayerCall,
    ModelSide,
    ModelWatch,
    Seen,
    Texts,
    call_of,
    hooks,
    kept,
)
from specscope.model.batch import Segment
from specscope.model.fast.decoder import FusedLayer
from specscope.speculate.drafters.base import Level
from specscope.speculate.drafters.eagle import HeadDrafter
from specscope.speculate.drafters.model_drafter import Drafting
from specscope.trace.record.tree import ROOT

FEATURES = "features layer "
FINAL = "final"


class TrueFeatures:
    """What enters the target's layers at each position of the texts, as the engine's own layers have it; where these
    did not compute a position, as the reference has it."""

    def __init__(
        self, drive: Drive, reference: ModelReference, texts: Mapping[str, Sequence[int]], layers: Sequence[Any]
    ) -> None:
        self.drive, self.layers = drive, tuple(layers)
        known: Any = {name: reference.causal.alone(text, self.layers)[1] for name, text in texts.items()}
        self.along: dict[str, Tensor] = {name: x.clone() for name, x in known.items()}  # [T, F], by request
        usual = max(reference.allowed(max(texts.values(), key=len)).values())
        self.allowed = {f"{FEATURES}{layer}": usual for layer in self.layers}

    @contextmanager
    def on(self) -> Iterator[None]:
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


STEEP = 32.0  # nats between scores, from which on rounding grows with them
PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")


class HeadSide:
    """An EAGLE head, and its reference over what the target's own layers gave."""

    method, by_operation = "forward", True
    passes_of: Any = HeadPasses  # along a text

    def __init__(self, runner: Any, feeds: Feeds, head: Head, texts: Texts, features: TrueFeatures) -> None:  # noqa: ANN401
        self.runner = runner
        self.feeds, self.features = feeds, features
        self.layers, self.one_pass = head.names, head.mask_token is not None
        self.passes = {name: self.passes_of(head, text, features.along[name]) for name, text in texts.items()}
        self._usual = {name: passes.allowed() | features.allowed for name, passes in self.passes.items()}
        for usual in self._usual.values():
            usual["vocabulary"] = usual.get("d2t", usual["lm_head"])  # where the vocabulary is not reduced
        self._slack: dict[str, float] = {}  # by how much more rounding moves a pass, or one that fed it
        self._fed = torch.empty(0)  # the features that were combined last
        self._combined: dict[str, Tensor] = {}  # what combining them gave, by operation

    @property
    def combines(self) -> dict[str, nn.Module]:
        """What combines features, as the runner has it now."""
        head = getattr(self.runner, "head", None)
        norms = {f"fc_norm.{i}": norm for i, norm in enumerate(getattr(head, "fc_norm", ()))}
        return {"input_norm": head.input_norm, **norms} if head is not None and hasattr(head, "input_norm") else norms

    @contextmanager
    def on(self) -> Iterator[None]:
        combine = self.runner.combine

        def combining(features: Tensor) -> Tensor:
            with kept(self.combines) as self._combined:
                self._fed = features
                combined: Tensor = combine(features)
                return combined

        with patch.object(self.runner, "combine", combining), self.features.on():
            yield

    def due(self, part: FedPart) -> tuple[ReferencePass, Allowances]:
        name, passes = part.request, self.passes[part.request]
        passes.features = self.features.along[name]
        right = passes.feed(*self.feeds.fed(part))
        self._slack[name] = max(steepness(right), self._slack.get(name, 1.0) if self.feeds.grows else 1.0)
        return right, Allowances(self._usual[name], LAYER, torch.inf, self._slack[name])

    def first(self, part: FedPart, right: ReferencePass) -> Iterator[HeldPair]:
        if not self.feeds.grows:
            fed = self._fed[part.given]
            yield from self.features.compared(part.request, fed, right.rows[: len(fed)])

    def run(self, forward: Any, segments: Sequence[Segment], hidden: Tensor) -> tuple[Any, Seen]:  # noqa: ANN401
        runner, head, is_three = self.runner, self.runner.head, self.runner.head.config.version == 3
        modules: dict[str, nn.Module] = {"embedding": runner.loaded.embedding}
        if is_three:
            modules |= {f"midlayer.{name}": getattr(head.midlayer, name) for name in ("hidden_norm", "input_layernorm")}
        modules |= {"norm": head.norm} if is_three else {"fc": head.fc}
        with spied((runner.layer, *runner.further)) as calls, kept(modules) as made:
            out = forward(segments, hidden)
        given = {**self._combined, **made, "fed back": hidden} | ({"fc": hidden} if is_three else {})
        tensors = {name: ("given", x) for name, x in given.items()} | {"lm_head": ("wanted", out[0])}
        tensors |= {"norm": ("wanted", made["norm"])} if is_three else {}
        return out, Seen(dict(zip(self.layers, calls, strict=True)), tensors)


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
        runner, modules = self.runner, {"embedding": self.runner.loaded.embedding, "norm": self.runner.head.norm}
        with spied(runner.layers) as calls, kept(modules) as made:
            logits = forward(segments)
        tensors = {"embedding": ("given", made["embedding"]), "norm": ("wanted", made["norm"])}
        tensors["lm_head"] = ("wanted", logits)
        return logits, Seen(dict(zip(self.layers, calls, strict=True)), tensors)


class ModulesSide(HeadSide):
    """A single module, iterated, and its reference over what the target's own layers gave."""

    def __init__(self, runner: Any, feeds: Feeds, head: Modules, texts: Texts, features: TrueFeatures) -> None:  # noqa: ANN401
        """Raises UserError where each depth has its module: their passes go over the same slots."""
        drafter: Any = feeds.drafter
        if not drafter.iterates:
            why = "a pass goes over the slots of the module before, and only one module that is iterated is walked"
            raise UserError(f"{runner.modules} next-token modules draft a depth each: {why}; audit judges them all")
        head.inside = lambda layer, put, rows: inside(layer, put, lambda: rows)
        super().__init__(runner, feeds, head, texts, features)

    def run(self, forward: Any, segments: Sequence[Segment], hidden: Tensor) -> tuple[Any, Seen]:  # noqa: ANN401
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


SIDES: Mapping[str, Any] = {"eagle": HeadSide, "dflash": BlockSide, "mtp": ModulesSide}
TIE = 1e-3  # nats: tokens that lie closer may take each other's place


def _chosen(drafting: Drafting, logits: Mapping[int, Tensor], *, one_pass: bool) -> Iterator[HeldPair]:
    """How far each token of a tree lies below the least likely of those that ought to be chosen; rules of sampling that
    move the choice are searched by themselves.

    `logits`: the reference's [V] behind its nodes, by node; of a head that drafts all depths in one pass by depth.
    """
    tree, root, params = drafting.builder, drafting.context.position, drafting.builder.context.params
    if tree.sampled or params.penalised or params.logit_bias or tree.context.allowed is not None:
        return
    rows, short = list[FedRow](), list[float]()
    for node in (ROOT, *range(len(tree.token))):
        children = [child for child, parent in enumerate(tree.parent) if parent == node]
        known = logits.get(node if not one_pass else 0 if node == ROOT else tree.depth[node])
        if known is not None and children:
            least = known.topk(len(children)).values[-1]
            short += [float(least - known[tree.token[child]]) for child in children]
            rows += [FedRow(root + tree.depth[child], tree.token[child], child) for child in children]
    gap = torch.tensor(short)[:, None]
    ours = torch.where(gap > TIE, gap, 0.0)
    yield HeldPair("chosen tokens", ours, torch.zeros_like(ours), tuple(rows), exact=True)


@contextmanager
def _following(feeds: Feeds, watch: ModelWatch) -> Iterator[None]:
    """Follow a drafter from pass to pass: compare its logits by the target's tokens, and what is chosen of them."""
    drafter, one_pass = feeds.drafter, watch.side.one_pass
    propose, run = drafter.propose, drafter.run_pass
    # Of the trees that grow now, by request: the reference's logits, as _chosen takes them
    grown: dict[str, tuple[Drafting, dict[int, Tensor]]] = {}

    def passed(feed: Callable[[Sequence[Drafting]], Level], drafting: Sequence[Drafting]) -> Level:
        feeds.drafting, feeds.grows, watch.right = drafting, feed == drafter.feed_frontier, {}
        level = run(feed, drafting)
        for g in drafting:
            name = g.context.request
            if name in watch.right and watch.wrong is None:
                pair = _by_target(level, *watch.right[name])
                if not watch.compare(name, [pair]):
                    _, known = grown.setdefault(name, (g, {}))
                    known |= enumerate(pair.right) if one_pass else zip(g.builder.frontier, pair.right, strict=True)
        feeds.drafting, feeds.grows = (), False
        return level

    def proposed(contexts: Any) -> Any:  # noqa: ANN401
        grown.clear()
        drafts = propose(contexts)
        for name, (g, logits) in grown.items():
            watch.compare(name, _chosen(g, logits, one_pass=one_pass))
        return drafts

    with patch.object(drafter, "propose", proposed), patch.object(drafter, "run_pass", passed):
        yield


def _by_target(level: Level, part: FedPart, right: ReferencePass) -> HeldPair:
    """The logits over the target's vocabulary, of which the tree's tokens are then chosen."""
    ours, taps = level.full(range(part.wanted.start, part.wanted.stop)).cpu(), right.taps
    width, rows, name = ours.shape[1], right.rows[-len(ours) :], "vocabulary" if level.d2t is None else "d2t"
    logits = taps.get("d2t", taps["lm_head"])[-len(ours) :, :width]
    logits = functional.pad(logits, (0, width - logits.shape[1]), value=-torch.inf)
    return HeldPair(name, ours, logits, rows)


def drafter_watch(
    drive: Drive, plan: WalkPlan, target: ModelReference, draft: ModelSource, stack: ExitStack
) -> ModelWatch:
    """Watches the drafter of a drive, as long as the stack is open. Raises UserError."""
    drafter: Any = drive.engine.drafter
    texts = plan.texts
    feeds = Feeds(drafter)
    side: HeadSide | ModelSide
    if isinstance(drafter, HeadDrafter):
        head = head_of(draft, target.causal.model)
        if head.by_pairs and head.mask_token is not None:
            raise UserError("a head that drafts all depths in one pass is not walked: audit judges it")
        features = TrueFeatures(drive, target, texts, head.layers)
        of_head = side = SIDES[draft.kind](drafter.runner, feeds, head, texts, features)
        stack.enter_context(of_head.on())
    else:
        reference = ModelReference(draft)
        side = ModelSide(drafter.runner, reference, texts, feeds.fed)
    states = drafter.states
    watch = ModelWatch(Stage.DRAFTER, drive, plan, side, lambda name: states[name].table if name in states else None)
    stack.enter_context(watch.on())
    stack.enter_context(_following(feeds, watch))
    return watch
