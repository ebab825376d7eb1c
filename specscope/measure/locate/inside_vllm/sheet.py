"""What was compared: of each request in a forward the operations in the order of computing; the first that differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.locate.located import FedRow, Held, Stage
from specscope.analyze.locate.operations import operation
from specscope.measure.locate.inside_vllm.fed import Fed

# Before a model's own operations; within a layer; behind them
INPUTS = (
    "tokens",
    "last token",
    "positions",
    "block table",
    "slots",
    "keys seen",
    "features",
    "input_norm:in",
    "input_norm",
    "fc:in",
    "fc",
    "state",
    "embedding",
)
INSIDE = (
    "input_layernorm:in",
    "input_layernorm",
    "hidden_norm:in",
    "hidden_norm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm:in",
    "self_attn.q_norm",
    "self_attn.k_norm:in",
    "self_attn.k_norm",
    "self_attn.query",
    "self_attn.key",
    "self_attn.value",
    "self_attn.keys read",
    "self_attn.values read",
    "self_attn.attention",
    "self_attn.o_proj:in",
    "self_attn.o_proj",
    "post_attention_layernorm:in",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj:in",
    "mlp.down_proj",
)
OUTPUTS = ("norm:in", "norm", "lm_head", "parameters", "draft", "choice")
LATER = {"later positions": "positions", "later keys seen": "keys seen"}
EXACT = frozenset({*INPUTS[:6], "parameters", "draft", "choice"})
STAGES = {"parameters": Stage.SAMPLING, "draft": Stage.DRAWS, "choice": Stage.VERDICT}
AMPLIFIED, MOST_AMPLIFIED = 4.0, 30.0  # by how much rounding may grow in an operation, and over all
BEYOND = 3  # operations of a walk behind the first that differs


def rank(name: str) -> tuple[int, int, int]:
    """The place of an operation in the order of computing."""
    layer = re.match(r"layers\.(\d+)(?:\.(.*))?$", name)
    if layer is None:
        name = LATER.get(name, name)
        return (0, 0, INPUTS.index(name)) if name in INPUTS else (2, 0, OUTPUTS.index(name) if name in OUTPUTS else -1)
    inner = layer[2] or ""
    return 1, int(layer[1]), len(INSIDE) if not inner else INSIDE.index(inner) if inner in INSIDE else len(INSIDE) - 1


@dataclass(frozen=True, eq=False)
class HeldRows:
    """One operation of one request in one forward, beside the reference."""

    name: str
    rows: tuple[FedRow, ...]
    ours: Tensor  # [rows, width]
    right: Tensor
    errors: Tensor  # [rows, parts]
    allowed: float
    values_of: Tensor | None = None  # [rows, width] the tokens whose values these are, where a row holds those of some

    @property
    def wrong(self) -> Tensor:
        """bool [rows]."""
        return (self.errors > self.allowed).any(1)

    def held(self, stage: Stage, code: str) -> Held:
        """For a walk."""
        largest = float(self.errors.max()) if self.errors.numel() else 0.0
        return Held(
            operation(stage, self.name, code),
            self.allowed,
            largest,
            len(self.errors),
            int(self.wrong.sum()),
            np.asarray(self.errors.numpy(), np.float32),
        )


def exact(name: str, fed: Fed, ours: Tensor, right: Tensor, rows: Tensor | None = None) -> HeldRows:
    """Whole numbers, which agree or do not."""
    ours, right = (x.double().view(-1, 1) for x in (ours, right))
    errors = (ours != right).float()
    positions = fed.positions if rows is None else fed.positions[rows]
    tokens = fed.tokens if rows is None else fed.tokens[rows]
    return HeldRows(name, fed_rows_of(positions, tokens), ours.float(), right.float(), errors, 0.0)


def fed_rows_of(positions: Tensor, tokens: Tensor) -> tuple[FedRow, ...]:
    """As a walk has them."""
    return tuple(FedRow(int(p), int(t)) for p, t in zip(positions, tokens, strict=True))


@dataclass(frozen=True, eq=False)
class ComparedPart:
    """A request in a forward."""

    fed: Fed
    cells: list[HeldRows]  # in the order of computing

    def first(self, stages: Sequence[Stage | None]) -> HeldRows | None:
        """The first operation that differs, among those of these stages; None stands for the model's own."""
        cells = (cell for cell in self.cells if STAGES.get(cell.name) in stages)
        return next((cell for cell in cells if bool(cell.wrong.any())), None)


