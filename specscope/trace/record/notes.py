"""What target and drafter thought of a tree: the notes of a request's step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from specscope.trace.record.declared import (
    Count,
    LogProbability,
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
from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.privacy import TokenIds
from specscope.trace.record.tree import Doubles, Floats, Ints


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
    # the row at position t is the target's features of position t, with the token at t + 1
    fed_token: Annotated[TokenIds, Wire("specscope.draft.fed_token", Token, "r")] = empty(np.int32)
    # the position of each of these rows
    fed_position: Annotated[Ints, Wire("specscope.draft.fed_position", Count, "r")] = empty(np.int32)
    # L2 norm of each layer's features; on the wire row after row
    fed_norms: Annotated[Floats, Wire("specscope.draft.fed_norms", Norm, "r,l")] = empty(np.float32, (0, 0))
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
