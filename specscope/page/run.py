"""What the page tells of a run, and of two, before any step is decoded: small tables of what the verbs give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specscope.analyze import tables
from specscope.analyze.compare import tables as compare_tables
from specscope.analyze.compare.bootstrap import alone
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Pair
from specscope.analyze.compare.side import Side
from specscope.analyze.findings import Finding
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.report import Report, build_report, by_position
from specscope.analyze.table import NONE, Table, number, percent
from specscope.analyze.tune.text import advice
from specscope.analyze.tune.text import tables as tune_tables
from specscope.analyze.tune.tuning import recorded, tune
from specscope.analyze.verify.trial import figures_of, judge, verdict
from specscope.analyze.why import why_run
from specscope.errors import UserError
from specscope.page.columns import CHUNK, Steps
from specscope.trace.history.history import History
from specscope.trace.history.wording import ending, plural
from specscope.trace.record.privacy import Privacy, strip
from specscope.trace.record.records import RequestInfo, StepRecord
from specscope.trace.record.vocabulary import Vocabulary

TOP = 20  # rows of a question over many steps
BUCKETS = 300  # of the chart over time
PROMPT = 120  # characters of a prompt in a list
TUNED = 32  # nodes of the largest tree whose acceptance is told


def kept(history: History, records: Sequence[StepRecord], privacy: Privacy) -> History:
    """A history of these records, without what is left out at a level."""
    assert history.run is not None
    run = replace(history.run, privacy=max(history.run.privacy, privacy))
    new = History(strip(run, privacy), Vocabulary() if privacy else history.vocabulary, in_part=history.in_part)
    for record in records:
        new.append(strip(record, privacy))
    new.lost = history.lost
    return new


def about_run(history: History, steps: Steps, source: str, warnings: Sequence[str], *, verify: bool) -> dict[str, Any]:
    """All tables of a run."""
    report = build_report(history, source=source, warnings=warnings)
    run, has_steps, why = history.run, len(steps) > 0, why_run(history)
    return {
        "source": source,
        "header": tables.header(report),
        "rule": "" if run is None else run.rule,
        "warnings": report.warnings,
        "figures": _figures(report),
        "tables": [as_plain(each) for each in (*tables.tables(report), *tables.questions(report, TOP))],
        "requests": _requests(report, history, steps),
        "chunk_size": CHUNK,
        "steps": len(steps),
        "over_time": history.lengths_at(len(history.steps) - 1, None, BUCKETS),
        "by_depth": [(each.depth, each.per_position, each.conditional) for each in by_position(report.pooled)],
        "phases": [(each.name, each.steps, each.median_ms, each.total_s, each.share) for each in report.phases],
        "why": {"summary": why.summary, "kinds": why.paragraphs(), "notes": why.notes} if has_steps else None,
        "tune": _tune(history, source) if has_steps else None,
        "findings": _findings(history, source, warnings) if has_steps and verify else None,
        "tells_text": run is None or run.tells_text,
        "tells_tokens": run is None or run.tells_tokens,
        "lacks_draft_tokens": run is not None and run.draft_vocab > 0 and not run.draft_tokens,
    }


def as_plain(table: Table) -> dict[str, Any]:
    """A table as the page lays it out."""
    flush_left = [table.is_words(column) for column in range(len(table.columns))]
    return {"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note, "words": flush_left}


def _figures(report: Report) -> list[tuple[str, str, str, str]]:
    """The figures that people look for first: name, value, its 95 % interval over requests, and what it is of."""
    pooled, parts = report.pooled, [request.figures for request in report.requests]

    def interval(top: str, bottom: str, offset: float = 0.0) -> tuple[float, float] | None:
        above, below = (np.array([getattr(part, name) for part in parts], np.float64) for name in (top, bottom))
        return None if pooled.aggregates else alone(above, below, offset)

    def told(ends: tuple[float, float] | None, shown: Any) -> str:  # noqa: ANN401
        return "" if ends is None else " to ".join(map(shown, ends))

    of = plural(len(parts), "request")
    return [
        ("mean acceptance length τ", number(pooled.tau), told(interval("accepted", "drafts", 1.0), number), of),
        ("draft acceptance rate", percent(pooled.rate), told(interval("accepted", "drafted"), percent), of),
        ("output tokens per step", number(pooled.tokens_per_step), told(interval("emitted", "steps"), number), of),
        ("steps that drafted nothing", tables.undrafted_share(report), "", "decode steps"),
        ("output tokens/s", number(report.engine.tokens_per_s, 1), "", "wall clock"),
    ]


def _requests(report: Report, history: History, steps: Steps) -> list[dict[str, Any]]:
    """The requests, in the order in which they came."""
    by_id, listed = {request.id: request for request in report.requests}, list[dict[str, Any]]()
    for name, run in history.requests.items():
        request = by_id[name]
        prompt, figures = request.title or request.prompt or "", request.figures
        listed.append(
            {
                "id": request.id,
                "title": " ".join(prompt[: 4 * PROMPT].split())[:PROMPT],
                "kind": request.labels.get("kind", ""),
                "end": ending(request.finish) if request.finish else "no end",
                "stop": request.stop,
                "tokens": figures.emitted,
                "drafts": figures.drafts,
                "tau": figures.tau,
                "rate": figures.rate,
                "facts": tables.request_facts(request),
                "first": steps.first.get(name, 0),
                "steps": len(run.steps),
                "asked": _asked(run.info),
            }
        )
    return listed


def _asked(info: RequestInfo | None) -> int:
    """How it is sampled, as far as sentences depend on it: 0 not known, 1 greedy, 2 greedy and nothing else, 3 not."""
    if info is None:
        return 0
    params = info.params
    return (2 if params.plain and info.tells_rules else 1) if params.greedy else 3


def prompts(history: History) -> list[str]:
    infos = (request.info for request in history.requests.values())
    vocabulary = history.vocabulary
    return ["" if info is None else info.prompt or vocabulary.text(info.prompt_tokens.tolist()) for info in infos]


def token_counts(history: History) -> dict[str, dict[int, int]]:
    """How often each token was drafted, tried and accepted."""
    c = Evidence.of(history).columns
    chosen = {"drafted": np.ones(len(c.token), np.bool_), "tried": c.tried, "accepted": c.accepted}
    counted = {name: np.unique(c.token[which], return_counts=True) for name, which in chosen.items()}
    return {name: dict(zip(*map(np.ndarray.tolist, found), strict=True)) for name, found in counted.items()}


def _tune(history: History, source: str) -> dict[str, Any] | None:
    """What trees of each size would have accepted; None where the capture cannot tell. A curve has for each tree:
    nodes, acceptance length, its interval, and the tree.
    """
    try:
        tuning = tune(recorded([source], [history]), {}, TUNED, None)
    except UserError:
        return None
    rows = {family: tuning.family(family) for family in ("static", "dynamic")}
    rows |= {name: [row] if (row := tuning.named(name)) is not None else [] for name in ("recorded", "choice")}
    curves = {
        name: [(row.nodes, row.length.value, row.length.low, row.length.high, row.tree) for row in each]
        for name, each in rows.items()
        if each
    }
    shown = [as_plain(each) for each in tune_tables(tuning)]
    return {"curves": curves, "tables": shown, "notes": tuning.notes, "advice": advice(tuning)}


def _findings(history: History, source: str, warnings: Sequence[str]) -> dict[str, Any]:
    trial = judge(history, source=source, warnings=warnings)
    groups = [(title, [_check(check) for check in checks]) for title, checks in trial.groups]
    return {"by": "verify", "verdict": verdict(trial), "failed": bool(trial.failed), "groups": groups}


def _check(check: Finding) -> Mapping[str, str]:
    example = NONE if check.example is None else str(check.example)
    told = {name: getattr(check, name) for name in ("name", "about", "detail", "note")}
    return told | {"result": check.result.value, "figures": figures_of(check), "example": example}


def about_pair(a: Side, b: Side) -> dict[str, Any]:
    """The comparison of two runs: B - A."""
    found = compare(a, b)
    parted = {number: pair.parting for number, pair in enumerate(found.pairs) if pair.parting is not None}
    return {
        "header": compare_tables.header(found),
        "answer": found.answer.name.lower(),
        "summary": found.summary,
        "headline": found.headline,
        "reasons": found.reasons,
        "missing": found.missing,
        "depths": [(each.a, each.b) for each in found.depths],
        "tables": [as_plain(table) for table in compare_tables.tables(found)],
        "pairs": [_pair(pair) for pair in found.pairs],
        "unpaired": found.unpaired,
        # To look at first: one that parts, for a reason that nothing explains where there is one
        "first": min(parted, key=lambda number: parted[number].cause.harmless, default=None),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    """Both requests, and where they part: output tokens before it, and why."""
    parting, first = pair.parting, pair.first
    return {
        "a": pair.id_a,
        "b": pair.id_b,
        "title": pair.title,
        "tokens": pair.tokens,
        "tau": pair.tau,
        "at": None if parting is None else parting.position,
        "cause": "" if parting is None else parting.cause.value,
        "about": "" if parting is None else parting.cause.about,
        "other": None if first is None else first.position,
    }
