"""An audit: every recorded decision of a run held against the models themselves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specscope.analyze.audit.contexts import Contexts, contexts_of
from specscope.analyze.audit.lookup import judge_lookups
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.audit.tally import (
    CONTEXT,
    DRAFTER,
    EMBEDDING,
    NEAR_TIE,
    TARGET,
    TREE,
    Tallies,
    Tally,
    skipped,
    span,
)
from specscope.analyze.findings import CheckResult, Exit, Finding
from specscope.analyze.text import VERDICT, render_page
from specscope.analyze.verify.trial import render_check
from specscope.errors import UserError
from specscope.plans.kinds import model_part, text_part
from specscope.plans.plan import DynamicPlan, TreePlan, read_plan
from specscope.trace.checked import short
from specscope.trace.history.history import History
from specscope.trace.history.wording import plural
from specscope.trace.record.params import RELAXED, untold_limits
from specscope.trace.record.records import RunInfo
from specscope.trace.record.vocabulary import printable

if TYPE_CHECKING:
    from specscope.analyze.audit.model.run import Passes

# The outcome of an audit, in sentences that say what they cover.


def verdict(findings: Sequence[Finding], steps: int, unjudged: Sequence[str]) -> str:
    """`steps`: those that were audited. `unjudged`: what was asked for and could not be judged, a sentence each."""
    parts: dict[str, list[Finding]] = {}
    for finding in findings:
        part = "drafter" if of_drafter(finding.name) else "context" if finding.name == CONTEXT[0] else "target"
        parts.setdefault(part, []).append(finding)
    sentences = [_sentence(part, of_part, steps) for part, of_part in parts.items()]
    notes = [one.note for one in parts.get("drafter", []) if one.result is CheckResult.SKIPPED]
    is_said = any("drafter" in sentence for sentence in unjudged)
    skipped = [] if is_said else [f"The drafter was not judged: {note}." for note in dict.fromkeys(notes)]
    return " ".join(filter(None, (*sentences, *skipped, *unjudged))) or "Nothing could be judged."


def of_drafter(name: str) -> bool:
    return name in {*DRAFTER, TREE[0], EMBEDDING[0]}


def _sentence(part: str, findings: Sequence[Finding], steps: int) -> str:
    tested = [finding for finding in findings if finding.result is not CheckResult.SKIPPED]
    differ = [(each.name, f"{each.failed:,} of {plural(each.tested, each.unit)}") for each in tested if each.failed]
    if part == "context":
        return "".join(f"{count} contradict what was committed before." for _, count in differ)
    if differ:
        return f"The {part} does not agree: {'; '.join(f'{name} differs at {count}' for name, count in differ)}."
    nodes = max((finding.tested for finding in tested if finding.unit == "node"), default=0)
    most = plural(max((finding.tested for finding in tested), default=0), "step")
    where = f"{plural(nodes, 'node')} of {plural(steps, 'step')}" if nodes else most
    return f"The {part} agrees at {where}." if tested else ""


HALF = ("bfloat16", "float16")
GIVES = {"drafter tokens": "token id that the drafter would choose"}  # a model's answer as a fact for conditions
_HAS_GRAMMARS = find_spec("xgrammar") is not None


@dataclass(frozen=True)
class Audit:
    """What an audit found. Filled by `audit`."""

    source: str
    target: str
    draft_model: str
    dtype: str  # the capture's; the models judge in float32
    steps: int  # decode steps in the capture
    audited: int
    nodes: int
    slack: float  # how far rounding may move the target's log odds
    draft_slack: float  # the drafter's; 0 where it is no model
    seconds: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()  # what was asked for and could not be judged: a sentence each, with the reason
    unseen: str = ""  # what the capture's dtype hides, in a sentence; "" where it hid nothing
    doubts: Mapping[tuple[str, int], int] = field(default_factory=dict)  # by step: figures that rounding just explains

    @property
    def exit(self) -> Exit:
        results = {finding.result for finding in self.findings}
        unjudged = bool(self.unjudged) or CheckResult.PASSED not in results
        return Exit.of(wrong=CheckResult.FAILED in results, unjudged=unjudged)

    def finding(self, name: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        names = ("source", "target", "draft_model", "dtype", "steps", "audited", "nodes")
        return {
            **{name: getattr(self, name) for name in (*names, "slack", "draft_slack", "seconds", "unseen")},
            "exit": int(self.exit),
            "warnings": list(self.notes),
            "verdict": verdict(self.findings, self.audited, self.unjudged),
            "unjudged": list(self.unjudged),
            "findings": [finding.compared() for finding in self.findings],
        }


def audit(history: History, source: str, options: Options, progress: Progress = lambda *_: None) -> Audit:
    """Judge a capture by its models. `source`: where it came from. Raises UserError where nothing can be judged."""
    from specscope.analyze.audit.model.run import Passes

    began = time.perf_counter()
    run = history.run
    if run is None:
        raise UserError(f"{source} does not say what ran (its header is missing): cannot be audited")
    plans, left, total = _plans(history, options.sample)
    if not any(contexts.steps or contexts.unknown for contexts in plans):
        raise UserError(f"{source} holds no decode step with a complete context: nothing to audit")
    plan = None
    if text_part(run.drafter) and not run.ways.looks_up_in_all and (plan := read_plan(run.tree)) is None:
        tree = short(run.tree)  # that cannot be read: the models judge
        left.append(f"The drafter's lookups were not judged: the capture's tree cannot be read ({tree}).")
    has_tails = run.dtype in HALF
    tallies = {
        name: Tally(name, about, noun, history.vocabulary.show, has_tails=has_tails, gives=GIVES.get(name, ""))
        for name, (about, noun) in (TARGET | DRAFTER).items()
    }
    passes = Passes(run, options, plans, tallies, plan.top if isinstance(plan, DynamicPlan) else 0, progress, left)
    passes.judge()
    steps = sum(len(contexts.steps) for contexts in plans)
    progress("looking for a pattern in the differences", 0, steps)
    findings = [_context(plans), *(tally.finding(history) for tally in tallies.values() if tally.items)]
    if passes.embedding is not None:
        findings.append(passes.embedding)
    is_drafted = any(of_drafter(finding.name) for finding in findings)
    findings += _text(history, run, plan, passes, is_judged=is_drafted)
    return Audit(
        source=source,
        target=options.target.name,
        draft_model=options.draft.name if options.draft else "",
        dtype=run.dtype,
        steps=total,
        audited=steps,
        nodes=sum(len(step.part.tree) for contexts in plans for step in contexts.steps),
        slack=passes.slack,
        draft_slack=passes.draft_slack,
        findings=tuple(findings),
        notes=(*options.notes, *_limited(plans)),
        unjudged=tuple(left),
        unseen=_unseen(passes, tallies) if has_tails else "",
        doubts=sum((tally.doubts for tally in tallies.values()), Counter()),
        seconds=time.perf_counter() - began,
    )


def _unseen(passes: Passes, tallies: Tallies) -> str:
    """How large an error rounding hides, and of how many figures it explains what they differ by."""
    hidden = sum(tally.hidden + tally.left[NEAR_TIE] for tally in tallies.values())
    tested = plural(sum(len(tally.items) + tally.left[NEAR_TIE] for tally in tallies.values()), "figure")
    p, q = (span(0.5, slack)[1] - 0.5 for slack in (passes.slack, passes.draft_slack))
    drafters = f" (the drafter's up to {q:.2g})" if passes.draft_slack else ""
    error = f"an error of up to {p:.2g} in a p of 0.5{drafters} is invisible in {passes.run.dtype}"
    seen = f"rounding explains how far {hidden:,} of {tested} differ from the models'"
    return f"{error}: {seen}; to see such errors, record with --dtype float32" if hidden else ""


def _text(history: History, run: RunInfo, plan: TreePlan | None, passes: Passes, *, is_judged: bool) -> list[Finding]:
    """The finding on what was looked up in a text, and on a drafter that nothing judges. `is_judged`: one does."""
    of_text, why = bool(text_part(run.drafter)), "" if is_judged else passes.options.why_no_draft
    if run.speculation.get("suffix_shared"):
        why = "it also looked in the texts of other requests"
        passes.unjudged.append(f"The drafter was not judged: {why}.")
        return [skipped(*TREE, why)]
    if plan is not None and (run.drafter == "ngram" or isinstance(plan, DynamicPlan)):
        return [_looked_up(history, run, plan, passes.plans)]
    if run.drafter != "none" and not model_part(run.drafter):
        why = "the capture names no tree to judge its lookups by" if of_text else ""
        if run.ways.looks_up_in_all and of_text:
            why = "this engine looks up drafts in the texts of all its requests, and the capture lacks some"
        asked = ", which was only asked again" if passes.options.own else ""
        why = why or f"there is no judge for the drafter {run.drafter}{asked}"
        if run.is_ours and not of_text and not run.drafter.startswith("synthetic"):
            passes.unjudged.append(f"The drafter was not judged: {why}.")
    return [skipped("draft p", DRAFTER["draft p"][0], why)] if why else []


def _plans(history: History, sample: int | None) -> tuple[list[Contexts], list[str], int]:
    """What is judged of all decode steps, or of `sample` of them, request by request, a sentence for each kind of
    request left out, and how many steps there are.
    """
    parts = ((name, i, part) for name, one in history.requests.items() for i, part in enumerate(one.steps))
    every = [(name, i) for name, i, part in parts if part.verdict is not None]
    count = len(every) if sample is None else min(sample, len(every))
    places = dict[str, list[int]]()
    for name, place in (every[index * len(every) // count] for index in range(count)):
        places.setdefault(name, []).append(place)
    plans = [contexts_of(history, name, some) for name, some in places.items()]
    known = [contexts for contexts in plans if contexts is not None]
    judged, left = [one for one in known if one.params.structured_outputs is None or _HAS_GRAMMARS], list[str]()
    if without := len(plans) - len(known):
        left.append(f"{plural(without, 'request')} left out: their prompt or first steps are not in the capture.")
    if formed := len(known) - len(judged):
        left.append(f"{plural(formed, 'request')} with structured output left out: pip install 'specscope[serve]'.")
    return judged, left, len(every)


def _limited(plans: Sequence[Contexts]) -> list[str]:
    """A note on requests whose p is not judged, because a check does not apply to them."""
    judged, notes = [contexts for contexts in plans if contexts.steps], []
    if relaxed := sum(RELAXED in contexts.limits for contexts in judged):
        why = "this engine by design takes penalties on drafted rows from tokens committed some steps earlier"
        notes.append(f"{plural(relaxed, 'request')}: the target's p was not compared, because {why}")
    if limited := [contexts for contexts in judged if {*contexts.limits} - {RELAXED}]:
        names = ", ".join(dict.fromkeys(name for contexts in limited for name in contexts.limits if name != RELAXED))
        both = any(untold_limits(contexts.drafter_params) for contexts in limited)
        what = "the target's p and the drafter's were" if both else "the target's p was"
        why = f"because {names} limit the tokens in a way that is not in the capture"
        notes.append(f"{plural(len(limited), 'request')}: {what} not compared, {why}")
    return notes


def _context(plans: Sequence[Contexts]) -> Finding:
    """Whether each step's root is the last committed token, so that a model can be fed the context before it."""
    unknown = [step for contexts in plans for step in contexts.unknown]
    tested = len(unknown) + sum(len(contexts.steps) for contexts in plans)
    result = CheckResult.FAILED if unknown else CheckResult.PASSED
    first, detail = (unknown[0][0], f"{unknown[0][1]}: it cannot be judged") if unknown else (None, "")
    return Finding(CONTEXT[0], result, CONTEXT[1], tested, len(unknown), first, detail, unit="step")


