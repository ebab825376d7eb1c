"""What a capture says about trees that were not drafted: each step's candidates and the probability of reaching them.

A candidate is a node that the drafter considered: a node of the tree, or one that re-ranking left out. Its *reach* is
the probability that a tree containing its path accepts it. If the drafts are deterministic, that is the product of p
along the path, whatever its siblings are: siblings x1, x2, .. are tried one after the other, a rejected one is zeroed
out of p, and so xi is accepted with probability
(1 - p(x1) - .. - p(xi-1)) * p(xi) / (1 - p(x1) - .. - p(xi-1)) = p(xi). Hence

    E[tokens accepted of a tree] = sum of reach over its nodes,

for every tree within the candidates at once, and with less noise than the outcomes have (a Rao-Blackwell estimate: the
coins are averaged out). Block and traversal verification accept as many from deterministic drafts: no lossless rule can
accept a path more often than the target generates it, and the standard rule already does. Token matching accepts a
child with probability p(child) however it was drawn.

For sampled drafts the standard rule's probabilities depend on q, and the reach is the outcome, 0 or 1: a smaller tree
that is closed under parents and elder siblings is verified alike, with the same coins, as far as it goes. Block and
traversal verification look ahead, so a tree that is cut short is verified differently: only the whole tree can be
judged then.

For greedy requests the reach is 0 or 1, and known for left-out candidates too: the path is what the target generated,
or it is not. The rank of the target's choice in the drafter's distribution (ParentNotes.choice_rank) covers even ranks
that the drafter did not consider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specscope.errors import UserError
from specscope.plans.plan import MAX_DEPTH
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.record.records import Outcome, RequestStep
from specscope.trace.record.rules import MATCH, SUM_ROUNDING, looks_ahead, sound
from specscope.trace.record.tree import ROOT, Bools, Doubles, Ints

MOST_STEPS = 4000  # that are judged, evenly spread over the run
MOST_CANDIDATES = 1_000_000  # over all steps: with huge trees fewer steps are judged
MOST_RANK = 32  # ranks of children that are distinguished
ALL_RANKS = 10**6  # known ranks of a node whose children of every rank are known


@dataclass(frozen=True)
class RecordedCandidates:
    """The candidates of S steps, padded to C per step, in the drafter's order: best first, parents before children.

    `parent` is C for the root's children and for padding, whose depth is 0. `known`: how many ranks of children are
    known for each candidate, and in column C for the root; a child of a known rank that is absent cannot be accepted.
    """

    parent: Ints  # [S, C]
    depth: Ints  # [S, C]
    rank: Ints  # [S, C] among its siblings, likeliest first
    reach: Doubles  # [S, C] nan where it is not known
    q: Doubles  # [S, C] the drafter's probability at the parent; nan where it is not known
    in_tree: Bools  # [S, C] nodes of the recorded tree
    known: Ints  # [S, C + 1]
    looked: Bools  # [S, C] what the drafter considered; other candidates are known from the target's rank alone
    request: Ints  # [S] number of the request
    tokens: Ints  # [S] that the step committed
    undrafted: Ints  # [R] steps of each request in which nothing was drafted
    drafts: int  # steps with drafts in the capture, of which S are judged
    committed: int  # tokens of those steps
    ranked: bool  # whether candidates have scores, so that dynamic trees can be judged
    lookup: bool  # the drafter is prompt lookup: what is not drafted does not exist
    whole: bool  # only the whole tree can be judged
    sampled: bool  # some drafts were sampled: static trees only

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self.undrafted)

    @property
    def judged_steps(self) -> int:
        """Steps that are judged."""
        return len(self.request)

    @property
    def max_depth(self) -> int:
        """The largest depth of a candidate in any step."""
        return int(self.depth.max(initial=0))

    @property
    def max_rank(self) -> int:
        """The largest number of ranks known below a node."""
        return int(self.rank.max(initial=0)) + 1

    @property
    def max_leaves(self) -> int:
        """Paths of a step's candidates, at most: prompt lookup's continuations."""
        return max(
            int(d.astype(bool).sum()) - len(set(p.tolist())) + 1 for d, p in zip(self.depth, self.parent, strict=True)
        )

    @property
    def max_looked(self) -> int:
        """The largest number of children of a node that the drafter considered."""
        return int(self.rank[self.looked].max(initial=0)) + 1


def evidence(histories: Sequence[History]) -> RecordedCandidates:
    """The candidates in captures of one run configuration. Raises UserError where there are none to judge."""
    steps: list[tuple[RequestHistory, int, int]] = []
    undrafted: list[int] = []
    for history in histories:
        for request in history.requests.values():
            judged = [step for step in request.steps if step.verdict is not None]
            steps += [(request, place, len(undrafted)) for place, step in enumerate(request.steps) if _usable(step)]
            undrafted.append(sum(not len(step.tree) for step in judged))
    if not steps:
        raise UserError(_why_nothing(histories))
    if any(request.steps[place].is_ranked_with_text for request, place, _ in steps):
        raise UserError(
            "the capture's trees are from a text and a model, ranked by what was accepted before: tune cannot tell "
            "what others would have held. Record with one drafter, such as --drafter eagle --tree dynamic:32"
        )
    widest = max(_looked_at(request.steps[place]) for request, place, _ in steps)
    count = min(len(steps), MOST_STEPS, max(MOST_CANDIDATES // widest, 20))
    chosen = [steps[i * len(steps) // count] for i in range(count)]
    parts = [request.steps[place] for request, place, _ in chosen]
    sampled = [part.tree.is_sampled for part in parts]
    texts = _Texts()
    return _pad(
        [_candidates(request.steps[place], texts.after(request, place)) for request, place, _ in chosen],
        request=np.array([number for _, _, number in chosen], np.int32),
        tokens=np.array([len(part.tokens()) for part in parts], np.int32),
        undrafted=np.array(undrafted, np.int32),
        drafts=len(steps),
        committed=sum(len(request.steps[place].tokens()) for request, place, _ in steps),
        ranked=all(part.notes is not None for part in parts) and not any(sampled),
        lookup=all(part.drafter == "ngram" for part in parts),
        whole=any(s and looks_ahead(part.rule) for s, part in zip(sampled, parts, strict=True)),
        sampled=any(sampled),
    )


def _usable(step: RequestStep) -> bool:
    verdict = step.verdict
    if verdict is None or not len(step.tree) or step.lossy or len(verdict.forced):
        return False
    scores = [] if step.notes is None else [*step.notes.score.tolist(), *step.notes.dropped_score.tolist()]
    wrong = np.isnan(sound(verdict.p)).any() or any(not score <= SUM_ROUNDING for score in scores)
    return not wrong  # values that are no probabilities say nothing about other trees


def _looked_at(step: RequestStep) -> int:
    """Nodes of its tree, and those that re-ranking left out."""
    return len(step.tree) + (0 if step.notes is None else len(step.notes.dropped_token))


def _why_nothing(histories: Sequence[History]) -> str:
    steps = [step for history in histories for request in history.requests.values() for step in request.steps]
    if not any(len(step.tree) for step in steps):
        return "the capture has no drafts: record with a drafter, such as --drafter eagle --tree dynamic:32"
    return (
        "every draft of the capture was judged by a lossy rule or forced, or by numbers that are no probabilities, so "
        "its acceptance is no drafter's"
    )


@dataclass
class _Candidates:
    """One step's candidates as lists: nodes of the tree, those that re-ranking left out, those known by rank alone."""

    parent: list[int]
    rank: list[int]
    depth: list[int]
    made: list[int]  # place in the order in which the drafter made them
    score: list[float]  # log probability of the path
    q: list[float]
    reach: list[float]
    known: list[int]  # ranks of children that are known; the root's last
    nodes: int  # of the tree
    looked: int  # `nodes` and what re-ranking left out

    def add(self, above: int, rank: int, q: float) -> None:
        """Add a child that the drafter did not consider and the target chose."""
        self.parent.append(above)
        self.rank.append(rank)
        self.depth.append(1 if above == ROOT else self.depth[above] + 1)
        self.made.append(len(self.made))
        self.score.append((0.0 if above == ROOT else self.score[above]) + float(np.log(max(q, 1e-12))))
        self.q.append(q)
        self.reach.append(1.0)
        self.known.insert(len(self.known) - 1, 0)


