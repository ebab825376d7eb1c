"""A judged tree as aligned lines. Pure: the tree panel shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from specscope.trace.history.place import PlaceView, coin_sign, end, last, nodes
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import MARKS, branches, label
from specscope.tui.text import NOTHING, Ink, Line, left, probability, right, show_token
from specscope.tui.widgets.decision import INKS, coin_on_line, mark_line, tried

FINAL_MARK = "»"


@dataclass(frozen=True)
class TreeColumn:
    """A column of numbers: how it is headed, how wide, and for which nodes it says something."""

    head: str
    width: int
    cell: Callable[[PlaceView], str]


def _residual(place: PlaceView) -> str:
    verdict, node = place.judged
    return probability(float(verdict.residual_mass[node])) if verdict.outcome[node] == Outcome.REJECTED else ""


def coin_text(coin: float) -> str:
    """A coin; 0 is none, of an engine that tosses none there."""
    return probability(coin) if coin else NOTHING


def _coin(place: PlaceView) -> str:
    verdict, node = place.judged
    return coin_text(float(verdict.coin[node])) if verdict.judged[node] else ""


def _accept(place: PlaceView) -> str:
    """`< 0.812`: the bound that the coin had to stay below, with the sign of the outcome."""
    verdict, node = place.judged
    if not tried(verdict, node):
        return ""
    return f"{coin_sign(verdict, node)} " + left(probability(float(verdict.accept_prob[node])), DIGITS)


DIGITS = 5  # of a probability: 0 and 1 take as many cells, so that decimal points stand below each other
P = TreeColumn("p", 5, lambda place: probability(float(place.judged[0].p[place.judged[1]])))
Q = TreeColumn("q", 5, lambda place: probability(float(place.step.tree.q[place.judged[1]])))
DRAFT = TreeColumn(label("draft_p"), 7, lambda place: _known(place.draft_p))
RAW = TreeColumn(label("raw_p"), 5, lambda place: _known(place.raw_p))
RANK = TreeColumn("raw rank", 8, lambda place: str(place.raw_rank or ""))
P_TRIAL = TreeColumn(label("p_tried"), 7, lambda place: _known(place.tried.get("p_tried")))
Q_TRIAL = TreeColumn(label("q_tried"), 7, lambda place: _known(place.tried.get("q_tried")))
COIN = TreeColumn(label("u"), 5, _coin)
ACCEPT = TreeColumn("a", 7, _accept)
RESIDUAL = TreeColumn("residual", 8, _residual)
LINE = TreeColumn("coin on a line", 22, lambda place: "")  # drawn, not written; as wide as there is room, to LONGEST
LONGEST = 50

# What gives way as the panel gets narrower, the first first: columns, or cells that a level of the tree is indented
Way = tuple[TreeColumn, ...] | int
SAMPLED: tuple[Way, ...] = ((RAW, RANK), (LINE,), (RESIDUAL,), 2, 1)
NARROW: tuple[Way, ...] = ((ACCEPT,), (COIN,), (Q, DRAFT, Q_TRIAL), (P, P_TRIAL))
# At temperature 0 p is 0 or 1: the target's p before that tells how near it was.
GREEDY: tuple[Way, ...] = ((P,), 2, 1, (RANK,), (DRAFT,), (RAW,))
GAP = 2
NEAR_TIE = "≈"
TOKEN_ROOM = 14  # a tree is not squeezed for the sake of tokens longer than this


def _either(trial: TreeColumn, drawn: TreeColumn) -> TreeColumn:
    """p or q as tried where there is room for one column: as drawn where that is the same number."""
    return replace(trial, cell=lambda place: trial.cell(place) or drawn.cell(place))


def _known(value: float | None) -> str:
    """A probability, nothing where it is not recorded."""
    return "" if value is None else probability(value)


@dataclass(frozen=True)
class Node:
    """A line of the tree before it is laid out."""

    node: int  # the count of the nodes for the final token
    lead: str
    mark: str
    token: str
    ink: Ink
    kind: str = ""  # of the final token, shown where there is room


def _nodes(step: RequestStep, verdict: Verdict, vocabulary: Vocabulary) -> list[Node]:
    """The lines of a tree depth first, the final token hung where it was drawn, after the children that failed."""
    tree, count = step.tree, len(step.tree)
    rows = []
    for node, lead in branches([*tree.parent.tolist(), last(verdict)]):
        if node == count:
            kind: Ink = verdict.kind.value
            rows.append(Node(node, lead, FINAL_MARK, show_token(vocabulary, verdict.token), kind, kind))
        else:
            outcome = Outcome(int(verdict.outcome[node]))
            token = show_token(vocabulary, int(tree.token[node]))
            rows.append(Node(node, lead, MARKS[outcome], token, INKS[outcome]))
    return rows


def squeeze(lead: str, indent: int) -> str:
    """The branch characters with `indent` cells a level in place of three."""
    return "".join(lead[i : i + 3][:indent] for i in range(0, len(lead), 3))


def _columns(step: RequestStep, places: Sequence[PlaceView], *, greedy: bool) -> list[TreeColumn]:
    """The columns that say something here. Where q is a point mass, the drafter's own probability says more."""
    has_parents, has_notes = step.parents is not None, step.notes is not None
    if greedy:
        return [*([RAW, RANK] if has_parents else [P]), *([DRAFT] if has_notes else []), *([P] * has_parents)]
    if not len(step.tree):
        return [P, COIN]
    others = {name for place in places for name in place.tried}
    shown = [*([RAW, RANK] if has_parents else []), P, DRAFT if has_notes and not step.tree.is_sampled else Q]
    shown += [column for name, column in (("p_tried", P_TRIAL), ("q_tried", Q_TRIAL)) if name in others]
    return [*shown, COIN, ACCEPT, RESIDUAL, LINE]


