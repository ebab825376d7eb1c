"""What all ways to train a head have in common: data, optimiser, resuming, and held-out figures."""

from __future__ import annotations

import json
import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specscope.errors import UserError
from specscope.model.fast.fast_paths import has_bfloat16
from specscope.model.heads.eagle_head import EagleHead
from specscope.model.heads.head_loader import save_head
from specscope.model.loader import LoadedModel
from specscope.train.data import HELD_OUT, check_enough
from specscope.train.scores import BatchScores, Padded, TargetTensors, mean_shares
from specscope.train.shards import Shards

STATE = "training.pt"
LOG = "training.jsonl"
WARM_UP = 50  # optimiser steps


@dataclass(frozen=True, kw_only=True)
class CommonRecipe:
    """What decides a training run besides the data, for any kind of head."""

    draft_vocab: int | None = None  # None: heads.DRAFT_VOCAB for a new head; a continued head keeps its own
    epochs: float = 4.0
    learning_rate: float = 1e-3
    batch_tokens: int = 2048
    seed: int = 0
    start: str = ""  # the folder of a head to continue from; "" for a new one


class Training(ABC):
    """One head in training. Resumes from its folder where an earlier run was stopped. A subclass for each kind."""

    kind: str  # its usual name, such as EAGLE-3
    verb: str  # of `specscope train`

    def __init__(self, target: LoadedModel, data: Shards, recipe: CommonRecipe, folder: Path) -> None:
        check_enough(len(data))
        self.target, self.data, self.recipe, self.folder = target, data, recipe, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.held_out = [i for i in range(len(data)) if i % HELD_OUT == HELD_OUT - 1]
        self.samples = [i for i in range(len(data)) if i % HELD_OUT != HELD_OUT - 1]
        self.head, self.heads = self._make()
        tokens = sum(data.length(i) for i in self.samples)
        self.total = max(round(tokens * recipe.epochs / recipe.batch_tokens), 1)
        self.optimizer = torch.optim.AdamW(self._groups(), recipe.learning_rate, betas=(0.9, 0.95))
        self.step, self.seen = 0, 0  # optimiser steps taken, tokens trained on
        self.seconds = 0.0
        self._resume()

    @property
    @abstractmethod
    def depths(self) -> int:
        """How many tokens it learns to draft; a line of the log has a figure for each."""

    @property
    @abstractmethod
    def method(self) -> str:
        """How it is trained, in a few words for the head's README."""

    @abstractmethod
    def _make(self) -> tuple[EagleHead, TargetTensors]:
        """The head to start from."""

    @abstractmethod
    def _scores(self, batch: Padded, *, whole: bool) -> BatchScores:
        """Run the head over a batch. `whole`: at every position, for held-out figures."""

    def _groups(self) -> list[dict[str, Any]]:
        """Parameters for the optimiser; `times`: their learning rate over that of the recipe."""
        return [{"params": list(self.head.parameters()), "times": 1.0}]

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
                group["lr"] = self._rate() * group["times"]
            with faster_products(self.target.device):
                outcome = self._scores(batch, whole=False)
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
        share = mean_shares([self._scores(self.padded(members), whole=True) for members in batches])
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
