"""A comparison as tables of strings: what text and page both show, worded and formatted once."""

from __future__ import annotations

from collections import Counter

from specscope.analyze.compare.result import ABOUT, Comparison, Decision, Estimate, Field, Half, Match, Pair, Parting
from specscope.analyze.tables import NONE, Table, count, number, one_line, percent
from specscope.trace.vocabulary import printable
from specscope.trace.wording import plural

PARTINGS_SHOWN = 20
DETAILED = 3  # partings whose decisions are shown
WHERE_SHOWN = 12  # lines of where a field differs
GROUPS_SHOWN = 40


def header(comparison: Comparison) -> list[tuple[str, str]]:
    """What was compared: (name, value) pairs."""
    found = []
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        found.append((name, f"{', '.join(side.sources)}: {side.target}, drafter {side.drafter}"))
        counts = f"{plural(side.requests, 'request')}, {plural(side.decode_steps, 'decode step')}"
        found.append(("", f"{counts}, {plural(side.tokens, 'output token')}"))
    found.append(("pairs", matches(comparison)))
    return found


def matches(comparison: Comparison) -> str:
    """How the requests were matched."""
    kinds = Counter(pair.match for pair in comparison.pairs)
    said = [f"{count(kinds[kind])} by {kind.value}" for kind in Match if kinds[kind]]
    left = [f"{count(side.unmatched)} only in {name}" for name, side in (("A", comparison.a), ("B", comparison.b))]
    return ", ".join([*said, *(text for text in left if not text.startswith("0 "))]) or "none"


def tables(comparison: Comparison) -> list[Table]:
    """All of them, in the order of reading; those with nothing in them left out."""
    every = [
        configuration(comparison),
        partings(comparison),
        *details(comparison),
        contexts(comparison),
        *where(comparison),
        figures(comparison),
        groups(comparison),
        calibration(comparison),
        conditions(comparison),
    ]
    return [table for table in every if table.rows or table.note]


def configuration(comparison: Comparison) -> Table:
    """What is not the same before anything ran."""
    rows = [(one.name, one_line(one.a, 60), one_line(one.b, 60), one.note) for one in comparison.differences]
    note = "" if rows else "Nothing differs in the configuration."
    words = ("A", "B", "leads to")
    return Table("Configuration", ("what differs", *words), rows, note, frozenset(words), frozenset(words))


def partings(comparison: Comparison) -> Table:
    """Pairs whose outputs part, and those that only decide otherwise."""
    parted = [pair for pair in comparison.pairs if pair.parting is not None]
    alike = [pair for pair in comparison.pairs if pair.parting is None]
    rows = [_parting_row(pair) for pair in parted[:PARTINGS_SHOWN]]
    causes = ", ".join(f"{n:,} {cause.value}" for cause, n in comparison.partings.items())
    note = f"{len(parted):,} of {plural(len(comparison.pairs), 'pair')} part" + (f": {causes}." if causes else ".")
    otherwise = sum(pair.first is not None for pair in alike)
    note += f" The other {len(alike):,} have the same output"
    note += f", {otherwise:,} of them by other decisions." if otherwise else "."
    note += f" {len(parted) - PARTINGS_SHOWN:,} more; the JSON has them all." if len(parted) > PARTINGS_SHOWN else ""
    columns = ("request", "in B", "at token", "A", "B", "cause", "first other decision")
    return Table(
        "Where outputs part", columns, rows, note, frozenset(["in B", "A", "B", "cause", "first other decision"])
    )


def _parting_row(pair: Pair) -> tuple[str, ...]:
    assert pair.parting is not None
    first = NONE
    if pair.first is not None:
        first = f"token {pair.first.position:,}: {pair.first.cause.value}"
    a, b = pair.parting.a, pair.parting.b
    names = one_line(pair.id_a, 16), one_line(pair.id_b, 16)
    return (*names, count(pair.parting.position), came_out(a), came_out(b), pair.parting.cause.value, first)


def came_out(half: Half) -> str:
    """The token that came out at a parting."""
    if half.token is None:
        return "the end"
    text = next((one.text for one in half.decisions if one.token == half.token), f"#{half.token}")
    return one_line(text, 20)


def details(comparison: Comparison) -> list[Table]:
    """The first partings, decision by decision; those that nothing harmless explains before the others."""
    harmless = ("seed", "rounding", "parameters", "drafts", "end")
    chosen = [(pair, pair.parting) for pair in comparison.pairs if pair.parting is not None]
    chosen.sort(key=lambda item: item[1].cause.value in harmless)
    return [_detail(pair, parting) for pair, parting in chosen[:DETAILED]]


def _detail(pair: Pair, parting: Parting) -> Table:
    rows = []
    for name, half in (("A", parting.a), ("B", parting.b)):
        rows += [(name if not at else "", *_decision_row(one)) for at, one in enumerate(half.decisions)]
    columns = ("", "token", "node", "what", "p", "q", "coin", "a", "margin")
    where = ", ".join(f"{name} {half.at}" for name, half in (("A", parting.a), ("B", parting.b)) if half.at is not None)
    title = f"{one_line(pair.id_a, 16)} parts at output token {parting.position:,}"
    note = f"{ABOUT[parting.cause]} ({where}). margin: how far p would have to move for another outcome. ≈: a near tie."
    return Table(title, columns, rows, note, frozenset(["token", "what"]))