def _form(
    rows: Sequence[Node], step: RequestStep, verdict: Verdict, places: Sequence[PlaceView], width: int
) -> tuple[int, tuple[TreeColumn, ...], int]:
    """The richest form that fits, with the coin's line in its width, and the room for branch, mark and token."""
    columns, indent = _columns(step, places, greedy=verdict.is_greedy), 3
    pairs = [(column, trial) for column, trial in ((P, P_TRIAL), (Q, Q_TRIAL)) if {column, trial} <= {*columns}]
    drawn = tuple(column for column, _ in pairs)  # a is of those tried
    for way in (None, *(GREEDY if RAW in columns and verdict.is_greedy else (*SAMPLED, drawn, *NARROW))):
        indent = way if isinstance(way, int) else indent
        columns = [column for column in columns if not isinstance(way, tuple) or column not in way]
        room = width - sum(column.width + GAP for column in columns)
        need = max(len(row.lead) // 3 * indent + 2 + min(cell_len(row.token), TOKEN_ROOM) for row in rows)
        if need <= room:
            break
    for column, trial in pairs:
        if column not in columns and trial in columns:
            columns[columns.index(trial)] = _either(trial, column)
    longest = max(len(row.lead) // 3 * indent + 2 + cell_len(f"{row.token}  {row.kind}".rstrip()) for row in rows)
    spare = max(room - max(longest, 24), 0)
    line = replace(LINE, width=min(LINE.width + spare, LONGEST))
    return indent, tuple(line if column is LINE else column for column in columns), room - spare


def tree_lines(
    step: RequestStep, verdict: Verdict, vocabulary: Vocabulary, width: int, ties: Collection[int] = ()
) -> tuple[Line, list[Line], list[int]]:
    """(the head of the columns, a line a node, whose node each is) for a panel of this width.

    The final token has a line too: as its node the count of the tree's.

    `ties`: the decisions to mark as near ties (Verdict.near_ties).
    """
    rows, places = _nodes(step, verdict, vocabulary), nodes(step)
    rows = [replace(row, token=f"{row.token} {NEAR_TIE}") if row.node in ties else row for row in rows]
    indent, columns, room = _form(rows, step, verdict, places, width)
    head: Line = [(left("", room) + "".join(_cell(column.head, column) for column in columns), "faint")]
    lines: list[Line] = []
    for row in rows:
        lead = squeeze(row.lead, indent)
        line: list[tuple[str, Ink]] = [(lead[:-indent], "rail")]
        line.append((lead[-indent:], "accepted" if row.ink == "accepted-strong" else "rail"))
        name, free = f"{row.token}  {row.kind}".rstrip(), room - len(lead) - 2
        line += [(row.mark + " ", row.ink), (left(name if cell_len(name) <= free else row.token, free), row.ink)]
        if row.node == len(step.tree):
            line.append((_final_cells(step, verdict, columns), "text"))
        else:
            ink: Ink = "faint" if verdict.outcome[row.node] == Outcome.UNTRIED else "text"
            line.append(("".join(_cell(column.cell(places[row.node]), column) for column in columns), ink))
            if columns and columns[-1].head == LINE.head and ink == "text":
                a, coin = float(verdict.accept_prob[row.node]), coin_on_line(verdict, row.node)
                wide = columns[-1].width
                line[-1] = (line[-1][0][:-wide], ink)
                line += mark_line(a, coin, wide, row.ink)
        lines.append(line)
    return head, lines, [row.node for row in rows]


def _cell(text: str, column: TreeColumn) -> str:
    return " " * GAP + right(left(text, DIGITS) if len(text) < DIGITS else text, column.width)


def _final_cells(step: RequestStep, verdict: Verdict, columns: Sequence[TreeColumn]) -> str:
    """The final token was drawn, not tried: its p and its coin, and what both models thought of it.

    A recovered token was drawn from the residual: its share of that is no p, and stands with p as tried.
    """
    drawn, there = probability(verdict.final_p), end(step)
    whole = step.parents.final_target_p if step.parents is not None else verdict.final_p
    p = "" if step.parents is None and verdict.kind is FinalKind.RECOVERED else probability(whole)
    texts = {P.head: p, P_TRIAL.head: drawn, COIN.head: coin_text(verdict.final_coin)}
    texts |= {RAW.head: _known(there.raw_p), RANK.head: str(there.raw_rank or ""), DRAFT.head: _known(there.draft_p)}
    return "".join(_cell(texts.get(column.head, ""), column) for column in columns)
