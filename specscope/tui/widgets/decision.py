"""A decision as a picture, the decisions at a place of a tree, and what both models found likeliest there. Pure.

The names mean the same on every screen. `p` and `q` are the probabilities as drawn, before any trial; `p tried` and
`q tried` those at the trial, after earlier siblings were rejected: a = min(1, p tried / q tried) under the standard
rule. They are shown where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from specscope.trace.history.place import BELOW, TOSSED, PlaceView, TopToken, at, coin_sign, deciding, end, last
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import MARKS, about_likeliest, label, likeliest
from specscope.tui.text import Ink, Line, bar, cut, fit, left, line_width, probability, show_token

LABEL = 9
VALUE = 17  # `0.774 ≥ a 0.125`, and the gap before it
SHORTEST, LONGEST = 8, 60  # cells of a bar
NARROWEST = 36  # cells of a decision beside another
COLUMN = 30  # cells of a column of likeliest tokens, at least
MARK, NUMBER, TOKEN, LONGEST_COLUMN = 2, 8, 14, 24
INKS: dict[Outcome, Ink] = {
    Outcome.ACCEPTED: "accepted-strong",
    Outcome.REJECTED: "rejected",
    Outcome.UNTRIED: "faint",
}
P_INKS: dict[str, Ink] = dict.fromkeys(("p", "raw_p", "p_tried"), "target")  # of bars; those of q have another


def tried(verdict: Verdict, node: int) -> bool:
    """Whether a node was tried, so that its coin was tossed."""
    return int(verdict.outcome[node]) != Outcome.UNTRIED


def coin_on_line(verdict: Verdict, node: int) -> float:
    """The coin, where it was held against a; 0 where the rule has another use for it."""
    return float(verdict.coin[node]) if coin_sign(verdict, node) in TOSSED else 0.0


def mark_line(a: float, coin: float, width: int, ink: Ink) -> list[tuple[str, Ink]]:
    """The line from 0 to 1 with its first part, a, thick, and the coin on it: on the thick part where it is below a.

    A coin of 0 is none, and is not drawn.
    """
    if not (math.isfinite(a) and math.isfinite(coin)):  # a record that says nothing
        return [("─" * width, "rail")]
    if not coin:  # none was tossed: a greedy request of another engine
        won = round(min(max(a, 0.0), 1.0) * width)
        line: Line = [("━" * won, "accepted"), ("─" * (width - won), "rail")]
        return [part for part in line if part[0]]
    won, mark = round(min(max(a, 0.0), 1.0) * width), min(int(min(max(coin, 0.0), 1.0) * width), width - 1)
    if coin < a:
        won = max(won, 1)
        mark = min(mark, won - 1)
    else:
        won = min(won, width - 1)
        mark = max(mark, won)
    cells = ["━" * min(won, mark), "─" * (mark - won), "●", "━" * (won - mark - 1), "─" * (width - max(won, mark + 1))]
    inks: tuple[Ink, ...] = ("accepted", "rail", ink, "accepted", "rail")
    return [(text, shade) for text, shade in zip(cells, inks, strict=True) if text]


def decision(step: RequestStep, verdict: Verdict, node: int, width: int) -> list[Line]:
    """The coin against a, then p and q, a line each, as wide as there is room."""
    room = min(max(width - LABEL - VALUE, SHORTEST), LONGEST)
    lines: list[Line] = []
    if tried(verdict, node) and not verdict.is_greedy:  # at temperature 0 the coin decides nothing
        a, coin = float(verdict.accept_prob[node]), float(verdict.coin[node])
        ink, sign = INKS[Outcome(int(verdict.outcome[node]))], coin_sign(verdict, node)
        fell = "below" if sign == BELOW else probability(coin)
        comparison = f"  {fell} {sign} a {probability(a)}" if coin else f"  none  a {probability(a)}"
        line = mark_line(a, coin_on_line(verdict, node), room, ink)
        lines.append([(left("coin", LABEL), "dim"), *line, (comparison, "text")])
    numbers = at(step, node).numbers.items()
    return [*lines, *(bar_line(name, value, P_INKS.get(name, "bonus"), room) for name, value in numbers)]


def final_bars(step: RequestStep, verdict: Verdict, room: int) -> list[Line]:
    """The final token's p; of a greedy step, before temperature 0; of a recovered one, in the residual too."""
    return [bar_line(name, value, verdict.kind.value, room) for name, value in end(step).numbers.items()]


def bar_line(name: str, value: float, ink: Ink, room: int) -> Line:
    """`name  ████····  0.125`."""
    full, text = bar(value, room), f"  {probability(value)}"
    return [(left(label(name), LABEL), "dim"), (full, ink), ("·" * (room - len(full)), "rail"), (text, "text")]


def beside(blocks: Sequence[Sequence[Line]], width: int, gap: int = 2) -> list[Line]:
    """Blocks of lines beside each other, each in `width` cells."""
    rows: list[Line] = []
    for index in range(max(map(len, blocks), default=0)):
        row: list[tuple[str, Ink]] = []
        for number, block in enumerate(blocks):
            line = block[index] if index < len(block) else []
            missing = width - line_width(line) + gap if number < len(blocks) - 1 else 0
            row += [*line, (" " * missing, "text")]
        rows.append(row)
    return rows


