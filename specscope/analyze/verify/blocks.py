"""KV blocks from step to step: who writes to which, as each step records it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from specscope.analyze.findings import Check, CheckResult, Reference
from specscope.trace.history.history import History

LACKING = "the capture does not tell which blocks were written"
UNIT = "request step"  # prefill chunks among them, numbered as `evidence.visits.visits` gives them
Looked = Iterator[tuple[int, Reference, str]]  # number, where it is, and what is wrong there: "" for nothing


def blocks_shared(history: History) -> Check:
    """In one step no block is written by two requests."""
    return _check("blocks written", "no block is written by two requests in one step", history, _twice(history))


def _twice(history: History) -> Looked:
    number = -1
    for record in history.steps:
        owner: dict[int, str] = {}
        for part in record.requests:
            number += 1
            shared = [block for block in part.blocks.tolist() if owner.setdefault(block, part.request) != part.request]
            if len(part.blocks):
                where = Reference(part.request, part.index, record.step)
                yield number, where, f"block {shared[0]} is written by {owner[shared[0]]} too" if shared else ""


def blocks_kept(history: History) -> Check:
    """A request's tokens stay in the blocks that they were written to, and nobody else writes there."""
    about = "a request's blocks stay its own, in their order, until it ends or is preempted"
    return _check("blocks kept", about, history, _moved_or_taken(history))


def _moved_or_taken(history: History) -> Looked:
    number = -1
    size = history.run.block_size if history.run is not None else 0
    tables: dict[str, _Table] = {}
    owner: dict[int, str] = {}  # of each block in them
    gap = False  # something of the step before is not in the file
    for record in history.steps if size else ():
        if record.after is not None or record.rewound or gap or record.absent is not None:
            tables, owner = {}, {}  # which block holds what is no longer known
        gap = record.absent is not None
        parts = list(record.requests)
        here = {part.request for part in parts}
        for name in (*record.preempted, *(end.info.id for end in record.finished if end.info.id not in here)):
            _release(tables.pop(name, _Table()).block, owner)
        for part in parts:
            number += 1
            blocks = part.blocks.tolist()
            first, table = part.context_len // size, tables.setdefault(part.request, _Table())
            behind = table.cut(first)
            if blocks:
                problem = _problem(part.request, blocks, first, behind, table, owner)
                yield number, Reference(part.request, part.index, record.step), problem
            committed = part.position + len(part.tokens())
            _release(behind.values(), owner)
            held = blocks[: max(-(-committed // size) - first, 0)]
            table.extend(first, held)
            owner.update((block, part.request) for block in held)
        for end in record.finished:
            _release(tables.pop(end.info.id, _Table()).block, owner)


@dataclass(frozen=True)
class _Table:
    """A request's blocks with committed tokens, and which entries of its block table they are: some are not known."""

    entry: list[int] = field(default_factory=list)  # rising
    block: list[int] = field(default_factory=list)  # of each

    def cut(self, first: int) -> dict[int, int]:
        """Take out the entries from `first` on, and return their blocks by entry."""
        start = bisect_left(self.entry, first)
        behind = dict(zip(self.entry[start:], self.block[start:], strict=True))
        del self.entry[start:], self.block[start:]
        return behind

    def extend(self, first: int, blocks: list[int]) -> None:
        """Append blocks, the first at entry `first`."""
        self.entry.extend(range(first, first + len(blocks)))
        self.block.extend(blocks)


def _problem(
    request: str, blocks: list[int], first: int, behind: dict[int, int], table: _Table, owner: dict[int, str]
) -> str:
    """`behind`: what the table held from entry `first` on; `table`: what it holds before."""
    for entry, block in enumerate(blocks, first):
        if owner.get(block, request) != request:
            return f"writes to block {block}, which holds tokens of {owner[block]}"
        if behind.get(entry, block) != block:
            return f"entry {entry} of its block table is block {behind[entry]}, but it writes to block {block}"
        if block in table.block:
            return f"block {block} is in its table twice"
    return "" if len(set(blocks)) == len(blocks) else "a block is in its table twice"


def _release(blocks: Iterable[int], owner: dict[int, str]) -> None:
    for block in blocks:
        owner.pop(block, None)


def _check(name: str, about: str, history: History, looked: Looked) -> Check:
    tested, example, detail = 0, None, ""
    wrong: list[int] = []
    for number, where, problem in looked:
        tested += 1
        if problem:
            wrong.append(number)
            if example is None:
                example, detail = where, problem
    if not tested:
        return Check(name, CheckResult.SKIPPED, about, note=LACKING, unit=UNIT)
    result = CheckResult.FAILED if wrong else CheckResult.PASSED
    numbers = np.array(wrong, np.int64)
    return Check(name, result, about, tested, len(wrong), example, detail, unit=UNIT, wrong=numbers)
