"""What a good capture beside says: what is configured otherwise, and what differs at equal contexts."""

from __future__ import annotations

from specscope.analyze.compare.result import Answer, Comparison
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CONDITION, STATISTICAL, Suspect

CONFIGURED = ("model", "revision", "drafter", "draft model", "aux layers", "tree")  # other figures follow from these
BY_CONFIGURATION = {"aux layers": Cause.FEATURES_LAYERS, "draft vocabulary": Cause.VOCABULARY_MAP}


def from_comparison(found: Comparison) -> list[Suspect]:
    """Causes that the configuration names by itself. Side A is the good one."""
    suspects = []
    for one in found.differences:
        cause = BY_CONFIGURATION.get(one.name)
        said = f"beside the good capture: {one.name} {one.b}, there {one.a}"
        if cause is not None:
            suspects.append(Suspect(cause, CONDITION, (said,)))
        elif one.name == "q" and "sampled" in one.a and "sampled" not in one.b:
            suspects.append(Suspect(Cause.Q_DROPPED, STATISTICAL + 0.1, (said,)))
    return suspects


def differing(found: Comparison) -> list[str]:
    """What differs, in lines: the configuration, then the evidence at equal contexts with where it does."""
    lines = [f"{one.name}: {one.b}, there {one.a}" for one in found.differences]
    for field in found.fields:
        if field.differ and field.suspect:
            where = f" ({field.condition})" if field.condition else ""
            lines.append(f"{field.name} differs at {field.differ:,} of {field.compared:,} equal contexts{where}")
    return [*lines, found.summary]


def inexplicable(found: Comparison) -> list[str]:
    """Evidence that differs at equal contexts though the same is configured on both sides."""
    if any(one.name in CONFIGURED for one in found.differences):
        return []
    lines = [
        f"{field.name} differs from the good capture's at {field.differ:,} of {field.compared:,} equal contexts"
        for field in found.fields
        if field.suspect and field.differ
    ]
    return [*lines, *([found.summary] if found.answer is Answer.DIFFERENT else [])]
