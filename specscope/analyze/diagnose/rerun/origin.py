"""Where a wrong row comes from: recorded probabilities against every row that the model gave in the same step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.rerun.match import SURE, likeliest, recorded, slack
from specscope.analyze.diagnose.rerun.rows import Asked, Rows, differing, together
from specscope.analyze.findings import Reference
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import Floats, Ints

STEPS = 10  # steps that differ, whose batches are looked at
LEAST = 3  # rows that must come from elsewhere
ABOUT = {
    Cause.ROWS_SWAPPED: "they are those of another request in the same step",
    Cause.P_OTHER_ROW: "they are those of another node of the same tree",
}


def origins(case: Case, audit: Audit, rows: Rows, *, drafter: bool = False) -> list[Suspect]:
    """Whether rows that differ are another request's, or another node's."""
    what = "drafter" if drafter else "target"
    keys = differing(audit, [f"{what} top tokens", f"{what} raw p", f"{what} p"], STEPS)
    allowed = slack(case.dtype)
    by_step: dict[int, list[Asked]] = defaultdict(list)
    for asked in rows(case, together(case, keys)):
        by_step[asked.step.visit.record.step].append(asked)
    wrong, causes = 0, Counter[Cause]()
    examples: dict[Cause, Reference] = {}
    for batch in by_step.values():
        for asked in batch:
            for node, tokens, probs in recorded(asked.step, drafter=drafter):
                if node not in asked.logits or not _is_telling(asked.logits[node], tokens, probs):
                    continue
                if _same(asked.logits[node], tokens, probs, allowed):
                    continue
                wrong += 1
                cause = _whose(asked, batch, tokens, probs, allowed)
                if cause is not None:
                    causes[cause] += 1
                    examples.setdefault(cause, asked.step.reference())
    for cause, count in causes.most_common(1):
        if count >= LEAST and count > 0.5 * wrong:
            line = (
                f"the {what}'s probabilities are not those of their own row at {plural(wrong, 'parent')} that were "
                f"looked at; {ABOUT[cause]} at {count:,} of these"
            )
            return [Suspect.rerun_of(cause, line, examples[cause], (count, wrong))]
    return []


def _whose(asked: Asked, batch: Sequence[Asked], tokens: Ints, probs: Floats | None, allowed: float) -> Cause | None:
    for other in batch:
        if any(_same(row, tokens, probs, allowed) for row in other.logits.values()):
            return Cause.P_OTHER_ROW if other is asked else Cause.ROWS_SWAPPED
    return None


def _is_telling(row: Tensor, tokens: Ints, probs: Floats | None) -> bool:
    """Whether a match with another row would be no chance: the recorded row is not sure, or sure of another token."""
    if probs is None:
        return int(row.argmax()) != int(tokens[0])
    return float(probs.max()) <= SURE or int(row.argmax()) != int(tokens[int(probs.argmax())])


def _same(row: Tensor, tokens: Ints, probs: Floats | None, allowed: float) -> bool:
    p = row.softmax(-1)
    return float(np.abs(p[tokens.tolist()].numpy() - likeliest(p, tokens, probs)).max()) <= allowed
