"""A token at a place of a tree: what target and drafter gave it there, and how it was decided, from a step's evidence.

What the evidence does not hold is None. `why` says in sentences why a token was rejected, kept or never tried, where
the evidence supports it; the first is the headline. They stand in sentences.json, which the page fills in, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specscope.trace.history.history import History
from specscope.trace.history.totals import Undrafted, why_undrafted
from specscope.trace.history.wording import about_sizing, ordinal, plural, probability, quoted, said
from specscope.trace.record.draft_vocabulary import NOT_TOLD, draft_id, lacks_draft_tokens
from specscope.trace.record.notes import TEXT, ParentNotes
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, StepRecord, Verdict
from specscope.trace.record.rules import MATCH, STANDARD, is_own, looks_ahead
from specscope.trace.record.tree import ROOT, Doubles, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.tree_shape import MAX_NODES

OUTSIDE = 0  # a rank: the drafter's vocabulary does not have the token
BELOW, DREW, DREW_ANOTHER, LESS, NOT_LESS = "↓", "=", "≠", "<", "≥"
TOSSED = (LESS, NOT_LESS)


class TopToken(NamedTuple):
    token: int
    prob: float


class PlaceView:
    """A token below a parent of a tree: a node, the final token, or another. Made by `at`, `end` and `of`."""

    def __init__(
        self,
        step: RequestStep,
        parent: int,
        token: int = NO_TOKEN,
        node: int | None = None,
        *,
        final: bool = False,
        drafts: Sequence[float | None] = (),
    ) -> None:
        """`drafts`: draft_ps, where they are at hand."""
        self.step, self.parent = step, parent  # ROOT, or a node
        self.token, self.node, self.final = token, node, final  # node: None where the token was not drafted there
        rows = [] if step.parents is None else np.flatnonzero(step.parents.node == parent).tolist()
        self.notes: ParentNotes | None = step.parents if rows else None  # where they tell of this parent
        self._row = rows[0] if rows else 0
        # The likeliest tokens, likeliest first: the target's, raw; the drafter's own, none where it is no model
        self.likeliest, self.drafters_likeliest = self._likeliest("top"), self._likeliest("draft_top")
        choice, choice_p = self.number("choice"), self.number("choice_p")  # of the target, as sampled
        known = choice is not None and choice_p is not None and choice != NO_TOKEN
        self.choice = TopToken(int(choice or 0), choice_p or 0.0) if known else None
        # The token's p as sampled, 0 or 1 where the request is greedy; that before temperature and rules, and its rank
        self.p = self.choice.prob if self.choice is not None and self.choice.token == token else None
        self.raw_p, self.raw_rank = _in(self.likeliest, token)
        # The drafter's own probability, and the token's rank there, from 1, or OUTSIDE
        self.draft_p, self.draft_rank = _in(self.drafters_likeliest, token)
        if self.notes is not None and self.drafters_likeliest and self.raw_rank == 1 and self.draft_rank is None:
            rank = int(self.notes.choice_rank[self._row])  # which ties with tokens before it share
            self.draft_rank = max(rank, len(self.drafters_likeliest) + 1) if rank else OUTSIDE
            self.draft_p = self.number("choice_q") if self.draft_rank else None
        self.q: float | None = None  # the probability that the node was drawn from; None where it was no draw
        if node is None:
            return
        verdict, tree, noted = step.verdict, step.tree, (drafts or draft_ps(step))[node]
        self.p = float(verdict.p[node]) if verdict is not None and verdict.tells_p else None
        self.raw_p = None if self.notes is None else float(self.notes.raw_p[node])
        self.draft_p = self.draft_p if noted is None else noted
        self.q = None if tree.drawn[node] == Drawn.DETERMINISTIC else float(tree.q[node])

    def of(self, token: int, *, final: bool = False) -> PlaceView:
        """Any token here. Nothing is known where token ids were left out of the capture."""
        children = [] if token == NO_TOKEN else self.children
        node = next((node for node in children if self.step.tree.token[node] == token), None)
        return PlaceView(self.step, self.parent, token, node, final=final)

    @property
    def children(self) -> list[int]:
        return self.step.tree.children(self.parent)

    def number(self, name: str) -> float | None:
        """This parent's value in a per-parent field of ParentNotes; None where the notes do not have this parent."""
        return None if self.notes is None else float(getattr(self.notes, name)[self._row])

    def _likeliest(self, name: str) -> tuple[TopToken, ...]:
        if self.notes is None:
            return ()
        tokens, shares = getattr(self.notes, name)[self._row], getattr(self.notes, name + "_p")[self._row]
        pairs = zip(tokens.tolist(), shares.tolist(), strict=True)
        return tuple(TopToken(token, p) for token, p in pairs if p != 0 and token != NO_TOKEN)

    @property
    def wanted(self) -> PlaceView | None:
        """The target's likeliest token as sampled; where that is not recorded, the one that was taken here.

        None where the path never came here, and where token ids were left out.
        """
        step, verdict, children = self.step, self.step.verdict, self.children
        if verdict is not None and verdict.token == NO_TOKEN:
            return None
        if self.choice is not None:
            return self.of(self.choice.token)
        if verdict is None or not verdict.is_greedy:
            return None  # what was drawn need not be the likeliest
        if not children or not {*children, len(step.tree)}.isdisjoint(verdict.forced.tolist()):
            return None  # after a leaf nothing is recorded but the token itself
        accepted = [node for node in children if node in verdict.path.tolist()]
        if accepted:
            return at(step, accepted[0])
        return end(step) if self.parent == last(verdict) else None

    @property
    def judged(self) -> tuple[Verdict, int]:
        assert self.step.verdict is not None
        assert self.node is not None
        return self.step.verdict, self.node

    @property
    def tried(self) -> dict[str, float]:
        """p_tried and q_tried, each where it prints differently from p or q as drawn. The rule `match` uses no q."""
        verdict, node = self.judged
        if verdict.outcome[node] == Outcome.UNTRIED:
            return {}
        pairs = {"p_tried": (verdict.p_trial, verdict.p)}
        pairs |= {} if verdict.rule == MATCH else {"q_tried": (verdict.q_trial, self.step.tree.q)}
        both = {name: (float(tried[node]), float(drawn[node])) for name, (tried, drawn) in pairs.items()}
        return {name: tried for name, (tried, drawn) in both.items() if probability(tried) != probability(drawn)}

    @property
    def numbers(self) -> dict[str, float]:
        """p and q of a node by the names of conditions: as drawn, and as tried where that is another number.

        The final token has p alone; a recovered one was drawn from the residual, and its share of that is p as tried. A
        greedy step has p before temperature 0. Where q is a point mass, the drafter's own probability says more.
        """
        verdict = self.step.verdict
        assert verdict is not None
        raw = self.raw_p if verdict.is_greedy else None
        if self.final and raw is None and verdict.kind is FinalKind.RECOVERED:
            whole = {} if self.notes is None else {"p": self.notes.final_target_p}
            return {**whole, "p_tried": verdict.final_p}
        p = verdict.final_p if self.final else float(verdict.p[self.node])
        known = {"p": p} if raw is None else {"raw_p": raw}
        if self.final:
            return known
        drafter = {"draft_p": self.draft_p} if self.q is None else {"q": self.q}
        known |= {name: value for name, value in drafter.items() if value is not None}
        return known if verdict.is_greedy else known | self.tried


