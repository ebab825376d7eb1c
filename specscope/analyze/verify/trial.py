"""A capture on trial: every check that needs no model, and what follows from them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import visits
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.verify import drafts, exact, parents
from specscope.analyze.verify.chance import coins_apart, statistical_checks
from specscope.analyze.verify.parameters import cuts, temperatures
from specscope.analyze.verify.steps import from_step_to_step
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.rules import is_lossy

OF_FINALS = (  # where the last token of a step is drawn from something else; two of them are audit's
    *("final tokens", "share of the final token", "entropy of the final draw", "recovered draws"),
    *("final token", "final p"),
)
# The checks of whether drawn tokens are distributed as the target's
ACCEPTANCE = "acceptance"
DISTRIBUTION = (ACCEPTANCE, "recovered draws", "other final draws", "emitted surprisal", "target's choice emitted")
# What cannot be looked at where token ids were left out
BY_TOKENS = (
    *("raw probabilities", "drafter's likeliest", "top-p", "temperature and penalties", "draft's temperature"),
    *("draft vocabulary", "likeliest draft first", "drafts in place", "placeholders", "target's choice emitted"),
    *("coins and draws",),
)
# What can be looked at only in part then, and which part
IN_PART = {
    "siblings": "only the sum: token ids are not in this file",
    "final tokens": "only its probability: token ids are not in this file",
    "target's choice": "only the order: token ids are not in this file",
    "greedy tokens": "only the probabilities: token ids are not in this file",
    "outputs": "only the number of tokens: token ids are not in this file",
    "ends": "only ends by length: token ids are not in this file",
}
GROUPS: tuple[tuple[str, tuple[Callable[[Columns], Iterable[Finding]], ...]], ...] = (
    ("What was recorded", (exact.recorded,)),
    ("Each step", (exact.trials, exact.residuals, exact.outcome_of_steps)),
    (
        "The evidence",
        (parents.of_nodes, parents.of_parents, parents.of_greedy, parents.of_finals, parents.log_probabilities),
    ),
    ("The sampling parameters", (cuts, temperatures)),
    (
        "The drafts",
        (drafts.from_vocabulary, drafts.as_planned, drafts.in_text, drafts.drafters_state, drafts.coins_of_draws),
    ),
    ("From step to step", (from_step_to_step,)),
    ("Over the run", (coins_apart,)),
)
CONDITION = "holds unless this part of the run was chosen by what was accepted"
ALPHA = 0.01  # how often a healthy run may be found guilty by chance


@dataclass(frozen=True)
class Trial:
    """All checks of a capture. Made by `judge`."""

    source: str
    groups: tuple[tuple[str, tuple[Finding, ...]], ...]  # checks of one kind, under their title
    alpha: float
    notes: tuple[str, ...]  # what a reader must know
    evidence: Columns = field(compare=False, repr=False)  # what the checks looked at: `Finding.wrong` numbers its rows

    @property
    def steps(self) -> int:
        """Decode steps."""
        return len(self.evidence)

    @property
    def tokens(self) -> int:
        """Committed tokens."""
        return int((self.evidence.depth_reached + 1).sum())

    @property
    def checks(self) -> list[Finding]:
        """The checks of all groups."""
        return [check for _, checks in self.groups for check in checks]

    @property
    def failed(self) -> list[Finding]:
        """The checks that failed."""
        return [check for check in self.checks if check.result is CheckResult.FAILED]

    @property
    def sampler_untested(self) -> str:
        """Why no check shows whether the output is distributed as it should be; "" where one does."""
        sums = [check for check in self.checks if check.name in DISTRIBUTION]
        if any(check.result is not CheckResult.SKIPPED for check in sums):
            return ""
        c = self.evidence
        if len(c) and c.greedy.all():
            return "every request was greedy"
        return next((check.note for check in reversed(sums)), "")

    @property
    def own_rule(self) -> str:
        """Of a rule of somebody's own: what this run would have shown of it, and what proves it; "" of others."""
        rules = ", ".join(_own_rules(self.evidence))
        if not rules or self.failed:
            return ""
        emitted = next(check for check in self.checks if check.name == "emitted surprisal")
        seen = f"{plural(emitted.tested, emitted.unit)} {emitted.note}" if emitted.tested else ""
        seen = seen or f"{plural(self.tokens, 'token')} are too few to say so"
        return f"this does not prove {rules} lossless: {seen}; specscope.testing.lossless proves it exactly"

    @property
    def exit(self) -> Exit:
        """The exit code of the command."""
        judged = self.steps and any(check.result is CheckResult.PASSED for check in self.checks)
        return Exit.of(wrong=bool(self.failed), unjudged=not judged)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        names = ("source", "sampler_untested", "own_rule", "steps", "tokens", "alpha")
        return {name: getattr(self, name) for name in names} | {
            "exit": int(self.exit),
            "warnings": list(self.notes),
            "groups": [
                {"title": title, "checks": [check.to_dict() for check in checks]} for title, checks in self.groups
            ],
        }


