"""Which requests hold the blocks of the KV cache. Records say how many each request holds, not where they lie."""

from __future__ import annotations

from specscope.trace.record.records import StepRecord
from specscope.tui.text import Ink, Line, clean, line_width

OWNERS: tuple[Ink, ...] = ("accepted", "bonus", "recovered", "target", "accent", "warn")
ROWS = 3  # at most


def held(record: StepRecord, block_size: int) -> list[tuple[str, int]]:
    """Blocks of each request of the step's batch, by what it has computed when the step is over."""
    blocks, gone = [], {end.info.id for end in record.finished}  # requests that have ended hold none
    for part in record.requests:
        if part.request in gone:
            continue
        computed = part.context_len + part.prefill_tokens
        if part.verdict is not None:
            computed += 1 + part.verdict.accepted
        blocks.append((part.request, -(-computed // block_size)))
    return blocks


def kv_map(record: StepRecord, block_size: int, width: int) -> list[Line]:
    """One cell per block, or per several where there are many; then the legend."""
    total = record.blocks_used + record.blocks_free
    mine = held(record, block_size)
    ahead = record.blocks_used - sum(count for _, count in mine)
    per = max(1, -(-total // (width * ROWS)))
    cells: list[tuple[str, Ink]] = []
    owners = [*((name, count, OWNERS[i % len(OWNERS)]) for i, (name, count) in enumerate(mine))]
    if ahead > 0:  # room for drafts, and requests outside the batch
        owners.append(("drafts and others", ahead, "dim"))
    room = -(-total // per)  # requests may claim more blocks than there are
    for _, count, ink in owners:
        cells += [("■", ink)] * min(-(-count // per), room - len(cells))
    cached = min(-(-record.blocks_cached // per), room - len(cells))  # free, but a prefix may be found there
    cells += [("▫", "dim")] * cached
    cells += [("·", "rail")] * (room - len(cells))
    lines: list[Line] = [_joined(cells[first : first + width]) for first in range(0, len(cells), width)]
    legend: list[tuple[str, Ink]] = []
    for name, count, ink in owners:
        entry: list[tuple[str, Ink]] = [("■ ", ink), (f"{clean(name)} {count:,}  ", "dim")]
        if line_width([*legend, *entry]) > width - 24:
            legend.append(("…  ", "dim"))
            break
        legend += entry
    if cached:
        legend += [("▫ ", "dim"), (f"cached {record.blocks_cached:,}  ", "dim")]
    scale = f"a cell: {per} blocks" if per > 1 else f"blocks of {block_size} tokens"
    return [*lines, [*legend, (scale, "faint")]]


def _joined(cells: list[tuple[str, Ink]]) -> Line:
    """Neighbouring cells of one ink joined into one piece."""
    line: list[tuple[str, Ink]] = []
    for text, ink in cells:
        if line and line[-1][1] == ink:
            line[-1] = (line[-1][0] + text, ink)
        else:
            line.append((text, ink))
    return line
