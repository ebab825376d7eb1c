"""All that a record holds of one node, or of the final token: the decision as a picture, then facts. Pure."""

from __future__ import annotations

from functools import partial

from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.words import node_rows
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, labelled, left, paragraph, show_token
from specscope.tui.widgets.decision import INKS, LABEL, LONGEST, VALUE, decision, final_bar
from specscope.tui.widgets.output import feed, feed_prompt, feed_step
from specscope.tui.widgets.wrap import Wrapper

TAIL = 600  # output tokens of the context that are shown, or a few more; and before them the prompt
CONTEXT_LINES = 4  # of it at least


def node_facts(look: Look, step: RequestStep, verdict: Verdict, node: int, width: int, height: int) -> list[Line]:
    """Why it was kept or not, then the lines for a node, with as much context as there is room for.

    For the final token `node` is the number of nodes.
    """
    answer = [line for at, text in enumerate(look.why(step, node)) for line in paragraph(text, width, _ink(at))]
    final = node == len(step.tree)
    room = min(max(width - LABEL - VALUE, 8), LONGEST)
    picture = [final_bar(step, verdict, room)] if final else decision(step, verdict, node, width)
    outcome: Ink = verdict.kind.value if final else INKS[Outcome(int(verdict.outcome[node]))]
    rows = node_rows(look.history, step, node, partial(show_token, look.vocabulary))
    lines = [*answer, [], *picture, []]
    for row in rows:
        ink: Ink = outcome if row.name in ("token", "kind") else "warn" if row.odd else "text"
        lines += labelled(row.label, "dim", row.text, ink, LABEL, width)
    return [*lines, *_context(look, step, node, width, max(height - len(lines), CONTEXT_LINES))]


def _ink(place: int) -> Ink:
    """The headline stands out."""
    return "strong" if place == 0 else "text"


def _context(look: Look, step: RequestStep, node: int, width: int, most: int) -> list[Line]:
    """The text before the node: prompt and output, in the colours of the output's panel, then the drafted path."""
    if look.request is None or look.part is None or step.verdict is None:
        return []
    wrapper: Wrapper[Ink] = Wrapper(max(width - LABEL, 8), "dim")
    steps, first, tokens = look.request.steps, look.part[0], 0
    while first > 0 and tokens < TAIL:
        first -= 1
        tokens += steps[first].emitted
    if first == 0 and steps[0].index == 0:
        feed_prompt(wrapper, look.request, look.vocabulary, "prompt", "faint")
    for before in steps[first : look.part[0]]:
        feed_step(wrapper, before, look.vocabulary)
    ahead = step.tree.path_to(node)[:-1] if node < len(step.tree) else step.verdict.path
    for at in ahead:
        feed(wrapper, look.vocabulary, int(step.tree.token[at]), "accent", "accent")
    rows = wrapper.lines()[-most:]
    return [[(left("context" if at == 0 else "", LABEL), "dim"), *row] for at, row in enumerate(rows)]
