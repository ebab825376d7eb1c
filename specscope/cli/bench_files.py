"""The files that benchmarks write, as flags."""

from __future__ import annotations

from pathlib import Path

import click

from specscope.errors import UserError
from specscope.trace.files import FIGURES, PLOT, check_output


def figures_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse an unusable --json file before minutes of measuring, not after."""
    if path is not None:
        check_output(path, "--json", (), FIGURES)
    return path


def plot_file(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """The same for --plot."""
    if path is not None:
        if Path(path).suffix.lower() not in (".svg", ".png"):
            raise UserError(f"--plot {path}: write a name that ends in .svg or .png")
        check_output(path, "--plot", (), PLOT)
    return path


json_option = click.option(
    "--json", "json_file", metavar="FILE", callback=figures_file, help="Also write the figures to this file."
)
