"""The plots of a comparison's page."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes

from specscope.analyze.compare.bootstrap import Estimate
from specscope.analyze.compare.result import Comparison
from specscope.analyze.plots import BLUE, GREY, ORANGE, legend, svg
from specscope.analyze.table import one_line

MOST = 24  # rows of a plot
MOST_POINTS = 1000


def plots(comparison: Comparison) -> list[tuple[str, str]]:
    """(title, SVG) of each plot that there are figures for."""
    wanted = [
        ("Acceptance by depth", _by_depth, bool(comparison.depths)),
        (
            "Difference of the acceptance length, with its 95 % interval",
            _differences,
            bool(_with_intervals(comparison)),
        ),
        ("Acceptance length by request", _by_request, any(None not in pair.tau for pair in comparison.pairs)),
        ("Calibration of q", _calibration, bool(comparison.calibration)),
        ("Output tokens before a pair parts", _lengths, bool(comparison.partings)),
    ]
    return [(title, svg(title, partial(draw, comparison=comparison))) for title, draw, known in wanted if known]


def _with_intervals(comparison: Comparison) -> list[tuple[str, Estimate]]:
    tau = [("all", figure) for figure in comparison.figures if figure.name == "tau" and figure.low is not None]
    groups = [(figure.name, figure) for _, figure in comparison.grouped if figure.low is not None]
    return [*tau, *groups][:MOST]


def _by_depth(axes: Axes, comparison: Comparison) -> None:
    depths = comparison.depths
    places = range(1, len(depths) + 1)
    axes.bar([place - 0.2 for place in places], [figure.a or 0.0 for figure in depths], 0.36, label="A", color=BLUE)
    reach = [0.0 if figure.low is None else (figure.difference or 0.0) - figure.low for figure in depths]
    style = {"elinewidth": 1, "ecolor": GREY}
    heights = [figure.b or 0.0 for figure in depths]
    axes.bar([place + 0.2 for place in places], heights, 0.36, yerr=reach, label="B", color=ORANGE, error_kw=style)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xticks(
        places, [f"{place}\n{depths[place - 1].weight[0]:,.0f}\n{depths[place - 1].weight[1]:,.0f}" for place in places]
    )
    axes.set_xlabel("depth; drafts of A, of B that proposed it (the line on B: 95 % of B − A)")
    legend(axes)


def _differences(axes: Axes, comparison: Comparison) -> None:
    listed = _with_intervals(comparison)
    names = [one_line(name, 40) for name, _ in listed]
    middles = [figure.difference or 0.0 for _, figure in listed]
    reach = [(figure.difference or 0.0) - (figure.low or 0.0) for _, figure in listed]
    places = list(range(len(listed)))
    axes.errorbar(middles, places, xerr=reach, fmt="o", markersize=4, color=BLUE, ecolor=BLUE, elinewidth=1.2)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("B − A")


def _by_request(axes: Axes, comparison: Comparison) -> None:
    points = [(a, b) for pair in comparison.pairs for a, b in [pair.tau] if a is not None and b is not None]
    points = points[:: -(-len(points) // MOST_POINTS)]  # evenly: each is text in the page
    top = max(max(point) for point in points)
    axes.plot([1, top], [1, top], color=GREY, linestyle="--", linewidth=1)
    axes.plot([a for a, _ in points], [b for _, b in points], color=BLUE, marker="o", markersize=4, linewidth=0)
    axes.set_xlabel("A")
    axes.set_ylabel("B")


def _calibration(axes: Axes, comparison: Comparison) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for side, (name, colour) in enumerate((("A", BLUE), ("B", ORANGE))):
        known = [
            (q, got) for interval in comparison.calibration for q, got in [(interval.q[side], interval.accepted[side])]
        ]
        points = [(q, got) for q, got in known if q is not None and got is not None]
        axes.plot(
            [q for q, _ in points], [got for _, got in points], color=colour, marker="o", markersize=4, label=name
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("q")
    axes.set_ylabel("accepted")
    legend(axes)


def _lengths(axes: Axes, comparison: Comparison) -> None:
    lengths = sorted(pair.parting.position for pair in comparison.pairs if pair.parting is not None)
    share = [(index + 1) / len(comparison.pairs) for index in range(len(lengths))]
    axes.step(lengths, share, where="post", color=BLUE)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("output tokens")
    axes.set_ylabel("pairs that have parted")
