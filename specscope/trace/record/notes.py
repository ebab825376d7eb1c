"""What a request's step says besides its tree and verdict: of its drafter, its parents, its method, its form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from specscope.trace.record.declared import (
    ArrayEq,
    Count,
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
from specscope.trace.record.tree import Doubles, Floats, Ints

TEXTS, MODELS = ("suffix", "ngram"), ("eagle", "draft_model")  # in older captures one of each may draft together
MODEL_NAMES = {"eagle": "head", "draft_model": "draft model"}
MODEL, TEXT, BOTH = 0, 1, 2
SOURCES = ("model", "text", "both")  # who drafted a node, by these numbers
Source = Annotated[int, Meta(ge=0, lt=len(SOURCES), title="0, 1 or 2")]


@dataclass(frozen=True, eq=False)
class DraftNotes(ArrayEq):
    """What a drafter that is a model thought of its tree, and what it left out. Filled by tree_builder.py.

    Dropped nodes are those that re-ranking left out (EAGLE-2); they are numbered on after the n nodes of the tree.
    """

    # the drafter's probability of the node's token at its parent; 0 where only a text has the node
    prob: Annotated[Floats, Wire("specscope.draft.prob", Probability, "n")]
    # its log probability of the whole path down to the node, or the log of the acceptance that a combined drafter
    # expects: what re-ranking goes by
    score: Annotated[Floats, Wire("specscope.draft.score", LogProbability, "n")]
    dropped_token: Annotated[TokenIds, Wire("specscope.draft.dropped_token", Token, "d")]  # of the dropped nodes
    # a node, a dropped node (n + its place), or ROOT
    dropped_parent: Annotated[Ints, Wire("specscope.draft.dropped_parent", Parent, "d")]
    dropped_score: Annotated[Floats, Wire("specscope.draft.dropped_score", LogProbability, "d")]  # as `score`
    # rows that each of its passes fed
    rows: Annotated[Ints, Wire("specscope.draft.rows", Count, "passes")] = empty(np.int32)
    # with full evidence, what the first pass fed an EAGLE head: its last r rows (of a long prompt, a chunk's).
    # the row at position t is the target's features of position t, with the token at t + 1. Long ones are texts of JSON
    fed_token: Annotated[TokenIds, Wire("specscope.draft.fed_token", Token, "r", packed=True)] = empty(np.int32)
    # the position of each of these rows
    fed_position: Annotated[Ints, Wire("specscope.draft.fed_position", Count, "r", packed=True)] = empty(np.int32)
    # L2 norm of each layer's features; on the wire row after row
    fed_norms: Annotated[Floats, Wire("specscope.draft.fed_norms", Norm, "r,l", packed=True)] = empty(
        np.float32, (0, 0)
    )
    # where the nodes are draws: how far q's cumulative sum would have to move for another token to be drawn
    draw_margin: Annotated[Doubles, Wire("specscope.draft.draw_margin", Probability, "n?")] = empty(np.float64)
    # the coin that drew the token, in (0, 1); 0 where the node is no draw, and where its coin is not known
    coin: Annotated[Doubles, Wire("specscope.draft.coin", Probability, "n?")] = empty(np.float64)
    # the lower end of the token's interval: coin lies in [low, low + q). That is of the distribution function that this
    # draw was made from, over the target's token ids in their order: q at the parent, without the earlier siblings
    # where nothing is put back, and renormalised (so is the q here). 0 where there is no coin
    low: Annotated[Doubles, Wire("specscope.draft.low", Probability, "n?")] = empty(np.float64)
    # committed tokens in the drafter's KV cache when the tree was begun
    cached: Annotated[int, Wire("specscope.draft.cached", Count, told=Told.ALWAYS)] = 0


@dataclass(frozen=True, eq=False)
class ParentNotes(ArrayEq):
    """What target and drafter gave at each node whose children were tried. Filled by speculate/verify/parents.py.

    Arrays are over these k parents: the root, then the accepted nodes that have children. `p` and `q` are what is
    sampled from, after temperature and rules; raw is before. Entropy H = sum(-p log p) and varentropy
    sum(p log^2 p) - H^2 are in nats. A drafter that is no model has no distribution of its own: m is 0 then, and
    what says so is 0.
    """

    node: Annotated[Ints, Wire("", Parent, "k")]  # ROOT, or a node
    # the target's likeliest tokens, raw; t is 4, or the vocabulary's size where that is less
    top: Annotated[TokenIds, Wire("", Token, "k,t")]
    top_p: Annotated[Floats, Wire("", Probability, "k,t")]  # their raw probabilities
    choice: Annotated[TokenIds, Wire("", Token, "k")]  # the likeliest token of p
    choice_p: Annotated[Floats, Wire("", Probability, "k")]  # its p
    entropy: Annotated[Floats, Wire("", Nats, "k")]  # of p
    varentropy: Annotated[Floats, Wire("", SquareNats, "k")]  # of p
    q_entropy: Annotated[Floats, Wire("", Nats, "k")]  # of q; 0 where the children are deterministic
    q_varentropy: Annotated[Floats, Wire("", SquareNats, "k")]  # of q, likewise
    draft_top: Annotated[TokenIds, Wire("", Token, "k,m")]  # the drafter's likeliest tokens, raw
    draft_top_p: Annotated[Floats, Wire("", Probability, "k,m")]  # their raw probabilities
    # rank of the target's raw first choice in the drafter's raw distribution; 0 if outside
    choice_rank: Annotated[Ints, Wire("", Count, "k")]
    choice_q: Annotated[Floats, Wire("", Probability, "k")]  # its raw probability there
    # the target's raw mass on tokens outside the drafter's vocabulary
    outside: Annotated[Floats, Wire("", Probability, "k")]
    # the target's raw probability of the node's token; 0 where the parent was not tried
    raw_p: Annotated[Floats, Wire("", Probability, "n")]
    rank: Annotated[Ints, Wire("", Count, "n")]  # of the token in p, from 1; 0 where its p is 0, or it was not tried
    # of the token in q; 0 where the node is deterministic or not tried. Only one token is 1, also where several have as
    # much: so the chance of a 1 is that token's q
    q_rank: Annotated[Ints, Wire("", Count, "n")]
    final_entropy: Annotated[float, Wire("", Nats)]  # of the distribution that the final token was drawn from
    final_varentropy: Annotated[float, Wire("", SquareNats)]  # likewise
    final_target_p: Annotated[float, Wire("", Probability)]  # of the final token in p before any rejection

    def named(self, shown: Collection[int]) -> list[int]:
        """The likeliest tokens, ascending, without those that are shown already."""
        return sorted({*self.top.ravel().tolist(), *self.draft_top.ravel().tolist()}.difference(shown))


@dataclass(frozen=True, eq=False)
class MethodNotes(ArrayEq):
    """Of one tree of n nodes. What a method does not have is empty, 0, "" or False. Filled by drafters that look into
    texts, and by other engines' witnesses.

    A block drafter (DFlash, DSpark, P-EAGLE) drafts all depths in one pass, and may say how sure it is of each node.
    With an adaptive budget fewer are verified than were drafted: the rest are not in the tree. An MTP head has modules,
    each for a depth. Suffix decoding goes on as a text did that it has seen. Two that drafted together, in older
    captures, say of each node whether the model drafted it, the text, or both. Their confidence is the chance that was
    expected.
    """

    # that a node is accepted
    confidence: Annotated[Floats, Wire("", Probability, "n?")] = empty(np.float32)
    # which module drafted it, from 0
    module: Annotated[Ints, Wire("", Count, "n?")] = empty(np.int32)
    # of SOURCES, where two draft together
    source: Annotated[Ints, Wire("", Source, "n?")] = empty(np.int32)
    one_pass: Annotated[bool, Wire()] = False  # all depths came from one pass
    unverified: Annotated[int, Wire("", Count)] = 0  # drafts beyond the tree that were not verified
    match_length: Annotated[int, Wire("", Count)] = 0  # tokens of the context that were found
    match_count: Annotated[int, Wire("", Count)] = 0  # how often
    match_source: Annotated[str, Wire("", Name | None)] = ""  # where: the prompt, the request's output, other requests

    def source_of(self, node: int) -> str:
        """Who drafted a node: model, text or both; "" where one drafter works alone."""
        return SOURCES[self.source[node]] if len(self.source) else ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is told."""
        return self == MethodNotes()


