"""All questions asked of one history, and the answers as tables, for a report and the screen: cells as people read
them, with what they are sorted by and where to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import ABOUT as PLOTTED
from specscope.analyze.questions.rates import BINS, Calibration, Count, Rejections, calibration, rejections
from specscope.analyze.table import NONE, Table, count, number, percent
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary, printable


@dataclass(frozen=True)
class Answers:
    """What is rejected, and how well the drafter's probability predicts it."""

    steps: int  # decode steps that were looked at
    rejections: Rejections
    calibration: Calibration


def answer(history: History, request: str | None = None) -> Answers:
    """Answer every question over all requests on the path, or over one."""
    evidence = Evidence.of(history, request)
    return Answers(steps=len(evidence.columns), rejections=rejections(evidence), calibration=calibration(evidence))


TOKEN = 14  # characters of a cell at most
Cell = tuple[str, float | str | None]  # what is shown, and what it is sorted by


class Column(NamedTuple):
    """A column. Where room is short, those of the highest rank go first; rank 0 stays."""

    name: str
    of: str  # the figure of a row
    shown: Callable[[Any], str | Cell]  # how it is shown; with what it is sorted by where that is not the figure
    rank: int = 0
    words: bool = False  # flush left

    def cell(self, row: object) -> Cell:
        """The cell of a row of the answer."""
        value = attrgetter(self.of)(row)
        if value is None:
            return NONE, None
        shown = self.shown(value)
        return (shown, value) if isinstance(shown, str) else shown


def grids(answers: Answers, vocabulary: Vocabulary) -> tuple[Table, ...]:
    """All tables of answers, in the order of reading."""
    return _tokens(answers, vocabulary), _calibration(answers)


def _table(title: str, columns: Sequence[Column], rows: Sequence[Any], about: str, **more: Any) -> Table:  # noqa: ANN401
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table(
        title,
        tuple(column.name for column in columns),
        tuple(tuple(text for text, _ in row) for row in cells),
        about,
        words=frozenset(column.name for column in columns if column.words),
        ranks={column.name: column.rank for column in columns},
        values=[tuple(value for _, value in row) for row in cells],
        examples=[row.examples for row in rows],
        **more,
    )


def _tokens(answers: Answers, vocabulary: Vocabulary) -> Table:
    def token(value: int) -> Cell:
        shown, known = vocabulary.show(value), vocabulary.pieces.get(value) is not None
        shown = shown if len(shown) <= TOKEN else shown[: TOKEN - 1] + "…"
        text = f"{printable(shown)} #{value}" if known else f"#{value}"
        return text, text

    def taken(entries: Sequence[Count]) -> Cell:
        texts = [f"{token(entry.token)[0]} ×{entry.count:,}" for entry in entries]
        return "  ".join(texts) or NONE, texts[0] if texts else None

    columns = (
        Column("token", "token", token, words=True),
        Column("rejected", "rejected.count", count),
        Column("tried", "rejected.total", count, 4),
        Column("share", "rejected.value", percent, 2),
        Column("interval", "rejected.interval", _shares, 5),
        Column("the target took", "taken", taken, 1, words=True),
    )
    found = answers.rejections
    summary = f"{found.rejected.count:,} of {found.rejected.total:,} nodes tried were rejected"
    title = "Most rejected drafted tokens"
    summary = summary if found.rejected.total else ""
    about = "share: rejected / tried."
    return _table(title, columns, found.tokens, about, notes=found.notes, summary=summary, ranked=True)


def _calibration(answers: Answers) -> Table:
    curves = answers.calibration.curves
    columns = (
        Column("of", "plotted", str, 1, words=True),
        Column("bin", "low", lambda low: f"{low:.1f}–{low + 1 / BINS:.1f}", words=True),
        Column("nodes", "accepted.total", count, 2),
        Column("q, draft p", "mean", lambda value: number(value, 3)),
        Column("p", "target_p", lambda value: number(value, 3), 5),
        Column("accepted", "accepted.value", percent),
        Column("interval", "accepted.interval", _shares, 6),
    )
    which = PLOTTED[curves[0].plotted] if len(curves) == 1 else "q of sampled nodes, else draft p"
    about = f"of: {which}. q, draft p, p: means. error: distance between the two means, averaged over the bins."
    lines = [
        f"{curve.plotted.value}: expected calibration error {curve.error:.3f}, accepted {curve.accepted.value or 0:.1%}"
        for curve in curves
    ]
    rows = [entry for curve in curves for entry in curve.bins]
    title, notes = "The drafter's probability against acceptance", answers.calibration.notes
    return _table(title, columns, rows, about, notes=notes, summary="; ".join(lines))


def _shares(ends: tuple[float, float]) -> Cell:
    return f"{ends[0]:.1%}–{ends[1]:.1%}", ends[0]
