"""What was compared: of each request in a forward the operations in the order of computing, up to what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from specscope.analyze.locate.located import Held, Stage
from specscope.analyze.locate.operations import WORDS
from specscope.measure.locate.inside_vllm.fed import Fed
from specscope.measure.locate.inside_vllm.tapped import Tapped
from specscope.measure.locate.pairs import Allowances, ComparedPass, HeldPair

ORDER = {name: place for place, name in enumerate(WORDS)}
STAGES = {"parameters": Stage.SAMPLING, "choice": Stage.VERDICT, "draft": Stage.DRAWS}  # of what is no model's own


def rank(name: str) -> tuple[int, float]:
    """The place of an operation in the order of computing: the layer, from 1 on, and the place in it."""
    layer = re.match(r"layers\.(\d+)(?:\.(.*))?$", name)
    inner = re.sub(r"^fc_norm\.\d+", "input_norm", name if layer is None else layer[2] or "")
    place = ORDER.get(inner) or ORDER.get(inner.removesuffix(":in"), ORDER["mlp"]) - inner.endswith(":in") / 2
    if layer is not None:
        return int(layer[1]) + 1, place if inner else len(ORDER)
    return (0 if place < ORDER["input_layernorm"] else 10**6), place


class ComparedPart(NamedTuple):
    """What was compared of a request in a forward, up to what differs of one stage; before it what agrees of others."""

    fed: Fed
    compared: ComparedPass

    @property
    def wrong(self) -> HeldPair:
        """What differs."""
        assert self.compared.wrong is not None
        return self.compared.wrong

    @property
    def computed(self) -> tuple[int, tuple[int, float]]:
        """When what differs was computed."""
        return self.fed.forward.index, rank(self.wrong.name)


@dataclass
class ComparisonSheet:
    """All that was compared of one model, in the order in which it was computed."""

    stage: Stage  # the model's own
    tapped: Tapped
    parts: list[ComparedPart] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        """Heads and their size."""
        return self.tapped.sizes.get(self.stage, {})

    def add(self, fed: Fed, pairs: Iterable[HeldPair], allowed: float) -> None:
        """One more request in a forward. `allowed`: what rounding explains of an operation."""
        ordered = sorted((pair for pair in pairs if len(pair.rows)), key=lambda pair: rank(pair.name))
        agree: list[Held] = []
        for stage in (self.stage, *STAGES.values()):
            own = [pair for pair in ordered if STAGES.get(pair.name, self.stage) is stage]
            rows = max((pair.rows for pair in own if " read" not in pair.name), key=len, default=())
            compared = ComparedPass(stage, fed.where, rows, Allowances({"norm": allowed}), list(agree))
            compared.compare(own)
            if own:
                self.parts.append(ComparedPart(fed, compared))
                agree = [held for held in compared.held if not held.differs]

    def differences(self, stage: Stage) -> list[ComparedPart]:
        """Where a stage differs, in the order of computing."""
        parts = (part for part in self.parts if part.compared.stage is stage and part.compared.wrong is not None)
        return sorted(parts, key=lambda part: part.computed)

    def first(self, stage: Stage | None = None) -> ComparedPart | None:
        """The earliest forward in which a stage, else the model itself, differs."""
        return next(iter(self.differences(stage or self.stage)), None)

    def counts(self, stage: Stage) -> Counter[str]:
        """How many steps of requests differ, by the operation that differs first: later passes are fed by earlier.

        Where the cache is wrong at places that were computed wrong before, that is what the step is counted under.
        """
        by_step: dict[tuple[str, int], str] = {}
        spoilt: dict[tuple[str, int], str] = {}  # by request and position: what was wrong when it was computed
        for part in self.differences(stage):
            request, name = part.fed.text.request, part.wrong.name
            wrong = [(request, row.position) for row in part.compared.bad]
            if name.endswith(" read") and all(place in spoilt for place in wrong):
                name = spoilt[wrong[0]]
            else:
                spoilt |= dict.fromkeys(wrong, name)
            by_step.setdefault((request, part.fed.forward.step), name)
        return Counter(by_step.values())

    def rows(self) -> tuple[int, int, float]:
        """(forwards, rows compared of any operation, the largest error that is no difference)."""
        whole = {id(part.fed): part.compared for part in self.parts}.values()  # of each the last, which has all
        held = [each for compared in whole for each in compared.held]
        fine = [float(each.errors[each.errors <= each.allowed].max(initial=0)) for each in held]
        forwards = {part.fed.forward.index for part in self.parts}
        return len(forwards), sum(each.rows for each in held), max(fine, default=0)
