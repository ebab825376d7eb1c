"""Tables of a run, of a sweep, and of servers side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specscope.bench.drive import LATE
from specscope.bench.figures import TIMES, percentile_name
from specscope.bench.points import COMPARED, Figures, points, ratios
from specscope.measure.paired import SLIM
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

MOST_REASONS = 5
NAMES = "ABCDEFGH"  # of servers


def show_run(run: Figures, percentiles: Sequence[float], console: Console) -> None:
    """Times as a table, and the rest in lines."""
    title = f"{run['label']} ({printable(run['model_id'])}), {points([run])[0].load.name}"
    console.print(title, style="bold", highlight=False, markup=False)
    table = Table("ms")
    names = ("mean", "median", *map(percentile_name, percentiles))
    for name in names:
        table.add_column(name, justify="right")
    for key, text in TIMES.items():
        table.add_row(text, *(_number(run[f"{name}_{key}_ms"], 1) for name in names))
    console.print(table)
    for line in (*_counts(run), *_speculation(run)):
        console.print(line, style="dim", highlight=False, markup=False)
    for line in _warnings(run):
        console.print(line, style="yellow", highlight=False, markup=False)


def _counts(run: Figures) -> list[str]:
    dropped = f", {run['dropped']} dropped at Ctrl-C" if run["dropped"] else ""
    answered = f"{run['completed']:,} answered, {run['failed']:,} failed{dropped}"
    at_once = f"{run['max_concurrent_requests']} at once at most, {run['mean_concurrent_requests']:.1f} on average"
    lines = [f"requests: {answered} in {run['duration']:.1f} s; {at_once}"]
    speed = [f"{run['request_throughput']:.2f} requests/s", f"{run['output_throughput']:,.1f} output tokens/s"]
    if run["total_token_throughput"] is not None:
        speed.append(f"{run['total_token_throughput']:,.1f} tokens/s including prompts")
    if run["max_output_tokens_per_s"] is not None:
        speed.append(f"{run['max_output_tokens_per_s']:,.0f} output tokens in the busiest second")
    lines.append(f"throughput: {', '.join(speed)}")
    if run["prompt_tokens_cached"]:
        lines.append(f"prefix cache: {run['prompt_tokens_cached']:.0%} of the prompts' tokens were cached")
    late, worst = run["client_lag_p99_ms"], run["client_lag_max_ms"]
    lag = f"late by {late:.1f} ms (p99), {worst:.1f} ms at most"
    lines.append(f"this client: {lag}; it took {run['client_processor']:.0%} of a core")
    return lines


def _speculation(run: Figures) -> list[str]:
    if "spec_decode_acceptance_length" not in run:
        return ["speculation: the server reports no figures"]
    rate, by_position = run["spec_decode_acceptance_rate"], run["spec_decode_per_position_acceptance_rates"]
    parts = [f"acceptance length {run['spec_decode_acceptance_length']:.3f}"]
    parts += [f"draft acceptance rate {rate:.1f} %"] if rate is not None else []
    reached = sum(1 for share in by_position if share)  # drafts may be shorter than the server's limit
    of = "" if run["spec_decode_num_drafts"] is None else f" of {plural(run['spec_decode_num_drafts'], 'draft')}"
    parts += [f"by position {' '.join(f'{share:.1%}' for share in by_position[:reached])}{of}"] if reached else []
    return [f"speculation, from {run['spec_decode_source']}: {', '.join(parts)}"]


def _warnings(run: Figures) -> list[str]:
    lines = []
    for reason, count in list(run["errors_by_reason"].items())[:MOST_REASONS]:
        lines.append(f"! {plural(count, 'request')} failed: {reason}")
    if (more := len(run["errors_by_reason"]) - MOST_REASONS) > 0:
        lines.append(f"! others failed for {plural(more, 'other reason')}")
    if run["client_was_late"]:
        lines.append(
            f"! this client was late by more than {LATE * 1e3:.0f} ms in over 1 % of the time: the figures may be "
            "worse than the server's real ones: run the client on an idle machine"
        )
    if run["completed"] and run["tokens_counted_by"] == "chunks":
        lines.append(
            "! the server does not count tokens (stream_options.include_usage): each chunk is counted as one token"
        )
    return lines


def show_summary(runs: Sequence[Figures], percentiles: Sequence[float], console: Console) -> None:
    """A row for each load and server: medians over the rounds. Nothing for a single run."""
    if len(runs) < 2:
        return
    load_points, last, letters = points(runs), percentile_name(percentiles[-1]), _letters(runs)
    table = Table(title="all runs", title_justify="left", title_style="bold", **SLIM)
    table.add_column("at once" if load_points[0].load.rate is None else "rate", justify="right")
    if len(letters) > 1:
        table.add_column("server")
    for column in ("req/s", "out tok/s", "TTFT", last, "TPOT", last, "E2E", last, "τ", "failed"):
        table.add_column(column, justify="right")
    for point in load_points:
        cells = [_brief(point.median(f"{name}_throughput")) for name in ("request", "output")]
        cells += [
            _brief(point.median(f"{key}_{name}_ms")) for name in ("ttft", "tpot", "e2el") for key in ("median", last)
        ]
        cells += [_number(point.median("spec_decode_acceptance_length"), 2), f"{point.total('failed')}"]
        table.add_row(f"{point.load.size:g}", *((letters[point.label],) if len(letters) > 1 else ()), *cells)
    console.print(table)
    line = f"medians and {last} in ms; E2E: end to end; τ: acceptance length; of several rounds, the median figure"
    console.print(line, style="dim", highlight=False)
    for label, letter in letters.items():
        console.print(f"{letter}: {label}", style="dim", highlight=False, markup=False)


def show_comparison(runs: Sequence[Figures], console: Console) -> None:
    """The first server over each other one. Nothing for a single server."""
    load_ratios = list(ratios(points(runs)))
    if not load_ratios:
        return
    letters = _letters(runs)
    table = Table(title="side by side", title_justify="left", title_style="bold", **SLIM)
    for column in ("load", "", "figure", "first", "other", "ratio", "95 %"):
        table.add_column(column, justify="left" if column in ("load", "", "figure") else "right")
    for ratio in load_ratios:
        numbers = [_number(value, 2) for value in ratio.values]
        interval = "{:.3f}–{:.3f}".format(*ratio.interval)
        words = (ratio.load.name, f"{letters[ratio.a]} over {letters[ratio.b]}", COMPARED[ratio.figure])
        table.add_row(*words, *numbers, Text(f"{ratio.ratio:.3f}", style="bold"), interval)
    console.print(table)
    console.print(
        "ratios of medians over the rounds; for times, below 1 means that the first server is faster",
        style="dim",
        highlight=False,
    )


def _letters(runs: Sequence[Figures]) -> dict[str, str]:
    """A letter for each server, so that its address need not stand in every row."""
    return dict(zip(dict.fromkeys(run["label"] for run in runs), NAMES, strict=False))


def _brief(value: float | None) -> str:
    """A number with about three digits."""
    return _number(value, 2 if (value or 0) < 10 else 1 if (value or 0) < 100 else 0)


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:,.{places}f}"
