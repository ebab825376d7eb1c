"""What a request's step says besides its tree and verdict: of its drafter, its parents, its method, its form.

Whichever engine computed them, ParentsBuilder makes ParentNotes from rows of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specscope.trace.record.declared import (
    ArrayEq,
    Count,
    Counted,
    LogProbability,
    Name,
    Nats,
    Norm,
    Parent,
    Probability,
    SquareNats,
    Token,
    Told,
    Wire,
    empty,
)
from specscope.trace.record.privacy import TokenIds
from specscope.trace.record.tree import DrawDoubles, Floats, Ints, NodeProbs

MODEL, TEXT, BOTH = 0, 1, 2
SOURCES = ("model", "text", "both")  # who drafted a node, by these numbers
Source = Annotated[int, Meta(ge=0, lt=len(SOURCES), title="0, 1 or 2")]


@dataclass(frozen=True, eq=False)
class DraftNotes(ArrayEq):
    """What a drafter that is a model thought of its tree, and what it left out. Filled by tree_builder.py."""

    PREFIX: ClassVar = "specscope.draft."
    prob: NodeProbs  # the drafter's probability of the node's token at its parent; 0 where only a text has the node
    # its log probability of the whole path down to the node, or the log of the acceptance that a combined drafter
    # expects: what re-ranking goes by
    score: Annotated[Floats, Wire(LogProbability, "n")]
    dropped_token: Annotated[TokenIds, Wire(Token, "d")]  # of the dropped nodes
    dropped_parent: Annotated[Ints, Wire(Parent, "d")]  # a node, a dropped node (n + its place), or ROOT
    dropped_score: Annotated[Floats, Wire(LogProbability, "d")]  # as `score`
    rows: Annotated[Ints, Wire(Count, "passes")] = empty(np.int32)  # rows that each of its passes fed
    # with full evidence, what the first pass fed an EAGLE head: its last r rows (of a long prompt, a chunk's).
    # the row at position t is the target's features of position t, with the token at t + 1. Long ones are texts of JSON
    fed_token: Annotated[TokenIds, Wire(Token, "r", packed=True)] = empty(np.int32)
    fed_position: Annotated[Ints, Wire(Count, "r", packed=True)] = empty(np.int32)  # the position of each of these rows
    # L2 norm of each layer's features; on the wire row after row
    fed_norms: Annotated[Floats, Wire(Norm, "r,l", packed=True)] = empty(np.float32, (0, 0))
    # where the nodes are draws: how far q's cumulative sum would have to move for another token to be drawn
    draw_margin: DrawDoubles = empty(np.float64)
    # the coin that drew the token, in (0, 1); 0 where the node is no draw, and where its coin is not known
    coin: DrawDoubles = empty(np.float64)
    # the lower end of the token's interval: coin lies in [low, low + q). That is of the distribution function that this
    # draw was made from, over the target's token ids in their order: q at the parent, without the earlier siblings
    # where nothing is put back, and renormalised (so is the q here). 0 where there is no coin
    low: DrawDoubles = empty(np.float64)
    # committed tokens in the drafter's KV cache when the tree was begun
    cached: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0


@dataclass(frozen=True, eq=False)
class ParentNotes(ArrayEq):
    """What target and drafter gave at each node whose children were tried. Filled by speculate/verify/verifier.py.

    Arrays are over these k parents: the root, then the accepted nodes that have children. `p` and `q` are what is
    sampled from, after temperature and rules; raw is before. Entropy H = sum(-p log p) and varentropy
    sum(p log^2 p) - H^2 are in nats. A drafter that is no model has no distribution of its own: m is 0 then, and
    what says so is 0.
    """

    node: Annotated[Ints, Wire(Parent, "k")]  # ROOT, or a node
    # the target's likeliest tokens, raw; t is 4, or the vocabulary's size where that is less
    top: Annotated[TokenIds, Wire(Token, "k,t")]
    top_p: Annotated[Floats, Wire(Probability, "k,t")]  # their raw probabilities
    choice: Annotated[TokenIds, Wire(Token, "k")]  # the likeliest token of p
    choice_p: Annotated[Floats, Wire(Probability, "k")]  # its p
    entropy: Annotated[Floats, Wire(Nats, "k")]  # of p
    varentropy: Annotated[Floats, Wire(SquareNats, "k")]  # of p
    q_entropy: Annotated[Floats, Wire(Nats, "k")]  # of q; 0 where the children are deterministic
    q_varentropy: Annotated[Floats, Wire(SquareNats, "k")]  # of q, likewise
    draft_top: Annotated[TokenIds, Wire(Token, "k,m")]  # the drafter's likeliest tokens, raw
    draft_top_p: Annotated[Floats, Wire(Probability, "k,m")]  # their raw probabilities
    # rank of the target's raw first choice in the drafter's raw distribution; 0 if outside
    choice_rank: Annotated[Ints, Wire(Count, "k")]
    choice_q: Annotated[Floats, Wire(Probability, "k")]  # its raw probability there
    # the target's raw mass on tokens outside the drafter's vocabulary
    outside: Annotated[Floats, Wire(Probability, "k")]
    raw_p: NodeProbs  # the target's raw probability of the node's token; 0 where the parent was not tried
    rank: Annotated[Ints, Wire(Count, "n")]  # of the token in p, from 1; 0 where its p is 0, or it was not tried
    # of the token in q; 0 where the node is deterministic or not tried. Only one token is 1, also where several have as
    # much: so the chance of a 1 is that token's q
    q_rank: Annotated[Ints, Wire(Count, "n")]
    final_entropy: Annotated[float, Wire(Nats)]  # of the distribution that the final token was drawn from
    final_varentropy: Annotated[float, Wire(SquareNats)]  # likewise
    final_target_p: Annotated[float, Wire(Probability)]  # of the final token in p before any rejection

    def named(self, shown: Collection[int]) -> list[int]:
        """The likeliest tokens, ascending, without those that are shown already."""
        return sorted({*self.top.ravel().tolist(), *self.draft_top.ravel().tolist()}.difference(shown))


@dataclass(frozen=True, eq=False)
class MethodNotes(ArrayEq):
    """Of one tree of n nodes. What a method does not have is empty, 0, "" or False.

    A block drafter (DFlash, DSpark, P-EAGLE) drafts all depths in one pass, and may say how sure it is of each node. An
    MTP head has modules, each for a depth. Suffix decoding goes on as a text did that it has seen. Two that drafted
    together, in older captures, say of each node who drafted it; their confidence is the chance that was expected.
    """

    confidence: Annotated[Floats, Wire(Probability, "n?")] = empty(np.float32)  # that a node is accepted
    module: Annotated[Ints, Wire(Count, "n?")] = empty(np.int32)  # which module drafted it, from 0
    source: Annotated[Ints, Wire(Source, "n?")] = empty(np.int32)  # of SOURCES, where two draft together
    one_pass: Annotated[bool, Wire()] = False  # all depths came from one pass
    unverified: Counted = 0  # drafts beyond the tree that were not verified
    match_length: Counted = 0  # tokens of the context that were found
    match_count: Counted = 0  # how often
    match_source: Annotated[str, Wire(Name | None)] = ""  # where: the prompt, the request's output, other requests

    def source_of(self, node: int) -> str:
        """Who drafted a node: model, text or both; "" where one drafter works alone."""
        return SOURCES[self.source[node]] if len(self.source) else ""


@dataclass(frozen=True, eq=False)
class FormNotes(ArrayEq):
    """At the k nodes that the step came by: the root and the accepted path. Empty with lean evidence."""

    node: Annotated[Ints, Wire(Parent, "s", told=Told.ALWAYS)] = empty(np.int32)  # ROOT, or a node
    # the model's own mass on the tokens that were refused
    removed: Annotated[Floats, Wire(Probability, "s", told=Told.ALWAYS)] = empty(np.float32)
    # drafts of a text that were refused before they were verified
    pruned: Annotated[int, Wire(Count, told=Told.ALWAYS)] = 0


@dataclass(frozen=True)
class OutputLogprob:
    """Of one output token, for both of OpenAI's layouts."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs, falling; the token may not be among them


