"""What each known rule, and each known mistake, makes of a call of a sampler: its law.

Which drafts are accepted, and what the last token is drawn from, both from p, q and the drafts of a tree. At each draft
on the way of the output its children are tried in their order; a chain is a tree with one child a draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.trace.record.rules import BLOCK, MATCH, STANDARD
from specscope.trace.record.tree import ROOT, Doubles

NEAR = 1e-5  # of a border, where a sampler's rounding may decide
TINY = 1e-45
GREEDY = "greedy"


@dataclass(frozen=True)
class VerifyCall:
    """One call of a sampler for one request: n drafts."""

    p: Doubles  # [n + 1, V] the target's behind the root and behind each draft; [n, V] of a chain without a bonus token
    drafted: Indices  # [n]
    output: Indices  # accepted drafts and one more token
    q: Doubles | None = None  # [n, V] what the drafts were drawn from; None where they were not drawn
    coin: Doubles | None = None  # [n] a draft is accepted where its coin is below its ratio
    final_coin: float | None = None  # of the last token: that which has it in its interval of the cumulative sum
    parents: Indices | None = None  # [n] the draft above each, ROOT for none; None: a chain

    def above(self, draft: int) -> int:
        """The draft above one, or ROOT."""
        return draft - 1 if self.parents is None else int(self.parents[draft])

    def below(self, draft: int) -> list[int]:
        """The drafts behind one, in the order in which they are tried."""
        return [other for other in range(draft + 1, len(self.drafted)) if self.above(other) == draft]

    @cached_property
    def path(self) -> list[int]:
        """ROOT and the accepted drafts; empty where the output is not such a path and one more token."""
        path = [ROOT] if len(self.output) else []
        for token in self.output[:-1].tolist():
            path += [draft for draft in self.below(path[-1]) if self.drafted[draft] == token][:1] if path else []
        return path if len(path) == len(self.output) else []

    def row(self, draft: int, off: tuple[int, int] = (0, 0)) -> tuple[Doubles, Doubles, int]:
        """p, q and the token of a draft; p and q may be so many rows away."""
        last, token = len(self.drafted) - 1, int(self.drafted[draft])
        p = self.p[min(max(self.above(draft) + 1 + off[0], 0), len(self.p) - 1)]
        q = one_hot(p, token) if self.q is None else self.q[min(max(draft + off[1], 0), last)]
        return p, q, token


Decisions = list[tuple[int, float, bool]]  # drafts that were tried: the chance that it is accepted, and whether it was


def one_hot(row: Doubles, token: Any) -> Doubles:  # noqa: ANN401
    """All at one token."""
    return np.asarray(np.arange(len(row)) == token, np.float64)


def argmax(row: Doubles, *_: Any) -> Doubles:  # noqa: ANN401
    """All at its likeliest token."""
    return one_hot(row, row.argmax())


def residual(p: Doubles, q: Doubles, _: int) -> Doubles:
    """max(p - q, 0), not renormalised."""
    return np.asarray(np.maximum(p - q, 0))


Made = Callable[[Doubles, Doubles, int], Any]  # from p, q and the draft


@dataclass(frozen=True)
class Law:
    """Drafts are tried one after the other; `ahead`: block verification of a chain, with the ratios of whole paths."""

    accept: Made = lambda p, q, d: float(p[d]) / max(float(q[d]), TINY)
    left: Made = residual  # of p, behind a rejection
    bonus: Callable[[VerifyCall], Doubles] = lambda call: call.p[call.path[-1] + 1]
    off: tuple[int, int] = (0, 0)  # rows by which p and q are off
    by_coins: bool = True  # whether a coin decides each draft
    ahead: bool = False
    trees: bool = False  # whether it judges trees

    def walk(self, call: VerifyCall) -> tuple[Decisions, Doubles | None]:
        """What is tried on the way of the output, and [V] what its last token is drawn from: None where not known."""
        decisions, left = self._tried(call)
        if left is None and len(call.p) == call.path[-1] + 1:
            return decisions, None
        left = np.asarray(self.bonus(call) if left is None else left, np.float64)
        left = left if left.any() else np.asarray(call.p[call.path[-1] + 1], np.float64)
        return decisions, left / left.sum()

    def _tried(self, call: VerifyCall) -> tuple[Decisions, Doubles | None]:
        """Draft after draft; what is left of p behind the last is not renormalised, and None behind a leaf."""
        decisions, left, ahead = Decisions(), None, self._ahead(call) if self.ahead else []
        for at, goal in zip(call.path, [*call.path[1:], None], strict=True):
            left = None
            for draft in call.below(at):
                p, q, token = call.row(draft, self.off)
                p = p if left is None else left / max(left.sum(), TINY)
                chance = ahead[draft][0] if ahead else self._chance(call, draft, float(self.accept(p, q, token)))
                decisions.append((draft, chance, draft == goal))
                if draft == goal:
                    break
                left = ahead[draft][1] if ahead else np.asarray(self.left(p, q, token), np.float64)
        return decisions, left

    def _ahead(self, call: VerifyCall) -> list[tuple[float, Doubles]]:
        """Of each draft the chance that it or a later one is accepted, and what is left of p where none is."""
        path, left, n = [1.0], list[Doubles](), len(call.drafted)
        for place in range(n):
            p, q, token = call.row(place)
            left.append(np.asarray(self.left(p * path[place], q, token)))
            path.append(min(1.0, path[place] * float(self.accept(p, q, token))))
        mass, ratio = np.array([row.sum() for row in left]), np.array(path)
        below = np.where(mass > 0, mass / np.maximum(mass + (1 - ratio[:-1]), TINY), ratio[:-1] == 1)
        a = np.array([self._chance(call, place, x) for place, x in enumerate(np.append(below[1:], ratio[-1:]))])
        counts = np.append(1, a) * np.append(np.cumprod((1 - a)[::-1])[::-1], 1)  # how likely so many are accepted
        least = np.cumsum(counts[::-1])[::-1]
        return [(float(least[i + 1] / least[i]) if least[i] else 0.0, left[i]) for i in range(n)]

    def _chance(self, call: VerifyCall, draft: int, a: float) -> float:
        """That a draft is accepted where its ratio is `a`: by its coin, where that decides and is known."""
        a = min(float(a), 1.0)
        if not self.by_coins or call.coin is None:
            return a
        return 0.5 if abs(call.coin[draft] - a) < NEAR else float(call.coin[draft] < a)

    def log_likelihood(self, call: VerifyCall) -> float:
        """Of the output."""
        if not call.path:
            return -math.inf
        (decisions, row), token = self.walk(call), int(call.output[-1])
        share = math.prod(abs(chance - (not accepted)) for _, chance, accepted in decisions)
        if row is not None and call.final_coin is None:
            share *= float(row[token])
        elif row is not None and call.final_coin is not None:
            over = call.final_coin - float(row[:token].sum())
            share *= bool(row[token] > 0) and -NEAR <= over <= float(row[token]) + NEAR
        return math.log(share) if share > TINY else -math.inf


def _overrun(at: int, p: Doubles, q: Doubles, token: int) -> Doubles:
    left = residual(p, q, token)
    left[at] += max(1 - left.sum(), 0)
    return left


def _likeliest(call: VerifyCall) -> Doubles:
    return argmax(call.p[call.path[-1] + 1])


LOSSLESS: Mapping[str, Law] = {
    STANDARD: Law(trees=True),
    MATCH: Law(lambda p, q, d: p[d], lambda p, q, d: np.where(one_hot(p, d), 0, p), by_coins=False, trees=True),
    BLOCK: Law(ahead=True),
    GREEDY: Law(lambda p, q, d: p.argmax() == d, argmax, _likeliest, trees=True),
}
MISTAKES: Mapping[str, Law] = {
    "drafts are accepted where p > q": Law(lambda p, q, d: p[d] > q[d]),
    "drafts are accepted by min(1, q / p)": Law(lambda p, q, d: float(q[d]) / max(float(p[d]), TINY)),
    "drafts are accepted by p, not p / q": Law(lambda p, q, d: p[d]),
    "every draft is accepted": Law(lambda p, q, d: 1.0),
    "the token after a rejection is drawn from p, not from the residual": Law(left=lambda p, q, d: p),
    "the token after a rejection is drawn from q": Law(left=lambda p, q, d: q),
    "the token after a rejection is the argmax of the residual": Law(left=lambda p, q, d: argmax(np.maximum(p - q, 0))),
    "the token after a rejection is the argmax of p": Law(left=lambda p, q, d: argmax(p)),
    "the residual is not renormalised: beyond its mass it gives the last token": Law(left=partial(_overrun, -1)),
    "the residual is not renormalised: beyond its mass it gives token 0": Law(left=partial(_overrun, 0)),
    "the bonus token is drawn from q": Law(bonus=lambda call: call.row(call.path[-1])[1]),
    "the bonus token is drawn from the previous row of p": Law(bonus=lambda call: call.row(call.path[-1])[0]),
    "the bonus token is the argmax of p": Law(bonus=_likeliest),
    "p is taken from the next row": Law(off=(1, 0)),
    "p is taken from the previous row": Law(off=(-1, 0)),
    "q is taken from the next row": Law(off=(0, 1)),
    "q is taken from the previous row": Law(off=(0, -1)),
}
