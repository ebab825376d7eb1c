"""A trial in the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.text import Text

from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.verify.trial import ACCEPTANCE, Trial
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

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
    """Its figures in a line."""
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