def _amplified(cells: list[HeldRows]) -> list[HeldRows]:
    """An operation may magnify what its input is off by rounding: it is allowed a few times what was seen before it."""
    seen, held = 0.0, list[HeldRows]()
    for cell in cells:
        if cell.allowed:
            cell = replace(cell, allowed=min(max(cell.allowed, AMPLIFIED * seen), MOST_AMPLIFIED * cell.allowed))
            fine = cell.errors[~cell.wrong]
            seen = max(seen, float(fine.max()) if fine.numel() else 0.0)
        held.append(cell)
    return held


def computed(found: tuple[ComparedPart, HeldRows]) -> tuple[int, tuple[int, int, int]]:
    """When it was computed."""
    return found[0].fed.forward.index, rank(found[1].name)


@dataclass
class ComparisonSheet:
    """All places of one model, in the order in which they were computed."""

    places: list[ComparedPart] = field(default_factory=list)

    def add(self, fed: Fed, cells: Iterator[HeldRows]) -> None:
        """One more request in a forward."""
        self.places.append(ComparedPart(fed, _amplified(sorted(cells, key=lambda cell: rank(cell.name)))))

    def first(self, stage: Stage | None) -> tuple[ComparedPart, HeldRows] | None:
        """The earliest forward in which something differs, and there the first operation."""
        found = [(place, cell) for place in self.places if (cell := place.first((stage,))) is not None]
        return min(found, key=computed, default=None)

    def counts(self, stage: Stage | None) -> Counter[str]:
        """How many steps of requests differ, by the operation that differs first: later passes are fed by earlier.

        Where the cache is wrong at places that were computed wrong before, that is what the step is counted under.
        """
        by_step: dict[tuple[str, int], str] = {}
        spoilt: dict[tuple[str, int], str] = {}  # by request and position: what was wrong when it was computed
        for place in sorted(self.places, key=lambda place: place.fed.forward.index):
            cell = place.first((stage,))
            if cell is None:
                continue
            request = place.fed.where.request
            wrong = [row.position for row, bad in zip(cell.rows, cell.wrong.tolist(), strict=True) if bad]
            name = cell.name
            if name.endswith(" read") and all((request, position) in spoilt for position in wrong):
                name = spoilt[request, wrong[0]]
            else:
                spoilt |= {(request, position): name for position in wrong}
            by_step.setdefault((request, place.fed.forward.step), name)
        return Counter(by_step.values())

    def rows(self) -> tuple[int, int, float]:
        """(forwards, rows compared of any operation, the largest error that is no difference)."""
        forwards = len({place.fed.forward.index for place in self.places})
        cells = [cell for place in self.places for cell in place.cells]
        fine = [float(cell.errors[~cell.wrong].max()) for cell in cells if bool((~cell.wrong).any())]
        return forwards, sum(len(cell.errors) for cell in cells), max(fine, default=0.0)


def heads_of(name: str, sizes: dict[str, int]) -> int:
    """How many parts an operation's rows have."""
    inner = name.rsplit(".", 1)[-1]
    if inner in ("query", "attention", "q_proj"):
        return sizes.get("num_heads", 1)
    return sizes.get("num_kv_heads", 1) if inner in ("key", "value", "k_proj", "v_proj", "keys read") else 1


def as_rows(x: Tensor) -> Tensor:
    """[rows, ...] as float32 [rows, width]."""
    return x.to(torch.float32).flatten(1) if x.dim() > 1 else x.to(torch.float32).view(-1, 1)
