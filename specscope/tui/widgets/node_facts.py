"""All that a record holds of one node, or of the final token: the decision as a picture, then facts. Pure."""

from __future__ import annotations

from specscope.trace.decided import BELOW, DRAWN, DREW, coin_sign
from specscope.trace.draft_vocabulary import draft_id, draft_tokens
from specscope.trace.ratios import ratios
from specscope.trace.records import Outcome, RequestStep, Verdict
from specscope.trace.rules import ABOUT, MATCH, looks_ahead
from specscope.trace.tree import ROOT, Drawn
from specscope.trace.vocabulary import printable
from specscope.trace.wording import about_draft
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, folded, left, show_token
from specscope.tui.widgets.decision import INKS, LABEL, LONGEST, VALUE, bar_line, decision
from specscope.tui.widgets.output import feed, feed_prompt, feed_step
from specscope.tui.widgets.wrap import Wrapper

TAIL = 600  # output tokens of the context that are shown, or a few more; and before them the prompt
CONTEXT_LINES = 4  # of it at least
Fact = tuple[str, str, Ink]
WHY = {
    "bonus": "every node of the path was accepted: drawn from the target at its end",
    "recovered": "all children were rejected: drawn from the target's residual distribution",
    "target": "nothing was drafted: drawn from the target",
}


def node_facts(look: Look, step: RequestStep, verdict: Verdict, node: int, width: int, height: int) -> list[Line]:
    """The lines for a node, with as much context as there is room for. For the final token `node` is their count."""
    near = node in look.history.near_ties(step)
    if node == len(step.tree):
        room = min(max(width - LABEL - VALUE, 8), LONGEST)
        picture: list[Line] = [bar_line("p", verdict.final_p, verdict.kind.value, room)]
        facts = _final(look, verdict, near)
    else:
        picture = decision(step, verdict, node, width)
        facts = _facts(look, step, verdict, node, near)
    lines = [*picture, [], *_wrapped(facts, width)]
    return [*lines, *_context(look, step, node, width, max(height - len(lines), CONTEXT_LINES))]


def _final(look: Look, verdict: Verdict, near: bool) -> list[Fact]:
    kind: Ink = verdict.kind.value
    return [
        ("token", f"{show_token(look.vocabulary, verdict.token)}  #{verdict.token}", kind),
        ("kind", f"{kind}: {WHY[kind]}", kind),
        ("drawn", f"p {verdict.final_p:.6g}, {_final_coin(verdict)}", "text"),
        *_margin(verdict.final_margin, near),
    ]


def _final_coin(verdict: Verdict) -> str:
    coin = verdict.final_coin
    return f"coin {coin:.6g} on the cumulative sum" if coin else "without a coin"


def _facts(look: Look, step: RequestStep, verdict: Verdict, node: int, near: bool) -> list[Fact]:
    """What the evidence says of a node."""
    tree, outcome = step.tree, Outcome(int(verdict.outcome[node]))
    parent = int(tree.parent[node])
    above = "the root" if parent == ROOT else f"node {parent} ({show_token(look.vocabulary, int(tree.token[parent]))})"
    token, ink = int(tree.token[node]), INKS[outcome]
    facts: list[Fact] = [
        ("token", f"{show_token(look.vocabulary, token)}  #{token}", ink),
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
    facts += _trial(step, verdict, node, outcome, ink)
    if step.rule in ABOUT:
        facts.append(("rule", f"{step.rule}: {ABOUT[step.rule]}", "text"))
    if step.lossy:
        facts.append(("rule", f"{printable(step.rule)}: not lossless", "warn"))
    if outcome is not Outcome.UNTRIED:
        facts += _margin(float(verdict.margin[node]), near)
    return facts


def _trial(step: RequestStep, verdict: Verdict, node: int, outcome: Outcome, ink: Ink) -> list[Fact]:
    """How the coin fell, and against what."""
    if outcome is Outcome.UNTRIED:
        return [("verdict", "untried: an ancestor was rejected, or an earlier sibling accepted", ink)]
    facts: list[Fact] = [
        ("tried", _made(step, verdict, node), "text"),
        ("verdict", f"{outcome.name.lower()}: {_fell(verdict, node)}", ink),
    ]
    if node in verdict.forced.tolist():
        facts.append(("forced", "by the user: this step is not lossless", "warn"))
    if outcome is Outcome.REJECTED:
        facts.append(("residual", f"{float(verdict.residual_mass[node]):.6g} of the target's mass is left", "text"))
    return facts


def _made(step: RequestStep, verdict: Verdict, node: int) -> str:
    """What a comes from."""
    p, q, a = (float(x[node]) for x in (verdict.p_trial, verdict.q_trial, verdict.accept_prob))
    if step.rule == MATCH:
        return f"a = {a:.6g}, the target's p of it with its earlier siblings excluded"
    if not looks_ahead(step.rule):
        return f"a = min(1, {p:.6g} / {q:.6g}) = {a:.6g}"
    found = ratios(step.tree, verdict)
    ratio = f"ratio of its path min(1, {found.parent[node]:.6g} * {p:.6g} / {q:.6g}) = {found.own[node]:.6g}"
    return ratio if not verdict.judged[node] or a == found.own[node] else f"{ratio}; a = {a:.6g} was left of it"


def _fell(verdict: Verdict, node: int) -> str:
    """How the coin stands to a, by the rule."""
    sign, coin, a = coin_sign(verdict, node), float(verdict.coin[node]), float(verdict.accept_prob[node])
    if sign == BELOW:
        return f"node {int(verdict.path[-1])} below it was accepted"
    if sign in DRAWN:
        return f"coin {coin:.6g} drew {'this token' if sign == DREW else 'another token'} from the target's p"
    return f"coin {coin:.6g} {sign} {a:.6g}"


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
