"""An audit: every recorded decision of a run held against the models themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from specscope.analyze.audit.contexts import Contexts, Judged, contexts_of
from specscope.analyze.audit.ngram import judge_ngram
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.audit.shelf import Shelf
from specscope.analyze.audit.suffix import judge_text
from specscope.analyze.audit.tally import Finding, Tally, skipped
from specscope.analyze.findings import Check, Exit, Reference, Result
from specscope.errors import UserError
from specscope.trace.history import History
from specscope.trace.method import model_part, text_part
from specscope.trace.plan import DynamicPlan, TreePlan, parse_plan
from specscope.trace.records import RunInfo
from specscope.trace.wording import plural

TARGET = {
    "target p": ("p of every drafted token is the model's", "node"),
    "target raw p": ("before temperature and rules, p of every drafted token is the model's", "node"),
    "target top tokens": ("the target's likeliest tokens have the model's p", "node"),
    "final token": ("a greedy request's final token is the model's choice", "step"),
    "final p": ("the final token's p is the model's", "step"),
}
DRAFTER = {
    "drafter p": ("the drafter's probability of every token is that of the drafter run afresh", "node"),
    "drafter tokens": ("the drafted tokens are the likeliest of the drafter run afresh", "node"),
    "drafter top tokens": ("the drafter's likeliest tokens have the p of the drafter run afresh", "node"),
}
TREE = ("drafter tree", "the tree is what the text gives")
CONTEXT = ("context", "each step starts from the last committed token")
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
    judge: str = "plain transformers in float32"
    notes: tuple[str, ...] = field(default=())

    @property
    def exit(self) -> Exit:
        """What the command exits with."""
        results = {finding.check.result for finding in self.findings}
        if Result.FAILED in results:
            return Exit.INCONSISTENT
        return Exit.CONSISTENT if Result.PASSED in results else Exit.NOT_JUDGED

    def finding(self, name: str) -> Finding | None:
        """The one of that name."""
        return next((one for one in self.findings if one.check.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for --json."""
        names = (
            "source",
            "target",
            "draft_model",
            "dtype",
            "steps",
            "audited",
            "nodes",
            "slack",
            "draft_slack",
            "seconds",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "exit": int(self.exit),
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }


def audit(history: History, source: str, options: Options, progress: Progress = lambda *_: None) -> Audit:
    """Judge a capture by its models. `source`: where it came from. Raises UserError where nothing can be judged."""
    began = time.perf_counter()
    run = history.run
    if run is None:
        raise UserError(f"{source} does not say what ran (its header is missing): it cannot be audited")
    places, total = chosen_places(history, options.sample)
    plans, notes = _plans(history, places)
    steps = sum(len(one.steps) for one in plans)
    if not steps:
        raise UserError(f"{source} holds no decode step whose whole context is known: there is nothing to audit")
    from specscope.analyze.audit.model.run import judge_draft_model, judge_head, judge_target

    target, drafter = _tallies(history, TARGET), _tallies(history, DRAFTER)
    bar = _Bar(progress, steps)
    head = options.draft if model_part(run.drafter) == "eagle" else None
    bar.begin("target")
    eos = run.eos_tokens
    slack, features = judge_target(options.target, run.dtype, options.device, plans, target, bar.done, head, eos)
    draft_slack, drafted = 0.0, list[Finding]()
    plan = parse_plan(run.tree) if text_part(run.drafter) else None
    top = plan.top if isinstance(plan, DynamicPlan) else 0
    bar.begin("drafter")
    if features is not None:
        draft_slack = judge_head(features, run.dtype, plans, drafter, bar.done, top)
    elif model_part(run.drafter) == "draft_model" and options.draft is not None:
        draft_slack = judge_draft_model(options.draft, run.dtype, options.device, plans, drafter, bar.done, top, eos)
    bar.begin("looking for a pattern in the differences")
    if options.draft is not None:
        drafted = _findings(history, drafter)
    if plan is not None and (run.drafter == "ngram" or isinstance(plan, DynamicPlan)):
        drafted.append(_text(history, run, plan, plans))
    elif options.draft is None and run.drafter != "none":
        drafted = [
            skipped("drafter p", DRAFTER["drafter p"][0], options.why_no_draft or f"the drafter is {run.drafter}")
        ]
    return Audit(
        source=source,
        target=options.target.name,
        draft_model=options.draft.name if options.draft else "",
        dtype=run.dtype,
        steps=total,
        audited=steps,
        nodes=sum(len(step.part.tree) for one in plans for step in one.steps),
        slack=slack,
        draft_slack=draft_slack,
        findings=(_context(plans), *_findings(history, target), *drafted),
        notes=tuple(notes),
        seconds=time.perf_counter() - began,
    )


