"""What the record holds of a place in a tree: the trials of a node's siblings, and of the path down to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.trace.history.at_parent import above, end
from specscope.trace.history.decided import deciding
from specscope.trace.history.draw import MARKS
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.text import Ink, Line, cut, fit, probability, show_token
from specscope.tui.widgets.decision import INKS, LABEL, LONGEST, VALUE, beside, decision, final_bar

NARROWEST = 36  # cells of a decision beside another


def trial(step: RequestStep, verdict: Verdict, node: int, vocabulary: Vocabulary, width: int) -> list[Line]:
    """One decision under its token, and a blank line."""
    outcome = Outcome(int(verdict.outcome[node]))
    token = cut(show_token(vocabulary, int(step.tree.token[node])), max(width - 12, 8))
    residual = f"residual {probability(float(verdict.residual_mass[node]))}"
    said: Line = [(residual if outcome is Outcome.REJECTED and not verdict.is_greedy else "", "faint")]
    name: Line = [(f"{MARKS[outcome]} {token}", INKS[outcome])]
    head = fit([(0, name), (1, [(outcome.name.lower(), "dim")]), (2, said)], width)
    return [head, *decision(step, verdict, node, width), []]


def final_trial(step: RequestStep, verdict: Verdict, vocabulary: Vocabulary, width: int) -> list[Line]:
    """The final token, with its probability where it was drawn."""
    ink: Ink = verdict.kind.value
    name: Line = [(f"» {cut(show_token(vocabulary, verdict.token), max(width - 14, 8))}", ink)]
    room = min(max(width - LABEL - VALUE, 8), LONGEST)
    return [fit([(0, name), (1, [(verdict.kind.value, "dim")])], width), final_bar(step, verdict, room), []]


def trials(blocks: list[list[Line]], width: int) -> list[Line]:
    """Blocks beside each other, as many in a row as there is room for."""
    columns = max(1, min(len(blocks), (width + 2) // NARROWEST))
    wide = column_width(len(blocks), width)
    lines: list[Line] = []
    for at in range(0, len(blocks), columns):
        lines += beside(blocks[at : at + columns], wide)
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
    """A node's siblings, the path down to it, then the rest. For the final token `node` is the count of the nodes."""
    final = node == len(step.tree)
    last, parent = end(step).parent, above(step, node).parent
    others = [other for other in step.tree.children(parent) if other != node]
    path = [] if parent == ROOT else [int(at) for at in step.tree.path_to(parent)]
    wide = column_width(len(others) + (parent == last and not final), width)
    blocks = [trial(step, verdict, other, vocabulary, wide) for other in others]
    if parent == last and not final:
        blocks.append(final_trial(step, verdict, vocabulary, wide))
    lines: list[Line] = []
    if blocks:
        title = "rejected before it" if final else "siblings"
        lines += [[(title, "accent")], *trials(blocks, width)]
    rest = [at for at in range(len(step.tree)) if at not in {node, *others, *path}]
    for title, them in (("path to it", path), ("rest of the tree", rest)):
        if them:
            wide = column_width(len(them), width)
            drawn = [trial(step, verdict, at, vocabulary, wide) for at in them]
            lines += [[(title, "accent")], *trials(drawn, width)]
    return lines
