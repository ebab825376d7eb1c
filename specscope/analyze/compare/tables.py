"""A comparison as tables of strings: what text and page both show, worded and formatted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import replace

from specscope.analyze.compare.failif import LABEL
from specscope.analyze.compare.result import (
    ABOUT,
    HARMLESS,
    NOT_KNOWN,
    Comparison,
    Decision,
    Estimate,
    FailCondition,
    Field,
    Half,
    Pair,
    PairedBy,
    Parting,
    PartingCause,
)
from specscope.analyze.compare.verdict import accused
from specscope.analyze.table import NONE, Table, count, number, one_line, percent
from specscope.analyze.tables import MOST_SHOWN
from specscope.trace.history.conditions import depth_rate
from specscope.trace.history.loops import LONGEST, TIMES
from specscope.trace.history.wording import plural
from specscope.trace.record.vocabulary import printable

PARTINGS_SHOWN = 20
DETAILED = 3  # partings whose decisions are shown
WHERE_SHOWN = 12  # lines of where a field differs
GROUPS_SHOWN = 40
CHANGED = 8  # requests, labels and depths that changed most
VALUE_SHOWN = 2000  # characters of a value of the configuration: a tree is whole, a schema may be cut


def header(comparison: Comparison) -> list[tuple[str, str]]:
    """What was compared: (name, value) pairs."""
    rows = []
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        rows.append((name, f"{', '.join(side.sources)}: {side.target}, drafter {side.drafter}"))
        counts = f"{plural(side.requests, 'request')}, {plural(side.decode_steps, 'decode step')}"
        rows.append(("", f"{counts}, {plural(side.tokens, 'output token')}"))
    rows.append(("pairs", matches(comparison)))
    return rows


def matches(comparison: Comparison) -> str:
    """How the requests were matched."""
    kinds = Counter(pair.match for pair in comparison.pairs)
    matched = [f"{count(kinds[kind])} by {kind.value}" for kind in PairedBy if kinds[kind]]
    left = [f"{count(side.unmatched)} only in {name}" for name, side in (("A", comparison.a), ("B", comparison.b))]
    return ", ".join([*matched, *(text for text in left if not text.startswith("0 "))]) or "none"


def tables(comparison: Comparison) -> list[Table]:
    """All tables, in the order of reading, without empty ones."""
    every = [
        configuration(comparison),
        partings(comparison),
        *details(comparison),
        contexts(comparison),
        *where(comparison),
        figures(comparison),
        changes(comparison),
        groups(comparison),
        calibration(comparison),
        conditions(comparison.conditions),
    ]
    return [table for table in every if table.rows or table.note]


def configuration(comparison: Comparison) -> Table:
    """What is not the same before anything ran."""
    rows = [
        (difference.name, one_line(difference.a, VALUE_SHOWN), one_line(difference.b, VALUE_SHOWN), difference.note)
        for difference in comparison.differences
    ]
    unknown = [name for name, side in (("A", comparison.a), ("B", comparison.b)) if side.target == NOT_KNOWN]
    note = f"The configuration of {' and '.join(unknown)} is not recorded." if unknown else ""
    note = note or ("" if rows else "Nothing differs in the configuration.")
    words = ("A", "B", "leads to")
    return Table("Configuration", ("what differs", *words), rows, note, frozenset(words))


def partings(comparison: Comparison) -> Table:
    """Pairs whose outputs part, and those with the same output from other decisions."""
    if not comparison.pairs:
        return Table("Where outputs part", (), [], f"No outputs are compared: {comparison.unpaired}.")
    parted = [pair for pair in comparison.pairs if pair.parting is not None]
    alike = [pair for pair in comparison.pairs if pair.parting is None]
    marked = accused(comparison.pairs, comparison.differences)
    listed = [*parted, *(pair for pair in alike if _is_accused(pair, marked))]
    listed.sort(key=lambda pair: not _is_accused(pair, marked))
    rows = [_parting_row(pair, marked) for pair in listed[:PARTINGS_SHOWN]]
    note = _parted_note(comparison, len(parted), sum(pair.first is not None for pair in alike))
    note += " !: nothing in seed, text, rounding or configuration explains it." if marked else ""
    note += f" {len(listed) - PARTINGS_SHOWN:,} more; the JSON has them all." if len(listed) > PARTINGS_SHOWN else ""
    columns = ("request", "in B", "at token", "A", "B", "cause", "first other decision")
    return Table(
        "Where outputs part", columns, rows, note, frozenset(["in B", "A", "B", "cause", "first other decision"])
    )


def _parted_note(comparison: Comparison, parted: int, otherwise: int) -> str:
    """How many pairs part, and how many have the same output, `otherwise` of them by other decisions."""
    pairs = len(comparison.pairs)
    alike, by = pairs - parted, f", {otherwise:,} of them by other decisions" if otherwise else ""
    if not parted:
        return f"{'The pair has' if pairs == 1 else f'All {pairs:,} pairs have'} the same output{by}."
    note = f"{parted:,} of {plural(pairs, 'pair')} {'parts' if parted == 1 else 'part'}"
    note += f": {', '.join(f'{n:,} {cause.value}' for cause, n in comparison.partings.items())}."
    return f"{note} The other {alike:,} {'has' if alike == 1 else 'have'} the same output{by}." if alike else note


def _is_accused(pair: Pair, marked: Container[PartingCause]) -> bool:
    return any(parting is not None and parting.cause in marked for parting in (pair.first, pair.parting))


def _parting_row(pair: Pair, marked: Container[PartingCause]) -> tuple[str, ...]:
    first, names = NONE, (one_line(pair.id_a, MOST_SHOWN), one_line(pair.id_b, MOST_SHOWN))
    if pair.first is not None:
        first = f"token {pair.first.position:,}: {_cause(pair.first, marked)}"
    if pair.parting is None:
        return (*names, NONE, NONE, NONE, "same output", first)
    a, b = pair.parting.a, pair.parting.b
    return (*names, count(pair.parting.position), came_out(a), came_out(b), _cause(pair.parting, marked), first)


def _cause(parting: Parting, marked: Container[PartingCause]) -> str:
    return ("! " if parting.cause in marked else "") + parting.cause.value


def came_out(half: Half) -> str:
    """The token that came out at a parting."""
    if half.token is None:
        return "the end"
    text = next((decision.text for decision in half.decisions if decision.token == half.token), f"#{half.token}")
    return one_line(text, 20)


def details(comparison: Comparison) -> list[Table]:
    """The first partings, decision by decision; those without a harmless explanation come first."""
    chosen = [(pair, pair.parting) for pair in comparison.pairs if pair.parting is not None]
    chosen.sort(key=lambda item: item[1].cause in HARMLESS)
    return [_detail(pair, parting) for pair, parting in chosen[:DETAILED]]


def _detail(pair: Pair, parting: Parting) -> Table:
    rows = []
    for name, half in (("A", parting.a), ("B", parting.b)):
        rows += [(name if not index else "", *_decision_row(decision)) for index, decision in enumerate(half.decisions)]
    columns = ("", "token", "node", "what", "raw p", "draft p", "p", "q", "coin", "a", "margin")
    where = ", ".join(f"{name} {half.at}" for name, half in (("A", parting.a), ("B", parting.b)) if half.at is not None)
    title = f"{one_line(pair.id_a, MOST_SHOWN)} parts at output token {parting.position:,}"
    note = f"{ABOUT[parting.cause]} ({where}). margin: how far p would have to move for another outcome. ≈: a near tie."
    return Table(title, columns, rows, note, frozenset(["token", "what"]))


def _decision_row(decision: Decision) -> tuple[str, ...]:
    margin = NONE if decision.margin >= 1 else f"{decision.margin:.2g}"
    if decision.gap is not None and margin == NONE:
        margin = f"{decision.gap:.2g} raw"
    return (
        one_line(decision.text, 20),
        NONE if decision.node is None else str(decision.node),
        decision.what,
        number(decision.raw_p, 4),
        number(decision.draft_p, 4),
        NONE if decision.greedy else number(decision.p, 4),
        number(decision.q, 4) + (" ≈" if decision.near_draw else ""),
        NONE if decision.greedy else number(decision.coin, 4),
        NONE if decision.greedy else number(decision.accept_prob, 4),
        margin + (" ≈" if decision.near_tie else ""),
    )


def contexts(comparison: Comparison) -> Table:
    """How far the evidence agrees where both sides are at the same context."""
    rows = [
        (
            field.name,
            count(field.compared),
            count(field.differ),
            percent(field.share) if field.compared else NONE,
            NONE if field.largest is None else f"{field.largest:.2g}",
            NONE if field.example is None else f"{field.example[0]} / {field.example[1]}",
            _mark(field) + (field.condition or field.note),
        )
        for field in comparison.fields
        if field.compared
    ]
    if not comparison.steps:
        return Table(
            "At equal contexts", (), rows, "No step of A stands at the context of one of B: nothing is compared."
        )
    note = (
        f"{plural(comparison.steps, 'step')} and {plural(comparison.nodes, 'node')} of both sides stand at the same "
        "context: the same request, output so far and path. !: nothing in seed, text, rounding or configuration "
        "explains it. ?: whether rounding does is not recorded."
    )
    columns = ("evidence", "compared", "differ", "share", "largest", "example A / B", "")
    words = frozenset(["example A / B", ""])
    return Table("At equal contexts", columns, rows, note, words)


def _mark(field: Field) -> str:
    if field.explained:
        return f"as configured ({', '.join(field.explained)}): "
    return "! " if field.suspect else "? " if field.unsure else ""


def where(comparison: Comparison) -> list[Table]:
    """At which depths and after what kind of step the evidence differs."""
    return [table for field in comparison.fields if field.suspect for table in [_where(field)] if table.rows]


def _where(field: Field) -> Table:
    lines = [(place.group, place.value, place.compared, place.differ) for place in field.where]
    varied = {group for group, *_ in lines if sum(line[0] == group for line in lines) > 1}
    rows = [
        (group, value, count(compared), count(differ), percent(differ / compared if compared else None))
        for group, value, compared, differ in lines
        if group in varied
    ]
    return Table(
        f"{field.name}: where it differs",
        ("by", "value", "compared", "differ", "share"),
        rows[: WHERE_SHOWN * 2],
        "",
        frozenset(["value"]),
    )


def figures(comparison: Comparison) -> Table:
    """Both sides as distributions."""
    rows = [_estimate(figure) for figure in comparison.figures]
    note = (
        "95 %: of the difference, by a cluster bootstrap over requests. would see: the least change that this many "
        "requests show with 95 % power. n: requests, or pairs of them. *: differs; tau, the primary figure, where its "
        "interval leaves 0 out, the others after Holm's correction over them. Rates by depth: of drafts that went so "
        f"deep{_drafts_by_depth(comparison)}. whole paths: drafts accepted down to a leaf. output in loops: the share "
        f"that lies in a cycle of up to {LONGEST} tokens that comes {TIMES} times or more in a row; it and tau "
        "without it are not judged. --fail-if takes each by its name."
    )
    columns = ("figure", "A", "B", "B − A", "95 %", "would see", "n", "")
    return Table("Figures", columns, rows, note if rows else "", frozenset([""]))


def _drafts_by_depth(comparison: Comparison) -> str:
    """The n of the rates by depth."""
    weights = [figure.weight for figure in comparison.figures if is_depth(figure)]
    sides = [", ".join(count(int(weight[side])) for weight in weights) for side in (0, 1)]
    return f" ({sides[0]} of A; {sides[1]} of B)" if weights else ""


def _estimate(figure: Estimate, digits: int = 3) -> tuple[str, ...]:
    return (
        figure.name,
        value_text(figure.a, figure, digits),
        value_text(figure.b, figure, digits),
        change_text(figure.difference, figure, digits),
        interval_text(figure, digits),
        value_text(figure.visible, figure),
        count(figure.clusters),
        "*" if figure.significant else "",
    )


def interval_text(figure: Estimate, digits: int = 3) -> str:
    """The 95 % interval of the difference."""
    low, high = (change_text(end, figure, digits) for end in (figure.low, figure.high))
    return NONE if figure.low is None else f"{low} to {high}"


def value_text(value: float | None, figure: Estimate, digits: int = 3) -> str:
    """A figure in its own unit."""
    return percent(value) if figure.percent else number(value, digits)


def change_text(value: float | None, figure: Estimate, digits: int = 3) -> str:
    """A difference in the figure's unit, with its sign."""
    if value is None:
        return NONE
    return f"{value * 100:+.1f}%" if figure.percent else f"{value:+.{digits}f}"


