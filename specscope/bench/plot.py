"""Latency over load as a picture, a line for each server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specscope.bench.figures import percentile_name
from specscope.bench.points import Figures, LoadPoint, points
from specscope.trace.files import save_figure

COLOURS = ("#3f7fbf", "#d98324", "#4a9c5d", "#9a5ba5", "#8a6d3b")
PANELS = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end to end"}

TEXT = "#30343b"  # read on white: the file stands alone
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "specscope",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT),
}


def write_plot(runs: Sequence[Figures], percentiles: Sequence[float], path: str) -> None:
    """As SVG or PNG, by the name's end: medians, dashed the highest percentile, and throughput. Raises UserError."""
    load_points, last = points(runs), percentile_name(percentiles[-1])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * 2, 3.2 * 2), layout="constrained")
        (first, second), (third, fourth) = figure.subplots(2, 2)
        for axes, (key, title) in zip((first, second, third), PANELS.items(), strict=True):
            _lines(axes, load_points, f"median_{key}_ms", "-")
            _lines(axes, load_points, f"{last}_{key}_ms", "--")
            axes.set_title(f"{title}: median, {last} dashed", fontsize=10)
            axes.set_ylabel("ms")
        _lines(fourth, load_points, "output_throughput", "-")
        fourth.set_title("throughput", fontsize=10)
        fourth.set_ylabel("output tokens/s")
        for axes in figure.axes:
            axes.set_xlabel("requests at once" if load_points[0].load.rate is None else "requests/s")
            axes.set_ylim(0, axes.dataLim.ymax * 1.08 or 1)
            axes.grid(axis="y", alpha=0.25, linewidth=0.6)
        first.legend(loc="best")
        save_figure(figure, path)


def _lines(axes: Axes, load_points: Sequence[LoadPoint], name: str, style: str) -> None:
    """A line for each server; where a load has no such figure, there is no point."""
    for number, label in enumerate(dict.fromkeys(point.label for point in load_points)):
        mine = sorted((point for point in load_points if point.label == label), key=lambda point: point.load.size)
        pairs = [(point.load.size, value) for point in mine if (value := point.median(name)) is not None]
        colour = COLOURS[number % len(COLOURS)]
        text = label if style == "-" else None
        axes.plot(*zip(*pairs, strict=True), style, color=colour, marker=".", label=text) if pairs else None
