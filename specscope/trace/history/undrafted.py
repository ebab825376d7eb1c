"""Why a step drafted nothing: one of a few reasons, derived from its record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from specscope.plans.plan import read_plan
from specscope.trace.history.stats import StepCounts
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.records import Preceded, RequestStep, RunInfo, StepRecord


class Undrafted(StrEnum):
    """The reasons, by the names that JSON has."""

    NO_DRAFTER = "no drafter"
    OFF = "off"
    COST = "cost"
    NOT_KEPT = "not kept"
    PROMPT = "prompt"
    NO_MATCH = "no match"
    FORM = "form"
    BUDGET = "budget"
    NO_ROOM = "no room"
    UNKNOWN = "unknown"


ABOUT = {
    Undrafted.NO_DRAFTER: "no drafter",
    Undrafted.OFF: "drafting was off",
    Undrafted.COST: "no draft would pay",
    Undrafted.NOT_KEPT: "no node worth verifying",
    Undrafted.PROMPT: "first token after the prompt",
    Undrafted.NO_MATCH: "no match in the text",
    Undrafted.FORM: "nothing that the form allows",
    Undrafted.BUDGET: "beyond the step's budget",
    Undrafted.NO_ROOM: "no room in the context",
    Undrafted.UNKNOWN: "not recorded",
}


def why_undrafted(run: RunInfo | None, record: StepRecord, part: RequestStep) -> Undrafted | None:
    """Why this request's step drafted nothing; None where it did, and for a prefill chunk without a verdict."""
    counts = StepCounts.of(part)
    if counts is None or counts.drafted:
        return None
    drafter, ours = ("", True) if run is None else (run.drafter, run.is_ours)
    if not record.speculation:
        return Undrafted.NO_DRAFTER if run is not None and drafter in ("", "none") else Undrafted.OFF
    if part.form is not None and part.form.pruned:
        return Undrafted.FORM
    if part.sizing:  # ours: an adaptive tree; vLLM's: drafts that were not valid
        return Undrafted.FORM if not ours else Undrafted.COST if part.notes is None else Undrafted.NOT_KEPT
    if record.budget == 0 or (part.method is not None and part.method.unverified):
        return Undrafted.BUDGET
    first = part.preceded in (Preceded.PREFILL, Preceded.PREEMPTION) or part.prefill_tokens > 0
    if run is not None and first and (run.aux_layers or not ours):  # a head waits for the target's hidden states
        return Undrafted.PROMPT
    if run is not None and 0 < run.max_context <= part.position + 1 + _deepest(drafter, run.tree):
        return Undrafted.NO_ROOM
    return Undrafted.NO_MATCH if text_part(drafter) and not model_part(drafter) else Undrafted.UNKNOWN


@lru_cache(maxsize=16)
def _deepest(drafter: str, tree: str) -> int:
    """The longest path that a draft may have; combined with a model, a text may go as deep as there are nodes."""
    plan = read_plan(tree)
    if plan is None:
        return 0
    return plan.max_nodes if text_part(drafter) and model_part(drafter) else plan.max_depth


def count_undrafted(
    run: RunInfo | None, records: Iterable[StepRecord], request: str | None = None
) -> Counter[Undrafted]:
    """The request steps without drafts in these records, by the reason; of all requests, or of one."""
    parts = ((record, part) for record in records for part in record.requests if request in (None, part.request))
    reasons = (why_undrafted(run, record, part) for record, part in parts)
    return Counter(reason for reason in reasons if reason is not None)


def shares(counts: Counter[Undrafted]) -> list[tuple[Undrafted, float]]:
    """The reasons that occur with their shares of these steps, commonest first."""
    total = counts.total()
    return [(reason, count / total) for reason, count in counts.most_common() if count]


def undrafted_text(counts: Counter[Undrafted], steps: int) -> str:
    """`47 of 70 steps drafted nothing: no draft would pay 87%, first token after the prompt 13%`; "" where none did."""
    if not counts.total():
        return ""
    reasons = ", ".join(f"{ABOUT[reason]} {share:.0%}" for reason, share in shares(counts))
    return f"{counts.total():,} of {plural(steps, 'step')} drafted nothing: {reasons}"
