"""The answers as tables: cells as people read them, with the values that they are sorted by and where to look.

The report prints them as tables; the screen lists them. Worded and formatted once, for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specscope.analyze.questions.acceptance import Bucket
from specscope.analyze.questions.answers import Answers
from specscope.analyze.questions.calibration import ABOUT as PLOTTED
from specscope.analyze.questions.calibration import Bin
from specscope.analyze.questions.cells import TreeCell
from specscope.analyze.questions.groups import Examples, Share
from specscope.analyze.questions.missed import ABOUT as PLACES
from specscope.analyze.questions.missed import Choice
from specscope.analyze.questions.rejections import Count, Miss, RejectedToken, RejectionGroup
from specscope.analyze.table import NONE, Table
from specscope.trace.record.vocabulary import Vocabulary, printable

TOKEN, LABEL, BAR = 14, 20, 16  # characters of a cell at most
EIGHTHS = " ▏▎▍▌▋▊▉█"


class Column(NamedTuple):
    """A column. Where room is short, those of the highest rank go first; rank 0 stays."""

    name: str
    rank: int = 0
    words: bool = False  # flush left


Cell = tuple[str, float | str | None]  # what is shown, and what it is sorted by
AnswerRow = tuple[Sequence[Cell], Examples]


def _table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[AnswerRow],
    about: str,
    notes: tuple[str, ...],
    summary: str,
    *,
    ranked: bool = False,
) -> Table:
    every = list(rows)
    return Table(
        title,
        tuple(column.name for column in columns),
        tuple(tuple(text for text, _ in cells) for cells, _ in every),
        about,
        words=frozenset(column.name for column in columns if column.words),
        ranks={column.name: column.rank for column in columns},
        values=[tuple(value for _, value in cells) for cells, _ in every],
        examples=[examples for _, examples in every],
        notes=notes,
        summary=summary,
        ranked=ranked,
    )


def grids(answers: Answers, vocabulary: Vocabulary) -> tuple[Table, ...]:
    """All of them, in the order of reading."""
    return (
        _tokens(answers, vocabulary),
        _groups(answers, vocabulary),
        _calibration(answers),
        _conditions(answers),
        _missed(answers),
        _cells(answers),
    )


def _tokens(answers: Answers, vocabulary: Vocabulary) -> Table:
    found = answers.rejections

    def row(one: RejectedToken) -> AnswerRow:
        return (
            (
                _token(vocabulary, one.token),
                _count(one.rejected.count),
                _count(one.rejected.total),
                *_share(one.rejected),
                _taken(vocabulary, one.taken),
                _miss(one.misses, Miss.NEAR),
                _miss(one.misses, Miss.NONSENSE),
                (_p(one.raw_p), one.raw_p),
                _rank(one.rank),
                _count(one.depth),
                (_label(one.kind), one.kind),
                (NONE if one.position is None else f"{one.position:,.0f}", one.position),
            ),
            one.examples,
        )

    columns = (
        Column("token", words=True),
        Column("rejected"),
        Column("tried", 4),
        Column("share", 2),
        Column("interval", 7),
        Column("the target took", 1, words=True),
        Column("near", 2),
        Column("nonsense", 3),
        Column("raw p", 5),
        Column("rank", 6),
        Column("depth", 7),
        Column("kind", 8, words=True),
        Column("position", 9),
    )
    about = (
        "share: rejected / tried. near: rejections whose raw p is at least a tenth of the target's likeliest token's, "
        "or that rank up to 3 with raw p of at least 0.01. nonsense: raw p below 0.001. raw p, rank and position: "
        "medians; depth and kind: the commonest."
    )
    title = "Drafted tokens rejected most, and what the target took"
    rows = map(row, found.tokens)
    return _table(title, columns, rows, about, found.notes, _rejected(answers), ranked=True)


def _rejected(answers: Answers) -> str:
    found = answers.rejections
    if not found.rejected.total:
        return ""
    known = found.rejected.count - found.misses[Miss.UNKNOWN]
    parts = [f"{found.rejected.count:,} of {found.rejected.total:,} nodes tried were rejected"]
    if known:
        near, nonsense = found.misses[Miss.NEAR] / known, found.misses[Miss.NONSENSE] / known
        parts.append(f"{near:.1%} were near misses, {nonsense:.1%} nonsense")
    return "; ".join(parts)


def _groups(answers: Answers, vocabulary: Vocabulary) -> Table:
    found = answers.rejections

    def row(one: RejectionGroup) -> AnswerRow:
        return (
            (
                (one.by, one.by),
                (_label(one.value), _natural(one.value)),
                _count(one.rejected.count),
                _count(one.rejected.total),
                *_share(one.rejected),
                _miss(one.misses, Miss.NEAR),
                _miss(one.misses, Miss.NONSENSE),
                _taken(vocabulary, (one.token,) if one.token else ()),
                _taken(vocabulary, (one.taken,) if one.taken else ()),
            ),
            one.examples,
        )

    columns = (
        Column("by", words=True),
        Column("value", words=True),
        Column("rejected"),
        Column("tried", 4),
        Column("share"),
        Column("interval", 5),
        Column("near", 2),
        Column("nonsense", 2),
        Column("rejected most", 3, words=True),
        Column("taken most", 6, words=True),
    )
    about = (
        "share: rejected / tried; by miss: of all rejections. position: in the output. final: the step's final token."
    )
    title = "Rejections by depth, kind, final token, position, miss"
    rows = map(row, found.groups)
    return _table(title, columns, rows, about, found.notes, _rejected(answers))


def _calibration(answers: Answers) -> Table:
    found = answers.calibration

    def row(one: Bin) -> AnswerRow:
        return (
            (
                (one.plotted.value, one.plotted.value),
                (f"{one.low:.1f}–{one.high:.1f}", one.low),
                _count(one.accepted.total),
                (f"{one.mean:.3f}", one.mean),
                (f"{one.target_p:.3f}", one.target_p),
                *_share(one.accepted),
                (NONE if one.expected is None else f"{one.expected:.1%}", one.expected),
                (_bar(one.accepted.value or 0), one.accepted.value),
            ),
            one.examples,
        )

    columns = (
        Column("of", 1, words=True),
        Column("bin", words=True),
        Column("nodes", 2),
        Column("q, draft p"),
        Column("p", 5),
        Column("accepted"),
        Column("interval", 6),
        Column("expected", 4),
        Column("bar", 3, words=True),
    )
    about = (
        f"of: {PLOTTED[found.curves[0].plotted]}. "
        if len(found.curves) == 1
        else "of: q of sampled nodes, else draft p. "
    ) + (
        "q, draft p, p: means. expected: mean acceptance probability. Error: how far the two "
        "means are apart, averaged over the bins. bar: the accepted share."
    )
    lines = [
        f"{one.plotted.value}: expected calibration error {one.error:.3f}, accepted {one.accepted.value or 0:.1%}"
        for one in found.curves
    ]
    rows = tuple(row(one) for curve in found.curves for one in curve.bins)
    title = "The drafter's probability against acceptance"
    return _table(title, columns, rows, about, found.notes, "; ".join(lines))


def _conditions(answers: Answers) -> Table:
    found = answers.conditions

    def row(one: Bucket) -> AnswerRow:
        low_high = NONE if one.interval is None else f"{one.interval[0]:.2f}–{one.interval[1]:.2f}"
        return (
            (
                (one.by, one.by),
                (one.value, _natural(one.value)),
                _count(one.drafts),
                (f"{one.tau:.2f}", one.tau),
                (low_high, None if one.interval is None else one.interval[0]),
                (f"{one.rate:.1%}", one.rate),
                (f"{one.first.value or 0:.1%}", one.first.value),
                (_bar((one.tau - 1) / most), one.tau),
            ),
            one.examples,
        )

    most = max((one.tau - 1 for one in found.buckets), default=0) or 1
    columns = (
        Column("by", words=True),
        Column("value", words=True),
        Column("drafts"),
        Column("τ"),
        Column("interval", 2),
        Column("rate", 1),
        Column("depth 1", 3),
        Column("bar", 4, words=True),
    )
    about = (
        "τ: mean acceptance length, its interval over requests. rate: draft acceptance rate. depth 1: drafts whose "
        "first token was accepted. position: output tokens before; context: tokens before the root; entropy of p and "
        "the target's raw top p: at the root. bar: accepted tokens per draft."
    )
    title = "Acceptance by position, context, certainty, batch size"
    return _table(title, columns, map(row, found.buckets), about, found.notes, "")


def _missed(answers: Answers) -> Table:
    found = answers.missed

    def row(one: Choice) -> AnswerRow:
        return (
            (
                (one.place.value, one.place.value),
                (PLACES[one.place], PLACES[one.place]),
                _count(one.decisions.count),
                *_share(one.decisions),
                (f"{one.per_draft:.2f}", one.per_draft),
                (_p(one.draft_p), one.draft_p),
            ),
            one.examples,
        )

    columns = (
        Column("place", words=True),
        Column("meaning", 1, words=True),
        Column("decisions"),
        Column("share"),
        Column("interval", 4),
        Column("per draft", 2),
        Column("draft p", 3),
    )
    about = (
        "Each token that a draft's step commits is a decision. per draft: what τ would gain by one more accepted token "
        "at each. draft p: mean of the drafter's probability of the token, where it is known."
    )
    title = "Where the target's choice was"
    return _table(title, columns, map(row, found.choices), about, found.notes, "")


def _cells(answers: Answers) -> Table:
    found = answers.tree

    def row(cell: TreeCell) -> AnswerRow:
        tried = Share(cell.accepted.count, cell.tried)
        return (
            (
                _count(cell.depth),
                _count(cell.sibling),
                _count(cell.accepted.total),
                _count(cell.tried),
                _count(cell.accepted.count),
                *_share(cell.accepted),
                (NONE if tried.value is None else f"{tried.value:.1%}", tried.value),
                (_p(cell.draft_p), cell.draft_p),
                (_bar(cell.accepted.value or 0), cell.accepted.value),
            ),
            cell.examples,
        )

    columns = (
        Column("depth"),
        Column("sibling"),
        Column("drafted"),
        Column("tried", 4),
        Column("accepted"),
        Column("per row"),
        Column("interval", 1),
        Column("of tried", 2),
        Column("draft p", 3),
        Column("bar", 5, words=True),
    )
    about = (
        "sibling: place among its siblings in draw order, from 1. per row: accepted / drafted, the tokens that a row "
        "of the target's pass brought there. of tried: accepted / tried. draft p: mean of the drafter's probability. "
        "The least worth first, by the upper end of the interval; a node goes with all below it."
    )
    title = "Nodes by depth and sibling: which is not worth its row"
    named = [
        f"depth {cell.depth} sibling {cell.sibling} ({cell.accepted.count:,} of {cell.accepted.total:,} accepted)"
        for cell in found.worst
    ]
    few = "too few rows to name the least worth" if len(found.cells) > 1 else ""
    summary = f"least worth their rows: {', '.join(named)}" if named else few
    return _table(title, columns, map(row, found.cells), about, found.notes, summary, ranked=True)


# Cells


def _count(value: int) -> Cell:
    return f"{value:,}", value


def _share(share: Share) -> Iterator[Cell]:
    """The share, and its interval."""
    value, interval = share.value, share.interval
    yield (NONE, None) if value is None else (f"{value:.1%}", value)
    yield (NONE, None) if interval is None else (f"{interval[0]:.1%}–{interval[1]:.1%}", interval[0])


def _miss(misses: dict[Miss, int], which: Miss) -> Cell:
    """A dash where nothing is known of any of them."""
    return (NONE, None) if misses[Miss.UNKNOWN] == sum(misses.values()) else _count(misses[which])


def _token(vocabulary: Vocabulary, token: int, count: int | None = None) -> Cell:
    """Its text and its id, and how often."""
    shown, known = vocabulary.show(token), vocabulary.piece(token) is not None
    shown = shown if len(shown) <= TOKEN else shown[: TOKEN - 1] + "…"
    text = f"{printable(shown)} #{token}" if known else f"#{token}"
    return (text if count is None else f"{text} ×{count:,}"), text


def _taken(vocabulary: Vocabulary, taken: Sequence[Count]) -> Cell:
    return ("  ".join(_token(vocabulary, one.token, one.count)[0] for one in taken) or NONE), (
        _token(vocabulary, taken[0].token)[0] if taken else None
    )


def _p(value: float | None) -> str:
    """A probability in few characters, never 0 where it is not."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.3f}" if value == 0 or value >= 0.0005 else f"{value:.0e}"


def _rank(value: float | None) -> Cell:
    if value is None:
        return NONE, None
    return (">4", value) if math.isinf(value) else (f"{value:.0f}", value)


def _label(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= LABEL else line[: LABEL - 1] + "…"


def _natural(text: str) -> str:
    """To sort by: 16–31 before 128–255."""
    head = text.replace(",", "").split("–")[0].split("+")[0].split(" ")[0]
    try:
        return f"{float(head):012.3f}"
    except ValueError:
        return text


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
