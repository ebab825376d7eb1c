"""The plot of a tuning: tokens/s and acceptance length by size."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specscope.analyze.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, STYLE
from specscope.analyze.tune.judged import TreeRow
from specscope.analyze.tune.tuning import Tuning
from specscope.trace.files import save_figure

COLOURS = {"static": BLUE, "dynamic": ORANGE}
MARKS = {"recorded": ("s", GREY), "default": ("D", PURPLE), "choice": ("*", GREEN)}
TEXT = "#30343b"  # read on white: the file stands alone


def write_plot(tuning: Tuning, path: str) -> None:
    """As SVG or PNG, by the name's end. Raises UserError."""
    style: Any = STYLE | dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), TEXT
    )
    with matplotlib.rc_context(style | {"svg.hashsalt": "tune"}):
        sides = 2 if tuning.costs is not None else 1
        figure = Figure(figsize=(5.2 * sides, 3.4), layout="constrained")
        axes = figure.subplots(1, sides, squeeze=False)[0]
        if tuning.costs is not None:
            _draw(axes[0], tuning, speed=True)
        _draw(axes[-1], tuning, speed=False)
        axes[0].legend(fontsize=8, loc="best")
        save_figure(figure, path)


def _draw(axes: Axes, tuning: Tuning, *, speed: bool) -> None:
    """One figure by nodes: lines for the best of each size, marks for the trees with a name.

    Measured values are scaled by what was expected, to the load under which the curve's costs were measured.
    """
    best = "best" if tuning.costs is None else "fastest"
    for family, colour in COLOURS.items():
        rows = tuning.family(family)
        if rows:
            points = [(row.nodes, *_figure(row, speed)) for row in rows]
            nodes, values, low, high = zip(*points, strict=True)
            axes.plot(nodes, values, color=colour, marker=".", linewidth=1.5, label=f"{best} {family} tree")
            axes.fill_between(nodes, low, high, color=colour, alpha=0.12, linewidth=0)
    plain = tuning.named("plain")
    if speed and plain is not None:
        axes.axhline(_figure(plain, speed)[0], color=GREY, linestyle="--", linewidth=1, label="no drafting")
    for name, (mark, colour) in MARKS.items():
        row = tuning.named(name)
        if row is not None and row.family != "plain":
            size = 11 if name == "choice" else 6
            value = _figure(row, speed)[0]
            tree = row.tree if len(row.tree) <= 32 else row.tree[:31] + "…"
            axes.plot([row.nodes], [value], mark, color=colour, markersize=size, label=f"{name}: {tree}")
    checked = [(row.nodes, _measured(row, speed)) for row in tuning.rows if row.measured is not None]
    if checked:
        axes.plot(*zip(*checked, strict=True), "x", color=TEXT, markersize=7, label="measured, other prompts")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("nodes verified in a step")
    axes.set_ylabel("tokens/s" if speed else "acceptance length")
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)


def _figure(row: TreeRow, speed: bool) -> tuple[float, float, float]:
    """A row's value with its interval, or with none."""
    length = row.speed if speed and row.speed is not None else row.length
    return length.value, length.low or length.value, length.high or length.value


def _measured(row: TreeRow, speed: bool) -> float:
    measured = (row.measured or 0.0) / (row.expected or 1.0)
    return _figure(row, speed)[0] * measured if speed else row.measured_length or 1.0
