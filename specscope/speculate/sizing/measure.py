"""What a step and a drafting pass take here: measured once, on made-up requests, before an engine serves any.

Sizes are run in turn, round by round, so that other load on the machine meets all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from specscope.model.batch import Segment
from specscope.model.kv_cache import BLOCK_SIZE, BlockTable, OutOfBlocksError
from specscope.model.runner import ModelRunner
from specscope.speculate.drafters.base import Context, Draft, Drafter
from specscope.speculate.sizing.budget import Budget
from specscope.speculate.verify.verifier import Verifier
from specscope.trace.costs import CostPoint, Costs, rising
from specscope.trace.plan import DynamicPlan
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import DraftTree
from specscope.user_cache import Others, is_quiet, usual

CONTEXT, LESS = 128, 19  # tokens of the first made-up request, and by how many each further one is shorter
PENDING = 2  # tokens of each that a draft finds committed since the last one
ROWS = (1, 2, 3, 5, 9, 17, 33, 65)  # of one request's steps
BATCH = 4  # requests of the drafts that show what a further one adds; the steps are of 1, 4, 16, 64
MOST, NODES = 64, 128  # requests and nodes of a step: what larger ones take follows from those
ROUNDS, WARM = 9, 1  # of each size; those that do not count
LEAST, SECONDS = 3, 4.0  # rounds, and after how long no more than these are run
GREEDY = SamplingParams()
DEPTHS = (1, 3)  # of the searches
Figures = dict[tuple[int, int], list[float]]
NAME = "\0costs{}"  # of a made-up request; nobody's can be called so


class Bench:
    """A target, its drafter and made-up requests over both."""

    def __init__(
        self, runner: ModelRunner, drafter: Drafter, verifier: Verifier, plan: DynamicPlan, max_requests: int
    ) -> None:
        """`max_requests`: how many the engine runs at once."""
        self.runner, self.drafter, self.verifier, self.plan = runner, drafter, verifier, plan
        self.batch = max(min(BATCH, max_requests), 1)
        self.vocab_size = runner.loaded.vocab_size
        self.sizes = batches(
            max(fitting(runner, max_requests), self.batch)
        )  # requests of the steps that more than one has
        count = max((1, *self.sizes))
        self.lengths = [CONTEXT - LESS * (r % BATCH) for r in range(count)]  # of what the target has of each
        self.tokens = [[self._token(i, r) for i in range(length)] for r, length in enumerate(self.lengths)]
        self.tables = [BlockTable() for _ in range(count)]
        self.right = [0] * count  # the target's own next token of each: a draft that it accepts
        self.together = [(size + nodes, size) for size in self.sizes for nodes in trees_of(size)]  # rows, requests
        self.features: list[Tensor] = []  # of the last tokens of each, where the drafter is fed them

    def _token(self, place: int, request: int) -> int:
        return (7919 * place + 104729 * request + 3) % self.vocab_size

    @contextmanager
    def requests(self) -> Iterator[None]:
        """The requests in both caches, for as long as it lasts. Raises OutOfBlocksError."""
        try:
            for r, (table, tokens) in enumerate(zip(self.tables, self.tokens, strict=True)):
                self.runner.cache.reserve(table, CONTEXT + max(ROWS), 0)
                for start, features in self.runner.compute(table, tokens):
                    if features is not None and r < self.batch:
                        self.drafter.observe(NAME.format(r), start, features, tokens)
                        self.features = [*self.features[:r], features[-PENDING:]]
            rows = self.runner.forward([self._segment(r, DraftTree.empty()) for r in range(len(self.tables))])
            self.right = [int(row[-1].argmax()) for row in rows]
            yield
        finally:
            for r, table in enumerate(self.tables):
                self.runner.cache.truncate(table, 0)
                self.drafter.release(NAME.format(r))

    def step(self, rows: int, batch: int) -> float:
        """Seconds of a step of `batch` requests with `rows` rows in all: forward and verification.

        As in a run no two trees are alike, and the first node of each is accepted.
        """
        trees = [self._tree(r, count) for r, count in enumerate(uneven(rows - batch, batch))]
        start = time.perf_counter()
        logits = self.runner.forward([self._segment(r, tree) for r, tree in enumerate(trees)])
        contexts = [self._context(r) for r in range(batch)]
        asked = [(c, Draft(tree), row) for c, tree, row in zip(contexts, trees, logits, strict=True)]
        self.verifier.verify(asked)
        return time.perf_counter() - start

    def _tree(self, request: int, nodes: int) -> DraftTree:
        tokens = [self.right[request], *(self._token(i, 9) for i in range(1, nodes))][:nodes]
        return DraftTree.build(tokens, list(range(-1, nodes - 1)))

    def _segment(self, request: int, tree: DraftTree) -> Segment:
        root = self.lengths[request] - 1
        return Segment.of_tree(self.tables[request], root, [self.tokens[request][root]], tree, logits=True)

    def draft(self, depth: int, batch: int) -> float:
        """Seconds of drafting for `batch` requests, so many levels deep, after some more tokens of each."""
        for r in range(batch):
            tokens = self.tokens[r]
            tokens += [self._token(len(tokens) + i, r) for i in range(PENDING)]
            if self.drafter.aux_layers:
                self.drafter.observe(NAME.format(r), len(tokens) - 1 - PENDING, self.features[r], tokens)
        contexts = [self._context(r, Budget.whole(depth, self.plan.max_nodes)) for r in range(batch)]
        self.step(batch, batch)  # as in a run, the target's weights have driven the drafter's out of the caches
        start = time.perf_counter()
        self.drafter.propose(contexts)
        return time.perf_counter() - start

    def _context(self, request: int, budget: Budget | None = None) -> Context:
        return Context(NAME.format(request), self.tokens[request], 1, GREEDY, budget)

    def rounds(self) -> tuple[Figures, Figures]:
        """Seconds of steps by (rows, batch), and of drafting by (depth, batch)."""
        steps: Figures = {key: [] for key in (*((rows, 1) for rows in ROWS), *self.together)}
        drafts: Figures = {(depth, batch): [] for depth in DEPTHS for batch in {1, self.batch}}
        begin = time.monotonic()
        for number in range(WARM + ROUNDS):
            if number >= WARM + LEAST and time.monotonic() - begin > SECONDS:
                break
            for figures, run in ((steps, self.step), (drafts, self.draft)):
                for key in list(figures)[:: 1 if number % 2 else -1]:
                    seconds = run(*key)
                    if number >= WARM:
                        figures[key].append(seconds)
        return steps, drafts


def measure(bench: Bench, about: Mapping[str, str], progress: Callable[[str], None]) -> Costs | None:
    """The costs of an engine; None where its KV cache is too small to measure them."""
    progress("measuring once what a step costs on this machine")
    neighbours = Others()
    try:
        with bench.requests():
            steps, drafts = bench.rounds()
    except OutOfBlocksError:
        return None
    batch, others, top = bench.batch, max(bench.batch - 1, 1), bench.plan.top
    curves: list[tuple[CostPoint, ...]] = []
    for size in bench.sizes:
        least = curves[-1][0].seconds if curves else usual(steps[1, 1])
        curves.append(_curve(size, {rows: steps[rows, size] for rows, of in steps if of == size}, least))
    alone = {rows: seconds for (rows, size), seconds in steps.items() if size == 1}
    later = {top * size: _later(drafts, size) for size in sorted({1, batch})}
    first = [_point(1, drafts[1, 1])]
    if batch > 1:
        added = (batch - 1) * _further(drafts[1, batch], drafts[1, 1], others)
        first.append(replace(_point(batch, drafts[1, batch]), seconds=rounded(first[0].seconds + added)))
    return Costs(
        about=dict(about),
        steps=(rising([_point(rows, seconds) for rows, seconds in alone.items()]), *curves),
        first=tuple(first),
        passes=rising([_point(rows, seconds) for rows, seconds in later.items()]),
        quiet=is_quiet(steps.values(), neighbours.busy(), torch.get_num_threads()),
    )


def fitting(runner: ModelRunner, max_requests: int) -> int:
    """Requests that are made up: as many as the engine runs at once, MOST, or as many as its KV cache holds."""
    return min(max_requests, MOST, runner.cache.pool.free * BLOCK_SIZE // (CONTEXT + max(ROWS) + BLOCK_SIZE))


def batches(max_requests: int) -> list[int]:
    """Batch sizes up to `max_requests`: 4, 16, 64, ... and `max_requests` itself."""
    sizes = [BATCH**n for n in range(1, max_requests.bit_length()) if 2 * BATCH**n <= max_requests]
    return [*sizes, max_requests] if max_requests > 1 else []


def trees_of(batch: int) -> list[int]:
    """Nodes in all of the steps of a batch: none, the first, a few as most such steps have, and many."""
    return sorted({0, 1, max(batch // 4, 2), batch, 2 * batch, min(4 * batch, NODES)})


def uneven(nodes: int, batch: int) -> list[int]:
    """So many nodes over a batch: three times as many for every other request, or as near as whole ones are."""
    weights = np.cumsum([1 if r % 2 else 3 for r in range(batch)])
    ends = np.rint(nodes * weights / weights[-1]).astype(int)
    return [int(count) for count in np.diff(ends, prepend=0)]


def _curve(batch: int, steps: Mapping[int, list[float]], least: float) -> tuple[CostPoint, ...]:
    """Steps of one batch by rows: what its trees add, round by round, to its step without any.

    `least`: what a smaller batch takes, as this one cannot take less.
    """
    plain = _point(batch, steps[batch])
    plain = replace(plain, seconds=rounded(max(plain.seconds, least)))
    return rising([
        plain,
        *(
            CostPoint(rows, rounded(plain.seconds + _further(seconds, steps[batch], 1)), min(seconds), max(seconds))
            for rows, seconds in steps.items()
            if rows > batch
        ),
    ])  # fmt: skip


def _further(together: Sequence[float], alone: Sequence[float], others: int) -> float:
    """Seconds that each of the other requests adds to what one takes alone.

    The median over rounds: what slows the machine for a while slows both alike, and falls out of their difference.
    """
    added = median(both - base for both, base in zip(together, alone, strict=True))
    return rounded(max(added, 0.0) / others)


def _later(drafts: Figures, batch: int) -> list[float]:
    """Seconds of a pass after the first: what a deeper search took beyond the shallowest, by pass."""
    shallow, deep = DEPTHS
    pairs = zip(drafts[shallow, batch], drafts[deep, batch], strict=True)
    return [max(b - a, 1e-6) / (deep - shallow) for a, b in pairs]


def _point(rows: int, seconds: list[float]) -> CostPoint:
    return CostPoint(rows, rounded(usual(seconds)), rounded(min(seconds)), rounded(max(seconds)))


def rounded(seconds: float) -> float:
    """To a tenth of a microsecond."""
    return round(seconds, 7)
