"""What target and drafter thought of a tree: the notes of a request's step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from specscope.trace.record.equal import ArrayEq
from specscope.trace.record.privacy import TokenIds
from specscope.trace.record.tree import Doubles, Floats, Ints


@dataclass(frozen=True, eq=False)
class DraftNotes(ArrayEq):
    """What a drafter that is a model thought of its tree, and what it left out. Filled by tree_builder.py.

    Dropped nodes are those that re-ranking left out (EAGLE-2); they are numbered on after the n nodes of the tree.
    """

    prob: Floats  # [n] the drafter's probability of the node's token at its parent; 0 where only a text has the node
    # [n] its log probability of the whole path down to the node, or the log of the acceptance that a combined drafter
    # expects: what re-ranking goes by
    score: Floats
    dropped_token: TokenIds  # [d]
    dropped_parent: Ints  # [d] a node, a dropped node (n + its place), or ROOT
    dropped_score: Floats  # [d]
    cached: int = 0  # committed tokens in the drafter's KV cache when the tree was begun
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [passes] rows that each of its passes fed
    # With full evidence, what the first pass fed an EAGLE head: its last r rows (of a long prompt, a chunk's).
    # The row at position t is the target's features of position t, with the token at t + 1.
    fed_token: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))  # [r]
    fed_position: Ints = field(default_factory=lambda: np.zeros(0, np.int32))  # [r]
    fed_norms: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # [r, aux layers] L2 norm of each
    # Where the nodes are draws: how far q's cumulative sum would have to move for another token to be drawn. [n] or [0]
    draw_margin: Doubles = field(default_factory=lambda: np.zeros(0))


PARENT_ARRAYS: Mapping[str, type[np.generic]] = {
    **dict.fromkeys(("node", "top", "choice", "draft_top", "choice_rank", "rank", "q_rank"), np.int32),
    **dict.fromkeys(("top_p", "choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy"), np.float32),
    **dict.fromkeys(("draft_top_p", "choice_q", "outside", "raw_p"), np.float32),
}


@dataclass(frozen=True, eq=False)
class ParentNotes(ArrayEq):
    """What target and drafter gave at each node whose children were tried. Filled by speculate/verify/parents.py.

    Arrays are over these k parents: the root, then the accepted nodes that have children. `p` and `q` are what is
    sampled from, after temperature and rules; raw is before. Entropy H = sum(-p log p) and varentropy
    sum(p log^2 p) - H^2 are in nats. A drafter that is no model has no distribution of its own: m is 0 then, and
    what says so is 0.
    """

    node: Ints  # [k] ROOT, or a node
    top: TokenIds  # [k, t] the target's likeliest tokens, raw; t is 4, or the vocabulary's size where that is less
    top_p: Floats  # [k, t] their raw probabilities
    choice: TokenIds  # [k] the likeliest token of p
    choice_p: Floats  # [k] its p
    entropy: Floats  # [k] of p
    varentropy: Floats  # [k] of p
    q_entropy: Floats  # [k] of q; 0 where the children are deterministic
    q_varentropy: Floats  # [k]
    draft_top: TokenIds  # [k, m] the drafter's likeliest tokens, raw
    draft_top_p: Floats  # [k, m]
    choice_rank: Ints  # [k] rank of the target's raw first choice in the drafter's raw distribution; 0 if outside
    choice_q: Floats  # [k] its raw probability there
    outside: Floats  # [k] the target's raw mass on tokens outside the drafter's vocabulary
    # Over the n nodes of the tree; 0 where the parent was not tried
    raw_p: Floats  # [n] the target's raw probability of the node's token
    rank: Ints  # [n] of the token in p, from 1; 0 where its p is 0
    q_rank: Ints  # [n] of the token in q; 0 where the node is deterministic
    # Of the final token: the distribution that it was drawn from, and its probability in p before any rejection
    final_entropy: float
    final_varentropy: float
    final_target_p: float

    def named(self, shown: Collection[int]) -> list[int]:
        """The likeliest tokens, ascending, without those that are shown already."""
        return sorted({*self.top.ravel().tolist(), *self.draft_top.ravel().tolist()}.difference(shown))
