"""Training data on disk: sequences with the target's features, in safetensors shards that outlive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specscope.errors import UserError
from specscope.whole_file import read_object, write_whole

SHARD_TOKENS = 16384
ABOUT = "about.json"


@dataclass(frozen=True)
class Sample:
    """One sequence of T tokens, and what the target computed along it."""

    tokens: Tensor  # int32 [T]
    learn: Tensor  # bool [T] True where the target's choice of the token is worth learning: not in a fixed prompt
    features: Tensor  # bfloat16 [T, aux_layers * width] what the head is fed (model/runner.py)
    final: Tensor  # bfloat16 [T, width] what the target's own head turns into logits


class ShardWriter:
    """Collects samples and writes a shard when it is full. A shard is written completely or not at all."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self._about = folder, about
        known = folder / ABOUT
        if known.exists() and read_object(known) != about:
            raise UserError(f"{folder} holds data made with other settings: remove it, or give another folder")
        self._samples: list[Sample] = []
        self._next = len(shard_files(folder))

    def add(self, sample: Sample) -> None:
        """Keep a sample; it is on disk when its shard is full, or at `flush`."""
        self._samples.append(sample)
        if sum(len(s.tokens) for s in self._samples) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the samples collected so far."""
        if not self._samples:
            return
        self.folder.mkdir(parents=True, exist_ok=True)  # not before: data that is refused leaves nothing
        write_whole(self.folder / ABOUT, json.dumps(self._about, indent=2).encode() + b"\n")
        names = ("tokens", "learn", "features", "final")
        data = {name: torch.cat([getattr(s, name) for s in self._samples]) for name in names}
        data["lengths"] = torch.tensor([len(s.tokens) for s in self._samples], dtype=torch.int32)
        path = self.folder / f"shard-{self._next:05}.safetensors"
        save_file(data, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
        self._next += 1
        self._samples = []


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


class Shards:
    """Reads the samples of a folder; tensors stay on disk until they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.files = shard_files(folder)
        if not self.files:
            raise UserError(f"{folder} holds no training data")
        self._spans: list[tuple[int, int, int]] = []  # file, start, end of each sample
        self._open: list[Any] = [safe_open(file, framework="pt") for file in self.files]
        for number, file in enumerate(self._open):
            ends = file.get_tensor("lengths").cumsum(0).tolist()
            self._spans += [(number, *span) for span in zip([0, *ends[:-1]], ends, strict=True)]

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(end - start for _, start, end in self._spans)

    def length(self, index: int) -> int:
        """Tokens of one sample."""
        _, start, end = self._spans[index]
        return end - start

    def __getitem__(self, index: int) -> Sample:
        number, start, end = self._spans[index]
        file = self._open[number]
        parts = (file.get_slice(name)[start:end] for name in ("tokens", "learn", "features", "final"))
        return Sample(*parts)

    def counts(self, vocab_size: int, samples: Sequence[int]) -> Tensor:
        """How often each token of the vocabulary occurs where it is learnt, int64 [vocabulary]."""
        total = torch.zeros(vocab_size, dtype=torch.int64)
        for sample in map(self.__getitem__, samples):
            total += torch.bincount(sample.tokens[sample.learn].long(), minlength=vocab_size)
        return total
