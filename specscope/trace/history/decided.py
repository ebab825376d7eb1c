"""How a node's outcome was decided, by the rule of verification: as a sign, and in words."""

from __future__ import annotations

from specscope.trace.history.at_parent import AtParent, TokenThere, above, end, is_deterministic
from specscope.trace.history.ratios import ratios
from specscope.trace.history.wording import probability, quoted
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, Verdict
from specscope.trace.record.rules import MATCH, looks_ahead
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary

BELOW, DREW, DREW_ANOTHER, LESS, NOT_LESS = "↓", "=", "≠", "<", "≥"
DRAWN = (DREW, DREW_ANOTHER)
TOSSED = (LESS, NOT_LESS)


def coin_sign(verdict: Verdict, node: int) -> str:
    """How a tried node's coin stands to its accept_prob.

    `<` or `≥`; `=` or `≠` where the coin drew this token or another (match); `↓` where a node below was accepted, and
    with it this one (block, traversal).
    """
    if verdict.rule == MATCH:
        return DREW if verdict.outcome[node] == Outcome.ACCEPTED else DREW_ANOTHER
    if not verdict.judged[node]:
        return BELOW
    return LESS if verdict.coin[node] < verdict.accept_prob[node] else NOT_LESS


def p_tried(verdict: Verdict, node: int) -> float | None:
    """p at the trial, where it differs from p as drawn."""
    return _another(verdict, node, verdict.p_trial[node], verdict.p[node])


def q_tried(step: RequestStep, verdict: Verdict, node: int) -> float | None:
    """q at the trial, where it differs from q as drawn. The rule `match` does not use q."""
    return None if verdict.rule == MATCH else _another(verdict, node, verdict.q_trial[node], step.tree.q[node])


def _another(verdict: Verdict, node: int, tried: float, drawn: float) -> float | None:
    """A node's number at its trial, where it prints differently from the number as drawn; else None."""
    if verdict.outcome[node] == Outcome.UNTRIED or probability(float(tried)) == probability(float(drawn)):
        return None
    return float(tried)


def deciding(step: RequestStep) -> list[int]:
    """The nodes that ended the path: the children there that were all rejected, or the last one that was accepted."""
    verdict = step.verdict
    if verdict is None:
        return []
    last = end(step).parent
    failed = [node for node in step.tree.children(last) if verdict.outcome[node] != Outcome.UNTRIED]
    return failed or ([last] if last != ROOT else [])


def ended_by(step: RequestStep) -> int:
    """Where to look first for why the path ended: the first node that was rejected there, else the final token."""
    recovered = step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
    return next(iter(deciding(step)), len(step.tree)) if recovered else len(step.tree)


def wanted(place: AtParent) -> TokenThere | None:
    """The target's likeliest token as sampled at a place; where that is not recorded, the one that was taken there.

    None where the path never came there, and where token ids were left out.
    """
    step, verdict = place.step, place.step.verdict
    if verdict is not None and verdict.token == NO_TOKEN:
        return None
    if place.choice is not None:
        return place.of_token(place.choice.token)
    if verdict is None or not verdict.is_greedy:
        return None  # what was drawn need not be the likeliest
    if not place.children:
        return None  # after a leaf nothing is recorded but the token itself
    if not {*place.children, len(step.tree)}.isdisjoint(verdict.forced.tolist()):
        return None
    accepted = [node for node in place.children if node in verdict.path.tolist()]
    if accepted:
        return place.of_node(accepted[0])
    return place.of_token(verdict.token) if place.parent == end(step).parent else None


