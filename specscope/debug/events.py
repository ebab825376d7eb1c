"""What happened in a step, event by event, with the fields that conditions can use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from specscope.trace.history.at_parent import AtParent, draft_ps
from specscope.trace.history.decided import BELOW, coin_sign
from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind, FinishReason, Outcome, RequestStep, StepRecord
from specscope.trace.record.tree import ROOT


class EventKind(StrEnum):
    """What a breakpoint can be set on."""

    STEP = "step"  # a request took part in a step
    DRAFT = "draft"  # a tree was drafted
    REJECT = "reject"  # a node was rejected
    ACCEPT = "accept"  # a node was accepted
    BONUS = "bonus"  # the final token follows a path that was accepted to its leaf
    RECOVER = "recover"  # the final token was drawn from a residual
    EMIT = "emit"  # tokens became output
    PREFILL = "prefill"  # prompt tokens were fed
    PREEMPT = "preempt"  # a request lost its KV
    FINISH = "finish"  # a request ended
    ERROR = "error"  # a request failed


# The evidence, by name: its type and what it is.
ANY_NAMES: dict[str, tuple[type, str]] = {
    "step": (int, "the engine's step"),
    "request": (str, "the request's id"),
    "running": (int, "requests in the batch"),
    "waiting": (int, "requests in the queue"),
    "ms": (float, "duration of the step in milliseconds"),
}
STEP_NAMES: dict[str, tuple[type, str]] = {
    **ANY_NAMES,
    "index": (int, "the request's own step number"),
    "context": (int, "tokens before the root"),
    "drafter": (str, "name of the drafter; none if nothing was drafted"),
    "nodes": (int, "nodes of the tree"),
    "accepted": (int, "nodes accepted"),
    "committed": (int, "tokens committed: the accepted ones and the final one"),
    "emitted": (int, "tokens that became output"),
    "kind": (str, "kind of the final token: bonus, recovered or target"),
    "tau": (float, "the request's mean acceptance length so far"),
    "text": (str, "text of the emitted tokens; at a node, the text of its token"),
    "token": (int, "the final token; at a node, its token"),
    "final_p": (float, "probability with which the final token was drawn"),
    "final_coin": (float, "the coin with which the final token was drawn"),
    "final_margin": (float, "how far p would have to move for another final token"),
    "near_tie": (bool, "whether rounding could flip a decision of the step; at a node, the decision on it"),
    "forced": (bool, "whether a verdict of the step was forced"),
    "rule": (str, "the rule of verification"),
    "preceded": (str, "what came before the step: prefill, preemption, full, partial, nothing or no draft"),
    "before_accepted": (int, "nodes that the request's step before accepted"),
    "gap": (int, "engine steps since the request's step before; 1 if it was the last one"),
    "final": (int, "the final token"),
    "rejected": (tuple, "the rejected tokens, as in final in rejected"),
    "entropy": (float, "entropy of p in nats where the first children were tried; at a node, at its parent"),
    "final_entropy": (float, "entropy of the distribution that the final token was drawn from"),
}
NODE_NAMES: dict[str, tuple[type, str]] = {
    **STEP_NAMES,
    "node": (int, "the node's number"),
    "depth": (int, "the node's depth, from 1"),
    "sibling": (int, "the node's place among its siblings, from 1"),
    "p": (float, "the target's probability of the node's token"),
    "q": (float, "the probability with which the drafter drew it; 1 if deterministic"),
    "p_tried": (float, "p when the node was tried: in the residual after rejected siblings"),
    "q_tried": (float, "q when the node was tried, likewise"),
    "a": (float, "the node's acceptance probability; the ratio of its path if its coin decided nothing"),
    "u": (float, "the node's coin: a uniform random number; under the standard rule it is rejected if u >= a"),
    "ahead": (bool, "whether it was accepted because a node below it was (rules block and traversal)"),
    "margin": (float, "how far p would have to move for another outcome at the node"),
    "residual": (float, "mass of the residual after the node was rejected"),
    "draft_p": (float, "the drafter's own probability, before sampling rules"),
    "score": (float, "the drafter's log probability of the path to the node; beside a text, of its acceptance"),
    "source": (str, "who drafted it, where a text drafts beside a model: model, text or both"),
    "siblings": (int, "how many siblings there are, the node included"),
    "parent": (int, "the parent's number; -1 if it is the root"),
    "parent_sibling": (int, "the parent's place among its siblings, from 1; 0 if it is the root"),
    "raw_p": (float, "the target's probability of the token before temperature and rules"),
    "rank": (int, "rank of the token in p, from 1; 0 if its p is 0"),
    "q_rank": (int, "rank of the token in q, from 1; 0 if the node is deterministic"),
    "choice_p": (float, "p of the likeliest token at the parent"),
    "choice_rank": (int, "rank of the target's first choice in the drafter's distribution; 0 if outside"),
}
# Those that are an array of the verdict, over the nodes
OF_VERDICT = {
    **{"p": "p", "p_tried": "p_trial", "q_tried": "q_trial", "margin": "margin"},
    **{"a": "accept_prob", "u": "coin", "residual": "residual_mass"},
}
NODE_EVENTS = (EventKind.REJECT, EventKind.ACCEPT)
BARE_EVENTS = (EventKind.PREEMPT, EventKind.FINISH, EventKind.ERROR)


def names_of(kind: EventKind) -> dict[str, tuple[type, str]]:
    """The fields that a condition on such an event can use."""
    return NODE_NAMES if kind in NODE_EVENTS else ANY_NAMES if kind in BARE_EVENTS else STEP_NAMES


def types_of(kind: EventKind) -> dict[str, type]:
    """The same names with the types of their values: what an Expression is checked against."""
    return {name: kind for name, (kind, _) in names_of(kind).items()}


class EventEvidence(Mapping[str, object]):
    """The names of an event with their values, looked up when they are asked for."""

    def __init__(
        self, record: StepRecord, request: str, part: RequestStep | None, history: History, node: int | None = None
    ) -> None:
        self.record, self.name, self.part, self.history, self.node = record, request, part, history, node

    def __getitem__(self, name: str) -> object:
        """The value; KeyError for a name that this event does not have. None where it is not known."""
        if name not in self._names:
            raise KeyError(name)
        if name in OF_VERDICT and self.part is not None:
            return self._number(getattr(self.part.verdict, OF_VERDICT[name]))
        found = getattr(self, f"_{name}", None)
        if found is None:
            return None
        return found()

    @cached_property
    def _names(self) -> Mapping[str, object]:
        return ANY_NAMES if self.part is None else STEP_NAMES if self.node is None else NODE_NAMES

    def before(self) -> EventEvidence | None:
        """Of the same request's step before this one; None for its first. For evidence of a step, not of a node."""
        request = self.history.requests.get(self.name)
        place = None if request is None or self.part is None else request.place_of(self.part.index)
        if request is None or not place:
            return None
        record = self.history.steps[request.engine_steps[place - 1]]
        return EventEvidence(record, self.name, request.steps[place - 1], self.history)

    def __iter__(self) -> Iterator[str]:
        """All names."""
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Of the step

    def _step(self) -> int:
        return self.record.step

    def _request(self) -> str:
        return self.name

    def _running(self) -> int:
        return self.record.running

    def _waiting(self) -> int:
        return self.record.waiting

    def _ms(self) -> float:
        return (self.record.end_ns - self.record.start_ns) / 1e6 if self.record.phases else 0.0

    # Of the request's part in it

    @property
    def _part(self) -> RequestStep:
        assert self.part is not None
        return self.part

    def _index(self) -> int:
        return self._part.index

    def _context(self) -> int:
        return self._part.context_len

    def _drafter(self) -> str:
        return self._part.drafter

    def _nodes(self) -> int:
        return len(self._part.tree)

    def _accepted(self) -> int:
        verdict = self._part.verdict
        return 0 if verdict is None else verdict.accepted

    def _committed(self) -> int:
        return 0 if self._part.verdict is None else self._accepted() + 1

    def _emitted(self) -> int:
        return self._part.emitted

    def _kind(self) -> str:
        verdict = self._part.verdict
        return "" if verdict is None else verdict.kind.value

    def _tau(self) -> float | None:
        """Over the request's steps up to this one."""
        request = self.history.requests.get(self.name)
        if request is None:
            return None
        place = request.place_of(self._part.index)
        return None if place is None else request.tau(place)

    def _forced(self) -> bool:
        verdict = self._part.verdict
        return verdict is not None and bool(len(verdict.forced))

    def _rule(self) -> str:
        return self._part.rule

    def _preceded(self) -> str | None:
        return None if self._part.preceded is None else self._part.preceded.value

    def _before_accepted(self) -> int | None:
        before = self.before()
        return None if before is None else before._accepted()

    def _gap(self) -> int | None:
        before = self.before()
        return None if before is None else self.record.step - before.record.step

    def _final(self) -> int | None:
        return None if self._part.verdict is None else self._part.verdict.token

    def _rejected(self) -> tuple[int, ...]:
        verdict = self._part.verdict
        gone = [] if verdict is None else verdict.outcome == Outcome.REJECTED
        return tuple(self._part.tree.token[gone].tolist())

    def _entropy(self) -> float | None:
        above = ROOT if self.node is None else int(self._part.tree.parent[self.node])
        return self._at_parent("entropy", above)

    def _final_entropy(self) -> float | None:
        return None if self._part.parents is None else self._part.parents.final_entropy

    def _at_parent(self, name: str, node: int) -> float | None:
        """Of a parent that was tried; None where it was not, or the capture does not hold it."""
        return AtParent(self._part, node).number(name)

    def _final_p(self) -> float | None:
        verdict = self._part.verdict
        return None if verdict is None else verdict.final_p

    def _final_coin(self) -> float | None:
        verdict = self._part.verdict
        return None if verdict is None else verdict.final_coin

    def _final_margin(self) -> float | None:
        verdict = self._part.verdict
        return None if verdict is None else verdict.final_margin

    def _near_tie(self) -> bool:
        ties = self.history.near_ties(self._part)
        return bool(ties) if self.node is None else self.node in ties

    def _token(self) -> int | None:
        if self.node is not None:
            return int(self._part.tree.token[self.node])
        return None if self._part.verdict is None else self._part.verdict.token

    def _text(self) -> str:
        if self.node is not None:
            tokens = [int(self._part.tree.token[self.node])]
        else:
            tokens = self._part.output()
        return self.history.vocabulary.text(tokens)

    # Of a node

    def _node(self) -> int | None:
        return self.node

    def _depth(self) -> int:
        return int(self._part.tree.depth[self.node])

    def _sibling(self) -> int:
        tree = self._part.tree
        return 1 + tree.children(int(tree.parent[self.node])).index(int(self.node or 0))

    def _siblings(self) -> int:
        return len(self._part.tree.children(self._parent()))

    def _parent(self) -> int:
        return int(self._part.tree.parent[self.node])

    def _parent_sibling(self) -> int:
        above, tree = self._parent(), self._part.tree
        return 0 if above == ROOT else 1 + tree.children(int(tree.parent[above])).index(above)

    def _of_node(self, name: str) -> float | None:
        """None where the node's parent was not tried, or the capture does not hold it."""
        notes = AtParent(self._part, self._parent()).notes
        return None if notes is None else self._number(getattr(notes, name))

    def _raw_p(self) -> float | None:
        return self._of_node("raw_p")

    def _rank(self) -> float | None:
        return self._of_node("rank")

    def _q_rank(self) -> float | None:
        return self._of_node("q_rank")

    def _choice_p(self) -> float | None:
        return self._at_parent("choice_p", self._parent())

    def _choice_rank(self) -> float | None:
        return self._at_parent("choice_rank", self._parent())

    def _number(self, values: object) -> float:
        return float(values[self.node])  # type: ignore[index]

    def _q(self) -> float:
        return self._number(self._part.tree.q)

    def _ahead(self) -> bool:
        return coin_sign(self._part.verdict, self.node) == BELOW  # type: ignore[arg-type]

    def _draft_p(self) -> float | None:
        return draft_ps(self._part)[self.node or 0]

    def _source(self) -> str | None:
        method, node = self._part.method, self.node
        return None if method is None or node is None else method.source_of(node) or None

    def _score(self) -> float | None:
        return None if self._part.notes is None else self._number(self._part.notes.score)


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    request: str
    evidence: EventEvidence
    node: int | None = None