def trial(step: RequestStep, verdict: Verdict, node: int, vocabulary: Vocabulary, width: int) -> list[Line]:
    """One decision under its token, and a blank line."""
    outcome = Outcome(int(verdict.outcome[node]))
    token = cut(show_token(vocabulary, int(step.tree.token[node])), max(width - 12, 8))
    residual = f"residual {probability(float(verdict.residual_mass[node]))}"
    residual_part: Line = [(residual if outcome is Outcome.REJECTED and not verdict.is_greedy else "", "faint")]
    name: Line = [(f"{MARKS[outcome]} {token}", INKS[outcome])]
    head = fit([(0, name), (1, [(outcome.name.lower(), "dim")]), (2, residual_part)], width)
    return [head, *decision(step, verdict, node, width), []]


def final_trial(step: RequestStep, verdict: Verdict, vocabulary: Vocabulary, width: int) -> list[Line]:
    """The final token, with its probability where it was drawn."""
    ink: Ink = verdict.kind.value
    name: Line = [(f"» {cut(show_token(vocabulary, verdict.token), max(width - 14, 8))}", ink)]
    room = min(max(width - LABEL - VALUE, 8), LONGEST)
    return [fit([(0, name), (1, [(verdict.kind.value, "dim")])], width), *final_bars(step, verdict, room), []]


def trials(blocks: list[list[Line]], width: int) -> list[Line]:
    """Blocks beside each other, as many in a row as there is room for."""
    columns = max(1, min(len(blocks), (width + 2) // NARROWEST))
    wide = column_width(len(blocks), width)
    lines: list[Line] = []
    for first in range(0, len(blocks), columns):
        lines += beside(blocks[first : first + columns], wide)
    return lines


def column_width(count: int, width: int) -> int:
    """The cells that `trials` gives to each of so many blocks."""
    columns = max(1, min(count, (width + 2) // NARROWEST))
    return (width - 2 * (columns - 1)) // columns


def why_lines(step: RequestStep, verdict: Verdict, vocabulary: Vocabulary, width: int, room: int) -> list[Line]:
    """A blank line, the decisions that ended the path, then those on the way: as many as `room` lines hold."""
    if not len(step.tree):
        return [[], *final_trial(step, verdict, vocabulary, width)[:-1]] if room >= 3 else []
    ended = deciding(step)
    below = [int(node) for node in verdict.path if node not in ended]
    lines: list[Line] = []
    for nodes in (ended, below[::-1]):
        lines += _fitting(step, verdict, nodes, vocabulary, width, room - len(lines) - 1)
    return [[], *lines][:room] if lines else []


def _fitting(
    step: RequestStep, verdict: Verdict, nodes: Sequence[int], vocabulary: Vocabulary, width: int, room: int
) -> list[Line]:
    """The decisions of the first of the nodes, as many as there is room for."""
    wide = column_width(len(nodes), width)
    for count in range(min(len(nodes), room), 0, -1):
        lines = trials([trial(step, verdict, node, vocabulary, wide) for node in nodes[:count]], width)
        if len(lines) - 1 <= room:  # the last line is blank
            return lines
    return []


def place_lines(step: RequestStep, verdict: Verdict, node: int, vocabulary: Vocabulary, width: int) -> list[Line]:
    """A node's siblings, and the path down to it. For the final token `node` is the count of the nodes."""
    final = node == len(step.tree)
    ended, parent = last(verdict), at(step, node).parent
    others = [other for other in step.tree.children(parent) if other != node]
    path = [] if parent == ROOT else [int(number) for number in step.tree.path_to(parent)]
    wide = column_width(len(others) + (parent == ended and not final), width)
    blocks = [trial(step, verdict, other, vocabulary, wide) for other in others]
    if parent == ended and not final:
        blocks.append(final_trial(step, verdict, vocabulary, wide))
    lines: list[Line] = []
    if blocks:
        title = "rejected before it" if final else "siblings"
        lines += [[(title, "accent")], *trials(blocks, width)]
    if path:
        wide = column_width(len(path), width)
        drawn = [trial(step, verdict, number, vocabulary, wide) for number in path]
        lines += [[("path to it", "accent")], *trials(drawn, width)]
    return lines


def likeliest_lines(place: PlaceView, vocabulary: Vocabulary, width: int) -> list[Line]:
    """A column for each of the two that is recorded; tokens that were drafted there have the mark of their outcome.

    Below, where the target's first choice was for the drafter, and how much of its mass the drafter cannot draft.
    """
    columns = likeliest(place)
    if not columns:
        return []
    wide = (width - 2 * (len(columns) - 1)) // len(columns)
    stacked = wide < COLUMN
    blocks = [_column(place, *column, vocabulary, width if stacked else wide) for column in columns]
    lines = [line for block in blocks for line in block] if stacked else beside(blocks, wide)
    below: list[Line] = [
        [(cut(text, width), "dim")] for text in about_likeliest(place, partial(show_token, vocabulary))
    ]
    return [*lines, *below, []]


def _column(place: PlaceView, name: str, tokens: Sequence[TopToken], vocabulary: Vocabulary, width: int) -> list[Line]:
    ink: Ink = "target" if name.startswith("target") else "bonus"
    room = min(max(width - MARK - TOKEN - NUMBER, 0), LONGEST_COLUMN)
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


def _mark(place: PlaceView, token: int) -> tuple[str, Ink]:
    verdict = place.step.verdict
    drafted = [node for node in place.children if int(place.step.tree.token[node]) == token]
    if not drafted or verdict is None:
        return "", "text"
    outcome = Outcome(int(verdict.outcome[drafted[0]]))
    return MARKS[outcome], INKS[outcome]
