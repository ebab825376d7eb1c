"""A run, a request, a step and a comparison as static HTML for a notebook.

JupyterLab takes scripts, SVG and colours by name out of a notebook that it does not trust. So there are none, and a
tree is a table. What models and users wrote is escaped, no meaning is by colour alone, and grounds are faint, so that
text is legible on them in a light and a dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from specscope.analyze import tables
from specscope.analyze.compare import tables as compared
from specscope.analyze.compare.result import Comparison
from specscope.analyze.report import Report, RequestReport
from specscope.analyze.table import Table
from specscope.trace.record.records import Origin, Outcome, RequestStep
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.words import branches, draw_tree

MOST_REQUESTS = 20
GREEN, BLUE, LEFT = "rgba(0,150,80,0.22)", "rgba(40,110,220,0.22)", "text-align:left"
RED, GREY = "rgba(220,60,50,0.22)", "rgba(128,128,128,0.18)"
ORIGINS = {  # of an output token: its ground, its line below, and what it is
    Origin.ACCEPTED: (GREEN, "solid", "a draft that was accepted"),
    Origin.BONUS: (BLUE, "double", "the bonus token behind accepted drafts"),
    Origin.RECOVERED: (RED, "dashed", "the target's, in place of a rejected draft"),
    Origin.TARGET: (GREY, "dotted", "the target's, where nothing was drafted"),
}
OUTCOMES = {Outcome.ACCEPTED: (GREEN, "solid"), Outcome.REJECTED: (RED, "dashed"), Outcome.UNTRIED: (GREY, "dotted")}
PRE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element. `inside` is HTML."""
    given = "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inside)}</{name}>"


def text(words: str, keep: str = "") -> str:
    """What somebody wrote, as HTML: no control characters, and nothing that is read as a tag."""
    return escape(printable(words, keep))


def lines(words: Iterable[str]) -> str:
    return "".join(tag("div", text(line)) for line in words)


def heading(title: str) -> str:
    return tag("div", tag("b", text(title)), style="margin-top:8px")


def pairs(header: Iterable[tuple[str, str]]) -> str:
    """What something is about: names and values."""
    rows = (tag("tr", tag("th", text(name), style=LEFT), tag("td", text(value), style=LEFT)) for name, value in header)
    return tag("table", tag("tbody", *rows))


def table(shown: Table) -> str:
    """A table under its title, with what its columns mean: words flush left, figures flush right."""
    sides = [LEFT if shown.is_words(column) else "text-align:right" for column in range(len(shown.columns))]

    def row(kind: str, cells: Iterable[str]) -> str:
        return tag("tr", *(tag(kind, text(each), style=side) for each, side in zip(cells, sides, strict=True)))

    head = tag("thead", row("th", shown.columns)) if any(shown.columns) else ""
    body = tag("table", head, tag("tbody", *(row("td", cells) for cells in shown.rows))) if shown.rows else ""
    return heading(shown.title) + body + (tag("small", text(shown.note)) if shown.note else "")


def of_run(report: Report) -> str:
    shown = [tables.acceptance(report), tables.positions(report), tables.requests(report, MOST_REQUESTS)]
    warnings = lines(f"! {warning}" for warning in report.warnings)
    return pairs(tables.header(report)) + warnings + "".join(map(table, shown))


def of_request(request: RequestReport) -> str:
    """A request's output, each token by where it came from."""
    prompt = "" if request.prompt is None else tag("pre", text(request.prompt, "\n\t"), style=f"{PRE};opacity:0.75")
    pieces = (_by_origin(*each) for each in zip(request.pieces, map(Origin, request.origins), strict=False))
    legend = (f"{_by_origin(origin.value, origin)} {what}" for origin, (*_, what) in ORIGINS.items())
    output = tag("pre", *pieces, style=PRE) + tag("small", " · ".join(legend))
    output = output if request.pieces else lines(["the capture does not hold its text"])
    return heading(request.id) + lines([tables.request_facts(request)]) + prompt + output


def _by_origin(piece: str, origin: Origin) -> str:
    ground, line, what = ORIGINS[origin]
    style = f"background:{ground};border-bottom-width:2px;border-bottom-style:{line}"
    return tag("span", text(piece, "\n\t"), style=style, title=what)


def of_tree(step: RequestStep, vocabulary: Vocabulary, shown: int | None = None) -> str:
    """A judged tree from left to right: a node stands beside its parent, and spans the rows of what is below it.

    `shown`: the node in question.
    """
    root, *told = draw_tree(step, vocabulary).splitlines()
    order, verdict = branches(step.tree.parent.tolist()), step.verdict
    if verdict is None:
        return lines([root])
    spans = dict.fromkeys((ROOT, *range(len(step.tree))), 0)  # rows
    for node, _ in reversed(order):
        spans[node] = spans[node] or 1
        spans[int(step.tree.parent[node])] += spans[node]
    rows, last = [tag("td", text(root), rowspan=spans[ROOT] or 1)], ROOT
    for (node, lead), line in zip(order, told, strict=False):
        ground, border = OUTCOMES[Outcome(int(verdict.outcome[node]))]
        token, _, figures = line.removeprefix(lead).partition("  ")
        style = f"{LEFT};background:{ground};border-width:{3 if node == shown else 1}px;border-style:{border}"
        inside = tag("b", text(token)) + "<br>" + tag("small", text(figures))
        rows += [] if int(step.tree.parent[node]) == last else [""]
        rows[-1] += tag("td", inside, rowspan=spans[node], style=style)
        last = node
    tree = tag("table", tag("tbody", *(tag("tr", row) for row in rows)))
    return tag("div", tree, style="overflow-x:auto") + lines(told[len(order) :])


def of_comparison(found: Comparison) -> str:
    """A comparison, as `specscope compare` prints it."""
    warnings, reasons = (f"! {warning}" for warning in found.warnings), (f"• {reason}" for reason in found.reasons)
    about = lines([*warnings, found.summary, found.headline, *reasons, *(f"– {line}" for line in found.missing)])
    return pairs(compared.header(found)) + about + "".join(map(table, compared.tables(found)))


def framed(page: Iterable[bytes], height: int) -> str:
    """A whole page in a frame, whose scripts see nothing of the notebook."""
    style = f"width:100%;height:{height}px;border:0"
    return tag("iframe", srcdoc=b"".join(page).decode(), sandbox="allow-scripts", style=style, title="specscope")