def _decision_row(one: Decision) -> tuple[str, ...]:
    margin = NONE if one.margin >= 1 else f"{one.margin:.2g}"
    if one.gap is not None and margin == NONE:
        margin = f"{one.gap:.2g} raw"
    return (
        one_line(one.text, 20),
        NONE if one.node is None else str(one.node),
        one.what,
        number(one.p, 4),
        number(one.q, 4) + (" ≈" if one.near_draw else ""),
        number(one.coin, 4),
        number(one.accept_prob, 4),
        margin + (" ≈" if one.near_tie else ""),
    )


def contexts(comparison: Comparison) -> Table:
    """What is the same where both sides stood at the same context."""
    rows = [
        (
            one.name,
            count(one.compared),
            count(one.differ),
            percent(one.share) if one.compared else NONE,
            NONE if one.largest is None else f"{one.largest:.2g}",
            NONE if one.example is None else f"{one.example[0]} / {one.example[1]}",
            ("! " if one.suspect else "") + (one.condition or one.note),
        )
        for one in comparison.fields
        if one.compared
    ]
    note = (
        f"{plural(comparison.steps, 'step')} and {plural(comparison.nodes, 'node')} of both sides stand at the same "
        "context: the same request, output so far and path. !: nothing in seed, text or rounding explains it."
    )
    columns = ("evidence", "compared", "differ", "share", "largest", "example A / B", "")
    words = frozenset(["example A / B", ""])
    return Table("At equal contexts", columns, rows, note, words, words)


def where(comparison: Comparison) -> list[Table]:
    """At which depths and after what the evidence differs."""
    return [table for one in comparison.fields if one.suspect for table in [_where(one)] if table.rows]


def _where(one: Field) -> Table:
    lines = [(at.group, at.value, at.compared, at.differ) for at in one.where]
    varied = {group for group, *_ in lines if sum(line[0] == group for line in lines) > 1}
    rows = [
        (group, value, count(compared), count(differ), percent(differ / compared if compared else None))
        for group, value, compared, differ in lines
        if group in varied
    ]
    return Table(
        f"{one.name}: where it differs",
        ("by", "value", "compared", "differ", "share"),
        rows[: WHERE_SHOWN * 2],
        "",
        frozenset(["value"]),
    )


def figures(comparison: Comparison) -> Table:
    """Both sides as distributions."""
    rows = [_estimate(one) for one in comparison.figures]
    note = (
        "95 %: of the difference, by a cluster bootstrap over requests. would see: the least change that this many "
        "requests show with 95 % power. n: requests, or pairs of them. *: differs, after Holm's correction over the "
        "table. Rates by depth: of drafts that went so deep. whole paths: drafts accepted down to a leaf."
    )
    columns = ("figure", "A", "B", "B − A", "95 %", "would see", "n", "")
    return Table("Figures", columns, rows, note if rows else "", frozenset([""]))


def _estimate(one: Estimate) -> tuple[str, ...]:
    interval = NONE if one.low is None else f"{change_text(one.low, one)} to {change_text(one.high, one)}"
    return (
        one.name,
        value_text(one.a, one),
        value_text(one.b, one),
        change_text(one.difference, one),
        interval,
        value_text(one.visible, one),
        count(one.clusters),
        "*" if one.significant else "",
    )


def value_text(value: float | None, one: Estimate) -> str:
    """A figure in its own unit."""
    return percent(value) if one.percent else number(value, 3)


def change_text(value: float | None, one: Estimate) -> str:
    """A difference of it, with its sign."""
    if value is None:
        return NONE
    return f"{value * 100:+.1f}%" if one.percent else f"{value:+.3f}"


def groups(comparison: Comparison) -> Table:
    """The acceptance length by group."""
    rows = [
        (one_line(f"{title}: {one.name}", 48), *_estimate(one)[1:])
        for title, each in comparison.groups.items()
        for one in each
    ]
    columns = ("acceptance length by", "A", "B", "B − A", "95 %", "would see", "n", "")
    left = len(rows) - GROUPS_SHOWN
    note = f"{left:,} more; the JSON has them all." if left > 0 else ""
    return Table("Acceptance length by group", columns, rows[:GROUPS_SHOWN], note, frozenset([""]))


def calibration(comparison: Comparison) -> Table:
    """How often what the drafter believed was accepted."""
    rows = [
        (
            f"{one.low:.1f} to {one.high:.1f}",
            *(count(n) for n in one.nodes),
            *(percent(q) for q in one.q),
            *(percent(got) for got in one.accepted),
        )
        for one in comparison.calibration
    ]
    columns = ("q", "tried A", "B", "mean q A", "B", "accepted A", "B")
    note = "q: the drafter's probability of the first token tried at a place." if rows else ""
    return Table("Calibration of q", columns, rows, note)


def conditions(comparison: Comparison) -> Table:
    """What --fail-if asked."""
    rows = [(printable(one.text), "FAIL" if one.hit else "ok", one.detail) for one in comparison.conditions]
    return Table("--fail-if", ("condition", "", "change"), rows, "", frozenset(["", "change"]))
