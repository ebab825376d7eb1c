"""All questions asked of one history, and the answers as tables, for a report and the screen: cells as people read
them, with what they are sorted by and where to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import ABOUT as PLOTTED
from specscope.analyze.questions.rates import (
    BINS,
    Calibration,
    Count,
    Rejections,
    TreeCells,
    by_cell,
    calibration,
    rejections,
)
from specscope.analyze.table import NONE, Table, count, number, percent
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary, printable


@dataclass(frozen=True)
class Answers:
    """What is rejected; how well the drafter's probability predicts it; which node of the tree is not worth its row."""

    steps: int  # decode steps that were looked at
    rejections: Rejections
    calibration: Calibration
    tree: TreeCells


def answer(history: History, request: str | None = None) -> Answers:
    """Answer every question over all requests on the path, or over one."""
    evidence = Evidence.of(history, request)
    return Answers(
        steps=len(evidence.columns),
        rejections=rejections(evidence),
        calibration=calibration(evidence),
        tree=by_cell(evidence),
    )


TOKEN, BAR = 14, 16  # characters of a cell at most
EIGHTHS = " ▏▎▍▌▋▊▉█"
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
    return (
        _tokens(answers, vocabulary),
        _calibration(answers),
        _cells(answers),
    )


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
        Column("raw p", "raw_p", _p, 3),
        Column("rank", "rank", lambda value: ">4" if math.isinf(value) else f"{value:.0f}", 6),
        Column("depth", "depth", count, 7),
    )
    about = "share: rejected / tried. raw p, rank: the target's, medians; depth: the commonest."
    found = answers.rejections
    summary = f"{found.rejected.count:,} of {found.rejected.total:,} nodes tried were rejected"
    title = "Most rejected drafted tokens"
    summary = summary if found.rejected.total else ""
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
        Column("expected", "expected", percent, 4),
        Column("bar", "accepted.value", _bar, 3, words=True),
    )
    which = PLOTTED[curves[0].plotted] if len(curves) == 1 else "q of sampled nodes, else draft p"
    about = (
        f"of: {which}. q, draft p, p: means. expected: mean acceptance probability. error: distance between the two "
        "means, averaged over the bins. bar: the accepted share."
    )
    lines = [
        f"{curve.plotted.value}: expected calibration error {curve.error:.3f}, accepted {curve.accepted.value or 0:.1%}"
        for curve in curves
    ]
    rows = [entry for curve in curves for entry in curve.bins]
    title, notes = "The drafter's probability against acceptance", answers.calibration.notes
    return _table(title, columns, rows, about, notes=notes, summary="; ".join(lines))


def _cells(answers: Answers) -> Table:
    columns = (
        Column("depth", "depth", count),
        Column("sibling", "sibling", count),
        Column("drafted", "accepted.total", count),
        Column("tried", "tried", count, 4),
        Column("accepted", "accepted.count", count),
        Column("per row", "accepted.value", percent),
        Column("interval", "accepted.interval", _shares, 1),
        Column("of tried", "of_tried.value", percent, 2),
        Column("draft p", "draft_p", _p, 3),
        Column("bar", "accepted.value", _bar, 5, words=True),
    )
    about = (
        "sibling: place among its siblings in draw order, from 1. per row: accepted / drafted, the tokens gained per "
        "row of the target's pass. of tried: accepted / tried. draft p: the drafter's mean probability. Least useful "
        "first, by the upper end of the interval; removing a node removes all below it."
    )
    tree = answers.tree
    named = [
        f"depth {cell.depth} sibling {cell.sibling} ({cell.accepted.count:,} of {cell.accepted.total:,} accepted)"
        for cell in tree.worst
    ]
    few = "too few rows to name the least useful" if len(tree.cells) > 1 else ""
    summary = f"least useful: {', '.join(named)}" if named else few
    title = "Least useful nodes, by depth and sibling"
    return _table(title, columns, tree.cells, about, notes=tree.notes, summary=summary, ranked=True)


def _shares(ends: tuple[float, float]) -> Cell:
    return f"{ends[0]:.1%}–{ends[1]:.1%}", ends[0]


def _p(value: float) -> Cell:
    """A probability in few characters, never 0 where it is not."""
    if not math.isfinite(value):
        return NONE, value
    return (f"{value:.3f}" if value == 0 or value >= 0.0005 else f"{value:.0e}"), value


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")
