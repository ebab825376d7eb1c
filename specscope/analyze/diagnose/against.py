"""What a good capture beside says: what is configured otherwise, and what differs at equal contexts."""

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


def from_comparison(found: Comparison) -> list[Suspect]:
    """Causes that the configuration names by itself. Side A is the good one."""
    suspects = []
    for one in found.differences:
        cause = BY_CONFIGURATION.get(one.name)
        said = f"beside the good capture: {one.name} {one.b}, there {one.a}"
        if cause is not None:
            suspects.append(Suspect(cause, CONDITION, (said,), rerun=True))
        elif one.name == "q" and "sampled" in one.a and "sampled" not in one.b:
            suspects.append(Suspect(Cause.Q_DROPPED, STATISTICAL + 0.1, (said,), rerun=True))
    return suspects


def differing(found: Comparison) -> list[str]:
    """What differs, in lines: the configuration, then the evidence at equal contexts with where it does."""
    lines = [f"{one.name}: {one.b}, there {one.a}" for one in found.differences]
    for field in found.fields:
        if field.differ and field.suspect:
            where = f" ({field.condition})" if field.condition else ""
            lines.append(f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts{where}")
    return [*lines, found.summary]


@dataclass(frozen=True)
class StepPart:
    """A part of a step that can differ by itself, and the causes that lie in it."""

    name: str
    fields: tuple[str, ...]
    causes: tuple[Cause, ...]


PARTS = (  # what comes first can make what follows differ
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
DEPTHS = 5  # that are told
ENOUGH = 20  # equal contexts: with fewer, that nothing differs says little
CLEAR = 0.1  # of the equal contexts: what differs at fewer may be rounding, where compare does not hold it suspect
FAR = 10.0  # times the tolerance: what is nearer may be rounding that grew on its way
FOR, AGAINST = 0.02, 0.15  # what a field adds to a cause's score, and takes from it


def weighed(suspects: Sequence[Suspect], found: Comparison) -> list[Suspect]:
    """The suspects with what equal contexts say for and against each."""
    if _is_other_run(found):
        return list(suspects)
    parts = {cause: part for part in PARTS for cause in part.causes}
    return [_weighed(one, parts.get(one.cause), found) for one in suspects]


def _weighed(one: Suspect, part: StepPart | None, found: Comparison) -> Suspect:
    fields = [] if part is None else [field for field in found.fields if field.name in part.fields and field.compared]
    if part is None or sum(field.compared for field in fields) < ENOUGH:
        return one
    differ = [field for field in fields if differs(field)]
    if differ:
        score = min(one.score + FOR, 0.99)
        return replace(one, score=score, for_=(*one.for_, *(told(field) for field in differ)))
    if any(field.differ for field in fields):
        return one
    most = max(field.compared for field in fields)
    against = f"beside the good capture {part.name} are the same at all {most:,} equal contexts"
    score = one.score if one.score >= RERUN else one.score - AGAINST
    return replace(one, score=score, against=(*one.against, against))


def differs(field: Field) -> bool:
    """Whether a field differs at more equal contexts, and further, than rounding explains."""
    if field.suspect or not field.differ:
        return field.suspect
    far = field.largest is None or field.tolerance is None or field.largest > FAR * field.tolerance
    return far and field.differ > 2 and field.share > CLEAR


def told(field: Field) -> str:
    """A field that differs, with how often at each depth, and where."""
    depths = [f"{one.differ:,} of {one.compared:,} at depth {one.value}" for one in field.where if one.group == "depth"]
    said = f"{field.name} differs from the good capture's at {field.differ:,} of {field.compared:,} equal contexts"
    said += f" ({', '.join(depths[:DEPTHS])})" if len(depths) > 1 else ""
    return f"{said}; {field.condition}" if field.condition else said


def first_part(found: Comparison) -> str:
    """The first part of a step that differs from the good run: what comes after it may follow from it."""
    if _is_other_run(found):
        return ""
    alike: list[str] = []
    for part in PARTS:
        fields = [field for field in found.fields if field.name in part.fields and field.compared]
        differ = [field for field in fields if differs(field)]
        if differ:
            same = f"; {', '.join(alike)} are the same" if alike else ""
            return f"{part.name} differ first: {told(differ[0])}{same}"
        if sum(field.compared for field in fields) >= ENOUGH:
            alike.append(part.name)
    return ""


def _is_other_run(found: Comparison) -> bool:
    """Whether something else is configured, from which all that differs may follow."""
    return any(one.name in CONFIGURED for one in found.differences)


def inexplicable(found: Comparison) -> list[str]:
    """Evidence that differs at equal contexts though the same is configured on both sides."""
    if _is_other_run(found):
        return []
    first = first_part(found)
    lines = ([first] if first else []) + [told(field) for field in found.fields if field.suspect and field.differ]
    return [*lines, *([found.summary] if found.answer is Sameness.DIFFERENT else [])]
