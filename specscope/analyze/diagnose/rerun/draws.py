"""The final draws once more: what is left of p by the models, and the token that the recorded coin draws from it.

A capture says how likely each final token was, not what else could have been drawn. With the models at hand the whole
residual is known: each draw can be done again (in our own runs, where the coin decides by the cumulative sum), and it
shows whether the drawn tokens lean to what the drafter held likely or unlikely, as they must not.
"""

from __future__ import annotations

import numpy as np

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.judged import JudgedCase
from specscope.analyze.locate.located import Proof
from specscope.analyze.locate.model.finals import BORDER, RESIDUAL, drawn_from
from specscope.trace.history.wording import plural
from specscope.trace.record.rules import ROUNDING, STANDARD

REQUESTS = 12  # whose draws are done again
LEAST = 20  # draws: fewer say nothing
HOPELESS = 0.25  # where rounding may move the border of a token's part of the sum by more, a draw says nothing
SIGMAS = 5.0


def shared_noise(session: JudgedCase) -> list[Suspect]:
    """Recovered tokens that do not follow from the residual."""
    case, run = session.case, session.case.history.run
    steps = [
        step
        for step in case.drafting
        if step.rejected_last and step.is_sampled and step.params is not None and not step.params.greedy
        if step.verdict.rule == STANDARD  # other rules leave something else of p
    ]
    if run is None or session.options.draft is None or len(steps) < LEAST:
        return []
    names = list(dict.fromkeys(step.request for step in steps))
    chosen = {*names[:: max(1, len(names) // REQUESTS)][:REQUESTS]}
    total, others, leans, variances, lines = 0, [], [], [], []
    for one in drawn_from(case, session.models, [step for step in steps if step.request in chosen]):
        p, q, verdict = one.drawn_from[RESIDUAL], one.drawn_from.get("q"), one.step.verdict
        if q is None or float(p[verdict.token]) < 1e-9:
            continue  # it could not be drawn at all: another cause
        left = one.mass ** len(one.step.rejected_last)  # each subtraction magnifies the errors of p and q
        border = max(ROUNDING.get(run.dtype, ROUNDING["bfloat16"]) / left, BORDER)
        if border < HOPELESS:
            above, total = float(p[: verdict.token + 1].sum()), total + 1
            if not above - float(p[verdict.token]) - border <= verdict.final_coin <= above + border:
                others.append(one.step)
        held = q.clamp(min=1e-9).log()  # log q of the drawn token, less what the residual says
        mean = float((p * held).sum())
        leans.append(float(held[verdict.token]) - mean)
        variances.append(max(float((p * held * held).sum()) - mean * mean, 0.0))
    if run.is_ours and len(others) > max(2, 0.05 * total):
        lines.append(f"the recorded coin draws another token from the residual in {len(others):,} of {total:,} draws")
    z = sum(leans) / np.sqrt(sum(variances)) if sum(variances) > 1 else 0.0
    if len(leans) >= LEAST and abs(z) > SIGMAS:
        lines.append(
            f"tokens drawn from the residual are {'less' if z < 0 else 'more'} likely to the drafter than draws from "
            f"it would be, {abs(z):.0f} standard errors over {plural(len(leans), 'draw')}"
        )
    proof = Proof.ROWS if run.is_ours and others else Proof.SUM
    example = others[0].reference() if others else None
    return [Suspect(Cause.COINS, proof, tuple(lines), example=example, rerun=True)] if lines else []
