"""What the capture recorded of the rows that fed the head, held against the text and the target's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow, Floats, Held, Located, Operation, Stage
from specscope.measure.trainer.places import TextPlaces
from specscope.model.features import AuxLayer
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo

EXACT, ROUNDED = 2e-3, 0.05  # relative error of a feature's norm in float32, and where all layers rounded to 16 bits
CODE = "the engine that made the capture"
AllNorms = Callable[[TextPlaces], Floats]  # of a text: [T, layers], the norm of what enters each of the target's layers


@dataclass
class RecordedInputs:
    """The rows that fed the head in serving: their tokens, and the norm of each layer's feature."""

    layers: Sequence[AuxLayer]
    allowed: float
    rows: list[FedRow] = field(default_factory=list)
    wrong_tokens: list[bool] = field(default_factory=list)
    errors: list[Floats] = field(default_factory=list)  # [layers] of each row
    example: tuple[TextPlaces, Floats, list[int]] | None = None  # a text with norms that differ, and their positions

    @staticmethod
    def of(run: RunInfo, layers: Sequence[AuxLayer]) -> RecordedInputs:
        """For a run of a head that is fed these layers."""
        return RecordedInputs(layers, EXACT if run.dtype == "float32" else ROUNDED)

    def add(self, text: TextPlaces, features: Tensor) -> None:
        """Compare a text's rows. features [T, layers * width]: the target's, of the head's layers."""
        width = features.shape[1] // len(self.layers)
        right: Floats = features.unflatten(1, (-1, width)).norm(dim=-1).float().numpy()
        for place in text.places:
            notes = place.step.part.notes
            if notes is None or notes.fed_norms.shape[1:] != (len(self.layers),):
                continue
            inside = notes.fed_position + 1 < len(text.tokens)
            positions, norms = notes.fed_position[inside], notes.fed_norms[inside]
            if not len(positions):
                continue
            errors: Floats = np.abs(norms - right[positions]) / np.maximum(right[positions], 1e-30)
            for token, position in zip(notes.fed_token[inside].tolist(), positions.tolist(), strict=True):
                self.rows.append(FedRow(position, token))
                self.wrong_tokens.append(token != text.tokens[position + 1])
            self.errors += list(errors)
            if self.example is None and (errors > self.allowed).any():
                self.example = text, norms, positions.tolist()

    def held(self) -> tuple[Held, ...]:
        """As a walk keeps it: nothing where the capture recorded none."""
        if not self.rows:
            return ()
        tokens = np.array(self.wrong_tokens)
        error = float(tokens.any())
        made = [
            Held(
                _named("tokens", "the tokens fed to the head, as recorded"), 0.0, error, len(tokens), int(tokens.sum())
            )
        ]
        errors = np.stack(self.errors)
        for column, layer in enumerate(self.layers):
            named = _named(f"features.{layer}", f"the norm of layer {layer}'s hidden states as recorded when fed")
            wrong = int((errors[:, column] > self.allowed).sum())
            each = errors[:, column : column + 1].astype(np.float32)
            made.append(Held(named, self.allowed, float(each.max()), len(each), wrong, each))
        return tuple(made)

    def located(self, all_norms: AllNorms) -> Located | None:
        """The first of these inputs that is not what it should be; None where all are."""
        held = next((held for held in self.held() if held.differs), None)
        if held is None:
            return None
        sentence = (
            f"{held.operation.words} {'are' if held.operation.name.endswith('tokens') else 'is'} not the text's at "
            f"{held.differing:,} of {plural(held.rows, 'row')}"
        )
        looks = "" if self.example is None else _likeness(*self.example, all_norms, self.layers, self.allowed)
        return Located(held.operation, sentence, looks, explained=held.differing, differing=held.differing)


def _named(name: str, words: str) -> Operation:
    return Operation(Stage.DRAFTER, f"recorded.{name}", words, CODE)


def _likeness(
    text: TextPlaces,
    norms: Floats,
    positions: list[int],
    all_norms: AllNorms,
    layers: Sequence[AuxLayer],
    allowed: float,
) -> str:
    """Whose norms the recorded ones are; "" where nobody's."""
    known, at = all_norms(text), np.array(positions)
    places = [known.shape[1] - 1 if layer == "final" else layer for layer in layers]
    for by in (-1, 1):
        near = np.clip(at + by, 0, len(known) - 1)
        if _error(norms, known[near][:, places]) < allowed:
            return f"the hidden states of the position {'before' if by < 0 else 'after'}"
    errors = [
        [_error(norms[:, column], known[at, layer]) for layer in range(known.shape[1])] for column in range(len(layers))
    ]
    best = [int(np.argmin(each)) for each in errors]
    if max(errors[column][layer] for column, layer in enumerate(best)) < allowed:
        return f"layers {', '.join(map(str, best))} instead of {', '.join(map(str, layers))}"
    return ""


def _error(norms: Floats, right: Floats) -> float:
    return float(np.median(np.abs(norms - right) / np.maximum(right, 1e-30)))


def norms_of(states: Tensor, layers: int) -> Floats:
    """[T, layers] the norm of each layer's hidden states in [T, layers * width]."""
    norms: Floats = torch.stack([part.norm(dim=-1) for part in states.chunk(layers, -1)], dim=-1).float().numpy()
    return norms
