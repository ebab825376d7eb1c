"""A DFlash head in plain torch, independent of the engine's: the logits of its blocks over a text's true features.

Committed positions' features, through `fc` and `hidden_norm`, are what keys and values are made of in every layer; a
block is the root and mask tokens behind it, whose rows see those and each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts
from specscope.analyze.audit.model.head import KV, Head, depth_of
from specscope.plans import dflash
from specscope.plans.kinds import LAYER_IDS, SLIDING
from specscope.trace.record.tree import ROOT

BLOCKS = 16  # that are run together
CONTEXT = "self_attn.context "  # begins the names of what is made of committed positions in a layer


class BlockHead(Head):
    """A DFlash head's weights, and its decoder layers over them."""

    by_pairs = False
    unknown, unknown_tensor = staticmethod(dflash.unknown), staticmethod(dflash.unknown_tensor)
    flat = staticmethod(dflash.flat)

    def _set_up(self, target: Any, folder: Path) -> None:  # noqa: ANN401
        config, count = self.config, int(self.config["num_hidden_layers"])
        self.names = ["midlayer", *(f"layers.{i}" for i in range(1, count))]
        self.mask_token, self.three = int(config["mask_token_id"]), True
        self._take_vocabulary(target, self.weights.get("lm_head.weight"))
        own = "embed_tokens.weight" in self.weights
        self.scale = 1.0 if own else float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))
        self.mask_row: Tensor | None = None
        if (folder / dflash.MASK_FILE).exists():
            state = torch.load(folder / dflash.MASK_FILE, "cpu", weights_only=True)
            self.mask_row = (state["embedding"] if isinstance(state, dict) else state).reshape(-1).float()
        self.heads = int(config["num_attention_heads"])
        base = {"rope_theta": config.get("rope_theta") or 1e6, "head_dim": self.size}
        told = ("rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_size", "num_attention_heads")
        self.rotary = Qwen3RotaryEmbedding(
            Qwen3Config.from_dict({**base, **{key: config[key] for key in told if config.get(key)}})
        )
        self.eps, self.act = float(config.get("rms_norm_eps") or 1e-6), ACT2FN[config.get("hidden_act") or "silu"]
        self.layers = tuple(config[LAYER_IDS])
        self.first = 0 if config.get(dflash.ANCHOR) else 1  # the block's row that drafts the first depth
        kinds, sliding = config.get("layer_types") or [], "sliding_attention"
        everywhere = bool(config.get("use_swa")) and sliding not in kinds
        slides = [everywhere or kinds[i : i + 1] == [sliding] for i in range(count)]
        window = config.get(dflash.WINDOW) or config.get("sliding_window")
        self.windows = [int(window or 0) if slide else 0 for slide in slides]
        given = [value for key in ("is_causal", "causal") if (value := config.get(key)) is not None]
        self.causal = [bool(given[0]) if given else kinds[i : i + 1] == [SLIDING] for i in range(count)]

    def combine(self, features: Tensor) -> Tensor:
        """Features [..., F] as states [..., width] that keys and values are made of."""
        return self._norm("hidden_norm", self._linear("fc", features))

    def context(self, states: Tensor, positions: Tensor) -> list[KV]:
        """Each layer's keys and values of committed positions, from their states [T, width]."""
        tap = self.tap
        if tap is not None:
            self.tap = lambda name, x: tap(name.replace("self_attn.", CONTEXT), x)
        try:
            return [self._keys(f"{name}.self_attn", states, positions) for name in self.names]
        finally:
            self.tap = tap

    def embed(self, tokens: Tensor) -> Tensor:
        """[N, width] of tokens [N]."""
        is_mask = tokens.eq(self.mask_token or 0) if self.mask_row is not None else torch.zeros_like(tokens).bool()
        rows = self.embedding[tokens.masked_fill(is_mask, 0)] * self.scale
        if self.mask_row is not None:
            rows = torch.where(is_mask[:, None], self.mask_row.to(rows.dtype), rows)
        return self._tapped("embedding", rows)

    def block(self, tokens: Tensor, positions: Tensor, seen: Tensor, before: Sequence[KV]) -> tuple[Tensor, list[KV]]:
        """Hidden states [N, width] of rows of blocks, and each layer's keys and values: theirs appended to `before`.

        seen bool [N, K]: the keys of each row's text and of its block.
        """
        x, after = self.embed(tokens), list[KV]()
        for name, window, causal, known in zip(self.names, self.windows, self.causal, before, strict=True):
            y, attention = self._norm(f"{name}.input_layernorm", x), f"{name}.self_attn"
            query = self._norm(f"{attention}.q_norm", self._split(f"{attention}.q_proj", y))
            query = self._tapped(f"{attention}.query", self._turn(query, positions))
            own = self._keys(attention, y, positions)
            key, value, places = (torch.cat(both) for both in zip(known, own, strict=True))
            after.append((key, value, places))
            back = positions[:, None] - places
            reach = seen & (back >= 0) if causal else seen
            reach = reach & (back.abs() < window) if window else reach
            x = self._layer(name, x, query, reach, after[-1])
        return x, after

    def _keys(self, attention: str, x: Tensor, positions: Tensor) -> KV:
        """A layer's keys, rotated, and values of rows [N, width]."""
        key = self._norm(f"{attention}.k_norm", self._split(f"{attention}.k_proj", x))
        key = self._tapped(f"{attention}.key", self._turn(key, positions))
        return key, self._tapped(f"{attention}.value", self._split(f"{attention}.v_proj", x)), positions

    @torch.inference_mode()
    def rows(self, contexts: Contexts, features: Tensor, asked: Sequence[Ask]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits at the parents asked for. features [L, F]: the target's, along the text."""
        end = min(len(features), len(contexts.text) - 1)
        by_step: dict[int, list[Ask]] = {}
        for step, node in asked:
            if 1 <= step.rows[ROOT] <= end and self.first + depth_of(step, node) < self.fed(step):
                by_step.setdefault(id(step), []).append((step, node))
        if not by_step:
            return
        states, groups = self.combine(features[:end].to(self.embedding.dtype)), list(by_step.values())
        text, kv = torch.tensor(contexts.text), self.context(states, torch.arange(end))
        for start in range(0, len(groups), BLOCKS):
            yield from self._trees(list(chain(*groups[start : start + BLOCKS])), text, kv)

    def fed(self, step: AuditedStep) -> int:
        """The rows of a step's block: as it tells them beside those that were committed, else as its tree is deep."""
        notes, depth = step.part.notes, int(step.part.tree.max_depth)
        is_told = notes is not None and len(notes.rows) > 0
        return int(notes.rows[0]) - (step.rows[ROOT] - notes.cached) if notes and is_told else depth + self.first

    def _trees(self, asked: Sequence[Ask], text: Tensor, kv: list[KV]) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits of some steps, whose roots are tokens of the text [T]: nodes of a depth share its row."""
        steps = list({id(step): step for step, _ in asked}.values())
        counts, roots = (torch.tensor(each) for each in zip(*((self.fed(s), s.rows[ROOT]) for s in steps), strict=True))
        of, starts = torch.arange(len(steps)).repeat_interleave(counts), counts.cumsum(0) - counts
        place = torch.arange(len(of)) - starts[of]
        tokens = torch.where(place == 0, text[roots[of]], self.mask_token or 0)
        seen = torch.cat([torch.arange(len(kv[0][2])) < roots[of, None], of[:, None] == of], dim=1)
        hidden, _ = self.block(tokens, roots[of] + place, seen, kv)
        first = {id(step): int(start) + self.first for step, start in zip(steps, starts, strict=True)}
        yield list(asked), self.logits(hidden[[first[id(step)] + depth_of(step, node) for step, node in asked]])
