"""Gathered: what evidence needs of one call of a rejection sampler, as columns, and each request's numbers from them.

On a device they are gathered by gather.py and come a step or two later; V1's on the host are read by v1/here.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.trace.inside.chain import Judged, Numbers, assembled
from specscope.trace.record.records import ParentNotes
from specscope.trace.record.tree import Floats
from specscope.vllm.v2.rule import of_step, thresholds, uniform

Table = dict[str, NDArray[Any]]  # columns by name
Layout = Mapping[str, int]  # the columns of a table, and how wide each is


def layouts(likeliest: int) -> tuple[tuple[Layout, Layout], ...]:
    """(integers, floats) of three tables: of rows, of what the drafter gave for them, of requests."""
    ints, floats = (
        ("token", "choice", "rank", "q_rank", "position"),
        ("p", "q", "coin", "choice_p", "raw_p", "confidence", "ratio", "ahead"),
    )
    spreads = ("entropy", "varentropy", "q_entropy", "q_varentropy")
    ends = ("mass", "final_p", "final_entropy", "final_varentropy", "final_target_p")
    return (
        (dict.fromkeys(ints, 1) | {"top": likeliest}, dict.fromkeys((*floats, *spreads), 1) | {"top_p": likeliest}),
        (
            {"choice_rank": 1, "draft_top": likeliest},
            dict.fromkeys(("prob", "choice_q", "outside"), 1) | {"draft_top_p": likeliest},
        ),
        (
            dict.fromkeys(("first", "drafted", "accepted", "final", "greedy", "seed"), 1),
            dict.fromkeys(ends, 1),
        ),
    )


def empty_tables(likeliest: int, counts: tuple[int, int, int]) -> list[Table]:
    """All columns 0. `counts`: rows of each table."""
    return [
        {
            name: np.zeros(count if width == 1 else (count, width), kind)
            for layout, kind in ((ints, np.int64), (floats, np.float64))
            for name, width in layout.items()
        }
        for (ints, floats), count in zip(layouts(likeliest), counts, strict=True)
    ]


@dataclass
class GatheredTables:
    """The columns of one call, on the host."""

    rows: Table
    scores: Table  # of what the drafter gave for these rows
    ends: Table  # of requests
    likeliest: int  # how many likeliest tokens of a row
    scored: Sequence[int]  # rows of each request that the drafter scored, from the first on; empty: none have scores
    sampled: bool  # whether drafts were sampled, where a request is not greedy
    full: bool
    seeded: bool = False  # whether coins follow from seeds and positions
    by_step: bool = False  # chains were verified as one block
    step_seeds: bool = False  # and coins follow from the draft's place in its chain too
    confident: bool = False  # whether the drafter said what it thinks of its drafts


@dataclass
class Gathered:
    """The numbers of one call, which may be on their way to the host."""

    tables: Callable[[], GatheredTables]  # when they have come
    requests: int
    bytes: int = 0  # how much is copied
    arrived: Any = None  # torch.cuda.Event; None where they are on the host already

    def ready(self) -> bool:
        """Whether the copy has been made."""
        return self.arrived is None or bool(self.arrived.query())

    def wait(self) -> None:
        """Wait until the copy has been made."""
        if self.arrived is not None:
            self.arrived.synchronize()


class Judgements:
    """The verdicts of a batch, gathered in one or more calls, each of the requests that follow those of the last."""

    def __init__(self, calls: Sequence[Gathered]) -> None:
        self._calls = calls
        self._judged: list[Judged] | None = None
        self.bytes = sum(call.bytes for call in calls)  # that are copied

    def ready(self) -> bool:
        """Whether they can be read without waiting."""
        return all(call.ready() for call in self._calls)

    def wait(self) -> None:
        """Wait until they can be read."""
        for call in self._calls:
            call.wait()

    def of(self, row: int) -> Judged:
        """The judgement of the request in that row of the sampler's batch. All are read with the first."""
        if self._judged is None:
            self._judged = [judged for call in self._calls for judged in read(call.tables())]
        return self._judged[row]


def read(tables: GatheredTables) -> list[Judged]:
    """The judgement of each request in the batch."""
    return [assembled(_OneRequest(tables, request).numbers()) for request in range(len(tables.ends["first"]))]


