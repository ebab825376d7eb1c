"""Requests, steps and nodes in words: each fact declared once, for conditions, `why`, JSON, the console, the screens.

A WordField is a fact by the word that conditions, `print` and JSON have for it: its type, what it is, and how it is
read from the records. A WordRow is a fact as people read it: its label and its value, formatted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from specscope.trace.history.at_parent import AtParent, TopToken, above, draft_ps, end, is_deterministic
from specscope.trace.history.decided import BELOW, coin_sign, p_tried, q_tried
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.wording import about_draft, ending, ordinal, probability
from specscope.trace.record.draft_vocabulary import draft_id, draft_tokens
from specscope.trace.record.records import Outcome, RequestStep, RunInfo, StepRecord, Verdict
from specscope.trace.record.rules import ABOUT
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


class WordField(NamedTuple):
    """One fact. `value`: of a StepFacts; None where it is not known."""

    type: type
    about: str
    value: Callable[[Any], object]


class StepFacts(Mapping[str, object]):
    """A request's part in a step, or a node of it: the fields by name, each looked up when it is asked for.

    Without a part (the request was preempted, or has ended) there are only the engine's own fields.
    """

    def __init__(
        self, record: StepRecord, request: str, part: RequestStep | None, history: History, node: int | None = None
    ) -> None:
        self.record, self.name, self.part, self.history, self.node = record, request, part, history, node

    def __getitem__(self, name: str) -> object:
        """The value; KeyError for a name that is not among the fields here. None where it is not known."""
        return self._fields[name].value(self)

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    @cached_property
    def _fields(self) -> Mapping[str, WordField]:
        return ANY if self.part is None else STEP if self.node is None else NODE

    @property
    def step(self) -> RequestStep:
        """The request's part."""
        assert self.part is not None
        return self.part

    @property
    def verdict(self) -> Verdict | None:
        """The part's verdict; None for a prefill chunk."""
        return self.step.verdict

    @property
    def judged(self) -> Verdict:
        """The verdict of a node."""
        assert self.step.verdict is not None
        return self.step.verdict

    @property
    def at(self) -> int:
        """The node."""
        assert self.node is not None
        return self.node

    @property
    def parent(self) -> int:
        """The node's parent; ROOT for a step as a whole."""
        return ROOT if self.node is None else int(self.step.tree.parent[self.node])

    def sibling(self, node: int) -> int:
        """A node's place among its siblings, from 1; 0 for the root."""
        tree = self.step.tree
        return 0 if node == ROOT else 1 + tree.children(int(tree.parent[node])).index(node)

    def before(self) -> StepFacts | None:
        """The facts of the same request's previous step; None for its first."""
        request = self.history.requests.get(self.name)
        place = None if request is None or self.part is None else request.place_of(self.part.index)
        if request is None or not place:
            return None
        record = self.history.steps[request.engine_steps[place - 1]]
        return StepFacts(record, self.name, request.steps[place - 1], self.history)

    def tau(self) -> float | None:
        """Mean acceptance length over the request's steps up to this one."""
        request = self.history.requests.get(self.name)
        place = None if request is None else request.place_of(self.step.index)
        return None if request is None or place is None else request.tau(place)

    def tokens(self) -> list[int]:
        """The node's token, or those that the step emitted."""
        return self.step.output() if self.node is None else [int(self.step.tree.token[self.node])]


def _accepted(facts: StepFacts) -> int:
    return 0 if facts.verdict is None else facts.verdict.accepted


def _since_before(facts: StepFacts) -> int | None:
    before = facts.before()
    return None if before is None else facts.record.step - before.record.step


def _accepted_before(facts: StepFacts) -> int | None:
    before = facts.before()
    return None if before is None else _accepted(before)


def _rejected(facts: StepFacts) -> tuple[int, ...]:
    gone = [] if facts.verdict is None else facts.verdict.outcome == Outcome.REJECTED
    return tuple(facts.step.tree.token[gone].tolist())


def _is_near_tie(facts: StepFacts) -> bool:
    ties = facts.history.near_ties(facts.step)
    return bool(ties) if facts.node is None else facts.node in ties


def _of_verdict(name: str) -> Callable[[StepFacts], object]:
    """A number of the verdict."""
    return lambda facts: None if facts.verdict is None else getattr(facts.verdict, name)


def _of_node(name: str) -> Callable[[StepFacts], float]:
    """An array of the verdict over the nodes."""
    return lambda facts: float(getattr(facts.judged, name)[facts.at])


def _of_draw(facts: StepFacts, name: str) -> float:
    """A figure of the node's draw; 0 where it is no draw, or it is not recorded."""
    notes = facts.step.notes
    values = () if notes is None else getattr(notes, name)
    return float(values[facts.at]) if len(values) else 0.0


