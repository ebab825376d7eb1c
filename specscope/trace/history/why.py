"""Why a token was rejected, kept or never tried: a node, or a step's final token, in sentences.

A sentence appears only where the evidence supports it. The first is the headline that screens show.
"""

from __future__ import annotations

from dataclasses import dataclass

from specscope.trace.history.at_parent import OUTSIDE, AtParent, TokenThere, above, end, is_deterministic
from specscope.trace.history.decided import deciding, decision_text, ended_by, wanted
from specscope.trace.history.history import History
from specscope.trace.history.undrafted import ABOUT, Undrafted, why_undrafted
from specscope.trace.history.wording import about_sizing, ordinal, plural, probability, quoted
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_id, lacks_draft_tokens
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.rules import STANDARD
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tree_shape import MAX_NODES


@dataclass(frozen=True)
class Asker:
    """What the sentences need in addition to the step."""

    vocabulary: Vocabulary
    run: RunInfo | None = None
    params: SamplingParams | None = None  # the request's; None where they are not known

    @staticmethod
    def of(history: History, request: str) -> Asker:
        """For steps of a request of a run."""
        info = history.requests[request].info
        return Asker(history.vocabulary, history.run, None if info is None else info.params)


def why(step: RequestStep, node: int, asker: Asker) -> list[str]:
    """The sentences of a node; of the final token, where `node` is the number of nodes. None for a prefill chunk."""
    if step.verdict is None:
        return []
    if node == len(step.tree):
        return [f"{headline(step, node, asker)}.", *_final(step, step.verdict, asker)]
    lines = [f"{headline(step, node, asker)}.", f"{_capital(decision_text(step, node, asker.vocabulary))}."]
    if step.verdict.outcome[node] == Outcome.REJECTED and node not in step.verdict.forced.tolist():
        lines += would_have_kept(step, node, asker)
    return lines


def why_step(record: StepRecord, step: RequestStep, asker: Asker) -> list[str]:
    """The step's path in a sentence, then why it ended: the node that ended it, or the final token.

    `record`: the engine's step, which may know why nothing was drafted.
    """
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return [f"A prefill of {plural(step.prefill_tokens, 'token')}: nothing was judged."]
    if not len(tree):
        reason = why_undrafted(asker.run, record, step)
        about = "" if reason is None or reason is Undrafted.UNKNOWN else f": {ABOUT[reason]}"
        sizing = f" ({about_sizing(step)})" if step.sizing else ""
        return [f"Nothing was drafted{about}{sizing}.", *_final(step, verdict, asker)]
    path = " ".join(quoted(asker.vocabulary, int(tree.token[node])) for node in verdict.path)
    summary = f"Accepted {verdict.accepted} of {plural(tree.max_depth, 'level')}" + (f": {path}." if path else ".")
    node = ended_by(step)
    if node == len(tree):
        return [summary, *why(step, node, asker)]
    others = [f"Then also rejected: {_named(step, other, asker)}." for other in deciding(step) if other != node]
    return [summary, *why(step, node, asker), *others, *_final(step, verdict, asker)]


def headline(step: RequestStep, node: int, asker: Asker) -> str:
    """`Target wanted X (p), drafted Y (p, rank)`: what the whole question is about, in a line."""
    place = above(step, node)
    target = wanted(place)
    if target is None:
        if node == len(step.tree):
            return f"Target drew {_described(_final_token(step), asker)}"
        drafted = _described(place.of_node(node), asker)
        recovered = step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
        if not recovered or place.parent != end(step).parent:
            return f"Drafted {drafted}"
        return f"Target took {_described(_final_token(step), asker)}, drafted {drafted}"
    text = f"Target wanted {_described(target, asker)}"
    if node == len(step.tree):
        return text
    if int(step.tree.token[node]) == target.token:
        return f"{text}, and it was drafted"
    return f"{text}, drafted {_described(place.of_node(node), asker)}"


def brief(step: RequestStep, node: int, asker: Asker) -> str:
    """The headline with the fewest figures, for narrow places."""
    place = above(step, node)
    target = wanted(place)
    if target is None or node == len(step.tree) or int(step.tree.token[node]) == target.token:
        return headline(step, node, asker)
    drafted = place.of_node(node)
    first, other = _briefly(target, "the drafter's"), _briefly(drafted, "its")
    token, instead = (quoted(asker.vocabulary, there.token) for there in (target, drafted))
    return f"Target wanted {token} ({first}), drafted {instead} ({other})"


def _briefly(there: TokenThere, whose: str) -> str:
    """The target's p of a token, raw where sampling left 0 or 1 of it; and its rank in the drafter."""
    p = there.raw_p if there.p in (0, 1, None) and there.raw_p is not None else there.p
    facts = [] if p is None else [probability(p)]
    if there.draft_rank is not None:
        known = there.draft_rank != OUTSIDE
        facts.append(f"{whose} {ordinal(there.draft_rank)}" if known else "outside the draft vocabulary")
    return ", ".join(facts)