class _OneRequest:
    def __init__(self, tables: GatheredTables, request: int) -> None:
        self.tables, self.scores = tables, tables.scores
        self.end = {name: values[request] for name, values in tables.ends.items()}
        self.first, drafted = int(self.end["first"]), int(self.end["drafted"])
        self.rows = {name: values[self.first : self.first + drafted] for name, values in tables.rows.items()}
        invalid = np.flatnonzero(self.rows["token"] < 0)
        self.n = int(invalid[0]) if len(invalid) else drafted
        self.invalid = drafted - self.n
        self.accepted = min(int(self.end["accepted"]), self.n)
        self.tried = min(self.accepted + 1, self.n)
        self.greedy = bool(self.end["greedy"])
        self.scored = min(tables.scored[request], self.n) if len(tables.scored) else 0

    def numbers(self) -> Numbers:
        sampled = self.tables.sampled and not self.greedy
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
            parents=self._parents(sampled) if self.tables.full else None,
            prob=self._prob() if self.scored else None,
            invalid=self.invalid,
            accept=self._accept(),
            confidence=self.rows["confidence"][: self.n].astype(np.float32) if self.tables.confident else None,
        )

    def _greedy_mass(self) -> float:
        """What a rejected draft leaves of a greedy target's p: all of it, unless the draft was its choice."""
        return 1.0 if self.accepted == self.n else float(1 - self.rows["p"][self.accepted])

    def _greedy_final_p(self) -> float:
        """1 where the final token is the target's choice; behind all drafts that is not looked up again."""
        return 1.0 if self.accepted == self.n else float(self.end["final"] == self.rows["choice"][self.accepted])

    def _coins(self) -> NDArray[np.float64]:
        """The coins as they were tossed, or as they follow from the request's seed; 0 where none was."""
        if self.greedy:
            return np.zeros(self.n)
        if not self.tables.seeded:
            return self.rows["coin"][: self.n].copy()
        seeds = np.full(self.n, self.end["seed"], np.int64)
        if self.tables.step_seeds:
            seeds = of_step(seeds, np.arange(self.n, dtype=np.int64))
        return uniform(seeds, self.rows["position"][: self.n]).astype(np.float64)

    def _accept(self) -> NDArray[np.float64] | None:
        """Where the chain was verified as one block."""
        if self.greedy or not self.tables.by_step:
            return None
        return thresholds(self.rows["ratio"][: self.n], self.rows["ahead"][: self.n])

    def _prob(self) -> Floats:
        """The drafter's probability of each draft; 0 where it gave none."""
        prob = np.zeros(self.n, np.float32)
        prob[: self.scored] = self.scores["prob"][self.first : self.first + self.scored]
        return prob

    def _parents(self, sampled: bool) -> ParentNotes:
        """The notes of the tried parents."""
        k, some = self.tried, min(self.tried, self.scored)
        floats: dict[str, NDArray[Any]] = {
            name: self.rows[name][:k].astype(np.float32) for name in ("choice_p", "entropy", "varentropy")
        }
        floats |= {name: self._if(sampled, name, k).astype(np.float32) for name in ("q_entropy", "q_varentropy")}
        of_node: dict[str, NDArray[Any]] = {name: np.zeros(self.n, np.int32) for name in ("rank", "q_rank")}
        of_node["rank"][:k], of_node["q_rank"][:k] = self.rows["rank"][:k], self._if(sampled, "q_rank", k)
        raw_p = np.zeros(self.n, np.float32)
        raw_p[:k] = self.rows["raw_p"][:k]
        likeliest = self.tables.likeliest if k else 0
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

    def _if(self, present: bool, name: str, k: int) -> NDArray[Any]:
        """A column of the tried rows; all 0 unless `present`."""
        return self.rows[name][:k] if present else np.zeros(k)

    def _own(self, name: str, some: int, k: int, kind: type) -> NDArray[Any]:
        """What the drafter gave at the tried parents, as far as it scored them."""
        wide = name.startswith("draft_top")
        shape = (k, self.tables.likeliest if some else 0) if wide else (k,)
        values: NDArray[Any] = np.zeros(shape, kind)
        if some:
            column = self.scores[name][self.first : self.first + some]
            values[:some] = column.reshape(some, -1) if wide else column
        return values
