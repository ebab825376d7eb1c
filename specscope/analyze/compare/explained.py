"""What in the configuration explains that the evidence differs: a field or a cause, by the names of the differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from specscope.analyze.compare.evidence import FEATURES, FIRST
from specscope.analyze.compare.parting import LENGTH
from specscope.analyze.compare.result import Difference, Field, PartingCause
from specscope.analyze.compare.trees import TREE
from specscope.trace.record.params import PARAM_NAMES

# A version, a device or the load explains nothing: whether these change the evidence is the question asked. A dtype
# explains differences by its rounding, which the tolerances allow for.
_MODEL = ("model", "revision")
_SHAPE = tuple(sorted(PARAM_NAMES - LENGTH))  # parameters that shape p, and q with it
_DRAFTER = ("drafts", "drafter", "draft model", "aux layers", "draft vocabulary", "draft tokens")
_PLAN = ("tree", "step costs", "rule")
OTHER_ENGINE = "speculative config: "  # begins the name of a setting of another engine's speculation
_OTHER_PLAN = f"{OTHER_ENGINE}num_speculative_tokens"

_FIELDS = {
    "target p": (*_MODEL, *_SHAPE),
    "target p, cut": (*_MODEL, *_SHAPE),
    "target entropy": (*_MODEL, *_SHAPE),
    "target p, raw": _MODEL,
    "target p, first token": _MODEL,
    FIRST: _MODEL,
    FEATURES: (*_MODEL, "aux layers"),
    "drafter q": (*_MODEL, *_DRAFTER, *_SHAPE),
    "drafter q, cut": (*_MODEL, *_DRAFTER, *_SHAPE),
    "draft p": (*_MODEL, *_DRAFTER, *_SHAPE),
    "drafter entropy": (*_MODEL, *_DRAFTER, *_SHAPE),
    TREE: (*_MODEL, *_DRAFTER, *_SHAPE, *_PLAN),
    "coin": ("rule",),  # under match siblings share one
    "verdict": ("rule", "forced verdicts"),
}
_CAUSES = {
    PartingCause.TARGET: _MODEL,
    PartingCause.DRAFTER: (*_MODEL, *_DRAFTER),
    PartingCause.COIN: ("rule",),
    PartingCause.VERDICT: ("rule", "forced verdicts"),
    PartingCause.PARAMETERS: _SHAPE,
    PartingCause.RULE: ("rule",),
}


def of_field(name: str, differences: Iterable[Difference], *, alike: bool) -> tuple[str, ...]:
    """What explains a field. `alike`: whether it was compared only where the same parameters shape p."""
    left_out = set(_SHAPE) if alike else set()
    names = [difference.name for difference in differences if difference.name not in left_out]
    allowed = _FIELDS.get(name, ())
    drafting = "drafter" in allowed
    return tuple(
        setting
        for setting in names
        if setting in allowed
        or (drafting and setting.startswith(OTHER_ENGINE) and (name == TREE or setting != _OTHER_PLAN))
    )


def of_cause(cause: PartingCause, differences: Iterable[Difference]) -> tuple[str, ...]:
    """What explains a parting."""
    allowed = _CAUSES.get(cause, ())
    drafting = cause is PartingCause.DRAFTER
    return tuple(
        difference.name
        for difference in differences
        if difference.name in allowed or (drafting and difference.name.startswith(OTHER_ENGINE))
    )


def explained(fields: Sequence[Field], differences: Sequence[Difference], *, alike: bool) -> list[Field]:
    """The fields; those that the configuration explains are no longer suspect."""
    checked = []
    for field in fields:
        names = of_field(field.name, differences, alike=alike) if field.suspect or field.unsure else ()
        checked.append(replace(field, suspect=False, unsure=False, explained=names) if names else field)
    return checked
