"""What diagnose finds, in three lists: faults, the likeliest first; what no fault explains; remarks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.conditions import Condition, find
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Exit, Finding, Reference
from specscope.analyze.locate.located import Located, Proof
from specscope.analyze.locate.text import render_lines, render_located
from specscope.analyze.plain import fields, plain
from specscope.analyze.verify.trial import Case, judge
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable, shell_word

if TYPE_CHECKING:
    from specscope.analyze.audit.model.rows import Models
    from specscope.analyze.locate.model.rules import SampledFault


MOST = 2000  # items of either kind that a condition is looked for in
CLEAR = 0.5  # the correlation from which on a condition is told
ALWAYS = 0.9  # of what was tested: where so much fails, a condition would only say what was tested
SHOWN = 3  # conditions
LIKELY = (  # facts on which known causes depend: chance has fewer rules among these than among all
    "the step before",
    "the previous step's path was moved",
    "preemptions of the request",
    "prefill chunks",
    "tokens found in the prefix cache",
    "place in the batch",
    "depth",
    "sibling",
)


@dataclass(frozen=True)
class JudgedCase:
    """What is named and what is located come from the same searches, each made once; they raise UserError."""

    case: Case
    audited: Audit
    options: Options

    @staticmethod
    def of(history: History, source: str, options: Options, progress: Progress = lambda *_: None) -> JudgedCase:
        case = Case(history, judge(history, source=source))
        return JudgedCase(case, audit(history, source, options, progress), options)

    @cached_property
    def models(self) -> Models:
        from specscope.analyze.audit.model.rows import Models

        return Models(self.options)

    @cached_property
    def p(self) -> SampledFault | None:
        """What makes another p of the target's logits."""
        from specscope.analyze.locate.model.rules import search_sampling

        return search_sampling(self.case, self.audited, self.models, drafter=False)

    @cached_property
    def q(self) -> SampledFault | None:
        """What makes another q of the drafter's."""
        from specscope.analyze.locate.model.rules import search_sampling

        return search_sampling(self.case, self.audited, self.models, drafter=True)

    @cached_property
    def verdicts(self) -> list[Located]:
        from specscope.analyze.locate.model.rules import located_verdicts

        return located_verdicts(self.case, self.audited, self.models)


@dataclass(frozen=True)
class Failure:
    """A check that failed, of verify or audit: what any fault that is named must account for."""

    judge: str
    check: Finding

    @property
    def line(self) -> str:
        check = self.check
        verify = f"verify, {check.name}: {check.detail or check.about}"
        return f"audit: {check.sentence}" if self.judge == "audit" else verify

    @property
    def weight(self) -> float:
        """How many failed; a statistical check fails once."""
        return float(max(self.check.failed, 1))


def failures_of(case: Case, audit: Audit | None) -> list[Failure]:
    failures = [Failure("verify", check) for check in case.trial.failed]
    findings = () if audit is None else audit.findings
    return failures + [Failure("audit", one) for one in findings if one.result is CheckResult.FAILED]


def conditions(case: Case, failures: Sequence[Failure]) -> tuple[str, ...]:
    """When it happens: of the failed checks the clearest conditions over recorded facts, a sentence each."""
    clear: list[tuple[Condition, Finding]] = []
    for check in (failure.check for failure in failures):
        found = check.condition or _condition(case, check)
        clear += [(found, check)] if found is not None and found.tests and found.correlation >= CLEAR else []
    sentences: dict[str, str] = {}
    for found, check in sorted(clear, key=lambda pair: -pair[0].score):
        noun = "node" if check.unit == "node" else "step"
        sentences.setdefault(found.text, found.sentence(f"{check.name}: wrong", noun))
    return tuple(sentences.values())[:SHOWN]


