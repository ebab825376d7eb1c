"""A comparison in the terminal, and as one HTML page that needs nothing else."""

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
    for warning in comparison.warnings:
        console.print(Text(f"! {printable(warning)}", style="yellow"))
    console.print()
    console.print(Text(f"{comparison.summary}", style=STYLES.get(comparison.answer, "bold yellow")))
    console.print(Text(printable(comparison.headline), style="bold"))
    for reason in comparison.reasons:
        console.print(Text(f"  • {printable(reason)}"))
    for line in comparison.missing:
        console.print(Text(f"  – {printable(line)}", style="dim"))
    for table in tables.tables(comparison):
        console.print(table_block(table))


def render_html(comparison: Comparison) -> str:
    """The page. All text of models and users is escaped. Raises ImportError where matplotlib is not installed."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    from specscope.analyze.compare.plots import plots

    environment = Environment(
        loader=PackageLoader("specscope", "analyze"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    return environment.get_template("compare.html.j2").render(
        title=printable(" / ".join([*comparison.a.source[:1], *comparison.b.source[:1]])),
        header=[(name, printable(value)) for name, value in tables.header(comparison)],
        warnings=[printable(line) for line in comparison.warnings],
        answer=comparison.answer.name.lower(),
        summary=printable(comparison.summary),
        reasons=[printable(line) for line in comparison.reasons],
        missing=[printable(line) for line in comparison.missing],
        tau=printable(comparison.headline),
        headline=headline(comparison),
        tables=tables.tables(comparison),
        plots=[(title, Markup(drawn)) for title, drawn in plots(comparison)],  # made from figures alone
    )


def headline(comparison: Comparison) -> list[tuple[str, str]]:
    """The few figures that people look for first: (name, value) pairs."""
    tau = comparison.tau
    parted = sum(comparison.partings.values())
    differ = sum(field.suspect for field in comparison.fields)
    return [
        ("acceptance length, B − A", "–" if tau is None else tau.text(tau.difference, sign="+")),
        ("95 % of B − A", "–" if tau is None else tau.interval()),
        ("acceptance length of A", "–" if tau is None else tau.text(tau.a)),
        ("acceptance length of B", "–" if tau is None else tau.text(tau.b)),
        ("pairs that part", f"{parted:,} of {len(comparison.pairs):,}"),
        ("kinds of evidence that differ unexplained", f"{differ} of {len(comparison.fields)}"),
    ]
