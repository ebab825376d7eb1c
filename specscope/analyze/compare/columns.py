"""A side: what a comparison keeps of captures, as arrays over steps and nodes. 60 MB for 100,000 steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.evidence.arrays import levels, siblings
from specscope.analyze.evidence.columns import KINDS, PRECEDED
from specscope.trace.history.loops import in_loops, step_sums
from specscope.trace.record.notes import DraftNotes, MethodNotes, ParentNotes
from specscope.trace.record.records import (
    FinishReason,
    Outcome,
    RequestInfo,
    RequestStep,
    RunInfo,
    Verdict,
)
from specscope.trace.record.tree import ROOT, Bools, DraftTree, Ints
from specscope.trace.record.vocabulary import Vocabulary

Longs = NDArray[np.int64]

# A request's part in a step. Steps of one request lie together, in their order.
STEP = np.dtype(
    [
        ("request", "i4"),  # its place in Side.requests
        ("index", "i4"),  # the request's own step number
        ("step", "i8"),  # the engine's
        ("context", "i4"),  # tokens in the KV cache when it began
        ("prefill", "i4"),  # tokens fed besides root and drafts
        ("batch", "i4"),  # requests in the engine's step
        ("judged", "?"),  # False for a prefill chunk that did not reach the end of the prompt
        ("emitted", "i4"),
        ("accepted", "i4"),
        ("nodes", "i4"),
        ("token", "i4"),  # the final token
        ("kind", "i1"),  # its place in KINDS
        ("final_p", "f8"),
        ("final_whole", "f8"),  # its probability in the target's whole p, before any rejection; NaN where not known
        ("final_coin", "f8"),
        ("final_margin", "f8"),
        ("final_gap", "f4"),  # the target's raw first less its raw second probability; NaN where not recorded
        ("preceded", "i1"),  # its place in PRECEDED; -1 for a prefill chunk
        ("rule", "i2"),  # its place in Side.names
        ("drafter", "i2"),  # its place in Side.names
        ("forced", "?"),  # whether an outcome or the final token was forced
        ("varies", "?"),  # whether its drafts follow costs, load or other requests too: other ones are to be expected
        ("first_node", "i8"),
        ("first_path", "i8"),
        ("first_output", "i8"),
        ("first_parent", "i8"),
        ("parents", "i4"),
        ("first_fed", "i8"),
        ("fed", "i4"),
    ]
)
# A node of a draft tree.
NODE = {
    "token": "i4",
    "parent": "i2",
    "q": "f4",
    "drawn": "u1",
    "outcome": "u1",
    "p": "f4",
    "p_trial": "f4",
    "q_trial": "f4",
    "accept_prob": "f8",
    "coin": "f8",
    "residual_mass": "f8",
    "prob": "f4",  # the drafter's probability; NaN where it is no model
    "score": "f4",  # the log probability of its path, by which trees are ranked; NaN where not recorded
    "draw_margin": "f8",  # of the drafter's draw; 1 where the node is no draw, NaN where it is not recorded
    "source": "i1",  # who drafted it, by method.SOURCES; -1 where one drafter works alone
    "raw_p": "f4",  # the target's before temperature and rules; NaN where not recorded or not tried
    "gap": "f4",  # the target's raw first less its raw second probability at the parent; NaN as for raw_p
}
# What target and drafter gave at a node whose children were tried, or at the root; no rows where it was not recorded.
PARENT = {
    "node": "i2",  # within the tree; ROOT
    "choice": "i4",  # the likeliest token of p
    "choice_p": "f4",
    "entropy": "f4",  # of p
    "q_entropy": "f4",  # of q; 0 where the children are deterministic
    "top": "i4",  # the target's likeliest token, raw
    "top_p": "f4",
    "top_gap": "f4",  # less the second one's; NaN where not recorded
    "choice_rank": "i4",  # of the target's likeliest token, raw, in the drafter's distribution; 0 outside
    "choice_q": "f4",  # its probability there
    "draft_top": "i4",  # the drafter's likeliest token
    "draft_top_p": "f4",  # 0 where it is no model
}
# A row of the target's features that a drafter's first pass was fed; no rows where they were not recorded.
NORMS = ("norm_1", "norm_2", "norm_3", "norm_4")  # of as many aux layers; NaN where there are fewer
FED = {"position": "i4", **dict.fromkeys(NORMS, "f4")}


@dataclass
class SideRequest:
    """A request of a side, and where its rows are."""

    id: str
    capture: int  # its place in Side.captures
    info: RequestInfo | None
    reason: FinishReason | None  # None where it did not end in the capture
    first: int = 0  # its first row in `steps`
    count: int = 0  # its rows
    preempted: int | None = 0  # how many times; None where the capture does not tell
    length: int | None = None  # tokens of its output, as its end has it; None where it did not end in the capture
    whole: bool = True  # False: some of its steps are not in the capture


@dataclass
class Capture:
    """A file of a side."""

    source: str
    run: RunInfo | None
    warnings: list[str] = field(default_factory=list)
    engine_steps: int = 0


@dataclass
class Side:
    """All captures of one side."""

    captures: list[Capture]
    requests: list[SideRequest]
    names: list[str]  # of rules and drafters
    steps: NDArray[Any]  # STEP
    nodes: dict[str, NDArray[Any]]  # by the names of NODE
    parents: dict[str, NDArray[Any]]  # by the names of PARENT
    fed: dict[str, NDArray[Any]]  # by the names of FED
    path: Ints  # accepted nodes of each step, within its tree
    output: Ints  # output tokens, step by step
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def runs(self) -> list[RunInfo]:
        """The headers of its captures, where they have one."""
        return [capture.run for capture in self.captures if capture.run is not None]

    @property
    def tells_tokens(self) -> bool:
        """Whether all of its runs were recorded with their token ids."""
        return all(run.tells_tokens for run in self.runs)

    @cached_property
    def node_step(self) -> Longs:
        """[N] the row in `steps` of each node."""
        return np.repeat(np.arange(len(self.steps)), self.steps["nodes"])

    @cached_property
    def looped(self) -> Longs:
        """[S] how many of each step's output tokens lie in loops."""
        request, index = self.steps["request"], self.steps["index"]
        begins = (np.diff(request, prepend=-1) != 0) | (np.diff(index, prepend=0) > 1)
        emitted = self.steps["emitted"].astype(np.int64)
        return step_sums(in_loops(self.output, np.repeat(np.cumsum(begins), emitted)), emitted)

    @cached_property
    def parent_step(self) -> Longs:
        """[K] the row in `steps` of each of the parents."""
        return np.repeat(np.arange(len(self.steps)), self.steps["parents"])

    @cached_property
    def fed_step(self) -> Longs:
        """[F] the row in `steps` of each row that was fed."""
        return np.repeat(np.arange(len(self.steps)), self.steps["fed"])

    @cached_property
    def above(self) -> Longs:
        """[N] each node's parent as a node of the side; -1 for the root."""
        parent = self.nodes["parent"].astype(np.int64)
        return np.where(parent == ROOT, -1, parent + self.steps["first_node"][self.node_step])

    @cached_property
    def depth(self) -> Ints:
        """[N] depth of each node, the root's children at 1."""
        return levels(self.above).astype(np.int32)

    @cached_property
    def sibling(self) -> Ints:
        """[N] rank of each node among its siblings, in draw order, from 0."""
        return siblings(np.where(self.above < 0, -1 - self.node_step, self.above))

    @cached_property
    def tree_depth(self) -> Ints:
        """[S] levels of each step's tree."""
        deepest = np.zeros(len(self.steps), np.int32)
        np.maximum.at(deepest, self.node_step, self.depth)
        return deepest

    @cached_property
    def place(self) -> Longs:
        """[S] output tokens of the request before each step."""
        firsts = np.array([request.first for request in self.requests], np.int64)
        begin = self.steps["first_output"]
        return begin - begin[firsts[self.steps["request"]]] if len(begin) else begin.astype(np.int64)

    @cached_property
    def tried(self) -> Bools:
        """[N] whether a node was tried."""
        tried: Bools = self.nodes["outcome"] != Outcome.UNTRIED
        return tried

    @cached_property
    def has_coins(self) -> bool:
        """Whether the coins are recorded: a recorded coin is never 0."""
        return bool((self.nodes["coin"][self.tried] if self.tried.any() else self.steps["final_coin"]).any())

    @cached_property
    def has_p(self) -> bool:
        """Whether the target's probabilities are recorded: that of a final token is never 0."""
        return bool(self.steps["final_p"].any())

    def rows(self, request: SideRequest) -> slice:
        """The rows of a request in `steps`."""
        return slice(request.first, request.first + request.count)

    def tokens(self, request: SideRequest) -> Ints:
        """The output of a request."""
        if not request.count:
            return self.output[:0]
        last = self.steps[request.first + request.count - 1]
        begin = self.steps["first_output"][request.first]
        return self.output[begin : last["first_output"] + last["emitted"]]

    def dtype(self, request: SideRequest) -> str:
        """Of the target that ran it, "" where it is not known."""
        run = self.captures[request.capture].run
        return "" if run is None else run.dtype

    def decode_steps(self, request: SideRequest) -> list[RequestStep]:
        """A request's steps with a verdict."""
        rows = self.rows(request)
        return [self.part(row) for row in range(rows.start, rows.stop) if self.steps["judged"][row]]

    def part(self, row: int) -> RequestStep:
        """A row of `steps` as a record again; of its parents' likeliest tokens, only the first is there."""
        step = self.steps[row]
        span = slice(int(step["first_node"]), int(step["first_node"] + step["nodes"]))
        mine = {name: values[span] for name, values in self.nodes.items()}
        tree = DraftTree(mine["token"], mine["parent"].astype(np.int32), mine["q"], mine["drawn"])
        begin = int(step["first_path"])
        arrays: dict[str, Any] = {name: mine[name] for name in _VERDICT}
        verdict = Verdict(
            **arrays,
            path=self.path[begin : begin + int(step["accepted"])],
            token=int(step["token"]),
            kind=KINDS[step["kind"]],
            final_p=float(step["final_p"]),
            final_coin=float(step["final_coin"]),
            final_margin=float(step["final_margin"]),
            rule=self.names[step["rule"]],
        )
        return RequestStep(
            request=self.requests[step["request"]].id,
            index=int(step["index"]),
            context_len=int(step["context"]),
            prefill_tokens=int(step["prefill"]),
            drafter=self.names[step["drafter"]],
            tree=tree,
            verdict=verdict if step["judged"] else None,
            emitted=int(step["emitted"]),
            preceded=None if step["preceded"] < 0 else PRECEDED[step["preceded"]],
            notes=_notes(mine),
            method=MethodNotes(source=mine["source"].astype(np.int32)) if (mine["source"] >= 0).any() else None,
            parents=self._parents_of(row, mine["raw_p"]),
        )

    def _parents_of(self, row: int, raw_p: NDArray[Any]) -> ParentNotes | None:
        """What target and drafter gave at the parents of a step; None where that was not recorded."""
        first, count = int(self.steps["first_parent"][row]), int(self.steps["parents"][row])
        if not count:
            return None
        mine = {name: values[first : first + count] for name, values in self.parents.items()}
        n, nothing = len(raw_p), np.zeros(count, np.float32)
        return ParentNotes(
            node=mine["node"].astype(np.int32),
            **{name: mine[name][:, None] for name in ("top", "top_p", "draft_top", "draft_top_p")},
            **{name: mine[name] for name in ("choice", "choice_p", "entropy", "q_entropy", "choice_rank", "choice_q")},
            varentropy=nothing,
            q_varentropy=nothing,
            outside=nothing,
            raw_p=np.nan_to_num(raw_p),
            rank=np.zeros(n, np.int32),
            q_rank=np.zeros(n, np.int32),
            final_entropy=float("nan"),
            final_varentropy=float("nan"),
            final_target_p=float("nan"),
        )


