"""The figures of a run: a History in, plain dataclasses out. Text, page and JSON all show what is in these.

Every acceptance figure is trace/history/stats.py's. Here they are put together: pooled over all steps (a long request
counts more) and as the mean over requests (every request counts alike), by depth, by phase, by label, by request.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from specscope.analyze.figures import Figures, Means
from specscope.analyze.levels import Levels, levels
from specscope.analyze.plain import fields, plain
from specscope.analyze.questions.answers import Answers, answer
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.interval import cells, counts, definitions, missing_text, notes
from specscope.trace.history.loops import LONGEST, TIMES, TOLD, Loops, find_loops, together
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import Undrafted, shares
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.notes import SOURCES
from specscope.trace.record.privacy import NO_TOKEN, told_ids
from specscope.trace.record.records import PHASES, RequestInfo, RequestStep, RunInfo, StepRecord
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary

# What a reader of a report's figures must know: what is missing, forced, lossy or worked out.


def loop_notes(loops: Loops) -> list[str]:
    """Notes on text that loops, where it is enough to change what an acceptance length means."""
    if loops.share is None or loops.share < TOLD:
        return []
    tau = "nothing else was drafted"
    if loops.rest.tau is not None:
        tau = f"without its steps τ is {loops.rest.tau:.2f} over {plural(loops.rest.drafts, 'draft')}"
    return [
        f"{loops.share:.1%} of {plural(loops.tokens, 'output token')} lie in loops (a cycle of up to {LONGEST} tokens "
        f"that comes {TIMES} times or more in a row): acceptance on such text says little of the drafter; {tau}"
    ]


def notes_of(history: History, ended: Sequence[bool], missing: Sequence[int]) -> list[str]:
    """Notes on a capture. `ended`, `missing`: of each request, whether it ended, and its tokens in missing steps."""
    notes = _aggregate_notes([step.aggregate for step in history.steps if step.aggregate is not None])
    if history.without_steps:
        notes.append(history.figures_note)
    if history.run is None:
        notes.append("the run's header is missing: its model and settings are unknown")
    if history.lost and not history.in_part:  # a reader says what its file lacks
        notes.append(f"{plural(history.lost, 'record')} missing: counts are too low, and ratios are over what is left")
    if len(history.branches) > 1:
        notes.append(
            f"the run was edited and has {len(history.branches)} branches: these figures are of branch "
            f"{history.branch} (--branch N for another)"
        )
    open_ended = len(ended) - sum(ended)
    if open_ended:
        notes.append(
            f"{open_ended} of {plural(len(ended), 'request')} did not end: still running, or the capture was cut off"
        )
    parts = [part for step in history.steps for part in step.requests if part.is_judged]
    forced = sum(len(part.told("verdict", "forced")) > 0 for part in parts)
    if forced:
        notes.append(
            f"{forced} of {plural(len(parts), 'verdict')} forced (a synthetic drafter, or what-if): their "
            "acceptance measures nothing, and the output is not the target's"
        )
    notes += _seed_notes([request.info for request in history.requests.values() if request.info is not None])
    notes += _method_notes(parts)
    notes += _form_notes([part for part in parts if part.form is not None])
    if any(missing):
        of = plural(sum(map(bool, missing)), "request")
        notes.append(f"{plural(sum(missing), 'output token')} of {of} in steps that are missing")
    return notes


def _seed_notes(infos: Sequence[RequestInfo]) -> list[str]:
    """A note on sampled requests that have their seed in common: they toss the same coins."""
    sampled = [info for info in infos if info.params.is_known and not info.params.greedy]
    seeds = Counter(info.params.seed for info in sampled if info.labels.get("seed") != "none")
    shared = sum(count for count in seeds.values() if count > 1)
    if not shared:
        return []
    return [
        f"{shared} of {plural(len(sampled), 'sampled request')} share their seed with another (it may have been asked "
        "for): they toss the same coins at the same positions, and are no independent samples"
    ]


def _method_notes(parts: Sequence[RequestStep]) -> list[str]:
    """Notes on rules that are not lossless, and on drafts that were left out of verification."""
    lossy = [part for part in parts if part.lossy]
    names = ", ".join(sorted({part.rule for part in lossy}))
    notes = []
    if lossy:
        notes.append(
            f"{len(lossy)} of {plural(len(parts), 'verdict')} under a rule that is not lossless ({names}): the output "
            "is not distributed as the target's own"
        )
    notes += _source_notes(parts)
    unverified = sum(part.method.unverified for part in parts if part.method is not None)
    if unverified:
        notes.append(f"{plural(unverified, 'draft')} not verified, beyond a budget: the figures are of those that were")
    return notes


def _form_notes(parts: Sequence[RequestStep]) -> list[str]:
    """Notes on the tokens that forms (structured output, min_tokens) removed."""
    if not parts:
        return []
    of = plural(len({part.request for part in parts}), "request")
    removed = [part.form.removed for part in parts if part.form is not None and len(part.form.removed)]
    mass = (
        f", on average {100 * float(np.mean(np.concatenate(removed))):.1f} % of the target's own mass"
        if removed
        else ""
    )
    pruned = sum(part.form.pruned for part in parts if part.form is not None)
    drafts = f"; {plural(pruned, 'draft')} pruned before verification" if pruned else ""
    return [
        f"structured output or min_tokens shaped {plural(len(parts), 'step')} of {of}: it removed tokens{mass}{drafts}"
    ]


def _aggregate_notes(aggregates: Sequence[Aggregate]) -> list[str]:
    """Notes on what an engine does not report, and on what was worked out."""
    notes = list(dict.fromkeys(missing_text(aggregate) for aggregate in aggregates))
    notes += dict.fromkeys(line for aggregate in aggregates for line in definitions(aggregate))
    rounded, resets = (
        sum(aggregate.rounded for aggregate in aggregates),
        sum(aggregate.reset for aggregate in aggregates),
    )
    if rounded:
        notes.append(
            f"{rounded} of {plural(len(aggregates), 'interval')} with drafts worked out from rounded rates: the "
            "nearest count that fits (~)"
        )
    if resets:
        notes.append(f"{plural(resets, 'restart')} of the engine: its counters began again")
    return notes


def _source_notes(parts: Sequence[RequestStep]) -> list[str]:
    """Where text lookup drafts beside a model: how much of what each of them drafted was accepted."""
    drafted, accepted = Counter[str](), Counter[str]()
    for part in parts:
        if part.method is not None and len(part.method.source) and part.verdict is not None:
            drafted.update(SOURCES[source] for source in part.method.source.tolist())
            accepted.update(part.method.source_of(node) for node in part.verdict.path.tolist())
    texts = [
        f"{name} {accepted[name]:,} of {drafted[name]:,} ({accepted[name] / drafted[name]:.0%})"
        for name in SOURCES
        if drafted[name]
    ]
    return [f"accepted nodes by source: {', '.join(texts)}"] if texts else []


@dataclass(frozen=True)
class PhaseTime:
    """Time in one phase over the engine steps that had it."""

    name: str
    steps: int
    median_ms: float
    total_s: float
    share: float | None  # of the time in all phases


@dataclass(frozen=True)
class EngineFigures:
    """What the engine did as a whole."""

    steps: int
    wall_s: float  # from the first step's start to the last one's end, pauses included
    stepping_s: float  # inside steps
    tokens_per_s: float | None  # output tokens over wall_s
    tokens_per_stepping_s: float | None
    peak_running: int | None
    peak_waiting: int | None
    peak_kv_usage: float | None  # None where the file does not tell; share of the KV blocks
    preempted: int | None  # None where the own spans of steps are missing
    queried: int  # tokens looked for in the prefix cache; 0 without one
    found: int  # and found there
    speculation_off: dict[str, int]  # steps without speculation, by the reason
    ahead: int  # steps that were accounted for while the next one ran: --async-scheduling
    overlap_s: float  # of that accounting, while the next step ran


@dataclass(frozen=True)
class IntervalReport:
    """An interval, or a request, of an engine that reports counts only. What it does not report is None or empty."""

    step: int
    start_ns: int
    end_ns: int
    per_position: list[float | None]
    mean_acceptance_length: float | None  # from the counts, else as it was told
    told: dict[str, Any]  # Aggregate's fields
    cells: dict[str, str]  # as tables show it
    notes: list[str]  # what else is to be said of it

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return fields(self, "cells", "notes")


@dataclass(frozen=True)
class RequestReport:
    """One request. Text is None where the capture holds none."""

    id: str
    title: str  # the last chat message, "" where the prompt was no conversation
    prompt: str | None
    prompt_token_ids: list[int]
    output: str | None
    token_ids: list[int]  # of the output
    origins: list[str]  # of each output token: accepted, bonus, recovered, target
    pieces: list[str]  # the characters that each output token completed
    missing_tokens: int  # output tokens that no step in the history accounts for
    figures: Figures
    loops: Loops
    labels: dict[str, str]
    params: dict[str, Any] | None
    finish: str | None  # the reason; None while it runs, or where the end was cut off
    stop: str
    error: str
    preempted: int | None  # how many times; None where it is not known of the run
    found: int  # tokens that it found in the prefix cache, after a preemption again
    queued_s: float | None  # from arrival to admission
    total_s: float | None  # from arrival to the end

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return fields(self, "figures") | {"acceptance": self.figures.to_dict()}


@dataclass(frozen=True)
class LabelGroup:
    """The requests that share one value of a label; value None: those without the label."""

    value: str | None
    requests: int
    figures: Figures
    means: Means

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "value": self.value,
            "requests": self.requests,
            "pooled": self.figures.to_dict(),
            "per_request_mean": self.means.to_dict(),
        }


@dataclass(frozen=True)
class Report:
    """Everything `specscope report` shows."""

    source: str
    run: dict[str, Any] | None  # RunInfo's fields
    warnings: list[str]
    lost: int  # records known to be missing
    engine: EngineFigures
    pooled: Figures
    means: Means
    loops: Loops
    adaptive: bool  # trees follow step costs
    undrafted: Counter[Undrafted]  # decode steps that drafted nothing, by the reason
    phases: list[PhaseTime]
    groups: dict[str, list[LabelGroup]]  # by label, worst acceptance first
    requests: list[RequestReport] = field(default_factory=list)  # worst acceptance first
    other_params: int = 0  # requests whose params, the seed aside, are not the run's
    intervals: list[IntervalReport] = field(default_factory=list)  # of an engine that tells counts only
    levels: Levels = field(default_factory=Levels)  # likewise
    answers: Answers | None = None  # over many steps; None where there are no steps, counts only
    vocabulary: Vocabulary = field(default_factory=Vocabulary)  # of the tokens in the answers

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: all that text and page show, and every request in full."""
        told = ("source", "run", "warnings", "lost", "engine", "pooled", "adaptive", "phases", "groups", "requests")
        looped = {"share": self.means.looped, "mean_acceptance_length_without": self.means.tau_without}
        return {
            **({"intervals": plain(self.intervals), "levels": plain(self.levels)} if self.intervals else {}),
            **{name: plain(getattr(self, name)) for name in told},
            "per_request_mean": plain(self.means),
            "loops": plain(self.loops) | {"per_request_mean": looped},
            "undrafted": [
                {"reason": reason.value, "steps": self.undrafted[reason], "share": share}
                for reason, share in shares(self.undrafted)
            ],
            "positions": plain(self.pooled.positions),
            "request_count": len(self.requests),
            "requests_with_other_params": self.other_params,
            **({} if self.answers is None else {"answers": plain(self.answers)}),
        }


