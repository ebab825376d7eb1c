"""A chain's numbers from rows that lie on the host, one after another in numpy.

Torch's operations over whole batches take ten times as long here, and wake its threads, which are slow to meet when
cores are busy. On a device the same numbers are gathered for a whole batch: gather.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specscope.trace.inside.chain import Numbers
from specscope.trace.record.notes import Indices, ParentsBuilder, RawRow, Spread, spread, spread_without
from specscope.trace.record.tree import Doubles, Floats, Ints

DrafterRow = tuple[RawRow, Indices | None]  # over the tokens that the drafter knows, these; None where it knows all


class DraftVocabulary:
    """Which tokens a drafter knows, found in its first logits: engines give the others minus infinity.

    A head of 8,192 tokens is read five times as fast so.
    """

    def __init__(self) -> None:
        self._known: Indices | None = None

    def rows(self, logits: Floats) -> Callable[[int], DrafterRow]:
        """The rows of a pass [., V], by number."""
        known, finite = None, np.count_nonzero(logits[0] > -np.inf)  # one row tells of all
        if finite < logits.shape[1]:
            if self._known is None or len(self._known) != finite:
                self._known = np.flatnonzero(logits[0] > -np.inf)
            known, logits = self._known, np.take(logits, self._known, axis=1)
        weights = logits - logits.max(1, keepdims=True)
        np.exp(weights, out=weights)
        masses = weights.sum(1)
        return lambda row: (RawRow(weights[row], float(masses[row])), known)


def _probability(drafter: DrafterRow, token: Indices) -> float:
    """The drafter's of a token [1]; 0 of one that it does not know."""
    row, known = drafter
    place = token if known is None else np.searchsorted(known, token)
    is_known = known is None or (place[0] < len(known) and known[place[0]] == token[0])
    return float(row.p(place)[0]) if is_known else 0.0


@dataclass
class HostChain:
    """n valid drafts of one request. Rows [V] are the engine's own: looked at, never changed."""

    tokens: Ints  # [n]
    accepted: int
    final: int  # the token behind them
    p: Floats  # [n] of the drafts, after every rule
    coin: Doubles  # [n]
    choices: Ints | None = None  # [n] or more: the target's likeliest tokens; None where the request is sampled
    target: Callable[[int], Floats] | None = None  # p behind so many drafts; None where nothing is sampled
    whole: Floats | None = None  # p where the final token was drawn
    q: Floats | None = None  # [n, V] what drafts were drawn from; None where they are deterministic
    taken: Floats | None = None  # q where the final token was drawn, behind a rejected draft

    def numbers(
        self,
        raw: Callable[[int], RawRow] | None,
        drafter: Sequence[DrafterRow] = (),
        *,
        full: bool,
        prob: Floats | None = None,
        invalid: int = 0,
        confidence: Floats | None = None,
    ) -> Numbers:
        """`raw` and `drafter`: what target and drafter gave behind so many drafts, before any rule; the rest as there.
        A row of `raw` is good until the next is asked for. `prob` is read from the drafter's rows where it is None.
        """
        n = len(self.tokens)
        tried = min(self.accepted + 1, n)
        if prob is None and drafter:
            prob = np.zeros(n, np.float32)
            prob[: len(drafter)] = [_probability(row, self.tokens[at : at + 1]) for at, row in enumerate(drafter)]
        notes = self._notes(tried, raw, drafter) if full else None
        mass, final_p, target_p, final = self._end(notes)
        parents = None if notes is None else notes.done(np.arange(-1, tried - 1, dtype=np.int32), final, target_p)
        return Numbers(
            tokens=self.tokens,
            accepted=self.accepted,
            final=self.final,
            p=self.p,
            q=np.ones(n, np.float32) if self.q is None else self.q[np.arange(n), self.tokens],
            sampled=self.q is not None,
            coin=self.coin,
            mass=mass,
            final_p=final_p,
            parents=parents,
            prob=prob,
            invalid=invalid,
            confidence=confidence,
        )

    def _notes(self, tried: int, raw: Callable[[int], RawRow] | None, drafter: Sequence[DrafterRow]) -> ParentsBuilder:
        """What target and drafter gave at the tried parents."""
        notes = ParentsBuilder(len(self.tokens), tried)
        for index in range(tried):
            child, token = np.array([index]), self.tokens[index : index + 1]
            if raw is not None:
                weights = raw(index)
                notes.raw(index, weights, child, token)
                if index < len(drafter):
                    notes.drafter(index, drafter[index][0], weights, drafter[index][1])
            if self.choices is not None:
                notes.chosen(index, int(self.choices[index]), child, token)
            elif self.target is not None:
                notes.target(index, self.target(index), child, token)
            if self.q is not None:
                notes.drawn(index, self.q[index], child, token)
        return notes

    def _end(self, notes: ParentsBuilder | None) -> tuple[float, float, float, Spread]:
        """(Mass of the residual, the final token's p there and in the target's own p, entropy and varentropy)."""
        n, is_rejected = self.accepted, self.accepted < len(self.tokens)
        if self.whole is None:  # behind all drafts a greedy choice is not looked up again
            chosen = float(self.choices is None or not is_rejected or self.final == self.choices[n])
            return (float(1 - self.p[n]) if is_rejected else 1.0), chosen, chosen, (0.0, 0.0)
        target_p = float(self.whole[self.final])
        if self.taken is None and not is_rejected:
            return 0.0, target_p, target_p, (0.0, 0.0) if notes is None else spread(self.whole)
        left, known = self.whole.copy(), None
        if self.taken is not None:
            np.maximum(left - self.taken, 0, out=left)
        elif is_rejected:
            left[self.tokens[n]] = 0
            if notes is not None:
                whole = float(notes.parent["entropy"][n]), float(notes.parent["varentropy"][n])
                known = spread_without(whole, float(self.whole[self.tokens[n]]), float(self.whole.sum()))
        mass = float(left.sum())
        drawn = left / mass if mass > 0 else self.whole
        final = (0.0, 0.0) if notes is None else known or spread(drawn)
        return mass, float(drawn[self.final]), target_p, final
