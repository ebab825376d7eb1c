"""A target's next-token modules (MTP) in plain torch, from DeepSeek-V3 (2024), section 2.2; layers by transformers.

At slot t module k takes the token at t + 1 + k and what module k - 1 made of slot t, at first the target's state after
its last norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts
from specscope.analyze.audit.model.head import CHUNK, KV, STEPS, Head, Tap, depth_of, pairs_of, slot_of
from specscope.analyze.audit.options import ModelSource
from specscope.errors import UserError, first_line
from specscope.trace.record.tree import ROOT

PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")  # of a module, beside its decoder layer


class Modules(Head):
    """A target's modules. A single one drafts trees as an EAGLE head does, fed its own states below the root."""

    def __init__(self, source: ModelSource, target: Any) -> None:  # noqa: ANN401
        """`source`: the target's; `target`: it, as transformers loads it. Raises UserError."""
        self.tap, self.layers, self.mask_token = None, ("final",), None
        # Has a decoder layer tell of its operations meanwhile, in a pass of so many rows
        self.inside: Callable[[nn.Module, Tap, int], AbstractContextManager[None]] = lambda *_: nullcontext()
        self.of_target = self.embedding = target.get_input_embeddings().weight
        self.output = target.get_output_embeddings().weight
        self.vocab = len(self.output)
        self.tokens = torch.arange(self.vocab)
        try:
            self._load(target)
        except (ImportError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"cannot load the next-token modules of {source.name}: {first_line(error)}") from error

    def _load(self, target: Any) -> None:  # noqa: ANN401
        from transformers.modeling_layers import MtpModel

        text = target.config.get_text_config()
        first, count = int(text.num_hidden_layers), int(text.num_mtp_layers)
        known = target._keys_to_ignore_on_load_unexpected or ()
        target._keys_to_ignore_on_load_unexpected = {*known, *(rf"\blayers\.{first + k}\." for k in range(count))}
        model = MtpModel.from_pretrained(target)
        model.eval().requires_grad_(False)
        self.kinds: Any = getattr(model.config, "layer_types", None)
        self.eps = float(model.config.rms_norm_eps)
        self.turn: Any = model.rotary_emb
        self.by_kind = bool(model.has_per_layer_rope)
        self.blocks: list[Any] = [layer.mtp_block for layer in model.layers]
        self.names = [f"layers.{module}" for module in range(count)]
        self.modules = [{f"{part}.weight": getattr(layer, part).weight for part in PARTS} for layer in model.layers]
        self.weights = self.modules[0]  # of the module that runs

    def to(self, dtype: torch.dtype) -> Modules:
        super().to(dtype)
        self.blocks = [block.to(dtype) for block in self.blocks]
        self.modules = [{name: x.to(dtype) for name, x in weights.items()} for weights in self.modules]
        return self

    def likeness(self, tokens: Sequence[int]) -> None:
        """The embedding is the target's own."""

    def combine(self, features: Tensor) -> Tensor:
        """The target's states are what the first module takes."""
        return features

    def fed_back(self, hidden: Tensor) -> Tensor:
        """A row's children are fed its state after the last norm."""
        return self._tapped("fed back", hidden)

    def prepare(self, tokens: Tensor, hidden: Tensor, module: int = 0) -> tuple[Tensor, Tensor]:
        """What a module's layer takes of tokens [N] and states [N, width], twice."""
        self.weights = self.modules[module]
        token = self._norm("enorm", self._tapped("embedding", self.embedding[tokens]))
        joined = self._linear("eh_proj", torch.cat([token, self._norm("hnorm", hidden)], dim=-1))
        return joined, joined

    def run(
        self, prepared: tuple[Tensor, Tensor], positions: Tensor, seen: Tensor, before: Sequence[KV], module: int = 0
    ) -> tuple[Tensor, list[KV]]:
        """As of a head: states [N, width] of N prepared rows of a module, and the KV of all with theirs in its own."""
        self.weights, block, grown = self.modules[module], self.blocks[module], GrowingKeys(before[module])
        kinds = {"layer_type": self.kinds[module]} if self.by_kind else {}
        x, places = prepared[0][None], self.places(positions, module)[None]
        known = torch.cat([before[module][2], positions])
        if window := getattr(block.self_attn, "sliding_window", None):
            seen = seen & (known > positions[:, None] - window)
        mask = torch.zeros(seen.shape, dtype=x.dtype).masked_fill_(~seen, torch.finfo(x.dtype).min)[None, None]
        turned = self.turn(x, position_ids=places, **kinds)
        given: dict[str, Any] = {"attention_mask": mask, "position_ids": places, "past_key_values": grown}
        told = partial(self._within, self.names[module])
        with nullcontext() if self.tap is None else self.inside(block, told, len(x[0])):
            made = self._tapped(self.names[module], block(x, position_embeddings=turned, **given)[0])
        after = list(before)
        after[module] = (*grown.kv, known)
        return self._norm("post_norm", made), after

    def _within(self, layer: str, name: str, x: Tensor) -> None:
        self._tapped(f"{layer}.{name}", x)

    def places(self, positions: Tensor, module: int) -> Tensor:
        """The positions of the tokens that a module takes at these slots."""
        return positions + module + 1

    def given(self, own: Tensor, older: Tensor, slots: Tensor) -> Tensor:
        """Of what the module before made at these slots, and what it was itself given, the states that one takes."""
        return own

    def nothing(self) -> list[KV]:
        none = self.embedding.new_zeros(0, 1, 1)
        return [(none, none, torch.zeros(0, dtype=torch.int64))] * len(self.names)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V], by the target's head."""
        return self._tapped("lm_head", functional.linear(hidden, self.output).float())

    @torch.inference_mode()
    def rows(self, contexts: Contexts, features: Tensor, asked: Sequence[Ask]) -> Iterator[tuple[list[Ask], Tensor]]:
        """As of a head; where another module than the first drafted, by the module of each depth."""
        drafted = (step.part.method.module.any() for step in contexts.steps if step.part.method is not None)
        if len(self.names) == 1 or not any(drafted):
            yield from super().rows(contexts, features, asked)
            return
        text, pairs, by_step = pairs_of(contexts, features, asked)
        trees = [step.part.tree for step, _ in asked]
        if any(tree.max_depth > len(self.names) or tree.max_depth < len(tree) for tree in trees):
            raise UserError(f"{len(self.names)} modules draft a chain of as many tokens; this capture has others")
        states, kv = [features[:pairs].to(self.embedding.dtype)], self.nothing()
        for module in range(len(self.names)):
            parts, slots = [self.embedding[:0]], torch.arange(max(pairs - module, 0))
            for here in slots.split(CHUNK):
                given = self.given(states[-1][here], states[max(module - 1, 0)][here], here)
                prepared = self.prepare(text[here + 1 + module], given, module)
                state, kv = self.run(prepared, here, slots[None, : int(here[-1]) + 1] <= here[:, None], kv, module)
                parts.append(state)
            states.append(torch.cat(parts))
        groups = list(by_step.values())
        for start in range(0, len(groups), STEPS):
            yield from self._chains(list(chain(*groups[start : start + STEPS])), states, kv)

    def _chains(
        self, asked: Sequence[Ask], states: Sequence[Tensor], kv: list[KV]
    ) -> Iterator[tuple[list[Ask], Tensor]]:
        """The logits of some steps by depth: module k's are those of the root's slot, where it goes by the true text
        up to k slots before, and by the drafted path behind."""
        roots = [ask for ask in asked if ask[1] == ROOT]
        yield roots, self.logits(states[1][[slot_of(step) for step, _ in roots]])
        below = [ask for ask in asked if ask[1] != ROOT]
        deepest = {id(step): (step, node) for step, node in sorted(below, key=lambda ask: depth_of(*ask))}
        # Of a step's slot the state that the module before made, and the one that it was given
        made, older = dict[tuple[int, int], Tensor](), dict[tuple[int, int], Tensor]()
        for module in range(1, max((depth_of(*ask) for ask in below), default=0) + 1):
            rows: list[tuple[AuditedStep, int, int]] = []
            for step, node in deepest.values():
                path, root = step.part.tree.token[step.part.tree.path_to(node)].tolist(), slot_of(step)
                guessed = range(max(root - module + 1, 0), root + 1) if len(path) >= module else ()
                rows += [(step, slot, path[slot + module - root - 1]) for slot in guessed]
            slots, first = torch.tensor([slot for _, slot, _ in rows]), len(kv[module][2])
            seen = torch.zeros(len(rows), first + len(rows), dtype=torch.bool)
            for row, (step, slot, _) in enumerate(rows):
                seen[row, : max(slot_of(step) - module + 1, 0)] = True
                seen[row, [first + i for i, (other, at, _) in enumerate(rows) if other is step and at <= slot]] = True
            keys = [(id(step), slot) for step, slot, _ in rows]
            own, before = (
                torch.stack([known[key] if key in known else along[key[1]] for key in keys])
                for known, along in ((made, states[module]), (older, states[module - 1]))
            )
            given = self.given(own, before, slots)
            prepared = self.prepare(torch.tensor([token for *_, token in rows]), given, module)
            out, _ = self.run(prepared, slots, seen, kv, module)
            made, older = (dict(zip(keys, each, strict=True)) for each in (out, given))
            level = [ask for ask in below if depth_of(*ask) == module]
            yield level, self.logits(torch.stack([made[id(step), slot_of(step)] for step, _ in level]))


class GrowingKeys:
    """Keys and values before, and behind them those of the rows that run: what a transformers layer takes as cache."""

    def __init__(self, before: KV) -> None:
        self.kv = before[:2]  # [rows, heads, size] each

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """All of them, as transformers has them: [1, heads, rows, size] each."""
        new = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        self.kv = tuple(torch.cat([a, b]) if len(a) else b for a, b in zip(self.kv, new, strict=True))  # type: ignore[assignment]
        key, value = (x.transpose(0, 1)[None] for x in self.kv)
        return key, value