def build_report(history: History, *, source: str, warnings: Sequence[str] = ()) -> Report:
    """The report of what the history holds. `source` says where it came from, `warnings` what is wrong with it."""
    text = history.run is None or history.run.tells_text
    loops = find_loops(request.steps for request in history.requests.values())
    pairs = zip(history.requests.values(), loops, strict=True)
    requests = [_request(request, history.vocabulary, loop, text) for request, loop in pairs]
    if not history.tells_preempted:
        requests = [dataclasses.replace(request, preempted=None) for request in requests]
    requests.sort(key=_worst_first)
    looped = together(loops)
    run = None if history.run is None else _run(history.run)
    ended, missing = (
        [request.finish is not None for request in requests],
        [request.missing_tokens for request in requests],
    )
    return Report(
        source=valid(source),
        run=run,
        warnings=[valid(line) for line in (*warnings, *loop_notes(looped), *notes_of(history, ended, missing))],
        lost=history.lost,
        engine=_engine(history),
        pooled=Figures(history.acceptance),
        adaptive=history.run is not None and history.run.adaptive,
        undrafted=history.totals.undrafted_upto(len(history.steps)),
        means=Means.over([request.figures for request in requests], loops),
        loops=looped,
        phases=_phases([step for step in history.steps if step.is_timed]),
        groups=grouped(requests),
        requests=requests,
        intervals=[_interval(step, step.aggregate) for step in history.steps if step.aggregate is not None],
        levels=levels(history.steps),
        other_params=sum(1 for request in requests if run and _differ(request.params, run["params"])),
        answers=None if history.counts_only or history.figures_only else answer(history),
        vocabulary=history.vocabulary,
    )


