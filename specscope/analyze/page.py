"""A report as one HTML page that needs nothing else: no network, no scripts, plots inline, light and dark."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from specscope.analyze import tables
from specscope.analyze.report import Report, RequestReport, Several
from specscope.analyze.table import number, percent
from specscope.trace.record.records import Origin
from specscope.trace.record.vocabulary import printable

TOP = 20  # rows of each question over many steps
HALF_PAGE = 72  # characters: a wider table has the page's whole width
REQUESTS_SHOWN = 200  # a page of thousands of texts is slow to open; the JSON has them all


def render_html(reports: Several, top: int = TOP) -> str:
    """The page. All text of models and users is escaped. Raises ImportError where matplotlib is not installed."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specscope", "analyze"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    over = {"notes": list(map(printable, reports.notes)), "tables": tables.over_all(reports)}
    return environment.get_template("page.html.j2").render(
        title=printable(", ".join(report.source for report in reports.reports)),
        half_page=HALF_PAGE,
        over=over if len(reports.reports) > 1 else None,
        pages=[_capture(report, top, str(number or "")) for number, report in enumerate(reports.reports)],
        origins=[origin.value for origin in Origin],
    )


def _capture(report: Report, top: int, salt: str) -> dict[str, Any]:
    """What the page shows of one capture."""
    from markupsafe import Markup

    from specscope.analyze.plots import plots

    shown = tables.requests(report, REQUESTS_SHOWN)
    return {
        "header": tables.header(report),
        "warnings": [printable(warning) for warning in report.warnings],
        "headline": headline(report),
        "tables": [*tables.tables(report), *tables.questions(report, top)],
        "plots": [(title, Markup(svg)) for title, svg in plots(report, salt)],  # made from figures alone
        "requests": [_request(request, row) for request, row in zip(report.requests, shown.rows, strict=False)],
        "requests_note": shown.note,
        "request_columns": shown,
    }


def headline(report: Report) -> list[tuple[str, str]]:
    """The few figures that people look for first: (name, value) pairs."""
    pooled = report.pooled
    return [
        ("mean acceptance length, pooled", number(pooled.tau)),
        ("output tokens per step, pooled", number(pooled.tokens_per_step)),
        ("decode steps that drafted nothing", tables.undrafted_share(report)),
        ("draft acceptance rate, pooled", percent(pooled.rate)),
        ("output tokens/s, wall clock", number(report.engine.tokens_per_s, 1)),
    ]


def _request(request: RequestReport, row: tuple[str, ...]) -> dict[str, Any]:
    return {
        "row": row,
        "facts": tables.request_facts(request),
        "prompt": None if request.prompt is None else printable(request.prompt, keep="\n\t"),
        "spans": spans(request),
        "has_text": request.output is not None,
    }


def spans(request: RequestReport) -> list[tuple[str, str]]:
    """(origin, text) of runs of output tokens of one origin."""
    tokens = zip(request.origins, request.pieces, strict=False)  # there are no pieces where text was left out
    runs = ((origin, "".join(piece for _, piece in run)) for origin, run in groupby(tokens, key=lambda token: token[0]))
    return [(origin, printable(text, keep="\n\t")) for origin, text in runs if text]
