"""The decoder layer that most models share (Llama, Mistral, Qwen, SmolLM, ...), in fewer operators.

A small model spends a third of a decode step on a CPU between its matrix products: in transformers' modules, and in
their many small operators. A FusedLayer takes a layer's place by becoming its `forward`; the module, its children and
its parameters stay, and so do hooks on it. fuse.py decides which layers it can stand for, by comparing outputs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from specscope.model.attention import Variant, paged_attention
from specscope.model.batch import Batch
from specscope.model.kv_cache import KVCache, LayerShape
from specscope.model.linear import PackedLinear

CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def looks_alike(module: nn.Module) -> bool:
    """Whether a module has the parts of this layer, and no others."""
    if _children(module) != CHILDREN:
        return False
    attention, mlp = module.get_submodule("self_attn"), module.get_submodule("mlp")
    if _children(attention) - HEAD_NORMS != ATTENTION or _children(mlp) != MLP:
        return False
    if _children(attention) & HEAD_NORMS not in (set(), HEAD_NORMS):
        return False
    together = [[attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]]
    together += [[mlp.get_submodule(name) for name in ("gate_proj", "up_proj")]]
    alone = [attention.get_submodule("o_proj"), mlp.get_submodule("down_proj")]
    plain = all(type(linear) is nn.Linear for linears in (*together, alone) for linear in linears)
    return plain and all(len({linear.bias is None for linear in linears}) == 1 for linears in together)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class Rotary:
    """The rotary tables of a forward pass in the shape that the layers use; made once for all of them.

    Halves of a head are apart, [2, size / 2]: x * cos + flip(x) * sin turns x, where the first half of sin is negative.
    """

    def __init__(self) -> None:
        self._sin: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[1, N, size] each to [N, 1, 2, size / 2] each."""
        if self._tables is None or self._sin is not sin:
            by_half = sin[0].unflatten(-1, (2, -1)).clone()
            by_half[:, 0].neg_()
            self._sin, self._tables = sin, (cos[0].unflatten(-1, (2, -1))[:, None], by_half[:, None])
        return self._tables


class FusedLayer:
    """Stands for `layer`, whose attention is `variant` and keeps `shape` of a token."""

    def __init__(self, layer: Any, shape: LayerShape, variant: Variant, rotary: Rotary, *, pack: bool) -> None:  # noqa: ANN401
        attention, mlp = layer.self_attn, layer.mlp
        self.index = int(attention.layer_idx)
        self.variant, self.rotary = variant, rotary
        self.size = shape.key_size
        self.heads, self.kv_heads = attention.q_proj.out_features // self.size, shape.heads
        self.first_norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        linears = (
            PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj], pack=pack),
            PackedLinear([attention.o_proj], pack=pack),
            PackedLinear([mlp.gate_proj, mlp.up_proj], pack=pack),
            PackedLinear([mlp.down_proj], pack=pack),
        )
        self.qkv, self.out, self.gate_up, self.down = (linear.forward for linear in linears)
        self.read_bytes = sum(linear.read_bytes for linear in linears)  # of weights, by a pass of few rows
        self.act = mlp.act_fn

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        batch: Batch,
        cache: KVCache,
        **kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """The layer's forward. hidden_states [1, N, width]; returns the same shape."""
        x = hidden_states[0]
        return self.run(x, self.first_norm(x), position_embeddings, batch, cache)[None]

    def run(
        self, x: Tensor, projected: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache
    ) -> Tensor:
        """The residual stream x [N, width] after the layer; `projected` is what attention makes its queries of."""
        x = self.out(self._attend(projected, rotation, batch, cache)).add_(x)
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, dim=-1)
        return self.down(self.act(gate).mul_(up)).add_(x)

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch, cache: KVCache) -> Tensor:
        """[N, width] to [N, heads * size]: project, turn by position, write to the cache, attend."""
        qkv = self.qkv(x)
        by_head = qkv.view(len(x), -1, self.size)
        query = by_head[:, : self.heads]
        if self.head_norms is not None:
            key = by_head[:, self.heads : self.heads + self.kv_heads]
            for norm, part in zip(self.head_norms, (query, key), strict=True):
                part.copy_(norm(part))
        cos, sin = self.rotary.tables(*rotation)
        turned = qkv.view(len(x), -1, 2, self.size // 2).narrow(1, 0, self.heads + self.kv_heads)
        flipped = turned.flip(2)
        turned.mul_(cos).addcmul_(flipped, sin)
        cache.write_rows(self.index, batch.slots, qkv[:, self.heads * self.size :])
        return paged_attention(query, self.index, cache, batch, self.variant).flatten(1)
