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
    """All tables of answers, in the order of reading."""
    return (
        _tokens(answers, vocabulary),
        _groups(answers, vocabulary),
        _calibration(answers),
        _conditions(answers),
        _missed(answers),
        _cells(answers),
    )


def _tokens(answers: Answers, vocabulary: Vocabulary) -> Table:
    rejections = answers.rejections

    def row(entry: RejectedToken) -> AnswerRow:
        return (
            (
                _token(vocabulary, entry.token),
                _count(entry.rejected.count),
                _count(entry.rejected.total),
                *_share(entry.rejected),
                _taken(vocabulary, entry.taken),
                _miss(entry.misses, Miss.NEAR),
                _miss(entry.misses, Miss.NONSENSE),
                (_p(entry.raw_p), entry.raw_p),
                _rank(entry.rank),
                _count(entry.depth),
                (_label(entry.kind), entry.kind),
                (NONE if entry.position is None else f"{entry.position:,.0f}", entry.position),
            ),
            entry.examples,
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
    rows = map(row, rejections.tokens)
    return _table(title, columns, rows, about, rejections.notes, _rejected(answers), ranked=True)


def _rejected(answers: Answers) -> str:
    rejections = answers.rejections
    if not rejections.rejected.total:
        return ""
    known = rejections.rejected.count - rejections.misses[Miss.UNKNOWN]
    parts = [f"{rejections.rejected.count:,} of {rejections.rejected.total:,} nodes tried were rejected"]
    if known:
        near, nonsense = rejections.misses[Miss.NEAR] / known, rejections.misses[Miss.NONSENSE] / known
        parts.append(f"{near:.1%} were near misses, {nonsense:.1%} nonsense")
    return "; ".join(parts)


def _groups(answers: Answers, vocabulary: Vocabulary) -> Table:
    rejections = answers.rejections

    def row(group: RejectionGroup) -> AnswerRow:
        return (
            (
                (group.by, group.by),
                (_label(group.value), _natural(group.value)),
                _count(group.rejected.count),
                _count(group.rejected.total),
                *_share(group.rejected),
                _miss(group.misses, Miss.NEAR),
                _miss(group.misses, Miss.NONSENSE),
                _taken(vocabulary, (group.token,) if group.token else ()),
                _taken(vocabulary, (group.taken,) if group.taken else ()),
            ),
            group.examples,
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
    rows = map(row, rejections.groups)
    return _table(title, columns, rows, about, rejections.notes, _rejected(answers))


def _calibration(answers: Answers) -> Table:
    calibration = answers.calibration

    def row(entry: Bin) -> AnswerRow:
        return (
            (
                (entry.plotted.value, entry.plotted.value),
                (f"{entry.low:.1f}–{entry.high:.1f}", entry.low),
                _count(entry.accepted.total),
                (f"{entry.mean:.3f}", entry.mean),
                (f"{entry.target_p:.3f}", entry.target_p),
                *_share(entry.accepted),
                (NONE if entry.expected is None else f"{entry.expected:.1%}", entry.expected),
                (_bar(entry.accepted.value or 0), entry.accepted.value),
            ),
            entry.examples,
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
        f"of: {PLOTTED[calibration.curves[0].plotted]}. "
        if len(calibration.curves) == 1
        else "of: q of sampled nodes, else draft p. "
    ) + (
        "q, draft p, p: means. expected: mean acceptance probability. Error: how far the two "
        "means are apart, averaged over the bins. bar: the accepted share."
    )
    lines = [
        f"{curve.plotted.value}: expected calibration error {curve.error:.3f}, accepted {curve.accepted.value or 0:.1%}"
        for curve in calibration.curves
    ]
    rows = tuple(row(entry) for curve in calibration.curves for entry in curve.bins)
    title = "The drafter's probability against acceptance"
    return _table(title, columns, rows, about, calibration.notes, "; ".join(lines))


def _conditions(answers: Answers) -> Table:
    conditions = answers.conditions

    def row(bucket: Bucket) -> AnswerRow:
        low_high = NONE if bucket.interval is None else f"{bucket.interval[0]:.2f}–{bucket.interval[1]:.2f}"
        return (
            (
                (bucket.by, bucket.by),
                (bucket.value, _natural(bucket.value)),
                _count(bucket.drafts),
                (f"{bucket.tau:.2f}", bucket.tau),
                (low_high, None if bucket.interval is None else bucket.interval[0]),
                (f"{bucket.rate:.1%}", bucket.rate),
                (f"{bucket.first.value or 0:.1%}", bucket.first.value),
                (_bar((bucket.tau - 1) / largest), bucket.tau),
            ),
            bucket.examples,
        )

    largest = max((bucket.tau - 1 for bucket in conditions.buckets), default=0) or 1
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
    return _table(title, columns, map(row, conditions.buckets), about, conditions.notes, "")


def _missed(answers: Answers) -> Table:
    missed = answers.missed

    def row(choice: Choice) -> AnswerRow:
        return (
            (
                (choice.place.value, choice.place.value),
                (PLACES[choice.place], PLACES[choice.place]),
                _count(choice.decisions.count),
                *_share(choice.decisions),
                (f"{choice.per_draft:.2f}", choice.per_draft),
                (_p(choice.draft_p), choice.draft_p),
            ),
            choice.examples,
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
    return _table(title, columns, map(row, missed.choices), about, missed.notes, "")


def _cells(answers: Answers) -> Table:
    tree = answers.tree

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
        for cell in tree.worst
    ]
    few = "too few rows to name the least worth" if len(tree.cells) > 1 else ""
    summary = f"least worth their rows: {', '.join(named)}" if named else few
    return _table(title, columns, map(row, tree.cells), about, tree.notes, summary, ranked=True)


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
    """A token's text and id, and how often it occurred."""
    shown, known = vocabulary.show(token), vocabulary.pieces.get(token) is not None
    shown = shown if len(shown) <= TOKEN else shown[: TOKEN - 1] + "…"
    text = f"{printable(shown)} #{token}" if known else f"#{token}"
    return (text if count is None else f"{text} ×{count:,}"), text


def _taken(vocabulary: Vocabulary, taken: Sequence[Count]) -> Cell:
    return ("  ".join(_token(vocabulary, entry.token, entry.count)[0] for entry in taken) or NONE), (
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
    """A sort key: 16–31 before 128–255."""
    head = text.replace(",", "").split("–")[0].split("+")[0].split(" ")[0]
    try:
        return f"{float(head):012.3f}"
    except ValueError:
        return text


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
