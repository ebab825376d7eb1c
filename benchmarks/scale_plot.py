"""The curves of `python -m benchmarks scale` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.scale_points import SHORTS, ScalePoint
from specscope.trace.files import save_figure

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
COLOURS = {"specscope": "#3f7fbf", "transformers": "#d98324", "vLLM": "#4a9c5d"}
TITLES = {
    "batch": ("requests at once", "batch size"),
    "context": ("one request", "tokens of context"),
    "mixed": (f"{SHORTS} short requests and a long one", "tokens of the long one's context"),
}


def write_plot(points: Sequence[ScalePoint], path: str) -> None:
    """As SVG or PNG, by the name's end. Raises UserError."""
    curves = [curve for curve in TITLES if any(point.curve == curve for point in points)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(curves), 3.4), layout="constrained")
        for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
            _draw(axes, curve, [point for point in points if point.curve == curve])
        figure.axes[0].legend(loc="upper left")
        save_figure(figure, path)


def _draw(axes: Axes, curve: str, points: Sequence[ScalePoint]) -> None:
    """A line for each side, with the range of its rounds."""
    sizes = [point.size for point in points]
    for side in points[0].rates:
        rates = [point.rates[side] for point in points]
        axes.plot(sizes, list(map(median, rates)), color=COLOURS[side], marker=".", label=side)
        axes.fill_between(sizes, list(map(min, rates)), list(map(max, rates)), color=COLOURS[side], alpha=0.15)
    title, label = TITLES[curve]
    axes.set_title(title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if max(sizes) > 1000 else 0)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("tokens/s")
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