def _at_parent(name: str) -> Callable[[StepFacts], float | None]:
    """A number of a parent that was tried; None where it was not, or the capture does not hold it."""
    return lambda facts: AtParent(facts.step, facts.parent).number(name)


def _noted(name: str) -> Callable[[StepFacts], float | None]:
    """A number of a node whose parent was tried; None as above."""

    def value(facts: StepFacts) -> float | None:
        notes = AtParent(facts.step, facts.parent).notes
        return None if notes is None else float(getattr(notes, name)[facts.at])

    return value


ANY: dict[str, WordField] = {
    "step": WordField(int, "the engine's step", lambda f: f.record.step),
    "request": WordField(str, "the request's id", lambda f: f.name),
    "running": WordField(int, "requests in the batch", lambda f: f.record.running if f.record.is_timed else None),
    "waiting": WordField(int, "requests in the queue", lambda f: f.record.waiting if f.record.is_timed else None),
    "ms": WordField(
        float,
        "duration of the step in milliseconds",
        lambda f: (f.record.end_ns - f.record.start_ns) / 1e6 if f.record.phases else 0.0,
    ),
}
STEP: dict[str, WordField] = {
    **ANY,
    "index": WordField(int, "the request's own step number", lambda f: f.step.index),
    "context": WordField(int, "tokens before the root", lambda f: f.step.context_len),
    "drafter": WordField(str, "name of the drafter; none if nothing was drafted", lambda f: f.step.drafter),
    "nodes": WordField(int, "nodes of the tree", lambda f: len(f.step.tree)),
    "accepted": WordField(int, "nodes accepted", _accepted),
    "committed": WordField(
        int,
        "tokens committed: the accepted ones and the final one",
        lambda f: 0 if f.verdict is None else f.verdict.accepted + 1,
    ),
    "emitted": WordField(int, "tokens that became output", lambda f: f.step.emitted),
    "kind": WordField(
        str,
        "kind of the final token: bonus, recovered or target",
        lambda f: "" if f.verdict is None else f.verdict.kind.value,
    ),
    "tau": WordField(float, "the request's mean acceptance length so far", StepFacts.tau),
    "text": WordField(
        str,
        "text of the emitted tokens; at a node, the text of its token",
        lambda f: f.history.vocabulary.text(f.tokens()),
    ),
    "token": WordField(
        int,
        "the final token; at a node, its token",
        lambda f: f.tokens()[0] if f.node is not None else None if f.verdict is None else f.verdict.token,
    ),
    "final_p": WordField(float, "probability with which the final token was drawn", _of_verdict("final_p")),
    "final_coin": WordField(
        float,
        "the coin with which the final token was drawn, if one was",
        lambda f: None if f.verdict is None else f.verdict.final_coin or None,
    ),
    "final_margin": WordField(
        float, "how far p would have to move for another final token", _of_verdict("final_margin")
    ),
    "near_tie": WordField(
        bool, "whether rounding could flip a decision of the step; at a node, the decision on it", _is_near_tie
    ),
    "forced": WordField(
        bool,
        "whether a verdict of the step was forced",
        lambda f: f.verdict is not None and bool(len(f.verdict.forced)),
    ),
    "rule": WordField(str, "the rule of verification", lambda f: f.step.rule),
    "preceded": WordField(
        str,
        "what came before the step: prefill, preemption, full, partial, nothing or no draft",
        lambda f: None if f.step.preceded is None else f.step.preceded.value,
    ),
    "before_accepted": WordField(int, "nodes that the request's step before accepted", _accepted_before),
    "gap": WordField(int, "engine steps since the request's step before; 1 if it was the last one", _since_before),
    "final": WordField(int, "the final token", _of_verdict("token")),
    "rejected": WordField(tuple, "the rejected tokens, as in final in rejected", _rejected),
    "entropy": WordField(
        float,
        "entropy of p in nats where the first children were tried; at a node, at its parent",
        _at_parent("entropy"),
    ),
    "final_entropy": WordField(
        float,
        "entropy of the distribution that the final token was drawn from",
        lambda f: None if f.step.parents is None else f.step.parents.final_entropy,
    ),
}
NODE: dict[str, WordField] = {
    **STEP,
    "node": WordField(int, "the node's number", lambda f: f.node),
    "depth": WordField(int, "the node's depth, from 1", lambda f: int(f.step.tree.depth[f.at])),
    "sibling": WordField(int, "the node's place among its siblings, from 1", lambda f: f.sibling(f.at)),
    "p": WordField(float, "the target's probability of the token, before any rejection", _of_node("p")),
    "q": WordField(
        float,
        "the probability with which the drafter drew it; 1 if deterministic",
        lambda f: float(f.step.tree.q[f.at]),
    ),
    "draft_coin": WordField(
        float, "the coin that drew the token, if one did and it is recorded", lambda f: _of_draw(f, "coin") or None
    ),
    "draft_low": WordField(
        float,
        "the lower end of the token's interval: the draft's coin lies from there up to there plus q_tried",
        lambda f: _of_draw(f, "low") if _of_draw(f, "coin") else None,
    ),
    "p_tried": WordField(
        float, "p when the node was tried: in the residual after rejected siblings", _of_node("p_trial")
    ),
    "q_tried": WordField(float, "q when the node was tried, likewise", _of_node("q_trial")),
    "a": WordField(
        float,
        "the node's acceptance probability; the ratio of its path if its coin decided nothing",
        _of_node("accept_prob"),
    ),
    "u": WordField(
        float,
        "the node's coin, if one was tossed: a uniform random number; under the standard rule it is rejected if u >= a",
        lambda f: _of_node("coin")(f) or None,  # coins lie in the open interval (0, 1)
    ),
    "ahead": WordField(
        bool,
        "whether it was accepted because a node below it was (rules block and traversal)",
        lambda f: coin_sign(f.judged, f.at) == BELOW,
    ),
    "margin": WordField(float, "how far p would have to move for another outcome at the node", _of_node("margin")),
    "residual": WordField(float, "mass of the residual after the node was rejected", _of_node("residual_mass")),
    "draft_p": WordField(
        float, "the drafter's own probability, before sampling rules", lambda f: draft_ps(f.step)[f.at]
    ),
    "score": WordField(
        float,
        "the drafter's log probability of the path to the node; beside a text, of its acceptance",
        lambda f: None if f.step.notes is None else float(f.step.notes.score[f.at]),
    ),
    "source": WordField(
        str,
        "who drafted it, where a text drafts beside a model: model, text or both",
        lambda f: None if f.step.method is None else f.step.method.source_of(f.at) or None,
    ),
    "siblings": WordField(
        int, "how many siblings there are, the node included", lambda f: len(f.step.tree.children(f.parent))
    ),
    "parent": WordField(int, "the parent's number; -1 if it is the root", lambda f: f.parent),
    "parent_sibling": WordField(
        int, "the parent's place among its siblings, from 1; 0 if it is the root", lambda f: f.sibling(f.parent)
    ),
    "raw_p": WordField(float, "the target's probability of the token before temperature and rules", _noted("raw_p")),
    "rank": WordField(int, "rank of the token in p, from 1; 0 if its p is 0", _noted("rank")),
    "q_rank": WordField(int, "rank of the token in q, from 1; 0 if the node is deterministic", _noted("q_rank")),
    "choice_p": WordField(float, "p of the likeliest token at the parent", _at_parent("choice_p")),
    "choice_rank": WordField(
        int, "rank of the target's first choice in the drafter's distribution; 0 if outside", _at_parent("choice_rank")
    ),
}


