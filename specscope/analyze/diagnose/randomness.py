"""What lies behind failed checks of coins and of draws: coins used twice, coins of a wrong key, or noise used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.conditions import log_fisher
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, Proof, Suspect
from specscope.analyze.diagnose.verdicts import MOSTLY, counted
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.verify.drafts import draw_numbers
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.tree import Doubles

LOOKED_AT = 4000  # steps whose coins are computed again
Key = Callable[[Step], tuple[int, Stream, int]]  # seed, stream, position


def coins_unequal(case: Case, check: Finding) -> list[Suspect]:
    """Steps in which a coin comes twice: among nodes, or one that drew or judged a draft and the final token too."""
    c, suspects, rest = case.evidence, [], check.failed
    final = c.final_coin[c.step]
    left = np.zeros(len(c), np.bool_)
    left[check.wrong] = True
    for verb, same in (("judged", c.tried & (c.coin == final)), ("drew", c.drawn_by_coin & (c.draft_coin == final))):
        shared = np.unique(c.step[same & left[c.step]])
        if not len(shared):
            continue
        line = f"the coin that {verb} a draft also draws the final token in {len(shared):,} of "
        line += plural(check.tested, "step")
        suspects.append(Suspect(Cause.COINS, Proof.ROWS, (line,), example=check.example, explained=len(shared)))
        left[shared], rest = False, rest - len(shared)
    if rest:
        line = f"two coins of a step are the same number in {rest:,} of {plural(check.tested, 'step')}"
        suspects.append(Suspect(Cause.COINS, Proof.ROWS, (line,), example=check.example, explained=rest))
    return suspects


def coins_shared(case: Case, check: Finding) -> list[Suspect]:
    """Coins that another step or request has too."""
    line = f"{counted(check)}: {check.detail}"
    return [Suspect(Cause.COINS, Proof.ROWS, (line,), example=check.example)]


@dataclass(frozen=True)
class CoinsOf:
    """The coins of verdicts, or those that drew drafts."""

    stream: Stream  # that they are of
    other: str  # what the other stream's are
    of: Callable[[Step], tuple[Indices, Doubles]]  # those of a step: their numbers, and they themselves

    def right(self, step: Step) -> tuple[int, Stream, int]:
        """The key that they should have."""
        assert step.params is not None
        return step.params.seed, self.stream, step.part.position

    def same(self, step: Step, key: Key) -> float:
        """The share of the step's coins that are those of a key."""
        numbers, recorded = self.of(step)
        return float((coins(*key(step), int(numbers.max()) + 1)[numbers] == recorded).mean()) if len(numbers) else 1.0

    def keys(self, first: int) -> dict[str, tuple[Cause, Key]]:
        """The keys that they may follow from by mistake. `first`: the seed of the first request."""
        by_batch, shared, right = Cause.COINS, Cause.COINS, self.right
        late = Cause.VERDICT_LATE if self.stream is Stream.VERIFY else shared
        other = Stream.DRAFT if self.stream is Stream.VERIFY else Stream.VERIFY
        return {
            "those of the request's step before": (late, self.before),
            "those of its row in the batch as seed": (by_batch, lambda s: (s.visit.row, *right(s)[1:])),
            "those of its seed plus its row": (by_batch, lambda s: (right(s)[0] + s.visit.row, *right(s)[1:])),
            "those of its position plus its row": (by_batch, lambda s: (*right(s)[:2], s.part.position + s.visit.row)),
            "those of the engine's step": (by_batch, lambda s: (*right(s)[:2], s.visit.record.step)),
            "those of the request's step": (by_batch, lambda s: (*right(s)[:2], s.part.index)),
            self.other: (Cause.COINS, lambda s: (right(s)[0], other, s.part.position)),
            "those of seed 0": (shared, lambda s: (0, *right(s)[1:])),
            "those of the first request's seed": (shared, lambda s: (first, *right(s)[1:])),
            "those of the seed at another place": (shared, lambda s: (*right(s)[:2], 0)),
        }

    def before(self, step: Step) -> tuple[int, Stream, int]:
        """The key that the request's step before had."""
        seed, stream, position = self.right(step)
        return seed, stream, position if step.last is None else step.last.part.position


def _of_verdict(step: Step) -> tuple[Indices, Doubles]:
    recorded: Doubles = np.array([step.verdict.final_coin, *step.verdict.coin])
    return np.arange(len(recorded)), recorded


OF_VERDICTS = CoinsOf(Stream.VERIFY, "those that drew the drafts", _of_verdict)


def of_drafts(case: Case) -> CoinsOf:
    """The coins that drew drafts."""
    c, number = case.evidence, draw_numbers(case.evidence)
    place = {key: step for step, key in enumerate((visit.request.id, visit.part.index) for visit in c.visits)}

    def of(step: Step) -> tuple[Indices, Doubles]:
        first, last = c.start[place[step.key] : place[step.key] + 2].tolist()
        nodes = np.flatnonzero(c.drawn_by_coin[first:last] & (number[first:last] >= 0)) + first
        return number[nodes], c.draft_coin[nodes]

    return CoinsOf(Stream.DRAFT, "those of the verdict on them", of)


