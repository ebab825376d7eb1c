"""A model's reference: plain transformers, eager and in float32, along a text pass by pass, every operation by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.causal import PIECE, Causal, cached
from specscope.analyze.audit.model.head import KV, Head
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.locate.located import FedRow
from specscope.errors import UserError
from specscope.trace.record.tree import ROOT

NAME = "specscope_reference"  # of its attention, in transformers' register
TAPS = "specscope_taps"  # the attribute of an attention module that is tapped: what is told
MARGIN = 40.0  # an engine's order of summation differs from the reference's by more than two of the reference's do
FLOOR = 4e-5  # relative error that float32 always explains
TRIED, CUT = 128, 7  # rows of the text that two orders of summation are tried on: at once, and so many a pass
OF_KEYS = (".scores", " read")  # operations whose values are not one a row
IN = ":in"  # behind a module's name: its input, which is what the code around it made


class Taps:
    """What operations gave, in the order of computing; rows of several passes one behind the other."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = {}

    def put(self, name: str, rows: Tensor) -> None:
        """Keep a copy, in float32, of what an operation gave: [rows, ...] becomes [rows, width]."""
        self._parts.setdefault(name, []).append(rows.detach().to(torch.float32, copy=True).flatten(1).cpu())

    def take(self) -> dict[str, Tensor]:
        """All of it, [rows, width] by name. It is not kept here."""
        parts, self._parts = self._parts, {}
        return {name: torch.cat(rows) for name, rows in parts.items() if len({x.shape[1] for x in rows}) == 1}


def by_row(x: Tensor, rows: int) -> Tensor | None:
    """A tensor of a pass over so many rows as [rows, ...]; None where it is not one value a row."""
    if x.dim() < 2:
        return None
    x = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
    if x.dim() > 2 and x.shape[0] != rows and x.shape[1] == rows:  # heads first
        x = x.transpose(0, 1)
    return x if x.shape[0] == rows else None


