"""Acceptance in figures: tau, the rates by depth as bars, and where steps' final tokens came from."""

from __future__ import annotations

from collections.abc import Hashable

from specscope.trace.aggregate import Aggregate
from specscope.trace.records import FinalKind
from specscope.trace.stats import Acceptance
from specscope.trace.wording import plural
from specscope.tui.look import Look
from specscope.tui.text import LEVELS, Ink, Line, bar, clean, figure, fit, left, line_width, percent, right
from specscope.tui.widgets.lines import Sheet
from specscope.tui.widgets.panel import Panel

ROOMY, WIDE = 40, 56  # cells in which the rate, and the rates by depth, have their whole names


class RatesPanel(Panel):
    """Figures up to the position, over all requests or the current one. On a single row it draws a summary."""

    def key(self, look: Look) -> Hashable:
        """Counts change with the position and the scope."""
        return look.position, look.scope, look.pooled

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """As much as the height allows; bars come first."""
        counts = look.counts
        if height == 1:
            return Sheet([_summary(look, counts, width)])
        title = fit([(0, [("Acceptance", "strong")]), (1, [(clean(look.scope_name), "dim")])], width - 2)
        if counts.tau is None and look.aggregate is not None and look.aggregate.averages:
            title = [("Averages", "strong"), ("  this interval, as reported", "dim")]
            return Sheet(_averages(look.aggregate, width), title)
        if not counts.drafts:
            return Sheet([[("nothing drafted yet", "faint")]], title)
        bars = _bars(counts, width)
        spare = height - len(bars) - 1
        lines: list[Line] = [_headline(counts, width)]
        if spare >= 2:
            lines.append(_means(look, counts, width))
            spare -= 1
        if spare >= 3 and counts.kinds:
            lines += [*_kinds(counts, width)]
            spare -= 2
        if spare >= 4:
            lines.append([])
            spare -= 1
        if spare >= 1:
            lines.append(_bar_head(width))
        return Sheet([*lines, *bars], title)


def _headline(counts: Acceptance, width: int) -> Line:
    share = percent(counts.rate)
    rate: Line = [(share, "strong"), (" accepted", "dim")]
    if width >= ROOMY:
        rate = [("draft acceptance rate ", "dim"), (share, "strong")]
    return fit(
        [
            (0, [("τ ", "dim"), (figure(counts.tau), "strong")]),
            (1, rate),
            (2, [(f"of {plural(counts.drafted, 'token' if counts.aggregates else 'node')}", "dim")]),
        ],
        width,
    )


def _means(look: Look, counts: Acceptance, width: int) -> Line:
    """What the pooled figures hide: the mean over requests, and for trees the share of the depth."""
    parts: list[tuple[int, Line]] = []
    if look.aggregate is not None:
        mark = "about " if look.aggregate.rounded else ""
        parts.append((0, [(mark + plural(counts.drafts, "draft"), "dim")]))
    elif look.pooled:
        mean, over = look.ledger.mean_tau(look.position)
        parts.append((0, [("per request τ ", "dim"), (figure(mean), "text"), (f" ({over})", "dim")]))
    else:
        parts.append((0, [(plural(counts.drafts, "draft"), "dim")]))
    if counts.depth != counts.drafted and not counts.aggregates:
        parts.append((1, [("of the depth ", "dim"), (percent(counts.depth_rate), "text")]))
    return fit(parts, width)


def _kinds(counts: Acceptance, width: int) -> tuple[Line, Line]:
    """Final tokens by kind, as one stacked bar and in words."""
    total = sum(counts.kinds.values())
    kinds: list[Ink] = ["recovered", "bonus", "target"]
    strip: list[tuple[str, Ink]] = []
    words: list[tuple[int, Line]] = []
    left_over = width
    shown = [kind for kind in kinds if counts.kinds[FinalKind(kind)]]
    for kind in shown:
        share = counts.kinds[FinalKind(kind)] / total
        cells = left_over if kind == shown[-1] else min(left_over, max(1, round(share * width)))
        left_over -= cells
        strip.append(("▄" * cells, kind))
        words.append((len(words), [(kind, kind), (f" {percent(share)}", "dim")]))
    if sum(line_width(part) + 2 for _, part in words) - 2 <= width:
        return fit(words, width), strip
    short: list[tuple[int, Line]] = [(i, [("■", part[0][1]), (part[1][0], "dim")]) for i, part in words]
    return fit(short, width), strip


def _averages(told: Aggregate, width: int) -> list[Line]:
    """What is told as an average, under its own name."""
    return [
        [(left(clean(name), max(width - 9, 4)), "dim"), (right(f"{value:,.2f}", 9), "strong")]
        for name, value in told.averages.items()
    ]


def _rates(counts: Acceptance) -> list[float]:
    """Accepted at each depth / drafts that reached it; / all drafts where it is not told how many did."""
    known = zip(counts.per_position_corrected, counts.per_position, strict=True)
    return [plain if corrected is None else corrected for corrected, plain in known]


def _bar_head(width: int) -> Line:
    """The names of the two rates: per position, and given that the depth was tried."""
    names = ("per-position", "conditional") if width >= WIDE else ("per-pos", "cond")
    last = _cells(width)[1]
    return [("depth" + right(names[0], width - 7 - last) + "  " + right(names[1], last), "faint")]


def _cells(width: int) -> tuple[int, int]:
    """The widths of the two columns of rates."""
    return (12, 11) if width >= WIDE else (7, 5)


def _bars(counts: Acceptance, width: int) -> list[Line]:
    """A line a depth: the bar and the corrected rate, then the rate given that its parent was accepted."""
    lines: list[Line] = []
    one, two = _cells(width)
    room = max(4, width - 3 - 2 - one - 2 - two)
    for depth, (rate, given) in enumerate(zip(_rates(counts), counts.conditional, strict=True), 1):
        full = bar(rate, room)
        lines.append(
            [
                (f"{depth:>2} ", "dim"),
                (full, "bar"),
                ("·" * (room - len(full)), "rail"),
                ("  " + right(f"{rate:.3f}", one), "strong"),
                ("  " + right(figure(given, 3), two), "dim"),
            ]
        )
    return lines


def _summary(look: Look, counts: Acceptance, width: int) -> Line:
    """All of it on one line, for screens with no room for more."""
    if counts.tau is None and look.aggregate is not None and look.aggregate.averages:
        return fit([(0, part) for part in _averages(look.aggregate, width)], width)
    if not counts.drafts:
        return [(clean(look.scope_name), "dim"), ("  nothing drafted yet", "faint")]
    rates = _rates(counts)
    blocks = "".join(LEVELS[max(1, round(rate * 8))] for rate in rates)
    return fit(
        [
            (3, [(clean(look.scope_name), "dim")]),
            (0, [("τ ", "dim"), (figure(counts.tau), "strong")]),
            (1, [(percent(counts.rate), "strong"), (" accepted", "dim")]),
            (2, [("by depth ", "dim"), (blocks, "bar")]),
            (4, [(" ".join(f"{rate:.2f}" for rate in rates), "dim")]),
        ],
        width,
    )