@dataclass(frozen=True, eq=False)
class Logprobs(ArrayEq):
    """Of the tokens that a step emitted, each in the distribution behind the tokens before it.

    vLLM's raw_logprobs: the log-softmax of the logits, before bias, penalties, form, temperature and what follows.
    """

    logprob: Annotated[Floats, Wire(LogProbability, "e")]  # of the token
    top: Annotated[TokenIds, Wire(Token, "e,w")]  # the likeliest tokens
    top_logprob: Annotated[Floats, Wire(LogProbability, "e,w")]  # theirs, falling

    def each(self, tokens: Sequence[int]) -> list[OutputLogprob]:
        rows = zip(self.top.tolist(), self.top_logprob.tolist(), strict=True)
        both = zip(tokens, self.logprob.tolist(), rows, strict=True)
        return [OutputLogprob(token, logprob, tuple(zip(*row, strict=True))) for token, logprob, row in both]


TOP = 4
TINY = 2.0**-126
FEW = 64  # tokens of a row
SHORT = 1024  # numbers to sort
LITTLE = 0.1  # of a row's mass
Indices = NDArray[Any]
Spread = tuple[float, float]  # entropy and varentropy, in nats


class RawRow:
    """A model's distribution after some tokens, before any rule. Not divided by its mass: few tokens are read."""

    def __init__(self, weights: Floats, mass: float) -> None:
        self.weights = weights  # [V] not below 0; `top` writes into them, and puts them back
        self._mass = mass  # their sum

    @staticmethod
    def of(logits: Floats) -> RawRow:
        """A row from logits float32 [V]. In numpy: torch would wake its threads for each row, and wait for them."""
        weights = logits - logits.max()
        np.exp(weights, out=weights)
        return RawRow(weights, weights.sum())

    def p(self, tokens: Indices) -> Floats:
        probs: Floats = self.weights[tokens] / self._mass
        return probs

    def top(self) -> tuple[Indices, Floats]:
        row, count = self.weights, min(TOP, len(self.weights))
        tokens, weights = np.zeros(count, np.int64), np.zeros(count, np.float32)
        for place in range(count):  # four times argmax is a third of numpy's partition, and an eighth of torch's topk
            tokens[place] = best = row.argmax()
            weights[place], row[best] = row[best], -1
        row[tokens] = weights  # as it was
        return tokens, weights / self._mass