def text_part(drafter: str) -> str:
    """The part of our drafter that searches the text: suffix or ngram, alone or combined; "" for none."""
    name = drafter.partition("+")[0]
    return name if name in TEXTS else ""


def model_part(drafter: str) -> str:
    """The part of our drafter that runs a model: eagle or draft_model, alone or combined; "" for none."""
    name = drafter.rpartition("+")[2]
    return name if name in MODELS else ""


@dataclass(frozen=True, eq=False)
class FormNotes(ArrayEq):
    """At the k nodes that the step came by: the root and the accepted path. Empty with lean evidence."""

    # ROOT, or a node
    node: Annotated[Ints, Wire("", Parent, "s", told=Told.ALWAYS)] = empty(np.int32)
    # the model's own mass on the tokens that were refused
    removed: Annotated[Floats, Wire("", Probability, "s", told=Told.ALWAYS)] = empty(np.float32)
    # drafts of a text that were refused before they were verified
    pruned: Annotated[int, Wire("", Count, told=Told.ALWAYS)] = 0


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

    logprob: Annotated[Floats, Wire("", LogProbability, "e")]  # of the token
    top: Annotated[TokenIds, Wire("", Token, "e,w")]  # the likeliest tokens
    top_logprob: Annotated[Floats, Wire("", LogProbability, "e,w")]  # theirs, falling

    def each(self, tokens: Sequence[int]) -> list[OutputLogprob]:
        """An OutputLogprob for each of the step's emitted tokens."""
        rows = zip(self.top.tolist(), self.top_logprob.tolist(), strict=True)
        both = zip(tokens, self.logprob.tolist(), rows, strict=True)
        return [OutputLogprob(token, logprob, tuple(zip(*row, strict=True))) for token, logprob, row in both]