def events(record: StepRecord, history: History, wanted: frozenset[EventKind]) -> Iterator[Event]:
    """The wanted events of a step, in the order in which they happened. The history may hold the step already."""
    for name in record.preempted:
        if EventKind.PREEMPT in wanted:
            yield Event(EventKind.PREEMPT, name, EventEvidence(record, name, None, history))
    for part in record.requests:
        for kind, node in _of_part(part, wanted):
            yield Event(kind, part.request, EventEvidence(record, part.request, part, history, node), node)
    for end in record.finished:
        failed = end.reason is FinishReason.ERROR
        for kind, happened in ((EventKind.ERROR, failed), (EventKind.FINISH, True)):
            if happened and kind in wanted:
                yield Event(kind, end.info.id, EventEvidence(record, end.info.id, None, history))


def _of_part(part: RequestStep, wanted: frozenset[EventKind]) -> Iterator[tuple[EventKind, int | None]]:
    """(kind, node) of what happened to one request."""
    verdict = part.verdict
    if EventKind.PREFILL in wanted and part.prefill_tokens:
        yield EventKind.PREFILL, None
    if EventKind.DRAFT in wanted and len(part.tree):
        yield EventKind.DRAFT, None
    if verdict is not None:
        if EventKind.REJECT in wanted or EventKind.ACCEPT in wanted:
            yield from _tried(part, wanted)
        if EventKind.BONUS in wanted and verdict.kind is FinalKind.BONUS:
            yield EventKind.BONUS, None
        if EventKind.RECOVER in wanted and verdict.kind is FinalKind.RECOVERED:
            yield EventKind.RECOVER, None
        if EventKind.EMIT in wanted and part.emitted:
            yield EventKind.EMIT, None
    if EventKind.STEP in wanted:
        yield EventKind.STEP, None


def _tried(part: RequestStep, wanted: frozenset[EventKind]) -> Iterator[tuple[EventKind, int]]:
    """Tried nodes in the order of their trials: level by level down the path."""
    assert part.verdict is not None
    outcome = part.verdict.outcome.tolist()
    for above in (ROOT, *part.verdict.path.tolist()):
        for node in part.tree.children(above):
            kind = EventKind.ACCEPT if outcome[node] == Outcome.ACCEPTED else EventKind.REJECT
            if outcome[node] != Outcome.UNTRIED and kind in wanted:
                yield kind, node
