"""What was compared: of each request in a forward the operations in the order of computing; the first that differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specscope.analyze.locate.located import FedRow, Held, Stage
from specscope.analyze.locate.operations import WORDS
from specscope.measure.locate.inside_vllm.fed import Fed
from specscope.measure.locate.pairs import Allowances, HeldPair, hold, wrong_rows

ORDER = {name: place for place, name in enumerate(WORDS)}
STAGES = {"parameters": Stage.SAMPLING, "draft": Stage.DRAWS, "choice": Stage.VERDICT}


def rank(name: str) -> tuple[int, float]:
    """The place of an operation in the order of computing: the layer, from 1 on, and the place in it."""
    layer = re.match(r"layers\.(\d+)(?:\.(.*))?$", name)
    inner = re.sub(r"^fc_norm\.\d+", "input_norm", name if layer is None else layer[2] or "")
    place = ORDER.get(inner) or ORDER.get(inner.removesuffix(":in"), ORDER["mlp"]) - inner.endswith(":in") / 2
    if layer is not None:
        return int(layer[1]) + 1, place if inner else len(ORDER)
    return (0 if place < ORDER["input_layernorm"] else 10**6), place


@dataclass(frozen=True, eq=False)
class ComparedPart:
    """A request in a forward."""

    fed: Fed
    pairs: list[HeldPair]  # in the order of computing
    held: list[Held]

    @staticmethod
    def of(fed: Fed, pairs: Iterable[HeldPair], stage: Stage, allowed: float) -> ComparedPart:
        """`allowed`: what rounding explains of an operation; it grows with the error of the one before."""
        limits, held = Allowances({"norm": allowed}), list[Held]()
        ordered = sorted((pair for pair in pairs if len(pair.rows)), key=lambda pair: rank(pair.name))
        for pair in ordered:
            seen = next((each.error for each in reversed(held) if each.allowed and not each.differs), 0.0)
            held.append(hold(STAGES.get(pair.name, stage), pair, limits.of(pair, seen)))
        return ComparedPart(fed, ordered, held)

    def first(self, stage: Stage | None) -> int | None:
        """The place of the first operation of this stage that differs; None stands for the model's own."""
        places = (place for place, pair in enumerate(self.pairs) if STAGES.get(pair.name) is stage)
        return next((place for place in places if self.held[place].differs), None)


@dataclass(frozen=True)
class FirstDifference:
    """An operation that differs first."""

    part: ComparedPart
    place: int  # among the part's operations

    @property
    def pair(self) -> HeldPair:
        """Both sides."""
        return self.part.pairs[self.place]

    @property
    def held(self) -> Held:
        """As it was compared."""
        return self.part.held[self.place]

    @property
    def rows(self) -> list[FedRow]:
        """The rows that differ."""
        return [self.pair.rows[place] for place in wrong_rows(self.held)]

    @property
    def computed(self) -> tuple[int, tuple[int, float]]:
        """When it was computed."""
        return self.part.fed.forward.index, rank(self.pair.name)


@dataclass
class ComparisonSheet:
    """All places of one model, in the order in which they were computed."""

    stage: Stage  # the model's own
    parts: list[ComparedPart] = field(default_factory=list)

    def add(self, fed: Fed, pairs: Iterable[HeldPair], allowed: float) -> None:
        """One more request in a forward."""
        self.parts.append(ComparedPart.of(fed, pairs, self.stage, allowed))

    def differences(self, stage: Stage | None) -> list[FirstDifference]:
        """The first operation of each part that differs."""
        return [FirstDifference(part, place) for part in self.parts if (place := part.first(stage)) is not None]

    def first(self, stage: Stage | None) -> FirstDifference | None:
        """The earliest forward in which something differs, and there the first operation."""
        return min(self.differences(stage), key=lambda found: found.computed, default=None)

    def counts(self, stage: Stage | None) -> Counter[str]:
        """How many steps of requests differ, by the operation that differs first: later passes are fed by earlier.

        Where the cache is wrong at places that were computed wrong before, that is what the step is counted under.
        """
        by_step: dict[tuple[str, int], str] = {}
        spoilt: dict[tuple[str, int], str] = {}  # by request and position: what was wrong when it was computed
        for found in sorted(self.differences(stage), key=lambda found: found.computed):
            request, name = found.part.fed.where.request, found.pair.name
            wrong = [(request, row.position) for row in found.rows]
            if name.endswith(" read") and all(place in spoilt for place in wrong):
                name = spoilt[wrong[0]]
            else:
                spoilt |= dict.fromkeys(wrong, name)
            by_step.setdefault((request, found.part.fed.forward.step), name)
        return Counter(by_step.values())

    def rows(self) -> tuple[int, int, float]:
        """(forwards, rows compared of any operation, the largest error that is no difference)."""
        held = [each for part in self.parts for each in part.held]
        fine = [float(each.errors[each.errors <= each.allowed].max(initial=0)) for each in held]
        return (
            len({part.fed.forward.index for part in self.parts}),
            sum(each.rows for each in held),
            max(fine, default=0),
        )


def heads_of(name: str, sizes: dict[str, int]) -> int:
    """How many parts an operation's rows have."""
    inner = name.rsplit(".", 1)[-1]
    if inner in ("query", "attention", "q_proj"):
        return sizes.get("num_heads", 1)
    return sizes.get("num_kv_heads", 1) if inner in ("key", "value", "k_proj", "v_proj", "keys read") else 1


def fed_rows_of(positions: Tensor, tokens: Tensor) -> tuple[FedRow, ...]:
    """As a walk has them."""
    return tuple(FedRow(int(p), int(t)) for p, t in zip(positions, tokens, strict=True))


def exact(name: str, fed: Fed, ours: Tensor, right: Tensor, rows: Sequence[int] | Tensor) -> HeldPair:
    """Whole numbers, which agree or do not."""
    labels = fed_rows_of(fed.positions[rows], fed.tokens[rows])
    return HeldPair(name, ours.double().view(-1, 1), right.double().view(-1, 1), labels, exact=True)