def _interval(step: StepRecord, aggregate: Aggregate) -> IntervalReport:
    texts = {name: valid(getattr(aggregate, name)) for name in ("source", "engine", "request")}
    averages = {valid(name): value for name, value in aggregate.averages.items()}
    return IntervalReport(
        step=step.step,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        per_position=counts(aggregate).per_position,
        mean_acceptance_length=aggregate.length,
        told={**dataclasses.asdict(aggregate), **texts, "averages": averages},
        cells=cells(step, aggregate),
        notes=notes(aggregate),
    )


def valid(text: str) -> str:
    """The text with lone surrogates replaced: JSON and HTML cannot hold them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _run(run: RunInfo) -> dict[str, Any]:
    values = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    return values | {
        "eos_tokens": list(run.eos_tokens),
        "aux_layers": list(run.aux_layers),
        "params": dict(run.params),
        "versions": {str(name): str(version) for name, version in run.versions.items()},
    }


def _differ(mine: Mapping[str, Any] | None, default: Mapping[str, Any]) -> bool:
    if mine is None:
        return False
    return any(mine.get(name) != value for name, value in default.items() if name != "seed")


def _request(request: RequestHistory, vocabulary: Vocabulary, loops: Loops, text: bool) -> RequestReport:
    output, info, end = request.output(), request.info, request.end
    token_ids, acceptance = [token for token, _ in output], request.acceptance
    return RequestReport(
        id=valid(request.id),
        title="" if info is None else valid(info.title),
        prompt=valid(info.prompt) if info is not None and info.prompt else None,
        prompt_token_ids=[] if info is None else told_ids(info.prompt_tokens) or [],
        output=valid(request.output_text(vocabulary)) if text and request.sums is None else None,
        token_ids=[] if NO_TOKEN in token_ids else token_ids,
        origins=[origin.value for _, origin in output],
        pieces=_pieces(token_ids, vocabulary) if text else [],
        missing_tokens=0 if end is None else max(0, len(end.output) - acceptance.emitted),
        figures=Figures(acceptance),
        loops=loops,
        labels={} if info is None else {valid(name): valid(str(value)) for name, value in info.labels.items()},
        params=None if info is None else info.params.to_dict(),
        finish=None if end is None else end.reason.value,
        stop="" if end is None else valid(end.stop),
        error="" if end is None else valid(end.error),
        preempted=len(request.preemptions),
        found=request.found,
        queued_s=None if info is None or not info.admitted_ns else (info.admitted_ns - info.arrival_ns) / 1e9,
        total_s=None if end is None else (end.finished_ns - end.info.arrival_ns) / 1e9,
    )


def _pieces(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    pieces = [detokenizer.feed([token]) for token in tokens]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


def _worst_first(request: RequestReport) -> tuple[bool, float, float, str]:
    """Lowest acceptance length first, requests without drafts last."""
    acceptance = request.figures.acceptance
    return acceptance.tau is None, acceptance.tau or 0.0, acceptance.rate or 0.0, request.id


def _engine(history: History) -> EngineFigures:
    steps = history.steps
    wall = (max(s.end_ns for s in steps) - min(s.start_ns for s in steps)) / 1e9 if steps else 0.0
    stepping = sum(step.end_ns - step.start_ns for step in steps) / 1e9
    emitted = history.acceptance.told("emitted") or 0
    usages = [step.aggregate.kv_usage or 0.0 for step in steps if step.aggregate is not None]
    timed = [step for step in steps if step.is_timed]
    blocks = [(step.blocks_used, step.blocks_used + step.blocks_free) for step in timed]
    return EngineFigures(
        steps=len(steps),
        wall_s=wall,
        stepping_s=stepping,
        tokens_per_s=emitted / wall if wall and timed else None,
        tokens_per_stepping_s=emitted / stepping if stepping else None,
        peak_running=max((step.running for step in timed), default=None),
        peak_waiting=max((step.waiting for step in timed), default=None),
        peak_kv_usage=max(
            [*(used / total for used, total in blocks if total), *usages], default=0.0 if timed else None
        ),
        preempted=sum(len(step.preempted) for step in steps) if history.tells_preempted else None,
        queried=sum(step.queried for step in steps),
        found=sum(request.found for request in history.requests.values()),
        speculation_off=dict(Counter(valid(s.speculation_off or "off") for s in steps if not s.speculation)),
        ahead=sum(step.flight is not None for step in steps),
        overlap_s=sum(map(_overlap_ns, steps, steps[1:])) / 1e9,
    )


def _overlap_ns(step: StepRecord, after: StepRecord) -> int:
    """How long a step was accounted for while the next one ran."""
    flight = step.flight
    return 0 if flight is None else max(min(flight.committed_ns, after.end_ns) - max(flight.read_ns, after.start_ns), 0)


def _phases(steps: Sequence[StepRecord]) -> list[PhaseTime]:
    """The phases of all steps, the drafter's passes below `draft`; shares are of the phases' time."""
    spent: dict[str, list[int]] = {name: [] for name in PHASES}
    passes: dict[str, list[int]] = {}
    for step in steps:
        for phases, into in ((step.phases, spent), (step.passes, passes)):
            for phase in phases:
                into.setdefault(phase.name, []).append(phase.end_ns - phase.start_ns)
    total = sum(map(sum, spent.values()))

    def time(name: str, ns: Sequence[int]) -> PhaseTime:
        return PhaseTime(name, len(ns), median(ns) / 1e6, sum(ns) / 1e9, sum(ns) / total if total else None)

    times: list[PhaseTime] = []
    for name, ns in spent.items():
        times += [time(name, ns)] if ns else []
        if name == "draft":
            times += [time(f"draft, {label}", ns) for label, ns in passes.items()]
    return times


def grouped(requests: Sequence[RequestReport]) -> dict[str, list[LabelGroup]]:
    """Requests by each of their labels, worst acceptance first."""
    labels = sorted({label for request in requests for label in request.labels})
    return {label: _group(label, requests) for label in labels}


def _group(label: str, requests: Sequence[RequestReport]) -> list[LabelGroup]:
    by_value: dict[str | None, list[Figures]] = defaultdict(list)
    for request in requests:
        by_value[request.labels.get(label)].append(request.figures)
    groups = []
    for value, parts in by_value.items():
        pooled = Acceptance()
        for part in parts:
            pooled.merge(part.acceptance)
        groups.append(LabelGroup(value, len(parts), Figures(pooled), Means.over(parts)))
    none_last = float("inf")
    return sorted(groups, key=lambda g: (g.figures.acceptance.tau or none_last, g.value is None, g.value or ""))