def _condition(case: Case, check: Finding) -> Condition | None:
    """The shortest rule over the facts of decode steps, or of tried nodes, that tells those that failed from others."""
    c = case.evidence
    if not len(check.wrong) or not len(c) or check.failed > ALWAYS * check.tested:
        return None
    of_nodes = check.unit == "node"
    every, wrong = (np.flatnonzero(c.tried), check.wrong) if of_nodes else (np.arange(len(c)), _steps(case, check))
    both = np.intersect1d(every, wrong), np.setdiff1d(every, wrong)
    if not all(map(len, both)):
        return None
    bad, good = (part[:: max(1, len(part) // MOST)].tolist() for part in both)
    references = [c.at_node(item) if of_nodes else c.at_step(item) for item in (*bad, *good)]
    differs = [True] * len(bad) + [False] * len(good)
    facts = facts_table(case.history, references)
    steps = [f"{where.request}@{where.index}" for where in references]
    likely = find({name: facts[name] for name in LIKELY if name in facts}, differs, steps)
    return likely if likely is not None and likely.correlation >= CLEAR else find(facts, differs, steps)


def _steps(case: Case, check: Finding) -> Indices:
    """The decode steps in which it failed, as the evidence numbers them."""
    if check.unit == "request step":
        return np.flatnonzero(np.isin([visit.number for visit in case.evidence.visits], check.wrong))
    if check.unit == "parent":
        return np.asarray(np.unique(case.evidence.parents.step[check.wrong]), np.int64)
    return check.wrong if check.unit in ("step", "draw") else check.wrong[:0]


CHANCE = 1e-3 / len(Cause)  # evidence likelier than this by chance names no cause: 1 in 1,000 over all causes
LOG_CHANCE = math.log(CHANCE)
NINE_IN_TEN = 0.9
WHOLE = 0.995  # of a failed check: so much explained counts as all of it
MOSTLY = 0.8  # of what is wrong: what holds less often is no pattern


class Grade(StrEnum):
    """How sure a cause is. Proven: a formula or an operation gives all that differs. Likely: it is net of what it
    spoils nine in ten of it. Possible: less, or a sum, which has no rows."""

    PROVEN = "proven"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True)
class Suspect:
    cause: Cause
    proof: Proof
    for_: tuple[str, ...]  # the evidence for it, in lines
    example: Reference | None = None
    explained: int = 0  # how many of what differs it explains
    of: int = 0  # what differs, as the check or the rerun that names it counts; 0: not by count
    spoiled: int = 0  # of what agrees, how many would differ
    explains: Mapping[str, float] = field(default_factory=dict)  # by check, the share that it explains where not all
    chance: float | None = None  # how often chance gives such evidence; None where chance has no part in it
    rerun: bool = False  # whether something was computed again under this very mistake, and came out as recorded

    @property
    def net(self) -> float:
        """The share of what differs that it explains, less what it spoils."""
        return (self.explained - self.spoiled) / self.of if self.of else 1.0

    @property
    def grade(self) -> Grade:
        if self.proof is Proof.ROWS and self.net >= 1:
            return Grade.PROVEN
        return Grade.LIKELY if self.proof is not Proof.SUM and self.net >= NINE_IN_TEN else Grade.POSSIBLE

    def command(self, source: str) -> str:
        """The command that shows one example; of the whole run where there is none."""
        return f"specscope report {shell_word(source)}" if self.example is None else self.example.command(source)

    def covers(self, check: str) -> float:
        return self.explains.get(check, 1.0) if check in self.cause.follows else 0.0

    def to_dict(self, source: str) -> dict[str, Any]:
        return {
            "cause": self.cause.label,
            **{name: getattr(self.cause, name) for name in ("is_fault", "about", "look")},
            "grade": self.grade.value,
            **{name: plain(getattr(self, name)) for name in ("explained", "of", "spoiled", "chance", "example")},
            "for": list(self.for_),
            "against": [],
            "command": self.command(source),
        }


def counted(check: Finding) -> str:
    """`3 of 41 steps`."""
    return f"{check.failed:,} of {plural(check.tested, check.unit)}"


def said(check: Finding, cause: Cause, proof: Proof = Proof.ROWS, *more: str) -> Suspect:
    """The cause of a failed check in the check's own words."""
    line = f"{check.name}: {check.detail}" + (f", and so in {counted(check)}" if check.failed else "")
    return Suspect(cause, proof, (line, *more), example=check.example)


@dataclass(frozen=True)
class PlacedFault:
    """A fault as it is shown: with its place, where it was located, and its name, where it is known; one of them."""

    place: Located | None
    cause: Suspect | None


@dataclass(frozen=True)
class Diagnosis:
    """The faults of a run, the most likely first; what is wrong and no fault explains; and remarks."""

    suspects: tuple[Suspect, ...]  # faults
    unexplained: tuple[str, ...] = ()  # what verify or audit found wrong and no fault explains
    looked_at: tuple[str, ...] = ()  # what could be run: the capture, verify, audit, ...
    left_out: tuple[str, ...] = field(default=())  # what was asked for and could not be judged, and why
    steps: int = 0  # decode steps that were looked at
    remarks: tuple[Suspect, ...] = ()  # explanations without a fault
    declined: tuple[str, ...] = ()  # what the user told it to leave out
    located: tuple[Located, ...] = ()  # faults with their places, those that explain most first
    ruled_out: tuple[str, ...] = ()  # what agrees, a sentence each, where something was looked for
    when: tuple[str, ...] = ()  # the conditions under which checks fail, the clearest first
    would_see: tuple[str, ...] = ()  # how large an error each check of chance that passed would have seen
    builds: str = ""  # which build recorded the run, and which judged it
    notes: tuple[str, ...] = ()  # how far was looked, where nobody asked for more
    stages: Mapping[str, Any] = field(default_factory=dict)  # what verify, audit and locate found; None: not run

    @property
    def faults(self) -> tuple[Suspect, ...]:
        return tuple(suspect for suspect in self.suspects if suspect.cause.is_fault)

    @property
    def exit(self) -> Exit:
        """1: something is wrong; else 2: something that was asked for could not be judged; else 0."""
        unjudged = bool(self.left_out) or not self.steps
        return Exit.of(wrong=bool(self.located or self.faults or self.unexplained), unjudged=unjudged)

    @property
    def placed(self) -> tuple[PlacedFault, ...]:
        """What is located, each with the likeliest name that fits; then the faults that only have a name.

        Of the causes that lie in a stage where something was located, the others follow from it: they are left out.
        """
        rest, shown, stages = list(self.faults), [], {place.operation.stage for place in self.located}
        for place in self.located:
            name = next((fault for fault in rest if fits(fault.cause, place)), None)
            rest = [fault for fault in rest if fault is not name]
            shown.append(PlacedFault(place, name))
        return (*shown, *(PlacedFault(None, fault) for fault in rest if not stages & fault.cause.places.keys()))

    def to_dict(self, source: str) -> dict[str, Any]:
        return {
            "source": source,
            "exit": int(self.exit),
            **fields(self, "suspects", "remarks", "declined"),
            "suspects": [suspect.to_dict(source) for suspect in self.suspects],
            "remarks": [remark.to_dict(source) for remark in self.remarks],
            "left_out": [*self.left_out, *self.declined],
        }


def fits(cause: Cause, place: Located) -> bool:
    """Whether a cause shows first at such a place."""
    pattern = cause.places.get(place.operation.stage)
    if pattern is None:
        return False
    return not pattern or not place.certain or re.search(pattern, place.operation.name) is not None


# From causes for which there is evidence to faults, in the one order of causes, and to what none of them explains


def settled(suspects: Iterable[Suspect], failures: Sequence[Failure]) -> list[Suspect]:
    """The faults, in the one order of causes: from which a check fails, or under which a rerun gave what was recorded.

    Causes that chance explains are left out, and those that explain nothing which a better one does not.
    """
    known = [suspect for suspect in merged(suspects) if suspect.chance is None or suspect.chance <= CHANCE]
    faults = [fault for fault in known if fault.rerun or _explained_share(fault, failures) > 0]
    left, leading = {failure.check.name: 1.0 for failure in failures}, list[Suspect]()
    for fault in sorted(faults, key=lambda fault: _rank(fault, failures)):
        new = [name for name, rest in left.items() if rest > 1 - WHOLE and fault.covers(name) > 0]
        if new or not leading or not failures:  # what explains nothing new follows from a better one
            leading.append(fault)
        left |= {name: max(0.0, left[name] - fault.covers(name)) for name in new}
    return leading


def _rank(suspect: Suspect, failures: Sequence[Failure]) -> tuple[int, float, int, int]:
    """The order of causes: rows before conditions before sums; then by what they explain of all that failed, less what
    they spoil, and by how many that are; then by the order of a step, in which causes.py lists them: what comes first
    explains what follows."""
    share = _explained_share(suspect, failures) * suspect.net
    return suspect.proof, -round(share, 2), -suspect.of, list(Cause).index(suspect.cause)


def _explained_share(suspect: Suspect, failures: Sequence[Failure]) -> float:
    """How much of all that failed, each check weighted by how many failed, follows from a cause: 0 to 1."""
    whole = sum(failure.weight for failure in failures)
    return sum(failure.weight * suspect.covers(failure.check.name) for failure in failures) / whole if whole else 0.0


def merged(suspects: Iterable[Suspect]) -> list[Suspect]:
    """One suspect for each cause, its surest lines first."""
    best: dict[Cause, Suspect] = {}
    for suspect in sorted(suspects, key=lambda suspect: (suspect.proof, -suspect.net)):
        first = best.setdefault(suspect.cause, suspect)
        if first is suspect:
            continue
        added = {name: min(1.0, first.explains.get(name, 0.0) + share) for name, share in suspect.explains.items()}
        rerun = first.rerun or suspect.rerun  # the mistake itself gives what was recorded: it explains the whole check
        best[suspect.cause] = replace(
            first,
            for_=tuple(dict.fromkeys((*first.for_, *suspect.for_))),
            example=first.example or suspect.example,
            explains={} if rerun else {**first.explains, **added},
            chance=None if first.chance is None or suspect.chance is None else min(first.chance, suspect.chance),
            rerun=rerun,
        )
    return list(best.values())


def unexplained(faults: Sequence[Suspect], failures: Sequence[Failure]) -> list[str]:
    """What failed and follows from no named fault; where a part of it does, how much is left."""
    lines = []
    for failure in failures:
        check, share = failure.check, sum(fault.covers(failure.check.name) for fault in faults)
        rest = check.failed - round(share * check.failed)
        if share <= 0:
            lines.append(failure.line)
        elif share < WHOLE and rest:
            of = plural(check.failed, check.unit or "place")
            lines.append(f"{failure.judge}, {check.name}: {rest:,} of {of} failures are unexplained")
    return lines


IN_FULL = 5  # suspects
UNKNOWN = "Something is wrong, and no known cause fits"
NOT_LOCATED = "Something is wrong, and it was not located"


def render_diagnosis(diagnosis: Diagnosis, source: str, console: Console) -> None:
    """Print a diagnosis. Text of models and users is never read as markup."""
    looked = ", ".join(diagnosis.looked_at[1:])
    steps = plural(diagnosis.steps, "decode step")
    console.print(Text(f"{steps} of {printable(source)}; checked by {looked}", style="dim"))
    if diagnosis.builds:
        console.print(Text(printable(diagnosis.builds), style="dim"))
    for line in (*(f"not judged: {line}" for line in diagnosis.left_out), *diagnosis.declined):
        console.print(Text(f"! {printable(line)}", style="yellow"), soft_wrap=True)
    faults = diagnosis.placed
    for number, fault in enumerate(faults[:IN_FULL], 1):
        _fault(number, fault, source, console)
    shown = {id(fault.cause) for fault in faults[:IN_FULL]}
    if others := [fault.cause.label for fault in diagnosis.faults if id(fault) not in shown]:
        console.print(Text(f"\nless likely: {', '.join(others)}", style="dim"))
    render_lines("When it happens", diagnosis.when, console)
    if diagnosis.unexplained:
        title = "Also wrong, and unexplained" if faults else NOT_LOCATED if diagnosis.ruled_out else UNKNOWN
        console.print(Text(f"\n{title}", style="bold red"))
        for line in diagnosis.unexplained:
            console.print(Padding.indent(Text(printable(line)), 2))
    render_lines("Ruled out", diagnosis.ruled_out, console)
    if diagnosis.exit is not Exit.INCONSISTENT:
        title = "Statistical checks miss biases smaller than these"
        render_lines(title, diagnosis.would_see, console)
    if diagnosis.remarks:
        console.print(Text("\nRemarks", style="bold cyan"))
    for remark in diagnosis.remarks:
        head = Text(f"- {remark.cause.about}", style="cyan")
        console.print(Padding.indent(head.append(f"  {remark.cause.label}", style="dim"), 2))
        _evidence(remark, "", console)
    for line in diagnosis.notes:
        console.print(Text(f"\nnote: {printable(line)}", style="dim"))
    console.print(_verdict(diagnosis))


def _fault(number: int, fault: PlacedFault, source: str, console: Console) -> None:
    """A fault: its place, or the evidence for its cause, and the command that shows an example."""
    place, cause = fault.place, fault.cause
    head = Text(f"\n{number}. {printable(_title(fault))}", style="bold red")
    if cause is not None:  # its grade, with the counts where it has some
        sure = f"{cause.grade.value}: {cause.explained:,} of {cause.of:,}" if cause.of else cause.grade.value
        head.append(f" ({cause.cause.label}; {sure})", style="dim")
    console.print(head)
    if place is not None:
        render_located(place, source, console)
    if cause is not None:
        _evidence(cause, "" if place is None else place.sentence, console)
        console.print(Padding.indent(Text(f"Check {cause.cause.look}."), 3))
        if place is None or place.where is None:
            console.print(Padding.indent(Text(cause.command(source), style="dim"), 3), soft_wrap=True)


def _title(fault: PlacedFault) -> str:
    names = [] if fault.cause is None else [fault.cause.cause.about]
    return ": ".join(names + ([] if fault.place is None else [fault.place.operation.words]))


def _evidence(suspect: Suspect, said: str, console: Console) -> None:
    """The lines for a cause, but for what was said with its place."""
    chance = max(suspect.chance or 0, 1e-300)
    more = [f"chance alone would give this with a probability below {chance:.2g}"] * (suspect.chance is not None)
    for line in (*suspect.for_, *more):
        if line != said:
            console.print(Padding.indent(Text("+ ", style="green").append(printable(line), style="default"), 3))


def _verdict(diagnosis: Diagnosis) -> Text:
    """The last line: what is wrong, or what was covered and holds."""
    if faults := diagnosis.placed:
        first, title = faults[0], printable(_title(faults[0]))
        sure = "Most likely" if first.place is None else "Located" if first.place.certain else "Located as a region"
        is_alone = len(faults) == 1 and first.place is None
        proven = is_alone and first.cause is not None and first.cause.grade is Grade.PROVEN
        return Text(f"\n{title[0].upper()}{title[1:]}." if proven else f"\n{sure}: {title}.", style="bold red")
    if diagnosis.unexplained:
        return Text("\nThe run is not consistent, and no cause is named.", style="bold red")
    if not diagnosis.steps:
        return Text("\nNothing to judge: the capture has no decode step.", style="bold yellow")
    covered = f"No fault found by {', '.join(diagnosis.looked_at[1:])} over {plural(diagnosis.steps, 'decode step')}"
    if diagnosis.left_out or diagnosis.declined:
        return Text(f"\n{covered}; what could not be judged is named above.", style="bold yellow")
    return Text(f"\n{covered}.", style="bold green")
