"""The figures of a run: a History in, plain dataclasses out. Text, page and JSON all show what is in these.

Every acceptance figure is trace/history/stats.py's. Here they are put together: pooled over all steps (a long request
counts more) and as the mean over requests (every request counts alike), by depth, by phase, by label, by request.

Of several captures, such as those of vLLM's ranks, each has a report of its own, and their figures are pooled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from specscope.analyze.levels import Levels, levels
from specscope.analyze.plain import fields, plain, valid
from specscope.analyze.questions.answers import Answers, answer
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.interval import IntervalMeans, counts, definitions, missing_text
from specscope.trace.history.loops import LONGEST, TIMES, TOLD, Loops, loops_of, together
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.history.totals import Undrafted, shares
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.params import NO_SEED
from specscope.trace.record.privacy import NO_TOKEN, told_ids
from specscope.trace.record.records import PHASES, FinalKind, RequestStep, StepRecord
from specscope.trace.record.rules import is_own
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary


@dataclass(frozen=True)
class Position:
    """One depth of the trees, the root's children at 1. vLLM's position of it is depth - 1."""

    depth: int
    drafts: int
    proposed: int | None  # drafts whose tree reached this depth; None where it is not recorded
    tried: int | None  # drafts in which a node at this depth was tried; None where it is not recorded
    accepted: int  # drafts that accepted a token here
    per_position: float | None  # as in vLLM: accepted / drafts; like the others, None where no draft proposed it
    corrected: float | None  # accepted / proposed
    conditional: float | None  # accepted / tried


def committed(a: Acceptance) -> int | None:
    """Tokens the verifier committed, before EOS, stop strings and the length limit cut the output."""
    return None if a.aggregates else a.accepted + a.steps


def final_shares(a: Acceptance) -> dict[FinalKind, float | None]:
    return {kind: a.kinds[kind] / a.steps if a.steps else None for kind in FinalKind}


def by_position(a: Acceptance) -> list[Position]:
    """The figures by depth; empty where they are not recorded."""
    if not a.by_depth:
        return []
    proposed, tried = (
        getattr(a, name) if a.knows(name) else [None] * len(a.accepted_at) for name in ("proposed_at", "tried_at")
    )
    columns = (proposed, tried, a.accepted_at, a.per_position, a.per_position_corrected, a.conditional)
    return [Position(depth, a.drafts, *row) for depth, row in enumerate(zip(*columns, strict=True), start=1)]


def told(a: Acceptance) -> dict[str, Any]:
    return a.to_dict() | {
        "tokens_per_step": a.tokens_per_step,
        "committed": committed(a),
        "final_shares": {kind.value: share for kind, share in final_shares(a).items()},
    }


@dataclass(frozen=True)
class Means:
    """Per-request means: each over the requests that have the figure."""

    tau: float | None
    rate: float | None
    depth_rate: float | None
    tokens_per_step: float | None

    @staticmethod
    def over(parts: Sequence[Acceptance]) -> Means:
        return Means(*(_mean(getattr(part, each.name) for part in parts) for each in dataclasses.fields(Means)))

    def to_dict(self) -> dict[str, Any]:
        """Under the names that Acceptance.to_dict has."""
        names = "mean_acceptance_length", "draft_acceptance_rate", "accepted_over_depth", "tokens_per_step"
        return dict(zip(names, dataclasses.astuple(self), strict=True))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# What a reader of a report's figures must know: what is missing, forced, lossy or worked out.


def notes_of(history: History, requests: Sequence[RequestReport], loops: Loops) -> list[str]:
    aggregates = [step.aggregate for step in history.steps if step.aggregate is not None]
    parts = [part for step in history.steps for part in step.requests if part.is_judged]
    lost = 0 if history.in_part else history.lost  # a reader says what its file lacks
    branches = len(history.branches)
    missing = [request.missing_tokens for request in requests if request.missing_tokens]
    forced, lossy = sum(len(part.told("verdict", "forced")) > 0 for part in parts), [p for p in parts if p.lossy]
    rules, verdicts = ", ".join(sorted({part.rule for part in lossy})), plural(len(parts), "verdict")
    own = sorted({part.rule for part in parts if is_own(part.rule)})
    infos = [request.info for request in history.requests.values() if request.info is not None]
    sampled = [info for info in infos if info.params.is_known and not info.params.greedy]
    seeds = Counter(info.labels.get("seed", info.params.seed) for info in sampled)
    shared = sum(count for seed, count in seeds.items() if count > 1 and seed != "none")
    unverified = sum(part.method.unverified for part in parts if part.method is not None)
    told = (
        (history.without_steps, history.figures_note),
        (history.others, f"{plural(history.others, 'span')} of other services skipped"),
        (history.run is None, "the run's header is missing: its model and settings are unknown"),
        (lost, f"{plural(lost, 'record')} missing: counts are too low, and ratios cover what is left"),
        (
            branches > 1,
            f"the run was edited and has {branches} branches: these figures are for branch {history.branch} (--branch "
            "N selects another)",
        ),
        (
            forced,
            f"{forced} of {verdicts} forced (synthetic drafter or fork): their acceptance measures nothing, and the "
            "output is not the target's",
        ),
        (
            shared,
            f"{shared} of {plural(len(sampled), 'sampled request')} share their seed with another (perhaps on "
            "purpose): they use the same coins at the same positions, so they are not independent samples",
        ),
        (
            lossy,
            f"{len(lossy)} of {verdicts} under a rule that is not lossless ({rules}): the output does not follow the "
            "target's p",
        ),
        (
            own,
            f"the rule of verification is your own ({', '.join(own)}): verify tests whether the output follows the "
            "target's p",
        ),
        (
            unverified,
            f"{plural(unverified, 'draft')} not verified, beyond a budget: the figures cover the verified ones",
        ),
        (True, _forms([part for part in parts if part.form is not None])),
        (missing, f"{plural(sum(missing), 'output token')} of {plural(len(missing), 'request')} in missing steps"),
    )
    return [*_looped(loops), *_of_counts(aggregates), *(text for applies, text in told if applies and text)]


def _looped(loops: Loops) -> list[str]:
    """A note on text that loops, where it is enough to change what an acceptance length means."""
    if loops.share is None or loops.share < TOLD:
        return []
    tau = "nothing else was drafted"
    if loops.rest.tau is not None:
        tau = f"without those steps τ is {loops.rest.tau:.2f} over {plural(loops.rest.drafts, 'draft')}"
    return [
        f"{loops.share:.1%} of {plural(loops.tokens, 'output token')} are in loops (a cycle of up to {LONGEST} "
        f"tokens, {TIMES} times or more in a row): acceptance on such text says little about the drafter; {tau}"
    ]


def _of_counts(aggregates: Sequence[Aggregate]) -> list[str]:
    """Notes on what an engine does not report, and on what was worked out."""
    notes = list(dict.fromkeys(missing_text(aggregate) for aggregate in aggregates))
    notes += dict.fromkeys(line for aggregate in aggregates for line in definitions(aggregate))
    rounded, resets = (sum(getattr(each, name) for each in aggregates) for name in ("rounded", "reset"))
    if rounded:
        intervals = plural(len(aggregates), "interval")
        notes.append(
            f"{rounded} of {intervals} with drafts estimated from rounded rates: the nearest count that fits (~)"
        )
    if resets:
        notes.append(f"{plural(resets, 'restart')} of the engine: its counters began again")
    return notes


def _forms(parts: Sequence[RequestStep]) -> str:
    """A note on the tokens that forms (structured output, min_tokens) removed; "" where there are none."""
    forms = [part.form for part in parts if part.form is not None]
    if not forms:
        return ""
    steps, requests = plural(len(parts), "step"), plural(len({part.request for part in parts}), "request")
    removed, pruned = np.concatenate([form.removed for form in forms]), sum(form.pruned for form in forms)
    mean = f", on average {100 * float(removed.mean()):.1f} % of the target's own mass" if len(removed) else ""
    drafts = f"; {plural(pruned, 'draft')} pruned before verification" if pruned else ""
    return f"structured output or min_tokens affected {steps} of {requests}: it removed tokens{mean}{drafts}"


@dataclass(frozen=True)
class PhaseTime:
    name: str
    steps: int
    median_ms: float
    total_s: float
    share: float | None  # of the time in all phases


@dataclass(frozen=True)
class EngineFigures:
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


@dataclass(frozen=True)
class IntervalReport:
    """An interval, or a request, of an engine that reports counts only. What it does not report is None or empty."""

    record: StepRecord
    told: Aggregate

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self.record, name) for name in ("step", "start_ns", "end_ns")},
            "per_position": counts(self.told).per_position,
            "mean_acceptance_length": self.told.length,  # from the counts, else as it was told
            "told": plain(self.told),
        }


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
    figures: Acceptance
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
        return fields(self, "figures") | {"acceptance": told(self.figures)}


@dataclass(frozen=True)
class LabelGroup:
    """The requests that share one value of a label; value None: those without the label."""

    value: str | None
    requests: int
    figures: Acceptance
    means: Means

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": plain(self.value),
            "requests": self.requests,
            "pooled": told(self.figures),
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
    pooled: Acceptance
    means: Means
    loops: Loops
    undrafted: Counter[Undrafted]  # decode steps that drafted nothing, by the reason
    phases: list[PhaseTime]
    groups: dict[str, list[LabelGroup]]  # by label, worst acceptance first
    requests: list[RequestReport] = field(default_factory=list)  # worst acceptance first
    other_params: int = 0  # requests whose params, the seed aside, are not the run's
    intervals: list[IntervalReport] = field(default_factory=list)  # of an engine that tells counts only
    levels: Levels = field(default_factory=Levels)  # likewise
    answers: Answers | None = None  # over many steps; None where there are no steps, counts only
    vocabulary: Vocabulary = field(default_factory=Vocabulary)  # of the tokens in the answers

    @property
    def loop_means(self) -> tuple[float | None, float | None]:
        """Per request: the share of its output in loops, and the acceptance length of its other steps."""
        return _mean(each.loops.share for each in self.requests), mean_tau([each.loops.rest for each in self.requests])

    def _over_intervals(self) -> dict[str, Any]:
        over = IntervalMeans(each.told for each in self.intervals)
        means = {"mean_acceptance_length": over.length(self.pooled), "draft_acceptance_rate": over.rate(self.pooled)}
        return {"intervals": plain(self.intervals), "levels": plain(self.levels), "over_intervals": means}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: all that text and page show, and every request in full."""
        names = ("source", "run", "warnings", "lost", "engine", "phases", "groups", "requests")
        looped = dict(zip(("share", "mean_acceptance_length_without"), self.loop_means, strict=True))
        return {
            **(self._over_intervals() if self.intervals else {}),
            **{name: plain(getattr(self, name)) for name in names},
            "pooled": told(self.pooled),
            "per_request_mean": plain(self.means),
            "loops": plain(self.loops) | {"per_request_mean": looped},
            "undrafted": [
                {"reason": reason.value, "steps": self.undrafted[reason], "share": share}
                for reason, share in shares(self.undrafted)
            ],
            "positions": plain(by_position(self.pooled)),
            "request_count": len(self.requests),
            "requests_with_other_params": self.other_params,
            **({} if self.answers is None else {"answers": plain(self.answers)}),
        }


