"""What was compared of a vLLM's model, in the order of computing, and its first difference as a walk and a fault."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from specscope.analyze.locate.located import WORDS, Held, Located, Operation, Stage, Walk
from specscope.measure.locate.answer import likeness, sentence
from specscope.measure.locate.inside_vllm.fed import Fed, Tapped
from specscope.measure.locate.pairs import Allowances, ComparedPass, HeldPair
from specscope.trace.history.wording import plural

ORDER = {name: place for place, name in enumerate(WORDS)}
STAGES = {"parameters": Stage.SAMPLING, "choice": Stage.VERDICT, "draft": Stage.DRAWS}  # of what is no model's own
REPLACED = "(replaced: "
PARTS = {  # by the last part of an operation's name, under which its functions are told
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "value"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("query", "key"), "rotary_emb"),
    **dict.fromkeys(("keys", "values"), "attention"),
    "embedding": "embed_tokens",
}


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
    """All that was compared of one model."""

    stage: Stage  # the model's own
    tapped: Tapped
    parts: list[ComparedPart] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        """Heads and their size."""
        return self.tapped.sizes.get(self.stage, {})

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Its own, and those behind it."""
        return (self.stage, *([Stage.DRAWS] if self.stage is Stage.DRAFTER else [Stage.SAMPLING, Stage.VERDICT]))

    def add(self, fed: Fed, pairs: Iterable[HeldPair], allowed: float) -> None:
        """One more request in a forward. `allowed`: what rounding explains of an operation."""
        ordered = sorted((pair for pair in pairs if len(pair.rows)), key=lambda pair: rank(pair.name))
        agree: list[Held] = []
        for stage in self.stages:
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

    # As an answer

    def walk(self, engine: str, reference: str) -> Walk | None:
        """The place of the first difference, or the last one where nothing differs."""
        firsts = [first for stage in self.stages if (first := self.first(stage)) is not None]
        last = max(self.parts, key=lambda part: (part.fed.forward.index, len(part.compared.held)), default=None)
        part = min(firsts, key=lambda first: first.computed, default=last)
        if part is None:
            return None
        held = tuple(replace(each, operation=self._named(each)) for each in part.compared.held)
        return Walk(self.stage, part.fed.where, part.compared.rows, held, engine, reference)

    def located(self, above: ComparisonSheet | None = None) -> Iterator[Located]:
        """The model's own first difference, and that of the choice behind it. `above`: the target's, of a drafter."""
        for stage in self.stages:
            chosen_wrong = stage is Stage.VERDICT and self.first(Stage.SAMPLING) is not None  # by wrong parameters
            if (first := self.first(stage)) is not None and not chosen_wrong and not _handed_down(first, above):
                yield self._located(stage, first)

    def agrees(self) -> str:
        """What agrees, where nothing of the model differs."""
        forwards, rows, largest = self.rows()
        rows_of, forwards_of = plural(rows, "row"), plural(forwards, "forward")
        return f"The {self.stage} agrees at {rows_of} of its operations in {forwards_of} of vLLM, to {largest:.1g}"

    def _named(self, held: Held) -> Operation:
        """With vLLM's class and method: the function that was replaced, else all that it may be."""
        name, code = held.operation.name, self.tapped.code.get(self.stage, {})
        plain = name.removesuffix(":in").removesuffix(" read")
        head, dot, last = plain.rpartition(".")
        keys = (name, name.removeprefix("later "), plain, f"{head}{dot}{PARTS.get(last, last)}")
        listed = next((code[key] for key in keys if code.get(key)), [])
        replaced = [text for text in listed if REPLACED in text]
        return replace(held.operation, code=" or ".join(replaced[:1] or listed))

    def _located(self, stage: Stage, found: ComparedPart) -> Located:
        counts, pair, (*before, held) = self.counts(stage), found.wrong, found.compared.held
        number, first = found.fed.forward.number, found.compared.bad[0]
        which = "the target's forward" if self.stage is Stage.TARGET else f"the drafter's pass {number + 1}"
        # The layer whose operations were compared, where an operation is known to be the first of it
        region = pair.name.rsplit(".", 2)[0] if pair.name.startswith("layers.") and "." in pair.name[7:] else ""
        return Located(
            self._named(held),
            sentence([*before, held]),
            looks=likeness(pair, held.allowed),
            smallest=f"{which} of step {found.fed.where}: position {first.position}, token {first.token}",
            where=found.fed.where,
            explained=counts[pair.name],
            differing=counts.total(),
            unit="request step",
            certain=pair.exact or not before or any(each.operation.name.startswith(region) for each in before),
        )


def _handed_down(found: ComparedPart, above: ComparisonSheet | None) -> bool:
    """Whether a drafter's first pass was only given what the target was given wrong in the same step."""
    first = None if above is None else above.first()
    if first is None:
        return False
    made = found.fed.forward
    same_step = made.step == first.fed.forward.step and made.number == 0
    return same_step and found.wrong.name == first.wrong.name and found.wrong.exact
