"""The engine over time: step times by phase, batch, queue and KV, up to the position; and who holds the KV's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from statistics import median

from textual.app import ComposeResult

from specscope.trace.history.wording import plural
from specscope.trace.record.aggregate import LeftOut
from specscope.trace.record.records import StepRecord
from specscope.tui.keys import foot
from specscope.tui.look import Look
from specscope.tui.screens.over import Over, close
from specscope.tui.text import NOTHING, Ink, Line, bar, blocks, clean, joined, left, line_width, percent, right
from specscope.tui.widgets.lines import Panel, Sheet
from specscope.tui.widgets.rates import undrafted_lines

NAME, NUMBER, MOST = 12, 10, 12
OTHER_LINES = 4  # of the screen, beside tables and curves
HIGHEST, WIDEST = 8, 12  # cells of a column
Curve = tuple[str, Sequence[float | None], str]  # a name, a value for each step or interval, their format
LONGEST = 400  # steps that are looked back at
OWNERS: tuple[Ink, ...] = ("accepted", "bonus", "recovered", "target", "accent", "warn")
KV_ROWS = 3  # at most


class EnginePanel(Panel):
    """Phases as a table, and curves with one column per step."""

    OF = attrgetter("look.position", "look.steps")

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        room = max(min(width - NAME - NUMBER - MOST - 4, LONGEST), 1)
        first = max(look.position + 1 - room, 0)
        known = look.history.steps[first : look.position + 1]
        steps = [step for step in known if step.phases and (step.is_timed or step.requests or step.aggregate)]
        title: Line = [("Engine", "strong")]
        if not steps:
            return Sheet([[("no step has run yet", "faint")]], title)
        if look.aggregate is not None:
            return self._intervals(look, steps, room, height)
        nothing = undrafted_lines(look, width)
        table = [*_phases(steps, width), *([[], *nothing] if nothing else [])]
        size = look.history.run.block_size if look.history.run else 16
        unknown: list[Line] = [[("not in this file: the engine's step is in another trace", "faint")]]
        blocks = kv_map(steps[-1], size, width) if steps[-1].is_timed else unknown
        curves = _values(steps)
        free = height - len(table) - len(blocks) - OTHER_LINES
        gap = 1 if free >= 3 * len(curves) else 0  # between two curves
        high = sum(any(values) for _, values, _ in curves)  # a curve that is always 0 takes one line
        rows = min(max((free - len(curves) * gap - (len(curves) - high)) // max(high, 1), 1), HIGHEST)
        drawn = [line for each in curves for line in [*_curve(*each, rows, room), *[[]] * gap]]
        lines: list[Line] = [
            *table,
            [],
            [(f"up to step {steps[-1].step:,}, one column per step", "faint")],
            *drawn,
            *[[]] * (1 - gap),
            [("KV blocks, by request", "dim")],
            *blocks,
        ]
        preempted = sum(len(s.preempted) for s in steps)
        if preempted:
            lines += [[], [(f"{plural(preempted, 'preemption')} in these steps: those requests lost their KV", "warn")]]
        return Sheet(lines, title)

    def _intervals(self, look: Look, steps: Sequence[StepRecord], room: int, height: int) -> Sheet:
        """For an engine that reports only counts: a curve of each count that it reports."""
        curves = _told_values(steps)
        rows = min(max((height - 3) // max(len(curves), 1) - 1, 1), HIGHEST)
        drawn = [line for each in curves for line in [*_curve(*each, rows, room), []]]
        about = f"up to interval {steps[-1].step:,}, one column each; phases and KV blocks are not reported"
        return Sheet([[(about, "faint")], [], *drawn], [("Engine", "strong")])


def _told_values(steps: Sequence[StepRecord]) -> list[Curve]:
    """As `_values`, from intervals; leaves out what none of them reports."""
    aggregates = [step.aggregate for step in steps if step.aggregate is not None]
    curves: list[Curve] = [
        ("length", [aggregate.length for aggregate in aggregates], "{:.2f}"),
        ("drafts", [aggregate.drafts for aggregate in aggregates], "{:,.0f}"),
        ("tokens", [aggregate.emitted for aggregate in aggregates], "{:,.0f}"),
        ("running", [aggregate.running for aggregate in aggregates], "{:.0f}"),
        ("waiting", [aggregate.waiting for aggregate in aggregates], "{:.0f}"),
        ("KV usage", [aggregate.kv_usage for aggregate in aggregates], "{:.0%}"),
    ]
    return [curve for curve in curves if any(value is not None for value in curve[1])]


def _values(steps: Sequence[StepRecord]) -> list[Curve]:
    """Everything that has a curve."""
    counted = [(step, step.left_out or LeftOut()) for step in steps]  # with what trace sampling took out
    engine: list[Curve] = [
        ("running", [float(s.running) for s in steps], "{:.0f}"),
        ("waiting", [float(s.waiting) for s in steps], "{:.0f}"),
        ("KV blocks", [float(s.blocks_used) for s in steps], "{:,.0f}"),
    ]
    return [
        ("step", [(s.end_ns - s.start_ns) / 1e6 for s in steps], "{:.1f} ms"),
        *(engine if all(s.is_timed for s in steps) else []),
        ("tokens", [float(sum(p.emitted for p in s.requests) + left.emitted) for s, left in counted], "{:.0f}"),
        ("nodes", [float(sum(len(p.tree) for p in s.requests) + left.drafted) for s, left in counted], "{:.0f}"),
    ]


def _phases(steps: Sequence[StepRecord], width: int) -> list[Line]:
    """One line per phase, with the drafter's passes: median time, and share of the total."""
    times: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    for step in steps:
        for into, phases in ((times, step.phases), (passes, step.passes)):
            for phase in phases:
                into.setdefault(phase.name, []).append((phase.end_ns - phase.start_ns) / 1e6)
    whole = sum(map(sum, times.values())) or 1.0
    rows = [each for name in times for each in (name, *(passes if name == "draft" else ()))]
    on_device = _on_device(steps)
    room = max(width - NAME - (3 if on_device else 2) * NUMBER, 4)
    head = left("phase", NAME) + right("median", NUMBER) + (right("on device", NUMBER) if on_device else "")
    lines: list[Line] = [[(head + right("share", NUMBER), "faint")]]
    for name in rows:
        ms, dim = times.get(name) or passes[name], name not in times
        share = sum(ms) / whole
        label = left(("  " if dim else "") + clean(name), NAME)
        numbers = right(f"{median(ms):.2f} ms", NUMBER)
        if on_device:
            numbers += right(f"{on_device[name]:.2f} ms" if name in on_device else "", NUMBER)
        numbers += right(percent(share), NUMBER - 1) + " "
        ink: Ink = "faint" if dim else "text"
        lines.append([(label, ink), (numbers, ink), (bar(share, room), "rail" if dim else "bar")])
    return lines


