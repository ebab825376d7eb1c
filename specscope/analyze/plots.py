"""The plots of the page, as SVG to be embedded in HTML: no document type, no namespaces, no fixed text colour."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specscope.analyze.questions.rates import Plotted
from specscope.analyze.report import Report, by_position
from specscope.analyze.table import one_line
from specscope.trace.files import keep_spaces

INK = "#010203"  # stands for the page's text colour, and is replaced by `currentColor`: light and dark both work
BLUE, ORANGE, GREEN, PURPLE, GREY = "#3f7fbf", "#d98324", "#4a9c5d", "#9268b8", "#8a8f98"
MOST_TICKS = 16  # depths that are labelled below a plot
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def plots(report: Report, salt: str = "") -> list[tuple[str, str]]:
    """(title, SVG) of each plot that the report has figures for. `salt` keeps two reports of one page apart."""
    counted = report.pooled
    by_depth = counted.by_depth and counted.knows("accepted")
    drafted = [request for request in report.requests if request.figures.drafts]
    curves = () if report.answers is None else report.answers.calibration.curves
    wanted = [
        ("Acceptance by depth", _by_depth, by_depth),
        ("Accepted tokens per draft", _per_draft, by_depth),
        ("Mean acceptance length by request, worst first", _by_request, len(drafted) > 1),
        ("The drafter's probability against acceptance", _calibration, bool(curves)),
        ("Time by phase", _by_phase, len(report.phases) > 0 and not report.intervals),
    ]
    return [(title, svg(title, partial(draw, report=report), salt)) for title, draw, known in wanted if known]


def accepted_per_draft(accepted_at: Sequence[int], drafts: int) -> list[int]:
    """[k]: drafts with exactly k accepted tokens, from the counts of drafts that reached each depth."""
    reached = [drafts, *accepted_at, 0]
    return [here - deeper for here, deeper in pairwise(reached)]


def _by_depth(axes: Axes, report: Report) -> None:
    positions = by_position(report.pooled)
    rows = [
        ("per-position", BLUE, [position.per_position for position in positions]),
        ("corrected", GREEN, [position.corrected for position in positions]),
        ("conditional", ORANGE, [position.conditional for position in positions]),
    ]
    for index, (name, colour, values) in enumerate(rows):
        known = [
            (p.depth + (index - 1) * 0.27, value)
            for p, value in zip(positions, values, strict=True)
            if value is not None
        ]
        axes.bar([x for x, _ in known], [value for _, value in known], 0.25, label=name, color=colour)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    shown = positions[:: -(-len(positions) // MOST_TICKS)]
    axes.set_xticks(
        [p.depth for p in shown], [f"{p.depth}\n{p.drafts if p.proposed is None else p.proposed:,}" for p in shown]
    )
    axes.set_xlabel("depth; below it the drafts" + ("" if positions[0].proposed is None else " that proposed it"))
    legend(axes)


def _per_draft(axes: Axes, report: Report) -> None:
    acceptance = report.pooled
    counts = accepted_per_draft(acceptance.accepted_at, acceptance.drafts)
    axes.bar(range(len(counts)), [count / acceptance.drafts for count in counts], 0.7, color=BLUE)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    whole_ticks(axes)
    axes.set_xlabel("accepted tokens")
    axes.set_ylabel("drafts")


def _by_request(axes: Axes, report: Report) -> None:
    taus = [tau for request in report.requests if (tau := request.figures.tau) is not None]
    axes.plot(range(1, len(taus) + 1), taus, color=BLUE, marker="o", markersize=4, linewidth=0)
    axes.axhline(report.means.tau or 1.0, color=GREY, linestyle="--", linewidth=1, label="per-request mean")
    axes.set_ylim(bottom=1)
    whole_ticks(axes)
    axes.set_xlabel("request")
    legend(axes)


def _calibration(axes: Axes, report: Report) -> None:
    """Accepted share with its interval over the mean of each bin; a dot's p is the target's."""
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="calibrated")
    curves = report.answers.calibration.curves if report.answers is not None else ()
    for curve, colour in zip(curves, (BLUE, ORANGE), strict=False):
        means, shares = [group.mean for group in curve.bins], [group.accepted.value or 0.0 for group in curve.bins]
        intervals = [group.accepted.interval or (0.0, 0.0) for group in curve.bins]
        pairs = list(zip(shares, intervals, strict=True))
        errors = [[max(y - low, 0) for y, (low, _) in pairs], [max(high - y, 0) for y, (_, high) in pairs]]
        name = "q" if curve.plotted is Plotted.Q else "draft p"
        axes.errorbar(
            means, shares, errors, color=colour, marker="o", markersize=4, linewidth=1.2, label=f"accepted, by {name}"
        )
        axes.plot(
            means,
            [group.target_p for group in curve.bins],
            color=GREEN,
            marker="x",
            linewidth=0,
            label=f"target p, by {name}",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("draft p")
    legend(axes)


def _by_phase(axes: Axes, report: Report) -> None:
    colours = [GREY, ORANGE, BLUE, GREEN, PURPLE]
    names = [one_line(phase.name, 40) for phase in report.phases]
    axes.barh(names, [phase.share or 0.0 for phase in report.phases], 0.7, color=colours)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("share of the time in steps")


def whole_ticks(axes: Axes) -> None:
    """Only whole numbers on the x axis."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend(axes: Axes) -> None:
    """One column, at the right of the plot."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), borderaxespad=0.2, handlelength=1.2)


def svg(title: str, draw: Callable[[Axes], None], salt: str = "") -> str:
    """A plot that `draw` draws, as SVG."""
    # A fixed salt gives the same page for the same report; one per plot keeps the ids of a page's plots distinct.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title + salt}):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(axis="x" if axes.yaxis_inverted() else "y", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _inline(out.getvalue())


def _inline(svg: str) -> str:
    """The <svg> element alone, sized by the page, with the page's font and text colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same ids come back in every plot of a page
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would style the whole page
    svg = svg.replace(INK, "currentColor").replace("'DejaVu Sans', sans-serif", "inherit")
    return keep_spaces(svg.replace("<svg", '<svg role="img"', 1))
