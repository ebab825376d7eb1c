"""What a good capture beside this one says: what is configured otherwise, and what differs at equal contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specscope.analyze.compare.result import Comparison, Field, Sameness
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CONDITION, RERUN, STATISTICAL, Suspect

CONFIGURED = (
    "model",
    "revision",
    "drafter",
    "draft model",
    "draft revision",
    "aux layers",
    "tree",
)  # other figures follow from these
BY_CONFIGURATION = {"aux layers": Cause.FEATURES_LAYERS, "draft vocabulary": Cause.VOCABULARY_MAP}


def from_comparison(comparison: Comparison) -> list[Suspect]:
    """Causes that the configuration alone points to. Side A is the good run."""
    suspects = []
    for difference in comparison.differences:
        cause = BY_CONFIGURATION.get(difference.name)
        line = f"beside the good capture: {difference.name} {difference.b}, there {difference.a}"
        if cause is not None:
            suspects.append(Suspect(cause, CONDITION, (line,), rerun=True))
        elif difference.name == "q" and "sampled" in difference.a and "sampled" not in difference.b:
            suspects.append(Suspect(Cause.Q_DROPPED, STATISTICAL + 0.1, (line,), rerun=True))
    return suspects


def differing(comparison: Comparison) -> list[str]:
    """What differs, in lines: the configuration, then the evidence at equal contexts, and where."""
    lines = [f"{difference.name}: {difference.b}, there {difference.a}" for difference in comparison.differences]
    for field in comparison.fields:
        if field.differ and field.suspect:
            where = f" ({field.condition})" if field.condition else ""
            lines.append(f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts{where}")
    return [*lines, comparison.summary]


@dataclass(frozen=True)
class StepPart:
    """A part of a step that can differ by itself, and the causes that lie in it."""

    name: str
    fields: tuple[str, ...]
    causes: tuple[Cause, ...]


PARTS = (  # in the order of a step: each part can make the later ones differ
    StepPart(
        "the target's probabilities",
        ("target p, raw", "target p, first token"),
        (
            Cause.MASK_SIBLINGS,
            Cause.POSITION_BY_INDEX,
            Cause.KV_NOT_MOVED,
            Cause.KV_RECOMPUTED,
            Cause.KV_DECAY,
            Cause.BLOCKS_SHARED,
        ),
    ),
    StepPart("the target's p after the sampling parameters", ("target p",), (Cause.RULES_WRONG, Cause.RULES_OFF_PATH)),
    StepPart(
        "the drafter's probabilities",
        ("draft p", "drafter q"),
        (
            Cause.DRAFTER_KV_FULL,
            Cause.DRAFTER_KV_NOT_MOVED,
            Cause.DRAFTER_KV_PREEMPTION,
            Cause.DRAFTER_ROTARY,
            Cause.FEATURES_STALE,
            Cause.FEATURES_MISSING,
            Cause.FEATURES_LAYERS,
            Cause.Q_TEMPERATURE,
        ),
    ),
    StepPart(
        "the drafted tokens", ("draft tree",), (Cause.DRAFT_POSITION, Cause.VOCABULARY_MAP, Cause.DRAFT_PLACEHOLDERS)
    ),
    StepPart("the coins", ("coin",), (Cause.COINS_SHARED, Cause.COINS_BY_BATCH)),
    StepPart("the verdicts", ("verdict",), (Cause.RATIO_BY_P, Cause.AGAINST_COIN, Cause.TRIAL_ORDER, Cause.RESIDUAL)),
    StepPart("the final tokens", ("final token",), (Cause.FINAL_FROM_P, Cause.FINAL_OTHER_NODE, Cause.NOISE_SHARED)),
)
DEPTHS = 5  # that a line names
ENOUGH = 20  # equal contexts: with fewer, that nothing differs says little
CLEAR = 0.1  # of the equal contexts: what differs at fewer may be rounding, unless compare calls it suspect
FAR = 10.0  # times the tolerance: what is nearer may be rounding that grew on its way
FOR, AGAINST = 0.02, 0.15  # added to a cause's score by a field that differs; taken from it where none does


def weighed(suspects: Sequence[Suspect], comparison: Comparison) -> list[Suspect]:
    """The suspects, with what the equal contexts say for and against each."""
    if _is_other_run(comparison):
        return list(suspects)
    parts = {cause: part for part in PARTS for cause in part.causes}
    return [_weighed(suspect, parts.get(suspect.cause), comparison) for suspect in suspects]


def _weighed(suspect: Suspect, part: StepPart | None, comparison: Comparison) -> Suspect:
    if part is None:
        return suspect
    fields = [field for field in comparison.fields if field.name in part.fields and field.compared]
    if sum(field.compared for field in fields) < ENOUGH:
        return suspect
    differ = [field for field in fields if differs(field)]
    if differ:
        score = min(suspect.score + FOR, 0.99)
        return replace(suspect, score=score, for_=(*suspect.for_, *(_difference(field) for field in differ)))
    if any(field.differ for field in fields):
        return suspect
    compared = max(field.compared for field in fields)
    against = f"beside the good capture {part.name} are the same at all {compared:,} equal contexts"
    score = suspect.score if suspect.score >= RERUN else suspect.score - AGAINST
    return replace(suspect, score=score, against=(*suspect.against, against))


def differs(field: Field) -> bool:
    """Whether a field differs at more equal contexts, and further, than rounding explains."""
    if field.suspect or not field.differ:
        return field.suspect
    far = field.largest is None or field.tolerance is None or field.largest > FAR * field.tolerance
    return far and field.differ > 2 and field.share > CLEAR


def _difference(field: Field) -> str:
    """A field that differs: how often, at which depths, and where."""
    by_depth = (place for place in field.where if place.group == "depth")
    depths = [f"{place.differ:,} of {place.compared:,} at depth {place.value}" for place in by_depth]
    line = f"{field.name} differs from the good capture's at {field.differ:,} of {field.compared:,} equal contexts"
    line += f" ({', '.join(depths[:DEPTHS])})" if len(depths) > 1 else ""
    return f"{line}; {field.condition}" if field.condition else line


def first_part(comparison: Comparison) -> str:
    """The first part of a step that differs from the good run's: what comes after it may follow from it."""
    if _is_other_run(comparison):
        return ""
    alike: list[str] = []
    for part in PARTS:
        fields = [field for field in comparison.fields if field.name in part.fields and field.compared]
        differ = [field for field in fields if differs(field)]
        if differ:
            same = f"; {', '.join(alike)} are the same" if alike else ""
            return f"{part.name} differ first: {_difference(differ[0])}{same}"
        if sum(field.compared for field in fields) >= ENOUGH:
            alike.append(part.name)
    return ""


def _is_other_run(comparison: Comparison) -> bool:
    """Whether the two are configured otherwise, so that any difference may follow from that."""
    return any(difference.name in CONFIGURED for difference in comparison.differences)


def inexplicable(comparison: Comparison) -> list[str]:
    """Evidence that differs at equal contexts though both sides are configured alike."""
    if _is_other_run(comparison):
        return []
    first = first_part(comparison)
    lines = ([first] if first else []) + [
        _difference(field) for field in comparison.fields if field.suspect and field.differ
    ]
    return [*lines, *([comparison.summary] if comparison.answer is Sameness.DIFFERENT else [])]