def judge(
    history: History,
    *,
    source: str,
    alpha: float = ALPHA,
    warnings: Sequence[str] = (),
    own_rule: OwnRule | None = None,
) -> Trial:
    """Every check over the path on which the history stands. `alpha`: the family-wise error of the statistical ones.

    `own_rule`: the rule of somebody's own by which its steps were judged, where it may be asked. Raises UserError where
    none was, and for its mistakes.
    """
    with np.errstate(all="ignore"):  # what is not to be judged is computed along with the rest
        c = Columns.of(list(visits(history)), history, own_rule)
        if own_rule is not None and not c.by_own_rule.any():
            rules = ", ".join(sorted(set(c.rule.tolist()))) or "not told"
            raise UserError(f"--rule {own_rule.name}: no step of {source} has a rule of your own ({rules})")
        groups = [(title, [found for checks in kinds for found in checks(c)]) for title, kinds in GROUPS]
        over_run = statistical_checks(c, alpha)
        groups[-1][1].extend(map(_conditional, over_run) if history.in_part else over_run)
        told = tuple((title, tuple(_told(check, c) for check in checks)) for title, checks in groups)
        return Trial(source, told, alpha, (*warnings, *_notes(history, c)), c)


def _conditional(check: Finding) -> Finding:
    """A check over chance of a part of a run. Somebody may have chosen it for its outcome: so it convicts nobody."""
    if check.result is CheckResult.SKIPPED:
        return check
    if check.result is CheckResult.PASSED:
        return replace(check, note="; ".join(filter(None, (check.note, CONDITION))))
    z = "" if check.statistic is None else f" (z = {check.statistic:.1f})"
    return replace(check, result=CheckResult.SKIPPED, note=f"would fail{z}: {CONDITION}")


def _told(check: Finding, c: Columns) -> Finding:
    """A check of a file that leaves something out: it does not pass on what it could not look at.

    Where the file does not tell what any request asked, it does not say that none was of a kind.
    """
    if check.note.startswith("no request was") and len(c) and not c.known.any():
        check = replace(check, note="the sampling parameters are not in this file")
    if check.name in DISTRIBUTION and check.result is CheckResult.FAILED and c.by_own_rule.any():
        rules = ", ".join(_own_rules(c))
        check = replace(check, detail=f"{check.detail}; the rule is {rules}, which is not proved lossless")
    if c.run is None or c.run.tells_tokens:
        return check
    if check.name in BY_TOKENS:
        return Finding(check.name, CheckResult.SKIPPED, check.about, note=c.run.privacy.lack, unit=check.unit)
    if check.name in IN_PART and check.result is not CheckResult.SKIPPED:
        return replace(check, note=IN_PART[check.name])
    return check


def _own_rules(c: Columns) -> list[str]:
    return sorted(set(c.rule[c.by_own_rule].tolist()))


def of_own_rules(c: Columns) -> Iterator[str]:
    """What a reader must know of rules of somebody's own: whether they were asked."""
    named = "" if c.own_rule is None else c.own_rule.name
    for rule in filter(lambda rule: rule != named, _own_rules(c)):
        yield f"the rule is {rule}: " + (
            f"judged by {named}" if named else f"its acceptance was not judged: verify --rule {rule} judges it"
        )


def _notes(history: History, c: Columns) -> Iterator[str]:
    if not len(c):
        yield "the capture has no decode step, so nothing can be judged"
    elif not c.parents.there.any():
        yield (
            "the capture has no evidence on the parents that were tried (it is an older one, or made with --evidence "
            "lean): many checks are skipped"
        )
    unchecked = ~(c.walks | c.ahead)
    others: list[str] = sorted(set(c.rule[unchecked].tolist()))
    if others:
        count, names = plural(int(unchecked.sum()), "step"), ", ".join(others)
        yield f"{count} left out: their rule cannot be checked ({names})"
    if any(map(is_lossy, others)):
        yield "a lossy rule's output does not follow the target's p: it is not judged"
    yield from of_own_rules(c)
    if filled := int(c.filler.sum()):
        nodes = f"{filled:,} of {plural(len(c.token), 'node')}"
        yield f"this engine fills its trees with a token that was not drafted: {nodes} are verified for nothing"
    if unsound := int((~c.sound).sum()):
        yield f"{plural(unsound, 'step')} with figures that are not probabilities: other checks leave them out"
    if forced := int(c.any_in_step(c.forced).sum() + c.forced_final.sum()):
        yield f"forced outcomes in {plural(forced, 'step')}: their consequences are left out"
    if again := int((~c.fresh & c.known & ~c.greedy).sum()):
        had = "of sampled requests had the coins of another request (same seed)"
        yield f"{plural(again, 'step')} {had}: sums over chance leave them out"
    if len(history.branches) > 1:
        yield f"the run was edited and has {len(history.branches)} branches: this is branch {history.branch}"
