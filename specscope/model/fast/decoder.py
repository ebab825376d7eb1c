"""The decoder layer that most models share (Llama, Mistral, Qwen, SmolLM, ...), in fewer operators.

A small model spends a third of a decode step on a CPU between its matrix products: in transformers' modules, and in
their many small operators. A FusedLayer takes a layer's place by becoming its `forward`; the module, its children and
its parameters stay, and so do hooks on it. Which layers it can stand for, `fuse` decides by comparing outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch, Segment
from specscope.model.fast.linear import FUSE, PackedLinear, compiled_rows, disabled, may_pack, same_numbers
from specscope.model.kv_cache import BlockTable, KVCache, LayerShape

if TYPE_CHECKING:
    from specscope.kernels.cpu.layer import CompiledLayers, LayerParts

PARTS = {  # of a layer, and of its parts
    "": {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
HEAD_NORMS = {"q_norm", "k_norm"}
Rotation = tuple[Tensor, Tensor]  # cos and sin of the rows' positions
# Its products: queries, keys and values; what attention gives; gates; what they give
PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def looks_alike(module: nn.Module) -> bool:
    """Whether a module has the parts of this layer, and no others."""
    for name, wanted in PARTS.items():
        children = {child for child, _ in module.get_submodule(name).named_children()}
        if children not in (wanted, wanted | HEAD_NORMS):
            return False
    products = [[module.get_submodule(name) for name in names] for names in PRODUCTS]
    plain = all(type(linear) is nn.Linear for linears in products for linear in linears)
    return plain and all(len({linear.bias is None for linear in linears}) == 1 for linears in products)


class FusedRMSNorm(nn.Module):
    """RMSNorm as one kernel, where transformers' has eight small operators."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        from specscope.kernels.cpu.layer import Norm  # numba is imported only where it runs

        self.weight, self.kernel = weight, Norm.of(weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x.float()).to(x.dtype)


class Rotary:
    """The rotary tables of a forward pass in the shape that the layers use; made once for all of them.

    Halves of a head are apart, [2, size / 2]: x * cos + flip(x) * sin turns x, where the first half of sin is negative.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, Tensor] | None = None  # sin as given, and the tables made of it and its cos

    def __call__(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[1, N, size] each to [N, 1, 2, size / 2] each."""
        known = self._known
        if known is None or known[0] is not sin:
            by_half = sin[0].unflatten(-1, (2, -1)).clone()
            by_half[:, 0].neg_()
            self._known = known = sin, cos[0].unflatten(-1, (2, -1))[:, None], by_half[:, None]
        return known[1:]