def build_report(history: History, *, source: str, warnings: Sequence[str] = ()) -> Report:
    """The report of what the history holds. `source` says where it came from, `warnings` what is wrong with it."""
    text, preemptions = history.run is None or history.run.tells_text, history.tells_preempted
    loops = [loops_of(request.steps) for request in history.requests.values()]
    pairs = zip(history.requests.values(), loops, strict=True)
    requests = sorted(  # the lowest acceptance length first, those without drafts last
        (_request(request, history, loop, text=text, preemptions=preemptions) for request, loop in pairs),
        key=lambda one: (one.figures.tau is None, one.figures.tau or 0.0, one.figures.rate or 0.0, one.id),
    )
    looped, header = together(loops), history.run
    run = None if header is None else {each.name: getattr(header, each.name) for each in dataclasses.fields(header)}
    default = {} if run is None else {name: value for name, value in run["params"].items() if name != "seed"}
    own = [request.params for request in requests if request.params is not None]
    unlike = [any(params.get(name) not in (value, None) for name, value in default.items()) for params in own]
    return Report(
        source=valid(source),
        run=run,
        warnings=[valid(line) for line in (*warnings, *notes_of(history, requests, looped))],
        lost=history.lost,
        engine=_engine(history),
        pooled=history.acceptance,
        undrafted=history.totals.undrafted_upto(len(history.steps)),
        means=Means.over([request.figures for request in requests]),
        loops=looped,
        phases=_phases([step for step in history.steps if step.is_timed]),
        groups=grouped(requests),
        requests=requests,
        intervals=[IntervalReport(step, step.aggregate) for step in history.steps if step.aggregate is not None],
        levels=levels(history.steps),
        other_params=sum(unlike),
        answers=None if history.counts_only or history.figures_only else answer(history),
        vocabulary=history.vocabulary,
    )


