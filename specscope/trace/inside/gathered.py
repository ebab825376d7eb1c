"""Gathered: what evidence needs of one call of a rejection sampler, as columns, and each request's numbers from them.

On a device they are gathered by gather.py and come a step or two later; V1's on the host are read by v1/here.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.trace.inside.chain import NO_INTS, Judged, Numbers, assembled, of_step, thresholds, uniform
from specscope.trace.record.records import ParentNotes
from specscope.trace.record.tree import Floats

Table = dict[str, NDArray[Any]]  # columns by name
Indices = NDArray[np.integer[Any]]
Key = TypeVar("Key")


def to_host(packed: Tensor) -> tuple[Tensor, Any]:
    """(The tensor on the host, the event that says that it has come; None where it was there)."""
    if packed.device.type != "cuda":
        return packed, None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


class Sent(Generic[Key]):
    """The copy is queued behind the work that is queued there, and goes into pinned memory."""

    def __init__(self, tensors: Mapping[Key, Tensor]) -> None:
        # Widest numbers first: each tensor then begins where its type may begin
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        self._kinds = [(key, tensor.dtype, tensor.shape, tensor.nbytes) for key, tensor in ordered]
        packed = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in ordered])
        self._host, self._arrived = to_host(packed)
        self.bytes = packed.nbytes

    def ready(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()

    def read(self) -> dict[Key, NDArray[Any]]:
        arrays, start = {}, 0
        for key, dtype, shape, size in self._kinds:
            arrays[key] = self._host[start : start + size].view(dtype).view(shape).numpy()
            start += size
        return arrays


@dataclass
class Gathered:
    """The numbers of one call, which may be on their way to the host."""

    sent: Sent[tuple[str, str]]  # columns by table and name
    requests: int
    scored: Sequence[int]  # rows of each request that the drafter scored, from the first on; empty: none have scores
    full: bool
    step_seeds: bool  # whether coins follow from the draft's place in its chain, besides seed and position

    @cached_property
    def tables(self) -> dict[str, Table]:
        """When they have come: of rows, of what the drafter gave for them (scores), of requests (ends).

        A column that nothing was gathered for is not there.
        """
        tables: dict[str, Table] = {"rows": {}, "scores": {}, "ends": {}}
        for (table, name), column in self.sent.read().items():
            tables[table][name] = column
        return tables


class Judgements:
    """The verdicts of a batch, gathered in one or more calls, each of the requests that follow those of the last.

    Or those that are there already, by the request's row.
    """

    def __init__(self, calls: Sequence[Gathered], judged: Mapping[int, Judged] | None = None) -> None:
        self._calls, self._judged = calls, judged
        self.bytes = sum(call.sent.bytes for call in calls)  # that are copied

    def ready(self) -> bool:
        return all(call.sent.ready() for call in self._calls)

    def wait(self) -> None:
        for call in self._calls:
            call.sent.wait()

    def of(self, row: int) -> Judged:
        """The judgement of the request in that row of the sampler's batch. All are read with the first."""
        if self._judged is None:
            self._judged = dict(enumerate(judged for call in self._calls for judged in read(call)))
        return self._judged[row]


def read(call: Gathered) -> list[Judged]:
    return [assembled(_OneRequest(call, request).numbers()) for request in range(call.requests)]


