"""A comparison as one HTML page that needs nothing else."""

from __future__ import annotations

from specscope.analyze.compare import tables
from specscope.analyze.compare.result import Comparison
from specscope.errors import UserError
from specscope.trace.record.vocabulary import printable


def render_html(comparison: Comparison) -> str:
    """The page. All text of models and users is escaped. Raises UserError where matplotlib is not installed."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    try:
        from specscope.analyze.compare.plots import plots
    except ImportError as error:
        raise UserError(f"the HTML page needs {error.name}: pip install 'specscope[html]'") from error
    environment = Environment(
        loader=PackageLoader("specscope", "analyze"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    sides = (("A", comparison.a), ("B", comparison.b))
    return environment.get_template("compare.html.j2").render(
        title=printable(" / ".join([*comparison.a.sources[:1], *comparison.b.sources[:1]])),
        header=[(name, printable(value)) for name, value in tables.header(comparison)],
        warnings=[f"{name}: {printable(line)}" for name, side in sides for line in side.warnings],
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
        ("acceptance length, B − A", "–" if tau is None else tables.change_text(tau.difference, tau)),
        ("95 % of B − A", "–" if tau is None else tables.interval_text(tau)),
        ("acceptance length of A", "–" if tau is None else tables.value_text(tau.a, tau)),
        ("acceptance length of B", "–" if tau is None else tables.value_text(tau.b, tau)),
        ("pairs that part", f"{parted:,} of {len(comparison.pairs):,}"),
        ("kinds of evidence that differ unexplained", f"{differ} of {len(comparison.fields)}"),
    ]
