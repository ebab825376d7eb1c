"""Requests, steps and nodes in words: each fact once, for conditions, `why`, JSON, the console, the screens.

And a judged tree as plain text, for people who read it in Jaeger, in a log or in a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specscope.plans.plan import branches as branches
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.place import BELOW, PlaceView, TopToken, coin_sign, draft_ps, end, last
from specscope.trace.history.wording import about_draft, acceptance, ending, ordinal, probability, said
from specscope.trace.record.draft_vocabulary import draft_id, draft_tokens
from specscope.trace.record.records import FinalKind, Outcome, RequestStep, StepRecord, Verdict
from specscope.trace.record.rules import ABOUT, is_own, looks_ahead
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from specscope.trace.record.vocabulary import Vocabulary, printable, token_id

DRAWN = {
    Drawn.DETERMINISTIC: "deterministic",
    Drawn.WITHOUT_REPLACEMENT: "without replacement",
    Drawn.WITH_REPLACEMENT: "with replacement",
}
NEAR_TIE = "near tie"
FLIPS = "rounding could flip"
PROMPT_CHARS = 400  # of a list


class StepFacts(Mapping[str, object]):
    """A request's part in a step, or a node of it, field by field; without a part, the engine's own fields alone."""

    def __init__(
        self, record: StepRecord, request: str, part: RequestStep | None, history: History, node: int | None = None
    ) -> None:
        self.record, self.name, self.part, self.history = record, request, part, history
        self.node, self.at = node, -1 if node is None else node  # `at`: to index with, where there is a node
        self._fields = ANY if part is None else STEP if node is None else NODE

    def __getitem__(self, name: str) -> object:
        """The value; KeyError for a name that is not among the fields here. None where it is not known."""
        value = self._fields[name].value
        return self.lies(value) if isinstance(value, str) else value(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def lies(self, path: str) -> object:
        """What lies there in the request's step, of an array at the node; None where something on the way is None."""
        found: object = self.part
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return found[self.at].item() if isinstance(found, np.ndarray) else found

    @property
    def step(self) -> RequestStep:
        assert self.part is not None
        return self.part

    @property
    def verdict(self) -> Verdict | None:
        return self.step.verdict

    @cached_property
    def place(self) -> PlaceView:
        """Where the node was drafted; of a step as a whole, the root."""
        return PlaceView(self.step, ROOT if self.node is None else int(self.step.tree.parent[self.node]))

    def _request(self) -> tuple[RequestHistory, int] | tuple[None, None]:
        request = self.history.requests.get(self.name)
        place = None if request is None or self.part is None else request.place_of(self.part.index)
        return (None, None) if request is None or place is None else (request, place)

    def before(self) -> StepFacts | None:
        """The facts of the same request's previous step; None for its first."""
        request, place = self._request()
        if request is None or not place:
            return None
        record = self.history.steps[request.engine_steps[place - 1]]
        return StepFacts(record, self.name, request.steps[place - 1], self.history)

    def tau(self) -> float | None:
        request, place = self._request()
        return None if request is None or place is None else request.totals.tau(0, place + 1)

    def tokens(self) -> list[int]:
        return self.step.output() if self.node is None else [int(self.step.tree.token[self.node])]

    def token(self) -> int | None:
        return self.tokens()[0] if self.node is not None else None if self.verdict is None else self.verdict.token

    def is_near_tie(self) -> bool:
        """Whether rounding could flip the decision on the node, or one of the step."""
        ties = self.history.near_ties(self.step)
        return bool(ties) if self.node is None else self.node in ties


class Fact(NamedTuple):
    """One fact. None where it is not known."""

    type: type
    about: str
    value: str | Callable[[StepFacts], object]  # where it lies in the request's step, of an array at the node; or how


def _rejected(facts: StepFacts) -> tuple[int, ...]:
    gone = [] if facts.verdict is None else facts.verdict.outcome == Outcome.REJECTED
    return tuple(facts.step.tree.token[gone].tolist())


def _at_parent(name: str) -> Callable[[StepFacts], float | None]:
    """A number of a parent that was tried; None where it was not, or the capture does not hold it."""
    return lambda facts: facts.place.number(name)


def _noted(name: str) -> Callable[[StepFacts], float | None]:
    return lambda facts: None if facts.place.notes is None else float(getattr(facts.place.notes, name)[facts.at])


