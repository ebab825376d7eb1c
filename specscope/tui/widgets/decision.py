"""A decision as a picture: the coin as a mark on the line from 0 to 1, of which a is won; p and q as bars. Pure.

The names mean the same on every screen. `p` and `q` are the probabilities as drawn, before any trial; `p tried` and
`q tried` those at the trial, after earlier siblings were rejected: a = min(1, p tried / q tried) under the standard
rule. They are shown where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specscope.trace.history.decided import BELOW, TOSSED, coin_sign
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.words import WordRow, final_number, node_numbers
from specscope.tui.text import Ink, Line, bar, left, line_width, probability

LABEL = 9
VALUE = 17  # `0.774 ≥ a 0.125`, and the gap before it
SHORTEST, LONGEST = 8, 60  # cells of a bar
INKS: dict[Outcome, Ink] = {
    Outcome.ACCEPTED: "accepted-strong",
    Outcome.REJECTED: "rejected",
    Outcome.UNTRIED: "faint",
}
P_INKS: dict[str, Ink] = dict.fromkeys(("p", "raw_p", "p_tried"), "target")  # of bars; those of q have another


def tried(verdict: Verdict, node: int) -> bool:
    """Whether the coin was thrown for it."""
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
    won, at = round(min(max(a, 0.0), 1.0) * width), min(int(min(max(coin, 0.0), 1.0) * width), width - 1)
    if coin < a:
        won = max(won, 1)
        at = min(at, won - 1)
    else:
        won = min(won, width - 1)
        at = max(at, won)
    cells = ["━" * min(won, at), "─" * (at - won), "●", "━" * (won - at - 1), "─" * (width - max(won, at + 1))]
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
        said = f"  {fell} {sign} a {probability(a)}" if coin else f"  none  a {probability(a)}"
        line = mark_line(a, coin_on_line(verdict, node), room, ink)
        lines.append([(left("coin", LABEL), "dim"), *line, (said, "text")])
    return [*lines, *(bar_line(row, P_INKS.get(row.name, "bonus"), room) for row in node_numbers(step, node))]


def final_bar(step: RequestStep, verdict: Verdict, room: int) -> Line:
    """The final token's p; of a greedy step, before temperature 0."""
    return bar_line(final_number(step), verdict.kind.value, room)


def bar_line(row: WordRow, ink: Ink, room: int) -> Line:
    """`name  ████····  0.125`."""
    full = bar(float(row.value), room)
    return [(left(row.label, LABEL), "dim"), (full, ink), ("·" * (room - len(full)), "rail"), (f"  {row.text}", "text")]


def beside(blocks: Sequence[Sequence[Line]], width: int, gap: int = 2) -> list[Line]:
    """Blocks of lines beside each other, each in `width` cells."""
    rows: list[Line] = []
    for at in range(max(map(len, blocks), default=0)):
        row: list[tuple[str, Ink]] = []
        for number, block in enumerate(blocks):
            line = block[at] if at < len(block) else []
            missing = width - line_width(line) + gap if number < len(blocks) - 1 else 0
            row += [*line, (" " * missing, "text")]
        rows.append(row)
    return rows
