"""The final draws once more: what is left of p by the models, and the token that the recorded coin draws from it.

A capture says how likely each final token was, not what else could have been drawn. With the models at hand the whole
residual is known, and in our own runs, where the coin decides by the cumulative sum, each draw can be done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from specscope.analyze.audit.model.rows import Models, rows_of
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Suspect
from specscope.analyze.diagnose.judged import JudgedCase
from specscope.analyze.locate.located import Proof
from specscope.analyze.locate.model.other_rows import Places
from specscope.analyze.locate.model.sampling import RIGHT, RuledRows
from specscope.analyze.verify.case import Case, Step
from specscope.trace.record.rules import ROUNDING, STANDARD
from specscope.trace.record.tree import ROOT, Drawn

REQUESTS = 12  # whose draws are done again
LEAST = 20  # draws: fewer say nothing
BORDER = 2e-3  # a coin so near to another token's part of the sum may have drawn that token
HOPELESS = 0.25  # where rounding may move that border by more, a draw says nothing


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
    for step, left, mass in _residuals(case, session.models, [step for step in steps if step.request in chosen]):
        token, rounding = step.verdict.token, ROUNDING.get(run.dtype, ROUNDING["bfloat16"])
        border = max(rounding / mass ** len(step.rejected_last), BORDER)  # each subtraction magnifies errors of p and q
        if border >= HOPELESS or float(left[token]) < 1e-9:  # it could not be drawn at all: another cause
            continue
        above, total = float(left[: token + 1].sum()), total + 1
        if not above - float(left[token]) - border <= step.verdict.final_coin <= above + border:
            others.append(step)
    if len(others) <= max(2, 0.05 * total):
        return []
    line = f"the recorded coin draws another token from the residual in {len(others):,} of {total:,} draws"
    return [Suspect(Cause.COINS, Proof.ROWS, (line,), example=others[0].reference(), rerun=True)]


def _residuals(case: Case, models: Models, steps: Sequence[Step]) -> Iterator[tuple[Step, Tensor, float]]:
    """Of steps what is left of p once the last siblings are rejected, [V], and the least mass before it was divided."""
    of_p, of_q = (_rows(case, models, what, steps) for what in ("p", "q"))
    for step in steps:
        leaf = int(step.verdict.path[-1]) if len(step.verdict.path) else ROOT
        p, q, masses = of_p.get((*step.key, leaf)), of_q.get((*step.key, leaf)), [1.0]
        if p is None or q is None:
            continue
        for child in step.rejected_last:
            left = (p - q).clamp(min=0)
            masses.append(float(left.sum()))
            p = left / masses[-1] if masses[-1] > 0 else p
            if step.tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT:
                q = q.clone()
                q[int(step.tree.token[child])] = 0
                q /= q.sum().clamp(min=1e-30)
        yield step, p, max(min(masses), 1e-30)


def _rows(case: Case, models: Models, what: str, steps: Sequence[Step]) -> dict[tuple[str, int, int], Tensor]:
    """The distribution at every row of steps, by request, step and node."""
    asked = rows_of(case, models, what, steps)
    usable = [one for one in asked if one.logits and not one.contexts.limits and not one.contexts.params.limited]
    if not usable:
        return {}
    rows = RuledRows(Places(usable), what, None)
    made = rows.distributions(RIGHT, range(len(rows.places.every))).double()
    return {(*place.asked.step.key, place.node): row for place, row in zip(rows.places.every, made, strict=True)}