def _in(shares: tuple[TopToken, ...], token: int) -> tuple[float | None, int | None]:
    """The probability and the rank of a token among the likeliest; None where it is not among them."""
    return next(((share.prob, rank) for rank, share in enumerate(shares, 1) if share.token == token), (None, None))


def at(step: RequestStep, node: int) -> PlaceView:
    """A node where it was drafted; for the number of nodes, the final token."""
    if node < len(step.tree):
        return PlaceView(step, int(step.tree.parent[node]), int(step.tree.token[node]), node)
    return end(step)


def nodes(step: RequestStep) -> list[PlaceView]:
    drafts, rows = draft_ps(step), zip(step.tree.parent.tolist(), step.tree.token.tolist(), strict=True)
    return [PlaceView(step, *row, node, drafts=drafts) for node, row in enumerate(rows)]


def end(step: RequestStep) -> PlaceView:
    """The final token, where it was drawn: where the accepted path ended."""
    verdict = step.verdict
    if verdict is None:
        return PlaceView(step, ROOT, final=True)
    parent = last(verdict)
    nodes = [] if verdict.token == NO_TOKEN else step.tree.children(parent)
    node = next((node for node in nodes if step.tree.token[node] == verdict.token), None)
    return PlaceView(step, parent, verdict.token, node, final=True)


def last(verdict: Verdict) -> int:
    """The node at which the accepted path ended; ROOT where nothing was accepted."""
    return int(verdict.path[-1]) if len(verdict.path) else ROOT


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


