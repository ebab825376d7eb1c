"""What each known rule, and each known mistake, makes of a call of a sampler: its law.

How many drafts are accepted, and what the last token is drawn from, both from p, q and the drafts of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD
from specscope.trace.record.tree import Doubles

NEAR = 1e-5  # of a border, where a sampler's rounding may decide
TINY = 1e-45
GREEDY = "greedy"


@dataclass(frozen=True)
class ChainCall:
    """One call of a sampler for one request: a chain of n drafts."""

    p: Doubles  # [n, V] the target's where each draft stands; [n + 1, V] with what a bonus token is drawn from
    drafted: Indices  # [n]
    output: Indices  # accepted drafts and one more token
    q: Doubles | None = None  # [n, V] what the drafts were drawn from; None where they were not drawn
    coin: Doubles | None = None  # [n] a draft is accepted where its coin is below its ratio
    final_coin: float | None = None  # of the last token: that which has it in its interval of the cumulative sum

    @property
    def accepted(self) -> int:
        """How many drafts were."""
        return len(self.output) - 1

    @property
    def is_formed(self) -> bool:
        """Whether the output is some of the drafts, from the first on, and one more token."""
        begins = self.output[:-1].tolist() == self.drafted[: max(self.accepted, 0)].tolist()
        return begins and 0 <= self.accepted <= len(self.drafted)

    def row(self, place: int, off: tuple[int, int] = (0, 0)) -> tuple[Doubles, Doubles, int]:
        """p, q and the draft at a place; p and q may be so many rows away."""
        last, token = len(self.drafted) - 1, int(self.drafted[place])
        p = self.p[min(max(place + off[0], 0), len(self.p) - 1)]
        q = one_hot(p, token) if self.q is None else self.q[min(max(place + off[1], 0), last)]
        return p, q, token


def one_hot(row: Doubles, token: Any) -> Doubles:  # noqa: ANN401
    """All at one token."""
    return np.asarray(np.arange(len(row)) == token, np.float64)


def argmax(row: Doubles) -> Doubles:
    """All at its likeliest token."""
    return one_hot(row, row.argmax())


def residual(p: Doubles, q: Doubles, _: int) -> Doubles:
    """max(p - q, 0), not renormalised."""
    return np.asarray(np.maximum(p - q, 0))


Made = Callable[[Doubles, Doubles, int], Any]  # from p, q and the draft


@dataclass(frozen=True)
class Law:
    """Drafts are tried one after the other; `ahead`: block verification, with the ratios of whole paths."""

    accept: Made = lambda p, q, d: float(p[d]) / max(float(q[d]), TINY)
    left: Made = residual  # of p, behind a rejection
    bonus: Callable[[ChainCall], Doubles] = lambda call: call.p[len(call.drafted)]
    off: tuple[int, int] = (0, 0)  # rows by which p and q are off
    by_coins: bool = True  # whether a coin decides each draft
    ahead: bool = False

    def counts(self, call: ChainCall) -> Doubles:
        """[n + 1] how likely so many drafts are accepted."""
        a = np.array([float(self.accept(*call.row(place, self.off))) for place in range(len(call.drafted))])
        if self.ahead:
            path = self._path(call)
            mass = np.array([self._left(call, place).sum() for place in range(len(a))])
            below = np.where(mass > 0, mass / np.maximum(mass + (1 - path[:-1]), TINY), path[:-1] == 1)
            a = np.append(below[1:], path[-1:])
        a = np.minimum(a, 1)
        if self.by_coins and call.coin is not None:
            a = np.where(np.abs(call.coin - a) < NEAR, 0.5, call.coin < a)
        if self.ahead:  # the last draft whose coin is below takes those before it along
            return np.asarray(np.append(1, a) * np.append(np.cumprod((1 - a)[::-1])[::-1], 1))
        return np.asarray(np.append(1 - a, 1) * np.append(1, np.cumprod(a)))

    def _path(self, call: ChainCall) -> Doubles:
        """[n + 1] the ratio of the path behind so many drafts."""
        path = np.ones(len(call.drafted) + 1)
        for place in range(len(call.drafted)):
            path[place + 1] = min(1.0, path[place] * float(self.accept(*call.row(place, self.off))))
        return path

    def _left(self, call: ChainCall, place: int) -> Doubles:
        p, q, token = call.row(place, self.off)
        return np.asarray(self.left(p * self._path(call)[place] if self.ahead else p, q, token))

    def last(self, call: ChainCall) -> Doubles | None:
        """[V] what the last token is drawn from; None where that is not known."""
        whole = call.accepted == len(call.drafted)
        if whole and len(call.p) == call.accepted:
            return None
        left = self.bonus(call) if whole else self._left(call, call.accepted)
        left = np.asarray(left if left.any() else call.p[call.accepted], np.float64)
        return np.asarray(left / left.sum())

    def log_likelihood(self, call: ChainCall) -> float:
        """Of the output."""
        if not call.is_formed:
            return -math.inf
        share, row, token = float(self.counts(call)[call.accepted]), self.last(call), int(call.output[-1])
        if row is not None and call.final_coin is None:
            share *= float(row[token])
        elif row is not None and call.final_coin is not None:
            low = float(row[:token].sum())
            share *= bool(row[token] > 0) and low - NEAR <= call.final_coin <= low + float(row[token]) + NEAR
        return math.log(share) if share > TINY else -math.inf


def _overrun(at: int, p: Doubles, q: Doubles, token: int) -> Doubles:
    left = residual(p, q, token)
    left[at] += max(1 - left.sum(), 0)
    return left


LOSSLESS: Mapping[str, Law] = {
    STANDARD: Law(),
    MATCH: Law(lambda p, q, d: p[d], lambda p, q, d: np.where(one_hot(p, d), 0, p), by_coins=False),
    BLOCK: Law(ahead=True),
    GREEDY: Law(lambda p, q, d: p.argmax() == d, lambda p, q, d: argmax(p), lambda call: argmax(call.p[-1])),
}
MISTAKES: Mapping[str, Law] = {
    "drafts are accepted where p > q": Law(lambda p, q, d: p[d] > q[d]),
    "drafts are accepted by min(1, q / p)": Law(lambda p, q, d: float(q[d]) / max(float(p[d]), TINY)),
    "drafts are accepted by p, not p / q": Law(lambda p, q, d: p[d]),
    "every draft is accepted": Law(lambda p, q, d: 1.0),
    "the token behind a rejection is drawn from p, not from the residual": Law(left=lambda p, q, d: p),
    "the token behind a rejection is drawn from q": Law(left=lambda p, q, d: q),
    "the token behind a rejection is the argmax of the residual": Law(
        left=lambda p, q, d: argmax(np.maximum(p - q, 0))
    ),
    "the token behind a rejection is the argmax of p": Law(left=lambda p, q, d: argmax(p)),
    "the residual is not renormalised: beyond its mass comes the last token": Law(left=partial(_overrun, -1)),
    "the residual is not renormalised: beyond its mass comes token 0": Law(left=partial(_overrun, 0)),
    "the bonus token is drawn from q": Law(bonus=lambda call: call.row(len(call.drafted) - 1)[1]),
    "the bonus token is drawn from the row of p before": Law(bonus=lambda call: call.p[-2]),
    "the bonus token is the argmax of p": Law(bonus=lambda call: argmax(call.p[-1])),
    "p is taken from the row behind": Law(off=(1, 0)),
    "p is taken from the row before": Law(off=(-1, 0)),
    "q is taken from the row behind": Law(off=(0, 1)),
    "q is taken from the row before": Law(off=(0, -1)),
}