class FusedLayer:
    """Stands for `layer`, whose attention is `variant` and keeps `shape` of a token."""

    def __init__(self, layer: Any, shape: LayerShape, variant: Variant, rotary: Rotary | None, *, pack: bool) -> None:  # noqa: ANN401
        """`rotary`: what makes tables of the rotation that it is given; None where it is given tables."""
        attention = layer.self_attn
        self.index = int(attention.layer_idx)
        self.shape = shape
        self.variant, self.rotary = variant, rotary
        self.size = shape.key_size
        self.heads, self.kv_heads = attention.q_proj.out_features // self.size, shape.heads
        self.first_norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        products = ([layer.get_submodule(name) for name in names] for names in PRODUCTS)
        self.linears = [PackedLinear(linears, pack=pack) for linears in products]
        self.qkv, self.out, self.gate_up, self.down = (linear.forward for linear in self.linears)
        self.act = layer.mlp.act_fn
        self.parts: LayerParts | None = None  # of a compiled layer
        self.compiled: CompiledLayers | None = None
        self.most = 0  # rows that go through it
        # What layers that are computed together made of its input, or None: see LayerStack. None where it stands alone.
        self.stack: Callable[[FusedLayer, Tensor, Rotation, Batch, KVCache], Tensor | None] | None = None

    def compile(self, max_rows: int, *, norms: bool = True) -> None:
        """Let up to `max_rows` rows go through one kernel, where there is one for such a layer.

        `norms`: whether it begins with the first norm; else it is always given what attention projects.
        """
        from specscope.kernels.cpu.layer import CompiledLayers, LayerParts  # numba is imported only where it runs
        from specscope.kernels.cpu.product import Panels
        from specscope.kernels.cpu.tiles import PANEL

        mine = [self.second_norm, *([self.first_norm] if norms else ()), *(self.head_norms or ())]
        plain = self.variant.softcap is None and self.variant.sinks is None
        fits = self.size == self.shape.value_size and not self.size % PANEL and not self.linears[3].in_features % PANEL
        fits = fits and all(Panels.fits(linear.weight) for linear in self.linears)
        if not (plain and fits and all(isinstance(norm, FusedRMSNorm) for norm in mine)):
            return
        qkv, out, gate_up, down = (linear.panels for linear in self.linears)
        self.most = max_rows
        self.parts = LayerParts(
            heads=self.heads,
            kv_heads=self.kv_heads,
            size=self.size,
            scale=self.variant.scale,
            window=self.variant.window,
            first_norm=self.first_norm.kernel if norms else None,
            second_norm=self.second_norm.kernel,
            head_norms=None if self.head_norms is None else tuple(norm.kernel for norm in self.head_norms),
            qkv=qkv,
            out=out,
            gate_up=gate_up,
            down=down,
        )
        self.compiled = CompiledLayers([self.parts])

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Rotation,
        batch: Batch,
        pages: KVCache,
        **kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """The layer's forward. hidden_states [1, N, width]; returns the same shape."""
        if self.stack is not None:
            made = self.stack(self, hidden_states, position_embeddings, batch, pages)
            if made is not None:
                return made
        return self.run(hidden_states[0], None, position_embeddings, batch, pages)[None]

    def tables(self, rotation: Rotation) -> Rotation:
        """cos and sin as the layer uses them, [N, 1, 2, size / 2]."""
        return rotation if self.rotary is None else self.rotary(*rotation)

    def is_compiled_for(self, x: Tensor, batch: Batch, cache: KVCache) -> bool:
        """Whether these rows [N, width] go through one kernel."""
        return self.compiled is not None and batch.tree is None and len(x) <= self.most and cache.dtype is x.dtype

    def run(self, x: Tensor, projected: Tensor | None, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor:
        """The residual stream x [N, width] after the layer.

        `projected`: what attention makes its queries of; None: x after the first norm.
        """
        if self.compiled is not None and self.is_compiled_for(x, batch, cache):
            cos, sin = self.tables(rotation)
            return self.compiled(x, projected, cos.float(), sin.float(), batch.slabs, [cache.parts[self.index][0]])[0]
        projected = self.first_norm(x) if projected is None else projected
        x = self.out(self._attend(projected, rotation, batch, cache)).add_(x)
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)

    def _attend(self, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor:
        """[N, width] to [N, heads * size]: project, turn by position, write to the cache, attend."""
        query = self.write(x, rotation, batch, cache)
        return paged_attention(query, self.index, cache, batch, self.variant).flatten(1)

    def write(self, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor:
        """Write the keys and values of x [N, width] to the cache; its queries [N, heads, size]."""
        qkv = self.qkv(x)
        by_head = qkv.view(len(x), -1, self.size)
        query = by_head[:, : self.heads]
        if self.head_norms is not None:
            key = by_head[:, self.heads : self.heads + self.kv_heads]
            for norm, part in zip(self.head_norms, (query, key), strict=True):
                part.copy_(norm(part))
        cos, sin = self.tables(rotation)
        turned = qkv.view(len(x), -1, 2, self.size // 2).narrow(1, 0, self.heads + self.kv_heads)
        flipped = turned.flip(2)
        turned.mul_(cos).addcmul_(flipped, sin)
        cache.write_rows(self.index, batch.slots, qkv[:, self.heads * self.size :])
        return query


ROWS = 5  # of a trial: enough for the path that more than a few rows take


@torch.no_grad()
def fuse(model: Any, layers: list[LayerShape]) -> None:  # noqa: ANN401
    """Replace what can be replaced in a model on the CPU that already attends through the paged cache.

    `layers`: what each of its layers keeps. What does not match is left alone.
    """
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return
    pack = may_pack(model)
    max_rows = compiled_rows(weight.dtype) if pack else 0
    if max_rows:
        fuse_norms(model)
    if FUSE not in disabled():
        _fuse_layers(model, layers, pack=pack, max_rows=max_rows)
    if pack:
        output = model.get_output_embeddings()
        pack_linear = lambda linear: PackedLinear([linear], pack=True, wide=linear is output)  # noqa: E731
        _swap(model, lambda module: pack_linear(module) if type(module) is nn.Linear else None)


def fuse_norms(model: nn.Module) -> None:
    """Put FusedRMSNorms in the place of a model's RMSNorms, unless the user switched that off."""

    def norm(module: Any) -> nn.Module | None:  # noqa: ANN401
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            return FusedRMSNorm(module.weight, float(module.variance_epsilon))
        return None

    if FUSE not in disabled():
        _swap(model, norm)


def _swap(parent: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put what `make` makes of a module in its place, where it is the same; fused layers are done already."""
    for name, child in list(parent.named_children()):
        new = make(child)
        if new is not None and _same(child, new):
            setattr(parent, name, new)
        elif not isinstance(child.forward, FusedLayer):
            _swap(child, make)


def _same(old: nn.Module, new: nn.Module) -> bool:
    """Whether both give the same on random input. What raises is not the same."""
    weight: Tensor = old.weight  # type: ignore[assignment]
    x = torch.randn(ROWS, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        return same_numbers(old(x), new(x))
    except RuntimeError:
        return False


@dataclass
class _Call:
    """The inputs and the output of one call of a layer."""

    layer: nn.Module
    given: tuple[Any, ...]
    named: dict[str, Any]
    out: Any


def _fuse_layers(model: Any, layers: list[LayerShape], *, pack: bool, max_rows: int) -> None:  # noqa: ANN401
    """Let a FusedLayer stand for each layer that looks alike and gives the same in a trial.

    `max_rows`: how many go through one kernel at most.
    """
    variants: dict[int, Variant] = {}
    rotary = Rotary()
    run: list[_Call] = []  # to compiled layers, each with what the one before it gave
    calls = _trial(model, layers, variants)
    for call in calls:
        index = int(call.layer.self_attn.layer_idx)  # type: ignore[arg-type, union-attr]
        shape = layers[index]
        turned = call.named.get("position_embeddings")
        if len(call.given) != 1 or turned is None or {turned[0].shape[-1], shape.value_size} != {shape.key_size}:
            continue
        fused = FusedLayer(call.layer, shape, variants[index], rotary, pack=pack)
        if not _gives_the_same(fused, call):
            continue
        call.layer.forward = fused
        if max_rows:
            fused.compile(max_rows)
            if fused.compiled is not None and not _gives_the_same(fused, call):
                fused.compiled = None
        follows = not run or (call.given[0] is run[-1].out and turned is run[-1].named["position_embeddings"])
        if fused.compiled is not None and follows:
            run.append(call)
    if 1 < len(run) == len(calls):
        _stack(run)


def _stack(run: list[_Call]) -> None:
    """Let layers be computed together, where that gives the same, bit for bit, as one after the other."""
    layers: list[FusedLayer] = [call.layer.forward for call in run]  # type: ignore[misc]
    stack = LayerStack(layers)
    alone = together = run[0].given[0]
    for layer, call in zip(layers, run, strict=True):
        rotation, batch, cache = (call.named[name] for name in ("position_embeddings", "batch", "pages"))
        alone = layer.run(alone[0], None, rotation, batch, cache)[None]
        together = stack.after(layer, together, rotation, batch, cache)
        if together is None or not torch.equal(alone, together):
            return
    for layer in layers:
        layer.stack = stack.after


def _gives_the_same(fused: FusedLayer, call: _Call) -> bool:
    """Whether a fused layer repeats a call with the same outcome. What raises does not."""
    try:
        return isinstance(call.out, Tensor) and same_numbers(call.out, fused(*call.given, **call.named))
    except RuntimeError:
        return False


def _trial(model: Any, layers: list[LayerShape], variants: dict[int, Variant]) -> list[_Call]:  # noqa: ANN401
    """Run a few tokens through the model; how each layer that looks alike was called. Fills `variants`.

    The tokens are far apart, up to the last position: a layer may treat distant ones in its own way.
    """
    calls: list[_Call] = []
    note = lambda layer, given, named, out: calls.append(_Call(layer, given, named, out))  # noqa: E731
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in model.modules() if looks_alike(m)]
    if not hooks:
        return []
    last = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048) - 1
    tokens = [(7 * i + 3) % model.get_output_embeddings().weight.shape[0] for i in range(ROWS)]
    segment = Segment.of_tree(BlockTable([0]), 0, tokens, logits=True)
    weight = next(model.parameters())
    batch = Batch.build([replace(segment, positions=np.linspace(0, last, ROWS).astype(np.int64))], weight.device)
    cache = KVCache(layers, 1, weight.dtype, weight.device)
    named = {"batch": batch, "pages": cache, "variants": variants}
    model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **named)
    for hook in hooks:
        hook.remove()
    return calls


class LayerStack:
    """Layers that are computed when the first of them is called; each then gives out what is its own.

    Thirty calls cost a small model a tenth of a step. The model's loop over its layers stays as it is, and hooks on
    them see what they would see. A layer that is handed another tensor than the one before it gave computes by itself;
    what a hook changes in place is not noticed.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        """`layers`: compiled, in their order, all with the same rotation and kinds of caches."""
        from specscope.kernels.cpu.layer import CompiledLayers  # numba is imported only where it runs

        self._layers = list(layers)
        self._kernel = CompiledLayers([layer.parts for layer in layers if layer.parts is not None])
        self._made: Sequence[Tensor] = ()  # [1, N, width] each: what the layers make in this pass
        self._sin: Tensor | None = None  # of this pass

    def after(self, layer: FusedLayer, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Tensor | None:
        """What a layer of the stack makes of x [1, N, width]; None where it must compute that by itself."""
        index = layer.index - self._layers[0].index
        if index == 0:
            self._made, self._sin = self._compute(x, rotation, batch, cache), rotation[1]
        made = self._made
        if not made or (index and (x is not made[index - 1] or rotation[1] is not self._sin)):
            return None
        if layer is self._layers[-1]:
            self._made = ()
        return made[index]

    def _compute(self, x: Tensor, rotation: Rotation, batch: Batch, cache: KVCache) -> Sequence[Tensor]:
        """Nothing where rows go through in several batches: layer by layer, the weights are read once for all."""
        first = self._layers[0]
        compiled = all(layer.compiled is not None for layer in self._layers)
        if not compiled or not first.is_compiled_for(x[0], batch, cache) or len(batch.slabs) > 1:
            return ()
        cos, sin = (table.float() for table in first.tables(rotation))
        stores = [cache.parts[layer.index][0] for layer in self._layers]
        return self._kernel(x[0], None, cos, sin, batch.slabs, stores)[:, None].unbind()
