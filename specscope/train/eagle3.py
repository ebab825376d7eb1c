"""`specscope train eagle3`: from a folder of data to a head in the published format."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.model.eagle_head import EagleHead
from specscope.model.fast_paths import has_bfloat16
from specscope.model.features import published_aux_layers
from specscope.model.head_config import HeadConfig
from specscope.model.head_loader import load_head, save_head
from specscope.model.loader import LoadedModel
from specscope.train.shards import Shards
from specscope.train.ttt import BatchScores, Padded, TargetTensors, forward

STATE = "training.pt"
LOG = "training.jsonl"
HELD_OUT = 40  # every 40th sample is never trained on
WARM_UP = 50  # optimiser steps
DRAFT_VOCAB = 8192  # of a new head


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run besides the data."""

    draft_vocab: int | None = None  # None: DRAFT_VOCAB for a new head; a head to go on from keeps its own
    steps: int = 3  # training-time test: passes of the head over its own outputs
    epochs: float = 4.0
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    seed: int = 0
    start: str = ""  # the folder of a head to go on from; "" for a new one


class Training:
    """One head in training. Resumes from its folder where an earlier run was stopped."""

    def __init__(self, target: LoadedModel, data: Shards, recipe: Recipe, folder: Path) -> None:
        self.target, self.data, self.recipe, self.folder = target, data, recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.held_out = [i for i in range(len(data)) if i % HELD_OUT == HELD_OUT - 1]
        self.samples = [i for i in range(len(data)) if i % HELD_OUT != HELD_OUT - 1]
        if not self.held_out:
            raise UserError(f"training needs at least {HELD_OUT} sequences, and there are {len(data)}")
        make = going_on if recipe.start else new_head
        self.head, self.heads = make(target, data, self.samples, recipe)
        tokens = sum(data.length(i) for i in self.samples)
        self.total = max(round(tokens * recipe.epochs / recipe.batch_tokens), 1)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), recipe.learning_rate, betas=(0.9, 0.95))
        self.step, self.seen = 0, 0  # optimiser steps taken, tokens trained on
        self.seconds = 0.0
        self._resume()

    def _about(self) -> dict[str, Any]:
        return {"recipe": dataclasses.asdict(self.recipe), "target": self.target.revision, "tokens": self.data.tokens}

    def _resume(self) -> None:
        path = self.folder / STATE
        if not path.exists():
            return
        state = torch.load(path, map_location=self.target.device, weights_only=True)
        if state["about"] != self._about():
            raise UserError(
                f"{self.folder} holds a training run with other settings or data: remove it, or give another folder"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seen, self.seconds = state["step"], state["seen"], state["seconds"]

    def save(self) -> None:
        """Write the state, and the head as it is, so that a kill loses only what came after."""
        state = {
            "about": self._about(),
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seen": self.seen,
            "seconds": self.seconds,
        }
        path = self.folder / STATE
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        save_head(self.head, self.folder)

    def run(self) -> Iterator[BatchScores]:
        """Train to the end, a batch at a time."""
        for batch in self._batches():
            began = time.perf_counter()
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate()
            with faster_products(self.target.device):
                outcome = forward(self.head, self.heads, batch, self.recipe.steps)
            self.optimizer.zero_grad(set_to_none=True)
            outcome.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self.seen += int(batch.real.sum())
            self.seconds += time.perf_counter() - began
            yield outcome

    def _rate(self) -> float:
        """Warm-up, then a cosine down to nothing."""
        warm = min((self.step + 1) / WARM_UP, 1.0)
        return self.recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(self.step / self.total, 1.0)))

    def _batches(self) -> Iterator[Padded]:
        """Batches of sequences of like length, from where the run was stopped; each epoch has its own order."""
        number = 0
        for epoch in range(math.ceil(self.recipe.epochs) + 1):
            for members in batches_of(self.data, self.samples, self.recipe.batch_tokens, self.recipe.seed + epoch):
                if number >= self.total:
                    return
                if number >= self.step:
                    yield self.padded(members)
                number += 1

    def padded(self, members: Sequence[int]) -> Padded:
        """Samples as one batch on the target's device."""
        parts = [self.data[i] for i in members]
        device = self.target.device

        def pad(rows: Sequence[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)

        real = pad([torch.ones(len(p.tokens), dtype=torch.bool) for p in parts])
        dtype = self.head.fc.weight.dtype
        features, final = (pad([getattr(p, name) for p in parts]).to(dtype) for name in ("features", "final"))
        return Padded(pad([p.tokens.long() for p in parts]), real, pad([p.learn for p in parts]), features, final)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Held-out agreement with the target by position, logged with the tokens seen."""
        total: dict[str, list[int]] = {}
        for members in batches_of(self.data, self.held_out, self.recipe.batch_tokens, 0):
            outcome = forward(self.head, self.heads, self.padded(members), self.recipe.steps)
            for name in ("positions", "first", "among"):
                have = total.get(name, [0] * self.recipe.steps)
                total[name] = [a + b for a, b in zip(have, getattr(outcome, name), strict=True)]
        share = {
            name: [round(n / max(d, 1), 4) for n, d in zip(total[name], total["positions"], strict=True)]
            for name in ("first", "among")
        }
        line = {"step": self.step, "tokens": self.seen, "seconds": round(self.seconds, 1), **share}
        with open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return line


def faster_products(device: torch.device) -> torch.autocast:
    """Products in bfloat16 where the CPU has instructions for them; elsewhere they stay in float32.

    Weights, their gradients' sums and the optimiser are float32 all the same (mixed precision, Micikevicius et al.
    2018; bfloat16 has float32's range, so that the loss needs no scaling).
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cpu" and has_bfloat16())


def new_head(
    target: LoadedModel, data: Shards, samples: Sequence[int], recipe: Recipe
) -> tuple[EagleHead, TargetTensors]:
    """A head of the target's width for the commonest tokens of the data; its own head starts from the target's rows."""
    counts = data.counts(target.vocab_size, samples)
    size = min(recipe.draft_vocab or DRAFT_VOCAB, target.vocab_size)
    chosen = commonest(counts, size).to(target.device)
    torch.manual_seed(recipe.seed)
    head = EagleHead(head_config(target, size)).to(target.device)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, 0.02)
        rows = target.output.weight[chosen].float()
        head.lm_head.weight.copy_(rows)
        _start_from_the_last_tap(head, data, samples)
        if size != target.vocab_size:
            head.set_vocabulary(chosen)
    return head, TargetTensors(target.embedding.weight.float(), rows)