def _candidates(part: RequestStep, future: Sequence[int] | None) -> _Candidates:
    """The candidates of one step. `future`: what a greedy target generated after the root; None if not greedy."""
    notes, tree = part.notes, part.tree
    parent, token = tree.parent.tolist(), tree.token.tolist()
    score = [0.0] * len(parent)
    if notes is not None:
        parent, token = [*parent, *notes.dropped_parent.tolist()], [*token, *notes.dropped_token.tolist()]
        score = [*notes.score.tolist(), *notes.dropped_score.tolist()]
    known = [0] * (len(parent) + 1)
    for above in parent:
        known[above] += 1  # ROOT is the last
    rank, depth, made = _as_made(parent)
    q = _q(score, parent) if notes is not None else [float("nan")] * len(parent)
    reach = _reach(part, parent, token, depth, made, future)
    candidates = _Candidates(parent, rank, depth, made, score, q, reach, known, len(tree), len(parent))
    if part.drafter == "ngram":
        candidates.known = [ALL_RANKS] * len(known)
    elif future is not None:
        _beyond(part, candidates)
    return candidates


def _as_made(parent: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Each candidate's rank among its siblings and depth, and its place in the order in which the drafter made them.

    Level by level, parents in their order, children as listed: what re-ranking left out comes after what it kept under
    the same parent, because a parent's likelier children have the higher score.
    """
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    rank, depth, made = [0] * len(parent), [0] * len(parent), [0] * len(parent)
    level, deep, count = [ROOT], 0, 0
    while level:
        deep += 1
        below: list[int] = []
        for above in level:
            for place, node in enumerate(children.get(above, ())):
                rank[node], depth[node], made[node], count = place, deep, count, count + 1
                below.append(node)
        level = below
    return rank, depth, made


def _q(score: Sequence[float], parent: Sequence[int]) -> list[float]:
    """The drafter's probability of each candidate at its parent, from the log probabilities of their paths."""
    above = np.array([0.0 if up == ROOT else score[up] for up in parent])
    q: list[float] = np.exp(np.minimum(np.array(score) - above, 0)).tolist()
    return q


def _reach(
    part: RequestStep,
    parent: Sequence[int],
    token: Sequence[int],
    depth: Sequence[int],
    made: Sequence[int],
    future: Sequence[int] | None,
) -> list[float]:
    """The reach of every candidate; see the head of this file."""
    verdict, n = part.verdict, len(part.tree)
    assert verdict is not None
    by_outcome = part.rule != MATCH and part.tree.is_sampled
    chances = (verdict.outcome == Outcome.ACCEPTED if by_outcome else verdict.p).astype(float).tolist()
    reach = [0.0] * len(parent)
    for node in sorted(range(len(parent)), key=made.__getitem__):
        above = 1.0 if parent[node] == ROOT else reach[parent[node]]
        if node < n:
            reach[node] = above * chances[node]
        elif above and (future is None or depth[node] > len(future)):
            reach[node] = float("nan")
        else:
            reach[node] = above * (future is not None and above != 0 and token[node] == future[depth[node] - 1])
    return reach


def _beyond(part: RequestStep, candidates: _Candidates) -> None:
    """Add a greedy request's choices that the drafter did not consider; tried parents record their rank."""
    notes = part.parents
    if notes is None:
        return
    for row, node in enumerate(notes.node.tolist()):
        if int(notes.choice[row]) != int(notes.top[row, 0]):
            continue  # penalties or a bias decided, and the ranks are of raw logits
        looked_at, choice = candidates.known[node], int(notes.choice_rank[row])
        candidates.known[node] = ALL_RANKS
        if looked_at < choice <= MOST_RANK:
            candidates.add(node, choice - 1, float(notes.choice_q[row]))


class _Texts:
    """What greedy targets generated; caches the text of the request that was last asked for."""

    def __init__(self) -> None:
        self._of: RequestHistory | None = None
        self._text: list[int] = []
        self._starts: list[int] = []

    def after(self, request: RequestHistory, place: int) -> list[int] | None:
        """The text after the root of a step; None where the request is not greedy."""
        if request.info is None or not request.info.params.greedy:
            return None
        if self._of is not request:
            self._of, self._text, self._starts = request, [], []
            for step in request.steps:
                self._starts.append(len(self._text))
                self._text += step.tokens()
        return self._text[self._starts[place] : self._starts[place] + MAX_DEPTH]


def _pad(steps: Sequence[_Candidates], **rest: Any) -> RecordedCandidates:  # noqa: ANN401
    """Steps as arrays, each in the drafter's order: by score, equal scores in the order in which they were made."""
    rows, width = len(steps), max(len(step.parent) for step in steps)
    parent = np.full((rows, width), width, np.int32)
    depth, rank = np.zeros((2, rows, width), np.int32)
    reach, q = np.zeros((2, rows, width))
    in_tree, looked = np.zeros((2, rows, width), np.bool_)
    known = np.zeros((rows, width + 1), np.int32)
    for row, step in enumerate(steps):
        order = sorted(range(len(step.parent)), key=lambda i: (-step.score[i], step.made[i]))
        place = {node: index for index, node in enumerate(order)} | {ROOT: width}
        count = len(order)
        parent[row, :count] = [place[step.parent[i]] for i in order]
        for array, values in ((depth, step.depth), (rank, step.rank), (reach, step.reach), (q, step.q)):
            array[row, :count] = [values[i] for i in order]
        in_tree[row, :count] = [i < step.nodes for i in order]
        looked[row, :count] = [i < step.looked for i in order]
        known[row, :count], known[row, width] = [step.known[i] for i in order], step.known[-1]
    return RecordedCandidates(
        parent=parent, depth=depth, rank=rank, reach=reach, q=q, in_tree=in_tree, known=known, looked=looked, **rest
    )
