"""An EAGLE head in plain torch, independent of the engine's: its logits along a text's true features.

A pair of the target's feature at t and the token at t + 1 predicts the token at t + 2; in a tree below the root, a
node's feature is the head's output at its parent. Dense attention over all the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts
from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError, first_line
from specscope.plans.kinds import FLAGS, SLIDING, flattened, unknown, unknown_tensor, weight_files
from specscope.trace.record.tree import ROOT
from specscope.whole_file import read_object

STEPS = 64  # steps whose trees are run together
LEFT_OUT = ("architectures", "torch_dtype", "dtype", "layer_types")
CHUNK = 512  # rows of the text that are run together
KV = tuple[Tensor, Tensor, Tensor]  # keys, rotated, and values of one layer, [rows, KV heads, size] each; positions
# What an operation gave, by its name: [rows, ...], or [rows, heads, keys] for the logarithms of attention's weights
Tap = Callable[[str, Tensor], None]


class Head:
    """A head's weights, and its decoder layers over them."""

    by_pairs = True  # whether its passes are over pairs of a feature and a token
    unknown, unknown_tensor, flat = staticmethod(unknown), staticmethod(unknown_tensor), staticmethod(flattened)

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
            if key := self.unknown(raw):
                raise UserError(f"the head's config has `{key}`, which this judge does not know")
            self.weights = _read(folder)
            if "fc.weight" not in self.weights:
                raise UserError(f"{source.name} is not a head: it has no tensor fc.weight")
            if name := self.unknown_tensor(self.weights):
                raise UserError(f"the head has a tensor {name}, which this judge does not know")
            self.config = self.flat(raw)
            self._set_up(target, folder)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"cannot load the head {source.name}: {first_line(error)}") from error

    def _set_up(self, target: Any, folder: Path) -> None:  # noqa: ANN401
        token = (self.config.get(name) for name in ("mask_token_id", "pard_token", "ptd_token_id"))
        given = next((t for t in token if t is not None), None)
        self.mask_token: int | None = given if "mask_hidden" in self.weights else None  # of a P-EAGLE head
        self.three = "midlayer.hidden_norm.weight" in self.weights
        if not self.three and (flag := next((name for name in FLAGS if self.config.get(name)), "")):
            raise UserError(f"the head's config has `{flag}`, which an EAGLE-1 head does not have")
        further = range(1, int(self.config.get("num_hidden_layers", 1)))
        self.names = ["midlayer", *(f"layers.{i}" for i in further)]  # of its layers
        self._take_vocabulary(target, self.weights["lm_head.weight"] if self.three else None)
        self.heads = int(self.config["num_attention_heads"])
        layer = {key: value for key, value in self.config.items() if key not in LEFT_OUT}
        config = LlamaConfig.from_dict({**layer, "num_hidden_layers": 1, "head_dim": self.size})
        self.eps = float(config.rms_norm_eps)
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.act = ACT2FN[config.hidden_act]
        kinds, window = self.config.get("layer_types") or [], int(self.config.get("sliding_window") or 0)
        self.windows = [window if SLIDING in kinds[i : i + 1] else 0 for i in range(len(self.names))]  # 0: all
        count = int(target.config.get_text_config().num_hidden_layers)
        self.layers = _layers(self.config, count) if self.three else ("final",)

    def _take_vocabulary(self, target: Any, output: Tensor | None) -> None:  # noqa: ANN401
        """The embedding, and the projection to the vocabulary: its own where it has them, else the target's."""
        embedding = self.weights.get("embed_tokens.weight")
        self.of_target: Tensor = target.get_input_embeddings().weight
        self.embedding = self.of_target if embedding is None else embedding
        self.output: Tensor = target.get_output_embeddings().weight if output is None else output
        self.vocab = int(target.get_output_embeddings().weight.shape[0])
        drafted = torch.arange(len(self.output))
        self.tokens = drafted + self.weights["d2t"].long() if "d2t" in self.weights else drafted

    def likeness(self, tokens: Sequence[int]) -> Tensor | None:
        """[T] the cosine of each token's rows in the head's embedding and the target's; None: nothing to compare."""
        theirs = self.of_target
        if self.embedding is theirs or self.embedding.shape[1] != theirs.shape[1]:
            return None
        rows = torch.tensor([token for token in tokens if token < min(len(self.embedding), len(theirs))])
        return functional.cosine_similarity(self.embedding[rows].float(), theirs[rows].float(), dim=-1)

    def to(self, dtype: torch.dtype) -> Head:
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
            own = f"{name}.self_attn"
            query, key = (
                self._tapped(f"{own}.{what}", self._turn(self._split(f"{own}.{part}", projected), positions))
                for what, part in (("query", "q_proj"), ("key", "k_proj"))
            )
            value = self._split(f"{own}.v_proj", projected)
            after.append((torch.cat([keys, key]), torch.cat([values, value]), torch.cat([places, positions])))
            reach = seen & (after[-1][2] > positions[:, None] - window) if window else seen
            x = self._layer(name, x, query, reach, after[-1])
        return x, after

    def nothing(self) -> list[KV]:
        heads = int(self.config.get("num_key_value_heads") or self.heads)
        none = self.embedding.new_zeros(0, heads, self.size)
        return [(none, none, torch.zeros(0, dtype=torch.int64))] * len(self.names)

    def _layer(self, name: str, residual: Tensor, query: Tensor, seen: Tensor, kv: KV) -> Tensor:
        """What follows the projections in one decoder layer: [N, width]."""
        read = [self._tapped(f"{name}.self_attn.{what} read", x) for what, x in (("keys", kv[0]), ("values", kv[1]))]
        key, value = (x.repeat_interleave(self.heads // x.shape[1], dim=1) for x in read)
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
        weight, bias = self.weights[name + ".weight"], self.weights.get(name + ".bias")
        return self._tapped(name, functional.linear(self._tapped(f"{name}:in", x), weight, bias))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._tapped(name, self._normed(name, self._tapped(f"{name}:in", x)))

    def _normed(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weights[name + ".weight"] * normed.to(x.dtype)

    @property
    def size(self) -> int:
        """Channels of a key."""
        return len(self.weights["midlayer.self_attn.q_proj.weight"]) // self.heads

    def _split(self, name: str, projected: Tensor) -> Tensor:
        split: Tensor = self._linear(name, projected).unflatten(-1, (-1, self.size))
        return split

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = (y[0][:, None] for y in self.rotary(x, positions[None]))
        return self._turn_by(x, cos, sin)

    def _turn_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.size // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    @torch.inference_mode()
    def rows(self, contexts: Contexts, features: Tensor, asked: Sequence[Ask]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits at the parents asked for. features [L, F]: the target's, along the text. A step whose root has no
        pair of a feature and the token after it is skipped.
        """
        text, pairs, by_step = pairs_of(contexts, features, asked)
        if not by_step:
            return
        slots, kv, parts = torch.arange(pairs), self.nothing(), []
        for start in range(0, pairs, CHUNK):
            here = slots[start : start + CHUNK]
            prepared = self.prepare(text[here + 1], self.combine(features[here].to(self.embedding.dtype)))
            hidden, kv = self.run(prepared, here, slots[None, : start + len(here)] <= here[:, None], kv)
            parts.append(hidden)
        out, groups = torch.cat(parts), list(by_step.values())
        for start in range(0, len(groups), STEPS):
            yield from self._trees(list(chain(*groups[start : start + STEPS])), out, kv)

    def _trees(self, asked: Sequence[Ask], out: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits of some steps by level: a row sees the text's pairs up to the root's, its ancestors and itself."""
        roots = [ask for ask in asked if ask[1] == ROOT]
        hidden = out[[slot_of(step) for step, _ in roots]]
        yield roots, self.logits(hidden)
        below = [ask for ask in asked if ask[1] != ROOT]
        if self.mask_token is not None:
            yield from self._one_pass(below, kv)
            return
        level, grown, before = roots, list[Ask](), len(kv[0][0])
        for depth in range(1, max((depth_of(*ask) for ask in below), default=0) + 1):
            place = {(id(step), node): index for index, (step, node) in enumerate(level)}
            level = [ask for ask in below if depth_of(*ask) == depth]
            above = [place[id(step), int(step.part.tree.parent[node])] for step, node in level]
            tokens = torch.tensor([int(step.part.tree.token[node]) for step, node in level])
            grown += level
            seen = _seen(level, grown, before, lambda step, node: step.part.tree.path_to(node))
            positions = torch.tensor([slot_of(step) + depth for step, _ in level])
            hidden, kv = self.run(self.prepare(tokens, self.fed_back(hidden[above])), positions, seen, kv)
            yield level, self.logits(hidden)

    def _one_pass(self, below: Sequence[Ask], kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        """For a P-EAGLE head: all nodes of a depth share the logits of its row, which sees the mask rows before it."""
        if not below:
            return
        by_depth = sorted(below, key=lambda ask: depth_of(*ask))
        deepest = {id(step): (step, depth_of(step, node)) for step, node in by_depth}
        rows = [(step, depth) for step, most in deepest.values() for depth in range(1, most + 1)]
        hidden = self.combine(self.weights["mask_hidden"].view(1, -1)).expand(len(rows), -1)
        positions = torch.tensor([slot_of(step) + depth for step, depth in rows])
        seen = _seen(rows, rows, len(kv[0][0]), lambda step, depth: range(1, depth + 1))
        prepared = self.prepare(torch.full((len(rows),), self.mask_token or 0), hidden)
        logits = self.logits(self.run(prepared, positions, seen, kv)[0])
        place = {(id(step), depth): index for index, (step, depth) in enumerate(rows)}
        yield list(below), logits[[place[id(step), depth_of(step, node)] for step, node in below]]


def slot_of(step: AuditedStep) -> int:
    """The place of the pair whose token is the step's root."""
    return step.rows[ROOT] - 1


def depth_of(step: AuditedStep, node: int) -> int:
    """How deep a node lies; 0 for the root."""
    return 0 if node == ROOT else int(step.part.tree.depth[node])


def _seen(
    level: Sequence[Ask], grown: Sequence[Ask], before: int, path: Callable[[AuditedStep, int], Iterable[int]]
) -> Tensor:
    """bool [rows of the level, keys]: each row attends to the text's pairs up to the root's, and to its own path."""
    keys = {(id(step), node): before + index for index, (step, node) in enumerate(grown)}
    seen = torch.zeros(len(level), before + len(grown), dtype=torch.bool)
    for row, (step, node) in enumerate(level):
        seen[row, : slot_of(step) + 1] = True
        seen[row, [keys[id(step), above] for above in path(step, node)]] = True
    return seen


def pairs_of(contexts: Contexts, features: Tensor, asked: Sequence[Ask]) -> tuple[Tensor, int, dict[int, list[Ask]]]:
    """The text's tokens, how many pairs of a feature and the token after it there are, and by the step's id what is
    asked of each whose root has a pair."""
    text = torch.tensor(contexts.text[: len(features) + 1])
    pairs = min(len(features), len(text) - 1)
    by_step: dict[int, list[Ask]] = {}
    for step, node in asked:
        if 1 <= step.rows[ROOT] <= pairs:
            by_step.setdefault(id(step), []).append((step, node))
    return text, pairs, by_step


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


def _layers(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Which of the target's layers feed it: vLLM's ids, SGLang's (which count what leaves a layer), or the authors'."""
    if ids := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(ids)
    if ids := (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return tuple(layer_id + 1 for layer_id in ids)
    return 2, layers // 2, layers - 3
