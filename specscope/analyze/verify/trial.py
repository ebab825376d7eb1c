"""A capture on trial: every check that needs no model, and what follows from them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.evidence.visits import Visit, visits
from specscope.analyze.findings import CheckResult, Exit, Finding, Reference
from specscope.analyze.verify.chance import coins_apart, statistical_checks
from specscope.analyze.verify.drafts import as_planned, coins_of_draws, drafters_state, from_vocabulary, in_text
from specscope.analyze.verify.exact import outcome_of_steps, recorded, residuals, trials
from specscope.analyze.verify.parents import (
    cuts,
    log_probabilities,
    of_finals,
    of_greedy,
    of_nodes,
    of_parents,
    temperatures,
)
from specscope.analyze.verify.steps import from_step_to_step
from specscope.errors import UserError
from specscope.plans.plan import TreePlan, read_plan
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.own_rule import OwnRule
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import EVIDENCE, FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.rules import is_lossy
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import printable

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
    "log-probabilities": "only sums and drafted tokens: token ids are not in this file",
    "outputs": "only the number of tokens: token ids are not in this file",
    "ends": "only ends by length: token ids are not in this file",
}
GROUPS: Mapping[str, tuple[Callable[[Columns], Iterable[Finding]], ...]] = {
    "What was recorded": (recorded,),
    "Each step": (trials, residuals, outcome_of_steps),
    "The evidence": (of_nodes, of_parents, of_greedy, of_finals, log_probabilities),
    "The sampling parameters": (cuts, temperatures),
    "The drafts": (from_vocabulary, as_planned, in_text, drafters_state, coins_of_draws),
    "From step to step": (from_step_to_step,),
    "Over the run": (coins_apart,),
}
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
        return len(self.evidence)

    @property
    def tokens(self) -> int:
        return int((self.evidence.depth_reached + 1).sum())

    @property
    def checks(self) -> list[Finding]:
        return [check for _, checks in self.groups for check in checks]

    @property
    def failed(self) -> list[Finding]:
        return [check for check in self.checks if check.result is CheckResult.FAILED]

    @property
    def sampler_untested(self) -> str:
        """Why no check shows whether the output is distributed as it should be; "" where one does."""
        sums, c = [check for check in self.checks if check.name in DISTRIBUTION], self.evidence
        if any(check.result is not CheckResult.SKIPPED for check in sums):
            return ""
        return "every request was greedy" if len(c) and c.greedy.all() else sums[-1].note

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
        judged = self.steps and any(check.result is CheckResult.PASSED for check in self.checks)
        return Exit.of(wrong=bool(self.failed), unjudged=not judged)

    def to_dict(self) -> dict[str, Any]:
        names = ("source", "sampler_untested", "own_rule", "steps", "tokens", "alpha")
        groups = [{"title": title, "checks": [check.to_dict() for check in checks]} for title, checks in self.groups]
        told = {"exit": int(self.exit), "warnings": list(self.notes), "groups": groups}
        return {name: getattr(self, name) for name in names} | told


def judge(
    history: History,
    *,
    source: str,
    alpha: float = ALPHA,
    warnings: Sequence[str] = (),
    own_rule: OwnRule | None = None,
) -> Trial:
    """Every check over the path on which the history stands. `alpha`: the family-wise error of the statistical ones;
    `own_rule`: of somebody's own, by which steps were judged. Raises UserError where none was, and for its mistakes.
    """
    with np.errstate(all="ignore"):  # what is not to be judged is computed along with the rest
        c = Columns.of(list(visits(history)), history, own_rule)
        if own_rule is not None and not c.by_own_rule.any():
            rules = ", ".join(sorted(set(c.rule.tolist()))) or "not told"
            raise UserError(f"--rule {own_rule.name}: no step of {source} has a rule of your own ({rules})")
        found = {title: [check for checks in kinds for check in checks(c)] for title, kinds in GROUPS.items()}
        over_run = statistical_checks(c, alpha)
        found["Over the run"] += map(_conditional, over_run) if history.in_part else over_run
        told = tuple((title, tuple(_told(check, c) for check in checks)) for title, checks in found.items())
        return Trial(source, told, alpha, (*warnings, *_notes(history, c)), c)


def _conditional(check: Finding) -> Finding:
    """A check over chance of a part of a run. Somebody may have chosen it for its outcome: so it convicts nobody."""
    if check.result is CheckResult.PASSED:
        return replace(check, note=f"{check.note}; {CONDITION}")
    if check.result is CheckResult.FAILED:
        return replace(check, result=CheckResult.SKIPPED, note=f"would fail (z = {check.statistic:.1f}): {CONDITION}")
    return check


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
        check = replace(check, note=IN_PART[check.name])
    return replace(check, detail=check.detail.replace(f"token {NO_TOKEN}", "a token"))


def _own_rules(c: Columns) -> list[str]:
    return sorted(set(c.rule[c.by_own_rule].tolist()))


def of_own_rules(c: Columns) -> Iterator[str]:
    """What a reader must know of rules of somebody's own: whether they were asked."""
    named = "" if c.own_rule is None else c.own_rule.name
    for rule in filter(lambda rule: rule != named, _own_rules(c)):
        unjudged = f"its acceptance was not judged: verify --rule {rule} judges it"
        yield f"the rule is {rule}: {f'judged by {named}' if named else unjudged}"