@dataclass(frozen=True)
class WordRow:
    """A fact as people read it. The rows of a node are the same on the console and on a screen."""

    name: str  # as conditions have it, where they do
    label: str
    value: float | str
    text: str  # the value, formatted, with its unit
    odd: bool = False  # whether it should stand out


Shown = Callable[[int], str]  # a token for people


def label(name: str) -> str:
    """A field's heading in a column or a line."""
    return {"u": "coin", "source": "from"}.get(name, name.replace("_", " "))


def _number(name: str, value: float) -> WordRow:
    return WordRow(name, label(name), value, probability(value))


def node_numbers(step: RequestStep, node: int) -> list[WordRow]:
    """p and q of a node: as drawn, and as tried where that is another number. Of a greedy step, p before temperature 0.

    Where q is a point mass, the drafter's own probability says more.
    """
    verdict, there = step.verdict, above(step, node).of_node(node)
    assert verdict is not None
    raw = there.raw_p if verdict.is_greedy else None
    numbers = {"p" if raw is None else "raw_p": float(verdict.p[node]) if raw is None else raw}
    if not is_deterministic(step, node):
        numbers["q"] = float(step.tree.q[node])
    elif there.draft_p is not None:
        numbers["draft_p"] = there.draft_p
    if not verdict.is_greedy:
        tried = {"p_tried": p_tried(verdict, node), "q_tried": q_tried(step, verdict, node)}
        numbers |= {name: value for name, value in tried.items() if value is not None}
    return [_number(name, value) for name, value in numbers.items()]


def final_number(step: RequestStep) -> WordRow:
    """The final token's p; of a greedy step, before temperature 0."""
    verdict = step.verdict
    assert verdict is not None
    raw = end(step).of_token(verdict.token).raw_p if verdict.is_greedy else None
    return _number("p", verdict.final_p) if raw is None else _number("raw_p", raw)


