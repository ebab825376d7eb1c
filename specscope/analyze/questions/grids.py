"""The answers as tables: cells as people read them, with the values that they are sorted by and where to look.

The report prints them as tables; the screen lists them. Worded and formatted once, for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from specscope.analyze.questions.acceptance import Bucket
from specscope.analyze.questions.answers import Answers
from specscope.analyze.questions.calibration import ABOUT as PLOTTED
from specscope.analyze.questions.calibration import Bin
from specscope.analyze.questions.groups import Share
from specscope.analyze.questions.missed import ABOUT as PLACES
from specscope.analyze.questions.rejections import RejectedToken
from specscope.analyze.table import NONE, Table
from specscope.trace.record.vocabulary import Vocabulary, printable

TOKEN, BAR = 14, 16  # characters of a cell at most
EIGHTHS = " ▏▎▍▌▋▊▉█"
Cell = tuple[str, float | str | None]  # what is shown, and what it is sorted by


class Column(NamedTuple):
    """A column. Where room is short, those of the highest rank go first; rank 0 stays."""

    name: str
    cell: Callable[[Any], Cell]  # of a row of the answer
    rank: int = 0
    words: bool = False  # flush left


def grids(answers: Answers, vocabulary: Vocabulary) -> tuple[Table, ...]:
    """All tables of answers, in the order of reading."""
    return (
        _tokens(answers, vocabulary),
        _calibration(answers),
        _conditions(answers),
        _missed(answers),
        _cells(answers),
    )


def _table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Any],
    about: str,
    notes: tuple[str, ...],
    summary: str = "",
    *,
    ranked: bool = False,
) -> Table:
    every = list(rows)
    cells = [[column.cell(row) for column in columns] for row in every]
    return Table(
        title,
        tuple(column.name for column in columns),
        tuple(tuple(text for text, _ in row) for row in cells),
        about,
        words=frozenset(column.name for column in columns if column.words),
        ranks={column.name: column.rank for column in columns},
        values=[tuple(value for _, value in row) for row in cells],
        examples=[row.examples for row in every],
        notes=notes,
        summary=summary,
        ranked=ranked,
    )


def _tokens(answers: Answers, vocabulary: Vocabulary) -> Table:
    def taken(row: RejectedToken) -> Cell:
        texts = [_token(vocabulary, entry.token, entry.count)[0] for entry in row.taken]
        return "  ".join(texts) or NONE, _token(vocabulary, row.taken[0].token)[0] if row.taken else None

    columns = (
        Column("token", lambda row: _token(vocabulary, row.token), words=True),
        Column("rejected", lambda row: _count(row.rejected.count)),
        Column("tried", lambda row: _count(row.rejected.total), 4),
        Column("share", lambda row: _share(row.rejected), 2),
        Column("interval", lambda row: _interval(row.rejected.interval), 5),
        Column("the target took", taken, 1, words=True),
        Column("raw p", lambda row: (_p(row.raw_p), row.raw_p), 3),
        Column("rank", lambda row: _rank(row.rank), 6),
        Column("depth", lambda row: _count(row.depth), 7),
    )
    about = "share: rejected / tried. raw p, rank: medians of the token's for the target; depth: the commonest."
    found = answers.rejections
    summary = f"{found.rejected.count:,} of {found.rejected.total:,} nodes tried were rejected"
    title = "Drafted tokens rejected most, and what the target took"
    summary = summary if found.rejected.total else ""
    return _table(title, columns, found.tokens, about, found.notes, summary, ranked=True)


def _calibration(answers: Answers) -> Table:
    curves = answers.calibration.curves

    def expected(row: Bin) -> Cell:
        return (NONE, None) if row.expected is None else (f"{row.expected:.1%}", row.expected)

    columns = (
        Column("of", lambda row: (row.plotted.value, row.plotted.value), 1, words=True),
        Column("bin", lambda row: (f"{row.low:.1f}–{row.high:.1f}", row.low), words=True),
        Column("nodes", lambda row: _count(row.accepted.total), 2),
        Column("q, draft p", lambda row: (f"{row.mean:.3f}", row.mean)),
        Column("p", lambda row: (f"{row.target_p:.3f}", row.target_p), 5),
        Column("accepted", lambda row: _share(row.accepted)),
        Column("interval", lambda row: _interval(row.accepted.interval), 6),
        Column("expected", expected, 4),
        Column("bar", lambda row: _bar(row.accepted.value or 0), 3, words=True),
    )
    which = PLOTTED[curves[0].plotted] if len(curves) == 1 else "q of sampled nodes, else draft p"
    about = (
        f"of: {which}. q, draft p, p: means. expected: mean acceptance probability. Error: how far the two means are "
        "apart, averaged over the bins. bar: the accepted share."
    )
    lines = [
        f"{curve.plotted.value}: expected calibration error {curve.error:.3f}, accepted {curve.accepted.value or 0:.1%}"
        for curve in curves
    ]
    rows = [entry for curve in curves for entry in curve.bins]
    title = "The drafter's probability against acceptance"
    return _table(title, columns, rows, about, answers.calibration.notes, "; ".join(lines))


def _conditions(answers: Answers) -> Table:
    found = answers.conditions
    largest = max((bucket.tau - 1 for bucket in found.buckets), default=0) or 1

    def interval(row: Bucket) -> Cell:
        return (NONE, None) if row.interval is None else ("{:.2f}–{:.2f}".format(*row.interval), row.interval[0])

    columns = (
        Column("by", lambda row: (row.by, row.by), words=True),
        Column("value", lambda row: (row.value, _natural(row.value)), words=True),
        Column("drafts", lambda row: _count(row.drafts)),
        Column("τ", lambda row: (f"{row.tau:.2f}", row.tau)),
        Column("interval", interval, 2),
        Column("rate", lambda row: (f"{row.rate:.1%}", row.rate), 1),
        Column("depth 1", lambda row: _share(row.first), 3),
        Column("bar", lambda row: _bar((row.tau - 1) / largest), 4, words=True),
    )
    about = (
        "τ: mean acceptance length, its interval over requests. rate: draft acceptance rate. depth 1: drafts whose "
        "first token was accepted. position: output tokens before; context: tokens before the root; entropy of p and "
        "the target's raw top p: at the root. bar: accepted tokens per draft."
    )
    title = "Acceptance by position, context, certainty, batch size"
    return _table(title, columns, found.buckets, about, found.notes)


def _missed(answers: Answers) -> Table:
    columns: tuple[Column, ...] = (
        Column("place", lambda row: (row.place.value, row.place.value), words=True),
        Column("meaning", lambda row: (PLACES[row.place], PLACES[row.place]), 1, words=True),
        Column("decisions", lambda row: _count(row.decisions.count)),
        Column("share", lambda row: _share(row.decisions)),
        Column("interval", lambda row: _interval(row.decisions.interval), 4),
        Column("per draft", lambda row: (f"{row.per_draft:.2f}", row.per_draft), 2),
        Column("draft p", lambda row: (_p(row.draft_p), row.draft_p), 3),
    )
    about = (
        "Each token that a draft's step commits is a decision. per draft: what τ would gain by one more accepted token "
        "at each. draft p: mean of the drafter's probability of the token, where it is known."
    )
    return _table("Where the target's choice was", columns, answers.missed.choices, about, answers.missed.notes)


def _cells(answers: Answers) -> Table:
    columns: tuple[Column, ...] = (
        Column("depth", lambda cell: _count(cell.depth)),
        Column("sibling", lambda cell: _count(cell.sibling)),
        Column("drafted", lambda cell: _count(cell.accepted.total)),
        Column("tried", lambda cell: _count(cell.tried), 4),
        Column("accepted", lambda cell: _count(cell.accepted.count)),
        Column("per row", lambda cell: _share(cell.accepted)),
        Column("interval", lambda cell: _interval(cell.accepted.interval), 1),
        Column("of tried", lambda cell: _share(Share(cell.accepted.count, cell.tried)), 2),
        Column("draft p", lambda cell: (_p(cell.draft_p), cell.draft_p), 3),
        Column("bar", lambda cell: _bar(cell.accepted.value or 0), 5, words=True),
    )
    about = (
        "sibling: place among its siblings in draw order, from 1. per row: accepted / drafted, the tokens that a row "
        "of the target's pass brought there. of tried: accepted / tried. draft p: mean of the drafter's probability. "
        "The least worth first, by the upper end of the interval; a node goes with all below it."
    )
    tree = answers.tree
    named = [
        f"depth {cell.depth} sibling {cell.sibling} ({cell.accepted.count:,} of {cell.accepted.total:,} accepted)"
        for cell in tree.worst
    ]
    few = "too few rows to name the least worth" if len(tree.cells) > 1 else ""
    summary = f"least worth their rows: {', '.join(named)}" if named else few
    title = "Nodes by depth and sibling: which is not worth its row"
    return _table(title, columns, tree.cells, about, tree.notes, summary, ranked=True)


# Cells


def _count(value: int) -> Cell:
    return f"{value:,}", value


def _share(share: Share) -> Cell:
    return (NONE, None) if share.value is None else (f"{share.value:.1%}", share.value)


def _interval(interval: tuple[float, float] | None) -> Cell:
    return (NONE, None) if interval is None else (f"{interval[0]:.1%}–{interval[1]:.1%}", interval[0])


def _token(vocabulary: Vocabulary, token: int, count: int | None = None) -> Cell:
    """A token's text and id, and how often it occurred."""
    shown, known = vocabulary.show(token), vocabulary.pieces.get(token) is not None
    shown = shown if len(shown) <= TOKEN else shown[: TOKEN - 1] + "…"
    text = f"{printable(shown)} #{token}" if known else f"#{token}"
    return (text if count is None else f"{text} ×{count:,}"), text


def _p(value: float | None) -> str:
    """A probability in few characters, never 0 where it is not."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.3f}" if value == 0 or value >= 0.0005 else f"{value:.0e}"


def _rank(value: float | None) -> Cell:
    if value is None:
        return NONE, None
    return (">4", value) if math.isinf(value) else (f"{value:.0f}", value)


def _natural(text: str) -> str:
    """A sort key: 16–31 before 128–255."""
    head = text.replace(",", "").split("–")[0].split("+")[0].split(" ")[0]
    try:
        return f"{float(head):012.3f}"
    except ValueError:
        return text


def _bar(share: float) -> Cell:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else ""), share
