"""What the debugger answers, as values: the console and the screens each render them in their own way. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.trace.history.at_parent import TopToken as TopToken


@dataclass(frozen=True)
class DistributionView:
    """One distribution over the vocabulary, as far as people look at it. Filled by live/inspect.py."""

    top: tuple[TopToken, ...]  # the likeliest, at most TOP, likeliest first
    entropy: float  # in nats
    prob: float  # of the token that the view is about
    rank: int | None  # of that token, from 1: how many are likelier, and itself; None where its probability is 0
    outside: bool = False  # whether the token is outside the draft vocabulary, of which the drafter can say nothing


@dataclass(frozen=True)
class Removed:
    """What one sampling rule takes away."""

    rule: str  # temperature 0, top-k 20, structured output (json), ...
    tokens: int
    mass: float
    likeliest: tuple[TopToken, ...] = ()  # of them, where that is of interest: what a form removed


@dataclass(frozen=True)
class NodeView:
    """What target and drafter thought where a node's token was drawn. Filled by live/inspect.py."""

    request: str
    step: int  # of the engine
    index: int  # the request's own step
    node: int | None  # None: where the final token was drawn
    token: int  # the node's, or the final one
    raw: DistributionView  # the target's, before temperature and rules
    p: DistributionView  # the target's, as it is sampled from at this place
    draft: DistributionView | None  # the drafter's own, as raw; None for no model, or not known
    q: DistributionView | None  # the drafter's, as it was sampled from; None for deterministic drafts
    removed: tuple[Removed, ...]  # by each rule that shapes p
    choice_rank: int | None  # of the target's likeliest token in the drafter's own distribution; None where not known
    kl: float | None  # KL(target || drafter), raw, in nats, over the draft vocabulary; None without a drafter's
    tv: float | None  # their total variation: 1 - tv is the best acceptance
    computed: bool  # False: the very tensors of the step; True: computed again in KV of its own
    # What the rule used at the node's own trial, elder siblings taken away; None where that is p, or q, as sampled
    p_tried: DistributionView | None = None
    q_tried: DistributionView | None = None
    notes: tuple[str, ...] = ()  # where what is shown contradicts what was judged, a line each


TOP = 12  # tokens of a column
