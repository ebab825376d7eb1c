"""A judged tree as aligned lines. Pure: the tree panel shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from specscope.trace.history.place import PlaceView, coin_sign, end, last, nodes
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import MARKS, branches, label
from specscope.tui.text import NOTHING, Ink, Line, left, probability, right, show_token
from specscope.tui.widgets.decision import INKS, coin_on_line, mark_line, tried

FINAL_MARK = "»"


Cell = Callable[[PlaceView], str]


@dataclass(frozen=True)
class TreeColumn:
    """A column of numbers: how it is headed, how wide, and for which nodes it says something."""

    head: str
    width: int
    cell: Cell


def _numbers(name: str, outcomes: tuple[Outcome, ...] = tuple(Outcome)) -> Cell:
    """A cell function for numbers of the verdict, blank for nodes of other outcomes."""

    def cell(place: PlaceView) -> str:
        verdict, node = place.judged
        return (
            probability(float(getattr(verdict, name)[node])) if Outcome(int(verdict.outcome[node])) in outcomes else ""
        )

    return cell


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


def _source(place: PlaceView) -> str:
    return "" if place.step.method is None else place.step.method.source_of(place.judged[1])


DIGITS = 5  # of a probability: 0 and 1 take as many cells, so that decimal points stand below each other
TRIED = (Outcome.ACCEPTED, Outcome.REJECTED)
P = TreeColumn("p", 5, _numbers("p"))
Q = TreeColumn("q", 5, lambda place: probability(float(place.step.tree.q[place.judged[1]])))
DRAFT = TreeColumn(label("draft_p"), 7, lambda place: _known(place.draft_p))
RAW = TreeColumn(label("raw_p"), 5, lambda place: _known(place.raw_p))
RANK = TreeColumn("raw rank", 8, lambda place: _rank(place.raw_rank))
SOURCE = TreeColumn(label("source"), 5, _source)
SOURCE_INKS: dict[str, Ink] = {"model": "dim", "text": "accent", "both": "strong"}
P_TRIAL = TreeColumn(label("p_tried"), 7, lambda place: _known(place.tried.get("p_tried")))
Q_TRIAL = TreeColumn(label("q_tried"), 7, lambda place: _known(place.tried.get("q_tried")))
P_ALL = TreeColumn(label("p_tried"), 7, _numbers("p_trial", TRIED))  # where p as drawn is not beside it
Q_ALL = TreeColumn(label("q_tried"), 7, _numbers("q_trial", TRIED))
COIN = TreeColumn(label("u"), 5, _coin)
ACCEPT = TreeColumn("a", 7, _accept)
RESIDUAL = TreeColumn("residual", 8, _numbers("residual_mass", (Outcome.REJECTED,)))
LINE = TreeColumn("coin on a line", 22, lambda place: "")  # drawn, not written; as wide as there is room, to LONGEST
LONGEST = 50

# How to give way as the panel gets narrower: (cells a level of the tree is indented, the columns).
TRIALS = (P, Q, P_TRIAL, Q_TRIAL, COIN, ACCEPT)
FORMS: tuple[tuple[int, tuple[TreeColumn, ...]], ...] = (
    (3, (RAW, RANK, *TRIALS, RESIDUAL, LINE)),
    *((3, (*TRIALS, *more)) for more in ((RESIDUAL, LINE), (LINE,), (RESIDUAL,))),
    *((indent, TRIALS) for indent in (3, 2, 1)),
    *((indent, columns) for columns in ((P_ALL, Q_ALL, COIN, ACCEPT), (P, Q, COIN)) for indent in (2, 1)),
    *((1, columns) for columns in ((P, Q), (P,), ())),
)
# At temperature 0 p is 0 or 1: the target's p before that tells how near it was.
GREEDY: tuple[tuple[int, tuple[TreeColumn, ...]], ...] = (
    (3, (RAW, RANK, DRAFT, P)),
    *((indent, (RAW, RANK, DRAFT)) for indent in (3, 2, 1)),
    *((indent, (RAW, DRAFT)) for indent in (2, 1)),
    (1, (RAW,)),
    (1, ()),
)
GAP = 2
NEAR_TIE = "≈"
TOKEN_ROOM = 14  # a tree is not squeezed for the sake of tokens longer than this


def _known(value: float | None) -> str:
    """A probability, nothing where it is not recorded."""
    return "" if value is None else probability(value)


def _rank(rank: int | None) -> str:
    return "" if rank is None else str(rank)


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
    grown = DraftTree.build([*tree.token.tolist(), verdict.token], [*tree.parent.tolist(), last(verdict)])
    rows = []
    for node, lead in branches(grown):
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


def _same(places: Sequence[PlaceView]) -> list[TreeColumn]:
    """The columns p and q as tried that nowhere differ from p and q as drawn, and so would say nothing."""
    other = {name for place in places for name in place.tried}
    both = {"p_tried": [P_TRIAL, P_ALL], "q_tried": [Q_TRIAL, Q_ALL]}
    return [column for name, columns in both.items() if name not in other for column in columns]


def _columns(
    columns: tuple[TreeColumn, ...], step: RequestStep, same: Collection[TreeColumn], *, greedy: bool
) -> tuple[TreeColumn, ...]:
    """The form's columns that carry information. Where q is a point mass, the drafter's own probability says more.

    Where there is no room for both, p and q as tried stand in the place of p and q only where they are others.
    """
    model = step.notes is not None and not step.tree.is_sampled
    source = (SOURCE,) if step.method is not None and len(step.method.source) else ()
    given = [column for column in columns if column not in same and (step.parents is not None or column is not RANK)]
    if greedy:
        shown = given if step.parents is not None else [P, *(column for column in given if column not in (RAW, P))]
        return (*source, *(column for column in shown if column is not DRAFT or step.notes is not None))
    for drawn, trial in ((Q, Q_ALL), (P, P_ALL)):
        if drawn not in given and trial not in given:
            given.insert(0, drawn)
    if step.parents is None:
        given = [column for column in given if column is not RAW]
    if not len(step.tree):
        return tuple(column for column in given if column in (P, COIN))
    return (*source, *(DRAFT if column is Q and model else column for column in given))


def _form(
    rows: Sequence[Node], step: RequestStep, verdict: Verdict, places: Sequence[PlaceView], width: int
) -> tuple[int, tuple[TreeColumn, ...], int]:
    """The richest form that fits, with the coin's line in its width, and the room for branch, mark and token."""
    same = _same(places)
    greedy = verdict.is_greedy
    for indent, form in GREEDY if greedy else FORMS:
        columns = _columns(form, step, same, greedy=greedy) if form else ()
        room = width - sum(column.width + GAP for column in columns)
        need = max(len(row.lead) // 3 * indent + 2 + min(cell_len(row.token), TOKEN_ROOM) for row in rows)
        if need <= room:
            break
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
    head: Line = [(left("", room) + "".join(" " * GAP + _heading(column) for column in columns), "faint")]
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
            rest = columns
            if columns and columns[0] is SOURCE:
                source, rest = SOURCE.cell(places[row.node]), columns[1:]
                line.append((_cell(source, SOURCE), SOURCE_INKS[source]))
            line += [(_cells(places[row.node], rest), ink)]
            if columns and columns[-1].head == LINE.head and ink == "text":
                a, coin = float(verdict.accept_prob[row.node]), coin_on_line(verdict, row.node)
                wide = columns[-1].width
                line[-1] = (line[-1][0][:-wide], ink)
                line += mark_line(a, coin, wide, row.ink)
        lines.append(line)
    return head, lines, [row.node for row in rows]


def _heading(column: TreeColumn) -> str:
    if column.head == LINE.head:
        return f"0{column.head:^{column.width - 2}}1"
    return right(left(column.head, DIGITS) if len(column.head) < DIGITS else column.head, column.width)


def _cells(place: PlaceView, columns: Sequence[TreeColumn]) -> str:
    return "".join(_cell(column.cell(place), column) for column in columns)


def _cell(text: str, column: TreeColumn) -> str:
    return " " * GAP + right(left(text, DIGITS) if len(text) < DIGITS else text, column.width)


def _final_cells(step: RequestStep, verdict: Verdict, columns: Sequence[TreeColumn]) -> str:
    """The final token was drawn, not tried: its p and its coin, and what both models thought of it.

    A recovered token was drawn from the residual: its share of that is no p, and stands with p as tried.
    """
    drawn, there = probability(verdict.final_p), end(step)
    whole = step.parents.final_target_p if step.parents is not None else verdict.final_p
    p = "" if step.parents is None and verdict.kind is FinalKind.RECOVERED else probability(whole)
    texts = {P: p, P_TRIAL: drawn, P_ALL: drawn, COIN: coin_text(verdict.final_coin)}
    texts |= {RAW: _known(there.raw_p), RANK: _rank(there.raw_rank), DRAFT: _known(there.draft_p)}
    return "".join(_cell(texts.get(column, ""), column) for column in columns)