def going_on(
    target: LoadedModel, data: Shards, samples: Sequence[int], recipe: Recipe
) -> tuple[EagleHead, TargetTensors]:
    """An earlier head of the same shape. Raises UserError where it is another kind of head.

    It keeps every token that it drafts; where the recipe's vocabulary is larger, the commonest of the others join.
    """
    head = load_head(recipe.start, target).head.float().requires_grad_(True)
    wanted, found = head_config(target, head.config.draft_vocab), head.config
    if found.version != 3 or (found.aux_layers, found.width) != (wanted.aux_layers, wanted.width):
        raise UserError(f"{recipe.start} cannot resume from this head: specscope train did not make it")
    size = min(recipe.draft_vocab or 0, target.vocab_size)
    if size > found.draft_vocab:
        head = with_more_tokens(head, target, data.counts(target.vocab_size, samples), size)
    tokens = head.target_tokens()
    rows = target.output.weight if tokens is None else target.output.weight[tokens]
    return head, TargetTensors(target.embedding.weight.float(), rows.float())


def commonest(counts: Tensor, size: int) -> Tensor:
    """The tokens with the highest counts, int64 [size], ascending; of equal counts the lower token."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def with_more_tokens(head: EagleHead, target: LoadedModel, counts: Tensor, size: int) -> EagleHead:
    """The head with a draft vocabulary of `size`: its own tokens, and the commonest of the others.

    Rows of new tokens start from the target's. counts int64 [vocabulary].
    """
    had = head.target_tokens()
    assert had is not None  # a full vocabulary has room for no more
    others = counts.clone()
    others[had.cpu()] = -1  # below every other token
    new = commonest(others, size - len(had)).to(had.device)
    tokens, order = torch.cat([had, new]).sort()
    config = dataclasses.replace(head.config, draft_vocab=size)
    larger = EagleHead(config).to(target.device)
    rows = torch.cat([head.lm_head.weight.detach(), target.output.weight[new].float()])[order]
    kept = {name: tensor for name, tensor in head.state_dict().items() if name not in ("d2t", "t2d")}
    larger.load_state_dict({**kept, "lm_head.weight": rows}, strict=False)
    if size != target.vocab_size:
        larger.set_vocabulary(tokens)
    return larger


def _start_from_the_last_tap(head: EagleHead, data: Shards, samples: Sequence[int]) -> None:
    """Let the highest layer's feature pass through `fc` as it is, in the basis that the target's head reads.

    All are scaled by their size in the data (the median over tokens: a few tokens have features a thousand times as
    large), so that the residual stream begins near 1 and the layer's own output counts from the first step on.
    """
    width, aux_layers = head.config.target_width, len(head.config.aux_layers)
    some = torch.cat([data[i].features for i in samples[:64]]).float().view(-1, aux_layers, width)
    sizes = some.pow(2).mean(-1).sqrt().median(0).values.tolist()
    for aux_layer, size in enumerate(sizes):
        block = head.fc.weight[:, aux_layer * width : (aux_layer + 1) * width]
        if aux_layer == aux_layers - 1:
            torch.nn.init.eye_(block)
            block /= size
        else:
            block.normal_(0, 0.3 / (size * math.sqrt(width)))


def head_config(target: LoadedModel, draft_vocab: int) -> HeadConfig:
    """A Llama layer with the target's sizes."""
    config: Any = target.model.config.get_text_config()  # type: ignore[operator, union-attr]
    heads = config.num_attention_heads
    layer = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_context,
        "vocab_size": target.vocab_size,
        "rope_theta": float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": target.eos[0] if target.eos else None,
        "pad_token_id": 0,
    }
    return HeadConfig(3, layer, config.hidden_size, draft_vocab, published_aux_layers(len(target.layers)))


def batches_of(data: Shards, samples: Sequence[int], tokens: int, seed: int) -> list[list[int]]:
    """Samples in batches of about `tokens` tokens, padding included: shuffled, but of like length within a batch."""
    order = list(samples)
    chance = random.Random(seed)
    chance.shuffle(order)
    order.sort(key=lambda i: data.length(i) // 32)  # stable: random within a bucket
    batches: list[list[int]] = [[]]
    longest = 0
    for index in order:
        longest = max(longest, data.length(index))
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = data.length(index)
        batches[-1].append(index)
    chance.shuffle(batches)
    return batches