def _notes(history: History, c: Columns) -> Iterator[str]:
    if not len(c):
        yield "the capture has no decode step, so nothing can be judged"
    elif not c.parents.there.any():
        is_full = c.run is not None and c.run.evidence == EVIDENCE[0]
        how = "it was cut or lost" if is_full else "it is an older one, or made with --evidence lean"
        yield f"the capture has no evidence on the parents that were tried ({how}): many checks are skipped"
    unchecked = ~(c.walks | c.ahead)
    if others := sorted(set(c.rule[unchecked].tolist())):
        count = plural(int(unchecked.sum()), "step")
        yield f"{count} left out: their rule cannot be checked ({', '.join(others)})"
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


@dataclass(frozen=True)
class Step:
    visit: Visit
    verdict: Verdict
    params: SamplingParams | None
    text: list[int]  # prompt and output, to the end of the request
    after: int  # where in `text` the step's own tokens begin
    last: Step | None  # the request's decode step before it

    @property
    def part(self) -> RequestStep:
        return self.visit.part

    @property
    def tree(self) -> DraftTree:
        return self.visit.part.tree

    @property
    def request(self) -> str:
        return self.visit.request.id

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.part.index

    @property
    def is_sampled(self) -> bool:
        """Whether drafts were drawn from a recorded q."""
        return self.tree.is_sampled

    @property
    def rejected_last(self) -> Indices:
        """The rejected children at whose place the final token was recovered; empty where it was not."""
        outcome, parent = self.verdict.outcome, self.tree.parent
        tried = np.flatnonzero((outcome != Outcome.UNTRIED) & (self.verdict.kind is FinalKind.RECOVERED))
        last: Indices = tried[parent[tried] == parent[tried[-1:]]]
        return last if (outcome[last] == Outcome.REJECTED).all() else last[:0]

    def reference(self, node: int | None = None) -> Reference:
        return self.visit.reference(node)


@dataclass(frozen=True)
class Case:
    """All that is known about a run."""

    history: History
    trial: Trial  # verify's

    @property
    def evidence(self) -> Columns:
        """The decode steps as arrays: what `Finding.wrong` numbers."""
        return self.trial.evidence

    @property
    def visits(self) -> Sequence[Visit]:
        """Every step of every request, prefill chunks too: what `Finding.wrong` of request steps numbers."""
        return self.trial.evidence.every

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Decode steps whose outcome was judged and not forced, in the engine's order."""
        c, texts, made = self.evidence, self.evidence.texts, list[Step]()
        whole = [texts.text[begin:end].tolist() for begin, end in zip(texts.begins, texts.ends, strict=True)]
        after = texts.behind - texts.begins[texts.request]
        for place, (visit, verdict) in enumerate(zip(c.visits, c.verdicts, strict=True)):
            last = made[c.before[place]] if c.before[place] >= 0 else None
            made.append(Step(visit, verdict, visit.params, whole[texts.request[place]], int(after[place]), last))
        return tuple(step for step in made if not len(step.verdict.forced))

    @cached_property
    def checks(self) -> dict[str, Finding]:
        return {check.name: check for check in self.trial.checks}

    @cached_property
    def by_key(self) -> dict[tuple[str, int], Step]:
        return {step.key: step for step in self.steps}

    @property
    def drafting(self) -> list[Step]:
        return [step for step in self.steps if len(step.tree)]

    @property
    def plan(self) -> TreePlan | None:
        """The tree that the run was to draft; None where it is not known or read."""
        return None if self.history.run is None else read_plan(self.history.run.tree)

    @property
    def dtype(self) -> str:
        """The dtype that the run computed in; empty where it is not known."""
        return "" if self.history.run is None else self.history.run.dtype


