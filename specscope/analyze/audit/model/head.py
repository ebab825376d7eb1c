"""An EAGLE head in plain torch, from its published checkpoint: its logits along a text's true features.

Written independently of the engine's head, from the published convention: a pair of the target's feature at t and the
token at t + 1 predicts the token at t + 2. In a tree below the root, a node's feature is the head's output at its
parent. Dense attention over the whole text; no paging, no fused parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.model.judge import Ask
from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError, first_line
from specscope.plans.heads import FLAGS, SLIDING, flattened, unknown, unknown_tensor, weight_files
from specscope.trace.record.tree import ROOT
from specscope.whole_file import read_object

STEPS = 64  # steps whose trees are run together
CHUNK = 512  # rows of the text that are run together
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
KV = tuple[Tensor, Tensor, Tensor]  # keys, rotated, and values of one layer, [rows, KV heads, size] each; positions
# What an operation gave, by its name: [rows, ...], or [rows, heads, keys] for the logarithms of attention's weights
Tap = Callable[[str, Tensor], None]


class Head:
    """A head's weights, and its decoder layers over them."""

    def __init__(self, source: ModelSource, target: Any) -> None:  # noqa: ANN401
        """`target`: the transformers model whose embedding, and for EAGLE-1 whose head, it uses.

        Raises UserError, also for a head whose arithmetic this judge does not know.
        """
        self.tap: Tap | None = None  # is told of every operation, by the names of a published head's modules
        folder = Path(source.path)
        try:
            raw = read_object(folder / "config.json")
        except UserError as error:
            raise UserError(f"cannot load the head {source.name}: {error}") from None
        try:
            if key := unknown(raw):
                raise UserError(f"the head's config has `{key}`, which this judge does not know")
            self.weights = _read(folder)
            if "fc.weight" not in self.weights:
                raise UserError(f"{source.name} is no EAGLE head: it has no tensor fc.weight")
            if name := unknown_tensor(self.weights):
                raise UserError(f"the head has a tensor {name}, which this judge does not know")
            self.config = flattened(raw)
            self._set_up(target)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"cannot load the head {source.name}: {first_line(error)}") from error

    def _set_up(self, target: Any) -> None:  # noqa: ANN401
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        token = (self.config.get(name) for name in ("mask_token_id", "pard_token", "ptd_token_id"))
        self.mask_token: int | None = next((t for t in token if t is not None), None)  # of a P-EAGLE head
        if "mask_hidden" not in self.weights:
            self.mask_token = None
        self.three = "midlayer.hidden_norm.weight" in self.weights
        if not self.three and (flag := next((name for name in FLAGS if self.config.get(name)), "")):
            raise UserError(f"the head's config has `{flag}`, which an EAGLE-1 head has not")
        further = range(1, int(self.config.get("num_hidden_layers", 1)))
        self.names = ["midlayer", *(f"layers.{i}" for i in further)]  # of its layers
        embedding = self.weights.get("embed_tokens.weight")
        self.of_target: Tensor = target.get_input_embeddings().weight
        self.embedding = self.of_target if embedding is None else embedding
        self.output = self.weights["lm_head.weight"] if self.three else target.get_output_embeddings().weight
        self.vocab = int(target.get_output_embeddings().weight.shape[0])
        drafted = torch.arange(len(self.output))
        self.tokens = drafted + self.weights["d2t"].long() if "d2t" in self.weights else drafted
        self.heads = int(self.config["num_attention_heads"])
        self.turned = int(self.size * _partial(self.config))  # how many of a head's channels are rotated, the first
        config = LlamaConfig.from_dict(_llama(self.config, self.turned))
        self.eps = float(config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)
        self.act = ACTS[config.hidden_act]
        kinds = self.config.get("layer_types") or []
        window = int(self.config.get("sliding_window") or 0)
        self.windows = [window if SLIDING in kinds[i : i + 1] else 0 for i in range(len(self.names))]  # 0: all
        self.layers = (
            _layers(self.config, int(target.config.get_text_config().num_hidden_layers)) if self.three else ("final",)
        )

    def likeness(self, tokens: Sequence[int]) -> Tensor | None:
        """[T] of each token the cosine between its row in the head's embedding and in the target's.

        None where the head uses the target's own, or another width: then there is nothing to compare.
        """
        theirs = self.of_target
        if self.embedding is theirs or self.embedding.shape[1] != theirs.shape[1]:
            return None
        rows = torch.tensor([token for token in tokens if token < min(len(self.embedding), len(theirs))])
        return functional.cosine_similarity(self.embedding[rows].float(), theirs[rows].float(), dim=-1)

    def to(self, dtype: torch.dtype) -> Head:
        """In another dtype."""
        self.weights = {n: x.to(dtype) if x.is_floating_point() else x for n, x in self.weights.items()}
        shared = self.embedding is self.of_target
        self.embedding, self.output = self.embedding.to(dtype), self.output.to(dtype)
        self.of_target = self.embedding if shared else self.of_target
        return self

    def combine(self, features: Tensor) -> Tensor:
        """Features [..., F] as hidden states [..., width]."""
        if not self.three:
            return features
        if self.config.get("norm_before_fc"):
            features = self._norm("input_norm", features)
        if self.config.get("fc_norm"):
            each = features.unflatten(-1, (len(self.layers), -1)).unbind(-2)
            features = torch.cat([self._norm(f"fc_norm.{i}", layer) for i, layer in enumerate(each)], dim=-1)
        return self._linear("fc", features)

    def fed_back(self, hidden: Tensor) -> Tensor:
        """What the children of these rows are fed, from the rows' hidden states [N, width]."""
        return self._tapped("fed back", self._normed("norm", hidden) if self.config.get("norm_output") else hidden)

    def prepare(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream, what attention projects) of tokens [N] and hidden states [N, width]."""
        embedding = self._tapped("embedding", self.embedding[tokens])
        if not self.three:
            joined = self._linear("fc", torch.cat([embedding, hidden], dim=-1))
            return joined, joined
        normed = self._norm("midlayer.hidden_norm", hidden)
        both = torch.cat([self._norm("midlayer.input_layernorm", embedding), normed], dim=-1)
        return (normed if self.config.get("norm_before_residual") else hidden), both

    def run(
        self, prepared: tuple[Tensor, Tensor], positions: Tensor, seen: Tensor, before: Sequence[KV]
    ) -> tuple[Tensor, list[KV]]:
        """Hidden states [N, width] of N prepared rows, and each layer's keys and values: theirs appended to `before`.

        seen bool [N, K]: which of these K a row sees, its own among them.
        """
        (x, projected), after = prepared, list[KV]()
        for name, window, (keys, values, places) in zip(self.names, self.windows, before, strict=True):
            if after:
                projected = self._norm(f"{name}.input_layernorm", x)
            query = self._tapped(
                f"{name}.self_attn.query", self._turn(self._split(f"{name}.self_attn.q_proj", projected), positions)
            )
            key = self._tapped(
                f"{name}.self_attn.key", self._turn(self._split(f"{name}.self_attn.k_proj", projected), positions)
            )
            value = self._split(f"{name}.self_attn.v_proj", projected)
            after.append((torch.cat([keys, key]), torch.cat([values, value]), torch.cat([places, positions])))
            reach = seen & (after[-1][2] > positions[:, None] - window) if window else seen
            x = self._layer(name, x, query, reach, after[-1])
        return x, after

    def nothing(self) -> list[KV]:
        """An empty KV for each layer."""
        heads = int(self.config.get("num_key_value_heads") or self.heads)
        none = self.embedding.new_zeros(0, heads, self.size)
        return [(none, none, torch.zeros(0, dtype=torch.int64))] * len(self.names)

    def _layer(self, name: str, residual: Tensor, query: Tensor, seen: Tensor, kv: KV) -> Tensor:
        """What follows the projections in one decoder layer: [N, width]."""
        keys, values = (
            self._tapped(f"{name}.self_attn.{what} read", x) for what, x in zip(("keys", "values"), kv, strict=False)
        )
        key, value = (x.repeat_interleave(self.heads // x.shape[1], dim=1) for x in (keys, values))
        scores = (torch.einsum("nhd,khd->hnk", query, key) / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        if self.tap is not None:
            self.tap(f"{name}.self_attn.scores", scores.log_softmax(-1, dtype=torch.float32).transpose(0, 1))
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        mixed = self._tapped(f"{name}.self_attn.attention", torch.einsum("hnk,khd->nhd", weights, value)).flatten(1)
        x = residual + self._linear(f"{name}.self_attn.o_proj", mixed)
        y = self._norm(f"{name}.post_attention_layernorm", x)
        gate, up = (self._linear(f"{name}.mlp.{part}_proj", y) for part in ("gate", "up"))
        return self._tapped(name, x + self._linear(f"{name}.mlp.down_proj", self.act(gate) * up))

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the target's whole vocabulary, float32 [N, V]: minus infinity for tokens that the head does not have."""
        normed = self._norm("norm", hidden) if self.three else hidden
        rows = self._tapped("lm_head", functional.linear(normed, self.output).float())
        whole = rows.new_full((len(rows), self.vocab), -torch.inf)
        return self._tapped("d2t", whole.index_copy_(1, self.tokens, rows))

    def _tapped(self, name: str, x: Tensor) -> Tensor:
        """What an operation gave, after the tap was told of it."""
        if self.tap is not None:
            self.tap(name, x)
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        given = self._tapped(f"{name}:in", x)
        return self._tapped(
            name, functional.linear(given, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._tapped(name, self._normed(name, self._tapped(f"{name}:in", x)))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weights[name + ".weight"] * normed.to(x.dtype)

    @property
    def size(self) -> int:
        """Channels of a key."""
        return int(self.weights["midlayer.self_attn.q_proj.weight"].shape[0]) // self.heads

    def _split(self, name: str, projected: Tensor) -> Tensor:
        split: Tensor = self._linear(name, projected).unflatten(-1, (-1, self.size))
        return split

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (y[0][:, None] for y in self.rotary(x, positions[None]))
        return self._turn_by(x, cos, sin)

    def _turn_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first channels of each head; the others stay."""
        part, half = x[..., : self.turned], self.turned // 2
        turned = part * cos + torch.cat([-part[..., half:], part[..., :half]], dim=-1) * sin
        return torch.cat([turned, x[..., self.turned :]], dim=-1)

    @torch.inference_mode()
    def rows(self, contexts: Contexts, features: Tensor, asked: Sequence[Ask]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits at the parents asked for. features [L, F]: the target's, along the text.

        A pair is a feature and the token after it. A step whose root has no pair is skipped.
        """
        text = torch.tensor(contexts.text[: len(features) + 1])
        pairs = min(len(features), len(text) - 1)
        asked = [ask for ask in asked if 1 <= ask[0].rows[ROOT] <= pairs]
        if not asked:
            return
        slots, kv, parts = torch.arange(pairs), self.nothing(), []
        for start in range(0, pairs, CHUNK):
            here = slots[start : start + CHUNK]
            prepared = self.prepare(text[here + 1], self.combine(features[here].to(self.embedding.dtype)))
            hidden, kv = self.run(prepared, here, slots[None, : start + len(here)] <= here[:, None], kv)
            parts.append(hidden)
        out = torch.cat(parts)
        by_step: dict[int, list[Ask]] = {}
        for ask in asked:
            by_step.setdefault(id(ask[0]), []).append(ask)
        groups = list(by_step.values())
        for start in range(0, len(groups), STEPS):
            yield from self._trees([ask for group in groups[start : start + STEPS] for ask in group], out, kv)

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits of some steps by level: a row sees the text's pairs up to the root's, its ancestors and itself."""
        if self.mask_token is not None:
            yield from self._one_pass(asked, out, kv)
            return
        roots = [ask for ask in asked if ask[1] == ROOT]
        hidden = out[[_slot(step) for step, _ in roots]]
        yield roots, self.logits(hidden)
        place = {(id(step), ROOT): index for index, (step, _) in enumerate(roots)}
        before, grown = len(kv[0][0]), list[Ask]()
        depth = 1
        while level := [(step, node) for step, node in asked if node != ROOT and step.part.tree.depth[node] == depth]:
            above = [place[id(step), int(step.part.tree.parent[node])] for step, node in level]
            tokens = torch.tensor([int(step.part.tree.token[node]) for step, node in level])
            positions = torch.tensor([_slot(step) + depth for step, _ in level])
            grown += level
            prepared = self.prepare(tokens, self.fed_back(hidden[above]))
            hidden, kv = self.run(prepared, positions, _seen(level, grown, before), kv)
            yield level, self.logits(hidden)
            place = {(id(step), node): index for index, (step, node) in enumerate(level)}
            depth += 1

    def _one_pass(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        """For a P-EAGLE head: all nodes of a depth share the logits of its row, which sees the mask rows before it."""
        roots = [ask for ask in asked if ask[1] == ROOT]
        yield roots, self.logits(out[[_slot(step) for step, _ in roots]])
        depths = {id(step): 0 for step, _ in asked}
        for step, node in asked:
            depths[id(step)] = max(depths[id(step)], 0 if node == ROOT else int(step.part.tree.depth[node]))
        steps = {id(step): step for step, _ in asked}
        rows = [(steps[key], depth) for key, deepest in depths.items() for depth in range(1, deepest + 1)]
        below = [ask for ask in asked if ask[1] != ROOT]
        if not below:
            return
        tokens = torch.full((len(rows),), self.mask_token or 0)
        hidden = self.combine(self.weights["mask_hidden"].view(1, -1)).expand(len(rows), -1)
        positions = torch.tensor([_slot(step) + depth for step, depth in rows])
        before = len(kv[0][0])
        seen = torch.zeros(len(rows), before + len(rows), dtype=torch.bool)
        for row, (step, depth) in enumerate(rows):
            seen[row, : _slot(step) + 1] = True
            seen[row, before + row - depth + 1 : before + row + 1] = True  # depths 1 to its own
        logits = self.logits(self.run(self.prepare(tokens, hidden), positions, seen, kv)[0])
        place = {(id(step), depth): index for index, (step, depth) in enumerate(rows)}
        yield below, logits[[place[id(step), int(step.part.tree.depth[node])] for step, node in below]]


def _slot(step: AuditedStep) -> int:
    """The place of the pair whose token is the step's root."""
    return step.rows[ROOT] - 1


def _seen(level: Sequence[Ask], grown: Sequence[Ask], before: int) -> Tensor:
    """bool [rows of the level, keys]: what each row attends to."""
    keys = {(id(step), node): before + index for index, (step, node) in enumerate(grown)}
    seen = torch.zeros(len(level), before + len(grown), dtype=torch.bool)
    for row, (step, node) in enumerate(level):
        seen[row, : _slot(step) + 1] = True
        seen[row, [keys[id(step), ancestor] for ancestor in step.part.tree.path_to(node)]] = True
    return seen


def _read(folder: Path) -> dict[str, Tensor]:
    """Its tensors by the authors' names, float32."""
    from safetensors.torch import load_file

    tensors = {}
    for file in weight_files(folder):
        raw = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        for name, tensor in raw.items():
            name = name.removeprefix("model.")
            name = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    return tensors


def _partial(config: dict[str, Any]) -> float:
    """The share of a head's channels that is rotated by position."""
    inside = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("partial_rotary_factor")
    return float(inside or config.get("partial_rotary_factor") or 1)


def _llama(config: dict[str, Any], turned: int) -> dict[str, Any]:
    """A config for a layer whose heads are only the rotated channels."""
    left_out = ("architectures", "torch_dtype", "dtype", "layer_types", "partial_rotary_factor")
    layer = {
        name: {key: x for key, x in value.items() if key not in left_out} if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in left_out
    }
    return {**layer, "num_hidden_layers": 1, "head_dim": turned}


def _layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Which of the target's layers feed it: vLLM's ids, SGLang's (which count what leaves a layer), or the authors'."""
    if ids := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(ids)
    if ids := (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layer_id + 1 for layer_id in ids)
    return 2, layers // 2, layers - 3