class ParentsBuilder:
    """The notes of one tree while they are filled, one tried parent after another."""

    def __init__(self, nodes: int, parents: int) -> None:
        self.node: dict[str, Any] = {"raw_p": np.zeros(nodes, np.float32)}
        self.node |= {name: np.zeros(nodes, np.int32) for name in ("rank", "q_rank")}
        some = ("choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy", "choice_q", "outside")
        self.parent: dict[str, Any] = {name: np.zeros(parents, np.float32) for name in some}
        self.parent |= {name: np.zeros(parents, np.int32) for name in ("choice", "choice_rank")}
        self.parent |= {name: np.zeros((parents, 0), np.int32) for name in ("top", "draft_top")}
        self.parent |= {name: np.zeros((parents, 0), np.float32) for name in ("top_p", "draft_top_p")}

    def raw(self, index: int, row: RawRow, children: Indices, tokens: Indices) -> None:
        """What the target gave at parent number `index`, before any rule. `tokens` are those of its children."""
        self._keep("top", index, *row.top())
        self.node["raw_p"][children] = row.p(tokens)

    def chosen(self, index: int, choice: int, children: Indices, tokens: Indices) -> None:
        """A greedy target: all of p is at one token."""
        self.parent["choice"][index], self.parent["choice_p"][index] = choice, 1
        self.node["rank"][children] = tokens == choice

    def target(self, index: int, p: Floats, children: Indices, tokens: Indices) -> None:
        best = int(p.argmax())
        self.parent["choice"][index], self.parent["choice_p"][index] = best, p[best]
        self.parent["entropy"][index], self.parent["varentropy"][index] = spread(p)
        self.node["rank"][children] = ranks(p, tokens)

    def drawn(self, index: int, q: Floats, children: Indices, tokens: Indices) -> None:
        self.parent["q_entropy"][index], self.parent["q_varentropy"][index] = spread(q)
        placed = ranks(q, tokens)
        self.node["q_rank"][children] = np.where((placed == 1) & (tokens != q.argmax()), 2, placed)

    def drafter(self, index: int, q: RawRow, raw: RawRow, d2t: Indices | None) -> None:
        """The drafter's own, where it is a model. `d2t`: the target's token behind each of a reduced vocabulary."""
        choice = int(self.parent["top"][index, 0])
        tokens, probs = q.top()
        place = np.array([choice])
        if d2t is not None:
            tokens, place = d2t[tokens], np.flatnonzero(d2t == choice)
            self.parent["outside"][index] = max(1 - float(raw.p(d2t).sum()), 0)
        self._keep("draft_top", index, tokens, probs)
        if len(place):
            self.parent["choice_rank"][index] = 1 + np.count_nonzero(q.weights > q.weights[place[0]])
            self.parent["choice_q"][index] = q.p(place)[0]

    def _keep(self, name: str, index: int, tokens: Indices, probs: Floats) -> None:
        if not self.parent[name].shape[1]:
            parents = len(self.parent[name])
            self.parent[name] = np.zeros((parents, len(tokens)), np.int32)
            self.parent[name + "_p"] = np.zeros((parents, len(tokens)), np.float32)
        self.parent[name][index], self.parent[name + "_p"][index] = tokens, probs

    def done(self, nodes: Ints, final: Spread, final_target_p: float) -> ParentNotes:
        """`nodes` [k]: the parents; `final`: of what the final token was drawn from."""
        last: dict[str, Any] = {"final_entropy": final[0], "final_varentropy": final[1]}
        return ParentNotes(nodes, **self.parent, **self.node, **last, final_target_p=final_target_p)