def chosen_places(history: History, sample: int | None) -> tuple[dict[str, list[int]], int]:
    """The places of the steps to judge, by request: all decode steps, or `sample` of them; and how many there are."""
    every = [
        (request.id, place)
        for request in history.requests.values()
        for place, part in enumerate(request.steps)
        if part.verdict is not None
    ]
    count = len(every) if sample is None else min(sample, len(every))
    places: dict[str, list[int]] = {}
    for at in range(count):
        name, place = every[at * len(every) // count]
        places.setdefault(name, []).append(place)
    return places, len(every)


def step_numbers(history: History, name: str) -> list[int]:
    """The engine's step number of each of a request's steps."""
    return [history.steps[at].step for at in history.requests[name].engine_steps]


def _plans(history: History, places: dict[str, list[int]]) -> tuple[list[Contexts], list[str]]:
    """What is judged, request by request; remarks."""
    found = [contexts_of(history.requests[name], some, step_numbers(history, name)) for name, some in places.items()]
    known = [one for one in found if one is not None]
    judged = [one for one in known if one.params.structured_outputs is None or _HAS_GRAMMARS]
    without, formed = len(found) - len(known), len(known) - len(judged)
    notes = []
    if without:
        notes.append(f"{plural(without, 'request')} left out: the prompt, or the first steps, are not in the capture")
    if formed:
        notes.append(f"{plural(formed, 'request')} with structured output left out: pip install 'specscope[serve]'")
    return judged, notes


def _context(plans: Sequence[Contexts]) -> Finding:
    """Whether each step's root is the last token that was committed."""
    unknown = [where for one in plans for where in one.unknown]
    tested = len(unknown) + sum(len(one.steps) for one in plans)
    first: Reference | None = unknown[0] if unknown else None
    detail = "its position is not that of the last committed token: it cannot be judged" if unknown else ""
    result = Result.FAILED if unknown else Result.PASSED
    return Finding(Check(CONTEXT[0], result, CONTEXT[1], tested, len(unknown), first, detail), "step")


def _text(history: History, run: RunInfo, plan: TreePlan, plans: Sequence[Contexts]) -> Finding:
    """The trees of drafters that look into the text, drawn again."""
    tally = Tally(*TREE, "step", history.vocabulary.show)
    whole = [replace(one, steps=[step for step in one.steps if not _is_pruned(step)]) for one in plans]
    left_out = sum(len(one.steps) for one in plans) - sum(len(one.steps) for one in whole)
    plans = whole
    if isinstance(plan, DynamicPlan):
        shared = int(run.speculation.get("suffix_shared", 0))
        shelf = Shelf.of(history, shared) if shared else None
        remark = judge_text(plans, run.drafter, plan, run.max_context, tally, shelf)
    else:
        remark = judge_ngram(plans, plan, run.max_context, tally, run.speculation)
    tally.about = f"{TREE[1]} with {remark}"
    if left_out:
        tally.about += f"; {plural(left_out, 'step')} left out, whose drafts a form pruned"
    return tally.finding(history)


def _is_pruned(step: Judged) -> bool:
    return step.part.form is not None and step.part.form.pruned > 0


def _tallies(history: History, names: dict[str, tuple[str, str]]) -> dict[str, Tally]:
    return {name: Tally(name, about, noun, history.vocabulary.show) for name, (about, noun) in names.items()}


def _findings(history: History, tallies: dict[str, Tally]) -> list[Finding]:
    """Of what was compared at all."""
    return [tally.finding(history) for tally in tallies.values() if tally.items]


class _Bar:
    """Counts steps for whoever draws the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total = progress, total
        self.what, self.count = "", 0

    def begin(self, what: str) -> None:
        self.what, self.count = what, 0
        self.progress(what, 0, self.total)

    def done(self, steps: int) -> None:
        self.count += steps
        self.progress(self.what, self.count, self.total)
