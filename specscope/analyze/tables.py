"""A report as tables of strings: what text and page both show, worded and formatted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from os.path import commonprefix
from typing import Any

from specscope.analyze.levels import ELSEWHERE, Level, Levels
from specscope.analyze.questions.answers import tokens_table
from specscope.analyze.report import (
    IntervalReport,
    Means,
    Report,
    RequestReport,
    Several,
    by_position,
    committed,
    final_shares,
)
from specscope.analyze.table import NONE, Table, count, number, one_line, percent, share, told
from specscope.trace.history.interval import IntervalMeans, cells, clock, counts, covered, notes
from specscope.trace.history.loops import LONGEST, TIMES
from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import shares
from specscope.trace.history.wording import ending, plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind
from specscope.trace.record.vocabulary import printable

MOST_SHOWN = 200  # characters of a parameter, a name or a prompt: a schema may be long
INTERVALS = 40  # that are listed
STRETCHES = 5  # in which a condition holds, likewise
SUMS = {"drafts": "drafts", "drafted tokens": "drafted", "accepted tokens": "accepted", "output tokens": "emitted"}
COMMON_START = 16  # a beginning that all prompts share is left out of the table when it is longer than this
MAX_GROUPS = 40  # a label with more values than this is an identifier, not a grouping


def params_line(params: Mapping[str, Any]) -> str:
    """Sampling parameters that matter: temperature, seed and max_tokens always, the others where they are set."""
    default, always = SamplingParams().to_dict(), ("temperature", "seed", "max_tokens")
    told = {name: value for name, value in params.items() if value is not None and name != "left_out"}
    names = [name for name in told if name in always or told[name] != default.get(name)]
    told |= {"temperature": "0 (greedy)"} if told.get("temperature") == 0 else {}
    shown = [f"{name} {one_line(str(told[name]), MOST_SHOWN)}" for name in names]
    unknown = params.get("left_out", ())
    shown += [f"not recorded: {', '.join(unknown)}"] if unknown and told else []
    return printable(", ".join(shown) or "not recorded")


def header(report: Report) -> list[tuple[str, str]]:
    """What ran: (name, value) pairs, those without a value left out."""
    lines, run = [("source", report.source)], report.run
    if run and report.intervals and not report.requests:
        engine = report.intervals[-1].told.engine
        lines += [("model", run["target"]), ("engine", engine), ("reported by", run["backend"]), ("run", run["run_id"])]
    elif run:
        drafter = run["drafter"] + (f" ({run['draft_model']})" if run["draft_model"] else "")
        blocks = f"{plural(run['blocks'], 'block')} of {run['block_size']} tokens, " if run["blocks"] else ""
        lines += [
            ("model", f"{run['target']} ({run['revision']})" if run["revision"] else run["target"]),
            ("drafter", drafter),
            ("tree", run["tree"]),
            ("params", _params(report, run["params"])),
            ("device", f"{run['device']}, {run['dtype']}, {run['backend']}"),
            ("KV cache", f"{blocks}context {run['max_context']}"),
            ("run", f"{run['run_id']}, seed {run['seed']}"),
        ]
    lines += [("versions", ", ".join(f"{name} {version}" for name, version in run["versions"].items()))] if run else []
    return [(name, printable(value)) for name, value in lines if value]


def _params(report: Report, default: Mapping[str, Any]) -> str:
    """The run's, and how many requests have others. Where no request has the run's, they were nobody's."""
    others = plural(report.other_params, "request")
    if report.other_params and report.other_params == len(report.requests):
        lines = {params_line(request.params) for request in report.requests if request.params is not None}
        return lines.pop() if len(lines) == 1 else f"differ between {others}"
    return params_line(default) + (f"; others in {others}" if report.other_params else "")


def tables(report: Report) -> list[Table]:
    """All tables but that of the requests, in the order of reading."""
    if report.intervals and not report.requests:
        by_depth = [positions(report)] if by_position(report.pooled) else []
        return [summed(report), *levels(report.levels), *by_depth, intervals(report)]
    figures = [acceptance(report), *undrafted(report), positions(report), finals(report)]
    timed = [] if report.engine.peak_running is None else [phases(report), engine(report)]
    return [*figures, *timed, *groups(report)]


