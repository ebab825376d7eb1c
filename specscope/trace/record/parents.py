"""ParentNotes from rows of numbers, whichever engine computed them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.record.records import ParentNotes
from specscope.trace.record.tree import Floats, Ints

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
        """The probabilities of these tokens."""
        probs: Floats = self.weights[tokens] / self._mass
        return probs

    def top(self) -> tuple[Indices, Floats]:
        """The likeliest tokens, likeliest first, and their probabilities."""
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
        self.node: dict[str, NDArray[Any]] = {
            "raw_p": np.zeros(nodes, np.float32),
            "rank": np.zeros(nodes, np.int32),
            "q_rank": np.zeros(nodes, np.int32),
        }
        some = ("choice_p", "entropy", "varentropy", "q_entropy", "q_varentropy", "choice_q", "outside")
        self.parent: dict[str, NDArray[Any]] = {name: np.zeros(parents, np.float32) for name in some}
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
        """What the target is sampled from."""
        best = int(p.argmax())
        self.parent["choice"][index], self.parent["choice_p"][index] = best, p[best]
        self.parent["entropy"][index], self.parent["varentropy"][index] = spread(p)
        self.node["rank"][children] = ranks(p, tokens)

    def drawn(self, index: int, q: Floats, children: Indices, tokens: Indices) -> None:
        """What sampled children were drawn from."""
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
        entropy, varentropy = final
        return ParentNotes(
            node=nodes,
            **self.parent,
            **self.node,
            final_entropy=entropy,
            final_varentropy=varentropy,
            final_target_p=final_target_p,
        )


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
    if len(tokens) <= FEW and np.count_nonzero(is_above) > SHORT:  # a pass for each takes less than to sort so many
        higher = np.array([np.count_nonzero(row > value) for value in values])
    else:
        above = np.sort(row[is_above])
        higher = len(above) - np.searchsorted(above, values, "right")
    return np.where(values > 0, 1 + higher, 0)
