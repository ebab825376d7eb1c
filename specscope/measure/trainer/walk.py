"""Both sides held against each other, operation by operation, and the first that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.locate.located import FedRow, Held, Located, Operation, Stage
from specscope.measure.trainer.places import TextPlaces
from specscope.measure.trainer.taps import LATE, Pass, operation
from specscope.model.features import AuxLayer
from specscope.trace.history.wording import plural

LEAST = 1e-4  # relative error of a row: float32 and two orders of summation never come to more, 16 bits do
SAFETY = 20.0  # times what float32 differs from float64 in the reference itself
OF_FEATURES = 1e-3  # the same of the target's features: all its layers lie before
ALONG = 0.9999  # cosine from which two rows differ by a factor
BEYOND = 3  # operations that are kept behind the first that differs


@dataclass
class ComparedRows:
    """One operation over all texts so far: relative errors of rows, and where these rows stand."""

    operation: Operation
    allowed: float = LEAST
    errors: list[Tensor] = field(default_factory=list)  # [rows] of each text
    rows: list[FedRow] = field(default_factory=list)
    factor: list[Tensor] = field(default_factory=list)  # of rows that differ: |ours| / |right| where they point alike

    def add(self, right: Tensor, ours: Tensor, again: Tensor | None, rows: Sequence[FedRow]) -> None:
        """Compare a text's rows; `again`: the reference's own in float32."""
        ours = ours.expand(len(right), -1).double()
        right = right.expand(len(ours), -1).double()
        if again is not None:
            self.allowed = max(self.allowed, SAFETY * float(_errors(right, again.double()).max()))
        self.errors.append(_errors(right, ours))
        self.rows += rows
        alike = torch.nn.functional.cosine_similarity(right, ours, dim=-1) > ALONG
        ratio = ours.norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
        self.factor.append(torch.where(alike, ratio, torch.nan))

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """[rows] which are off by more than rounding."""
        wrong: NDArray[np.bool_] = (torch.cat(self.errors) > self.allowed).numpy()
        return wrong

    def held(self) -> Held:
        """As a walk keeps it."""
        errors = torch.cat(self.errors).float().numpy()
        differing = int(self.wrong.sum())
        return Held(self.operation, self.allowed, float(errors.max()), len(errors), differing, errors[:, None])

    @property
    def looks(self) -> str:
        """What the difference looks like; "" where like nothing known."""
        wrong = self.wrong
        factors = torch.cat(self.factor).numpy()[wrong]
        if len(factors) and np.isfinite(factors).all() and np.ptp(factors) < 0.01 * abs(factors.mean()):
            return f"a factor of {factors.mean():.3g} at every row that differs"
        positions = np.array([row.position for row in self.rows])
        first = int(positions[wrong].min())
        if first and not wrong[positions < first].any() and wrong[positions >= first].mean() > 0.9:
            return f"right up to position {first - 1}, wrong from {first} on"
        return ""


class Walker:
    """Collects the operations of both sides over texts."""

    def __init__(self) -> None:
        self._compared: dict[str, ComparedRows] = {}

    @property
    def rows(self) -> tuple[FedRow, ...]:
        """Those of the widest operation."""
        widest: list[FedRow] = []
        for compared in self._compared.values():
            widest = compared.rows if len(compared.rows) > len(widest) else widest
        return tuple(widest)

    def features(
        self, text: TextPlaces, right: Tensor, ours: Tensor, layers: Sequence[AuxLayer], served: Sequence[AuxLayer]
    ) -> bool:
        """Compare the features of each layer [T, layers * width]; whether all agree."""
        agree = True
        for place, (layer, parts) in enumerate(zip(layers, _layers(right, ours, len(layers)), strict=True)):
            takes = f" (served: of layer {served[place]})" if served[place] != layer else ""
            words = f"the target's hidden states of layer {layer} as fed to the head{takes}"
            named = Operation(Stage.DRAFTER, f"features.{layer}", words, "specscope/model/features.py AuxHiddenStates")
            compared = self._compared.setdefault(named.name, ComparedRows(named, OF_FEATURES))
            compared.add(*parts, None, _text_rows(text, len(right)))
            agree &= not compared.wrong.any()
        return agree

    def passes(self, text: TextPlaces, right: Sequence[Pass], again: Sequence[Pass], ours: Sequence[Pass]) -> None:
        """Compare the operations of each depth that both sides have."""
        for depth, (ref, low, served) in enumerate(zip(right, again, ours, strict=True), 1):
            for name, value in ref.items():
                if name in served:
                    late = depth > 1 or name.rpartition("/")[2] in LATE
                    rows = _place_rows(text, depth) if late else _text_rows(text, len(value))
                    named = operation(depth, name)
                    self._compared.setdefault(named.name, ComparedRows(named)).add(value, served[name], low[name], rows)

    def walked(self) -> tuple[Held, ...]:
        """In the order of computing, up to the first that differs and a little beyond."""
        held = [compared.held() for compared in self._compared.values()]
        first = next((index for index, x in enumerate(held) if x.differs), None)
        return tuple(held if first is None else held[: first + 1 + BEYOND])

    def located(self, texts: Sequence[TextPlaces]) -> Located | None:
        """The first operation whose output differs, where what is before it agrees; None where all agree."""
        compared = list(self._compared.values())
        first = next((index for index, x in enumerate(compared) if x.wrong.any()), None)
        if first is None:
            return None
        this, wrong = compared[first], compared[first].wrong
        before = [x.held() for x in compared[:first]]
        agree = (
            "what is fed agrees; "
            if not before
            else (f"{plural(len(before), 'operation')} before it agree to {max(x.error for x in before):.1g}; ")
        )
        typical = float(np.median(torch.cat(this.errors).numpy()[wrong]))
        differing = int(wrong.sum())
        sentence = (
            f"{agree}it differs at {differing:,} of {plural(len(wrong), 'row')} (relative {typical:.2g}, "
            f"{this.allowed:.1g} is rounding)"
        )
        row = this.rows[int(np.flatnonzero(wrong)[0])]
        return Located(
            this.operation,
            sentence,
            looks=this.looks,
            smallest=f"position {row.position} of request {_request(this, texts, int(np.flatnonzero(wrong)[0]))}",
            where=texts[0].places[0].step.where,
            explained=differing,
            differing=differing,
        )


def first_named(located: Located, named: Operation, sentence: str) -> Located:
    """A difference of the folders, with what it comes to in the walk."""
    return replace(
        located,
        operation=named,
        sentence=f"{sentence}; {located.operation.words} is the first to show it: {located.sentence}",
    )


def _request(compared: ComparedRows, texts: Sequence[TextPlaces], index: int) -> str:
    for text, errors in zip(texts, compared.errors, strict=False):
        if index < len(errors):
            return text.request
        index -= len(errors)
    return texts[-1].request


def _errors(right: Tensor, ours: Tensor) -> Tensor:
    """[rows] relative error of each row."""
    errors: Tensor = (ours - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
    return errors


def _layers(right: Tensor, ours: Tensor, layers: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(right.chunk(layers, -1), ours.chunk(layers, -1), strict=True))


def _text_rows(text: TextPlaces, count: int) -> list[FedRow]:
    """Rows of the text: a feature of a position with the token after it."""
    tokens = [*text.tokens[1:], 0]
    return [FedRow(position, tokens[position]) for position in range(count)]


def _place_rows(text: TextPlaces, depth: int) -> list[FedRow]:
    return [FedRow(pair + depth - 1, text.tokens[pair + depth]) for pair in text.pairs]