def changes(comparison: Comparison) -> Table:
    """The requests, labels and depths that changed most: the largest changes of each kind first."""
    requests = [
        Estimate(f"request {pair.id_a}", a, b, b - a, weight=pair.drafts)
        for pair in comparison.pairs
        for a, b in [pair.tau]
        if a is not None and b is not None
    ]
    labels = [
        replace(figure, name=f"{title}: {figure.name}")
        for title, each in comparison.groups.items()
        if title.startswith(LABEL)
        for figure in each
    ]
    depths = [replace(each, name=each.name.removesuffix(" rate")) for each in comparison.figures if is_depth(each)]
    rows = []
    for kind in (requests, labels, depths):
        changed = sorted((each for each in kind if each.difference), key=lambda each: -abs(each.difference or 0.0))
        for each in changed[:CHANGED]:
            name, a, b, difference, interval, _, _, star = _estimate(each, 2)
            drafts = " / ".join(dict.fromkeys(count(int(n)) for n in each.weight))
            rows.append((one_line(name, MOST_SHOWN), a, b, difference, interval, drafts, star))
    note = (
        "Requests and labels by acceptance length in tokens a draft, depths by what was accepted of the drafts that "
        "went so deep; the largest change first. drafts: of A / of B. A request alone has no interval. *: as in the "
        "tables of figures and groups."
    )
    columns = ("what changed most", "A", "B", "B − A", "95 %", "drafts", "")
    return Table("What changed most", columns, rows, note if rows else "", frozenset([""]))


