"""The decoder layer that most models share (Llama, Mistral, Qwen, SmolLM, ...), in fewer operators.

A small model spends a third of a decode step on a CPU between its matrix products: in transformers' modules, and in
their many small operators. A FusedLayer takes a layer's place by becoming its `forward`; the module, its children and
its parameters stay, and so do hooks on it. fuse.py decides which layers it can stand for, by comparing outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch
from specscope.model.fast.fast_paths import same_numbers
from specscope.model.fast.linear import PackedLinear
from specscope.model.kv_cache import KVCache, LayerShape

if TYPE_CHECKING:
    from specscope.kernels.cpu.layer import CompiledLayers, LayerParts

CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def looks_alike(module: nn.Module) -> bool:
    """Whether a module has the parts of this layer, and no others."""
    if _children(module) != CHILDREN:
        return False
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    head_norms = _children(attention) - ATTENTION
    if _children(attention) - head_norms != ATTENTION or head_norms not in (set(), HEAD_NORMS) or _children(mlp) != MLP:
        return False
    together = (attention, "q_proj", "k_proj", "v_proj"), (mlp, "gate_proj", "up_proj")
    joined = [[of.get_submodule(name) for name in names] for of, *names in together]
    linears = [*joined[0], *joined[1], attention.get_submodule("o_proj"), mlp.get_submodule("down_proj")]
    plain = all(type(linear) is nn.Linear for linear in linears)
    return plain and all(len({linear.bias is None for linear in each}) == 1 for each in joined)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_silu(act: Any) -> bool:  # noqa: ANN401
    x = torch.linspace(-20, 20, 64)
    return same_numbers(functional.silu(x), act(x))


class FusedRMSNorm(nn.Module):
    """RMSNorm as one kernel, where transformers' has eight small operators."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        from specscope.kernels.cpu.layer import Norm  # numba is imported only where it runs

        self.weight, self.kernel = weight, Norm.of(weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
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
        attention, mlp = layer.self_attn, layer.mlp
        self.index = int(attention.layer_idx)
        self.shape = shape
        self.variant, self.rotary = variant, rotary
        self.size = shape.key_size
        self.heads, self.kv_heads = attention.q_proj.out_features // self.size, shape.heads
        self.first_norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self.linears = linears = (
            PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj], pack=pack),
            PackedLinear([attention.o_proj], pack=pack),
            PackedLinear([mlp.gate_proj, mlp.up_proj], pack=pack),
            PackedLinear([mlp.down_proj], pack=pack),
        )
        self.qkv, self.out, self.gate_up, self.down = (linear.forward for linear in linears)
        self.act = mlp.act_fn
        self.parts: LayerParts | None = None  # of a compiled layer
        self.compiled: CompiledLayers | None = None
        self.most = 0  # rows that go through it
        # What layers that are computed together made of its input, or None: see LayerStack. None where it stands alone.
        self.stack: Callable[[FusedLayer, Tensor, tuple[Tensor, Tensor], Batch, KVCache], Tensor | None] | None = None

    def compile(self, max_rows: int, *, norms: bool = True) -> None:
        """Let up to `max_rows` rows go through one kernel, where there is one for such a layer.

        `norms`: whether it begins with the first norm; else it is always given what attention projects.
        """
        from specscope.kernels.cpu.layer import CompiledLayers, LayerParts  # numba is imported only where it runs
        from specscope.kernels.cpu.product import Panels
        from specscope.kernels.cpu.tiles import PANEL

        mine = [self.second_norm, *([self.first_norm] if norms else ()), *(self.head_norms or ())]
        sizes = (self.size, self.shape.value_size, self.linears[3].in_features)
        plain = self.variant.softcap is None and self.variant.sinks is None and _is_silu(self.act)
        fits = sizes[0] == sizes[1] and not any(size % PANEL for size in sizes)
        fits = fits and all(Panels.fits(linear.weight) for linear in self.linears)
        if not (plain and fits and all(isinstance(norm, FusedRMSNorm) for norm in mine)):
            return
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
            qkv=self.linears[0].panels,
            out=self.linears[1].panels,
            gate_up=self.linears[2].panels,
            down=self.linears[3].panels,
        )
        self.compiled = CompiledLayers([self.parts])

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
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

    def tables(self, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin as the layer uses them, [N, 1, 2, size / 2]."""
        return rotation if self.rotary is None else self.rotary(*rotation)

    def is_compiled_for(self, x: Tensor, batch: Batch, cache: KVCache) -> bool:
        """Whether these rows [N, width] go through one kernel."""
        return self.compiled is not None and batch.tree is None and len(x) <= self.most and cache.dtype is x.dtype

    def run(
        self, x: Tensor, projected: Tensor | None, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache
    ) -> Tensor:
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

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache) -> Tensor:
        """[N, width] to [N, heads * size]: project, turn by position, write to the cache, attend."""
        query = self.write(x, rotation, batch, cache)
        return paged_attention(query, self.index, cache, batch, self.variant).flatten(1)

    def write(self, x: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache) -> Tensor:
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
