"""Numbers of each request from what was gathered on a device, when it has come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specscope.trace.record.records import ParentNotes
from specscope.trace.record.tree import Floats
from specscope.vllm.block_rule import thresholds
from specscope.vllm.device import Gathered, Layout, layouts
from specscope.vllm.numbers import Numbers
from specscope.vllm.philox import of_step, uniform

Table = Mapping[str, NDArray[Any]]


def read(gathered: Gathered) -> list[Numbers]:
    """Of each request in the batch."""
    counts = (gathered.rows, gathered.rows if gathered.has_scores else 0, gathered.requests)
    both = layouts(gathered.likeliest)
    ints = _tables(gathered.ints, [layout[0] for layout in both], counts)
    floats = _tables(gathered.floats, [layout[1] for layout in both], counts)
    rows, scores, ends = ({**a, **b} for a, b in zip(ints, floats, strict=True))
    return [_One(gathered, rows, scores, ends, request).numbers() for request in range(gathered.requests)]


def _tables(packed: Tensor, layouts: list[Layout], counts: tuple[int, ...]) -> list[Table]:
    """The columns of each table, by name."""
    values, at = packed.numpy(), 0
    found: list[Table] = []
    for layout, count in zip(layouts, counts, strict=True):
        width = sum(layout.values())
        table = values[at : at + count * width].reshape(count, width)
        at += count * width
        ends = np.cumsum(list(layout.values()))
        columns = zip(layout, np.split(table, ends[:-1], axis=1), strict=True)
        found.append({name: column[:, 0] if layout[name] == 1 else column for name, column in columns})
    return found


class _One:
    """One request."""

    def __init__(self, gathered: Gathered, rows: Table, scores: Table, ends: Table, request: int) -> None:
        self.gathered, self.scores = gathered, scores
        self.end = {name: values[request] for name, values in ends.items()}
        self.first, told = int(self.end["first"]), int(self.end["drafted"])
        self.rows = {name: values[self.first : self.first + told] for name, values in rows.items()}
        invalid = np.flatnonzero(self.rows["token"] < 0)
        self.n = int(invalid[0]) if len(invalid) else told
        self.invalid = told - self.n
        self.accepted = min(int(self.end["accepted"]), self.n)
        self.tried = min(self.accepted + 1, self.n)
        self.greedy = bool(self.end["greedy"])
        self.scored = min(gathered.scored[request], self.n) if gathered.has_scores and gathered.scored else 0

    def numbers(self) -> Numbers:
        sampled = self.gathered.sampled and not self.greedy
        return Numbers(
            tokens=self.rows["token"][: self.n].astype(np.int32),
            accepted=self.accepted,
            final=int(self.end["final"]),
            p=self.rows["p"][: self.n].astype(np.float32),
            q=self.rows["q"][: self.n].astype(np.float32) if sampled else np.ones(self.n, np.float32),
            sampled=sampled,
            coin=self._coins(),
            mass=self._greedy_mass() if self.greedy else float(self.end["mass"]),
            final_p=self._greedy_final_p() if self.greedy else float(self.end["final_p"]),
            parents=self._parents(sampled) if self.gathered.full else None,
            prob=self._prob() if self.scored else None,
            invalid=self.invalid,
            accept=self._accept(),
            confidence=self.rows["confidence"][: self.n].astype(np.float32) if self.gathered.confident else None,
        )

    def _greedy_mass(self) -> float:
        """What a rejected draft leaves of a greedy target's p: all of it, unless the draft was its choice."""
        return 1.0 if self.accepted == self.n else float(1 - self.rows["p"][self.accepted])

    def _greedy_final_p(self) -> float:
        """1 where the final token is the target's choice; behind all drafts that is not looked up again."""
        return 1.0 if self.accepted == self.n else float(self.end["final"] == self.rows["choice"][self.accepted])

    def _coins(self) -> NDArray[np.float64]:
        """As they were tossed, or as they follow from the request's seed; 0 where none was."""
        if self.greedy:
            return np.zeros(self.n)
        if not self.gathered.seeded:
            return self.rows["coin"][: self.n].copy()
        seeds = np.full(self.n, self.end["seed"], np.int64)
        if self.gathered.by_step:
            seeds = of_step(seeds, np.arange(self.n, dtype=np.int64))
        return uniform(seeds, self.rows["position"][: self.n]).astype(np.float64)

    def _accept(self) -> NDArray[np.float64] | None:
        """Where the chain was verified as one block."""
        if self.greedy or not self.gathered.by_step:
            return None
        return thresholds(self.rows["ratio"][: self.n], self.rows["ahead"][: self.n])

    def _prob(self) -> Floats:
        """The drafter's probability of each draft; 0 where it did not tell."""
        prob = np.zeros(self.n, np.float32)
        prob[: self.scored] = self.scores["prob"][self.first : self.first + self.scored]
        return prob

    def _parents(self, sampled: bool) -> ParentNotes:
        """Of the tried parents."""
        k, some = self.tried, min(self.tried, self.scored)
        floats: dict[str, NDArray[Any]] = {
            name: self.rows[name][:k].astype(np.float32) for name in ("choice_p", "entropy", "varentropy")
        }
        floats |= {name: self._if(sampled, name, k).astype(np.float32) for name in ("q_entropy", "q_varentropy")}
        of_node: dict[str, NDArray[Any]] = {name: np.zeros(self.n, np.int32) for name in ("rank", "q_rank")}
        of_node["rank"][:k], of_node["q_rank"][:k] = self.rows["rank"][:k], self._if(sampled, "q_rank", k)
        raw_p = np.zeros(self.n, np.float32)
        raw_p[:k] = self.rows["raw_p"][:k]
        likeliest = self.gathered.likeliest if k else 0
        return ParentNotes(
            node=np.arange(-1, k - 1, dtype=np.int32),
            top=self.rows["top"][:k].reshape(k, likeliest).astype(np.int32),
            top_p=self.rows["top_p"][:k].reshape(k, likeliest).astype(np.float32),
            choice=self.rows["choice"][:k].astype(np.int32),
            **floats,
            draft_top=self._own("draft_top", some, k, np.int32),
            draft_top_p=self._own("draft_top_p", some, k, np.float32),
            choice_rank=self._own("choice_rank", some, k, np.int32),
            choice_q=self._own("choice_q", some, k, np.float32),
            outside=self._own("outside", some, k, np.float32),
            raw_p=raw_p,
            **of_node,
            final_entropy=0.0 if self.greedy else float(self.end["final_entropy"]),
            final_varentropy=0.0 if self.greedy else float(self.end["final_varentropy"]),
            final_target_p=self._greedy_final_p() if self.greedy else float(self.end["final_target_p"]),
        )

    def _if(self, told: bool, name: str, k: int) -> NDArray[Any]:
        """A column of the tried rows, 0 where it means nothing."""
        return self.rows[name][:k] if told else np.zeros(k)

    def _own(self, name: str, some: int, k: int, kind: type) -> NDArray[Any]:
        """What the drafter gave at the tried parents, as far as it scored them."""
        wide = name.startswith("draft_top")
        shape = (k, self.gathered.likeliest if some else 0) if wide else (k,)
        found: NDArray[Any] = np.zeros(shape, kind)
        if some:
            column = self.scores[name][self.first : self.first + some]
            found[:some] = column.reshape(some, -1) if wide else column
        return found
