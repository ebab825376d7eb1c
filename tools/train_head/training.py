"""An EAGLE-3 head in training: data, optimiser, resuming, and held-out figures."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.model.fast.linear import has_bfloat16
from specscope.model.heads.head_runner import save_head
from specscope.model.loader import LoadedModel
from tools.train_head.eagle3 import forward
from tools.train_head.heads import Recipe, going_on, new_head
from tools.train_head.scores import BatchScores, Padded, mean_shares
from tools.train_head.shards import Shards

STATE = "training.pt"
LOG = "training.jsonl"
WARM_UP = 50  # optimiser steps


HELD_OUT = 40  # one in 40 sequences is held out of training


class Training:
    """One head in training. Resumes from its folder where an earlier run was stopped."""

    def __init__(self, target: LoadedModel, data: Shards, recipe: Recipe, folder: Path) -> None:
        if len(data) < HELD_OUT:
            raise UserError(f"training needs at least {HELD_OUT} sequences, and there are {len(data)}")
        self.target, self.data, self.recipe, self.folder = target, data, recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.held_out = [i for i in range(len(data)) if i % HELD_OUT == HELD_OUT - 1]
        self.samples = [i for i in range(len(data)) if i % HELD_OUT != HELD_OUT - 1]
        make = going_on if recipe.start else new_head
        self.head, self.heads = make(target, data, self.samples, recipe)
        tokens = sum(data.length(i) for i in self.samples)
        self.total = max(round(tokens * recipe.epochs / recipe.batch_tokens), 1)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), recipe.learning_rate, betas=(0.9, 0.95))
        self.step, self.seen = 0, 0  # optimiser steps taken, tokens trained on
        self.seconds = 0.0
        self._resume()

    def _about(self) -> dict[str, Any]:
        return {"recipe": asdict(self.recipe), "target": self.target.revision, "tokens": self.data.tokens}

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
        """Write the state and the current head, so that a kill loses only what follows."""
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
        """The learning rate: warm-up, then cosine decay to 0."""
        warm = min((self.step + 1) / WARM_UP, 1.0)
        return self.recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(self.step / self.total, 1.0)))

    def _batches(self) -> Iterator[Padded]:
        """Batches of sequences of similar length, from where the run was stopped; each epoch has its own order."""
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
        batches = batches_of(self.data, self.held_out, self.recipe.batch_tokens, 0)
        steps = self.recipe.steps
        share = mean_shares([forward(self.head, self.heads, self.padded(members), steps) for members in batches])
        line = {"step": self.step, "tokens": self.seen, "seconds": round(self.seconds, 1), **share}
        with open(self.folder / LOG, "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        return line


def faster_products(device: torch.device) -> torch.autocast:
    """Matrix products in bfloat16 where the CPU has instructions for them; otherwise in float32.

    Weights, accumulated gradients and the optimiser's state stay in float32 (mixed precision, Micikevicius et al. 2018;
    bfloat16 has float32's range, so the loss needs no scaling).
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cpu" and has_bfloat16())


def batches_of(data: Shards, samples: Sequence[int], tokens: int, seed: int) -> list[list[int]]:
    """Samples in batches of about `tokens` tokens, padding included: shuffled, but of similar length within a batch."""
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