def acceptance(report: Report) -> Table:
    """The headline: pooled and per-request figures, both named."""
    pooled, mean = report.pooled, report.means
    rows = [
        ("mean acceptance length τ", number(pooled.tau), number(mean.tau)),
        ("output tokens per step", number(pooled.tokens_per_step), number(mean.tokens_per_step)),
        ("draft acceptance rate (accepted / nodes)", percent(pooled.rate), percent(mean.rate)),
        ("accepted / depth", percent(pooled.depth_rate), percent(mean.depth_rate)),
    ]
    if report.loops.looped:
        looped, without = report.loop_means
        rows[1:1] = [
            ("τ without steps in loops", number(report.loops.rest.tau), number(without)),
            ("output tokens in loops", percent(report.loops.share), percent(looped)),
        ]
    sizes = ((len(report.requests), "request"), (pooled.steps, "decode step"), (pooled.drafts, "draft"))
    steps = ", ".join(plural(value, noun) for value, noun in sizes)
    tokens = f"{plural(pooled.drafted, 'token')} drafted, {count(pooled.accepted)} accepted"
    output = f"{told(committed(report.pooled))} committed, {told(pooled.told('emitted'))} output"
    note = f"{steps}; {tokens}, {output}."
    if report.loops.looped:
        note += (
            f" In loops: {count(report.loops.looped)} of {count(report.loops.tokens)} output tokens; a cycle of up to "
            f"{LONGEST} tokens, {TIMES} times or more in a row. τ without steps in loops: "
            f"{plural(report.loops.rest.drafts, 'draft')} outside them."
        )
    return Table("Acceptance", ("", "pooled", "per-request mean"), rows, note)


def undrafted(report: Report) -> list[Table]:
    """Why steps drafted nothing; no table where all drafted."""
    if not report.undrafted:
        return []
    of = sum(report.undrafted.values())
    rows = [(reason.about, count(report.undrafted[reason]), percent(part)) for reason, part in shares(report.undrafted)]
    note = f"share: of {plural(of, 'step')} without drafts, which are {undrafted_share(report)} decode steps."
    return [Table("Steps that drafted nothing", ("why", "steps", "share"), rows, note)]


def undrafted_share(report: Report) -> str:
    """67.1% of 70."""
    steps = report.pooled.told("steps")
    return share(sum(report.undrafted.values()) / steps if steps else None, steps)


def over_all(all_of_them: Several) -> list[Table]:
    by_depth = [positions(all_of_them)] if by_position(all_of_them.pooled) else []
    return [captures(all_of_them), *by_depth, *groups(all_of_them)]


def captures(all_of_them: Several) -> Table:
    parts: list[tuple[str, Report | Several, int, list[IntervalReport]]] = [
        (printable(each.source), each, len(each.requests), each.intervals) for each in all_of_them.reports
    ]
    every = [interval for report in all_of_them.reports for interval in report.intervals]
    rows = []
    for name, each, requests, intervals in (*parts, ("pooled", all_of_them, all_of_them.requests, every)):
        known = [interval.told for interval in intervals]
        figures = _figures(_ended(known, requests), each.pooled, each.means, known)
        rows.append((name, *figures, told(each.pooled.told("emitted"))))
    return Table("Over all captures", ("capture", *FIGURES, "output tokens"), rows, f"{ABOUT_FIGURES}.")


FIGURES = ("requests", "drafts", "τ", "per-request τ", "rate", "tok/step")
ABOUT_FIGURES = "τ: mean acceptance length, pooled and as per-request mean. rate: draft acceptance rate"


def _figures(
    requests: int | None, pooled: Acceptance, by_request: Means, intervals: Sequence[Aggregate] = ()
) -> tuple[str, ...]:
    over = IntervalMeans(intervals)
    lengths = over.told(pooled), number(by_request.tau)
    drafts = over.mark + told(pooled.told("drafts"))
    return told(requests), drafts, *lengths, percent(over.rate(pooled)), number(pooled.tokens_per_step)


