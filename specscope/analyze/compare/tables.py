"""A comparison as tables of strings: what text and page both show, worded and formatted once; and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specscope.analyze.compare.align import PairedBy
from specscope.analyze.compare.bootstrap import Estimate
from specscope.analyze.compare.config import NOT_KNOWN
from specscope.analyze.compare.failif import FailCondition
from specscope.analyze.compare.parting import Decision, Half, Parting
from specscope.analyze.compare.result import Comparison, Pair, Sameness, accused
from specscope.analyze.table import NONE, Table, count, number, one_line, percent
from specscope.analyze.tables import MOST_SHOWN
from specscope.analyze.text import render_page
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

PARTINGS_SHOWN = 20
DETAILED = 3  # partings whose decisions are shown
GROUPS_SHOWN = 40
STYLES = {Sameness.SAME: "bold green", Sameness.DIFFERENT: "bold red"}
UNEXPLAINED = " !: neither seed, text, rounding nor configuration explains it."
VALUE_SHOWN = 2000  # characters of a value of the configuration: a tree is whole, a schema may be cut


def header(comparison: Comparison) -> list[tuple[str, str]]:
    rows, kinds = [], Counter(pair.match for pair in comparison.pairs)
    matched = [f"{count(kinds[kind])} by {kind.value}" for kind in PairedBy if kinds[kind]]
    for name, side in comparison.sides.items():
        rows.append((name, f"{', '.join(side.source)}: {side.target}, drafter {side.drafter}"))
        counts = f"{plural(side.requests, 'request')}, {plural(side.decode_steps, 'decode step')}"
        rows.append(("", f"{counts}, {plural(side.tokens, 'output token')}"))
        matched += [f"{count(side.unmatched)} only in {name}"] if side.unmatched else []
    return [*rows, ("pairs", ", ".join(matched) or "none")]


def tables(comparison: Comparison) -> list[Table]:
    every = [
        configuration(comparison),
        partings(comparison),
        *details(comparison),
        contexts(comparison),
        figures(comparison),
        groups(comparison),
        conditions(comparison.conditions),
    ]
    return [table for table in every if table.rows or table.note]


def configuration(comparison: Comparison) -> Table:
    rows = [
        (line.name, one_line(line.a, VALUE_SHOWN), one_line(line.b, VALUE_SHOWN), line.note)
        for line in comparison.differences
    ]
    unknown = " and ".join(name for name, side in comparison.sides.items() if side.target == NOT_KNOWN)
    note = "" if rows else "Nothing differs in the configuration."
    note = f"The configuration of {unknown} is not recorded." if unknown else note
    words = ("A", "B", "leads to")
    return Table("Configuration", ("what differs", *words), rows, note, frozenset(words))


def partings(comparison: Comparison) -> Table:
    """Pairs whose outputs part, and those with the same output from other decisions."""
    title, pairs, rows = "Where outputs part", comparison.pairs, []
    if not pairs:
        return Table(title, (), [], f"No outputs are compared: {comparison.unpaired}.")
    marked = accused(pairs, comparison.differences)

    def cause(parting: Parting) -> str:
        return ("! " if parting.cause in marked else "") + parting.cause.value

    listed = [pair for pair in pairs if not pair.same]
    listed += [pair for pair in pairs if pair.same and marked.keys() & pair.causes]
    listed.sort(key=lambda pair: not marked.keys() & pair.causes)
    for pair in listed[:PARTINGS_SHOWN]:
        row: tuple[str, ...] = NONE, NONE, NONE, "same output"
        if pair.parting is not None:
            outputs = map(came_out, (pair.parting.a, pair.parting.b))
            row = (count(pair.parting.position), *outputs, cause(pair.parting))
        first = NONE if pair.first is None else f"token {pair.first.position:,}: {cause(pair.first)}"
        rows.append((one_line(pair.id_a, MOST_SHOWN), one_line(pair.id_b, MOST_SHOWN), *row, first))
    note = _parted_note(comparison)
    note += UNEXPLAINED if marked else ""
    note += f" {len(listed) - PARTINGS_SHOWN:,} more; --json shows all." if len(listed) > PARTINGS_SHOWN else ""
    words = ("in B", "A", "B", "cause", "first other decision")
    return Table(title, ("request", "in B", "at token", *words[1:]), rows, note, frozenset(words))


def _parted_note(comparison: Comparison) -> str:
    """How many pairs part, and how many have the same output, and of these by other decisions."""
    pairs, parted = len(comparison.pairs), sum(comparison.partings.values())
    otherwise = sum(pair.same and pair.first is not None for pair in comparison.pairs)
    alike, by = pairs - parted, f", {otherwise:,} of them through different decisions" if otherwise else ""
    if not parted:
        return f"{'The pair has' if pairs == 1 else f'All {pairs:,} pairs have'} the same output{by}."
    if parted == pairs > 1 == len(comparison.partings):
        return f"All {pairs:,} pairs diverge: {next(iter(comparison.partings)).about}."
    note = f"{parted:,} of {plural(pairs, 'pair')} {'diverges' if parted == 1 else 'diverge'}"
    note += f": {', '.join(f'{n:,} {cause.value}' for cause, n in comparison.partings.items())}."
    return f"{note} The other {alike:,} {'has' if alike == 1 else 'have'} the same output{by}." if alike else note


def came_out(half: Half) -> str:
    if half.token is None:
        return "the end"
    text = next((decision.text for decision in half.decisions if decision.token == half.token), f"#{half.token}")
    return one_line(text, 20)


def details(comparison: Comparison) -> list[Table]:
    """The first partings, decision by decision; those without a harmless explanation come first."""
    chosen = [(pair, pair.parting) for pair in comparison.pairs if pair.parting is not None]
    chosen.sort(key=lambda item: item[1].cause.harmless)
    return [_detail(pair, parting) for pair, parting in chosen[:DETAILED]]


def _detail(pair: Pair, parting: Parting) -> Table:
    rows, sides = [], (("A", parting.a), ("B", parting.b))
    for name, half in sides:
        rows += [(name if not index else "", *_decision_row(decision)) for index, decision in enumerate(half.decisions)]
    columns = ("", "token", "node", "what", "raw p", "draft p", "p", "q", "coin", "a", "margin")
    where = ", ".join(f"{name} {half.at}" for name, half in sides if half.at is not None)
    title = f"{one_line(pair.id_a, MOST_SHOWN)} parts at output token {parting.position:,}"
    note = f"{parting.cause.about} ({where}). margin: how far p would have to move for another outcome. ≈: a near tie."
    return Table(title, columns, rows, note, frozenset(["token", "what"]))


def _decision_row(decision: Decision) -> tuple[str, ...]:
    margin = f"{decision.margin:.2g}" if decision.margin < 1 else NONE
    if decision.gap is not None and margin == NONE:
        margin = f"{decision.gap:.2g} raw"
    drawn = (decision.p, decision.coin, decision.accept_prob) if not decision.greedy else (None, None, None)
    raw_p, draft_p, q, p, coin, accept_prob = (
        number(value, 4) for value in (decision.raw_p, decision.draft_p, decision.q, *drawn)
    )
    q, margin = q + (" ≈" if decision.near_draw else ""), margin + (" ≈" if decision.near_tie else "")
    node = NONE if decision.node is None else str(decision.node)
    return one_line(decision.text, 20), node, decision.what, raw_p, draft_p, p, q, coin, accept_prob, margin


def contexts(comparison: Comparison) -> Table:
    title = "At equal contexts"
    if not comparison.steps:
        return Table(title, (), [], "No step of A has the same context as a step of B: nothing is compared.")
    rows = []
    for field in comparison.fields:
        largest = NONE if field.largest is None else f"{field.largest:.2g}"
        example = NONE if field.example is None else " / ".join(map(str, field.example))
        mark = f"as configured ({', '.join(field.explained)}): " if field.explained else ""
        mark = mark or ("! " if field.suspect else "? " if field.unsure else "")
        counts = count(field.compared), count(field.differ), percent(field.share)
        row = (field.name, *counts, largest, example, mark + (field.condition or field.note))
        rows += [row] if field.compared else []
    note = (
        f"{plural(comparison.steps, 'step')} and {plural(comparison.nodes, 'node')} of both sides have the same "
        "context: the same request, output so far and path."
    )
    note += UNEXPLAINED if any(field.suspect for field in comparison.fields) else ""
    note += (
        " ?: whether rounding explains it is not recorded." if any(field.unsure for field in comparison.fields) else ""
    )
    columns = ("evidence", "compared", "differ", "share", "largest", "example A / B", "")
    return Table(title, columns, rows, note, frozenset(["example A / B", ""]))


def figures(comparison: Comparison) -> Table:
    note = (
        "95 %: interval of the difference, by a cluster bootstrap over requests. smallest visible change: what "
        "this many requests show with 95 % power; –: they are too few to see any change. n: requests, or pairs "
        "of requests. *: differs; for tau, the primary figure, if its interval "
        "excludes 0, for the others after Holm's correction. Rates by depth: of all drafts, "
        "as in vLLM. whole paths: drafts accepted down to a leaf. --fail-if takes each figure by name."
    )
    return _estimates("Figures", "figure", [_estimate(figure, comparison) for figure in comparison.figures], note)


def _estimates(title: str, first: str, rows: Sequence[tuple[str, ...]], note: str) -> Table:
    columns = (first, "A", "B", "B − A", "95 %", "smallest visible change", "n", "")
    return Table(title, columns, rows, note if rows else "", frozenset([""]))


def _estimate(figure: Estimate, comparison: Comparison) -> tuple[str, ...]:
    mark = "as configured" if comparison.settings else "*"
    values = figure.text(figure.a), figure.text(figure.b), figure.points(figure.difference, sign="+")
    seen = figure.points(figure.visible), count(figure.clusters)
    return figure.name, *values, figure.interval(), *seen, mark if figure.significant else ""


def groups(comparison: Comparison) -> Table:
    rows = [(one_line(figure.name, MOST_SHOWN), *_estimate(figure, comparison)[1:]) for _, figure in comparison.grouped]
    shown = rows if len(rows) <= GROUPS_SHOWN else sorted(rows, key=lambda row: not row[-1])[:GROUPS_SHOWN]
    note = "n: requests. *: differs, after Holm's correction over the table. --fail-if: tau where GROUP is VALUE."
    note += f" {len(rows) - len(shown):,} more; --json shows all." if len(rows) > len(shown) else ""
    return _estimates("Acceptance length by group", "acceptance length by", shown, note)


def conditions(asked: Sequence[FailCondition], note: str = "") -> Table:
    rows = [(printable(condition.text), "FAIL" if condition.hit else "ok", condition.detail) for condition in asked]
    return Table("--fail-if", ("condition", "", "change"), rows, note, frozenset(["", "change"]))


def render_text(comparison: Comparison, console: Console) -> None:
    """Print it. Text of models and users is never read as markup, and holds no control characters."""
    render_page(console, header(comparison), comparison.warnings, ())
    console.print()
    console.print(Text(f"{comparison.summary}", style=STYLES.get(comparison.answer, "bold yellow")))
    console.print(Text(printable(comparison.headline), style="bold"))
    for reason in comparison.reasons:
        console.print(Text(f"  • {printable(reason)}"))
    for line in comparison.missing:
        console.print(Text(f"  – {printable(line)}", style="dim"))
    render_page(console, (), (), tables(comparison))
    console.print(Text(f"\n{printable(comparison.headline)}", style="bold"))