def spread(row: Floats) -> Spread:
    """Entropy and varentropy of a row [V]."""
    logs = np.maximum(row, TINY)
    np.log(logs, out=logs)
    entropy = -float(row @ logs)
    logs *= logs
    return max(entropy, 0.0), max(float(row @ logs) - entropy * entropy, 0.0)


def spread_without(whole: Spread, p: float, total: float) -> Spread | None:
    """Entropy and varentropy of a row without one token of probability `p`, the rest normalised.

    `total`: the row's sum. Where a tenth of the mass is left, a softmax that is off by 5e-6 makes a difference.

    With m = total - p, A = H + p log p and B = V + H^2 - p log^2 p: the entropy is A/m + log m, and the varentropy
    B/m - (A/m)^2. None where little is left: the error of a float32 sum is divided by m.
    """
    mass = total - p
    if mass < LITTLE:
        return None
    log = math.log(max(p, TINY))
    first = (whole[0] + p * log) / mass
    second = (whole[1] + whole[0] ** 2 - p * log**2) / mass
    return max(first + math.log(mass), 0.0), max(second - first**2, 0.0)


def ranks(row: Floats, tokens: Indices) -> Indices:
    """The rank of each token in a row [V], from 1; 0 where its probability is 0."""
    values = row[tokens]
    is_above = row > values.min()
    if len(tokens) <= FEW and np.count_nonzero(is_above) > SHORT:  # a pass for each needs less than to sort so many
        higher = np.array([np.count_nonzero(row > value) for value in values])
    else:
        above = np.sort(row[is_above])
        higher = len(above) - np.searchsorted(above, values, "right")
    return np.where(values > 0, 1 + higher, 0)