def _ended(intervals: Sequence[Aggregate], others: int = 0) -> int | None:
    """The requests that ended in intervals, and others; None where an interval does not say how many."""
    ended = [1 if interval.is_request else interval.requests for interval in intervals]
    return None if None in ended else others + sum(filter(None, ended))


def positions(report: Report | Several) -> Table:
    rows = [
        (
            str(position.depth),
            share(position.per_position, position.drafts),
            share(position.corrected, position.proposed),
            share(position.conditional, position.tried),
            NONE if position.per_position is None else count(position.accepted),
        )
        for position in by_position(report.pooled)
    ]
    note = (
        "per-position: accepted / all drafts, as in vLLM. corrected: accepted / drafts that reached this depth. "
        "conditional: accepted / drafts tried here. vLLM counts positions from 0: depth 1 is its position 0."
    )
    return Table("Per position", ("depth", "per-position", "corrected", "conditional", "accepted"), rows, note)


def summed(report: Report) -> Table:
    """The figures of an engine that reports counts only, over all of its intervals."""
    sums, load = report.pooled, report.engine
    known = [interval.told for interval in report.intervals]
    requests, over = _ended(known), IntervalMeans(known)
    seconds = covered((each.record.start_ns, each.record.end_ns) for each in report.intervals)
    rows = [
        ("mean acceptance length τ", over.told(sums)),
        ("draft acceptance rate (accepted / drafted)", percent(over.rate(sums))),
        *((name, (over.mark if key == "drafts" else "") + told(sums.told(key))) for name, key in SUMS.items()),
        *([] if requests is None else [("requests", count(requests))]),
        ("intervals", count(len(known))),
        ("seconds", number(seconds, 1)),
        ("output tokens/s", number(sums.emitted / seconds if seconds and sums.knows("emitted") else None, 1)),
    ]
    for name, key, peak in (
        ("peak of running requests", "running", told(load.peak_running)),
        ("peak of waiting requests", "waiting", told(load.peak_waiting)),
        ("peak of KV usage", "kv_usage", percent(load.peak_kv_usage)),
    ):
        rows += [(name, peak)] if any(getattr(values, key) is not None for values in known) else []
    rows += [(f"{one_line(name, MOST_SHOWN)}, last", number(value)) for name, value in known[-1].averages.items()]
    return Table("Acceptance, over all intervals", ("", ""), rows)


def intervals(report: Report) -> Table:
    """The intervals, at most INTERVALS of them, the newest."""
    shown = report.intervals[-INTERVALS:]
    names = ("time", "drafts", "accepted", "length", "rate", "tokens")
    rows = []
    for interval in shown:
        each = cells(interval.record, interval.told)
        rates = " ".join(NONE if r is None else f"{r:.3f}" for r in counts(interval.told).per_position) or NONE
        about = " ".join(filter(None, (one_line(interval.told.request, MOST_SHOWN), *notes(interval.told))))
        rows.append((*(each[name] for name in names), rates, about))
    left = len(report.intervals) - len(shown)
    note = "by position: accepted there / the interval's drafts, as in vLLM."
    note += f" The newest {count(len(shown))}; --json shows all." if left else ""
    words = frozenset(["by position", "about"])
    return Table("By interval", (*names, "by position", "about"), rows, note, words)


