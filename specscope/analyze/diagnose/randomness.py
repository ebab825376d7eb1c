"""What lies behind failed checks of coins and of draws: coins used twice, coins of a wrong key, or noise used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specscope.analyze.conditions import log_fisher
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, CONDITION, LOG_CHANCE, STATISTICAL, Suspect
from specscope.analyze.diagnose.verdicts import MOSTLY, counted
from specscope.analyze.findings import Check, CheckResult
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.tree import Doubles

LOOKED_AT = 4000  # steps whose coins are computed again
Key = Callable[[Step], tuple[int, Stream, int]]  # seed, stream, position


def coins_unequal(case: Case, check: Check) -> list[Suspect]:
    """Steps in which a coin comes twice: among nodes, or one that judged a draft and drew the final token too."""
    c = case.evidence
    tried = np.zeros(len(c), np.bool_)
    tried[c.step[c.tried & (c.coin == c.final_coin[c.step])]] = True
    shared = int(tried[check.wrong].sum())
    suspects = []
    if shared:
        line = (
            f"the coin that judged a draft also draws the final token in {shared:,} of {plural(check.tested, 'step')}"
        )
        suspects.append(Suspect(Cause.NOISE_SHARED, CERTAIN, (line,), example=check.example, explained=shared))
    if rest := check.failed - shared:
        line = f"two coins of a step are the same number in {rest:,} of {plural(check.tested, 'step')}"
        suspects.append(Suspect(Cause.COINS_SHARED, CERTAIN - 0.01, (line,), example=check.example, explained=rest))
    return suspects


def coins_of_requests(case: Case, check: Check) -> list[Suspect]:
    """Coins that another request of the same step has too."""
    line = f"{counted(check)}: {check.detail}"
    return [Suspect(Cause.COINS_SHARED, CERTAIN - 0.01, (line,), example=check.example)]


def wrong_key(case: Case, check: Check) -> list[Suspect]:
    """Coins that do not follow from seed and position: computed again from other keys."""
    steps = [step for step in map(case.step_at, check.wrong.tolist()[:LOOKED_AT]) if step is not None]
    # Where most of a step's coins are right, so is its key: one was used twice (another check's) or set by hand
    looked = [step for step in steps if step.params is not None and _same(step, _right) <= 0.5]
    if not looked:
        return []
    line = f"the coins are not those of seed and position in {counted(check)}"
    first = next((step.params.seed for step in case.steps if step.params is not None), 0)
    for name, (cause, key) in _keys(first).items():
        fits = sum(_fits(step, key) for step in looked)
        if fits > MOSTLY * len(looked):
            lines = (line, f"they are {name} in {fits:,} of these")
            score = CERTAIN if cause is not Cause.COINS_SHARED else CERTAIN - 0.05
            return [Suspect(cause, score, lines, example=looked[0].reference())]
    return _by_row(case, check, line) or _from_elsewhere(case, check, line)


def _keys(first: int) -> dict[str, tuple[Cause, Key]]:
    """The keys that coins may follow from by mistake. `first`: the seed of the first request."""
    by_batch, shared = Cause.COINS_BY_BATCH, Cause.COINS_SHARED
    return {
        "those of the request's step before": (Cause.VERDICT_LATE, _before),
        "those of its row in the batch as seed": (by_batch, lambda s: (s.visit.row, *_right(s)[1:])),
        "those of its seed plus its row": (by_batch, lambda s: (_right(s)[0] + s.visit.row, *_right(s)[1:])),
        "those of its position plus its row": (by_batch, lambda s: (*_right(s)[:2], s.part.position + s.visit.row)),
        "those of the engine's step": (by_batch, lambda s: (*_right(s)[:2], s.visit.record.step)),
        "those of the request's step": (by_batch, lambda s: (*_right(s)[:2], s.part.index)),
        "those that drew the drafts": (
            Cause.NOISE_SHARED,
            lambda s: (_right(s)[0], Stream.DRAFT, s.part.position),
        ),
        "those of seed 0": (shared, lambda s: (0, *_right(s)[1:])),
        "those of the first request's seed": (shared, lambda s: (first, *_right(s)[1:])),
        "those of the seed at another place": (shared, lambda s: (*_right(s)[:2], 0)),
    }


def _right(step: Step) -> tuple[int, Stream, int]:
    assert step.params is not None
    return step.params.seed, Stream.VERIFY, step.part.position


def _before(step: Step) -> tuple[int, Stream, int]:
    seed, stream, position = _right(step)
    return seed, stream, position if step.last is None else step.last.part.position


def _fits(step: Step, key: Key) -> bool:
    """Whether the step's coins are those of a key."""
    return step.params is not None and _same(step, key) == 1