class _OneRequest:
    def __init__(self, call: Gathered, request: int) -> None:
        self.call, tables = call, call.tables
        self.end = {name: values[request].item() for name, values in tables["ends"].items()}
        first, drafted = self.end["first"], self.end["drafted"]
        rows = {name: values[first : first + drafted] for name, values in tables["rows"].items()}
        invalid = np.flatnonzero(rows["token"] < 0) if rows else NO_INTS
        self.n = int(invalid[0]) if len(invalid) else drafted
        self.rows = {name: values[: self.n] for name, values in rows.items()}
        self.invalid = drafted - self.n
        self.accepted = min(self.end["accepted"], self.n)
        self.greedy = self.end["greedy"]
        self.sampled = "q" in rows and not self.greedy
        scored = min(call.scored[request], self.n) if len(call.scored) else 0
        scores = tables["scores"] if scored else {}
        self.scores = {name: values[first : first + scored] for name, values in scores.items()}

    def numbers(self) -> Numbers:
        tried = np.arange(min(self.accepted + 1, self.n))
        final = final_of(self.end, None if self.accepted == self.n else self.rows["choice"][self.accepted])
        parents = None
        if self.call.full:
            own = {name: values[: len(tried)] for name, values in self.scores.items()}
            parents = parents_of(self.rows, tried - 1, tried, tried, final, own, sampled=self.sampled)
        return Numbers(
            tokens=self._of("token", np.int32),
            accepted=self.accepted,
            final=self.end["final"],
            p=self._of("p", np.float32),
            q=self._of("q", np.float32) if self.sampled else np.ones(self.n, np.float32),
            sampled=self.sampled,
            coin=self._coins(),
            mass=self._greedy_mass() if self.greedy else self.end["mass"],
            final_p=final.p,
            parents=parents,
            prob=self._prob() if self.scores else None,
            invalid=self.invalid,
            accept=self._accept(),
            confidence=self._of("confidence", np.float32) if "confidence" in self.rows else None,
        )

    def _of(self, name: str, kind: type) -> NDArray[Any]:
        """[n] a column; 0 where it is not there."""
        return self.rows[name].astype(kind) if name in self.rows else np.zeros(self.n, kind)

    def _greedy_mass(self) -> float:
        """What a rejected draft leaves of a greedy target's p: all of it, unless the draft was its choice."""
        return 1.0 if self.accepted == self.n else float(1 - self.rows["p"][self.accepted])

    def _coins(self) -> NDArray[np.float64]:
        """The coins as they were tossed, or as they follow from the request's seed; 0 where none was."""
        if self.greedy or "seed" not in self.end:
            return np.zeros(self.n) if self.greedy else self._of("coin", np.float64)
        seeds = np.full(self.n, self.end["seed"], np.int64)
        if self.call.step_seeds:
            seeds = of_step(seeds, np.arange(self.n, dtype=np.int64))
        return uniform(seeds, self._of("position", np.int64)).astype(np.float64)

    def _accept(self) -> NDArray[np.float64] | None:
        """Where the chain was verified as one block."""
        if self.greedy or "ratio" not in self.rows:
            return None
        return thresholds(self._of("ratio", np.float64), self._of("ahead", np.float64))

    def _prob(self) -> Floats:
        """The drafter's probability of each draft; 0 where it gave none."""
        prob = np.zeros(self.n, np.float32)
        prob[: len(self.scores["prob"])] = self.scores["prob"]
        return prob


@dataclass(frozen=True)
class Final:
    p: float  # the final token's there
    target_p: float  # and in the target's own p
    entropy: float
    varentropy: float


def final_of(end: Mapping[str, Any], choice: int | None) -> Final:
    """`end`: the request's row; `choice`: the target's, where the token is recovered. Greedy, all of p is at that."""
    if end["greedy"]:
        chosen = float(choice is None or end["final"] == choice)
        return Final(chosen, chosen, 0.0, 0.0)
    return Final(end["final_p"], *(end.get(f"final_{name}", 0.0) for name in ("target_p", "entropy", "varentropy")))


def parents_of(
    rows: Table, nodes: Indices, first: Indices, children: Indices, final: Final, own: Table, *, sampled: bool = False
) -> ParentNotes:
    """The notes of k tried parents, from columns of n nodes.

    `nodes` [k]: the parents; `first` [k]: a child of each; `children`: all of theirs; `own`: what the drafter gave at
    the first parents.
    """
    n, k = len(rows.get("token", ())), len(nodes)

    def at(places: Indices, name: str, *, present: bool = True) -> NDArray[Any]:
        return rows[name][places] if present and name in rows else np.zeros(len(places))

    def at_children(name: str, kind: type, *, present: bool = True) -> NDArray[Any]:
        values: NDArray[Any] = np.zeros(n, kind)
        values[children] = at(children, name, present=present)
        return values

    def drafters(name: str, kind: type, *wide: int) -> NDArray[Any]:
        given = own.get(name, np.zeros((0, *wide)))
        values: NDArray[Any] = np.zeros((k, *given.shape[1:]), kind)
        values[: len(given)] = given
        return values

    floats = {name: at(first, name).astype(np.float32) for name in ("choice_p", "entropy", "varentropy")}
    floats |= {name: at(first, name, present=sampled).astype(np.float32) for name in ("q_entropy", "q_varentropy")}
    return ParentNotes(
        node=nodes.astype(np.int32),
        top=_wide(rows, "top", first).astype(np.int32),
        top_p=_wide(rows, "top_p", first).astype(np.float32),
        choice=at(first, "choice").astype(np.int32),
        **floats,
        draft_top=drafters("draft_top", np.int32, 0),
        draft_top_p=drafters("draft_top_p", np.float32, 0),
        choice_rank=drafters("choice_rank", np.int32),
        choice_q=drafters("choice_q", np.float32),
        outside=drafters("outside", np.float32),
        raw_p=at_children("raw_p", np.float32),
        rank=at_children("rank", np.int32),
        q_rank=at_children("q_rank", np.int32, present=sampled),
        final_entropy=final.entropy,
        final_varentropy=final.varentropy,
        final_target_p=final.target_p,
    )


def _wide(rows: Table, name: str, places: Indices) -> NDArray[Any]:
    """[k, w] numbers of a row; [0, 0] of none."""
    return rows[name][places].reshape(len(places), -1) if len(places) else np.zeros((0, 0))
