"""The options of an audit: which models judge, how many steps, and what else the capture does not record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specscope.plans.kinds import KINDS

Progress = Callable[[str, int, int], None]  # what is done now; steps done, of how many


@dataclass(frozen=True)
class ModelSource:
    """Where a model is, as from_pretrained takes it; for an EAGLE head, its folder."""

    path: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kind: str = KINDS[0].name  # of a head


@dataclass(frozen=True)
class Options:
    target: ModelSource
    draft: ModelSource | None = None  # None: the drafter is not a model, or its model is not available
    sample: int | None = None  # how many steps to judge, evenly spread; None: all
    why_no_draft: str = ""  # why `draft` is missing where the drafter is a model
    notes: tuple[str, ...] = ()  # of these models
    own: Mapping[str, Any] = field(default_factory=dict)  # settings of an engine that asks somebody's own drafter again