def _notes(nodes: Mapping[str, NDArray[Any]]) -> DraftNotes | None:
    """The drafter's probability and score of its nodes; None where it is no model."""
    if not len(nodes["prob"]) or np.isnan(nodes["prob"]).all():
        return None
    none = np.zeros(0, np.int32)
    return DraftNotes(nodes["prob"], nodes["score"], none, none, np.zeros(0, np.float32))


_VERDICT = ("outcome", "p", "p_trial", "q_trial", "accept_prob", "coin", "residual_mass")


def number_rows(steps: NDArray[Any]) -> None:
    """Set where the rows of each step begin, all rows lying in the order of the steps."""
    for first, count in (
        ("first_node", "nodes"),
        ("first_path", "accepted"),
        ("first_output", "emitted"),
        ("first_parent", "parents"),
        ("first_fed", "fed"),
    ):
        steps[first] = np.cumsum(steps[count], dtype=np.int64) - steps[count]


def joined(sides: Sequence[Side]) -> Side:
    """Several captures as one side."""
    if len(sides) == 1:
        return sides[0]
    names = list(dict.fromkeys(name for side in sides for name in side.names))
    vocabulary = Vocabulary()
    captures: list[Capture] = []
    requests: list[SideRequest] = []
    parts = []
    count = 0
    for side in sides:
        part = side.steps.copy()
        renamed = np.array([names.index(name) for name in side.names] or [0], "i2")
        part["rule"], part["drafter"] = renamed[part["rule"]], renamed[part["drafter"]]
        part["request"] += len(requests)
        parts.append(part)
        moved = {"capture": len(captures), "first": count}
        for request in side.requests:
            shifted = {name: getattr(request, name) + by for name, by in moved.items()}
            requests += [dataclasses.replace(request, **shifted)]
        captures += side.captures
        count += len(part)
        vocabulary.pieces.update(side.vocabulary.pieces)
        vocabulary.special.update(side.vocabulary.special)
    steps = np.concatenate(parts)
    number_rows(steps)
    return Side(
        captures,
        requests,
        names,
        steps,
        {name: np.concatenate([side.nodes[name] for side in sides]) for name in NODE},
        {name: np.concatenate([side.parents[name] for side in sides]) for name in PARENT},
        {name: np.concatenate([side.fed[name] for side in sides]) for name in FED},
        np.concatenate([side.path for side in sides]),
        np.concatenate([side.output for side in sides]),
        vocabulary,
    )
