"""KV blocks from step to step: who writes to which, as each step tells."""

from __future__ import annotations

from collections.abc import Iterator

from specscope.analyze.findings import Check, Reference, Result
from specscope.trace.history import History

LACKING = "the capture does not tell which blocks were written"


def blocks_shared(history: History) -> Check:
    """In one step no block is written by two requests."""
    return _check("blocks written", "no block is written by two requests in one step", history, _twice(history))


def _twice(history: History) -> Iterator[tuple[Reference, str]]:
    for record in history.steps:
        owner: dict[int, str] = {}
        for part in record.requests:
            shared = [block for block in part.blocks.tolist() if owner.setdefault(block, part.request) != part.request]
            if len(part.blocks):
                where = Reference(part.request, part.index, record.step)
                yield where, f"block {shared[0]} is written by {owner[shared[0]]} too" if shared else ""


def blocks_kept(history: History) -> Check:
    """A request's tokens stay in the blocks that they were written to, and nobody else writes there."""
    about = "a request's blocks stay its own, in their order, until it ends or is preempted"
    return _check("blocks kept", about, history, _moved_or_taken(history))


def _moved_or_taken(history: History) -> Iterator[tuple[Reference, str]]:
    size = history.run.block_size if history.run is not None else 0
    tables: dict[str, list[int]] = {}  # of each request: its blocks with committed tokens, -1 where not known
    owner: dict[int, str] = {}  # of each block in them
    for record in history.steps if size else ():
        if record.after is not None or record.rewound:  # what lies where is not known any more
            tables, owner = {}, {}
        here = {part.request for part in record.requests}
        for name in (*record.preempted, *(end.info.id for end in record.finished if end.info.id not in here)):
            _release(tables.pop(name, []), owner)
        for part in record.requests:
            blocks = part.blocks.tolist()
            first, table = part.context_len // size, tables.setdefault(part.request, [])
            if blocks:
                table += [-1] * (first - len(table))
                problem = _problem(part.request, blocks, first, table, owner)
                yield Reference(part.request, part.index, record.step), problem
            kept = part.position + (0 if part.verdict is None else 1 + part.verdict.accepted)
            _release(table[first:], owner)
            table[first:] = blocks[: max(-(-kept // size) - first, 0)]
            owner.update((block, part.request) for block in table[first:])
        for end in record.finished:
            _release(tables.pop(end.info.id, []), owner)


def _problem(request: str, blocks: list[int], first: int, table: list[int], owner: dict[int, str]) -> str:
    for at, block in enumerate(blocks, first):
        if owner.get(block, request) != request:
            return f"writes to block {block}, which holds tokens of {owner[block]}"
        if at < len(table) and table[at] not in (-1, block):
            return f"entry {at} of its block table is block {table[at]}, but it writes to block {block}"
        if block in table[:first]:
            return f"block {block} is in its table twice"
    return "" if len(set(blocks)) == len(blocks) else "a block is in its table twice"


def _release(blocks: list[int], owner: dict[int, str]) -> None:
    for block in blocks:
        owner.pop(block, None)


def _check(name: str, about: str, history: History, looked: Iterator[tuple[Reference, str]]) -> Check:
    tested, wrong, example, detail = 0, 0, None, ""
    for where, problem in looked:
        tested += 1
        if problem:
            wrong += 1
            if example is None:
                example, detail = where, problem
    if not tested:
        return Check(name, Result.SKIPPED, about, note=LACKING)
    return Check(name, Result.FAILED if wrong else Result.PASSED, about, tested, wrong, example, detail)
