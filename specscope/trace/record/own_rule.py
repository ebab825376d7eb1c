"""A rule of verification of your own: what it is asked about a drafted token, and its answer, checked.

It is a function of the numbers of one node, which a capture holds, so that `verify --rule` computes them again. What a
rejection leaves is the standard rule's: p_{i+1} = norm(max(p_i - q_i, 0)), or p_i without the token where the draft is
deterministic; the final token is drawn from it. Nodes are tried from the root down, sibling after sibling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from specscope.errors import MISTAKES, UserError, failed, short


@dataclass(frozen=True)
class NodeTrial:
    """A drafted token as it is tried: all that a rule of your own is told."""

    token: int
    p: float  # p_i: the target's probability of it, in what rejected siblings left of p
    q: float  # q_i: the drafter's, likewise; 1 where the draft is deterministic
    coin: float  # uniform in (0, 1); it is accepted where coin < the probability that the rule gives
    depth: int  # 1 below the root
    entropy: float  # of the target's p there before any rejection, in nats
    choice_p: float  # the largest probability in it
    elders: tuple[NodeTrial, ...] = ()  # the siblings that were tried and rejected before it


@dataclass(frozen=True)
class OwnRule:
    """A rule that somebody named: a function from NodeTrial to the probability of acceptance, or True or False."""

    name: str  # module:function
    function: Callable[[NodeTrial], Any]

    def __call__(self, trial: NodeTrial) -> float:
        """The probability in 0 to 1; 0 where q is 0, which is not asked. Raises UserError with the mistake's place."""
        if trial.q <= 0:
            return 0.0
        try:
            given = self.function(trial)
        except MISTAKES as error:
            raise failed(f"--rule {self.name} failed for p = {trial.p:.6g}, q = {trial.q:.6g}", error) from error
        if isinstance(given, Real | np.bool_) and 0 <= float(given) <= 1:
            return float(given)
        code = getattr(self.function, "__code__", None)
        place = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
        raise UserError(
            f"--rule {self.name} returned {short(given)} for p = {trial.p:.6g}, q = {trial.q:.6g}: it must return a "
            f"probability between 0 and 1, or True or False{place}"
        )


@dataclass
class Siblings:
    """The trials at one parent, of which a rule is asked one after the other."""

    rule: OwnRule
    depth: int
    entropy: float
    choice_p: float
    tried: tuple[NodeTrial, ...] = ()

    def accept(self, token: int, p: float, q: float, coin: float) -> float:
        trial = NodeTrial(token, p, q, coin, self.depth, self.entropy, self.choice_p, self.tried)
        self.tried += (trial,)
        return self.rule(trial)
