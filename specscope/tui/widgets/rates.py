"""Acceptance in figures: tau, the rates by depth as bars, where steps' final tokens came from; its length over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from specscope.trace.history.stats import Acceptance
from specscope.trace.history.totals import shares
from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import Aggregate
from specscope.trace.record.records import FinalKind
from specscope.tui.look import Look
from specscope.tui.text import NOTHING, Ink, Line, bar, blocks, clean, cut, figure, fit, left, percent, right
from specscope.tui.widgets.lines import Panel, Sheet

ROOMY = 40  # cells in which the rate has its whole name, and a depth both its rates
AXIS = 4
WIDEST = 4  # cells of a column
LEAST = 5  # depths that have a line before anything but the headline has
KINDS: tuple[Ink, ...] = ("recovered", "bonus", "target")


class RatesPanel(Panel):
    """Figures up to the position, over all requests or the current one."""

    OF = attrgetter("look.position", "look.scope", "look.pooled")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        counts = look.counts
        title = fit([(0, [("Acceptance", "strong")]), (1, [(clean(look.scope_name), "dim")])], width - 2)
        if counts.tau is None and look.aggregate is not None and look.aggregate.averages:
            title = [("Averages", "strong"), ("  this interval, as reported", "dim")]
            return Sheet(_averages(look.aggregate, width), title)
        nothing = undrafted_lines(look, width)
        if not counts.drafts:
            return Sheet([[("nothing drafted yet", "faint")], *nothing], title)
        names, bars = _by_depth(counts, width)
        spare = height - min(len(bars), LEAST) - 1
        if height == 1:
            return Sheet([[*_headline(counts, width // 2), ("  ", "dim"), *_rate_line(counts, width // 2)]], title)
        lines: list[Line] = [_headline(counts, width)]
        head = [names] if spare >= 1 and bars else []
        spare -= len(head)
        facts = [*nothing[: max(spare - 2, 2)], _rate_line(counts, width), _means(look, counts, width)]
        lines += facts[: max(spare, 0)]
        spare -= len(facts)
        if spare >= 1 and any(counts.kinds.values()):
            lines.append(_kinds(counts, width))
            spare -= 1
        if spare + LEAST >= len(bars) + 1:
            lines.append([])
        return Sheet([*lines, *head, *bars], title)


def _headline(counts: Acceptance, width: int) -> Line:
    """tau with its n, and beside it what all steps brought, those without drafts too."""
    of = f" of {plural(counts.drafts, 'draft') if width >= ROOMY else f'{counts.drafts:,}'}"
    parts: list[tuple[int, Line]] = [(0, [("τ ", "dim"), (figure(counts.tau), "strong"), (of, "dim")])]
    if counts.tokens_per_step is not None:
        per_step: Line = [(figure(counts.tokens_per_step), "strong"), (" tok" * (width >= ROOMY) + "/step", "dim")]
        parts.append((1, per_step))
    return fit(parts, width)


def undrafted_lines(look: Look, width: int) -> list[Line]:
    """How many steps drafted nothing, then a line a reason with its share, the commonest first; none where all did."""
    undrafted, run = look.undrafted, look.history.run
    total, steps = undrafted.total(), look.counts.steps
    if not total:
        return []
    of = f" of {plural(steps, 'step')}" if width >= ROOMY else f" of {steps:,}"
    share: Line = [("no draft in ", "dim"), (f"{total:,}", "strong"), (of, "dim")]
    adaptive: list[tuple[int, Line]] = [(1, [("adaptive", "dim")])] if run is not None and run.costs else []
    lines: list[Line] = [fit([(0, share), *adaptive], width)]
    for reason, part in shares(undrafted):
        lines.append([(right(percent(part), 5) + " ", "text"), (cut(reason.about, max(width - 6, 1)), "dim")])
    return lines


def _rate_line(counts: Acceptance, width: int) -> Line:
    share = percent(counts.rate)
    rate: Line = [(share, "strong"), (" accepted", "dim")]
    if width >= ROOMY:
        rate = [("draft acceptance rate ", "dim"), (share, "strong")]
    of = f"of {plural(counts.drafted, 'token' if counts.aggregates else 'node')}"
    return fit([(0, rate), (1, [(of, "dim")])], width)


def _means(look: Look, counts: Acceptance, width: int) -> Line:
    """What the pooled figures hide: the mean over requests, and for trees the share of the depth."""
    parts: list[tuple[int, Line]] = []
    if look.aggregate is not None:
        mark = "about " if look.aggregate.rounded else ""
        parts.append((0, [(mark + plural(counts.drafts, "draft"), "dim")]))
    elif look.pooled:
        mean, over = look.history.mean_tau_at(look.position)
        parts.append((0, [("per request τ ", "dim"), (figure(mean), "text"), (f" ({over})", "dim")]))
    else:
        parts.append((0, [(plural(counts.drafts, "draft"), "dim")]))
    if counts.depth != counts.drafted and not counts.aggregates:
        parts.append((1, [("of the depth ", "dim"), (percent(counts.depth_rate), "text")]))
    return fit(parts, width)


def _kinds(counts: Acceptance, width: int) -> Line:
    """Final tokens by kind, and of how many."""
    total = sum(counts.kinds.values())
    parts: list[tuple[int, Line]] = []
    for place, kind in enumerate(KINDS):
        if of_kind := counts.kinds[FinalKind(kind)]:
            parts.append((place, [(kind, kind), (f" {percent(of_kind / total)}", "dim")]))
    return fit([*parts, (len(KINDS), [(f"of {plural(total, 'final token')}", "dim")])], width)


def _averages(aggregate: Aggregate, width: int) -> list[Line]:
    """The averages that the source reports, each under its own name."""
    return [
        [(left(clean(name), max(width - 9, 4)), "dim"), (right(f"{value:,.2f}", 9), "strong")]
        for name, value in aggregate.averages.items()
    ]


def _by_depth(counts: Acceptance, width: int) -> tuple[Line, list[Line]]:
    """The names of the rates; then a line a depth: the bar and the rate with its n, the rate where its parent was
    accepted. Where it is not told how many drafts went so deep, the rate is of all.
    """
    known = counts.knows("proposed_at")
    shares = counts.per_position_corrected if known else counts.per_position
    rates = _of(shares, counts.proposed_at if known else [counts.drafts] * len(shares))
    conditional = _of(counts.conditional, counts.tried_at)
    name, both = "corrected" if known else "per-position", width >= ROOMY
    first, second = max(map(len, rates), default=0), max(map(len, ("conditional", *conditional)))
    heads = right(name, width - 7 - second) + "  " + right("conditional", second) if both else right(name, width - 5)
    room = max(0, width - 3 - 2 - first - (2 + second if both else 0))
    lines: list[Line] = []
    for depth, (share, rate, given) in enumerate(zip(shares, rates, conditional, strict=True), 1):
        full = bar(share or 0.0, room)
        rail = "·" * (room - len(full)) if share is not None else " " * room
        line: list[tuple[str, Ink]] = [(f"{depth:>2} ", "dim"), (full, "bar"), (rail, "rail")]
        line.append(("  " + right(rate, first), "strong"))
        lines.append([*line, ("  " + right(given, second), "dim")] if both else line)
    return [("depth" + heads, "faint")], lines


def _of(rates: Sequence[float | None], drafts: Sequence[int]) -> list[str]:
    """`0.163 of 80` of each."""
    return [NOTHING if rate is None else f"{rate:.3f} of {of:,}" for rate, of in zip(rates, drafts, strict=True)]


class LengthsPanel(Panel):
    """Mean acceptance length of each bucket of steps, from the start of the run to the position."""

    OF = attrgetter("look.position", "look.scope", "look.pooled")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        title = fit([(0, [("Acceptance length", "strong")]), (1, [(clean(look.scope_name), "dim")])], width - 2)
        buckets, size = look.history.lengths_at(look.position, look.scope, width - AXIS)
        span = min(width - AXIS, WIDEST * max(len(buckets), 1))
        known = [value for value in buckets if value is not None]
        if not known:
            return Sheet([[("nothing drafted yet", "faint")]], title)
        rows = max(1, height - 1)
        top = max(2, math.ceil(max(known)))
        marks = scale(rows, top)
        lines: list[Line] = [
            [(right(marks.get(row, ""), AXIS - 1) + ("┤" if row in marks else "│"), "faint"), (text, "bar")]
            for row, text in enumerate(columns(buckets, rows, top, span))
        ]
        unit = "step" if look.aggregate is None else "interval"
        scope = "" if look.pooled or look.aggregate is not None else f" of {clean(look.scope_name)}"
        lines.append([(right("1", AXIS - 1) + "└", "faint"), (f" one column: {plural(size, unit)}{scope}", "faint")])
        return Sheet(lines, title)


def columns(buckets: Sequence[float | None], rows: int, top: float, span: int) -> list[str]:
    """Rows of `span` block characters, from the top; 1 is the ground and keeps a sliver, an empty bucket is blank."""
    return blocks([0 if v is None else max(1, round((v - 1) / (top - 1) * rows * 8)) for v in buckets], rows, span)


def scale(rows: int, top: int) -> dict[int, str]:
    """Which rows carry which whole number: the row just below the height that stands for it."""
    marks: dict[int, str] = {}
    for value in range(top, 1, -max(1, math.ceil((top - 1) * 1.5 / rows))):
        row = rows - math.floor((value - 1) / (top - 1) * rows + 0.5)
        if row < rows:
            marks[row] = str(value)
    return marks