ANY: dict[str, Fact] = {
    "step": Fact(int, "the engine's step", lambda f: f.record.step),
    "request": Fact(str, "the request's id", lambda f: f.name),
    "running": Fact(int, "requests in the batch", lambda f: f.record.running if f.record.is_timed else None),
    "waiting": Fact(int, "requests in the queue", lambda f: f.record.waiting if f.record.is_timed else None),
    "ms": Fact(float, "duration of the step in milliseconds", lambda f: (f.record.end_ns - f.record.start_ns) / 1e6),
}
STEP: dict[str, Fact] = {
    **ANY,
    "index": Fact(int, "the request's own step number", "index"),
    "context": Fact(int, "tokens before the root", "context_len"),
    "drafter": Fact(str, "name of the drafter; none if nothing was drafted", "drafter"),
    "nodes": Fact(int, "nodes of the tree", lambda f: len(f.step.tree)),
    "accepted": Fact(int, "nodes accepted", lambda f: 0 if f.verdict is None else f.verdict.accepted),
    "committed": Fact(int, "tokens committed: the accepted ones and the final one", lambda f: len(f.step.tokens())),
    "emitted": Fact(int, "tokens that became output", "emitted"),
    "kind": Fact(
        str, "kind of the final token: bonus, recovered or target", lambda f: f.verdict.kind.value if f.verdict else ""
    ),
    "tau": Fact(float, "the request's mean acceptance length so far", StepFacts.tau),
    "text": Fact(
        str,
        "text of the emitted tokens; at a node, the text of its token",
        lambda f: f.history.vocabulary.text(f.tokens()),
    ),
    "token": Fact(int, "the final token; at a node, its token", StepFacts.token),
    "final_p": Fact(float, "probability of the final token when it was drawn", "verdict.final_p"),
    "final_coin": Fact(
        float, "the coin that drew the final token, if there was one", lambda f: f.lies("verdict.final_coin") or None
    ),
    "final_margin": Fact(float, "how far p would have to move to change the final token", "verdict.final_margin"),
    "near_tie": Fact(
        bool, "whether rounding could flip a decision of the step; at a node, the decision on it", StepFacts.is_near_tie
    ),
    "forced": Fact(
        bool, "whether a verdict of the step was forced", lambda f: f.verdict is not None and len(f.verdict.forced) > 0
    ),
    "rule": Fact(str, "the rule of verification", "rule"),
    "preceded": Fact(
        str, "what preceded the step: prefill, preemption, full, partial, nothing or no draft", "preceded.value"
    ),
    "final": Fact(int, "the final token", "verdict.token"),
    "rejected": Fact(tuple, "the rejected tokens, as in final in rejected", _rejected),
    "entropy": Fact(float, "entropy of p in nats at the root; at a node, at its parent", _at_parent("entropy")),
    "final_entropy": Fact(
        float, "entropy of the distribution that the final token was drawn from", "parents.final_entropy"
    ),
}
NODE: dict[str, Fact] = {
    **STEP,
    "node": Fact(int, "the node's number", lambda f: f.node),
    "depth": Fact(int, "the node's depth, from 1", "tree.depth"),
    "sibling": Fact(int, "the node's place among its siblings, from 1", lambda f: 1 + f.place.children.index(f.at)),
    "p": Fact(float, "the target's probability of the token, before any rejection", "verdict.p"),
    "q": Fact(float, "the probability with which the drafter drew it; 1 if deterministic", "tree.q"),
    "p_tried": Fact(float, "p when the node was tried: in the residual after rejected siblings", "verdict.p_trial"),
    "q_tried": Fact(float, "q when the node was tried: after the siblings drawn before it", "verdict.q_trial"),
    "a": Fact(
        float, "the node's acceptance probability; its path's ratio if its coin was not used", "verdict.accept_prob"
    ),
    "u": Fact(
        float,
        "the node's coin, a uniform random number, if it was tossed; the standard rule rejects if u >= a",
        lambda f: f.lies("verdict.coin") or None,  # coins lie in the open interval (0, 1)
    ),
    "ahead": Fact(
        bool,
        "whether it was accepted because a node below it was (rules block and traversal)",
        lambda f: (
            f.verdict is not None
            and f.verdict.outcome[f.at] == Outcome.ACCEPTED
            and coin_sign(f.verdict, f.at) == BELOW
        ),
    ),
    "margin": Fact(float, "how far p would have to move to change the node's outcome", "verdict.margin"),
    "residual": Fact(float, "mass of the residual after the node was rejected", "verdict.residual_mass"),
    "draft_p": Fact(float, "the drafter's own probability, before sampling rules", lambda f: draft_ps(f.step)[f.at]),
    "score": Fact(float, "the drafter's log probability of the path to the node", "notes.score"),
    "source": Fact(
        str,
        "who drafted it if a text and a model drafted together: model, text or both",
        lambda f: (f.step.method and f.step.method.source_of(f.at)) or None,
    ),
    "siblings": Fact(int, "number of siblings, with the node itself", lambda f: len(f.place.children)),
    "parent": Fact(int, "the parent's number; -1 if it is the root", lambda f: f.place.parent),
    "raw_p": Fact(float, "the target's probability of the token before temperature and rules", _noted("raw_p")),
    "rank": Fact(int, "rank of the token in p, from 1; 0 if its p is 0", _noted("rank")),
    "q_rank": Fact(int, "rank of the token in q, from 1; 0 if the node is deterministic", _noted("q_rank")),
    "choice_p": Fact(float, "p of the likeliest token at the parent", _at_parent("choice_p")),
    "choice_rank": Fact(
        int, "rank of the target's top token in the drafter's distribution; 0 if outside", _at_parent("choice_rank")
    ),
}


