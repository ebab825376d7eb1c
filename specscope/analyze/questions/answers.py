"""All questions asked of one history."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.analyze.questions.acceptance import ByCondition, by_condition
from specscope.analyze.questions.calibration import Calibration, calibration
from specscope.analyze.questions.cells import TreeCells, by_cell
from specscope.analyze.questions.evidence import Evidence
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