def _looked_up(history: History, run: RunInfo, plan: TreePlan, plans: Sequence[Contexts]) -> Finding:
    """The finding on trees from text lookup: each is built again from the text, where the engine drafted at all."""
    tally, off = Tally(*TREE, "step", history.vocabulary.show), {r.step for r in history.steps if not r.speculation}
    steps = [(contexts, step) for contexts in plans for step in contexts.steps if step.where.step not in off]
    whole = [each for each in steps if each[1].part.form is None or not each[1].part.form.pruned]
    tally.about += f" with {judge_lookups(whole, run, plan, tally)}"
    if pruned := len(steps) - len(whole):
        tally.about += f"; {plural(pruned, 'step')} left out: structured output pruned their drafts"
    return tally.finding(history)


def render_audit(audit: Audit, console: Console) -> None:
    """Print an audit, each finding as verify prints it. Text of models and users is never read as markup."""
    render_page(console, _header(audit), audit.notes, ())
    console.print()
    for finding in audit.findings:
        render_check(finding, audit.source, console)
    if audit.unseen:
        console.print(Text(f"\nnote: {printable(audit.unseen)}", style="dim"))
    sentence = printable(verdict(audit.findings, audit.audited, audit.unjudged))
    console.print(Text(f"\n{sentence}", style=VERDICT[audit.exit]))


def _header(audit: Audit) -> tuple[tuple[str, str], ...]:
    drafted = any(of_drafter(finding.name) and finding.tested for finding in audit.findings)
    models = audit.target + (f", drafter {audit.draft_model}" if audit.draft_model and drafted else "")
    steps = plural(audit.steps, "decode step")
    audited = steps if audit.audited == audit.steps else f"{audit.audited:,} of {steps}"
    drafters = f", {audit.draft_slack:.2g} in the drafter's" if audit.draft_slack else ""
    return (
        ("capture", audit.source),
        ("judged by", f"{models}, plain transformers in float32"),
        ("audited", f"{audited}, {plural(audit.nodes, 'node')} in {audit.seconds:.1f} s"),
        ("rounding", f"{audit.dtype}: up to {audit.slack:.2g} in the target's log odds{drafters}"),
    )
