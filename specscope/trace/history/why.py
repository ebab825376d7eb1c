"""Why a token was rejected, kept or never tried: a node, or a step's final token, in sentences.

A sentence appears only where the evidence supports it. The first is the headline that screens show.
"""

from __future__ import annotations

from specscope.trace.history.history import History
from specscope.trace.history.place import (
    BELOW,
    DREW,
    DREW_ANOTHER,
    LESS,
    OUTSIDE,
    PlaceView,
    at,
    coin_sign,
    deciding,
    end,
    ended_by,
    ratios,
)
from specscope.trace.history.totals import ABOUT, Undrafted, why_undrafted
from specscope.trace.history.wording import about_sizing, ordinal, plural, probability, quoted
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_id, lacks_draft_tokens
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, StepRecord
from specscope.trace.record.rules import MATCH, STANDARD, looks_ahead
from specscope.trace.record.tree import ROOT
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tree_shape import MAX_NODES


def why(history: History, step: RequestStep, node: int) -> list[str]:
    """The sentences of a node; of the final token, where `node` is the number of nodes. None for a prefill chunk."""
    if step.verdict is None:
        return []
    first = f"{headline(step, node, history.vocabulary)}."
    if node == len(step.tree):
        return [first, _final(step, history.vocabulary)]
    lines = [first, _sentence(decision_text(step, node, history.vocabulary))]
    if step.verdict.outcome[node] == Outcome.REJECTED and node not in step.verdict.forced.tolist():
        place = at(step, node)
        lines += [line for line in (_wider(history, place), _other_temperature(history, place)) if line]
    return lines


def why_step(history: History, record: StepRecord, step: RequestStep) -> list[str]:
    """The step's path in a sentence, then why it ended: the node that ended it, or the final token.

    `record`: the engine's step, which may know why nothing was drafted.
    """
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return [f"A prefill of {plural(step.prefill_tokens, 'token')}: nothing was judged."]
    if not len(tree):
        reason = why_undrafted(history.run, record, step)
        about = "" if reason is None or reason is Undrafted.UNKNOWN else f": {ABOUT[reason]}"
        sizing = f" ({about_sizing(step)})" if step.sizing else ""
        return [f"Nothing was drafted{about}{sizing}.", _final(step, history.vocabulary)]
    path = " ".join(quoted(history.vocabulary, int(tree.token[node])) for node in verdict.path)
    summary = f"Accepted {verdict.accepted} of {plural(tree.max_depth, 'level')}" + (f": {path}." if path else ".")
    node = ended_by(step)
    if node == len(tree):
        return [summary, *why(history, step, node)]
    rest = [other for other in deciding(step) if other != node]
    others = [f"Then also rejected: {_described(at(step, other), history.vocabulary)}, node {other}." for other in rest]
    return [summary, *why(history, step, node), *others, _final(step, history.vocabulary)]