def is_depth(figure: Estimate) -> bool:
    """Whether the figure is the acceptance rate of one depth."""
    words = figure.name.split()
    return len(words) == 3 and words[1].isdecimal() and figure.name == depth_rate(int(words[1]))


def groups(comparison: Comparison) -> Table:
    """The acceptance length by group."""
    rows = [
        (one_line(f"{title}: {figure.name}", MOST_SHOWN), *_estimate(figure)[1:])
        for title, each in comparison.groups.items()
        for figure in each
    ]
    columns = ("acceptance length by", "A", "B", "B − A", "95 %", "would see", "n", "")
    starred = [row for row in rows if row[-1]]
    shown = [*starred, *(row for row in rows if not row[-1])][:GROUPS_SHOWN] if len(rows) > GROUPS_SHOWN else rows
    note = "n: requests. *: differs, after Holm's correction over the table. --fail-if: tau where GROUP is VALUE."
    note += f" {len(rows) - len(shown):,} more; the JSON has them all." if len(rows) > len(shown) else ""
    return Table("Acceptance length by group", columns, shown, note if rows else "", frozenset([""]))


def calibration(comparison: Comparison) -> Table:
    """How often drafts were accepted, by the drafter's own probability."""
    rows = [
        (
            f"{interval.low:.1f} to {interval.high:.1f}",
            *(count(n) for n in interval.nodes),
            *(percent(q) for q in interval.q),
            *(percent(got) for got in interval.accepted),
        )
        for interval in comparison.calibration
    ]
    columns = ("q", "tried A", "B", "mean q A", "B", "accepted A", "B")
    note = "q: the drafter's probability of the first token tried at a place." if rows else ""
    return Table("Calibration of q", columns, rows, note)


def conditions(asked: Sequence[FailCondition], note: str = "") -> Table:
    """The outcome of each --fail-if condition."""
    rows = [(printable(condition.text), "FAIL" if condition.hit else "ok", condition.detail) for condition in asked]
    return Table("--fail-if", ("condition", "", "change"), rows, note, frozenset(["", "change"]))
