"""A comparison in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specscope.analyze.compare import tables
from specscope.analyze.compare.result import Comparison, Sameness
from specscope.analyze.text import header_block, table_block
from specscope.trace.record.vocabulary import printable

STYLES = {Sameness.SAME: "bold green", Sameness.DIFFERENT: "bold red"}


def render_text(comparison: Comparison, console: Console) -> None:
    """Print it. Text of models and users is never read as markup, and holds no control characters."""
    console.print(header_block(tables.header(comparison)))
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        for warning in side.warnings:
            console.print(Text(f"! {name}: {printable(warning)}", style="yellow"))
    console.print()
    console.print(Text(f"{comparison.summary}", style=STYLES.get(comparison.answer, "bold yellow")))
    console.print(Text(printable(comparison.headline), style="bold"))
    for reason in comparison.reasons:
        console.print(Text(f"  • {printable(reason)}"))
    for line in comparison.missing:
        console.print(Text(f"  – {printable(line)}", style="dim"))
    for table in tables.tables(comparison):
        console.print(table_block(table))
