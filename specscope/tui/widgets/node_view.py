"""A node in full: all that a record holds of it, and the distributions of target and drafter at its place. Pure."""

from __future__ import annotations

from functools import partial

from rich.cells import cell_len

from specscope.debug.views import DistributionView, NodeView
from specscope.trace.history.place import at
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.words import node_rows
from specscope.tui.look import Look
from specscope.tui.text import (
    Ink,
    Line,
    bar,
    cut,
    fit,
    folded,
    labelled,
    left,
    line_width,
    paragraph,
    probability,
    right,
    show_token,
)
from specscope.tui.widgets.decision import INKS, LABEL, LONGEST, VALUE, beside, decision, final_bars
from specscope.tui.widgets.output import Wrapper, feed, feed_prompt, feed_step

NARROWEST = 26  # cells of a column
GAP = 3
FEWEST = 4  # tokens of a column, however little room there is
NUMBER, MARK, SHORTEST_BAR = 6, 2, 5
OVERHEAD = 4  # lines of a column besides its tokens: its name, the token's own two, and a blank one
TAIL = 600  # output tokens of the context that are shown, or a few more; and before them the prompt
CONTEXT_LINES = 4  # of it at least


def node_view_lines(view: NodeView, vocabulary: Vocabulary, width: int, height: int) -> list[Line]:
    """Remarks on the place, then the distributions. May exceed a small `height`."""
    remarks, every = _said(view, vocabulary, width), list(view.columns.items())
    columns = next((count for count in (4, 2) if width >= count * (NARROWEST + GAP) - GAP), 1)
    rows = len(every) // columns
    wide = (width - GAP * (columns - 1)) // columns
    tokens = max((height - len(remarks) - 1) // rows - OVERHEAD, FEWEST)
    blocks = [_column(*each, view, vocabulary, wide, tokens) for each in every]
    lines = [*remarks, []]
    for index in range(0, len(every), columns):
        lines += beside(blocks[index : index + columns], wide, GAP)
    return lines


def _said(view: NodeView, vocabulary: Vocabulary, width: int) -> list[Line]:
    """Contradictions first; how far target and drafter are apart; what the rules removed."""
    lines: list[Line] = [line for note in view.notes for line in paragraph(f"! {note}", width, "warn")]
    if view.distances:
        parts: list[Line] = [[(f"{name} ", "dim"), (text, "strong")] for name, text in view.distances]
        whole = sum(map(line_width, parts)) + 6 <= width
        rows = [parts] if whole else [parts[:1], parts[1:]]
        lines += [fit(list(enumerate(row)), width, " · ") for row in rows]
    lines += paragraph(view.choice, width, "text")
    lines += [line for removed in view.removed for line in paragraph(removed.text(vocabulary), width, "dim")]
    return [*lines, [(cut(view.source, width), "faint")]]


def _column(
    name: str, column: DistributionView | str, view: NodeView, vocabulary: Vocabulary, width: int, tokens: int
) -> list[Line]:
    """A distribution under its name: a token a line with its bar; where the view's own token stands."""
    if isinstance(column, str):  # why there is none
        return [[(cut(name, width), "strong")], *paragraph(column, width, "faint"), []]
    ink: Ink = "target" if name.startswith("target") else "bonus"
    entropy: Line = [(f"H {column.entropy:.2f} nats", "dim")]
    lines: list[Line] = [fit([(0, [(name, "strong")]), (1, entropy)], width)]
    shown = [(top.token, top.prob) for top in column.top[:tokens]]
    lines += [
        [("▸ " if number == 0 else "  ", "accent"), (row, "accent")]
        for number, row in enumerate(folded(column.place, width - MARK))
    ]
    texts = [show_token(vocabulary, token) for token, _ in shown]
    room = min(max(map(cell_len, texts), default=1), width - MARK - SHORTEST_BAR - NUMBER - 1)
    for (token, prob), text in zip(shown, texts, strict=True):
        mine = token == view.token
        track = width - MARK - room - 1 - NUMBER
        full = bar(prob, track)
        lines.append(
            [
                ("▸ " if mine else "  ", "accent"),
                (left(text, room) + " ", "accent" if mine else "text"),
                (full, ink),
                (" " * (track - len(full)), "text"),
                (right(probability(prob), NUMBER), "strong" if mine else "dim"),
            ]
        )
    return [*lines, []]


def node_facts(look: Look, step: RequestStep, verdict: Verdict, node: int, width: int, height: int) -> list[Line]:
    """Why a node was kept or not, then its facts, with as much context as there is room for.

    For the final token `node` is the number of nodes.
    """
    headline, *more = look.why(step, node)
    answer = [
        *paragraph(headline, width, "strong"),
        *(line for text in more for line in paragraph(text, width, "text")),
    ]
    final = node == len(step.tree)
    room = min(max(width - LABEL - VALUE, 8), LONGEST)
    picture = final_bars(step, verdict, room) if final else decision(step, verdict, node, width)
    outcome: Ink = verdict.kind.value if final else INKS[Outcome(int(verdict.outcome[node]))]
    lines = [*answer, [], *picture, []]
    for label, text, odd in node_rows(look.history, at(step, node), partial(show_token, look.vocabulary)):
        ink: Ink = outcome if label in ("token", "kind") else "warn" if odd else "text"
        lines += labelled(label, "dim", text, ink, LABEL, width)
    return [*lines, *_context(look, step, node, width, max(height - len(lines), CONTEXT_LINES))]


def _context(look: Look, step: RequestStep, node: int, width: int, limit: int) -> list[Line]:
    """The text before the node: prompt and output, in the colours of the output's panel, then the drafted path."""
    if look.request is None or look.part is None or step.verdict is None:
        return []
    wrapper = Wrapper(max(width - LABEL, 8))
    steps, first, tokens = look.request.steps, look.part[0], 0
    while first > 0 and tokens < TAIL:
        first -= 1
        tokens += steps[first].emitted
    if first == 0 and steps[0].index == 0:
        feed_prompt(wrapper, look.request, look.vocabulary)
    for before in steps[first : look.part[0]]:
        feed_step(wrapper, before, look.vocabulary)
    ahead = step.tree.path_to(node)[:-1] if node < len(step.tree) else step.verdict.path
    for drafted in ahead:
        feed(wrapper, look.vocabulary, int(step.tree.token[drafted]), "accent", "accent")
    rows = wrapper.lines()[-limit:]
    return [[(left("context" if number == 0 else "", LABEL), "dim"), *row] for number, row in enumerate(rows)]
