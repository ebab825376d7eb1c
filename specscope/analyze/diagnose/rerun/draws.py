"""The final draws once more: what is left of p by the models, and the token that the recorded coin draws from it.

A capture says how likely each final token was, not what else could have been drawn. With the models at hand the whole
residual is known, and in our own runs, where the coin decides by the cumulative sum, each draw can be done again.
"""

from __future__ import annotations

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.judged import JudgedCase
from specscope.analyze.locate.located import Proof
from specscope.analyze.locate.model.finals import BORDER, RESIDUAL, drawn_from
from specscope.trace.record.rules import ROUNDING, STANDARD

REQUESTS = 12  # whose draws are done again
LEAST = 20  # draws: fewer say nothing
HOPELESS = 0.25  # where rounding may move the border of a token's part of the sum by more, a draw says nothing


def shared_noise(session: JudgedCase) -> list[Suspect]:
    """Recovered tokens that do not follow from the residual."""
    case, run = session.case, session.case.history.run
    steps = [
        step
        for step in case.drafting
        if step.rejected_last and step.is_sampled and step.params is not None and not step.params.greedy
        if step.verdict.rule == STANDARD  # other rules leave something else of p
    ]
    if run is None or not run.is_ours or session.options.draft is None or len(steps) < LEAST:
        return []
    names = list(dict.fromkeys(step.request for step in steps))
    chosen = {*names[:: max(1, len(names) // REQUESTS)][:REQUESTS]}
    total, others = 0, []
    for one in drawn_from(case, session.models, [step for step in steps if step.request in chosen]):
        p, verdict = one.drawn_from[RESIDUAL], one.step.verdict
        left = one.mass ** len(one.step.rejected_last)  # each subtraction magnifies the errors of p and q
        border = max(ROUNDING.get(run.dtype, ROUNDING["bfloat16"]) / left, BORDER)
        if border >= HOPELESS or float(p[verdict.token]) < 1e-9:  # it could not be drawn at all: another cause
            continue
        above, total = float(p[: verdict.token + 1].sum()), total + 1
        if not above - float(p[verdict.token]) - border <= verdict.final_coin <= above + border:
            others.append(one.step)
    if len(others) <= max(2, 0.05 * total):
        return []
    line = f"the recorded coin draws another token from the residual in {len(others):,} of {total:,} draws"
    return [Suspect(Cause.COINS, Proof.ROWS, (line,), example=others[0].reference(), rerun=True)]