def levels(found: Levels) -> list[Table]:
    """When the level changed, and what tells low intervals from the others; no table where nothing does."""
    columns = ("τ", "95 % interval", f"{found.unit}s", "drafts")
    tables = []
    if found.changes:
        rows = [
            (_when(level.start_ns), _when(level.end_ns), *_level(level), _chance(level.p_value), _where(level) or NONE)
            for level in found.changes
        ]
        note = "p: how likely this change is by chance; changes with p below 0.001 are listed."
        names = ("from", "to", *columns, "p", "engine")
        tables.append(Table("When the level changed", names, rows, note, frozenset(["to", "engine"])))
    if (condition := found.condition) is not None:
        rows = [(_where(level), *_level(level)) for level in found.groups]
        inside = f"{condition.hits_in:,} of {plural(condition.total_in, found.unit)} where {printable(condition.text)}"
        note = f"{inside} are low, as are {condition.hits_out:,} of {condition.total_out:,} others"
        times = ", ".join(f"{_when(start)} to {_when(end)}" for start, end in found.stretches[:STRETCHES])
        more = len(found.stretches) - STRETCHES
        note += f": {times}{f' and {more} times more' if more > 0 else ''}." if times else "."
        if shares := _such(found):
            note += f" These are {' and '.join(shares)}."
        tables.append(Table(f"Low {found.unit}s and the others", ("where", *columns), rows, note))
    return tables


def _where(level: Level) -> str:
    """Its engine or condition, and of two runs which."""
    return printable(f"{level.side}: {level.where}".strip(": ") if level.side else level.where)


def _such(found: Levels) -> list[str]:
    """`7.0% of A's intervals`: of two runs, how often the condition holds in each."""
    texts = []
    for side in sorted({level.side for level in found.groups} - {""}):
        parts = [level for level in found.groups if level.side == side]
        holds = sum(level.intervals for level in parts if level.where != ELSEWHERE)
        texts.append(f"{percent(holds / sum(level.intervals for level in parts))} of {side}'s {found.unit}s")
    return texts


def _when(ns: int) -> str:
    """With the date: a log may be of days."""
    return f"{datetime.fromtimestamp(ns // 10**9):%m-%d} {clock(ns)}" if clock(ns) != NONE else NONE


def _level(level: Level) -> tuple[str, ...]:
    """Its length, interval and n."""
    return number(level.length), f"{number(level.low)}–{number(level.high)}", count(level.intervals), told(level.drafts)


def _chance(p: float | None) -> str:
    return NONE if p is None else f"{p:.0e}" if p >= 1e-99 else "<1e-99"


def finals(report: Report) -> Table:
    meaning = {
        FinalKind.BONUS: "the whole path was accepted",
        FinalKind.RECOVERED: "after a rejection: from the residual; greedy: the target's top token",
        FinalKind.TARGET: "nothing was drafted",
    }
    kinds, shares = report.pooled.kinds, final_shares(report.pooled)
    rows = [(kind.value, count(kinds[kind]), percent(shares[kind]), meaning[kind]) for kind in FinalKind]
    note = f"share: of {plural(report.pooled.steps, 'decode step')}; each ends in one final token."
    return Table("Final tokens", ("kind", "steps", "share", "meaning"), rows, note, frozenset(["meaning"]))


def phases(report: Report) -> Table:
    rows = [
        (one_line(p.name, MOST_SHOWN), count(p.steps), number(p.median_ms), number(p.total_s, 3), percent(p.share))
        for p in report.phases
    ]
    note = "share: of the time in all phases."
    return Table("Time by phase", ("phase", "steps", "median ms", "total s", "share"), rows, note if rows else "")


def engine(report: Report) -> Table:
    e = report.engine
    rows = [
        ("output tokens/s, wall clock", number(e.tokens_per_s, 1)),
        ("output tokens/s, inside steps", number(e.tokens_per_stepping_s, 1)),
        ("wall clock, s", number(e.wall_s)),
        ("inside steps, s", number(e.stepping_s)),
        ("engine steps", count(e.steps)),
        ("peak of running requests", told(e.peak_running)),
        ("peak of waiting requests", told(e.peak_waiting)),
        ("peak of KV blocks in use", percent(e.peak_kv_usage)),
        ("preemptions", told(e.preempted)),
    ]
    if e.ahead:
        rows.append(("steps recorded while the next ran", count(e.ahead)))
    if e.queried:
        rows.append(("tokens found in the prefix cache", f"{count(e.found)} of {count(e.queried)}"))
    rows += [
        (f"steps without speculation: {one_line(why, MOST_SHOWN)}", count(n)) for why, n in e.speculation_off.items()
    ]
    return Table("Engine", ("", ""), rows)