def node_rows(history: History, step: RequestStep, node: int, show: Shown) -> list[WordRow]:
    """What the record holds of a node beside its numbers; of the final token, where `node` is the number of nodes."""
    verdict, tree, run = step.verdict, step.tree, history.run
    assert verdict is not None
    near = node in history.near_ties(step)
    if node == len(tree):
        kind = verdict.kind.value
        return [_token(verdict.token, show), WordRow("kind", "kind", kind, kind), *_margin(verdict.final_margin, near)]
    token, outcome = int(tree.token[node]), Outcome(int(verdict.outcome[node]))
    source = "" if step.method is None else step.method.source_of(node)
    rows = [_token(token, show), _position(tree, node, show)]
    rows.append(WordRow("drawn", "drawn", (drawn := DRAWN[Drawn(int(tree.drawn[node]))]), drawn))
    if node in history.near_draws(step):
        text = "a near tie in the draft: rounding could draw the next token instead"
        rows.append(WordRow("near_draw", "", text, text, odd=True))
    if draft_tokens(run) is not None and source != "text":
        rows.append(draft_id_row(run, token))
    if step.notes is not None and not source:
        score = float(step.notes.score[node])
        rows.append(WordRow("score", "drafter", score, f"log probability of the path {score:.3f}"))
    if step.method is not None and (facts := about_draft(step.method, node)):
        rows.append(WordRow("source", "drafter", source, ", ".join(facts)))
    if outcome is Outcome.REJECTED and not verdict.is_greedy:
        mass = float(verdict.residual_mass[node])
        rows.append(WordRow("residual", "residual", mass, f"{mass:.6g} of the target's mass is left"))
    if step.rule in ABOUT:
        rows.append(WordRow("rule", "rule", step.rule, f"{step.rule}: {ABOUT[step.rule]}"))
    if step.lossy:
        rows.append(WordRow("rule", "rule", step.rule, f"{printable(step.rule)}: not lossless", odd=True))
    return rows if outcome is Outcome.UNTRIED else [*rows, *_margin(float(verdict.margin[node]), near)]


def _token(token: int, show: Shown) -> WordRow:
    return WordRow("token", "token", token, f"{show(token)}  {token_id(token)}")


def _position(tree: DraftTree, node: int, show: Shown) -> WordRow:
    depth, parent = int(tree.depth[node]), int(tree.parent[node])
    below = "the root" if parent == ROOT else f"node {parent} ({show(int(tree.token[parent]))})"
    return WordRow("depth", "position", depth, f"depth {depth}, child of {below}")


def draft_id_row(run: RunInfo | None, token: int) -> WordRow:
    """The drafter's own number of a token of the target, where its vocabulary is reduced."""
    number = draft_id(run, token)
    if number is None:
        return WordRow("draft_id", "draft id", "", "outside the draft vocabulary", odd=True)
    return WordRow("draft_id", "draft id", number, f"{number} of the draft vocabulary")


def _margin(margin: float, near: bool) -> list[WordRow]:
    """How far the decision is from the other outcome; nothing where rounding could not change it."""
    if near:
        return [WordRow("margin", "margin", margin, f"{margin:.1e}: a {NEAR_TIE}: {FLIPS} it", odd=True)]
    text = f"{margin:.2g} in probability from the other outcome"
    return [WordRow("margin", "margin", margin, text)] if margin < 1 else []


def likeliest(place: AtParent) -> list[tuple[str, Sequence[TopToken]]]:
    """The likeliest tokens of target and drafter at a place, under a name; of each where they are recorded."""
    both = (("target's likeliest, raw", place.likeliest), ("drafter's likeliest", place.drafters_likeliest))
    return [(name, tokens) for name, tokens in both if tokens]


def about_likeliest(place: AtParent, show: Shown) -> list[str]:
    """Where the target's first choice is for the drafter, and how much of its mass the drafter cannot draft."""
    if not place.likeliest or not place.drafters_likeliest:
        return []
    first, lines = place.of_token(place.likeliest[0].token), []
    if first.draft_rank:
        lines.append(f"{show(first.token)} is the drafter's {ordinal(first.draft_rank)} choice")
    if place.outside:
        lines.append(f"{probability(place.outside)} of the target's mass is outside the draft vocabulary")
    return lines


def how_drawn(tree: DraftTree) -> str:
    """How the nodes of a tree were drawn, in a word or two."""
    kinds = set(tree.drawn.tolist())
    return " + ".join(DRAWN[kind] for kind in DRAWN if int(kind) in kinds)


@dataclass(frozen=True)
class RequestRow:
    """A line of a list of requests: what one had come to."""

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
    tokens, tau = request.totals.emitted(count), request.tau_at(position)
    if request.sums is not None and state not in ("later", "prefill"):
        tokens, count = request.sums.emitted, request.sums.steps
    return RequestRow(request.id, ending(state), tokens, count, tau, kind, " ".join(prompt.split()))
