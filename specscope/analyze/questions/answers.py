"""All questions asked of one history, and the answers as plain values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from specscope.analyze.findings import Reference
from specscope.analyze.questions.acceptance import Bucket, ByCondition, by_condition
from specscope.analyze.questions.calibration import Calibration, calibration
from specscope.analyze.questions.cells import TreeCells, by_cell
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.groups import Share
from specscope.analyze.questions.missed import Missed, missed
from specscope.analyze.questions.rejections import Rejections, rejections
from specscope.trace.history.history import History


@dataclass(frozen=True)
class Answers:
    """What is rejected; how well the drafter's probability predicts it; when; where the target's choice was; and which
    node of the tree is not worth its row.
    """

    steps: int  # decode steps that were looked at
    rejections: Rejections
    calibration: Calibration
    conditions: ByCondition
    missed: Missed
    tree: TreeCells

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = plain(self)
        return values


def answer(history: History, request: str | None = None) -> Answers:
    """Answer every question over all requests on the path, or over one."""
    evidence = Evidence.of(history, request)
    return Answers(
        steps=len(evidence.columns),
        rejections=rejections(evidence),
        calibration=calibration(evidence),
        conditions=by_condition(evidence),
        missed=missed(evidence),
        tree=by_cell(evidence),
    )


def plain(value: Any) -> Any:  # noqa: ANN401
    """A value as JSON has it: a share with its interval, a reference as `replay` reads it, no infinity."""
    match value:
        case Reference():
            return str(value)
        case Share():
            interval = None if value.interval is None else list(value.interval)
            return {"count": value.count, "total": value.total, "share": value.value, "interval": interval}
        case Bucket():
            return {**_fields(value), "mean_acceptance_length": value.tau, "draft_acceptance_rate": value.rate}
        case StrEnum():
            return value.value
        case dict():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return _fields(value) if dataclasses.is_dataclass(value) else value


def _fields(value: Any) -> dict[str, Any]:  # noqa: ANN401
    return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