def _request(
    request: RequestHistory, history: History, loops: Loops, *, text: bool, preemptions: bool
) -> RequestReport:
    output, info, end, vocabulary = request.output(), request.info, request.end, history.vocabulary
    token_ids, acceptance = [token for token, _ in output], request.acceptance
    return RequestReport(
        id=request.id,
        title="" if info is None else info.title,
        prompt=info.prompt if info is not None and info.prompt else None,
        prompt_token_ids=[] if info is None else told_ids(info.prompt_tokens) or [],
        output=request.output_text(vocabulary) if text and request.sums is None else None,
        token_ids=[] if NO_TOKEN in token_ids else token_ids,
        origins=[origin.value for _, origin in output],
        pieces=_pieces(token_ids, vocabulary) if text else [],
        missing_tokens=0 if end is None else max(0, len(end.output) - acceptance.emitted),
        figures=acceptance,
        loops=loops,
        labels={} if info is None else {name: str(value) for name, value in info.labels.items()},
        params=None if info is None else info.params.told(),
        finish=None if end is None else end.reason.value,
        stop="" if end is None else end.stop,
        error="" if end is None else end.error,
        preempted=len(request.preemptions) if preemptions else None,
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
        peak_kv_usage=max([*(used / total for used, total in blocks if total), *usages], default=None),
        preempted=sum(len(step.preempted) for step in steps) if history.tells_preempted else None,
        queried=sum(step.queried for step in steps),
        found=sum(request.found for request in history.requests.values()),
        speculation_off=dict(Counter(s.speculation_off or "off" for s in steps if not s.speculation)),
        ahead=sum(step.flight is not None for step in steps),
    )


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
    labels = sorted({label for request in requests for label in request.labels} - {NO_SEED[0]})
    return {label: _group(label, requests) for label in labels}