def _on_device(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Median milliseconds of each phase on a GPU; empty without one. A record holds those of the step before it."""
    timed = [step for step in steps if len(step.device_ns) == len(step.phases)]
    names = [phase.name for phase in timed[0].phases] if timed else []
    return {name: median(step.device_ns[i] for step in timed) / 1e6 for i, name in enumerate(names)}


def _curve(name: str, values: Sequence[float | None], form: str, rows: int, room: int) -> list[Line]:
    """Columns `rows` high in `room` cells, with the newest value on the left and the highest on the right."""
    known, newest = [value or 0.0 for value in values], NOTHING if values[-1] is None else form.format(values[-1])
    top, span = max(known), min(room, WIDEST * len(values))
    rows = rows if top > 0 else 1
    marks = blocks([0 if top <= 0 or v <= 0 else max(1, round(v / top * rows * 8)) for v in known], rows, span)
    lines: list[Line] = []
    for row, mark in enumerate(marks):
        label, number = (name, newest) if row == rows - 1 else ("", "")
        highest = f"max {form.format(top)}" if row == 0 and top > 0 else ""
        lead: Line = [(left(label, NAME), "text"), (right(number, NUMBER), "strong"), ("  ", "text")]
        lines.append([*lead, (left(mark, room), "bar"), (right(highest, MOST + 2), "faint")])
    return lines


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
    per = max(1, -(-total // (width * KV_ROWS)))
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
    lines: list[Line] = [joined(cells[first : first + width]) for first in range(0, len(cells), width)]
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


class EngineScreen(Over):
    KEYS = (*foot(pause=0, move=1, jump=4, go_to=3, debug=5, help=6), close(2, "escape,q,v"))

    def parts(self) -> ComposeResult:
        yield EnginePanel("engine")