MARKS = {CheckResult.PASSED: ("✓", "green"), CheckResult.FAILED: ("✗", "bold red"), CheckResult.SKIPPED: ("–", "dim")}
NAME = 26
FAR = 3.0  # z from which p is shown where a check passes: it is a bound that skewed sums keep too
SHOWN = 3  # examples of what a model judged


def render_trial(trial: Trial, console: Console) -> None:
    """Print a trial, with the verdict last, where it is read."""
    counts = f"{plural(trial.steps, 'decode step')}, {plural(trial.tokens, 'token')} committed"
    console.print(Text(f"{printable(trial.source)}: {counts}"))
    for note in trial.notes:
        console.print(Text(f"! {printable(note)}", style="yellow"), soft_wrap=True)
    for title, checks in trial.groups:
        console.print(Text(f"\n{title}", style="bold cyan"))
        for check in checks:
            render_check(check, trial.source, console)
    console.print(Text(f"\n{verdict(trial)}", style="bold red" if trial.failed else "bold"), soft_wrap=True)


def verdict(trial: Trial) -> str:
    """The whole in a line: what was found, over how much, and what that does not cover."""
    checks, counts = trial.checks, Counter(check.result for check in trial.checks)
    sampler = trial.sampler_untested and f"the sampler was not tested ({trial.sampler_untested})"
    rest = f"{plural(counts[CheckResult.PASSED], 'check')} passed, {counts[CheckResult.SKIPPED]} skipped"
    untested = f"; {trial.own_rule or sampler}" if trial.own_rule or sampler else ""
    if trial.exit is Exit.INCONSISTENT:
        names = ", ".join(check.name for check in trial.failed)
        return f"NOT CONSISTENT: {plural(len(trial.failed), 'check')} failed ({names}); {rest}{untested}"
    if trial.exit is Exit.NOT_JUDGED:
        return f"CANNOT BE JUDGED: {rest}"
    seen = next((check for check in checks if check.name == ACCEPTANCE and check.statistic is not None), None)
    least = "" if seen is None else f"; {seen.name} over {plural(seen.tested, seen.unit)}: {seen.note}"
    over = f"{rest}, over {plural(trial.steps, 'decode step')}"
    if sampler and not trial.own_rule:
        return f"consistent, but {sampler}: {over}{least}"
    return f"consistent: {over}{untested}{least}"


def render_check(check: Finding, source: str, console: Console) -> None:
    """A check in a line, and what failed in a few more."""
    mark, style = MARKS[check.result]
    line = Text(f"{mark} {check.name:<{NAME}}", style=style if check.result is not CheckResult.PASSED else "")
    line.append(f" {figures_of(check)}")
    console.print(line, soft_wrap=True)
    if check.result is not CheckResult.FAILED:
        return
    of_models = [check.sentence, *(f"{each.where}: {each.text}" for each in check.examples[:SHOWN])]
    for text in (f"expected: {check.about}", *(of_models if check.examples else [check.detail]), check.note):
        if text:
            console.print(Text(f"    {printable(text)}"), soft_wrap=True)
    if check.example is not None:
        console.print(Text(f"    {check.example}: {check.example.command(source)}"), soft_wrap=True)


def figures_of(check: Finding) -> str:
    if check.result is CheckResult.SKIPPED:
        return f"skipped: {check.note}"
    if check.statistic is not None:
        figures = f"z = {check.statistic:+.2f} over {plural(check.tested, check.unit)}"
        passed = check.result is CheckResult.PASSED
        figures += f", p = {check.p_value:.2g}" if not passed or abs(check.statistic) > FAR else ""
        return figures + (f"; {check.note}" if passed else "")
    if check.failed:
        return f"{check.failed:,} of {plural(check.tested, check.unit)}"
    return plural(check.tested, check.unit) + (f"; {check.note}" if check.note else "")