def decision_text(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """Why a node was accepted, rejected or not tried, with the figures that decided."""
    verdict = step.verdict
    assert verdict is not None
    outcome = Outcome(int(verdict.outcome[node]))
    if outcome is Outcome.UNTRIED:
        return f"not tried: {_not_tried(step, verdict, node, vocabulary)}{_would_be(verdict, node)}"
    word = outcome.name.lower()
    if node in verdict.forced.tolist():
        return f"{word}: by force, so this step is not lossless"
    if not verdict.tells_p:
        return f"{word}: p and the coins are not recorded"
    if verdict.is_greedy and not (text := _contradiction(verdict, node)):
        return f"{word}: {_greedy(step, verdict, node, vocabulary)}"
    if verdict.is_greedy:
        return f"{word}: {text}"
    return f"{word}: {_coin(step, verdict, node)}{_before(verdict, node)}"


def _before(verdict: Verdict, node: int) -> str:
    """The node's p before earlier siblings were rejected, where that differs."""
    p, tried = float(verdict.p[node]), float(verdict.p_trial[node])
    if f"{p:.4g}" == f"{tried:.4g}":
        return ""
    return f"; p was {p:.4g} before its earlier siblings were rejected"


def _not_tried(step: RequestStep, verdict: Verdict, node: int, vocabulary: Vocabulary) -> str:
    parent = int(step.tree.parent[node])
    if parent != ROOT and parent not in verdict.path.tolist():
        token = quoted(vocabulary, int(step.tree.token[parent]))
        return f"its parent {token} was {'rejected' if verdict.outcome[parent] == Outcome.REJECTED else 'not tried'}"
    accepted = [other for other in step.tree.children(parent) if verdict.outcome[other] == Outcome.ACCEPTED]
    if accepted:
        return f"its sibling {quoted(vocabulary, int(step.tree.token[accepted[0]]))} was accepted"
    return "verification ended before it"


def _would_be(verdict: Verdict, node: int) -> str:
    """In a greedy step: whether the target would have taken a node that was not tried."""
    p = float(verdict.p[node])
    if not verdict.is_greedy or p not in (0, 1):
        return ""
    return f"; the target would {'' if p else 'not '}have taken it there"


def _contradiction(verdict: Verdict, node: int) -> str:
    """An outcome that contradicts p, where all of p is on one token."""
    accepted, p = verdict.outcome[node] == Outcome.ACCEPTED, float(verdict.p_trial[node])
    if accepted == (p == 1) or coin_sign(verdict, node) == BELOW:
        return ""
    return f"although the target's p of it is {p:.0f}"


def _greedy(step: RequestStep, verdict: Verdict, node: int, vocabulary: Vocabulary) -> str:
    if verdict.outcome[node] == Outcome.ACCEPTED:
        return "it is the target's choice, and no coin decides"
    choice = wanted(above(step, node))
    named = "another token" if choice is None else quoted(vocabulary, choice.token)
    return f"the target's choice is {named}, and no coin decides"


def _coin(step: RequestStep, verdict: Verdict, node: int) -> str:
    sign, coin, a = coin_sign(verdict, node), float(verdict.coin[node]), float(verdict.accept_prob[node])
    if sign == BELOW:
        return f"node {int(verdict.path[-1])} below it was accepted; {_made(step, verdict, node)}"
    if sign in DRAWN:
        drew = "this token" if sign == DREW else "another token"
        return f"coin {coin:.4g} drew {drew} from the target's p; {_made(step, verdict, node)}"
    if not coin:
        return f"no coin is recorded; {_made(step, verdict, node)}"
    contrary = (
        "" if (sign == LESS) == (verdict.outcome[node] == Outcome.ACCEPTED) else ", which contradicts the outcome"
    )
    digits = next((count for count in range(4, 17) if f"{coin:.{count}g}" != f"{a:.{count}g}"), 17)
    return f"coin {coin:.{digits}g} {sign} {_made(step, verdict, node, digits)}{contrary}"


def _made(step: RequestStep, verdict: Verdict, node: int, digits: int = 4) -> str:
    """How a was computed, in words."""
    p, q, a = (float(x[node]) for x in (verdict.p_trial, verdict.q_trial, verdict.accept_prob))
    if step.rule == MATCH:
        return f"a = {a:.{digits}g}, the target's p of it with its earlier siblings excluded"
    if not looks_ahead(step.rule) and is_deterministic(step, node) and q == 1:
        return f"a = p = {a:.{digits}g}: the token was not drawn, so q is 1"
    if not looks_ahead(step.rule):
        return f"a = min(1, p / q) = min(1, {p:.{digits}g} / {q:.{digits}g}) = {a:.{digits}g}"
    path_ratios = ratios(step.tree, verdict)
    path = f"min(1, {path_ratios.parent[node]:.4g} * {p:.4g} / {q:.4g}) = {path_ratios.own[node]:.{digits}g}"
    if not verdict.judged[node] or a == path_ratios.own[node]:
        return f"a = {a:.{digits}g}, the ratio of its path {path}"
    return f"a = {a:.{digits}g}, left of the ratio of its path {path}"
