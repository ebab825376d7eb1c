"""The likeliest tokens of target and drafter at a place, as the record has them, beside each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.trace.history.at_parent import AtParent, TopToken
from specscope.trace.history.draw import MARKS
from specscope.trace.history.wording import ordinal
from specscope.trace.record.records import Outcome
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.text import Ink, Line, bar, cut, left, probability, show_token
from specscope.tui.widgets.decision import INKS, beside

NARROWEST = 30  # cells of a column
MARK, NUMBER, TOKEN, LONGEST = 2, 8, 14, 24


def likeliest_lines(place: AtParent, vocabulary: Vocabulary, width: int) -> list[Line]:
    """A column for each of the two that is recorded; tokens that were drafted there have the mark of their outcome.

    Below, where the target's first choice was for the drafter, and how much of its mass the drafter cannot draft.
    """
    columns: list[tuple[str, Ink, Sequence[TopToken]]] = [
        ("target's likeliest, raw", "target", place.likeliest),
        ("drafter's likeliest", "bonus", place.drafters_likeliest),
    ]
    columns = [column for column in columns if column[2]]
    if not columns:
        return []
    wide = (width - 2 * (len(columns) - 1)) // len(columns)
    stacked = wide < NARROWEST
    blocks = [_column(place, *column, vocabulary, width if stacked else wide) for column in columns]
    lines = [line for block in blocks for line in block] if stacked else beside(blocks, wide)
    return [*lines, *_below(place, vocabulary, width), []]


def _column(
    place: AtParent, name: str, ink: Ink, tokens: Sequence[TopToken], vocabulary: Vocabulary, width: int
) -> list[Line]:
    room = min(max(width - MARK - TOKEN - NUMBER, 0), LONGEST)
    lines: list[Line] = [[(cut(name, width), "accent")]]
    for top in tokens:
        mark, mark_ink = _mark(place, top.token)
        full = bar(top.prob, room)
        row: Line = [
            (left(mark, MARK), mark_ink),
            (left(show_token(vocabulary, top.token), TOKEN), mark_ink if mark else "text"),
            (left("  " + probability(top.prob), NUMBER), "text"),
            (full, ink),
            ("·" * (room - len(full)), "rail"),
        ]
        lines.append(row)
    return lines


def _mark(place: AtParent, token: int) -> tuple[str, Ink]:
    verdict = place.step.verdict
    drafted = [node for node in place.children if int(place.step.tree.token[node]) == token]
    if not drafted or verdict is None:
        return "", "text"
    outcome = Outcome(int(verdict.outcome[drafted[0]]))
    return MARKS[outcome], INKS[outcome]


def _below(place: AtParent, vocabulary: Vocabulary, width: int) -> list[Line]:
    if not place.likeliest or not place.drafters_likeliest:
        return []
    first, lines = place.of_token(place.likeliest[0].token), []
    if first.draft_rank:
        lines.append(f"{show_token(vocabulary, first.token)} is the drafter's {ordinal(first.draft_rank)} choice")
    if place.outside:
        lines.append(f"{probability(place.outside)} of the target's mass is outside the draft vocabulary")
    return [[(cut(text, width), "dim")] for text in lines]