def deciding(step: RequestStep) -> list[int]:
    """The nodes that ended the path: the children there that were all rejected, or the last one that was accepted."""
    verdict = step.verdict
    if verdict is None:
        return []
    ended = last(verdict)
    failed = [node for node in step.tree.children(ended) if verdict.outcome[node] != Outcome.UNTRIED]
    return failed or ([ended] if ended != ROOT else [])


def ended_by(step: RequestStep) -> int:
    """Where to look first for why the path ended: the first node that was rejected there, else the final token."""
    recovered = step.verdict is not None and step.verdict.kind is FinalKind.RECOVERED
    return next(iter(deciding(step)), len(step.tree)) if recovered else len(step.tree)


def draft_ps(step: RequestStep) -> list[float | None]:
    """[n] the drafter's own probability before sampling rules; None where no model drafted it or it was drawn by q."""
    if step.notes is None:
        return [None] * len(step.tree)
    untold = step.tree.drawn != Drawn.DETERMINISTIC
    if step.method is not None and len(step.method.source):
        untold = untold | (step.method.source == TEXT)
    return [None if other else p for p, other in zip(step.notes.prob.tolist(), untold.tolist(), strict=True)]


@dataclass(frozen=True)
class Ratios:
    """The ratios of n nodes, by which block and traversal go (speculate/verify/traversal.py); 0 at those not tried."""

    parent: Doubles  # [n] what was left of the parent's ratio when the node came up
    own: Doubles  # [n] the node's own then
    left: Doubles  # [n] and what is left of it when all below was rejected: what its coin is held against


def ratios(tree: DraftTree, verdict: Verdict) -> Ratios:
    n = len(tree)
    parent, own_ratio, left = np.zeros((3, n + 1))  # the root comes last: its index is -1
    left[-1] = 1.0
    forced = set(verdict.forced.tolist())
    rows = zip(
        tree.parent.tolist(),
        verdict.outcome.tolist(),
        verdict.p_trial.tolist(),
        verdict.q_trial.tolist(),
        verdict.residual_mass.tolist(),
        strict=True,
    )
    for node, (above, outcome, p, q, mass) in enumerate(rows):
        if outcome == Outcome.UNTRIED:
            continue
        ratio = parent[node] = left[above]
        own_ratio[node] = left[node] = min(1.0, ratio * p / q) if q > 0 else 0.0
        if outcome == Outcome.REJECTED:
            left[above] = mass / (mass + (1 - ratio)) if mass > 0 else float(ratio == 1)
        elif node in forced:
            left[node] = 1.0
    return Ratios(parent[:n], own_ratio[:n], left[:n])


def why(history: History, step: RequestStep, node: int) -> list[str]:
    """The sentences of a node; of the final token, where `node` is the number of nodes. None for a prefill chunk."""
    if step.verdict is None:
        return []
    first = f"{headline(step, node, history.vocabulary)}."
    if node == len(step.tree):
        return [first, _final(step, history.vocabulary)]
    text = decision_text(step, node, history.vocabulary)
    lines = [first, f"{text[:1].upper()}{text[1:]}."]
    if step.verdict.outcome[node] == Outcome.REJECTED and node not in step.verdict.forced.tolist():
        place = at(step, node)
        lines += [line for line in (_wider(history, place), _other_temperature(history, place)) if line]
    return lines


def why_step(history: History, record: StepRecord, step: RequestStep) -> list[str]:
    """The step's path in a sentence, then why it ended. `record` may know why nothing was drafted."""
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return [said("prefill", tokens=plural(step.prefill_tokens, "token"))]
    if not len(tree):
        reason = why_undrafted(history.run, record, step)
        about = "" if reason is None or reason is Undrafted.UNKNOWN else f": {reason.about}"
        sizing = f" ({about_sizing(step)})" if step.sizing else ""
        return [said("undrafted", why=about, sizing=sizing), _final(step, history.vocabulary)]
    path = " ".join(quoted(history.vocabulary, int(tree.token[node])) for node in verdict.path)
    figures = {"accepted": verdict.accepted, "levels": plural(tree.max_depth, "level"), "path": path}
    summary, node = said("path of tokens" if path else "path", **figures), ended_by(step)
    if node == len(tree):
        return [summary, *why(history, step, node)]
    rest = [(other, _described(at(step, other), history.vocabulary)) for other in deciding(step) if other != node]
    others = [said("also rejected", node=described, number=other) for other, described in rest]
    return [summary, *why(history, step, node), *others, _final(step, history.vocabulary)]