def headline(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """`Target wanted X (p), drafted Y (p, rank)`: what the whole question is about, in a line."""
    place = at(step, node)
    target, described = place.wanted, _described(place, vocabulary)
    if target is not None:
        text = f"Target wanted {_described(target, vocabulary)}"
        if place.final:
            return text
        return f"{text}, and it was drafted" if place.token == target.token else f"{text}, drafted {described}"
    if place.final:
        return f"Target drew {described}"
    recovered = step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
    if not recovered or place.parent != end(step).parent:
        return f"Drafted {described}"
    return f"Target took {_described(end(step), vocabulary)}, drafted {described}"


def brief(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """The headline with the fewest figures, for narrow places."""
    place = at(step, node)
    target = place.wanted
    if target is None or place.final or place.token == target.token:
        return headline(step, node, vocabulary)
    first, other = _briefly(target, "the drafter's"), _briefly(place, "its")
    token, instead = quoted(vocabulary, target.token), quoted(vocabulary, place.token)
    return f"Target wanted {token} ({first}), drafted {instead} ({other})"


def _briefly(place: PlaceView, whose: str) -> str:
    """The target's p of a token, raw where sampling left 0 or 1 of it; and its rank in the drafter."""
    p = place.raw_p if place.p in (0, 1, None) and place.raw_p is not None else place.p
    rank = "" if place.draft_rank is None else _rank(place.draft_rank, f"{whose} ")
    return ", ".join(filter(None, ("" if p is None else probability(p), rank)))


def _rank(rank: int, whose: str = "") -> str:
    return "outside the draft vocabulary" if rank == OUTSIDE else whose + ordinal(rank)


def _described(place: PlaceView, vocabulary: Vocabulary) -> str:
    """`␣for (raw p 0.921, 1st; draft p 0.006, 15th)`: the target's p and rank, then the drafter's."""
    raw = [] if place.raw_p is None else [f"raw p {probability(place.raw_p)}"]
    raw += [ordinal(place.raw_rank)] if raw and place.raw_rank is not None else []
    draft = [] if place.draft_p is None else [f"draft p {probability(place.draft_p)}"]
    draft += [] if place.draft_rank is None else [_rank(place.draft_rank)]
    p = "" if place.p in (0, 1, None) else f"p {probability(place.p)}"
    facts = (p, ", ".join(raw), "" if place.q is None else f"q {probability(place.q)}", ", ".join(draft))
    figures = "; ".join(filter(None, facts))
    return quoted(vocabulary, place.token) + (f" ({figures})" if figures else "")


def _wider(history: History, place: PlaceView) -> str:
    """Which tree would have contained the token that the target wanted."""
    target, step, children = place.wanted, place.step, len(place.children)
    if target is None or target.node is not None:
        return ""
    token, rank = quoted(history.vocabulary, target.token), target.draft_rank
    if step.notes is not None and target.token in step.notes.dropped_token[step.notes.dropped_parent == place.parent]:
        return f"The drafter had drafted {token} here, and re-ranking dropped it: a tree of more nodes might keep it."
    if rank == OUTSIDE or draft_id(history.run, target.token) is None:
        return f"{token} is outside the draft vocabulary: no tree of this drafter can hold it."
    if rank is None and lacks_draft_tokens(history.run):
        return f"Whether the drafter knows {token} is not known: {NOT_TOLD}."
    if rank is None:
        count = len(place.drafters_likeliest)
        unknown = f"{token} is not among the drafter's {count} likeliest tokens here; its rank is not recorded."
        return unknown if count else ""
    here = f"The drafter ranks {token} {ordinal(rank)} here"
    if rank > MAX_NODES:
        return f"{here}: no tree is that wide."
    if rank <= children or step.tree.is_sampled:
        width = "likeliest token" if rank == 1 else f"{rank} likeliest tokens"
        return f"{here}: a tree of its {width} would hold it, where tokens that are drawn may miss it."
    return f"{here}: a tree {rank} wide at this place would hold it; this one is {children} wide."


def _other_temperature(history: History, place: PlaceView) -> str:
    """The node's outcome at temperature 0 or 1, where its evidence alone determines it."""
    request, (verdict, node) = history.requests.get(place.step.request), place.judged
    params = None if request is None or request.info is None else request.info.params
    if params is None or place.notes is None or place.step.rule != STANDARD:
        return ""
    if not verdict.is_greedy:
        is_choice = not params.greedy and place.choice is not None and place.choice.token == place.token
        return "At temperature 0 it would be accepted: it is the target's likeliest token." if is_choice else ""
    first = place.children[0] == node  # an earlier trial would change p
    plain = params.greedy and not params.moved and not params.top_k and params.top_p == 1 and not params.min_p
    if not (first and plain and place.q is None and place.raw_p is not None):
        return ""
    return f"At temperature 1 it would be accepted with probability {probability(place.raw_p)}."


def _final(step: RequestStep, vocabulary: Vocabulary) -> str:
    verdict = step.verdict
    assert verdict is not None
    token = quoted(vocabulary, verdict.token)
    where = {
        FinalKind.BONUS: f"The accepted path ended at a leaf, so {token} is a bonus token",
        FinalKind.RECOVERED: f"All that was drafted there was rejected, so {token} is a recovered token",
        FinalKind.TARGET: f"The final token {token} is the target's own",
    }[verdict.kind]
    if len(step.tree) in verdict.forced.tolist():
        return f"{where}; it was forced, so this step is not lossless."
    if verdict.is_greedy:
        return f"{where}: the target's choice, and no coin decides."
    if not verdict.tells_p:
        return f"{where}; its p is not recorded."
    source = "what the rejections left of p" if verdict.kind is FinalKind.RECOVERED else "p"
    coin = f" by coin {verdict.final_coin:.4g}" if verdict.final_coin else ""
    return f"{where}: drawn from {source}{coin}, where it had {probability(verdict.final_p)}."


def decision_text(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """Why a node was accepted, rejected or not tried, with the figures that decided."""
    place = at(step, node)
    verdict, _ = place.judged
    outcome, p, tried = Outcome(int(verdict.outcome[node])), float(verdict.p[node]), float(verdict.p_trial[node])
    accepted, word = outcome is Outcome.ACCEPTED, outcome.name.lower()
    if outcome is Outcome.UNTRIED:
        known = verdict.is_greedy and p in (0, 1)
        would = f"; the target would {'' if p else 'not '}have taken it there" if known else ""
        return f"not tried: {_not_tried(place, vocabulary)}{would}"
    if node in verdict.forced.tolist():
        return f"{word}: by force, so this step is not lossless"
    if not verdict.tells_p:
        return f"{word}: p and the coins are not recorded"
    if not verdict.is_greedy:
        before = f"; p was {p:.4g} before its earlier siblings were rejected" if f"{p:.4g}" != f"{tried:.4g}" else ""
        return f"{word}: {_coin(place)}{before}"
    if accepted != (tried == 1) and coin_sign(verdict, node) != BELOW:
        return f"{word}: although the target's p of it is {tried:.0f}"
    if accepted:
        return f"{word}: it is the target's choice, and no coin decides"
    wanted = place.wanted
    named = "another token" if wanted is None else quoted(vocabulary, wanted.token)
    return f"{word}: the target's choice is {named}, and no coin decides"


def _not_tried(place: PlaceView, vocabulary: Vocabulary) -> str:
    tree, (verdict, _), parent = place.step.tree, place.judged, place.parent
    if parent != ROOT and parent not in verdict.path.tolist():
        outcome = "rejected" if verdict.outcome[parent] == Outcome.REJECTED else "not tried"
        return f"its parent {quoted(vocabulary, int(tree.token[parent]))} was {outcome}"
    accepted = [other for other in place.children if verdict.outcome[other] == Outcome.ACCEPTED]
    if accepted:
        return f"its sibling {quoted(vocabulary, int(tree.token[accepted[0]]))} was accepted"
    return "verification ended before it"


def _coin(place: PlaceView) -> str:
    verdict, node = place.judged
    sign = coin_sign(verdict, node)
    coin, a = float(verdict.coin[node]), float(verdict.accept_prob[node])
    if sign == BELOW:
        return f"node {int(verdict.path[-1])} below it was accepted; {_made(place)}"
    if sign in (DREW, DREW_ANOTHER):
        drew = "this token" if sign == DREW else "another token"
        return f"coin {coin:.4g} drew {drew} from the target's p; {_made(place)}"
    if not coin:
        return f"no coin is recorded; {_made(place)}"
    agrees = (sign == LESS) == (verdict.outcome[node] == Outcome.ACCEPTED)
    digits = next((count for count in range(4, 17) if f"{coin:.{count}g}" != f"{a:.{count}g}"), 17)
    contrary = "" if agrees else ", which contradicts the outcome"
    return f"coin {coin:.{digits}g} {sign} {_made(place, digits)}{contrary}"


def _made(place: PlaceView, digits: int = 4) -> str:
    step, (verdict, node) = place.step, place.judged
    p, q, a = (float(numbers[node]) for numbers in (verdict.p_trial, verdict.q_trial, verdict.accept_prob))
    if step.rule == MATCH:
        return f"a = {a:.{digits}g}, the target's p of it with its earlier siblings excluded"
    if not looks_ahead(step.rule) and place.q is None and q == 1:
        return f"a = p = {a:.{digits}g}: the token was not drawn, so q is 1"
    if not looks_ahead(step.rule):
        return f"a = min(1, p / q) = min(1, {p:.{digits}g} / {q:.{digits}g}) = {a:.{digits}g}"
    path_ratios = ratios(step.tree, verdict)
    path = f"min(1, {path_ratios.parent[node]:.4g} * {p:.4g} / {q:.4g}) = {path_ratios.own[node]:.{digits}g}"
    left = "" if not verdict.judged[node] or a == path_ratios.own[node] else "left of "
    return f"a = {a:.{digits}g}, {left}the ratio of its path {path}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