def _same(step: Step, key: Key) -> float:
    """The share of the step's coins that are those of a key."""
    recorded: Doubles = np.array([step.verdict.final_coin, *step.verdict.coin])
    return float((coins(*key(step), len(recorded)) == recorded).mean())


def _by_row(case: Case, check: Check, line: str) -> list[Suspect]:
    """Whether wrong coins lie beyond the first row of a batch more often than by chance."""
    c, wrong = case.evidence, np.isin(np.arange(len(case.evidence)), check.wrong)
    rows = np.array([visit.row > 0 for visit in c.visits], np.bool_)
    a, b = int((rows & wrong).sum()), int((rows & ~wrong).sum())
    others, right = int((~rows & wrong).sum()), int((~rows & ~wrong).sum())
    if log_fisher(a, b, others, right) > LOG_CHANCE:
        return []
    detail = (
        f"{a:,} of {plural(a + b, 'step')} beyond the first row of their batch, {others:,} of {others + right:,} in it"
    )
    return [Suspect(Cause.COINS_BY_BATCH, CONDITION, (line, detail), example=check.example, chance=0.0)]


def _from_elsewhere(case: Case, check: Check, line: str) -> list[Suspect]:
    """Whether the wrong coins are those of another step: shared between steps or requests."""
    c = case.evidence
    values, first, counts = np.unique(c.final_coin, return_index=True, return_counts=True)
    twice = {float(value) for value, count in zip(values, counts, strict=True) if count > 1 and value > 0}
    shared = sum(float(c.final_coin[step]) in twice for step in check.wrong.tolist())
    if shared > MOSTLY * check.failed and len(first):
        detail = f"{shared:,} of these have the coin of another step"
        return [Suspect(Cause.COINS_SHARED, CERTAIN - 0.05, (line, detail), example=check.example)]
    return []


def biased_draws(case: Case, check: Check) -> list[Suspect]:
    """Recovered tokens that do not follow the residual, where other final tokens follow p."""
    other = case.checks.get("other final draws")
    lines = [f"tokens drawn from residuals: {check.detail}"]
    if other is not None and other.result is CheckResult.PASSED and other.statistic is not None:
        lines.append(
            f"other final tokens follow theirs (z = {other.statistic:+.1f} over {plural(other.tested, 'draw')})"
        )
    lines.append("every verdict can be recomputed: only the draws are wrong")
    return [Suspect(Cause.NOISE_SHARED, STATISTICAL + 0.2, tuple(lines), example=check.example)]


def coins_and_draws(case: Case, check: Check) -> list[Suspect]:
    """Coins that are correlated with what was drafted."""
    line = f"{check.name}: {check.detail}"
    return [Suspect(Cause.NOISE_SHARED, STATISTICAL + 0.1, (line,), example=check.example)]


def accepted_otherwise(case: Case, check: Check) -> list[Suspect]:
    """Drafts that are accepted more often, or less, than their acceptance probabilities say."""
    line = f"{check.name}: {check.detail}"
    return [Suspect(Cause.AGAINST_COIN, STATISTICAL + 0.1, (line,), example=check.example)]