def would_have_kept(step: RequestStep, node: int, asker: Asker) -> list[str]:
    """After a rejection: what would have had the target's token in the tree, and this one accepted."""
    place, verdict = above(step, node), step.verdict
    assert verdict is not None
    target = wanted(place)
    lines = []
    if target is not None and target.token not in place.tokens:
        lines.append(_wider(place, target, asker))
    lines.append(_other_temperature(step, verdict, node, asker))
    return [line for line in lines if line]


def _wider(place: AtParent, target: TokenThere, asker: Asker) -> str:
    """Which tree would have contained the token that the target wanted."""
    token, children = quoted(asker.vocabulary, target.token), len(place.children)
    if target.token in place.dropped:
        return f"The drafter had drafted {token} here, and re-ranking dropped it: a tree of more nodes might keep it."
    if target.draft_rank == OUTSIDE or draft_id(asker.run, target.token) is None:
        return f"{token} is outside the draft vocabulary: no tree of this drafter can hold it."
    if target.draft_rank is None and lacks_draft_tokens(asker.run):
        return f"Whether the drafter knows {token} is not known: {NOT_TOLD}."
    if target.draft_rank is None:
        count = len(place.drafters_likeliest)
        unknown = f"{token} is not among the drafter's {count} likeliest tokens here; its rank is not recorded."
        return unknown if count else ""
    here = f"The drafter ranks {token} {ordinal(target.draft_rank)} here"
    if target.draft_rank > MAX_NODES:
        return f"{here}: no tree is that wide."
    if target.draft_rank <= children or place.step.tree.is_sampled:
        width = "likeliest token" if target.draft_rank == 1 else f"{target.draft_rank} likeliest tokens"
        return f"{here}: a tree of its {width} would hold it, where tokens that are drawn may miss it."
    return f"{here}: a tree {target.draft_rank} wide at this place would hold it; this one is {children} wide."


def _other_temperature(step: RequestStep, verdict: Verdict, node: int, asker: Asker) -> str:
    """The node's outcome at temperature 0 or 1, where its evidence alone determines it."""
    params, parents, place = asker.params, step.parents, above(step, node)
    if params is None or parents is None or place.notes is None or step.rule != STANDARD:
        return ""
    if not verdict.is_greedy:
        choice = place.choice
        if choice is None or params.greedy:
            return ""
        is_choice = choice.token == int(step.tree.token[node])
        return "At temperature 0 it would be accepted: it is the target's likeliest token." if is_choice else ""
    first = step.tree.children(place.parent)[0] == node  # an earlier trial would change p
    plain = params.greedy and not params.moved and not params.top_k and params.top_p == 1 and not params.min_p
    if not (first and plain and is_deterministic(step, node)):
        return ""
    return f"At temperature 1 it would be accepted with probability {probability(float(parents.raw_p[node]))}."


def _final(step: RequestStep, verdict: Verdict, asker: Asker) -> list[str]:
    """Where the final token came from."""
    token = quoted(asker.vocabulary, verdict.token)
    where = {
        FinalKind.BONUS: f"the accepted path ended at a leaf, so {token} is a bonus token",
        FinalKind.RECOVERED: f"all that was drafted there was rejected, so {token} is a recovered token",
        FinalKind.TARGET: f"the final token {token} is the target's own",
    }[verdict.kind]
    if len(step.tree) in verdict.forced.tolist():
        return [f"{_capital(where)}; it was forced, so this step is not lossless."]
    if verdict.is_greedy:
        return [f"{_capital(where)}: the target's choice, and no coin decides."]
    if not verdict.tells_p:
        return [f"{_capital(where)}; its p is not recorded."]
    source = "what the rejections left of p" if verdict.kind is FinalKind.RECOVERED else "p"
    coin = f" by coin {verdict.final_coin:.4g}" if verdict.final_coin else ""
    return [f"{_capital(where)}: drawn from {source}{coin}, where it had {probability(verdict.final_p)}."]


def _final_token(step: RequestStep) -> TokenThere:
    verdict = step.verdict
    assert verdict is not None
    return end(step).of_token(verdict.token)


def _described(there: TokenThere, asker: Asker) -> str:
    """`␣for (raw p 0.921, 1st; draft p 0.006, 15th)`: the target's p and rank, then the drafter's."""
    facts = []
    if there.p is not None and there.p not in (0, 1):
        facts.append(f"p {probability(there.p)}")
    if there.raw_p is not None:
        rank = "" if there.raw_rank is None else f", {ordinal(there.raw_rank)}"
        facts.append(f"raw p {probability(there.raw_p)}{rank}")
    if there.q is not None:
        facts.append(f"q {probability(there.q)}")
    draft = [] if there.draft_p is None else [f"draft p {probability(there.draft_p)}"]
    if there.draft_rank is not None:
        draft.append("outside the draft vocabulary" if there.draft_rank == OUTSIDE else ordinal(there.draft_rank))
    facts += [", ".join(draft)] if draft else []
    text = quoted(asker.vocabulary, there.token)
    return f"{text} ({'; '.join(facts)})" if facts else text


def _named(step: RequestStep, node: int, asker: Asker) -> str:
    """A node that was rejected before, with its figures."""
    return f"{_described(above(step, node).of_node(node), asker)}, node {node}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