def groups(report: Report | Several) -> list[Table]:
    """A table for each label that groups requests, and only a note for one that names them."""
    tables = []
    for label, parts in report.groups.items():
        title = f"By {one_line(label, MOST_SHOWN)}"
        if len(parts) > MAX_GROUPS:
            tables.append(Table(title, (label,), [], f"{plural(len(parts), 'value')}; --json shows all."))
            continue
        values = [NONE if part.value is None else one_line(part.value, MOST_SHOWN) for part in parts]
        figures = [_figures(part.requests, part.figures, part.means) for part in parts]
        rows = [(value, *each) for value, each in zip(values, figures, strict=True)]
        tables.append(Table(title, (one_line(label, MOST_SHOWN), *FIGURES), rows, f"{ABOUT_FIGURES}. Worst τ first."))
    return tables


def questions(report: Report, limit: int) -> list[Table]:
    """The tokens rejected most, at most `limit` of them, each with an example; no table without steps."""
    if report.answers is None:
        return []
    table = tokens_table(report.answers, report.vocabulary)
    left, rows = len(table.rows) - limit, table.rows[:limit]
    lines = [f"{table.summary}." if table.summary else "", table.note if rows else ""]
    lines += [f"{note}." for note in table.notes]
    lines.append(f"{count(left)} more; --top {len(table.rows)} or --json shows all." if left > 0 else "")
    examples = [printable(str(examples.clearest)) for examples in table.examples]
    cells = [(*row, example) for row, example in zip(rows, examples, strict=False)]
    columns = (*table.columns, "example") if rows else ()
    return [Table(table.title, columns, cells, " ".join(filter(None, lines)), table.words | {"example"})]


def requests(report: Report, limit: int) -> Table:
    """The requests, worst acceptance first, at most `limit` of them."""
    shown = report.requests[:limit]
    left = len(report.requests) - len(shown)
    note = "τ: mean acceptance length. rate: draft acceptance rate. Worst τ first."
    if left:
        note += f" {count(left)} more; --json shows all."
    columns = ("request", "prompt", "end", "tokens", "drafts", "τ", "rate")
    start = _common_start([request.prompt for request in report.requests if request.prompt is not None])
    rows = [_request_row(request, start) for request in shown]
    return Table("Requests", columns, rows, note, frozenset(["prompt", "end"]), frozenset(["prompt"]))


def _common_start(prompts: Sequence[str]) -> int:
    """Characters that all prompts begin with, a chat template's system turn for one: what tells them apart is shown."""
    start = len(commonprefix(prompts)) if len(prompts) > 1 else 0  # noqa: RUF071 - by characters is meant
    return start if start > COMMON_START and all(len(prompt) > start for prompt in prompts) else 0


def _request_row(request: RequestReport, start: int) -> tuple[str, ...]:
    acceptance = request.figures
    if request.title:
        start, prompt = 0, one_line(request.title, MOST_SHOWN)
    else:
        prompt = NONE if request.prompt is None else one_line(request.prompt[start:], MOST_SHOWN)
    return (
        one_line(request.id, MOST_SHOWN),
        f"…{prompt}" if start and request.prompt else prompt,
        ending(request.finish) if request.finish else "no end",
        count(acceptance.emitted),
        count(acceptance.drafts),
        number(acceptance.tau),
        percent(acceptance.rate),
    )


def request_facts(request: RequestReport) -> str:
    """What the row leaves out, in a line: labels, counts by position, parameters, errors."""
    facts = (
        ", ".join(f"{name}={value}" for name, value in request.labels.items()),
        f"counts {request.figures.counts}",
        request.params and params_line(request.params),
        request.loops.looped and f"{percent(request.loops.share)} of its output in loops",
        request.preempted and f"preempted {request.preempted}×",
        request.found and f"{plural(request.found, 'token')} found in the prefix cache",
        request.stop and f"stopped at {request.stop!r}",
        request.error,
    )
    return printable(" · ".join(str(fact) for fact in facts if fact))
