"""All that a record holds of one node, or of the final token: the decision as a picture, then facts. Pure."""

from __future__ import annotations

from specscope.trace.history.wording import about_draft
from specscope.trace.record.draft_vocabulary import draft_id, draft_tokens
from specscope.trace.record.records import Outcome, RequestStep, Verdict
from specscope.trace.record.rules import ABOUT
from specscope.trace.record.tree import ROOT, Drawn
from specscope.trace.record.vocabulary import printable, token_id
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, folded, left, paragraph, show_token
from specscope.tui.widgets.decision import INKS, LABEL, LONGEST, VALUE, decision, final_bar
from specscope.tui.widgets.output import feed, feed_prompt, feed_step
from specscope.tui.widgets.wrap import Wrapper

TAIL = 600  # output tokens of the context that are shown, or a few more; and before them the prompt
CONTEXT_LINES = 4  # of it at least
Fact = tuple[str, str, Ink]


def node_facts(look: Look, step: RequestStep, verdict: Verdict, node: int, width: int, height: int) -> list[Line]:
    """Why it was kept or not, then the lines for a node, with as much context as there is room for.

    For the final token `node` is the number of nodes.
    """
    near = node in look.history.near_ties(step)
    answer = [line for at, text in enumerate(look.why(step, node)) for line in paragraph(text, width, _ink(at))]
    if node == len(step.tree):
        room = min(max(width - LABEL - VALUE, 8), LONGEST)
        picture: list[Line] = [final_bar(step, verdict, room)]
        facts = _final(look, verdict, near)
    else:
        picture = decision(step, verdict, node, width)
        facts = _facts(look, step, verdict, node, near)
    lines = [*answer, [], *picture, [], *_wrapped(facts, width)]
    return [*lines, *_context(look, step, node, width, max(height - len(lines), CONTEXT_LINES))]


def _ink(place: int) -> Ink:
    """The headline stands out."""
    return "strong" if place == 0 else "text"


def _final(look: Look, verdict: Verdict, near: bool) -> list[Fact]:
    kind: Ink = verdict.kind.value
    token = f"{show_token(look.vocabulary, verdict.token)}  {token_id(verdict.token)}"
    return [("token", token, kind), ("kind", kind, kind), *_margin(verdict.final_margin, near)]


def _facts(look: Look, step: RequestStep, verdict: Verdict, node: int, near: bool) -> list[Fact]:
    """What the evidence says of a node."""
    tree, outcome = step.tree, Outcome(int(verdict.outcome[node]))
    parent = int(tree.parent[node])
    above = "the root" if parent == ROOT else f"node {parent} ({show_token(look.vocabulary, int(tree.token[parent]))})"
    token, ink = int(tree.token[node]), INKS[outcome]
    facts: list[Fact] = [
        ("token", f"{show_token(look.vocabulary, token)}  {token_id(token)}", ink),
        ("position", f"depth {int(tree.depth[node])}, child of {above}", "text"),
        ("drawn", Drawn(int(tree.drawn[node])).name.lower().replace("_", " "), "text"),
    ]
    if node in look.history.near_draws(step):
        facts.append(("", "a near tie in the draft: rounding could draw the next token instead", "warn"))
    from_text = step.method is not None and step.method.source_of(node) == "text"
    if draft_tokens(look.history.run) is not None and not from_text:
        own = draft_id(look.history.run, token)
        said, odd = ("outside the draft vocabulary", True) if own is None else (f"{own} of the draft vocabulary", False)
        facts.append(("draft id", said, "warn" if odd else "text"))
    if step.notes is not None and (step.method is None or not step.method.source_of(node)):
        facts.append(("drafter", f"log probability of the path {float(step.notes.score[node]):.3f}", "text"))
    if step.method is not None and (told := about_draft(step.method, node)):
        facts.append(("drafter", ", ".join(told), "text"))
    if outcome is Outcome.REJECTED and not verdict.is_greedy:
        facts.append(("residual", f"{float(verdict.residual_mass[node]):.6g} of the target's mass is left", "text"))
    if step.rule in ABOUT:
        facts.append(("rule", f"{step.rule}: {ABOUT[step.rule]}", "text"))
    if step.lossy:
        facts.append(("rule", f"{printable(step.rule)}: not lossless", "warn"))
    if outcome is not Outcome.UNTRIED:
        facts += _margin(float(verdict.margin[node]), near)
    return facts


def _margin(margin: float, near: bool) -> list[Fact]:
    """How far the decision is from another one; nothing where no rounding could make it another."""
    if near:
        return [("margin", f"{margin:.1e}: a near tie: rounding could flip it", "warn")]
    return [("margin", f"{margin:.2g} in probability from the other outcome", "text")] if margin < 1 else []


def _wrapped(facts: list[Fact], width: int) -> list[Line]:
    """Label and text; what is too long goes on below, under the text."""
    lines: list[Line] = []
    for label, text, ink in facts:
        for row in folded(text, max(width - LABEL, 10)):
            lines.append([(left(label, LABEL), "dim"), (row, ink)])
            label = ""
    return lines


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