def label(name: str) -> str:
    return {"u": "coin", "source": "from"}.get(name, name.replace("_", " "))


Row = tuple[str, str, bool]  # its label, what it says, whether it should stand out


def node_rows(history: History, place: PlaceView, show: Callable[[int], str]) -> list[Row]:
    """What the record holds of a node, or of the final token, beside its numbers: for the console and the screens."""
    step, token = place.step, place.token
    verdict, tree, run = step.verdict, step.tree, history.run
    assert verdict is not None
    rows: list[Row] = [("token", f"{show(token)}  {token_id(token)}", False)]
    if place.final:
        near = len(tree) in history.near_ties(step)
        return [*rows, ("kind", verdict.kind.value, False), *_margin(verdict.final_margin, near)]
    _, node = place.judged
    source = "" if step.method is None else step.method.source_of(node)
    above = {"node": place.parent, "token": show(int(tree.token[place.parent]))}  # not used of the root
    below = said("child of root" if place.parent == ROOT else "child of node", **above)
    rows.append(("position", said("position", depth=int(tree.depth[node]), parent=below), False))
    rows.append(("drawn", DRAWN[Drawn(int(tree.drawn[node]))], False))
    if node in history.near_draws(step):
        rows.append(("", said("near tie in the draft"), True))
    if draft_tokens(run) is not None and source != "text":
        number = draft_id(run, token)
        rows.append(("draft id", said("no rank" if number is None else "draft id", number=number), number is None))
    if step.notes is not None and not source:
        rows.append(("drafter", said("score", score=f"{float(step.notes.score[node]):.3f}"), False))
    if step.method is not None and (facts := about_draft(step.method, node)):
        rows.append(("drafter", ", ".join(facts), False))
    if verdict.outcome[node] == Outcome.REJECTED and not verdict.is_greedy:
        rows.append(("residual", said("residual", mass=f"{float(verdict.residual_mass[node]):.6g}"), False))
    rule = printable(step.rule)
    if step.rule in ABOUT:
        rows.append(("rule", said("rule", rule=rule, about=ABOUT[step.rule]), False))
    if is_own(step.rule):
        rows.append(("rule", said("rule, own", rule=rule), False))
    if step.lossy:
        rows.append(("rule", said("rule, lossy", rule=rule), True))
    untried = verdict.outcome[node] == Outcome.UNTRIED
    return rows if untried else [*rows, *_margin(float(verdict.margin[node]), node in history.near_ties(step))]


def _margin(margin: float, near: bool) -> list[Row]:
    """How far the decision is from the other outcome; nothing where rounding could not change it."""
    if near:
        return [("margin", said("near tie", margin=f"{margin:.1e}"), True)]
    return [("margin", said("margin", margin=f"{margin:.2g}"), False)] if margin < 1 else []


def likeliest(place: PlaceView) -> list[tuple[str, tuple[TopToken, ...]]]:
    """The likeliest tokens of target and drafter at a place, under a name; of each where they are recorded."""
    both = (("target's likeliest", place.likeliest), ("drafter's likeliest", place.drafters_likeliest))
    return [(said(name), tokens) for name, tokens in both if tokens]


def about_likeliest(place: PlaceView, show: Callable[[int], str]) -> list[str]:
    """Where the target's first choice is for the drafter, and how much of its mass the drafter cannot draft."""
    if not place.likeliest or not place.drafters_likeliest:
        return []
    first, outside = place.of(place.likeliest[0].token), place.number("outside")
    rank = ordinal(first.draft_rank) if first.draft_rank else ""
    lines = [said("first choice", token=show(first.token), rank=rank)] if rank else []
    return [*lines, said("outside mass", p=probability(outside))] if outside else lines