def headline(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """`Target wanted X (p), drafted Y (p, rank)`: what the whole question is about, in a line."""
    place = at(step, node)
    target, described = place.wanted, _described(place, vocabulary)
    if target is not None:
        same = "wanted, and drafted" if place.token == target.token else "wanted, drafted"
        return said("wanted" if place.final else same, target=_described(target, vocabulary), node=described)
    verdict = step.verdict
    if place.final:
        return said("took" if verdict is not None and verdict.is_greedy else "drew", node=described)
    if verdict is None or verdict.kind is not FinalKind.RECOVERED or place.parent != end(step).parent:
        return said("drafted", node=described)
    return said("took, drafted", final=_described(end(step), vocabulary), node=described)


def brief(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """The headline with the fewest figures, for narrow places."""
    place = at(step, node)
    target = place.wanted
    if target is None or place.final or place.token == target.token:
        return headline(step, node, vocabulary)
    first, other = _briefly(target, "the drafter's"), _briefly(place, "its")
    token, instead = quoted(vocabulary, target.token), quoted(vocabulary, place.token)
    return said("wanted, in brief", token=token, first=first, instead=instead, other=other)


def _briefly(place: PlaceView, whose: str) -> str:
    """The target's p of a token, raw where sampling left 0 or 1 of it; and its rank in the drafter."""
    p = place.raw_p if place.p in (0, 1, None) and place.raw_p is not None else place.p
    rank = "" if place.draft_rank is None else _rank(place.draft_rank, f"{whose} ")
    return ", ".join(filter(None, ("" if p is None else probability(p), rank)))


def _rank(rank: int, whose: str = "") -> str:
    return said("no rank") if rank == OUTSIDE else whose + ordinal(rank)


def _described(place: PlaceView, vocabulary: Vocabulary) -> str:
    """`␣for (raw p 0.921, 1st; draft p 0.006, 15th)`: the target's p and rank, then the drafter's."""
    raw = [] if place.raw_p is None else [said("raw p", p=probability(place.raw_p))]
    raw += [ordinal(place.raw_rank)] if raw and place.raw_rank is not None else []
    draft = [] if place.draft_p is None else [said("draft p", p=probability(place.draft_p))]
    draft += [] if place.draft_rank is None else [_rank(place.draft_rank)]
    p = "" if place.p in (0, 1, None) else said("p", p=probability(place.p))
    facts = (p, ", ".join(raw), "" if place.q is None else said("q", p=probability(place.q)), ", ".join(draft))
    figures = "; ".join(filter(None, facts))
    return quoted(vocabulary, place.token) + (f" ({figures})" if figures else "")


def _wider(history: History, place: PlaceView) -> str:
    """Which tree would have contained the token that the target wanted."""
    target, step, children = place.wanted, place.step, len(place.children)
    if target is None or target.node is not None:
        return ""
    token, rank = quoted(history.vocabulary, target.token), target.draft_rank
    if step.notes is not None and target.token in step.notes.dropped_token[step.notes.dropped_parent == place.parent]:
        return said("dropped", token=token)
    if rank == OUTSIDE or draft_id(history.run, target.token) is None:
        return said("outside", token=token)
    if rank is None and lacks_draft_tokens(history.run):
        return said("vocabulary untold", token=token, why=NOT_TOLD)
    if rank is None:
        count = len(place.drafters_likeliest)
        return said("unranked", token=token, count=count) if count else ""
    name = "ranked first, drawn" if rank == 1 else "ranked, drawn"
    if rank > MAX_NODES:
        name = "ranked too low"
    elif rank > children and not step.tree.is_sampled:
        name = "ranked"
    return said(name, token=token, rank=ordinal(rank), width=rank, children=children)


def _other_temperature(history: History, place: PlaceView) -> str:
    """The node's outcome at temperature 0 or 1, where its evidence alone determines it."""
    request, (verdict, node) = history.requests.get(place.step.request), place.judged
    info = None if request is None else request.info
    if info is None or place.notes is None or place.step.rule != STANDARD:
        return ""
    params = info.params
    if not verdict.is_greedy:
        is_choice = not params.greedy and place.choice is not None and place.choice.token == place.token
        return said("at temperature 0") if is_choice else ""
    first = place.children[0] == node  # an earlier trial would change p
    plain = params.greedy and params.plain and info.tells_rules
    if not (first and plain and place.q is None and place.raw_p is not None):
        return ""
    return said("at temperature 1", p=probability(place.raw_p))


def _final(step: RequestStep, vocabulary: Vocabulary) -> str:
    verdict = step.verdict
    assert verdict is not None
    final = said(verdict.kind.value, token=quoted(vocabulary, verdict.token))
    if len(step.tree) in verdict.forced.tolist():
        return said("final, forced", final=final)
    if verdict.is_greedy:
        return said("final, greedy", final=final)
    if not verdict.tells_p:
        return said("final, unrecorded", final=final)
    source = said("source, recovered" if verdict.kind is FinalKind.RECOVERED else "source")
    name, coin = "final, drawn by coin" if verdict.final_coin else "final, drawn", f"{verdict.final_coin:.4g}"
    return said(name, final=final, source=source, coin=coin, p=probability(verdict.final_p))


def decision_text(step: RequestStep, node: int, vocabulary: Vocabulary) -> str:
    """Why a node was accepted, rejected or not tried, with the figures that decided."""
    place = at(step, node)
    verdict, _ = place.judged
    outcome, p, tried = Outcome(int(verdict.outcome[node])), float(verdict.p[node]), float(verdict.p_trial[node])
    accepted, word = outcome is Outcome.ACCEPTED, outcome.name.lower()
    if outcome is Outcome.UNTRIED:
        known = verdict.is_greedy and p in (0, 1)
        name = "not tried" if not known else "not tried, would" if p else "not tried, would not"
        return said(name, why=_not_tried(place, vocabulary))
    if node in verdict.forced.tolist():
        return said("forced", outcome=word)
    if not verdict.tells_p:
        return said("unrecorded", outcome=word)
    if not verdict.is_greedy:
        name = "decided late" if f"{p:.4g}" != f"{tried:.4g}" else "decided"
        return said(name, outcome=word, coin=_coin(place), p=f"{p:.4g}")
    if accepted != (tried == 1) and coin_sign(verdict, node) != BELOW:
        return said("contrary", outcome=word, p=f"{tried:.0f}")
    if accepted:
        return said("greedy, this", outcome=word)
    wanted = place.wanted
    named = said("another") if wanted is None else quoted(vocabulary, wanted.token)
    return said("greedy, another", outcome=word, wanted=named)


def _not_tried(place: PlaceView, vocabulary: Vocabulary) -> str:
    tree, (verdict, _), parent = place.step.tree, place.judged, place.parent
    if parent != ROOT and parent not in verdict.path.tolist():
        name = "parent rejected" if verdict.outcome[parent] == Outcome.REJECTED else "parent not tried"
        return said(name, parent=quoted(vocabulary, int(tree.token[parent])))
    accepted = [other for other in place.children if verdict.outcome[other] == Outcome.ACCEPTED]
    if accepted:
        return said("sibling accepted", sibling=quoted(vocabulary, int(tree.token[accepted[0]])))
    return said("verification ended")


def _coin(place: PlaceView) -> str:
    verdict, node = place.judged
    sign = coin_sign(verdict, node)
    coin, a = float(verdict.coin[node]), float(verdict.accept_prob[node])
    if sign == BELOW:
        return said("coin, below", node=int(verdict.path[-1]), a=_made(place))
    if sign in (DREW, DREW_ANOTHER):
        return said("coin, this" if sign == DREW else "coin, another", coin=f"{coin:.4g}", a=_made(place))
    if not coin:
        return said("coin, none", a=_made(place))
    agrees = (sign == LESS) == (verdict.outcome[node] == Outcome.ACCEPTED)
    digits = next((count for count in range(4, 17) if f"{coin:.{count}g}" != f"{a:.{count}g}"), 17)
    name, made = "coin" if agrees else "coin, contrary", _made(place, digits)
    return said(name, coin=f"{coin:.{digits}g}", sign=sign, a=made)


def _made(place: PlaceView, digits: int = 4) -> str:
    step, (verdict, node) = place.step, place.judged
    a = float(verdict.accept_prob[node])
    if looks_ahead(step.rule):
        path, own = ratios(step.tree, verdict), f"{verdict.p_trial[node]:.4g}"
        name = "a, path" if not verdict.judged[node] or a == path.own[node] else "a, left of path"
        figures = {"parent": f"{path.parent[node]:.4g}", "own": f"{path.own[node]:.{digits}g}"}
        return said(name, a=f"{a:.{digits}g}", p=own, q=f"{verdict.q_trial[node]:.4g}", **figures)
    numbers = {"p": verdict.p_trial[node], "q": verdict.q_trial[node], "a": a}
    name = "a, p" if place.q is None and verdict.q_trial[node] == 1 else "a"
    name = "a, match" if step.rule == MATCH else "a, own rule" if is_own(step.rule) else name
    return said(name, rule=printable(step.rule), **{key: f"{float(x):.{digits}g}" for key, x in numbers.items()})