def _group(label: str, requests: Sequence[RequestReport]) -> list[LabelGroup]:
    by_value: dict[str | None, list[Acceptance]] = defaultdict(list)
    for request in requests:
        by_value[request.labels.get(label)].append(request.figures)
    groups = [LabelGroup(value, len(each), _pooled(each), Means.over(each)) for value, each in by_value.items()]
    none_last = float("inf")
    return sorted(groups, key=lambda g: (g.figures.tau or none_last, g.value is None, g.value or ""))


def _pooled(parts: Iterable[Acceptance]) -> Acceptance:
    total = Acceptance()
    for part in parts:
        total.merge(part)
    return total


SETTINGS = ("target", "drafter", "draft_model", "tree", "rule")  # should be the same in all runs that are pooled


@dataclass(frozen=True)
class Several:
    reports: tuple[Report, ...]  # in the order in which they were given
    pooled: Acceptance  # over all of them
    means: Means  # over the requests of all of them
    groups: dict[str, list[LabelGroup]]  # of the same requests, by label
    notes: tuple[str, ...]  # what a reader of the pooled figures must know

    @property
    def requests(self) -> int:
        return sum(len(report.requests) for report in self.reports)

    def to_dict(self) -> dict[str, Any]:
        """The pooled figures as plain values: named as in each report."""
        return {
            "pooled": told(self.pooled),
            "per_request_mean": plain(self.means),
            "positions": plain(by_position(self.pooled)),
            "groups": plain(self.groups),
            "request_count": self.requests,
        }


def several(reports: Sequence[Report]) -> Several:
    total = _pooled(report.pooled for report in reports)
    requests = [request for report in reports for request in report.requests]
    means = Means.over([request.figures for request in requests])
    return Several(tuple(reports), total, means, grouped(requests), tuple(_mixed(reports)))


def _mixed(reports: Sequence[Report]) -> list[str]:
    """A note on settings in which the runs differ: pooled figures then mix what should be compared."""
    runs = [report.run for report in reports if report.run is not None]
    values = {name: [*dict.fromkeys(str(run[name]) or "none" for run in runs)] for name in SETTINGS}
    mixed = "; ".join(f"{name} {', '.join(each)}" for name, each in values.items() if len(each) > 1)
    return [f"pooled figures mix captures with different settings: {mixed}"] if mixed else []