@contextmanager
def hooked(part: nn.Module, put: Callable[[str, Tensor], None], rows: Callable[[], int]) -> Iterator[None]:
    """All modules below `part` tell what goes into each and what comes out. `rows`: of the pass that runs now."""

    def tell(name: str, values: Iterable[Any], most: int | None = None) -> None:
        for index, tensor in enumerate([x for x in values if isinstance(x, Tensor)][:most]):
            x = by_row(tensor, rows())
            if x is not None:
                put(name if not index else f"{name}[{index}]", x)

    def enters(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tell(name + IN, (*given, *named.values()), 1)

    def leaves(name: str, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:  # noqa: ANN401
        tell(name, out if isinstance(out, tuple) else (out,))

    with ExitStack() as stack:
        for name, module in [*part.named_modules()][1:]:
            stack.enter_context(module.register_forward_pre_hook(partial(enters, name), with_kwargs=True))
            stack.enter_context(module.register_forward_hook(partial(leaves, name)))
        yield


def relative(ours: Tensor, right: Tensor, heads: int = 1) -> Tensor:
    """[rows, heads] |ours - right| / |right| of each row and head, both [rows, width]; a row that is small beside the
    others is measured by the usual size of a row. Equal values differ by nothing; NaN on our side is infinitely off.
    """
    heads = heads if right.shape[1] % max(heads, 1) == 0 else 1
    a, b = (x.double().unflatten(1, (heads, -1)) for x in (ours, right))
    size = b.norm(dim=-1)
    floor = size.median().clamp(min=1e-30)
    off: Tensor = torch.where(a == b, 0.0, a - b).norm(dim=-1) / size.clamp(min=float(floor))
    return off.nan_to_num(nan=torch.inf).float()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **named: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor | None]:
    """The model's own eager attention; where the module is tapped, what goes into it and what comes out.

    query [1, H, N, D], key and value [1, Hkv, K, D] with all that the cache holds; returns [1, N, H, E].
    """
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = eager(module, query, key, value, attention_mask, **named)
    put: Callable[[str, Tensor], None] | None = getattr(module, TAPS, None)
    if put is not None:
        new = (("query", query), ("key", key[:, :, -query.shape[2] :]), ("value", value[:, :, -query.shape[2] :]))
        for name, x in (*new, ("keys read", key), ("values read", value)):
            put(f"self_attn.{name}", x[0].transpose(0, 1))
        if weights is not None:
            put("self_attn.scores", weights[0].log().transpose(0, 1))
        put("self_attn.attention", out[0])
    return out, weights


@dataclass(frozen=True)
class ReferencePass:
    rows: tuple[FedRow, ...]
    keys: tuple[FedRow, ...]  # what each key that is read is of
    # In the order of computing: [rows, ...]; of keys and values read [keys, ...]; the logs of attention's
    # weights [rows, heads, keys], or flat
    taps: Mapping[str, Tensor]
    again: Callable[[str], Mapping[str, Tensor]] | None = None  # the pass with a layer's operations; None: it has all

    def inside(self, layer: str) -> dict[str, Tensor]:
        """The operations of one layer, by their names within it."""
        every = self.taps if self.again is None else self.again(layer)
        return {name.removeprefix(f"{layer}."): x for name, x in every.items() if name.startswith(f"{layer}.")}


def rounding(whole: Mapping[str, Tensor], pieces: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """What rounding explains of each operation: how far rows at once and in pieces differ, times a margin."""
    cut = dict[str, list[Tensor]]()
    for taps in pieces:
        for name, x in taps.items():
            cut.setdefault(name, []).append(x)
    measured = dict[str, float]()
    for name, x in whole.items():
        widths = {part.shape[1:] for part in (x, *cut.get(name, ()))}
        if not name.endswith(OF_KEYS) and len(widths) == 1:  # else its values are not one a row
            ours, right = (side.flatten(1).nan_to_num(neginf=0.0) for side in (torch.cat(cut[name]), x))
            measured[name] = float(relative(ours, right).max())
    usual = max(measured.values(), default=0.0)
    return {name: max(FLOOR, MARGIN * measured.get(name, usual)) for name in whole}


@dataclass
class GrownTree:
    """The nodes of a tree that grows behind a text, in the order of the cache."""

    rows: dict[int, FedRow] = field(default_factory=dict)
    parent: dict[int, int] = field(default_factory=dict)

    def grow(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], root: int) -> list[FedRow]:
        """The rows of nodes below those that are there. `root`: its position."""
        self.parent |= zip(nodes, parents, strict=True)
        for node, token, parent in zip(nodes, tokens, parents, strict=True):
            self.rows[node] = FedRow(1 + (root if parent == ROOT else self.rows[parent].position), token, node)
        return [self.rows[node] for node in nodes]

    def seen(self, nodes: Sequence[int], text: int) -> Tensor:
        """bool [nodes, keys]: each sees so many tokens of the text, and its own path."""
        place = {node: text + index for index, node in enumerate(self.rows)}
        seen = torch.arange(text + len(place)).expand(len(nodes), -1) < text
        for index, node in enumerate(nodes):
            while node != ROOT:
                seen[index, place[node]] = True
                node = self.parent[node]
        return seen


@contextmanager
def inside(layer: nn.Module, put: Callable[[str, Tensor], None], rows: Callable[[], int]) -> Iterator[None]:
    """Every operation inside a decoder layer is told. `rows`: of the pass that runs now."""
    attention = next((m for m in layer.modules() if hasattr(m, "layer_idx") and m is not layer), None)
    with hooked(layer, put, rows), ExitStack() as stack:
        if attention is not None:
            stack.enter_context(patch.object(attention, TAPS, put, create=True))
        yield


class ModelReference:
    def __init__(self, source: ModelSource) -> None:
        """Loads it in float32. Raises UserError."""
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, eager_mask)
        self.causal = Causal(source, "float32")
        self.causal.model.set_attn_implementation(NAME)
        self.layers = decoder_layers(self.causal.model)

    @contextmanager
    def tapped(self, layers: Collection[int] = (), wanted: Collection[str] | None = None) -> Iterator[Taps]:
        """What enters and leaves each layer in a pass, and what is wanted inside some; None: all."""
        taps, rows, model = Taps(), [0], self.causal.model

        def enter(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden: Tensor = given[0] if given else named["hidden_states"]
            rows[0] = hidden.shape[1]
            taps.put("embedding", hidden[0])

        def leave(name: str, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:  # noqa: ANN401
            taps.put(name, (out if isinstance(out, Tensor) else out[0])[0])

        def put(layer: str, name: str, x: Tensor) -> None:
            if wanted is None or f"{layer}.{name}" in wanted:
                taps.put(f"{layer}.{name}", x)

        named = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        named |= {"norm": getattr(model, model.base_model_prefix), "embed_tokens": model.get_input_embeddings()}
        with ExitStack() as stack:
            stack.enter_context(self.layers[0].register_forward_pre_hook(enter, with_kwargs=True))
            for index in layers:
                stack.enter_context(inside(self.layers[index], partial(put, f"layers.{index}"), lambda: rows[0]))
            for name, module in named.items():
                stack.enter_context(module.register_forward_hook(partial(leave, name)))
            yield taps

    @torch.inference_mode()
    def allowed(self, tokens: Sequence[int]) -> dict[str, float]:
        """The relative error at each border that rounding explains."""
        tokens, made = tokens[:TRIED], list[ReferencePass]()
        for size in (len(tokens), CUT):
            passes = ModelPasses(self, tokens)
            fed = (passes.feed(start, min(start + size, len(tokens))) for start in range(0, len(tokens), size))
            made += [one for one in fed if one is not None]
        whole, *pieces = ({name: x for name, x in one.taps.items() if name != "lm_head"} for one in made)
        return rounding(whole, pieces)


class ModelPasses:
    """A model along one request's text: each pass goes on from what was fed before."""

    def __init__(self, reference: ModelReference, text: Sequence[int], wanted: Collection[str] | None = None) -> None:
        """`wanted`: operations of all layers that each pass tells; None: only what leaves the layers."""
        self.reference, self.wanted = reference, wanted
        self.text = [FedRow(position, token) for position, token in enumerate(text)]
        self._cache = DynamicCache()
        self._known = 0  # tokens of the text in the cache
        self._tree = GrownTree()  # behind them, in the cache

    def feed(
        self,
        start: int,
        end: int,
        nodes: Sequence[int] = (),
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Sequence[int] = (),
    ) -> ReferencePass | None:
        """The pass over the text from `start` to `end`, and nodes of a tree below it, after those above them.

        `wanted`: the rows whose logits are computed. None where the text is not known so far.
        """
        if end > len(self.text):
            return None
        if start < end or self._known != end:
            self._known, self._tree = min(self._known, start), GrownTree()
        if self.reference.causal.runs_on:  # no token can be taken back: each pass begins with the text
            self._known = 0
        while start - self._known > PIECE:
            piece = self.text[self._known : self._known + PIECE]
            self._run(self._known, [row.token for row in piece], [], {}, ())
            self._known += PIECE
        first, before = self._known, self._known + len(self._tree.rows)
        self._known, fed = end, self._tree.grow(nodes, tokens, parents, end - 1)
        rows, keys = [*self.text[first:end], *fed], [*self.text[:end], *self._tree.rows.values()]
        arguments = self._masked(first, end, nodes, rows, keys) if fed else {}
        keep = [start - first + row for row in wanted]

        def made(layers: Collection[int]) -> dict[str, Tensor]:
            taps = self._run(before, [row.token for row in rows], keep, arguments, layers)
            return {name: x if name.endswith((" read", "lm_head")) else x[start - first :] for name, x in taps.items()}

        def again(layer: str) -> Mapping[str, Tensor]:
            return made([int(layer.removeprefix("layers."))])

        layers = () if self.wanted is None else range(len(self.reference.layers))
        return ReferencePass(tuple(rows[start - first :]), tuple(keys), made(layers), again)

    def _masked(
        self, first: int, end: int, nodes: Sequence[int], rows: Sequence[FedRow], keys: Sequence[FedRow]
    ) -> dict[str, Any]:
        """Mask and positions of rows of the text from `first` on, and of nodes behind them."""
        of_text = torch.arange(len(keys)) <= torch.arange(first, end)[:, None]
        seen = torch.cat([of_text, self._tree.seen(nodes, end)])
        own, places = (torch.tensor([row.position for row in some]) for some in (rows, keys))
        masks = self.reference.causal.masks(seen, own[:, None] - places[None])
        return {"attention_mask": masks, "position_ids": own[None]}

    @torch.inference_mode()
    def _run(
        self, before: int, tokens: Sequence[int], keep: list[int], arguments: Mapping[str, Any], layers: Collection[int]
    ) -> dict[str, Tensor]:
        """A pass behind the first `before` slots of the cache."""
        causal = self.reference.causal
        kept = {"use_cache": False} if causal.runs_on else cached(causal.model, self._cache)
        if not causal.runs_on and (further := self._cache.get_seq_length() - before) > 0:
            self._cache.crop(-further)
        with self.reference.tapped(layers, self.wanted) as taps:
            logits, _ = causal.forward(tokens, keep, (), **kept, **arguments)
        return {**taps.take(), "lm_head": logits}


def decoder_layers(model: Any) -> nn.ModuleList:  # noqa: ANN401
    """The list of a model's decoder layers. Raises UserError."""
    wanted = int(model.config.get_text_config().num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise UserError(f"{type(model).__name__} has no list of {wanted} decoder layers")


ROWS, COPIES = 8, 3  # of a block on which rounding is tried, and how often it is in a pass


@dataclass
class HeadPasses:
    """A head along one request's text. `features` [T, F]: the target's, at the layers that feed the head."""

    head: Head
    text: Sequence[int]
    features: Tensor
    _kv: list[KV] = field(default_factory=list)  # of the first pairs
    # Of the draft that grows now: its nodes, their keys, and the hidden state of each that was run
    _tree: GrownTree = field(default_factory=GrownTree)
    _grown: list[KV] = field(default_factory=list)
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    def feed(
        self,
        start: int,
        end: int,
        nodes: Sequence[int] = (),
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        wanted: Sequence[int] = (),
    ) -> ReferencePass:
        """As ModelPasses.feed, over pairs; all rows have logits."""
        return self._level(nodes, tokens, parents, end - 1) if nodes else self._context(start, end)

    @torch.inference_mode()
    def _context(self, start: int, end: int) -> ReferencePass:
        """The pass over the pairs of positions `start` to `end`."""
        head, slots = self.head, torch.arange(start, end)
        tokens = torch.tensor(self.text[start + 1 : end + 1])
        if not self._kv:
            self._kv = head.nothing()
        if (known := len(self._kv[0][0])) < start:
            self._context(known, start)
        with tapped(self.head) as taps:
            hidden = head.combine(self.features[start:end])
            seen = torch.arange(end)[None] <= slots[:, None]
            out, kv = head.run(head.prepare(tokens, hidden), slots, seen, first_pairs(self._kv, start))
            head.logits(out)
        self._kv = self._grown = kv
        self._hidden, self._tree = {ROOT: out[-1]}, GrownTree()
        rows = [FedRow(slot, token) for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True)]
        return self._pass(rows, start, rows, taps)

    @torch.inference_mode()
    def _level(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int], root: int) -> ReferencePass:
        """The pass over some nodes of a tree, after those above them. `root`: the position of the root's pair."""
        head, fed = self.head, self._tree.grow(nodes, tokens, parents, root)
        seen, positions = self._tree.seen(nodes, root + 1), torch.tensor([row.position for row in fed])
        with tapped(self.head) as taps:
            hidden = head.fed_back(torch.stack([self._hidden[parent] for parent in parents]))
            out, self._grown = head.run(head.prepare(torch.tensor(list(tokens)), hidden), positions, seen, self._grown)
            head.logits(out)
        self._hidden |= zip(nodes, out, strict=True)
        return self._pass(fed, root + 1, self._tree.rows.values(), taps)

    @torch.inference_mode()
    def allowed(self) -> dict[str, float]:
        """The relative error of each operation that rounding explains."""
        end = min(len(self.features), len(self.text) - 1, TRIED)
        made = list[ReferencePass]()
        for size in (end, CUT):
            passes = HeadPasses(self.head, self.text, self.features)
            made += [passes.feed(start, min(start + size, end)) for start in range(0, end, size)]
        return rounding(made[0].taps, (one.taps for one in made[1:]))

    def _pass(self, rows: Sequence[FedRow], end: int, keys: Iterable[FedRow], taps: dict[str, Tensor]) -> ReferencePass:
        committed = (FedRow(slot, self.text[slot + 1]) for slot in range(end))
        return ReferencePass(tuple(rows), (*committed, *keys), taps)


@dataclass
class BlockPasses:
    """A head along one request's text. `features` [T, F]: the target's, at the layers that feed the head."""

    head: BlockHead
    text: Sequence[int]
    features: Tensor
    written: dict[str, Tensor] = field(default_factory=dict)  # what was made of the positions that were written last
    _kv: list[KV] = field(default_factory=list)  # of the first positions

    @torch.inference_mode()
    def feed(self, start: int, end: int, rows: int) -> ReferencePass:
        """The pass over a block of so many rows behind `end` positions, of which those from `start` on are written."""
        if (known := len(self._kv[0][2]) if self._kv else 0) < start:
            self._write(known, start)
        self.written = self._write(start, end)
        taps, keys = self._block(end, rows, 1), [FedRow(place, self.text[place + 1]) for place in range(end)]
        tokens = [self.text[end], *[self.head.mask_token or 0] * (rows - 1)]
        block = tuple(FedRow(end + row, token) for row, token in enumerate(tokens))
        return ReferencePass(block, (*keys, *block), taps)

    def _write(self, start: int, end: int) -> dict[str, Tensor]:
        with tapped(self.head) as taps:
            fresh = self.head.context(self.head.combine(self.features[start:end]), torch.arange(start, end))
        before = self._kv or [(key[:0], value[:0], places[:0]) for key, value, places in fresh]
        both = zip(first_pairs(before, start), fresh, strict=True)
        self._kv = [(torch.cat((a, x)), torch.cat((b, y)), torch.cat((c, z))) for (a, b, c), (x, y, z) in both]
        return taps

    def _block(self, end: int, rows: int, copies: int) -> dict[str, Tensor]:
        """What a block gives, so often beside itself."""
        head, of = self.head, torch.arange(copies).repeat_interleave(rows)
        tokens = torch.tensor([self.text[end], *[head.mask_token or 0] * (rows - 1)]).repeat(copies)
        seen = torch.cat([torch.ones(len(of), end, dtype=torch.bool), of[:, None] == of], dim=1)
        with tapped(head) as taps:
            positions = (end + torch.arange(rows)).repeat(copies)
            head.logits(head.block(tokens, positions, seen, first_pairs(self._kv, end))[0])
        return taps

    @torch.inference_mode()
    def allowed(self) -> dict[str, float]:
        """The relative error of each operation that rounding explains."""
        end = min(len(self.features), len(self.text) - 1, TRIED)
        whole, passes = BlockPasses(self.head, self.text, self.features), list[dict[str, Tensor]]()
        at_once = {**whole._write(0, end), **whole._block(end, ROWS, 1)}
        pieces = BlockPasses(self.head, self.text, self.features)
        passes += [pieces._write(start, min(start + CUT, end)) for start in range(0, end, CUT)]
        passes.append({name: x[:ROWS] for name, x in pieces._block(end, ROWS, COPIES).items()})
        return rounding(at_once, passes)


@contextmanager
def tapped(head: Head) -> Iterator[dict[str, Tensor]]:
    """What the head's operations give meanwhile, by name."""
    taps: dict[str, Tensor] = {}
    before, head.tap = head.tap, taps.__setitem__
    try:
        yield taps
    finally:
        head.tap = before


def first_pairs(kv: Sequence[KV], count: int) -> list[KV]:
    return [tuple(x[:count] for x in layer) for layer in kv]  # type: ignore[misc]