def wrong_key(case: Case, check: Finding) -> list[Suspect]:
    """Coins that do not follow from seed and position: computed again from other keys."""
    line = f"the coins are not those of seed and position in {counted(check)}"
    suspects = _of_another_key(case, check.wrong, OF_VERDICTS, line)
    if suspects is not None:
        return suspects
    c = case.evidence
    return _by_row(case, check, line) or _from_elsewhere(case, check, line, c.final_coin, c.final_coin[check.wrong])


def wrong_draft_key(case: Case, check: Finding) -> list[Suspect]:
    """The same of coins that drew drafts."""
    c, line = case.evidence, f"the coins that drew drafts are not those of seed, position and draw at {counted(check)}"
    suspects = _of_another_key(case, np.unique(c.step[check.wrong]), of_drafts(case), line)
    if suspects is not None:
        return suspects
    return _from_elsewhere(case, check, line, c.draft_coin[c.drawn_by_coin], c.draft_coin[check.wrong])


def _of_another_key(case: Case, wrong: Indices, of: CoinsOf, line: str) -> list[Suspect] | None:
    """The key that nearly all coins of wrong steps follow from; none where none of these has a wrong key; None: go on.

    Where most of a step's coins are right, so is its key: one was used twice (another check's) or set by hand.
    """
    steps = [step for step in map(case.step_at, wrong.tolist()[:LOOKED_AT]) if step is not None]
    looked = [step for step in steps if step.params is not None and of.same(step, of.right) <= 0.5]
    if not looked:
        return []
    if name := key_of(case, looked, of):
        fits = sum(of.same(step, of.keys(_first_seed(case))[name][1]) == 1 for step in looked)
        cause = of.keys(0)[name][0]
        lines = (line, f"they are {name} in {fits:,} of these")
        return [Suspect(cause, Proof.ROWS, lines, example=looked[0].reference())]
    return None


def key_of(case: Case, steps: Sequence[Step], of: CoinsOf) -> str:
    """The name of the key that nearly all of these steps' coins follow from; "" for none."""
    for name, (_, key) in of.keys(_first_seed(case)).items():
        if sum(of.same(step, key) == 1 for step in steps) > MOSTLY * len(steps):
            return name
    return ""


def _first_seed(case: Case) -> int:
    return next((step.params.seed for step in case.steps if step.params is not None), 0)


def outside_intervals(case: Case, check: Finding) -> list[Suspect]:
    """Coins outside of their drafts' intervals, also where no sibling could have been moved or dropped."""
    c, wrong = case.evidence, check.wrong
    alone = wrong[np.bincount(c.row, minlength=c.rows)[c.row[wrong]] == 1]
    if not len(alone):
        return []
    below = int((c.draft_coin[wrong] < c.draft_low[wrong]).sum())  # another q moves only the upper ends
    line = f"{counted(check)} were drawn by a coin outside of their interval: {check.detail}"
    return [Suspect(Cause.Q_NOT_DRAWN, Proof.CONDITION if below else Proof.SUM, (line,), example=check.example)]


def _by_row(case: Case, check: Finding, line: str) -> list[Suspect]:
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
    return [Suspect(Cause.COINS, Proof.CONDITION, (line, detail), example=check.example, chance=0.0)]


def _from_elsewhere(case: Case, check: Finding, line: str, every: Doubles, wrong: Doubles) -> list[Suspect]:
    """Whether the wrong coins come more than once among all of their kind: shared between draws, steps or requests."""
    values, counts = np.unique(every, return_counts=True)
    shared = int(np.isin(wrong, values[(counts > 1) & (values > 0)]).sum())
    if shared > MOSTLY * check.failed:
        detail = f"{shared:,} of these have the coin of another {check.unit}"
        return [Suspect(Cause.COINS, Proof.ROWS, (line, detail), example=check.example)]
    return []


def biased_draws(case: Case, check: Finding) -> list[Suspect]:
    """Recovered tokens that do not follow the residual, where other final tokens follow p."""
    other = case.checks.get("other final draws")
    lines = [f"tokens drawn from residuals: {check.detail}"]
    if other is not None and other.result is CheckResult.PASSED and other.statistic is not None:
        lines.append(
            f"other final tokens follow theirs (z = {other.statistic:+.1f} over {plural(other.tested, 'draw')})"
        )
    lines.append("every verdict can be recomputed: only the draws are wrong")
    return [Suspect(Cause.COINS, Proof.SUM, tuple(lines), example=check.example)]


def coins_and_draws(case: Case, check: Finding) -> list[Suspect]:
    """Coins that are correlated with what was drafted."""
    line = f"{check.name}: {check.detail}"
    return [Suspect(Cause.COINS, Proof.SUM, (line,), example=check.example)]


def accepted_otherwise(case: Case, check: Finding) -> list[Suspect]:
    """Drafts that are accepted more often, or less, than their acceptance probabilities say."""
    line = f"{check.name}: {check.detail}"
    return [Suspect(Cause.RATIO_TEST, Proof.SUM, (line,), example=check.example)]