def how_drawn(tree: DraftTree) -> str:
    kinds = set(tree.drawn.tolist())
    return " + ".join(DRAWN[kind] for kind in DRAWN if int(kind) in kinds)


class RequestRow(NamedTuple):
    name: str
    state: str  # as RequestHistory.state_at has it, in words
    tokens: int
    steps: int
    tau: float | None
    kind: str  # its label of that name
    prompt: str  # on one line: its title, where it has one


def request_row(request: RequestHistory, position: int, vocabulary: Vocabulary) -> RequestRow:
    """A request as it stood at a position in History.steps."""
    info, count, state = request.info, request.count_at(position), request.state_at(position)
    prompt = "" if info is None else (info.title or info.prompt)[:PROMPT_CHARS]
    if info is not None and not prompt:
        prompt = vocabulary.text(info.prompt_tokens[: PROMPT_CHARS // 4].tolist())
    kind = "" if info is None else str(info.labels.get("kind", ""))
    told = request.acceptance_at(position)
    count = count if request.sums is None else told.steps
    return RequestRow(request.id, ending(state), told.emitted, count, told.tau, kind, " ".join(prompt.split()))


MARKS: dict[int, str] = {Outcome.ACCEPTED: "✓", Outcome.REJECTED: "✗", Outcome.UNTRIED: "·"}

UNTRIED, DETERMINISTIC = int(Outcome.UNTRIED), int(Drawn.DETERMINISTIC)  # looked up once: trees are drawn in every step


def draw_tree(step: RequestStep, vocabulary: Vocabulary) -> str:
    """The tree of a step with every node's verdict, and the final token where it was drawn.

    A node shows p, q and its coin u, and where it was tried its acceptance probability a, or the ratio of its path if
    a node below decided. Where q is a point mass, `draft p` is the drafter's own probability. A greedy step has no coin
    that decides: its nodes show the target's raw p.
    """
    verdict, tree = step.verdict, step.tree
    if verdict is None:
        return acceptance(step)
    greedy, ended = verdict.is_greedy, last(verdict)
    final_p = _p(verdict.final_p, end(step).raw_p if greedy else None)
    if verdict.kind is FinalKind.RECOVERED and not greedy:  # its share of the residual is no p
        whole = "" if step.parents is None else f"{_p(step.parents.final_target_p, None)} "
        final_p = f"{whole}residual {final_p}"
    final = f"  ⇒ {verdict.kind.value} {vocabulary.show(verdict.token)}  {final_p}"
    lines = [f"root @{step.context_len + step.prefill_tokens}" + (final if ended == ROOT else "")]
    token, p, draft = tree.token.tolist(), verdict.p.tolist(), draft_ps(step)
    noted = step.parents if greedy else None
    tried = [] if noted is None else [node for above in noted.node.tolist() for node in tree.children(above)]
    raw = {} if noted is None else {node: float(noted.raw_p[node]) for node in tried}
    outcome, drawn = verdict.outcome.tolist(), tree.drawn.tolist()
    decided = [""] * len(tree) if greedy else _decided(step, verdict)
    forced = verdict.forced.tolist()
    for node, lead in branches(tree.parent.tolist()):
        text = f"{lead}{MARKS[outcome[node]]} {vocabulary.show(token[node])}  {_p(p[node], raw.get(node))}"
        if not greedy:
            text += f" q={tree.q[node]:.4f}"
        if draft[node] is not None and drawn[node] == DETERMINISTIC:
            text += f" draft p={draft[node]:.4f}"
        source = "" if step.method is None else step.method.source_of(node)
        text += (f" from {source}" if source else "") + decided[node] + (" forced" if node in forced else "")
        lines.append(text + final if node == ended else text)
    if step.notes is not None and len(step.notes.dropped_token):
        lines.append(f"re-ranking dropped {len(step.notes.dropped_token)} more")
    return "\n".join(lines)


def _decided(step: RequestStep, verdict: Verdict) -> list[str]:
    """[n] the text of each node's acceptance probability and coin, where it has them."""
    judged = verdict.judged.tolist() if looks_ahead(verdict.rule) else [True] * len(step.tree)
    rows = zip(verdict.outcome.tolist(), judged, verdict.accept_prob.tolist(), verdict.coin.tolist(), strict=True)
    texts = []
    for outcome, was_judged, accept, coin in rows:
        tried = "" if outcome == UNTRIED else f" a={accept:.4f}" if was_judged else f" ratio={accept:.4f}"
        texts.append(tried + (f" u={coin:.4f}" if coin else ""))
    return texts


def _p(p: float, raw_p: float | None) -> str:
    return f"p={p:.4f}" if raw_p is None else f"raw p={raw_p:.4f}"
